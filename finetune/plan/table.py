"""A plan as a person reads it."""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from finetune.constants import frozen_dtype
from finetune.flops import FORMULA, PEAK_FLOPS
from finetune.plan.advice import Advice
from finetune.plan.disk import Disk, Host
from finetune.plan.memory import Moment, Phase
from finetune.plan.run_spec import Job
from finetune.plan.state import shards
from finetune.plan.time import ASSUMED_DEVICE, HOST_BYTES_PER_SECOND, PCIE_BYTES_PER_SECOND, Speed
from finetune.units import GIB, MIB, count, counted, gib

PARTS = tuple(field.name for field in fields(Moment) if field.name != "name")
SHORT = {"parameters": "weights", "communication": "reducing", "temporaries": "temp."}


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(0.5), duration(150), duration(8000), duration(200000)
    ('0.50 s', '2.5 min', '2.2 h', '2.3 days')
    """
    for limit, size, name in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.2f} {name}" if seconds < 1 else f"{seconds / size:.1f} {name}"
    return f"{seconds / 86400:.1f} days"


def layout_name(job: Job) -> str:
    """The layout in a few words, with the sizes of a hybrid one."""
    sharding = job.sharding
    name = sharding.layout if not sharding.is_fsdp else f"{sharding.layout} {sharding.strategy}"
    if sharding.strategy == "HYBRID_SHARD" and sharding.is_fsdp:
        pieces = shards(sharding, job.ranks, job.ranks_per_node)
        name += f" ({job.ranks // pieces} x {pieces})"
    return name + (", offloaded to the host" if sharding.cpu_offload else "")


def header(job: Job, ranks_assumed: bool) -> str:
    """What is planned, in four lines, and where nobody said how many ranks, a fifth."""
    a, recipe, sharding = job.architecture, job.recipe, job.sharding
    trained = sum(tensor.numel for tensor in job.tensors if tensor.trainable)
    tokens = job.global_batch_size * recipe.data.max_length
    checkpointing = "off"
    if sharding.activation_checkpointing:
        every = recipe.model.activation_checkpointing_every
        checkpointing = "every layer" if every == 1 else f"every {every}th layer"
    model = recipe.model.model_name_or_path or "model_config"
    frozen = f"{frozen_dtype(sharding, recipe.lora)} (frozen), adapters " if recipe.lora.use_peft else ""
    parameters = frozen + job.trained_dtype
    assumed = f"ranks      {job.ranks} assumed; --num-processes N plans for N, and the last table shows others"
    return "\n".join(
        [
            f"model      {model}: {a.model_type}, {count(a.parameters)} parameters, {count(trained)} trained"
            f"{' (LoRA)' if recipe.lora.use_peft else ''}, {a.layers} x {a.family.decoder_layer}",
            f"layout     {layout_name(job)} on {counted(job.ranks, 'rank')} ({sharding.source})",
            f"precision  parameters {parameters}, computing {job.compute_dtype}, gradients reduced in {job.reduced_dtype}; "
            f"activation checkpointing {checkpointing}",
            f"batch      {job.global_batch_size} rows x {recipe.data.max_length:,} tokens a step = {tokens:,} tokens: "
            f"{counted(job.ranks, 'rank')} x {counted(job.accumulation, 'micro-batch')} x {counted(job.rows, 'row')}",
            *([assumed] if ranks_assumed else []),
        ]
    )


def memory_table(found: Sequence[Phase]) -> str:
    """Each phase's highest moment on the fullest rank, part by part."""
    rows = memory_rows(found)
    return table(rows, left=(0, len(rows[0]) - 1))


def memory_rows(found: Sequence[Phase]) -> list[list[str]]:
    """The same as cells, a row of names first; in MiB where a GiB would be too coarse."""
    small = max(phase.peak.total for phase in found) < GIB
    shown = [part for part in PARTS if any(getattr(phase.peak, part) for phase in found)]
    head = [
        f"{'MiB' if small else 'GiB'} on one rank",
        *(SHORT.get(part, part) for part in shown),
        "total",
        "highest at",
    ]

    def cell(bytes_: int) -> str:
        return f"{bytes_ / MIB:.2f}" if small else gib(bytes_)

    rows = [
        [phase.name, *(cell(getattr(phase.peak, part)) for part in shown), cell(phase.peak.total), phase.peak.name]
        for phase in found
    ]
    return [head, *rows]


def ranks_table(rows: Iterable[tuple[str, Sequence[int | None]]], ranks: Sequence[int], limit: int | None) -> str:
    """The peak of one rank for layouts (rows) and numbers of ranks (columns); above `limit` in brackets."""

    def cell(value: int | None) -> str:
        if value is None:
            return "-"
        return f"({gib(value)})" if limit is not None and value > limit else gib(value)

    head = ["GiB on one rank, by ranks", *(str(number) for number in ranks)]
    return table([head, *([name, *(cell(value) for value in values)] for name, values in rows)], left=(0,))


def speed_lines(found: Speed, ranks: int) -> str:
    """The time, and the formula that it rests on; where it would say nothing, that."""
    steps = ""
    if found.steps is not None:
        by_size = " by the files' size" if found.steps_are_guessed else ""
        steps = f"; {'about ' if by_size else ''}{counted(found.steps, 'step')}{by_size}"
    if not found.says_something:
        return (
            f"time       no guess: starting the kernels of so small a micro-batch takes longer than computing it{steps}"
        )
    steps += f": {duration(found.steps * found.seconds_per_step)}" if found.steps is not None else ""
    epoch = (
        "an epoch's length is known once the data has been read"
        if found.seconds_per_epoch is None or found.epoch_tokens is None
        else f"an epoch of about {count(found.epoch_tokens)} tokens: {duration(found.seconds_per_epoch)}"
    )
    return (
        f"time       {duration(found.seconds_per_step)} a step, {found.tokens_per_second:,.0f} tokens/s on "
        f"{counted(ranks, 'rank')}{steps}; {epoch}\n"
        f"           at {found.mfu:.0%} of {PEAK_FLOPS[ASSUMED_DEVICE] / 1e12:.0f} TFLOP/s ({ASSUMED_DEVICE}), "
        f"{found.flop_per_token / 1e9:.3g} GFLOP a token ({FORMULA}); --mfu sets another share"
        + (
            f"\n           of a step, {duration(found.offload_seconds)} are offload: state and gradients over PCIe at "
            f"{PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s, the update in host memory at {HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s a node"
            if found.offload_seconds
            else ""
        )
    )


def storage_lines(room: Disk, node: Host) -> str:
    kept = "all are kept" if room.checkpoints_kept is None else f"{room.checkpoints_kept} kept, 1 being written"
    adapter = f", adapter {gib(room.adapter)}" if room.adapter else ""
    return (
        f"disk       {gib(room.total)} GiB: checkpoints {gib(room.checkpoint)} each ({kept}), "
        f"export {gib(room.export)}{adapter}\n"
        f"host       {gib(node.total)} GiB a node: processes {gib(node.processes)}"
        + (f", offloaded state {gib(node.offloaded)}" if node.offloaded else "")
        + f", while saving {gib(node.saving)}, while exporting {gib(node.export)}"
    )


def advice_lines(advice: Advice, device_bytes: int) -> str:
    """Whether it fits, and what to paste if it does not."""
    limit = gib(device_bytes)
    if advice.fits:
        return f"fits       {gib(advice.peak)} of {limit} GiB"
    if advice.changes is None:
        ranks = f"; {advice.ranks} ranks would do" if advice.ranks else ""
        return (
            f"too large  even with every change below it takes {gib(advice.peak)} of {limit} GiB{ranks}\n"
            "           a micro-batch of 1, smaller moments, checkpointing, full sharding, half the row, offload and LoRA were tried "
            "together"
        )
    lines = [f"too large  for {limit} GiB; with this it takes {gib(advice.peak)} GiB:"]
    lines += [f"           {change.text}   ({change.cost})" for change in advice.changes]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Columns right-aligned, but for those in `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
