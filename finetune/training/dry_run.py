"""The plan of a run: printed by a dry run, and shown beside the measured memory where a run is out of it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from finetune.config.compatibility import find_problems
from finetune.config.facts import MachineFacts
from finetune.config.schema import Recipe
from finetune.data.prepare import PreparedData
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.optim.scratch_file import check_scratch_folder
from finetune.plan.advice import list_changes
from finetune.plan.plan import format_plan, make_plan
from finetune.plan.step_memory import find_peak
from finetune.units import gib


def print_plan(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Prints the plan of a run on prepared data."""
    on_cpu, report = world.device.type == "cpu", data.report
    read = (report.tokens, data.train.steps) if report.is_complete else None
    plan = make_plan(recipe, world.sharding, world.size, on_cpu=on_cpu, read=read)
    ours = "causal SDPA, document by document" if on_cpu else "varlen"
    attention = ours if recipe.model.attn_implementation == "auto" else recipe.model.attn_implementation
    print(format_plan(plan))
    print("data       " + "\n           ".join(report.lines()))
    epoch = data.train.steps_per_epoch
    machine = MachineFacts(device="cpu" if on_cpu else "cuda")
    keys: dict[str, Any] = {"ranks": world.size, "machine": machine, "steps": data.train.steps}
    for note in find_problems(recipe, world.sharding, **keys, images=data.images):
        if note.is_note and str(note) not in plan.remarks:
            print(f"remark     {note}")
    print(f"steps      {f'{epoch:,} an epoch, ' if epoch else ''}{data.train.steps:,} in all")
    print(f"attention  {attention}")


def check_offload_dir(recipe: Recipe, world: World) -> None:
    """Raises `UserError`, on all ranks, where `offload_dir` cannot be written on one of them, is in memory, or has less
    space than the plan says that the files of its node take. All ranks call it."""
    if recipe.optimization.optim_offload == "none":
        return
    folder = Path(recipe.optimization.offload_dir or "")
    needed = 0
    with suppress(UserError):  # a family that trains, but cannot be planned: the files themselves will find out
        files = make_plan(recipe, world.sharding, world.size, on_cpu=world.device.type == "cpu").spec.files()
        needed = files.size * world.local_size if files is not None else 0
    RankGroup(world).on_all(
        lambda: check_scratch_folder(folder, needed, world.local_size) if world.local_rank == 0 else None
    )


@contextmanager
def explain_out_of_memory(recipe: Recipe, world: World) -> Iterator[None]:
    """Raises `UserError` for torch's out-of-memory error: measured and planned memory, and the next smallest change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(describe_out_of_memory(recipe, world, error)) from None


def describe_out_of_memory(recipe: Recipe, world: World, error: torch.OutOfMemoryError) -> str:
    """The message: what was measured, where the memory went by the plan, what to change."""
    lines = [f"rank {world.rank}: out of memory: {str(error).split('. ')[0]}"]
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        measured = torch.cuda.max_memory_allocated(world.device)
        lines.append(f"measured   {gib(measured)} GiB allocated at most, of {gib(total)} GiB on the device")
    try:
        plan = make_plan(recipe, world.sharding, world.size, on_cpu=world.device.type == "cpu")
    except UserError as refusal:  # a family that trains, but cannot be planned
        lines.append(f"planned    not known: {refusal}")
        lines.append(
            "next       more ranks, activation checkpointing, or a smaller max_length or per_device_train_batch_size"
        )
        return "\n".join(lines)
    planned = max((phase.peak for phase in plan.phases), key=lambda moment: moment.total)
    teacher = f"teacher {gib(planned.teacher)}, " if planned.teacher else ""
    lines.append(
        f"planned    {gib(planned.allocated)} GiB allocated and {gib(planned.total)} GiB in all, at {planned.name}: "
        f"weights {gib(planned.parameters)}, {teacher}gradients {gib(planned.gradients)}, optimizer "
        f"{gib(planned.optimizer)}, "
        f"gathered {gib(planned.gathered)}, activations {gib(planned.activations)}, loss {gib(planned.loss)}"
    )
    smaller = [change for change in list_changes(plan.spec) if find_peak(change.apply(plan.spec)).total < planned.total]
    if smaller:
        after = find_peak(smaller[0].apply(plan.spec)).total
        lines.append(f"next       {smaller[0].text}   ({smaller[0].cost}; {gib(after)} GiB by the plan)")
    else:
        lines.append("next       more ranks, or a smaller max_length")
    return "\n".join(lines)
