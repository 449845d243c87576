"""Every tensor of the result as a function of what is stored, computed a few rows at a time."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from finetune.errors import UserError
from finetune.export.target import Architecture
from finetune.safetensors_io.tensors import StoredTensor, read_slice

# Of the widest form that a block takes on its way, which is float32. Blocks that fit a core's cache, and whose memory the
# allocator keeps instead of giving it back to the kernel, take a third of the CPU time that 32 MiB take.
BLOCK_BYTES = 4 * 1024 * 1024
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # compile's, FSDP1's, torch's


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the result. `rows(start, stop)` are its rows (dimension 0) in float32, or as stored where no float.

    A scalar has one row, itself. The same rows are the same bits whenever they are asked for.
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


def written(value: Value, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop` as they are written: cast to the dtype of the result.

    Raises `UserError` where that dtype cannot hold them.
    """
    rows = value.rows(start, stop)
    cast = rows.to(value.dtype)
    if value.dtype == torch.float16 and not torch.equal(torch.isfinite(cast), torch.isfinite(rows)):
        raise UserError(f"{value.name}: holds values beyond float16's 65,504; export with --dtype bfloat16 or float32")
    return cast


def raw_bytes(rows: torch.Tensor) -> memoryview:
    """The bytes of `rows` as a file holds them: row-major."""
    view: memoryview = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def read_rows(stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop` as they are stored; a scalar has one row, itself."""
    return read_slice(stored, (slice(start, stop),) if stored.shape else ())


def stored_value(stored: StoredTensor, name: str, dtype: torch.dtype) -> Value:
    """`stored` under another name and dtype."""

    def rows(start: int, stop: int) -> torch.Tensor:
        block = read_rows(stored, start, stop)
        # float64 is kept: rounding it to float32 first would round twice
        return block.float() if block.is_floating_point() and block.dtype != torch.float64 else block

    return Value(name, stored.shape, dtype, rows)


def matched(
    stored: Mapping[str, StoredTensor], architecture: Architecture, where: str, *, prefixed: bool = False
) -> dict[str, StoredTensor]:
    """The stored tensors by the architecture's names, each of them once, in its order.

    `prefixed`: the names may stand behind one prefix (`model.` in Accelerate's folders) and beside others (an
    optimizer's). A tied tensor that is stored twice counts once, provided that both are equal.

    Raises `UserError` listing what is missing, unexpected or of another shape.
    """
    named = {_without_wrappers(name): tensor for name, tensor in stored.items()}
    if prefixed:
        prefix = _prefix(named, architecture, where)
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    for tied, source in architecture.tied.items():
        if tied in named:
            twin = named.pop(tied)
            _refuse_untied(tied, twin, named.setdefault(source, twin), where)
    ignored = [*(getattr(architecture.model, "_keys_to_ignore_on_load_unexpected", None) or ()), "rotary_emb.inv_freq"]
    unexpected = [n for n in named if n not in architecture.shapes and not any(part in n for part in ignored)]
    missing = [name for name in architecture.shapes if name not in named]
    problems = [
        f"{named[name].pieces[0].path}: {name}: has the shape {list(named[name].shape)}, but {architecture.class_name} of this config needs {list(shape)}"
        for name, shape in architecture.shapes.items()
        if name in named and named[name].shape != shape
    ]
    if missing:
        problems.append(f"{where}: {_listed(missing)}: missing; {architecture.class_name} of this config needs it")
    if unexpected:
        problems.append(
            f"{named[unexpected[0]].pieces[0].path}: {_listed(unexpected)}: unexpected; {architecture.class_name} of this config has no such tensor"
        )
    if problems:
        raise UserError.of(problems[:20])
    return {name: named[name] for name in architecture.shapes}


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _prefix(named: Mapping[str, StoredTensor], architecture: Architecture, where: str) -> str:
    """What stands before the names of the model in a state dict that may hold more than the model."""
    counts: dict[str, int] = {}
    for name in named:
        parts = name.split(".")
        for start in range(min(len(parts), 4)):
            if ".".join(parts[start:]) in architecture.shapes:
                prefix = "".join(f"{part}." for part in parts[:start])
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1:
        raise UserError(f"{where}: holds the model more than once, under {' and '.join(sorted(best))}; keep one")
    return best[0] if best else ""


def _refuse_untied(tied: str, twin: StoredTensor, source: StoredTensor, where: str) -> None:
    if twin is source:
        return
    same = twin.shape == source.shape and twin.dtype == source.dtype
    one, other = stored_value(twin, tied, twin.dtype), stored_value(source, tied, source.dtype)
    if not same or not all(torch.equal(one.rows(*block), other.rows(*block)) for block in row_blocks(one.shape)):
        raise UserError(
            f"{where}: {tied} differs from {source.name}, which the config says it is tied to; set tie_word_embeddings to "
            "false in config.json if it was trained on its own"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
