"""What an optimizer takes whose state lies in files (optim_offload: nvme): the file and the buffers of a rank, and time."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from finetune.constants import ITEMSIZE, count_offloaded_bytes, list_offloaded_itemsizes

if TYPE_CHECKING:
    from finetune.plan.state import State, StateTensor

NVME_BYTES_PER_SECOND = 5e9  # of one node, read and written in turns


@dataclass(frozen=True, slots=True)
class Files:
    """Bytes of one rank."""

    size: int  # of its file, which a step reads once and writes once
    buffer: int  # one of the two on the host; on a GPU there is one more
    counters: int  # the steps of each parameter, in memory


def count_files(
    tensors: Iterable["StateTensor"], shards: int, optim: str, dtype: str, compute_dtype: str, rank: int = 0
) -> Files:
    """The file of `rank` for the trained `tensors`, which are of `dtype` and split into `shards`. A buffer holds the largest decoder
    layer, or parameter that is in none (optim/state_windows.py)."""
    itemsizes, units, count = list_offloaded_itemsizes(optim, dtype, compute_dtype), dict[str, int](), 0
    for tensor in tensors:
        if tensor.trainable:
            count, numel = count + 1, prod(tensor.shard(shards, rank % shards))
            unit = tensor.unit if tensor.unit.startswith("layer") else tensor.name
            units[unit] = units.get(unit, 0) + count_offloaded_bytes(numel, itemsizes)
    return Files(size=sum(units.values()), buffer=max(units.values()), counters=4 * count)


def keep_in_files(state: "State", files: Files, dtype: str, compute_dtype: str, *, on_cpu: bool) -> "State":
    """What is in memory of a `state` whose moments and master weights, of `dtype`, are in `files`: parameters in the compute dtype,
    gradients, and buffers: both where the ranks compute `on_cpu`, on a GPU the one of its own."""
    trained = state.trained // ITEMSIZE[dtype] * ITEMSIZE[compute_dtype]
    return replace(state, trained=trained, optimizer=files.buffer * (2 if on_cpu else 1) + files.counters)
