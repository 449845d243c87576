"""Finds the tensors in files that torch wrote with pickle, without running any code in them.

There are two kinds: a `torch.distributed.checkpoint` (DCP) folder with `.metadata` and `*.distcp`,
and a whole state dict (`*.bin`, `*.pt`). Both keep values as plain, uncompressed records. Once it
is known where these lie, they are read like safetensors, slice by slice.

torch's weights-only loader finds them, over a memory map of the file. It does not read `.metadata`;
an unpickler here that imports and calls nothing does. A damaged file can make either of them crash
or ask for any amount of memory. So they run in a separate process with limited memory and time,
`python -m finetune.export.torch_files PATH...`. It writes one JSON object to stdout: `tensors` and
`sizes`, or an `error` for the user.
"""

import gc
import io
import json
import mmap
import os
import pickle  # used through _MetadataReader alone, which runs no code
import pickletools
import resource
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import Tensor, _weights_only_unpickler

from finetune.constants import Shape
from finetune.errors import UserError
from finetune.export.reload_process import describe_end, make_python_path
from finetune.files.tensors import StoredPart, StoredTensor, join_parts

METADATA = ".metadata"  # the index of a DCP folder


class MappedFile:
    """A memory map of a file: its bytes are read when they are first used."""

    def __init__(self, path: Path, problem: str) -> None:
        """Maps the file. `problem` is how the error begins if it cannot be read."""
        try:
            if not path.is_file():
                raise UserError(f"{problem} cannot be read: no plain file")
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                # an empty file cannot be mapped
                self._map = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b"\0"
                )
        except OSError as error:
            raise UserError(f"{problem} cannot be read: {error.strerror}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the map is not writable
            self.storage = torch.frombuffer(self._map, dtype=torch.uint8).untyped_storage()
        self.view = memoryview(self._map)[: self.size]

    def release(self) -> None:
        """Frees the memory of the pages that were read; later use reads them again.

        One byte can make 2 MiB resident.
        """
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Archive:
    """The zip archive that `torch.save` wrote: a whole file, or a stretch of one."""

    def __init__(self, file: MappedFile, begin: int, length: int, where: str) -> None:
        """Takes the stretch of `file` in which the archive lies; `load` opens it.

        Args:
            file: The file that holds the archive.
            begin: The archive's first byte in the file.
            length: The archive's bytes.
            where: Names the archive in errors.
        """
        self.begin = begin
        self._where = where
        end = min(begin + length, file.size)
        self._bytes = _Section(file.view[begin:end])
        self._storage = file.storage[min(begin, end) : end]  # empty if `begin` is beyond the file
        # first byte of a record of values, counted from `begin` -> the record's length in bytes
        self._records: dict[int, int] = {}

    def load(self) -> Any:
        """Returns the object in the archive; its tensors are views of the mapped file.

        No code in the archive is run. Raises `UserError` if the archive is damaged or holds more
        than weights.
        """
        try:
            reader = self._open_reader()
            # torch.load(mmap=True) maps a file and calls this function. It is called here directly,
            # since torch.load takes whole files only.
            load: Any = torch.serialization._load
            return load(
                reader,
                "cpu",
                _weights_only_unpickler,
                overall_storage=self._storage,
                encoding="utf-8",
            )
        except pickle.UnpicklingError as error:
            reason = str(error).split("\n")[0]
            raise UserError(
                f"{self._where}: holds more than weights, and is not opened: {reason}"
            ) from None
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a damaged archive may raise anything
            raise UserError(
                f"{self._where}: damaged ({type(error).__name__}); copy it again"
            ) from None

    def record_at(self, address: int) -> tuple[int | None, int]:
        """Returns (begin, length) of the record of values that is mapped at a memory address.

        Both are in bytes, `begin` from the archive's first byte. Returns (None, 0) if no record
        begins there.
        """
        begin = address - self._storage.data_ptr()
        if begin in self._records:
            return (begin, self._records[begin])
        return (None, 0)

    def _open_reader(self) -> Any:
        """Checks the archive, notes where its records of values lie, and returns torch's reader.

        Raises `UserError` if torch could not read the archive, or if a record leaves it, overlaps
        another or is compressed.
        """
        if not zipfile.is_zipfile(self._bytes):
            self._raise(
                "not a torch file of version 1.6 or later, or damaged; save it again with "
                "torch.save"
            )
        with zipfile.ZipFile(self._bytes) as archive:
            records = archive.infolist()
        if len({record.filename.casefold() for record in records}) != len(records):
            self._raise("two of its records have one name; it is damaged")
        self._bytes.seek(0)
        reader: Any = torch._C.PyTorchFileReader(cast(Any, self._bytes))
        if reader.has_record("constants.pkl"):
            self._raise("a TorchScript archive; save its state_dict() with torch.save")
        if (
            reader.has_record("byteorder")
            and reader.get_record("byteorder") != sys.byteorder.encode()
        ):
            self._raise(
                "written on a machine of another byte order; save it again on a machine like this "
                "one"
            )
        previous_end = 0
        for record in sorted(records, key=lambda record: record.header_offset):
            _, _, name = record.filename.partition("/")  # without the archive's top folder
            if not name.startswith("data/") or not record.file_size:
                continue
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                self._raise(
                    f"its record {name} is compressed or encrypted; save it again with torch.save"
                )
            begin = int(reader.get_record_offset(name))
            end = begin + record.file_size
            if begin < previous_end or end > len(self._storage):
                self._raise(f"its record {name} leaves the file or overlaps another; it is damaged")
            self._records[begin] = record.file_size
            previous_end = end
        return reader

    def _raise(self, problem: str) -> NoReturn:
        raise UserError(f"{self._where}: {problem}")


class _Section(io.RawIOBase):
    """A read-only file over bytes in memory, without a copy of them."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._content)}[
            whence
        ]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._content[self._position : self._position + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


# As verify.py does: the collector would walk through all objects that imports make.
if __name__ == "__main__":
    gc.disable()


# What the process may use beyond the memory that importing torch takes. Memory maps of files are
# not counted.
MEMORY_LIMIT_BYTES = 1024**3
CPU_LIMIT_SECONDS = 600

# A part of a tensor: (tensor's name, dtype, file's name, position in the file in bytes, offsets of
# the part in the whole tensor, shape of the part). JSON makes lists of the tuples.
Place = tuple[str, str, str, int, tuple[int, ...], tuple[int, ...]]


def read_dcp_folder(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a DCP folder by name. It reads no values.

    Raises `UserError` if the metadata asks for anything but DCP's own classes, or disagrees with
    the files.
    """
    answer = _run_find_places(folder)
    tensors = _join_places(folder, answer["tensors"])
    for name, size in answer["sizes"].items():
        if name not in tensors or tensors[name].shape != tuple(size):
            if name in tensors:
                has = f"parts of shape {list(tensors[name].shape)}"
            else:
                has = "no part"
            raise UserError(
                f"{folder}: {name}: of shape {size} by its metadata, but the files hold {has}"
            )
    return tensors


def read_torch_files(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors of state dicts that `torch.save` wrote, by name. It reads no values.

    The files lie in one folder and hold one model together. Raises `UserError` if a file holds
    anything but weights, or values that are not stored there as plain bytes.
    """
    return _join_places(paths[0].parent, _run_find_places(*paths)["tensors"])


def _join_places(folder: Path, places: list[Any]) -> dict[str, StoredTensor]:
    """Joins the parts of each tensor. `places`: `Place`s in files of `folder`, as JSON gives them.

    Raises `UserError` if the parts of a tensor do not cover it exactly once.
    """
    parts_by_name: dict[str, list[tuple[StoredPart, torch.dtype]]] = {}
    for name, dtype, file_name, position, offsets, shape in places:
        part = StoredPart(folder / file_name, position, tuple(offsets), tuple(shape))
        parts_by_name.setdefault(name, []).append((part, getattr(torch, dtype)))
    return {name: join_parts(name, parts) for name, parts in sorted(parts_by_name.items())}


def _run_find_places(*paths: Path) -> Any:
    """Calls `find_places(paths)` in a separate process and returns its answer.

    Raises `UserError` if the process reports an error or ends without an answer.
    """
    environment = os.environ | {"PYTHONPATH": make_python_path()}
    # -P: Python does not import from the current folder
    command = [sys.executable, "-P", "-m", "finetune.export.torch_files", *map(str, paths)]
    finished = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True
    )
    try:
        answer = json.loads(finished.stdout)
    except ValueError:
        reason = describe_end(finished.returncode, finished.stderr.decode(errors="replace"))
        raise UserError(
            f"{paths[0]}: torch could not read it ({reason}); it is damaged, or no file that torch "
            "wrote"
        ) from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def main(paths: list[Path]) -> None:
    """Runs the separate process: prints the answer of `find_places`, or an error, as JSON."""
    _limit_resources()
    answer: dict[str, Any]
    try:
        answer = find_places(paths)
    except UserError as error:
        answer = {"error": str(error)}
    except MemoryError:
        limit = MEMORY_LIMIT_BYTES // 1024**3
        answer = {
            "error": (
                f"{paths[0]}: needs over {limit} GiB to list its tensors; it is damaged or hostile"
            )
        }
    print(json.dumps(answer))


def find_places(paths: list[Path]) -> dict[str, Any]:
    """Finds where the tensors of `paths`, one DCP folder or some torch files, lie.

    Returns:
        `tensors`: a `Place` for each part of each tensor. `sizes`: name -> shape by the metadata of
        a DCP folder; empty for torch files.

    Raises:
        UserError: torch's weights-only loader refuses a file, or values are not stored as plain
            bytes.
    """
    if paths[0].is_dir():
        return _find_in_dcp_folder(paths[0])
    tensors = [place for path in paths for place in _find_in_torch_file(path)]
    return {"tensors": tensors, "sizes": {}}


def _limit_resources() -> None:
    """Limits the time and memory of this process, and has it write no core dump.

    Without /proc (not on Linux) the memory is not limited: the memory in use is not known.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return
    _size, _resident, _shared, _text, _library, data_pages, *_ = fields
    limit = int(data_pages) * mmap.PAGESIZE + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Unread:
    """A stand-in for a class that a pickle names: it keeps the attributes, and runs no code."""

    attributes: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *_: object) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


# The only names that DCP's metadata refers to -> the stand-ins.
_STAND_INS: Mapping[str, type] = {
    **dict.fromkeys(
        """
        torch.distributed.checkpoint.metadata.Metadata
        torch.distributed.checkpoint.metadata.MetadataIndex
        torch.distributed.checkpoint.metadata.StorageMeta
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
        torch.distributed.checkpoint.metadata.BytesStorageMetadata
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
        torch.distributed.checkpoint.metadata.TensorProperties
        torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.filesystem._StorageInfo
        torch.serialization._get_layout
        pathlib.PosixPath pathlib.WindowsPath
        pathlib._local.PosixPath pathlib._local.WindowsPath
        """.split(),  # noqa: SIM905 - the names as they are searched for
        _Unread,
    ),
    # Python 3.11.0 to 3.11.3 pickled the members of an enumeration with it
    "builtins.getattr": _Unread,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
}


# The opcodes of pickle protocols 2 to 5 that write numbers, texts, collections and objects.
OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1
    TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ
    REDUCE BUILD
    """.split()  # noqa: SIM905 - a name a line would be a page
)


def _check_opcodes(content: bytes) -> None:
    """Checks a pickle before it is loaded, opcode by opcode.

    An unpickler makes room for the largest index of its memo (the list of objects that the pickle
    refers to again), so nine bytes could ask for gigabytes. Indices must follow one another.

    Raises `UserError` for an opcode that DCP's metadata never needs and for a memo with holes, and
    lets `pickletools` raise ValueError for an argument longer than the rest of the file.
    """
    memo_size = 0
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name not in OPCODES:
            raise UserError(
                f"holds the pickle opcode {opcode.name} at byte {position:,}, which no checkpoint "
                "needs"
            )
        if opcode.name in ("BINPUT", "LONG_BINPUT") and (argument is None or argument > memo_size):
            raise UserError(
                f"refers to place {argument:,} of a memo of {memo_size:,} at byte {position:,}; "
                "damaged"
            )
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo_size += 1


class _MetadataReader(pickle.Unpickler):
    """An unpickler that imports nothing: it has stand-ins for the names that DCP writes."""

    def find_class(self, module: str, name: str) -> type:
        """Returns the stand-in for `module.name`; raises `UserError` for any other name."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return _Unread
        full_name = f"{module}.{name}"
        if full_name not in _STAND_INS:
            raise UserError(
                f"wants to import {full_name}, which no checkpoint needs; do not trust this folder"
            )
        return _STAND_INS[full_name]


def read_metadata(folder: Path) -> Mapping[str, dict[Any, Any]]:
    """Reads the `storage_data` and `state_dict_metadata` of a DCP folder.

    Both are dicts; what is in them is not checked. No code in the file is run.

    Raises `UserError` if the file asks for anything but DCP's own classes, is damaged, or describes
    no checkpoint.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
        _check_opcodes(content)
        attributes = getattr(_MetadataReader(io.BytesIO(content)).load(), "attributes", {})
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{path}: damaged ({type(error).__name__}); copy it again") from None
    if not all(
        isinstance(attributes.get(name), dict) for name in ("storage_data", "state_dict_metadata")
    ):
        raise UserError(f"{path}: does not describe a checkpoint")
    return attributes


def _find_in_dcp_folder(folder: Path) -> dict[str, Any]:
    """Finds the parts of all tensors in a DCP folder, as `find_places` returns them."""
    metadata = read_metadata(folder)
    opened_files: dict[Path, MappedFile] = {}
    entries = [
        (_attributes(index), _attributes(info)) for index, info in metadata["storage_data"].items()
    ]
    # An entry without an offset is no tensor: a number, a string or a list.
    tensors = [
        _find_dcp_part(folder, index, info, opened_files)
        for index, info in entries
        if index.get("offset") is not None
    ]
    stated_sizes = {
        name: _attributes(description).get("size")
        for name, description in metadata["state_dict_metadata"].items()
    }
    # likewise: only a tensor's description has a size
    sizes = {
        name: size
        for name, size in stated_sizes.items()
        if isinstance(name, str) and _are_lengths(size)
    }
    return {"tensors": tensors, "sizes": sizes}


def _attributes(value: Any) -> Mapping[str, Any]:
    """Returns the attributes of a stand-in; none for any other value of a damaged pickle."""
    return value.attributes if isinstance(value, _Unread) else {}


def _find_dcp_part(
    folder: Path,
    index: Mapping[str, Any],
    info: Mapping[str, Any],
    opened_files: dict[Path, MappedFile],
) -> Place:
    """Finds a part of a tensor in a DCP folder: a small torch file within a .distcp file.

    Args:
        folder: The DCP folder.
        index: Attributes of DCP's MetadataIndex: the tensor's name and the part's offsets.
        info: Attributes of DCP's _StorageInfo: the .distcp file, and the stretch of it.
        opened_files: The .distcp files mapped so far; a file that is missing there is added.

    Raises:
        UserError: The entry is not valid, or the file does not hold such a tensor.
    """
    where = folder / METADATA
    offsets = index["offset"]
    name = index.get("fqn")
    file_name = info.get("relative_path")
    stretch = (info.get("offset"), info.get("length"))  # in bytes
    if not isinstance(name, str) or not isinstance(file_name, str):
        raise UserError(f"{where}: an entry without a name or a file")
    if Path(file_name).name != file_name or not file_name.isprintable():
        raise UserError(f"{where}: {name}: its file {file_name!r} leads out of the folder")
    if not _are_lengths(stretch) or not _are_lengths(offsets):
        raise UserError(f"{where}: {name}: its place in {file_name} is not valid")
    if extensions := info.get("transform_descriptors"):
        raise UserError(
            f"{where}: {name}: written through {extensions}; save it without extensions"
        )
    path = folder / file_name
    if path not in opened_files:
        opened_files[path] = MappedFile(path, f"{path}: {name}: its file is missing or")
    begin, length = stretch
    archive = Archive(opened_files[path], begin, length, f"{path}: {name}")
    content = archive.load()
    if not isinstance(content, Tensor) or content.dim() != len(offsets):
        raise UserError(f"{path}: {name}: holds no tensor of {len(offsets)} dimensions")
    place = _make_place(path, name, content, archive, offsets)
    opened_files[path].release()
    return place


def _find_in_torch_file(path: Path) -> list[Place]:
    """Finds the tensors of a state dict that `torch.save` wrote, alone or under the key `model`."""
    file = MappedFile(path, f"{path}:")
    archive = Archive(file, 0, file.size, str(path))
    content = archive.load()
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path}: holds no state dict")
    tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    return [
        _make_place(path, name, tensor, archive, (0,) * tensor.dim())
        for name, tensor in tensors.items()
    ]


def _make_place(path: Path, name: str, tensor: Tensor, archive: Archive, offsets: Shape) -> Place:
    """Makes the `Place` of a tensor that `archive` has loaded from the file `path`.

    `offsets`: where the tensor begins in the whole one; zeros if it is whole. Raises `UserError` if
    the values are not plain, contiguous bytes of a record in the file.
    """

    def refuse(problem: str) -> NoReturn:
        raise UserError(f"{path}: {name}: {problem}")

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        refuse("has no plain values in the file (a sparse or quantized tensor?)")
    if tensor.is_conj() or tensor.is_neg():
        refuse(
            "is a conjugated or negated view of its values; save it with "
            ".resolve_conj().resolve_neg()"
        )
    if not tensor.is_contiguous():
        refuse("its elements do not lie in order; save it with .contiguous()")
    position = archive.begin
    if tensor.numel():  # an empty tensor has no record
        storage = tensor.untyped_storage()
        record_begin, record_bytes = archive.record_at(storage.data_ptr())
        # of the tensor in its storage, which other tensors may share
        begin = int(tensor.storage_offset()) * tensor.dtype.itemsize
        end = begin + tensor.numel() * tensor.dtype.itemsize
        if record_begin is None:
            refuse("has no plain values in the file (a sparse or quantized tensor?)")
        if max(storage.nbytes(), end) > record_bytes:
            refuse(
                f"claims more bytes than the {record_bytes:,} of its record in the file; it is "
                "damaged"
            )
        position += record_begin + begin
    return (
        name,
        str(tensor.dtype).removeprefix("torch."),
        path.name,
        position,
        offsets,
        tuple(tensor.shape),
    )


def _are_lengths(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether a value from a file is a tuple of integers that sizes and offsets can have."""
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
