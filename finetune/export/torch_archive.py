"""The zip archive that `torch.save` writes, read over a memory map: its objects without running code, and where its values lie."""

import io
import mmap
import os
import pickle  # for the name of an error: torch's weights-only loader reads
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import _weights_only_unpickler

from finetune.errors import UserError


class MappedFile:
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

    def release(self) -> None:
        """Gives back the pages that have been touched; touched again, they are read again. One byte can make 2 MiB resident."""
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Archive:
    """The zip archive that `torch.save` wrote into some part of a file."""

    def __init__(self, file: MappedFile, begin: int, length: int, where: str) -> None:
        self.begin, self._where = begin, where
        end = min(begin + length, file.size)
        self._bytes = _Section(file.view[begin:end])
        self._storage = file.storage[min(begin, end) : end]
        self._records: dict[int, int] = {}  # where each record of values begins, from `begin` -> its bytes

    def load(self) -> Any:
        """What the archive holds, with tensors that are views of the mapped file. No code of the file's is run."""
        try:
            reader = self._open_reader()
            # What torch.load(mmap=True) calls once it has mapped the file; that function takes whole files only.
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

    def _open_reader(self) -> Any:
        """torch's reader of this archive, once its records are known to lie in the file as they are, without overlap."""
        if not zipfile.is_zipfile(self._bytes):
            self._raise("not a torch file of version 1.6 or later, or damaged; save it again with torch.save")
        with zipfile.ZipFile(self._bytes) as archive:
            records = archive.infolist()
        if len({record.filename.casefold() for record in records}) != len(records):
            self._raise("two of its records have one name; it is damaged")
        self._bytes.seek(0)
        reader: Any = torch._C.PyTorchFileReader(cast(Any, self._bytes))
        if reader.has_record("constants.pkl"):
            self._raise("a TorchScript archive; save its state_dict() with torch.save")
        if reader.has_record("byteorder") and reader.get_record("byteorder") != sys.byteorder.encode():
            self._raise("written on a machine of another byte order; save it again on a machine like this one")
        end = 0
        values = [(record, record.filename.partition("/")[2]) for record in records]
        for record, name in sorted(values, key=lambda entry: entry[0].header_offset):
            if not name.startswith("data/") or not record.file_size:
                continue
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                self._raise(f"its record {name} is compressed or encrypted; save it again with torch.save")
            begin = int(reader.get_record_offset(name))
            if begin < end or begin + record.file_size > len(self._storage):
                self._raise(f"its record {name} leaves the file or overlaps another; it is damaged")
            self._records[begin] = record.file_size
            end = begin + record.file_size
        return reader

    def _raise(self, what: str) -> NoReturn:
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
