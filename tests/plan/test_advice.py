"""What the plan suggests: the cheapest change first, and what offload to the host costs in time."""

import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Model, compute_global_batch_size
from finetune.plan.advice import Room, advise, apply_changes, describe_changes, list_changes
from finetune.plan.peaks import find_peak, plan_phases
from finetune.plan.run_spec import plan_host
from finetune.plan.speed import HOST_BYTES_PER_SECOND, PCIE_BYTES_PER_SECOND, estimate_speed
from finetune.plan.table import format_speed
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, LLAMA_31_70B, QWEN3_235B, make_spec

GIB = 2**30


def test_smaller_moments_are_suggested_first_and_a_shorter_row_after_all_that_keeps_what_is_trained() -> (
    None
):
    planned = make_spec(LLAMA_31_8B, ranks=1)
    texts = [change.text for change in list_changes(planned)]
    cheap = ["optim=adamw_bf16_moments", "optim=adamw_8bit", "max_length=4096"]
    assert [text for text in texts if text in cheap] == cheap
    assert (
        texts.index("accelerate_config=fsdp_cpu_offload")
        < texts.index("max_length=4096")
        < texts.index("use_peft=true")
    )
    needed = find_peak(planned).total
    for limit, first in ((needed - GIB, cheap[0]), (needed - 40 * GIB, cheap[1])):
        advice = advise(planned, Room(limit))
        assert advice.changes is not None
        assert [change.text for change in advice.changes] == [first]
        assert advice.after is not None and advice.after.device <= limit


def test_what_fits_with_cheap_changes_together_needs_no_offload() -> None:
    """None of them is enough alone, and offload alone would be; of those taken the dearest are dropped first."""
    planned = make_spec(LLAMA_31_8B, ranks=1, rows=4, max_length=8192)
    cheap = takewhile(
        lambda change: not change.text.startswith("accelerate_config"), list_changes(planned)
    )
    everything_cheap, _ = apply_changes(planned, cheap)
    advice = advise(planned, Room(find_peak(everything_cheap).total))
    assert advice.changes is not None
    assert not any(
        "cpu_offload" in change.text or "use_peft" in change.text for change in advice.changes
    )


def test_the_update_in_the_backward_is_suggested_where_a_step_is_one_micro_batch() -> None:
    text = "optim_in_backward=true max_grad_norm=null"
    planned = make_spec(LLAMA_31_8B, ranks=1)
    change = next(change for change in list_changes(planned) if change.text == text)
    gradients = 4 * planned.architecture.parameters
    without, with_it = find_peak(planned).total, find_peak(change.apply(planned)).total
    assert (
        0.8 * gradients < without - with_it <= 1.06 * gradients
    )  # the peak was their sum, and is elsewhere now
    for impossible in (
        make_spec(LLAMA_31_8B, ranks=1, global_batch_size=2),
        replace(planned, sharding=replace(FULL_SHARD, layout="ddp")),
        replace(planned, sharding=replace(FULL_SHARD, cpu_offload=True)),
        change.apply(planned),
    ):
        assert all(change.text != text for change in list_changes(impossible))


def test_state_on_nvme_is_suggested_before_offload_to_the_host_where_it_works() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=1)
    texts = [change.text for change in list_changes(planned)]
    nvme = next(
        change
        for change in list_changes(planned)
        if change.text.startswith("optim_offload=nvme offload_dir=")
    )
    assert texts.index(nvme.text) < texts.index("accelerate_config=fsdp_cpu_offload")
    state = planned.state()
    assert find_peak(planned).total - find_peak(nvme.apply(planned)).total > state.optimizer / 2
    divided = replace(planned, sharding=replace(FULL_SHARD, tensor_parallel_size=2), ranks=2)
    assert nvme.text in [change.text for change in list_changes(divided)]
    for impossible in (
        replace(planned, sharding=replace(FULL_SHARD, layout="ddp")),
        nvme.apply(planned),
    ):
        assert all(
            not change.text.startswith("optim_offload") for change in list_changes(impossible)
        )


def test_activations_in_host_memory_are_suggested_and_counted_there() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=8, max_length=32768)
    change = next(
        change for change in list_changes(planned) if change.text == "activation_offload=true"
    )
    offloaded = change.apply(planned)
    layer = 2 * 4096 * 32768  # bytes that a layer keeps: its input in bf16, a power of two
    assert (plan_host(planned, 0).activations, plan_host(offloaded, 0).activations) == (
        0,
        8 * 32 * layer,
    )
    peaks = [
        {p.name: p.peak for p in plan_phases(spec)}["evaluation"] for spec in (planned, offloaded)
    ]
    assert peaks[0] == peaks[1]
    assert 0 < find_peak(planned).total - find_peak(offloaded).total <= 1.06 * 31 * layer
    unsuited = (
        replace(FULL_SHARD, activation_checkpointing=False),
        replace(FULL_SHARD, tensor_parallel_size=2),
    )
    for spec in (
        offloaded,
        replace(planned, device="cpu"),
        *(replace(planned, sharding=each) for each in unsuited),
    ):
        assert all(each.text != change.text for each in list_changes(spec))


def test_dividing_experts_is_suggested_where_a_mixture_is_gathered_whole() -> None:
    """Over the most ranks of a node that divide the experts of a layer; not where it is not supported."""
    planned = make_spec(QWEN3_235B, ranks=128)
    change = next(
        change for change in list_changes(planned) if change.text == "expert_parallel_size=8"
    )
    peak, layer = find_peak(planned).total, 3 * 128 * 4096 * 1536  # numbers of its experts
    less = peak - find_peak(change.apply(planned)).total
    assert (
        7 / 8 * 2 * (2 * layer) < less
    )  # in bf16: the layer in use and the gather of the next, or its gradients
    assert [each.text for each in advise(planned, Room(peak - less)).changes or ()] == [change.text]
    assert "use_peft=true load_in_4bit=true" in [each.text for each in list_changes(planned)]
    hybrid, divided = (
        replace(FULL_SHARD, strategy="HYBRID_SHARD"),
        replace(FULL_SHARD, sequence_parallel_size=8),
    )
    for spec, expected in (
        (
            replace(planned, sharding=replace(hybrid, replicate_size=8, shard_size=16)),
            ["expert_parallel_size=8"],
        ),
        (
            replace(planned, sharding=replace(hybrid, replicate_size=32, shard_size=4)),
            ["expert_parallel_size=4"],
        ),
        (change.apply(planned), []),
        (replace(planned, sharding=replace(divided, shard_size=16)), ["expert_parallel_size=8"]),
        (replace(planned, sharding=replace(FULL_SHARD, layout="ddp")), []),
        (replace(planned, sharding=replace(FULL_SHARD, mixed_precision="fp16")), []),
        (make_spec(LLAMA_31_8B, ranks=128), []),
    ):
        texts = [each.text for each in list_changes(spec)]
        assert [text for text in texts if text.startswith("expert_parallel_size")] == expected


def test_rows_and_matrices_are_divided_by_a_file_that_reads_back_as_planned(tmp_path: Path) -> None:
    """Over the ranks of a node; the shipped file for 8 of them is tested with sequence parallelism."""
    for ranks, divisions in (
        (2, ["cp 2", "tp 2"]),
        (12, ["cp 4", "tp 4"]),
        (16, ["cp 8", "tp 8", "cp 16"]),
    ):
        planned = make_spec(LLAMA_31_8B, ranks=ranks, max_length=65536, global_batch_size=48)
        found = [
            change
            for change in list_changes(planned)
            if change.text.startswith("parallelism_config")
        ]
        assert [re.findall(r"([ct]p)_size: (\d+),", change.text) for change in found] == [
            [tuple(each.split())] for each in divisions
        ]
        for change in found:
            file = {"distributed_type": "FSDP", "mixed_precision": "bf16"} | yaml.safe_load(
                change.text
            )
            file["fsdp_config"] = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
            (tmp_path / "file.yaml").write_text(yaml.safe_dump(file))
            read = read_sharding(str(tmp_path / "file.yaml"), None, {"WORLD_SIZE": str(ranks)})
            changed = change.apply(planned)
            assert replace(read, source=FULL_SHARD.source, replicate_size=None) == changed.sharding
            assert changed.global_batch_size == 48
            assert find_peak(changed).total < find_peak(planned).total


def test_what_is_suggested_together_is_supported_together() -> None:
    """Changes that keep each other out, such as offloaded activations and divided rows, are tried in turns: no example is cut
    where dividing rows comes first."""
    planned = make_spec(LLAMA_31_70B, ranks=16, max_length=262_144, global_batch_size=16)
    advice = advise(planned, Room(120 * GIB))
    assert advice.changes is not None
    texts = [change.text for change in advice.changes]
    assert any("cp_size: 8" in text for text in texts) and not any(
        "max_length" in text for text in texts
    )
    changed, left_out = apply_changes(planned, advice.changes)
    assert (
        advice.after is not None
        and not left_out
        and find_peak(changed).total == advice.after.device <= 120 * GIB
    )
    assert {problem.rule for problem in changed.find_problems()} <= {
        problem.rule for problem in planned.find_problems()
    }
    together = [
        change
        for change in list_changes(planned)
        if change.text.startswith(("optim_in_backward", "optim_offload"))
    ]
    assert [change.text.split("=")[0] for change in apply_changes(planned, together)[1]] == [
        "optim_offload"
    ]


def test_a_change_that_the_host_has_no_memory_for_is_not_suggested() -> None:
    """Offload to the host takes 211 GiB of it: with less, moments in files or in fewer bits too, or adapters."""
    planned, text = make_spec(LLAMA_31_8B, ranks=1), "accelerate_config=fsdp_cpu_offload"
    for host, expected in (
        (None, [text]),
        (212, [text]),
        (128, [text, "optim_offload=nvme"]),
        (32, ["use_peft=true"]),
    ):
        room = Room(24 * GIB, None if host is None else host * GIB)
        advice = advise(planned, room)
        assert advice.changes is not None and advice.after is not None and advice.after.fits(room)
        assert {change.text.split()[0] for change in advice.changes} == set(expected)
    assert (
        not advise(planned, Room(200 * GIB, 2 * GIB)).fits and advise(planned, Room(200 * GIB)).fits
    )
    full = advise(planned, Room(200 * GIB, 512 * GIB, 100 * GIB))
    assert not full.fits and full.changes == () and full.after is None, (
        "nothing is changed for the disk's sake"
    )


def test_rows_are_cut_only_where_nothing_else_is_enough() -> None:
    """Ranks of several nodes may divide a row, and two changes that others keep out may go together."""
    long = make_spec(LLAMA_31_70B, ranks=16, max_length=147_456, global_batch_size=16)
    mixture = make_spec(QWEN3_235B, ranks=32, max_length=8192, global_batch_size=32)
    for planned, limit, expected in (
        (long, 80, "cp_size: 16"),
        (mixture, 80, "expert_parallel_size=8"),
    ):
        advice = advise(planned, Room(limit * GIB))
        texts = [change.text for change in advice.changes or ()]
        assert any(expected in text for text in texts) and not any(
            "max_length" in text for text in texts
        ), texts


def test_a_file_that_divides_matrices_is_advised_to_divide_rows_too() -> None:
    """In one mapping, which replaces that of the file."""
    divided = replace(FULL_SHARD, tensor_parallel_size=4, shard_size=4, source="tp.yaml")
    planned = make_spec(
        LLAMA_31_70B, ranks=16, sharding=divided, max_length=65536, global_batch_size=16
    )
    found = [change for change in list_changes(planned) if "cp_size" in change.text]
    mesh = "parallelism_config: {{parallelism_config_cp_size: {}, parallelism_config_tp_size: 4, parallelism_config_dp_shard_size: {}}}"
    assert [change.text for change in found] == [mesh.format(2, 2), mesh.format(4, 1)]
    for change in found:
        assert find_peak(change.apply(planned)).total < find_peak(planned).total
    assert describe_changes(found[:1], "tp.yaml", has_config=True) == [
        "in tp.yaml: " + mesh.format(2, 2)
    ]


def test_a_pipeline_is_advised_to_divide_matrices_and_rows_within_its_stages() -> None:
    staged = replace(FULL_SHARD, pipeline_parallel_size=2, source="pp.yaml")
    planned = make_spec(LLAMA_31_70B, ranks=16, sharding=staged, global_batch_size=16)
    texts = [change.text for change in list_changes(planned)]
    for size, key in ((4, "cp_size"), (4, "tp_size")):
        mesh = (
            f"{{parallelism_config_{key}: {size}, parallelism_config_dp_shard_size: {8 // size}}}"
        )
        assert f"parallelism_config: {mesh}" in texts, texts


def test_a_change_says_where_it_is_made() -> None:
    """Beside --config, which decides, the recipe's key would have no effect; and what init writes has nothing to fill in."""
    changes = list(list_changes(make_spec(LLAMA_31_8B, ranks=16)))
    divided = next(change for change in changes if change.is_in_file)
    offloaded = next(change for change in changes if change.accelerate_config == "fsdp_cpu_offload")
    assert describe_changes([offloaded], "own.yaml", has_config=True) == [
        "--config fsdp_cpu_offload"
    ]
    assert describe_changes([offloaded], "own.yaml", has_config=False) == [
        "accelerate_config=fsdp_cpu_offload"
    ]
    both = describe_changes([divided, offloaded], "own.yaml", has_config=True)
    assert both == [f"in fsdp_cpu_offload: {divided.text}", "--config fsdp_cpu_offload"]
    in_recipe = [change.text for change in changes if change.is_in_recipe]
    assert offloaded.text in in_recipe and not any(
        "NVME" in text or ": " in text for text in in_recipe
    )


def test_a_shipped_file_is_planned_as_it_reads() -> None:
    """Its layout included, which under DDP is that of a file of its own."""
    for layout, ranks, precision in (("ddp", 8, "bf16"), ("ddp", 8, "no"), ("single", 1, "fp16")):
        own = Sharding(
            layout=layout, mixed_precision=precision, wrap_classes=("Qwen3DecoderLayer",)
        )
        planned = make_spec(LLAMA_31_8B, ranks=ranks, sharding=own)
        changes = [each for each in list_changes(planned) if each.accelerate_config is not None]
        assert len({each.text for each in changes}) == len(changes) >= 2
        for change in changes:
            read = read_sharding(change.accelerate_config, None, {"WORLD_SIZE": str(ranks)})
            changed = change.apply(planned).sharding
            assert replace(changed, source=read.source) == read, change


def test_adapters_are_not_suggested_where_there_is_nothing_to_adapt() -> None:
    """Random weights, and a checkpoint whose vision tower is dropped."""
    planned = make_spec(LLAMA_31_8B, ranks=1)
    for keys, suggested in (
        ({"model_name_or_path": "a/b"}, True),
        ({"model_config": LLAMA_31_8B}, False),
        ({"model_name_or_path": "a/b", "drop_vision": True}, False),
    ):
        recipe = replace(planned.recipe, model=Model(**keys))  # type: ignore[arg-type]
        changes = list_changes(replace(planned, recipe=recipe))
        assert any("use_peft" in each.text for each in changes) == suggested, keys


@pytest.mark.parametrize("rows", [None, 64])
def test_what_keeps_the_rows_of_a_step_is_taken_and_keeps_them(rows: int | None) -> None:
    """Beside gradient_accumulation_steps too, which then no longer fits."""
    planned = make_spec(
        LLAMA_31_8B, ranks=8, rows=4, gradient_accumulation_steps=2, global_batch_size=rows
    )
    texts = [change.text for change in list_changes(planned)]
    text = next(text for text in texts if text.startswith("per_device_train_batch_size=1"))
    written = ["per_device_train_batch_size=4", "gradient_accumulation_steps=2"]
    written.append(f"global_batch_size={rows or 'null'}")
    recipe = read_recipe("quickstart", [*written, *text.split()])
    assert find_problems(recipe, FULL_SHARD, ranks=8) == []
    assert compute_global_batch_size(recipe.batch, 8) == 64


def test_offload_is_in_the_time_of_a_step() -> None:
    planned = make_spec(LLAMA_31_8B, ranks=8, global_batch_size=16)
    offloaded = replace(planned, sharding=replace(FULL_SHARD, cpu_offload=True))
    without, with_it = estimate_speed(planned, mfu=0.4), estimate_speed(offloaded, mfu=0.4)
    shard = 4 * planned.architecture.parameters / 8  # bytes of fp32 parameters on a rank
    moved, touched = (
        2 * (2 * shard + shard),
        2 * shard + shard + 2 * 2 * shard,
    )  # two micro-batches; two moments
    expected = moved / PCIE_BYTES_PER_SECOND + 8 * touched / HOST_BYTES_PER_SECOND
    assert abs(with_it.offload_seconds - expected) < 1e-3 * expected
    assert with_it.seconds_per_step == without.seconds_per_step + with_it.offload_seconds
    assert with_it.tokens_per_second < without.tokens_per_second
    assert without.offload_seconds == 0 and "offload" not in format_speed(without, 8)
    assert "of a step, " in format_speed(with_it, 8) and "are offload" in format_speed(with_it, 8)
