"""The plan of an optimizer whose state lies in files. tests/plan/test_state.py holds its bytes against the real ones."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.checkpoint.shards import allocate_on_host
from finetune.config.schema import Checkpoint, Optimization
from finetune.constants import OFFLOAD_ALIGNMENT
from finetune.plan.advice import Room, advise, list_changes
from finetune.plan.peaks import plan_phases
from finetune.plan.run_spec import RunSpec, plan_disk, plan_host
from finetune.plan.speed import estimate_speed
from finetune.plan.table import format_advice, format_speed, format_storage
from finetune.plan.temporary_memory import optimizer_step_temporaries
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, make_spec

PARAMETERS = 8_030_261_248  # of Llama 3.1 8B, by its model card
QWEN_25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
LAYER = 218_112_000  # of one of its decoder layers
IN_FILES = Optimization(optim_offload="nvme", offload_dir="/nvme")


def in_files(config: dict[str, Any] = LLAMA_31_8B, ranks: int = 8, **keys: Any) -> RunSpec:
    spec = make_spec(config, ranks=ranks, **keys)
    return replace(spec, recipe=replace(spec.recipe, optimization=IN_FILES))


def test_an_8b_keeps_6_of_16_bytes_a_parameter_in_memory() -> None:
    spec, tensors = in_files(), 291
    state, files = spec.state(), spec.optimizer_file()
    assert files is not None
    assert state.trained == 2 * PARAMETERS // 8 and state.gradients == 4 * PARAMETERS // 8
    assert 0 <= files.size - 12 * PARAMETERS // 8 < 3 * tensors * OFFLOAD_ALIGNMENT
    embedding = 12 * LLAMA_31_8B["vocab_size"] * LLAMA_31_8B["hidden_size"] // 8
    assert files.buffer == max(embedding, 12 * LAYER // 8)
    assert state.optimizer == files.buffer + 4 * tensors  # on a GPU one; two more on its host
    assert plan_host(spec, 0).buffers == 8 * 2 * files.buffer and plan_host(spec, 0).saving == 0
    assert plan_disk(spec).offload == 8 * files.size
    assert estimate_speed(spec, 0.4).files_seconds == pytest.approx(24 * PARAMETERS / 5e9, rel=1e-3)
    phases = {phase.name: phase.peak for phase in plan_phases(spec)}
    assert phases["load"].parameters == 4 * PARAMETERS // 8, (
        "fp32 until the master weights are in files"
    )
    assert phases["steady step"].parameters == phases["save"].parameters == 2 * PARAMETERS // 8
    text = format_storage(plan_disk(spec), plan_host(spec, 0)) + format_speed(
        estimate_speed(spec, 0.4), 8
    )
    assert (
        "offload    89.75 GiB a node in offload_dir" in text
        and "38.5 s are the state in offload_dir" in text
    )


@pytest.mark.parametrize(
    ("keys", "steps", "kept", "line"),
    [
        ({}, None, 2, "(2 kept, 1 being written)"),
        ({"keep_best_checkpoint": True}, None, 3, "(3 kept, 1 being written)"),
        ({"keep_every_steps": 100}, 1000, 11, "(11 kept, 1 being written)"),
        ({"keep_every_steps": 15, "save_steps": 100}, 1000, 5, "(5 kept, 1 being written)"),
        ({"keep_every_steps": 100}, None, 2, "(at least 2 kept, 1 being written)"),
        ({"keep_best_checkpoint": True, "save_total_limit": None}, 9, None, "(all are kept)"),
    ],
)
def test_the_disk_has_room_for_the_best_checkpoint_and_for_milestones(
    keys: dict[str, Any], steps: int | None, kept: int | None, line: str
) -> None:
    spec = make_spec(LLAMA_31_8B, ranks=8)
    recipe = replace(
        spec.recipe,
        checkpoint=replace(spec.recipe.checkpoint, **keys),
        optimization=replace(spec.recipe.optimization, max_steps=steps),
    )
    disk = plan_disk(replace(spec, recipe=recipe))
    assert disk.checkpoints_kept == kept
    assert disk.checkpoints == ((kept or 1) + 1) * disk.checkpoint
    assert line in format_storage(disk, plan_host(spec, 0))


def test_the_disk_has_room_for_all_checkpoints_where_all_are_kept() -> None:
    spec = make_spec(LLAMA_31_8B, ranks=8)
    keys = replace(spec.recipe.checkpoint, save_steps=4, save_total_limit=None)
    recipe = replace(
        spec.recipe,
        checkpoint=keys,
        optimization=replace(spec.recipe.optimization, max_steps=9),
        run=replace(spec.recipe.run, eval_steps=3),
    )
    best = replace(recipe, checkpoint=replace(keys, keep_best_checkpoint=True))
    for saver, saves in ((recipe, [4, 8, 9]), (best, [3, 4, 6, 8, 9])):
        disk = plan_disk(replace(spec, recipe=saver))
        assert disk.checkpoints == len(saves) * disk.checkpoint


@pytest.mark.parametrize(
    ("max_steps", "limit", "keys", "is_whole"),
    [
        (9, None, {"save_steps": 4}, True),
        (None, None, {"save_steps": 4}, False),
        (9, None, {"save_strategy": "epoch"}, False),
        (None, 2, {"save_steps": 4}, True),
        (None, 2, {"save_steps": 4, "keep_every_steps": 8}, False),
    ],
)
def test_a_run_fits_only_if_the_number_of_its_checkpoints_is_known(
    max_steps: int | None, limit: int | None, keys: dict[str, Any], is_whole: bool
) -> None:
    spec = make_spec(LLAMA_31_8B, ranks=8)
    recipe = replace(
        spec.recipe,
        checkpoint=Checkpoint(save_total_limit=limit, **keys),
        optimization=replace(spec.recipe.optimization, max_steps=max_steps),
    )
    room = Room(10**12, 10**13, 10**15)
    advice = advise(replace(spec, recipe=recipe), room)
    said = format_advice(advice, room, "", has_config=False, uncounted=False)
    assert said.startswith("fits" if is_whole else "requires")
    assert said.endswith("GiB of disk" if is_whole else "GiB of disk or more")


def test_memory_for_the_state_is_the_same_for_twice_the_layers() -> None:
    one, two = (
        in_files(LLAMA_31_8B | {"num_hidden_layers": layers}).optimizer_file()
        for layers in (32, 64)
    )
    assert one is not None and two is not None and two.size > 1.8 * one.size
    assert two.buffer == one.buffer


def test_layouts_that_keep_it_in_memory_are_counted_as_that() -> None:
    spec = in_files()
    ddp = replace(spec, sharding=replace(spec.sharding, layout="ddp"))
    assert ddp.optimizer_file() is None and ddp.state().optimizer >= 8 * PARAMETERS


def test_no_advice_asks_for_what_cannot_be_in_files() -> None:
    texts = [change.text for change in list_changes(in_files())]
    assert "optim=adamw_8bit" not in texts and "optim=adamw_bf16_moments" in texts


def test_an_async_save_pins_what_is_planned_and_not_powers_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensors that say they are on a GPU; CUDA's own registration of the pages is recorded in its place."""
    pinned: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
            assert address % 4096 == flags == 0
            pinned.append(size)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    small = {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
    }
    spec = make_spec(LLAMA_31_8B | small, ranks=1)
    with FakeTensorMode():
        saved = [
            torch.empty(t.shape, device="cuda") for t in spec.tensors for _ in range(3)
        ]  # AdamW's two moments
    copies = [allocate_on_host(tensor) for tensor in saved]
    assert [(copy.shape, copy.dtype) for copy in copies] == [
        (tensor.shape, tensor.dtype) for tensor in saved
    ]
    steps = 4 * len(spec.tensors)  # on the host already
    assert 0 <= sum(pinned) - (plan_host(spec, 0).saving - steps) < OFFLOAD_ALIGNMENT * len(saved)
    moments = Optimization(optim="adamw_bf16_moments")
    whole = make_spec(QWEN_25_7B, ranks=1)
    whole = replace(whole, recipe=replace(whole.recipe, optimization=moments))
    pages = sum(-(-t.numel * size // 4096) * 4096 for t in whole.tensors for size in (4, 2, 2))
    powers = sum(
        2 ** (t.numel * size - 1).bit_length() for t in whole.tensors for size in (4, 2, 2)
    )
    found = [round(each / 2**30, 1) for each in (plan_host(whole, 0).saving, pages, powers)]
    assert found == [56.7, 56.7, 107.9], (
        "planned; in whole pages; as torch's own pinned memory would be"
    )


def test_memory_for_a_save_is_that_of_the_savers_own_choice() -> None:
    """All that an async save copies; else two tensors at a time on a GPU, and none on a CPU."""
    spec = make_spec(LLAMA_31_8B, ranks=8)
    copied = 12 * PARAMETERS + 4 * len(spec.tensors)  # with a step counter each
    embedding = 4 * 128256 * 4096
    cases: list[tuple[Literal["cpu", "cuda"], bool | None, int]] = [
        ("cuda", None, copied),
        ("cuda", True, copied),
        ("cuda", False, 2 * embedding),
        ("cpu", None, 0),
        ("cpu", True, copied),
        ("cpu", False, 0),
    ]
    for device, async_save, expected in cases:
        recipe = replace(spec.recipe, checkpoint=Checkpoint(async_save=async_save))
        saver = replace(spec, recipe=recipe, device=device)
        assert plan_host(saver, 0).saving == expected, (device, async_save)


@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "sgd"])
def test_an_update_on_the_host_takes_nothing_of_the_device(name: Any) -> None:
    spec = make_spec(LLAMA_31_8B, ranks=4)
    spec = replace(spec, recipe=replace(spec.recipe, optimization=Optimization(optim=name)))
    on_host = replace(spec, sharding=replace(FULL_SHARD, cpu_offload=True))
    assert optimizer_step_temporaries(spec) > 0
    assert optimizer_step_temporaries(on_host) == 0
