"""`.metadata` of `torch.distributed.checkpoint`, a pickle, read as data: no name in it is imported, and nothing is
called.

Every opcode is checked before the unpickler sees one. What it then builds are numbers, texts, lists, mappings and the
stand-ins below, which keep the few attributes that are used here and drop the rest.
"""

import io
import pickle  # read through _Unpickler alone, which admits no code
import pickletools
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UserError

METADATA = ".metadata"
METADATA_LIMIT_BYTES = 1024**3
# Of protocols 2 to 5, those that numbers, texts, collections and objects are written with.
# fmt: off
OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE",
    "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
})
# fmt: on


class _Refused(Exception):
    """Why a pickle is not opened."""


class _StandIn:
    """In place of a class of torch's: keeps the attributes that are in `__slots__`, drops any other, runs nothing.

    `__setstate__` also keeps a pickle from setting attributes on the class itself.
    """

    __slots__: tuple[str, ...] = ()

    def __new__(cls, *_: object) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            for name in self.__slots__:
                if name in state:
                    setattr(self, name, state[name])


class Metadata(_StandIn):
    __slots__ = ("state_dict_metadata", "storage_data")
    state_dict_metadata: dict[Any, Any]
    storage_data: dict[Any, Any]


class MetadataIndex(_StandIn):
    __slots__ = ("fqn", "offset")
    fqn: Any
    offset: Any


class StorageInfo(_StandIn):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    length: Any
    offset: Any
    relative_path: Any
    transform_descriptors: Any


class TensorStorageMetadata(_StandIn):
    __slots__ = ("size",)
    size: Any


class _Unused(_StandIn):
    """A value that is not used here: a dtype, a layout, a path of the machine that saved."""

    __slots__ = ()


class _Size(_StandIn):
    __slots__ = ()

    def __new__(cls, *lengths: object) -> Any:
        """The tuple that `torch.Size` was given, not copied."""
        return lengths[0] if len(lengths) == 1 and isinstance(lengths[0], tuple) else ()


class _OrderedDict(_StandIn):
    __slots__ = ()

    def __new__(cls) -> Any:
        return {}  # filled by the opcodes that follow


_DCP = "torch.distributed.checkpoint"
_STAND_INS: dict[tuple[str, str], type[_StandIn]] = {
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "MetadataIndex"): MetadataIndex,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorStorageMetadata,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Unused,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Unused,
    (f"{_DCP}.metadata", "TensorProperties"): _Unused,
    (f"{_DCP}.metadata", "StorageMeta"): _Unused,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Unused,
    (f"{_DCP}.filesystem", "_StorageInfo"): StorageInfo,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Unused,
    ("collections", "OrderedDict"): _OrderedDict,
    ("builtins", "getattr"): _Unused,  # Python 3.11.0 to 3.11.3 wrote the members of an enumeration by it
    ("pathlib", "PosixPath"): _Unused,
    ("pathlib", "WindowsPath"): _Unused,
    ("pathlib._local", "PosixPath"): _Unused,
    ("pathlib._local", "WindowsPath"): _Unused,
}


class _Unpickler(pickle.Unpickler):
    """Gives a stand-in for each name that DCP writes; any other name stops it."""

    def find_class(self, module: str, name: str) -> type[_StandIn]:
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            stand_in = _Unused
        if stand_in is None:
            raise _Refused(f"wants to import {module}.{name}, which no checkpoint needs; do not trust this folder")
        return stand_in


def read_metadata(folder: Path) -> Metadata:
    """What the `.metadata` of a DCP folder says; both attributes are mappings. Other values in it are unchecked.

    Raises `UserError` where it asks for anything but DCP's own classes, is damaged or describes no checkpoint.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > METADATA_LIMIT_BYTES:
            raise UserError(f"{path}: over {METADATA_LIMIT_BYTES:,} bytes; this is no DCP metadata")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        _check_opcodes(content)
        metadata = _Unpickler(io.BytesIO(content)).load()
    except _Refused as refused:
        raise UserError(f"{path}: {refused}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{path}: damaged ({type(error).__name__}); copy it again") from None
    names = ("storage_data", "state_dict_metadata")
    if not isinstance(metadata, Metadata) or not all(isinstance(getattr(metadata, n, None), dict) for n in names):
        raise UserError(f"{path}: does not describe a checkpoint")
    return metadata


def _check_opcodes(content: bytes) -> None:
    """Refuses opcodes that DCP's metadata never needs, lengths beyond the file, and a memo with holes.

    An unpickler makes room for the memo's largest index: nine bytes could ask for gigabytes. `pickletools` raises
    ValueError where an argument is longer than what is left of the file.
    """
    memo_size = 0
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name not in OPCODES:
            raise _Refused(f"holds the pickle opcode {opcode.name} at byte {position:,}, which no checkpoint needs")
        if opcode.name in ("BINPUT", "LONG_BINPUT") and (argument is None or argument > memo_size):
            raise _Refused(f"refers to place {argument:,} of a memo of {memo_size:,} at byte {position:,}; damaged")
        memo_size += opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT")
