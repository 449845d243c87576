"""Tensors inside files that torch wrote with pickle, found without running anything that they bring along.

Two kinds: a `torch.distributed.checkpoint` folder (`.metadata` and `*.distcp`) and a whole state dict (`*.bin`, `*.pt`).
Both keep the values as plain, uncompressed records. Where a record lies is learnt through torch's weights-only
unpickler under FakeTensorMode, which reads no values; from then on they are read like safetensors, slice by slice.
"""

import io
import math
import os
import pickle  # read through _MetadataUnpickler alone, which admits no code
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from finetune.errors import UserError
from finetune.tensors import Piece, StoredTensor, join_pieces

METADATA = ".metadata"
METADATA_LIMIT_BYTES = 1024**3
_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Admits DCP's own metadata classes and torch's dtypes; any other name stops it before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in _ADMITTED:
            return _path_text
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


class _Refused(Exception):
    """The name of something that a pickle wanted to import."""


def _memory_format(kind: Any, name: str) -> Any:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 wrote the members of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise _Refused("builtins.getattr")
    return kind[name]


def _path_text(*parts: str) -> str:
    return "/".join(parts)  # a path of another machine: never opened, and of a class that this one may not have


def read_dcp_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder that `torch.distributed.checkpoint.save` wrote, by name; no values are read.

    Raises `UserError` where the metadata asks for anything but DCP's own classes, or names what the files do not hold.
    """
    metadata = _read_metadata(folder / METADATA)
    found: dict[str, list[tuple[Piece, torch.dtype]]] = {}
    for index, info in metadata.storage_data.items():
        if getattr(index, "offset", None) is None:
            continue  # a number, a string, a list: none of the weights
        name, piece, dtype = _checked_item(folder, index, info)
        found.setdefault(name, []).append((piece, dtype))
    tensors = {name: join_pieces(name, pieces) for name, pieces in sorted(found.items())}
    for name, description in metadata.state_dict_metadata.items():
        size = getattr(description, "size", None)
        if size is not None and (name not in tensors or tensors[name].shape != tuple(size)):
            has = f"pieces of shape {list(tensors[name].shape)}" if name in tensors else "no piece"
            raise UserError(f"{folder}: {name}: of shape {list(size)} by its metadata, but the files hold {has}")
    return tensors


def _read_metadata(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with path.open("rb") as file:
            content = file.read(METADATA_LIMIT_BYTES)
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except _Refused as refused:
        raise UserError(
            f"{path}: wants to import {refused}, which no checkpoint needs; do not trust this folder"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{path}: damaged ({type(error).__name__}); copy it again") from None
    parts = (getattr(metadata, "storage_data", None), getattr(metadata, "state_dict_metadata", None))
    if not isinstance(metadata, Metadata) or not all(isinstance(part, Mapping) for part in parts):
        raise UserError(f"{path}: does not describe a checkpoint")
    return metadata


def _checked_item(folder: Path, index: Any, info: Any) -> tuple[str, Piece, torch.dtype]:
    """One tensor piece of a .distcp file: a small torch file of its own between two offsets."""
    name, file_name = getattr(index, "fqn", None), getattr(info, "relative_path", None)
    offset, length = getattr(info, "offset", -1), getattr(info, "length", -1)
    if not isinstance(name, str) or not isinstance(file_name, str):
        raise UserError(f"{folder / METADATA}: an entry without a name or a file")
    if Path(file_name).name != file_name or not file_name.isprintable():
        raise UserError(f"{folder / METADATA}: {name}: its file {file_name!r} leads out of the folder")
    offsets = index.offset
    if not all(type(n) is int and n >= 0 for n in (offset, length, *offsets)):
        raise UserError(f"{folder / METADATA}: {name}: its place in {file_name} is no place")
    if getattr(info, "transform_descriptors", None):
        raise UserError(
            f"{folder / METADATA}: {name}: written through {info.transform_descriptors}; save it without extensions"
        )
    path = folder / file_name
    try:
        with path.open("rb") as file:
            item = _Section(file, offset, length)
            content = _fake_load(item, f"{path}: {name}")
    except OSError as error:
        raise UserError(f"{path}: {name}: its file is missing or cannot be read: {error.strerror}") from None
    if not isinstance(content, torch.Tensor) or content.dim() != len(offsets):
        raise UserError(f"{path}: {name}: holds no tensor of {len(offsets)} dimensions")
    piece = _piece(path, name, content, tuple(offsets), base=offset, end=offset + length)
    return name, piece, content.dtype


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a state dict that `torch.save` wrote, by name; no values are read and no code is run."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = _fake_load(file, str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path}: holds no state dict")
    return {
        name: StoredTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            (_piece(path, name, tensor, (0,) * tensor.dim(), base=0, end=size),),
        )
        for name, tensor in sorted(content.items())
        if isinstance(tensor, torch.Tensor)
    }


def _fake_load(file: Any, where: str) -> Any:
    """What the file holds, with tensors that know their places in it instead of their values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second of imports that only these files need

    try:
        if not zipfile.is_zipfile(file):
            raise UserError(
                f"{where}: not a torch file of version 1.6 or later, or damaged; save it again with torch.save"
            )
        file.seek(0)
        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{where}: holds more than weights, and is not opened: {reason}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise UserError(f"{where}: damaged ({type(error).__name__}); copy it again") from None


def _piece(path: Path, name: str, tensor: torch.Tensor, offsets: tuple[int, ...], *, base: int, end: int) -> Piece:
    """Where a fake tensor's values lie in its file. `base` and `end` bound the archive that it came from, in bytes."""
    if not tensor.is_contiguous():
        raise UserError(f"{path}: {name}: its elements do not lie in order; save it with .contiguous()")
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if not isinstance(start, int):
        raise UserError(f"{path}: {name}: has no plain values in the file (a sparse or quantised tensor?)")
    position = base + start + int(tensor.storage_offset()) * tensor.dtype.itemsize
    if position + math.prod(tensor.shape) * tensor.dtype.itemsize > end:
        raise UserError(f"{path}: {name}: truncated; copy the file again")
    return Piece(path, position, offsets, tuple(tensor.shape))


class _Section(io.RawIOBase):
    """The bytes from `start` to `start + length` of an open file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
