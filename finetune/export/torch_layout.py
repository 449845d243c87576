"""Where the values of tensors lie in files that torch wrote: `python -m finetune.export.torch_layout PATH...`.

PATH is a folder of `torch.distributed.checkpoint`, or files of `torch.save`. torch itself reads it, by its weights-only
loader over a memory map, and no values are touched. That loader reads what someone else has written, and damage can
make it ask for any amount of memory or crash: so it runs in this process of its own, whose memory is limited.
The answer is one JSON object on stdout: `tensors` and `sizes`, or an `error` for the user.
"""

import io
import json
import mmap
import os
import pickle
import resource
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import _weights_only_unpickler

from finetune.errors import UserError
from finetune.export.dcp_metadata import METADATA, MetadataIndex, StorageInfo, read_metadata

MEMORY_LIMIT_BYTES = 1024**3  # beyond what importing torch takes; memory maps of files are not counted
CPU_LIMIT_SECONDS = 600

# name, dtype, file's name, position in it in bytes, offsets in the whole tensor, shape
Place = tuple[str, str, str, int, tuple[int, ...], tuple[int, ...]]


def main(paths: list[Path]) -> None:
    _limit_resources()
    answer: dict[str, Any]
    try:
        answer = layout(paths)
    except UserError as error:
        answer = {"error": str(error)}
    except MemoryError:
        limit = MEMORY_LIMIT_BYTES // 1024**3
        answer = {
            "error": f"{paths[0]}: needs over {limit} GiB to be described alone; it is damaged, or meant to do harm"
        }
    print(json.dumps(answer))


def layout(paths: list[Path]) -> dict[str, Any]:
    """`tensors`: a `Place` for each piece of each tensor. `sizes`: the shapes that a DCP folder's metadata states, by name.

    Raises `UserError` for what torch's weights-only loader refuses, and for values that do not lie there as they are.
    """
    if paths[0].is_dir():
        return _dcp_folder(paths[0])
    return {"tensors": [place for path in paths for place in _torch_file(path)], "sizes": {}}


def _limit_resources() -> None:
    """Limits this process's own memory, and its time. Where /proc does not say what is used already (not Linux), the time."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    except OSError:
        return
    limit = used + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _dcp_folder(folder: Path) -> dict[str, Any]:
    """Every piece of every tensor of a DCP folder, and the sizes that its metadata states."""
    metadata = read_metadata(folder)
    opened: dict[Path, _MappedFile] = {}
    tensors = [
        _dcp_piece(folder, index, info, opened)
        for index, info in metadata.storage_data.items()
        if getattr(index, "offset", None) is not None  # else a number, a string, a list: none of the weights
    ]
    sizes = {
        name: getattr(description, "size", None)
        for name, description in metadata.state_dict_metadata.items()
        if isinstance(name, str) and _are_lengths(getattr(description, "size", None))
    }
    return {"tensors": tensors, "sizes": sizes}


def _dcp_piece(folder: Path, index: Any, info: Any, opened: "dict[Path, _MappedFile]") -> Place:
    """One tensor piece of a .distcp file: a small torch file of its own between two offsets."""
    where = folder / METADATA
    name, file_name = getattr(index, "fqn", None), getattr(info, "relative_path", None)
    offset, length = getattr(info, "offset", -1), getattr(info, "length", -1)
    if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
        raise UserError(f"{where}: an entry that is no place of a tensor")
    if not isinstance(name, str) or not isinstance(file_name, str):
        raise UserError(f"{where}: an entry without a name or a file")
    if Path(file_name).name != file_name or not file_name.isprintable():
        raise UserError(f"{where}: {name}: its file {file_name!r} leads out of the folder")
    if not _are_lengths((offset, length)) or not _are_lengths(index.offset):
        raise UserError(f"{where}: {name}: its place in {file_name} is no place")
    if getattr(info, "transform_descriptors", None):
        raise UserError(f"{where}: {name}: written through {info.transform_descriptors}; save it without extensions")
    path = folder / file_name
    if path not in opened:
        opened[path] = _MappedFile(path, f"{path}: {name}: its file is missing or")
    archive = _Archive(opened[path], offset, length, f"{path}: {name}")
    content = archive.load()
    if not isinstance(content, torch.Tensor) or content.dim() != len(index.offset):
        raise UserError(f"{path}: {name}: holds no tensor of {len(index.offset)} dimensions")
    return _place(path, name, content, archive, index.offset)


def _torch_file(path: Path) -> list[Place]:
    """Every tensor of a state dict that `torch.save` wrote."""
    file = _MappedFile(path, f"{path}:")
    archive = _Archive(file, 0, file.size, str(path))
    content = archive.load()
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path}: holds no state dict")
    found = {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
    return [_place(path, name, tensor, archive, (0,) * tensor.dim()) for name, tensor in found.items()]


def _place(path: Path, name: str, tensor: torch.Tensor, archive: "_Archive", offsets: tuple[int, ...]) -> Place:
    def refuse(what: str) -> NoReturn:
        raise UserError(f"{path}: {name}: {what}")

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        refuse("has no plain values in the file (a sparse or quantized tensor?)")
    if tensor.is_conj() or tensor.is_neg():
        refuse("is a conjugated or negated view of its values; save it with .resolve_conj().resolve_neg()")
    if not tensor.is_contiguous():
        refuse("its elements do not lie in order; save it with .contiguous()")
    position = archive.begin
    if tensor.numel():
        storage = tensor.untyped_storage()
        record, record_size = archive.record_at(storage.data_ptr())
        begin = int(tensor.storage_offset()) * tensor.dtype.itemsize
        if record is None:
            refuse("has no plain values in the file (a sparse or quantized tensor?)")
        if max(storage.nbytes(), begin + tensor.numel() * tensor.dtype.itemsize) > record_size:
            refuse(f"claims more bytes than the {record_size:,} of its record in the file; it is damaged")
        position += record + begin
    return name, str(tensor.dtype).removeprefix("torch."), path.name, position, offsets, tuple(tensor.shape)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


class _MappedFile:
    """A file whose bytes are addressed as memory and read when they are touched."""

    def __init__(self, path: Path, problem: str) -> None:
        """`problem` begins the error where the file cannot be read."""
        try:
            if not path.is_file():
                raise UserError(f"{problem} cannot be read: no plain file")
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b"\0"
        except OSError as error:
            raise UserError(f"{problem} cannot be read: {error.strerror}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not writable
            self.storage = torch.frombuffer(self._map, dtype=torch.uint8).untyped_storage()
        self.view = memoryview(self._map)[: self.size]


class _Archive:
    """The zip archive that `torch.save` wrote into some part of a file."""

    def __init__(self, file: _MappedFile, begin: int, length: int, where: str) -> None:
        self.begin, self._where = begin, where
        end = min(begin + length, file.size)
        self._bytes = _Section(file.view[begin:end])
        self._storage = file.storage[min(begin, end) : end]
        self._records: dict[int, int] = {}  # where each record of values begins, from `begin` -> its bytes

    def load(self) -> Any:
        """What the archive holds, with tensors that are views of the mapped file. No code of the file's is run."""
        try:
            reader = self._checked_reader()
            # torch.load(mmap=True), from where it has opened the file and mapped it: it takes whole files only.
            load: Any = torch.serialization._load
            return load(reader, "cpu", _weights_only_unpickler, overall_storage=self._storage, encoding="utf-8")
        except pickle.UnpicklingError as error:
            reason = str(error).split("\n")[0]
            raise UserError(f"{self._where}: holds more than weights, and is not opened: {reason}") from None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a damaged archive may raise anything
            raise UserError(f"{self._where}: damaged ({type(error).__name__}); copy it again") from None

    def record_at(self, address: int) -> tuple[int | None, int]:
        """(where the record of values whose first byte is at `address` begins, its bytes); (None, 0): there is none."""
        begin = address - self._storage.data_ptr()
        return (begin, self._records[begin]) if begin in self._records else (None, 0)

    def _checked_reader(self) -> Any:
        """torch's reader of this archive, once it is sure that its records are what a memory map of them shows."""
        if not zipfile.is_zipfile(self._bytes):
            self._refuse("not a torch file of version 1.6 or later, or damaged; save it again with torch.save")
        with zipfile.ZipFile(self._bytes) as archive:
            records = archive.infolist()
        if len({record.filename.casefold() for record in records}) != len(records):
            self._refuse("two of its records have one name; it is damaged")
        self._bytes.seek(0)
        reader: Any = torch._C.PyTorchFileReader(cast(Any, self._bytes))
        if reader.has_record("constants.pkl"):
            self._refuse("a TorchScript archive; save its state_dict() with torch.save")
        if reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode():
            self._refuse("written on a machine of another byte order; load it and save it again on a machine like this")
        end = 0
        values = [(record, record.filename.partition("/")[2]) for record in records]
        for record, name in sorted(values, key=lambda entry: entry[0].header_offset):
            if not name.startswith("data/") or not record.file_size:
                continue
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                self._refuse(f"its record {name} is compressed or encrypted; save it again with torch.save")
            begin = int(reader.get_record_offset(name))
            if begin < end or begin + record.file_size > len(self._storage):
                self._refuse(f"its record {name} leaves the file or overlaps another; it is damaged")
            self._records[begin] = record.file_size
            end = begin + record.file_size
        return reader

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self._where}: {what}")


class _Section(io.RawIOBase):
    """Bytes in memory as a file, not copied."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._content)}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._content[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
