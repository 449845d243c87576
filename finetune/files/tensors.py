"""Tensors in safetensors files, whole or sharded, read slice by slice in bounded memory; the files'
headers.

Two layouts are read: whole tensors, as in every Hugging Face folder, and sharded ones, as written
by `torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)`: each rank's file
holds its part of a tensor, and `DCP_SHARDING_INFO` in the file's metadata gives the part's offsets
in the whole.

Headers are not trusted: a wrong length or offset is a `UserError` that names the file and the
tensor, not a crash or a silent mix-up. Format: https://huggingface.co/docs/safetensors#format

Bytes are read with `preadv` into the returned tensor. A memory map would be shorter, but its pages
count as resident, and a file that shrinks under it kills the process.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from finetune.constants import CONFIG_FILE, ITEMSIZE, Shape
from finetune.errors import UserError
from finetune.files import durable
from finetune.files.json_files import DAMAGED, load_json, parse_object, read_tensor_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# a shorter run of bytes costs a system call more than reading its neighbors along
RUN_BYTES = 16 * 1024
BUFFER_BYTES = 1024 * 1024

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
DIMENSIONS_LIMIT = 16
NAME_LIMIT = 500

Box = tuple[tuple[int, int], ...]  # (start, stop) in each dimension
Slices = tuple[slice, ...]
ReadSlice = Callable[[Slices], Tensor]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A box of a tensor, contiguous in one file."""

    path: Path
    position: int  # bytes from the file's beginning
    offsets: Shape  # of its first element in the whole tensor
    shape: Shape

    @property
    def box(self) -> Box:
        return tuple(
            (start, start + length) for start, length in zip(self.offsets, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ComputedPart(StoredPart):
    """A box of a tensor that is computed from what the files hold. Its position says nothing."""

    read: ReadSlice  # slices of the tensor that is computed
    begin: Shape  # of the box's first element in that tensor
    # for each dimension of the box, that tensor's; None: added, of size 1
    axes: tuple[int | None, ...]

    def read_box(self, inside: Box) -> Tensor:
        """The elements `inside` of the box."""
        bounds = [slice(start, start + 1) for start in self.begin]
        for axis, (start, stop) in zip(self.axes, inside, strict=True):
            if axis is not None:
                bounds[axis] = slice(self.begin[axis] + start, self.begin[axis] + stop)
        return self.read(tuple(bounds)).reshape([stop - start for start, stop in inside])


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk. `parts` cover it exactly: every element once."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors of `folder` by name; only headers are read.

    In a Hugging Face folder these are the files that transformers would load: model.safetensors,
    else those that the index names. In any other folder, every *.safetensors file.

    Raises `UserError` where there are none, or a header or the index is wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give the one that holds the *.safetensors files"
        )
    if (folder / SINGLE_FILE).exists():
        return read_files([folder / SINGLE_FILE])
    if (folder / INDEX_FILE).exists():
        return _read_indexed(folder / INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors file is here; give a folder that holds the weights, or "
            "copy them there"
        )
    return read_files(files)


def hash_weights(folder: Path) -> str:
    """A hash of all bytes of the weights in `folder`, at the speed of its disk."""
    paths = sorted({part.path for tensor in read_folder(folder).values() for part in tensor.parts})
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = pool.map(durable.checksum, paths)
        return durable.hash_json(
            [[path.name, each] for path, each in zip(paths, checksums, strict=True)]
        )


def read_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors in these safetensors files, by name; only headers are read.

    Parts in several files are joined.
    """
    parts_by_name: dict[str, list[tuple[StoredPart, torch.dtype]]] = {}
    for path in paths:
        for entry in read_header(path):
            part = StoredPart(path, entry.begin, entry.offsets, entry.shape)
            parts_by_name.setdefault(entry.name, []).append((part, entry.dtype))
    return {name: join_parts(name, parts) for name, parts in sorted(parts_by_name.items())}


def read(tensor: StoredTensor) -> Tensor:
    """The whole tensor, `dtype[*shape]`, on the CPU."""
    return read_slice(tensor, ())


def read_slice(tensor: StoredTensor, slices: tuple[slice, ...]) -> Tensor:
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
            slice(start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(common, box, strict=True)
        )
        inside = tuple(
            (start - origin, stop - origin)
            for (start, stop), origin in zip(common, part.offsets, strict=True)
        )
        _read_part(tensor, part, inside, result[into])
    return result


def _read_part(tensor: StoredTensor, part: StoredPart, inside: Box, result: Tensor) -> None:
    if isinstance(part, ComputedPart):
        result.copy_(part.read_box(inside))
        return
    try:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _read_box(descriptor, part.position, part.shape, inside, result)
        finally:
            os.close(descriptor)
    except EOFError:
        raise UserError(
            f"{part.path}: {tensor.name}: the file has become shorter than its header says; copy "
            "it again"
        ) from None
    except OSError as error:
        raise UserError(f"{part.path}: {tensor.name}: cannot be read: {error.strerror}") from None


def _read_box(descriptor: int, position: int, shape: Shape, box: Box, result: Tensor) -> None:
    """Fills `result` with the elements `box` of the row-major array `shape` that lies at
    `position`.
    """
    row_bytes = math.prod(shape[1:]) * result.dtype.itemsize
    first = position + (box[0][0] * row_bytes if box else 0)
    rows_are_whole = all(
        bounds == (0, length) for bounds, length in zip(box[1:], shape[1:], strict=True)
    )
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


def _read_bytes(descriptor: int, position: int, result: Tensor) -> None:
    if result.numel():
        view = result.reshape(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(b"")
    while len(view):
        count = os.preadv(descriptor, [view], position)  # at most 2 GiB at a time
        if count == 0:
            raise EOFError
        view = view[count:]
        position = position + count


def _intersection(one: Box, other: Box) -> Box | None:
    """The box common to two, or None where that is empty.

    The box of a scalar is (), and not empty.
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    if all(start < stop for start, stop in common):
        return common
    return None


def _read_indexed(index: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that a Hugging Face index names."""
    weight_map = read_weight_map(index)
    tensors = read_files(index.parent / file for file in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].parts[0].path.name != file:
            raise UserError(
                f"{index}: {name}: the file {file} does not hold it; the index belongs to a "
                "different model"
            )
    return tensors


def join_parts(name: str, pieces: list[tuple[StoredPart, torch.dtype]]) -> StoredTensor:
    """One tensor of its parts, which must agree in dtype and cover it exactly once."""
    (first, dtype), *others = pieces
    for part, other in others:
        if other != dtype or len(part.shape) != len(first.shape):
            raise UserError(
                f"{name}: {first.path} and {part.path} hold parts that differ in dtype or number "
                "of dimensions"
            )
    # a rank without rows may write an empty part
    filled = [part for part, _ in pieces if math.prod(part.shape)]
    parts = sorted(filled or [first], key=lambda part: part.offsets)
    shape = tuple(
        max(stops)
        for stops in zip(*([stop for _, stop in part.box] for part in parts), strict=True)
    )
    _check_disjoint(name, parts)
    missing = math.prod(shape) - sum(math.prod(part.shape) for part in parts)
    if missing:
        places = ", ".join(str(path) for path in sorted({part.path for part in parts})[:3])
        raise UserError(
            f"{places}: {name}: {missing:,} of {math.prod(shape):,} elements are in no file; a "
            "rank's file is missing"
        )
    return StoredTensor(name, shape, dtype, tuple(parts))


def _check_disjoint(name: str, parts: list[StoredPart]) -> None:
    """Raises `UserError` where two parts of a tensor overlap.

    `parts` are sorted by where they begin; only those that a later one can still meet along
    dimension 0 are compared with it.
    """
    live: list[StoredPart] = []
    for part in parts:
        live = [other for other in live if not part.box or other.box[0][1] > part.box[0][0]]
        for other in live:
            if _intersection(part.box, other.box) is not None:
                raise UserError(
                    f"{name}: both {other.path} and {part.path} hold it; remove the file of the "
                    "other model"
                )
        live.append(part)


def main_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """The floating-point dtype that holds the most bytes; None where there is none."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.byte_count
    if sizes:
        return max(sizes, key=lambda dtype: sizes[dtype])
    return None


def choose_dtype(given: str | None, base: Path | None, *others: torch.dtype | None) -> torch.dtype:
    """The dtype of an export: the one `given`, else that of the base model's files, else the first
    known of `others`.

    float64 and float8, which exports do not have, become bfloat16. Raises `UserError` for a bad
    config.json.
    """
    if given is not None:
        return getattr(torch, given)  # type: ignore[no-any-return]
    chosen = next(
        (dtype for dtype in (_base_dtype(base), *others) if dtype is not None), torch.float32
    )
    if str(chosen).removeprefix("torch.") in ITEMSIZE:
        return chosen
    return torch.bfloat16


def config_dtype(config_json: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json states for its weights (`torch_dtype` before transformers 4.56),
    if any.
    """
    name = config_json.get("dtype") or config_json.get("torch_dtype")
    dtype = None
    if isinstance(name, str):
        dtype = getattr(torch, name.removeprefix("torch."), None)
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


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of one file, or a rank's part of one."""

    name: str
    dtype: torch.dtype
    shape: Shape
    begin: int  # bytes, from the file's beginning
    end: int
    offsets: Shape  # of its first element in the whole tensor; zeros for a whole tensor


def read_header(path: Path) -> list[HeaderEntry]:
    """The entries of a safetensors file.

    Raises `UserError` unless its tensors fill it without overlap or gap.
    """
    header, start, size = read_tensor_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: __metadata__: a mapping of strings is expected; {DAMAGED}")
    offsets_of = _read_offsets(path, metadata)
    entries = []
    for name, entry in header.items():
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        entries.append(
            HeaderEntry(name, dtype, shape, start + begin, start + end, offsets_of(name, shape))
        )
    _check_layout(path, entries, start, size)
    return entries


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Shape]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of a safetensors file; the values of `tensors` (name, dtype, shape) follow it
    in this order.
    """
    if metadata:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
    else:
        header = {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the values that follow are aligned
    return len(text).to_bytes(8, "little") + text


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> its file, by a Hugging Face index.

    Raises `UserError` for a file outside its folder.
    """
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map: a mapping of tensors to files is expected")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise UserError(
                f"{index}: {name}: {json.dumps(file_name)[:80]} is not the name of a safetensors "
                "file"
            )
        if Path(file_name).name != file_name or "\\" in file_name or "\0" in file_name:
            raise UserError(
                f"{index}: {name}: {json.dumps(file_name)} leads out of the folder; a plain file "
                "name is expected"
            )
        if not (index.parent / file_name).exists():
            raise UserError(
                f"{index}: {name}: its file {file_name} is missing; copy or download it again"
            )
    return weight_map


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, Shape, int, int]:
    """Returns (dtype, shape, begin, end) of one entry of a header; the last two in bytes from the
    header's end.
    """

    def wrong(what: str) -> NoReturn:
        raise UserError(
            f"{path}: {ascii(name)[1:-1][:NAME_LIMIT]}: {what}; the file is damaged, or no "
            "safetensors file"
        )

    if not isinstance(entry, dict):
        wrong("no dtype, shape and data_offsets")
    if len(name) > NAME_LIMIT or not name.isprintable():
        wrong("not a tensor name")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    ends = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        wrong(f"dtype {json.dumps(dtype)[:80]} is not one that torch knows")
    if not _are_counts(shape) or len(shape) > DIMENSIONS_LIMIT:
        wrong(f"shape {json.dumps(shape)[:80]} is not a list of at most {DIMENSIONS_LIMIT} lengths")
    if not _are_counts(ends) or len(ends) != 2:
        wrong(f"data_offsets {json.dumps(ends)[:80]} are not a beginning and an end")
    begin, end = ends
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        wrong(
            f"{dtype} of shape {shape} takes {expected:,} bytes, its data_offsets claim "
            f"{end - begin:,}"
        )
    return DTYPES[dtype], tuple(shape), begin, end


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _check_layout(path: Path, entries: list[HeaderEntry], start: int, size: int) -> None:
    """The tensors must fill the bytes from `start` to `size` without overlap or gap, as the format
    demands.
    """
    position = start
    previous = "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > size:
            raise UserError(
                f"{path}: {entry.name}: truncated: it ends at byte {entry.end:,} of {size:,}; copy "
                "or download the file again"
            )
        if entry.begin != position:
            if entry.begin < position:
                what = "overlaps"
            else:
                what = "leaves a gap after"
            raise UserError(
                f"{path}: {entry.name}: {what} {previous}; the file is damaged, or no safetensors "
                "file"
            )
        position = entry.end
        previous = entry.name
    if position != size:
        raise UserError(
            f"{path}: {size - position:,} bytes after its last tensor belong to no tensor; the "
            "file is damaged"
        )


def _read_offsets(path: Path, metadata: dict[str, Any]) -> Callable[[str, Shape], Shape]:
    """A function (name, shape) -> where that tensor of the file begins in the whole one."""
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return lambda name, shape: (0,) * len(shape)
    if not isinstance(text, str):
        raise UserError(f"{path}: DCP_SHARDING_INFO: a string is expected")
    sharding = parse_object(path, text.encode("utf-8", "surrogatepass"), "DCP_SHARDING_INFO: ")

    def of(name: str, shape: Shape) -> Shape:
        entry = sharding.get(name)
        offsets = None
        if isinstance(entry, dict):
            offsets = entry.get("saved_offsets")
        if not isinstance(offsets, list) or not _are_counts(offsets) or len(offsets) != len(shape):
            raise UserError(
                f"{path}: {name}: DCP_SHARDING_INFO does not say where this part of {len(shape)} "
                "dimensions begins"
            )
        return tuple(offsets)

    return of
