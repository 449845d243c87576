"""Tensors in files that torch wrote with pickle, found without running any code in them.

Two kinds: a `torch.distributed.checkpoint` folder (`.metadata` and `*.distcp`) and a whole state
dict (`*.bin`, `*.pt`). Both keep the values as plain, uncompressed records, which are read like
safetensors, slice by slice, once it is known where they lie. Finding that is left to torch's
weights-only loader over a memory map; `.metadata`, which it does not read, to an unpickler that
imports and calls nothing. Damage can make them ask for any amount of memory or crash, so they run
in a process of their own, `python -m finetune.export.torch_files PATH...`, with limited memory and
time. The answer is one JSON object on stdout: `tensors` and `sizes`, or an `error` for the user.
"""

import gc
import io
import json
import mmap
import os
import pickle  # read through _MetadataReader alone, which admits no code
import pickletools
import resource
import signal
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

import finetune
from finetune.constants import Shape
from finetune.errors import UserError
from finetune.files.tensors import StoredPart, StoredTensor, join_parts

METADATA = ".metadata"


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
                self._map = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b"\0"
                )
        except OSError as error:
            raise UserError(f"{problem} cannot be read: {error.strerror}") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not writable
            self.storage = torch.frombuffer(self._map, dtype=torch.uint8).untyped_storage()
        self.view = memoryview(self._map)[: self.size]

    def release(self) -> None:
        """Gives back the pages that have been touched, to be read again: one byte can make 2 MiB
        resident.
        """
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Archive:
    """The zip archive that `torch.save` wrote into some part of a file."""

    def __init__(self, file: MappedFile, begin: int, length: int, where: str) -> None:
        self.begin = begin
        self._where = where
        end = min(begin + length, file.size)
        self._bytes = _Section(file.view[begin:end])
        self._storage = file.storage[min(begin, end) : end]
        # where each record of values begins, from `begin` -> its bytes
        self._records: dict[int, int] = {}

    def load(self) -> Any:
        """Returns the contents of the archive, with tensors that are views of the mapped file.

        No code of the file's is run.
        """
        try:
            reader = self._open_reader()
            # What torch.load(mmap=True) calls once it has mapped the file; that function takes
            # whole files only.
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
        """Returns (where the record of values whose first byte is at `address` begins, its bytes);
        (None, 0): there is none.
        """
        begin = address - self._storage.data_ptr()
        if begin in self._records:
            return (begin, self._records[begin])
        return (None, 0)

    def _open_reader(self) -> Any:
        """torch's reader of this archive, once its records are known to lie in the file without
        overlap.
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
        end = 0
        values = [(record, record.filename.partition("/")[2]) for record in records]
        for record, name in sorted(values, key=lambda entry: entry[0].header_offset):
            if not name.startswith("data/") or not record.file_size:
                continue
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                self._raise(
                    f"its record {name} is compressed or encrypted; save it again with torch.save"
                )
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


if __name__ == "__main__":  # a short process, most of which is imports: see verify.py
    gc.disable()


# beyond what importing torch takes; memory maps of files are not counted
MEMORY_LIMIT_BYTES = 1024**3
CPU_LIMIT_SECONDS = 600

# name, dtype, file's name, position in it in bytes, offsets in the whole tensor, shape
Place = tuple[str, str, str, int, tuple[int, ...], tuple[int, ...]]


def read_dcp_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder that `torch.distributed.checkpoint.save` wrote, by name; no values
    are read.

    Raises `UserError` where the metadata asks for anything but DCP's own classes, or names what the
    files do not hold.
    """
    answer = _find_places(folder)
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
    """The tensors of the state dict that `torch.save` wrote into these files, by name; no values
    are read.

    Raises `UserError` if a file holds anything but weights, or values that are not stored there as
    plain bytes.
    """
    return _join_places(paths[0].parent, _find_places(*paths)["tensors"])


def _join_places(folder: Path, places: list[Any]) -> dict[str, StoredTensor]:
    parts_by_name: dict[str, list[tuple[StoredPart, torch.dtype]]] = {}
    for name, dtype, file_name, position, offsets, shape in places:
        part = StoredPart(folder / file_name, position, tuple(offsets), tuple(shape))
        parts_by_name.setdefault(name, []).append((part, getattr(torch, dtype)))
    return {name: join_parts(name, parts) for name, parts in sorted(parts_by_name.items())}


def _find_places(*paths: Path) -> Any:
    """`find_places(paths)`, called in a process of its own."""
    root = str(Path(finetune.__file__).resolve().parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    }
    # -P: import nothing from the current folder
    command = [sys.executable, "-P", "-m", "finetune.export.torch_files", *map(str, paths)]
    finished = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True
    )
    try:
        answer = json.loads(finished.stdout)
    except ValueError:
        raise UserError(
            f"{paths[0]}: torch could not read it ({_exit_reason(finished)}); it is damaged, or no "
            "file that torch wrote"
        ) from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _exit_reason(finished: "subprocess.CompletedProcess[bytes]") -> str:
    if finished.returncode < 0:
        return f"ended by {signal.Signals(-finished.returncode).name}"
    last = finished.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last or f"exit code {finished.returncode}"


def main(paths: list[Path]) -> None:
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
    """Finds where the tensors of `paths` lie.

    Returns `tensors`, a `Place` for each part of each tensor, and `sizes`, the shapes in a DCP
    folder's metadata, by name. Raises `UserError` for what torch's weights-only loader refuses, and
    for values that do not lie there as they are.
    """
    if paths[0].is_dir():
        return _dcp_folder(paths[0])
    return {"tensors": [place for path in paths for place in _torch_file(path)], "sizes": {}}


def _limit_resources() -> None:
    """Limits this process's memory and time; only its time where /proc does not say what is used
    (not Linux).
    """
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    except OSError:
        return
    limit = used + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Unread:
    """In place of a class of torch's: keeps its attributes as a mapping, and runs nothing."""

    attributes: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *_: object) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


_DCP = "torch.distributed.checkpoint"
# The only names that DCP writes, and what is called for each.
_STAND_INS: Mapping[tuple[str, str], type] = {
    **{
        (f"{_DCP}.metadata", name): _Unread for name in ("Metadata", "MetadataIndex", "StorageMeta")
    },
    **{
        (f"{_DCP}.metadata", f"{name}StorageMetadata"): _Unread
        for name in ("Tensor", "Bytes", "Chunk")
    },
    **{
        (f"{_DCP}.metadata", name): _Unread for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): _Unread,
    ("torch.serialization", "_get_layout"): _Unread,
    # Python 3.11.0 to 3.11.3 wrote the members of an enumeration by it
    ("builtins", "getattr"): _Unread,
    **{
        (module, f"{kind}Path"): _Unread
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows")
    },
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


# Of protocols 2 to 5, those that numbers, texts, collections and objects are written with.
OPCODES = frozenset(
    {
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "MEMOIZE",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_DICT",
        "SETITEM",
        "SETITEMS",
        "GLOBAL",
        "STACK_GLOBAL",
        "NEWOBJ",
        "REDUCE",
        "BUILD",
    }
)


def _check_opcodes(content: bytes) -> None:
    """Refuses opcodes that DCP's metadata never needs, lengths beyond the file, and a memo with
    holes.

    An unpickler makes room for the memo's largest index: nine bytes could ask for gigabytes.
    `pickletools` raises ValueError where an argument is longer than what is left of the file.
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
        memo_size += opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT")


class _MetadataReader(pickle.Unpickler):
    """Gives a stand-in for each name that DCP writes; any other name stops it."""

    def find_class(self, module: str, name: str) -> type:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return _Unread
        if (module, name) not in _STAND_INS:
            raise UserError(
                f"wants to import {module}.{name}, which no checkpoint needs; do not trust this "
                "folder"
            )
        return _STAND_INS[module, name]


def read_metadata(folder: Path) -> Mapping[str, dict[Any, Any]]:
    """The `storage_data` and `state_dict_metadata` of a DCP folder, unchecked.

    None of the file's code is run.

    Raises `UserError` where it asks for anything but DCP's own classes, is damaged or describes no
    checkpoint.
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


def _dcp_folder(folder: Path) -> dict[str, Any]:
    """Every part of every tensor in a DCP folder, and the sizes that its metadata states."""
    metadata = read_metadata(folder)
    opened: dict[Path, MappedFile] = {}
    parts = [
        (_attributes(index), _attributes(info)) for index, info in metadata["storage_data"].items()
    ]
    # One without an offset is a number, a string, a list: none of the weights.
    tensors = [
        _dcp_part(folder, index, info, opened)
        for index, info in parts
        if index.get("offset") is not None
    ]
    described = {
        name: _attributes(each).get("size")
        for name, each in metadata["state_dict_metadata"].items()
    }
    sizes = {
        name: size
        for name, size in described.items()
        if isinstance(name, str) and _are_lengths(size)
    }
    return {"tensors": tensors, "sizes": sizes}


def _attributes(value: Any) -> Mapping[str, Any]:
    return value.attributes if isinstance(value, _Unread) else {}


def _dcp_part(
    folder: Path, index: Mapping[str, Any], info: Mapping[str, Any], opened: dict[Path, MappedFile]
) -> Place:
    """A tensor's part in a .distcp file: a small torch file of its own between two offsets."""
    where = folder / METADATA
    offsets = index["offset"]
    name = index.get("fqn")
    file_name = info.get("relative_path")
    place = (info.get("offset"), info.get("length"))
    if not isinstance(name, str) or not isinstance(file_name, str):
        raise UserError(f"{where}: an entry without a name or a file")
    if Path(file_name).name != file_name or not file_name.isprintable():
        raise UserError(f"{where}: {name}: its file {file_name!r} leads out of the folder")
    if not _are_lengths(place) or not _are_lengths(offsets):
        raise UserError(f"{where}: {name}: its place in {file_name} is not valid")
    if extensions := info.get("transform_descriptors"):
        raise UserError(
            f"{where}: {name}: written through {extensions}; save it without extensions"
        )
    path = folder / file_name
    if path not in opened:
        opened[path] = MappedFile(path, f"{path}: {name}: its file is missing or")
    archive = Archive(opened[path], place[0], place[1], f"{path}: {name}")
    content = archive.load()
    if not isinstance(content, Tensor) or content.dim() != len(offsets):
        raise UserError(f"{path}: {name}: holds no tensor of {len(offsets)} dimensions")
    with_offsets = _place(path, name, content, archive, offsets)
    opened[path].release()
    return with_offsets


def _torch_file(path: Path) -> list[Place]:
    """Every tensor of a state dict that `torch.save` wrote."""
    file = MappedFile(path, f"{path}:")
    archive = Archive(file, 0, file.size, str(path))
    content = archive.load()
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path}: holds no state dict")
    tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    return [
        _place(path, name, tensor, archive, (0,) * tensor.dim()) for name, tensor in tensors.items()
    ]


def _place(path: Path, name: str, tensor: Tensor, archive: Archive, offsets: Shape) -> Place:
    def refuse(what: str) -> NoReturn:
        raise UserError(f"{path}: {name}: {what}")

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
    if tensor.numel():
        storage = tensor.untyped_storage()
        record, record_size = archive.record_at(storage.data_ptr())
        begin = int(tensor.storage_offset()) * tensor.dtype.itemsize
        if record is None:
            refuse("has no plain values in the file (a sparse or quantized tensor?)")
        if max(storage.nbytes(), begin + tensor.numel() * tensor.dtype.itemsize) > record_size:
            refuse(
                f"claims more bytes than the {record_size:,} of its record in the file; it is "
                "damaged"
            )
        position += record + begin
    return (
        name,
        str(tensor.dtype).removeprefix("torch."),
        path.name,
        position,
        offsets,
        tuple(tensor.shape),
    )


def _are_lengths(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
