"""The tensors of the result as functions of the stored ones, computed a few rows at a time, in a thread that runs
ahead."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from finetune.errors import UserError
from finetune.export.target import TargetModel
from finetune.files.tensors import StoredTensor, read_slice
from finetune.models.weights import Box, Slices, convert_to_parameters, find_mismatches

# In float32, the widest dtype that a block is converted to. Blocks that fit a core's cache, and that the allocator
# keeps instead of returning them to the kernel, take a third of the CPU time of 32 MiB blocks.
BLOCK_BYTES = 4 * 1024 * 1024
PREFETCHED_BLOCKS = 2
WRAPPERS = (
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)  # torch.compile's, FSDP1's, activation checkpointing's

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the result. `rows(start, stop)` are its rows (dimension 0) in float32, or as stored if not
    floating.

    A scalar has one row, itself. Reading the same rows again gives the same bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # as written
    rows: Callable[[int, int], torch.Tensor]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows of a tensor, in blocks of at most BLOCK_BYTES in float32 (but at least a row).

    >>> list(row_blocks((3, 2**19)))
    [(0, 2), (2, 3)]
    """
    height = shape[0] if shape else 1
    step = max(1, BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
    return ((start, min(start + step, height)) for start in range(0, height, step))


def cast_rows(value: Value, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop` in the dtype of the result.

    Raises `UserError` where that dtype cannot hold them.
    """
    rows = value.rows(start, stop)
    cast = rows.to(value.dtype)
    if value.dtype == torch.float16 and not torch.equal(torch.isfinite(cast), torch.isfinite(rows)):
        raise UserError(f"{value.name}: holds values beyond float16's 65,504; export with --dtype bfloat16 or float32")
    return cast


def raw_bytes(rows: torch.Tensor) -> memoryview:
    """The bytes of `rows`, row-major, as a file holds them."""
    view: memoryview = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def read_rows(stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop` as they are stored; a scalar has one row, itself."""
    return read_slice(stored, (slice(start, stop),) if stored.shape else ())


def stored_value(stored: StoredTensor, name: str, dtype: torch.dtype) -> Value:
    """`stored` under another name and dtype."""

    def rows(start: int, stop: int) -> torch.Tensor:
        return as_floating(read_rows(stored, start, stop))

    return Value(name, stored.shape, dtype, rows)


def as_floating(block: torch.Tensor) -> torch.Tensor:
    """`block` as values are computed with: in float32, or as stored if not floating."""
    # float64 is kept: rounding it to float32 first would round twice
    return block.float() if block.is_floating_point() and block.dtype != torch.float64 else block


def boxed_value(name: str, box: Box, read: Callable[[str, Slices], torch.Tensor], dtype: torch.dtype) -> Value:
    """A tensor of the files that is made of parts of parameters (an expert's, of all experts of its layer), which
    `read(parameter, slices)` reads."""
    return Value(name, box.shape, dtype, lambda start, stop: box.read((slice(start, stop),), read))


def prefetch(compute: Callable[..., Block], parts: Iterable[tuple[Any, ...]]) -> Iterator[Block]:
    """`compute(*part)` for each part, in order; a thread computes the next ones while the caller works on this one.

    >>> list(prefetch(pow, [(2, 3), (3, 2)]))
    [8, 9]
    """
    remaining = iter(parts)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: list[Future[Block]] = [pool.submit(compute, *part) for part in islice(remaining, PREFETCHED_BLOCKS)]
        try:
            while waiting:
                block = waiting.pop(0).result()
                waiting += [pool.submit(compute, *part) for part in islice(remaining, 1)]
                yield block
        finally:
            for future in waiting:
                future.cancel()


def match_tensors(
    stored: Mapping[str, StoredTensor], target: TargetModel, where: str, *, prefixed: bool = False
) -> dict[str, StoredTensor]:
    """The stored tensors by the target's names, each of them once, in its order.

    `prefixed`: the names may have a common prefix (`model.` in Accelerate's folders) and other tensors may lie beside
    them (an optimizer's). A tied tensor that is stored twice counts once, if both are equal.

    Raises `UserError` listing what is missing, unexpected or of another shape.
    """
    named = {_strip_wrappers(name): tensor for name, tensor in stored.items()}
    if prefixed:
        prefix = _find_prefix(named, target, where)
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    named = convert_to_parameters(target.model, named, where)
    for tied, source in target.tied.items():
        if tied in named:
            twin = named.pop(tied)
            _check_equal(tied, twin, named.setdefault(source, twin), where)
    problems = find_mismatches(target.model, named, target.shapes, where)
    if problems:
        raise UserError.of(problems[:20])
    return {name: named[name] for name in target.shapes}


def _strip_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _find_prefix(named: Mapping[str, StoredTensor], target: TargetModel, where: str) -> str:
    """The prefix of the model's names in a state dict that may hold more than the model."""
    counts: dict[str, int] = {}
    for name in named:
        parts = name.split(".")
        for start in range(min(len(parts), 4)):
            if ".".join(parts[start:]) in target.shapes:
                prefix = "".join(f"{part}." for part in parts[:start])
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        raise UserError(f"{where}: holds the model more than once, under {' and '.join(sorted(best))}; keep one")
    return best[0] if best else ""


def _check_equal(tied: str, twin: StoredTensor, source: StoredTensor, where: str) -> None:
    if twin is source:
        return
    same = twin.shape == source.shape and twin.dtype == source.dtype
    one, other = stored_value(twin, tied, twin.dtype), stored_value(source, tied, source.dtype)
    if not same or not all(torch.equal(one.rows(*block), other.rows(*block)) for block in row_blocks(one.shape)):
        raise UserError(
            f"{where}: {tied} differs from {source.name}, which the config says it is tied to; set "
            "tie_word_embeddings to false in config.json if it was trained on its own"
        )
