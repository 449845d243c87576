"""Time from an assumed share of the device's peak: FLOP per token, tokens per second, seconds per step and epoch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.flops import PEAK_FLOPS, flop_per_token
from finetune.plan.run_spec import Job
from finetune.plan.state import state_of_rank
from finetune.recipe.schema import Data

ASSUMED_DEVICE = "H100"
ASSUMED_MFU = 0.4
PCIE_BYTES_PER_SECOND = 25e9  # of one GPU to its host and back
HOST_BYTES_PER_SECOND = 100e9  # of a node's memory, as AdamW on its CPUs reaches it
BYTES_PER_TOKEN = 4  # of English text in a large vocabulary; only to guess the length of an epoch from the files' size
LOOKED_AT_BYTES = 1 << 16  # of a file of JSON lines, to see how much of it is text
# Of a micro-batch: below it the host's starting of kernels rules the time, and FLOP say nothing of it.
LEAST_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast, if the assumed share of the peak is reached."""

    flop_per_token: float
    mfu: float
    tokens_per_second: float  # over all ranks
    tokens_per_step: int  # every row full
    seconds_per_step: float
    steps: int | None  # None: not known without reading the data
    epoch_tokens: int | None  # None: not known
    seconds_per_epoch: float | None
    steps_are_guessed: bool  # from the files' size; else max_steps or the data itself says them
    micro_batch_seconds: float
    offload_seconds: float  # of a step

    @property
    def says_something(self) -> bool:
        """Whether a step is long enough for its FLOP to tell its time."""
        return self.micro_batch_seconds >= LEAST_SECONDS


def speed(job: Job, mfu: float, read: tuple[int, int] | None = None) -> Speed:
    """The time that `job` takes at `mfu` of the assumed device's peak on every rank.

    `read`: an epoch's tokens and the run's steps where the data has been read; else they are guessed from the files.
    """
    a = job.architecture
    flops = flop_per_token(
        parameters=a.parameters - (0 if a.tied else a.embedding.numel),
        layers=a.layers,
        heads=a.heads,
        head_size=a.head_size,
        length=job.recipe.data.max_length,
        frozen_base=job.recipe.lora.use_peft,
    )
    tokens_per_step = job.global_batch_size * job.recipe.data.max_length
    offload = offload_seconds(job)
    seconds_per_step = tokens_per_step * flops / (mfu * PEAK_FLOPS[ASSUMED_DEVICE] * job.ranks) + offload
    tokens_per_second = tokens_per_step / seconds_per_step
    optimization = job.recipe.optimization
    epoch_tokens, steps = read or (guessed_tokens(job.recipe.data), optimization.max_steps)
    if steps is None and epoch_tokens is not None:
        steps = max(1, round(epoch_tokens / tokens_per_step * optimization.num_train_epochs))
    return Speed(
        flop_per_token=flops,
        mfu=mfu,
        tokens_per_second=tokens_per_second,
        tokens_per_step=tokens_per_step,
        seconds_per_step=seconds_per_step,
        steps=steps,
        epoch_tokens=epoch_tokens,
        seconds_per_epoch=None if epoch_tokens is None else epoch_tokens / tokens_per_second,
        steps_are_guessed=read is None and optimization.max_steps is None,
        micro_batch_seconds=seconds_per_step / job.accumulation,
        offload_seconds=offload,
    )


def offload_seconds(job: Job) -> float:
    """What offload to the host adds to a step, at the assumed rates; 0 without it.

    A micro-batch takes the rank's parameters to the device for the forward, once more for the backward where they were
    freed, and its gradients back. The update reads and writes the parameters and moments, and reads the gradients, in
    memory that all ranks of a node share. Nothing of this is taken to overlap with computing.
    """
    if not job.sharding.cpu_offload:
        return 0.0
    state = state_of_rank(job.tensors, job.sharding, job.pieces, job.recipe.optimization)
    gathers = 1 if job.sharding.strategy == "SHARD_GRAD_OP" else 2
    moved = job.accumulation * (gathers * (state.trained + state.frozen) + state.gradients)
    touched = 2 * state.trained + state.gradients + 2 * state.optimizer
    return moved / PCIE_BYTES_PER_SECOND + touched * min(job.ranks, job.ranks_per_node) / HOST_BYTES_PER_SECOND


def guessed_tokens(data: Data) -> int | None:
    """The tokens of an epoch by the size of the local files; None where some are not local or not read whole."""
    total = 0.0
    for source in data.datasets:
        path = Path(source.path)
        if not path.is_file() or source.split != "train":
            return None
        total += path.stat().st_size * source.weight * _share_of_text(path)
    return int(total) // BYTES_PER_TOKEN if data.datasets else None


def _share_of_text(path: Path) -> float:
    """How much of a file of JSON lines is text, by its first rows: the rest is keys and punctuation."""
    if path.suffix != ".jsonl":
        return 1.0
    with path.open("rb") as file:
        rows = file.readlines(LOOKED_AT_BYTES)
    try:
        texts = sum(_text_bytes(json.loads(row)) for row in rows if row.strip())
    except ValueError:  # what is wrong with it is told where it is read
        return 1.0
    return texts / max(1, sum(map(len, rows)))


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_bytes, inner))
