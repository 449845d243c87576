"""What the plan suggests: the cheapest change first, and what offload to the host costs in time."""

from dataclasses import replace

from finetune.plan.advice import advise, list_changes
from finetune.plan.disk import plan_host
from finetune.plan.memory import find_peak, plan_phases
from finetune.plan.table import format_speed
from finetune.plan.time import HOST_BYTES_PER_SECOND, PCIE_BYTES_PER_SECOND, estimate_speed
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, make_spec

GIB = 2**30


def test_smaller_moments_and_a_shorter_row_are_suggested_before_offload() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=1)
    texts = [change.text for change in list_changes(planned)]
    cheap = ["optim=adamw_bf16_moments", "optim=adamw_8bit", "max_length=4096"]
    assert [text for text in texts if text in cheap] == cheap
    assert texts.index("max_length=4096") < texts.index("accelerate_config=fsdp_cpu_offload")
    needed = find_peak(planned).total
    for limit, first in ((needed - GIB, cheap[0]), (needed - 40 * GIB, cheap[1])):
        advice = advise(planned, limit)
        assert advice.changes is not None
        assert [change.text for change in advice.changes] == [first]
        assert advice.peak <= limit


def test_what_fits_with_cheap_changes_together_needs_no_offload() -> None:
    """None of them is enough alone, and offload alone would be; of those taken the dearest are dropped first."""
    planned = make_spec(LLAMA_31_8B, ranks=1, rows=4, max_length=8192)
    everything_cheap = planned
    for change in list_changes(planned):
        if change.text.startswith("accelerate_config"):
            break
        everything_cheap = change.apply(everything_cheap)
    advice = advise(planned, find_peak(everything_cheap).total)
    assert advice.changes is not None
    assert not any("cpu_offload" in change.text or "use_peft" in change.text for change in advice.changes)


def test_the_update_in_the_backward_is_suggested_where_a_step_is_one_micro_batch() -> None:
    text = "optim_in_backward=true max_grad_norm=null"
    planned = make_spec(LLAMA_31_8B, ranks=1)
    change = next(change for change in list_changes(planned) if change.text == text)
    gradients = 4 * planned.architecture.parameters
    without, with_it = find_peak(planned).total, find_peak(change.apply(planned)).total
    assert 0.8 * gradients < without - with_it <= 1.06 * gradients  # the peak was their sum, and is elsewhere now
    for impossible in (
        make_spec(LLAMA_31_8B, ranks=1, global_batch_size=2),
        replace(planned, sharding=replace(FULL_SHARD, layout="ddp")),
        replace(planned, sharding=replace(FULL_SHARD, cpu_offload=True)),
        change.apply(planned),
    ):
        assert all(change.text != text for change in list_changes(impossible))
        assert change.apply(impossible) == impossible


def test_state_on_nvme_is_suggested_before_offload_to_the_host_where_it_works() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=1)
    texts = [change.text for change in list_changes(planned)]
    nvme = next(change for change in list_changes(planned) if change.text.startswith("optim_offload=nvme offload_dir="))
    assert texts.index(nvme.text) < texts.index("accelerate_config=fsdp_cpu_offload")
    state = planned.state()
    assert find_peak(planned).total - find_peak(nvme.apply(planned)).total > state.optimizer / 2
    divided = replace(planned, sharding=replace(FULL_SHARD, tensor_parallel_size=2), ranks=2)
    assert nvme.text in [change.text for change in list_changes(divided)]
    for impossible in (replace(planned, sharding=replace(FULL_SHARD, layout="ddp")), nvme.apply(planned)):
        assert all(not change.text.startswith("optim_offload") for change in list_changes(impossible))


def test_activations_in_host_memory_are_suggested_and_counted_there() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=8, max_length=32768)
    change = next(change for change in list_changes(planned) if change.text == "activation_offload=true")
    offloaded = change.apply(planned)
    layer = 2 * 4096 * 32768  # bytes that a layer keeps: its input in bf16, a power of two
    assert (plan_host(planned).activations, plan_host(offloaded).activations) == (0, 8 * 32 * layer)
    peaks = [{p.name: p.peak for p in plan_phases(spec)}["evaluation"] for spec in (planned, offloaded)]
    assert peaks[0] == peaks[1]
    assert 0 < find_peak(planned).total - find_peak(offloaded).total <= 1.06 * 31 * layer
    unsuited = (replace(FULL_SHARD, activation_checkpointing=False), replace(FULL_SHARD, tensor_parallel_size=2))
    for spec in (offloaded, replace(planned, device="cpu"), *(replace(planned, sharding=each) for each in unsuited)):
        assert all(each.text != change.text for each in list_changes(spec))


def test_offload_is_in_the_time_of_a_step() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=8, global_batch_size=16)
    offloaded = replace(planned, sharding=replace(FULL_SHARD, cpu_offload=True))
    without, with_it = estimate_speed(planned, mfu=0.4), estimate_speed(offloaded, mfu=0.4)
    shard = 4 * planned.architecture.parameters / 8  # bytes of fp32 parameters on a rank
    moved, touched = 2 * (2 * shard + shard), 2 * shard + shard + 2 * 2 * shard  # two micro-batches; two moments
    expected = moved / PCIE_BYTES_PER_SECOND + 8 * touched / HOST_BYTES_PER_SECOND
    assert abs(with_it.offload_seconds - expected) < 1e-3 * expected
    assert with_it.seconds_per_step == without.seconds_per_step + with_it.offload_seconds
    assert with_it.tokens_per_second < without.tokens_per_second
    assert without.offload_seconds == 0 and "offload" not in format_speed(without, 8)
    assert "of a step, " in format_speed(with_it, 8) and "are offload" in format_speed(with_it, 8)
