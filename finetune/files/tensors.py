"""Named tensors in the safetensors files of one folder, whole or sharded over files, read slice by slice in bounded
memory.

Two layouts are read: whole tensors, as in every Hugging Face folder, and sharded ones, as written by
`torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)`: each rank's file holds its part of a
tensor, and `DCP_SHARDING_INFO` in the file's metadata gives the part's offsets in the whole.

Bytes are read with `preadv` into the returned tensor. A memory map would be shorter, but its pages count as resident,
and a file that shrinks under it kills the process.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.constants import CONFIG_FILE, ITEMSIZE
from finetune.errors import UserError
from finetune.files.run_json import load_json
from finetune.files.safetensors_header import read_header, read_weight_map

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RUN_BYTES = 16 * 1024  # a shorter run of bytes costs a system call more than reading its neighbors along
BUFFER_BYTES = 1024 * 1024

Box = tuple[tuple[int, int], ...]  # (start, stop) in each dimension


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A box of a tensor, contiguous in one file."""

    path: Path
    position: int  # bytes from the file's beginning
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple((start, start + length) for start, length in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk. `parts` cover it exactly: every element once."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors of `folder` by name; only headers are read.

    In a Hugging Face folder these are the files that transformers would load: model.safetensors, else those that the
    index names. In any other folder, every *.safetensors file.

    Raises `UserError` where there are none, or a header or the index is wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that holds the *.safetensors files")
    if (folder / SINGLE_FILE).exists():
        return read_files([folder / SINGLE_FILE])
    if (folder / INDEX_FILE).exists():
        return _read_indexed(folder / INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors file is here; give a folder that holds the weights, or copy them there"
        )
    return read_files(files)


def read_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of these safetensors files by name, the parts of each joined over the files."""
    found: dict[str, list[tuple[StoredPart, torch.dtype]]] = {}
    for path in paths:
        for entry in read_header(path):
            part = StoredPart(path, entry.begin, entry.offsets, entry.shape)
            found.setdefault(entry.name, []).append((part, entry.dtype))
    return {name: join_parts(name, parts) for name, parts in sorted(found.items())}


def read(tensor: StoredTensor) -> torch.Tensor:
    """The whole tensor, `dtype[*shape]`, on the CPU."""
    return read_slice(tensor, ())


def read_slice(tensor: StoredTensor, slices: tuple[slice, ...]) -> torch.Tensor:
    """`read(tensor)[slices]`, contiguous and on the CPU, reading only the bytes that it needs.

    Dimensions without a slice are taken whole. Slices step by 1.

    Raises `UserError` where a file has become shorter than its header said or cannot be read.
    """
    bounds = [wanted.indices(length) for wanted, length in zip(slices, tensor.shape, strict=False)]
    if len(slices) > len(tensor.shape) or any(step != 1 for _, _, step in bounds):
        raise ValueError(f"{slices}: not unit-step slices of a tensor of shape {tensor.shape}")
    box: Box = tuple((start, max(start, stop)) for start, stop, _ in bounds)
    box += tuple((0, length) for length in tensor.shape[len(box) :])
    result = torch.empty([stop - start for start, stop in box], dtype=tensor.dtype)
    for part in tensor.parts:
        common = _intersection(part.box, box)
        if common is None:
            continue
        into = tuple(
            slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(common, box, strict=True)
        )
        inside = tuple(
            (start - origin, stop - origin) for (start, stop), origin in zip(common, part.offsets, strict=True)
        )
        _read_part(tensor, part, inside, result[into])
    return result


def _read_part(tensor: StoredTensor, part: StoredPart, inside: Box, result: torch.Tensor) -> None:
    try:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _read_box(descriptor, part.position, part.shape, inside, result)
        finally:
            os.close(descriptor)
    except EOFError:
        raise UserError(
            f"{part.path}: {tensor.name}: the file has become shorter than its header says; copy it again"
        ) from None
    except OSError as error:
        raise UserError(f"{part.path}: {tensor.name}: cannot be read: {error.strerror}") from None


def _read_box(descriptor: int, position: int, shape: tuple[int, ...], box: Box, result: torch.Tensor) -> None:
    """Fills `result` with the elements `box` of the row-major array `shape` that lies at `position`."""
    row_bytes = math.prod(shape[1:]) * result.dtype.itemsize
    first = position + (box[0][0] * row_bytes if box else 0)
    rows_are_whole = all(bounds == (0, length) for bounds, length in zip(box[1:], shape[1:], strict=True))
    if rows_are_whole and result.is_contiguous():
        _read_bytes(descriptor, first, result)
    elif row_bytes > RUN_BYTES and len(shape) > 1:
        for row in range(len(result)):
            _read_box(descriptor, first + row * row_bytes, shape[1:], box[1:], result[row])
    else:
        rows = max(1, BUFFER_BYTES // row_bytes)
        inner = tuple(slice(start, stop) for start, stop in box[1:])
        for row in range(0, len(result), rows):
            buffer = torch.empty((min(rows, len(result) - row), *shape[1:]), dtype=result.dtype)
            _read_bytes(descriptor, first + row * row_bytes, buffer)
            result[row : row + rows] = buffer[(slice(None), *inner)]


def _read_bytes(descriptor: int, position: int, result: torch.Tensor) -> None:
    view = result.reshape(-1).view(torch.uint8).numpy().data if result.numel() else memoryview(b"")
    while len(view):
        count = os.preadv(descriptor, [view], position)  # at most 2 GiB at a time
        if count == 0:
            raise EOFError
        view, position = view[count:], position + count


def _intersection(one: Box, other: Box) -> Box | None:
    """The box common to two, or None where that is empty. The box of a scalar is (), and not empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _read_indexed(index: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that a Hugging Face index names."""
    weight_map = read_weight_map(index)
    tensors = read_files(index.parent / file for file in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].parts[0].path.name != file:
            raise UserError(
                f"{index}: {name}: the file {file} does not hold it; the index belongs to a different model"
            )
    return tensors


def join_parts(name: str, found: list[tuple[StoredPart, torch.dtype]]) -> StoredTensor:
    """One tensor of its parts, which must agree in dtype and cover it exactly once."""
    (first, dtype), *others = found
    for part, other in others:
        if other != dtype or len(part.shape) != len(first.shape):
            raise UserError(
                f"{name}: {first.path} and {part.path} hold parts that differ in dtype or number of dimensions"
            )
    filled = [part for part, _ in found if math.prod(part.shape)]  # a rank without rows may write an empty part
    parts = sorted(filled or [first], key=lambda part: part.offsets)
    shape = tuple(max(stops) for stops in zip(*([stop for _, stop in part.box] for part in parts), strict=True))
    _check_disjoint(name, parts)
    missing = math.prod(shape) - sum(math.prod(part.shape) for part in parts)
    if missing:
        places = ", ".join(str(path) for path in sorted({part.path for part in parts})[:3])
        raise UserError(
            f"{places}: {name}: {missing:,} of {math.prod(shape):,} elements are in no file; a rank's file is missing"
        )
    return StoredTensor(name, shape, dtype, tuple(parts))


def _check_disjoint(name: str, parts: list[StoredPart]) -> None:
    """`parts` are sorted by where they begin; those that a later one can still meet along dimension 0 are kept."""
    live: list[StoredPart] = []
    for part in parts:
        live = [other for other in live if not part.box or other.box[0][1] > part.box[0][0]]
        for other in live:
            if _intersection(part.box, other.box) is not None:
                raise UserError(
                    f"{name}: both {other.path} and {part.path} hold it; remove the file of the other model"
                )
        live.append(part)


def main_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """The floating-point dtype that holds the most bytes; None where there is none."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.byte_count
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def choose_dtype(given: str | None, base: Path | None, *others: torch.dtype | None) -> torch.dtype:
    """The dtype of an export: the one `given`, else that of the base model's files, else the first known of `others`.

    One that exports do not have (float64, float8) becomes bfloat16. Raises `UserError` for a config.json that is no
    JSON object.
    """
    if given is not None:
        return getattr(torch, given)  # type: ignore[no-any-return]
    found = next((dtype for dtype in (_base_dtype(base), *others) if dtype is not None), torch.float32)
    return found if str(found).removeprefix("torch.") in ITEMSIZE else torch.bfloat16


def config_dtype(config_json: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json states for its weights (`torch_dtype` before transformers 4.56), if any."""
    name = config_json.get("dtype") or config_json.get("torch_dtype")
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _base_dtype(base: Path | None) -> torch.dtype | None:
    """The dtype of most of the base's weights; by its config where they are not on this machine."""
    if base is None:
        return None
    try:
        return main_dtype(read_folder(base).values())
    except UserError:
        path = base / CONFIG_FILE
        return config_dtype(load_json(path)) if path.exists() else None
