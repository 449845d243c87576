"""Reads slices of tensors from safetensors files, and reads and writes the files' headers.

Two layouts are read. In a Hugging Face folder each tensor is whole in one file. In the layout of
`torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)` each rank's file
holds a part of a tensor, and `DCP_SHARDING_INFO` in the file's metadata gives the offsets at which
the part begins in the whole tensor.

Headers are not trusted: a wrong length or offset is a `UserError` that names the file and the
tensor, not a crash or a silent mix-up. Format: https://huggingface.co/docs/safetensors#format

Bytes are read with `preadv` into the returned tensor. A memory map would be less code, but its
pages count as resident memory, and a file that shrinks while it is mapped kills the process.
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
# Slices of rows up to this size are cut from whole rows in a buffer of BUFFER_BYTES: reading the
# bytes between them costs less than a system call for each.
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
NAME_LIMIT = 500  # characters of a tensor's name

Box = tuple[tuple[int, int], ...]  # (start, stop) in each dimension
Slices = tuple[slice, ...]
ReadSlice = Callable[[Slices], Tensor]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor that lies in one file, contiguous and row-major.

    A part is a box: a range of indices in each dimension of the tensor.
    """

    path: Path
    position: int  # of the first byte, counted from the file's beginning
    offsets: Shape  # index of the part's first element in the whole tensor
    shape: Shape

    @property
    def box(self) -> Box:
        """The part's (start, stop) in each dimension of the whole tensor."""
        return tuple(
            (start, start + length) for start, length in zip(self.offsets, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk. The `parts` hold every element exactly once, unless it is computed."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]
    # Computes slices, none of them empty, from other tensors, such as by dequantization; `parts`
    # are then those of these tensors. None: the values are read as they lie in the files.
    compute: ReadSlice | None = None

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """Reads the headers of a folder's safetensors files and returns {name: tensor}.

    In a Hugging Face folder, the files are those that transformers would load: model.safetensors,
    else the files in the index. In any other folder, they are all *.safetensors files.

    Raises `UserError` if there are no such files, or a header or the index is wrong.
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
    """Hashes the names and all bytes of the weights files in `folder`, which reads all of them."""
    paths = sorted({part.path for tensor in read_folder(folder).values() for part in tensor.parts})
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = pool.map(durable.checksum, paths)
        return durable.hash_json(
            [[path.name, checksum] for path, checksum in zip(paths, checksums, strict=True)]
        )


def read_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Reads the headers of safetensors files and returns {name: tensor}, sorted by name.

    Parts of one tensor in several files are joined.
    """
    parts_by_name: dict[str, list[tuple[StoredPart, torch.dtype]]] = {}
    for path in paths:
        for entry in read_header(path):
            part = StoredPart(path, entry.begin, entry.offsets, entry.shape)
            parts_by_name.setdefault(entry.name, []).append((part, entry.dtype))
    return {name: join_parts(name, parts) for name, parts in sorted(parts_by_name.items())}


def read(tensor: StoredTensor) -> Tensor:
    """Reads the whole tensor, `dtype[*shape]`, on the CPU."""
    return read_slice(tensor, ())


def read_slice(tensor: StoredTensor, slices: tuple[slice, ...]) -> Tensor:
    """Reads `read(tensor)[slices]`, contiguous and on the CPU, without reading the whole tensor.

    Slices must have step 1. Dimensions after the last slice are read whole.

    Raises `UserError` if a file cannot be read or has become shorter than its header says.
    """
    # there may be fewer slices than dimensions
    bounds = [wanted.indices(length) for wanted, length in zip(slices, tensor.shape, strict=False)]
    if len(slices) > len(tensor.shape) or any(step != 1 for _, _, step in bounds):
        raise ValueError(f"{slices}: not unit-step slices of a tensor of shape {tensor.shape}")
    box: Box = tuple((start, max(start, stop)) for start, stop, _ in bounds)
    box += tuple((0, length) for length in tensor.shape[len(box) :])
    result = torch.empty([stop - start for start, stop in box], dtype=tensor.dtype)
    if tensor.compute is not None:
        if result.numel():
            result = tensor.compute(tuple(slice(start, stop) for start, stop in box))
        return result.to(tensor.dtype).contiguous()
    for part in tensor.parts:
        common = _intersect(part.box, box)
        if common is None:
            continue
        common_in_result = tuple(
            slice(start - origin, stop - origin)
            for (start, stop), (origin, _) in zip(common, box, strict=True)
        )
        common_in_part = tuple(
            (start - origin, stop - origin)
            for (start, stop), origin in zip(common, part.offsets, strict=True)
        )
        _read_part(tensor, part, common_in_part, result[common_in_result])
    return result


def _read_part(tensor: StoredTensor, part: StoredPart, inside: Box, result: Tensor) -> None:
    """Fills `result` with the elements `inside` of a part; indices count from the part's beginning.

    Raises `UserError` if the file cannot be read or is too short.
    """
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
    """Fills `result` with the elements `box` of an array in a file.

    The array has `shape`, is row-major and begins at byte `position`. A row is all that one index
    of dimension 0 selects.
    """
    row_bytes = math.prod(shape[1:]) * result.dtype.itemsize
    first_row_position = position
    if box:  # else a scalar
        first_row, _ = box[0]
        first_row_position += first_row * row_bytes
    rows_are_whole = all(
        bounds == (0, length) for bounds, length in zip(box[1:], shape[1:], strict=True)
    )
    if rows_are_whole and result.is_contiguous():
        _read_bytes(descriptor, first_row_position, result)
    elif row_bytes > RUN_BYTES and len(shape) > 1:
        for row in range(len(result)):
            row_position = first_row_position + row * row_bytes
            _read_box(descriptor, row_position, shape[1:], box[1:], result[row])
    else:
        buffer_rows = max(1, BUFFER_BYTES // row_bytes)
        in_row = tuple(slice(start, stop) for start, stop in box[1:])
        for row in range(0, len(result), buffer_rows):
            row_count = min(buffer_rows, len(result) - row)
            buffer = torch.empty((row_count, *shape[1:]), dtype=result.dtype)
            _read_bytes(descriptor, first_row_position + row * row_bytes, buffer)
            result[row : row + buffer_rows] = buffer[(slice(None), *in_row)]


def _read_bytes(descriptor: int, position: int, result: Tensor) -> None:
    """Fills a contiguous tensor with the bytes of a file from `position` on.

    Raises `EOFError` if the file ends before.
    """
    if result.numel():
        view = result.reshape(-1).view(torch.uint8).numpy().data
    else:
        view = memoryview(b"")
    while len(view):
        byte_count = os.preadv(descriptor, [view], position)  # at most 2 GiB at a time
        if byte_count == 0:
            raise EOFError
        view = view[byte_count:]
        position = position + byte_count


def _intersect(box: Box, other: Box) -> Box | None:
    """Returns the box of the elements that are in both boxes, or None if there are none.

    The box of a scalar, (), holds one element.
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    if all(start < stop for start, stop in common):
        return common
    return None


def _read_indexed(index: Path) -> dict[str, StoredTensor]:
    """Reads the headers of the files that a Hugging Face index names; returns {name: tensor}.

    Raises `UserError` if a tensor is not in the file that the index gives for it.
    """
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
    """Joins the parts of one tensor, each given with the dtype in its file.

    Raises `UserError` if the dtypes or numbers of dimensions differ, parts overlap, or elements are
    missing.
    """
    (first, dtype), *others = pieces
    for part, part_dtype in others:
        if part_dtype != dtype or len(part.shape) != len(first.shape):
            raise UserError(
                f"{name}: {first.path} and {part.path} hold parts that differ in dtype or number "
                "of dimensions"
            )
    # a rank without rows may write an empty part
    filled = [part for part, _ in pieces if math.prod(part.shape)]
    parts = sorted(filled or [first], key=lambda part: part.offsets)
    # no file holds the whole shape: it reaches to the last stop in each dimension
    shape = tuple(
        max(stops)
        for stops in zip(*([stop for _, stop in part.box] for part in parts), strict=True)
    )
    _check_disjoint(name, parts)
    missing = math.prod(shape) - sum(math.prod(part.shape) for part in parts)
    if missing:
        files = ", ".join(str(path) for path in sorted({part.path for part in parts})[:3])
        raise UserError(
            f"{files}: {name}: {missing:,} of {math.prod(shape):,} elements are in no file; a "
            "rank's file is missing"
        )
    return StoredTensor(name, shape, dtype, tuple(parts))


def _check_disjoint(name: str, parts: list[StoredPart]) -> None:
    """Raises `UserError` if two parts of a tensor overlap. `parts` must be sorted by `offsets`.

    A part is compared only with earlier parts that reach into its range of dimension 0.
    """
    reaching: list[StoredPart] = []
    for part in parts:
        if part.box:  # else a scalar
            start, _ = part.box[0]
            reaching = [other for other in reaching if other.box[0][1] > start]
        for other in reaching:
            if _intersect(part.box, other.box) is not None:
                raise UserError(
                    f"{name}: both {other.path} and {part.path} hold it; remove the file of the "
                    "other model"
                )
        reaching.append(part)


def main_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """Returns the floating-point dtype of most bytes in `tensors`; None if none is floating."""
    byte_counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            byte_counts[tensor.dtype] = byte_counts.get(tensor.dtype, 0) + tensor.byte_count
    if byte_counts:
        return max(byte_counts, key=lambda dtype: byte_counts[dtype])
    return None


def choose_dtype(given: str | None, base: Path | None, *others: torch.dtype | None) -> torch.dtype:
    """Chooses the dtype of an export: `given`, or the base's, or the first of `others` not None.

    Without any of them it is float32. If the base or one of the others has a dtype that exports do
    not have (such as float64 or float8), it is bfloat16.

    `base` is the base model's folder; its config.json is read if its weights are not on this
    machine. Raises `UserError` if that file is damaged.
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
    """Returns the dtype of the weights that a config.json states, or None if it states none.

    The key is "dtype"; before transformers 4.56 it was "torch_dtype".
    """
    name = config_json.get("dtype") or config_json.get("torch_dtype")
    dtype = None
    if isinstance(name, str):
        dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _base_dtype(base: Path | None) -> torch.dtype | None:
    """Returns the dtype of most of the base's weights, or that in its config.json if the folder has
    no weights; None if neither is known.
    """
    if base is None:
        return None
    try:
        return main_dtype(read_folder(base).values())
    except UserError:
        path = base / CONFIG_FILE
        return config_dtype(load_json(path)) if path.exists() else None


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor, or a rank's part of a tensor, in one file's header."""

    name: str
    dtype: torch.dtype
    shape: Shape
    begin: int  # first byte, counted from the file's beginning
    end: int  # behind the last byte
    offsets: Shape  # index of the first element in the whole tensor; zeros if this is all of it


def read_header(path: Path) -> list[HeaderEntry]:
    """Reads the entries in a safetensors file's header.

    Raises `UserError` if an entry is wrong, or the tensors overlap or leave gaps in the file.
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
    tensors: Iterable[tuple[str, torch.dtype, Shape]], metadata: Mapping[str, str]
) -> bytes:
    """Makes the first bytes of a safetensors file: the header's length and the header.

    The values of `tensors`, each (name, dtype, shape), must follow in the same order.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
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
    """Reads a Hugging Face index and returns {tensor's name: file name}.

    Raises `UserError` if a file is missing, is outside the index's folder, or is no safetensors
    file by its name.
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
    """Checks one entry of a header and returns its (dtype, shape, begin, end).

    `begin` and `end` are offsets in bytes from the header's end; `end` is exclusive. Raises
    `UserError` if the entry is wrong.
    """

    def fail(problem: str) -> NoReturn:
        raise UserError(
            f"{path}: {ascii(name)[1:-1][:NAME_LIMIT]}: {problem}; the file is damaged, or no "
            "safetensors file"
        )

    if not isinstance(entry, dict):
        fail("no dtype, shape and data_offsets")
    if len(name) > NAME_LIMIT or not name.isprintable():
        fail("not a tensor name")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    bounds = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(f"dtype {json.dumps(dtype)[:80]} is not one that torch knows")
    if not _are_counts(shape) or len(shape) > DIMENSIONS_LIMIT:
        fail(f"shape {json.dumps(shape)[:80]} is not a list of at most {DIMENSIONS_LIMIT} lengths")
    if not _are_counts(bounds) or len(bounds) != 2:
        fail(f"data_offsets {json.dumps(bounds)[:80]} are not a beginning and an end")
    begin, end = bounds
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        fail(
            f"{dtype} of shape {shape} takes {expected:,} bytes, its data_offsets claim "
            f"{end - begin:,}"
        )
    return DTYPES[dtype], tuple(shape), begin, end


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether `value` is a list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _check_layout(path: Path, entries: list[HeaderEntry], start: int, size: int) -> None:
    """Raises `UserError` unless the tensors fill the bytes from `start` to `size` of the file.

    The safetensors format allows no overlaps and no gaps.
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
                problem = "overlaps"
            else:
                problem = "leaves a gap after"
            raise UserError(
                f"{path}: {entry.name}: {problem} {previous}; the file is damaged, or no "
                "safetensors file"
            )
        position = entry.end
        previous = entry.name
    if position != size:
        raise UserError(
            f"{path}: {size - position:,} bytes after its last tensor belong to no tensor; the "
            "file is damaged"
        )


def _read_offsets(path: Path, metadata: dict[str, Any]) -> Callable[[str, Shape], Shape]:
    """Reads the sharding in a file's metadata; returns a function (name, shape of part) -> offsets.

    The offsets are the index of the part's first element in the whole tensor. They are all 0 in a
    file of whole tensors. The function raises `UserError` if the metadata lacks the part's offsets.
    """
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return lambda name, shape: (0,) * len(shape)
    if not isinstance(text, str):
        raise UserError(f"{path}: DCP_SHARDING_INFO: a string is expected")
    sharding = parse_object(path, text.encode("utf-8", "surrogatepass"), "DCP_SHARDING_INFO: ")

    def find_offsets(name: str, shape: Shape) -> Shape:
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

    return find_offsets
