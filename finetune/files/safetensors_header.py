"""Headers and indexes of safetensors files: written, read, and checked before they are used.

Headers are not trusted: the file may be damaged or hostile. A wrong length or offset is a `UserError` that names the
file and the tensor, not a crash or a silent mix-up.

Format: https://huggingface.co/docs/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from finetune.errors import UserError
from finetune.files.run_json import LIMIT_BYTES, load_json, open_plain, parse_object

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


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of one file, or a rank's part of one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes, from the file's beginning
    end: int
    offsets: tuple[int, ...]  # of its first element in the whole tensor; zeros for a whole tensor


def read_header(path: Path) -> list[HeaderEntry]:
    """The entries of a safetensors file. Raises `UserError` unless its tensors fill it without overlap or gap."""
    try:
        file = open_plain(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{path}: truncated: {size:,} bytes, where the header alone claims {length:,}; copy or "
                "download it again"
            )
        if length > LIMIT_BYTES:
            raise UserError(f"{path}: its header claims {length:,} bytes; this is no safetensors file")
        header = parse_object(path, file.read(length), "header: ")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: __metadata__: a mapping of strings is expected")
    offsets_of = _read_offsets(path, metadata)
    start = 8 + length
    entries = []
    for name, entry in header.items():
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        entries.append(HeaderEntry(name, dtype, shape, start + begin, start + end, offsets_of(name, shape)))
    _check_layout(path, entries, start, size)
    return entries


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of a safetensors file; the values of `tensors` (name, dtype, shape) follow it in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the values that follow are aligned
    return len(text).to_bytes(8, "little") + text


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the name of its file, as a Hugging Face index says. Raises `UserError` for a file that is not in its
    folder."""
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map: a mapping of tensors to files is expected")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise UserError(f"{index}: {name}: {json.dumps(file_name)[:80]} is not the name of a safetensors file")
        if Path(file_name).name != file_name or "\\" in file_name or "\0" in file_name:
            raise UserError(
                f"{index}: {name}: {json.dumps(file_name)} leads out of the folder; a plain file name is expected"
            )
        if not (index.parent / file_name).exists():
            raise UserError(f"{index}: {name}: its file {file_name} is missing; copy or download it again")
    return weight_map


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one entry of a header; the last two in bytes from the header's end."""

    def wrong(what: str) -> NoReturn:
        raise UserError(
            f"{path}: {ascii(name)[1:-1][:NAME_LIMIT]}: {what}; the file is damaged, or no safetensors file"
        )

    if not isinstance(entry, dict):
        wrong("no dtype, shape and data_offsets")
    if len(name) > NAME_LIMIT or not name.isprintable():
        wrong("not a tensor name")
    dtype, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        wrong(f"dtype {json.dumps(dtype)[:80]} is not one that torch knows")
    if not _are_counts(shape) or len(shape) > DIMENSIONS_LIMIT:
        wrong(f"shape {json.dumps(shape)[:80]} is not a list of at most {DIMENSIONS_LIMIT} lengths")
    if not _are_counts(ends) or len(ends) != 2:
        wrong(f"data_offsets {json.dumps(ends)[:80]} are not a beginning and an end")
    begin, end = ends
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        wrong(f"{dtype} of shape {shape} takes {expected:,} bytes, its data_offsets claim {end - begin:,}")
    return DTYPES[dtype], tuple(shape), begin, end


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, entries: list[HeaderEntry], start: int, size: int) -> None:
    """The tensors must fill the bytes from `start` to `size` without overlap or gap, as the format demands."""
    position, previous = start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > size:
            raise UserError(
                f"{path}: {entry.name}: truncated: it ends at byte {entry.end:,} of {size:,}; copy or "
                "download the file again"
            )
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a gap after"
            raise UserError(f"{path}: {entry.name}: {what} {previous}; the file is damaged, or no safetensors file")
        position, previous = entry.end, entry.name
    if position != size:
        raise UserError(
            f"{path}: {size - position:,} bytes after its last tensor belong to no tensor; the file is damaged"
        )


def _read_offsets(path: Path, metadata: dict[str, Any]) -> Callable[[str, tuple[int, ...]], tuple[int, ...]]:
    """A function (name, shape) -> where that tensor of the file begins in the whole one."""
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return lambda name, shape: (0,) * len(shape)
    if not isinstance(text, str):
        raise UserError(f"{path}: DCP_SHARDING_INFO: a string is expected")
    sharding = parse_object(path, text.encode("utf-8", "surrogatepass"), "DCP_SHARDING_INFO: ")

    def of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        entry = sharding.get(name)
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not _are_counts(offsets) or len(offsets) != len(shape):
            raise UserError(
                f"{path}: {name}: DCP_SHARDING_INFO does not say where this part of {len(shape)} dimensions begins"
            )
        return tuple(offsets)

    return of
