"""JSON that comes from outside, read within bounds: files, lines, headers of safetensors files.

Imports no torch.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from finetune.constants import Fields, Record
from finetune.errors import UserError

# of a file; the reference implementation of safetensors allows a header as many
LIMIT_BYTES = 100_000_000
MAX_DEPTH = 100
MAX_DIGITS = 20  # of an integer; 2^64 has as many
LONG_NUMBER = re.compile(f"[0-9]{{{MAX_DIGITS + 1}}}")
# Python's str.splitlines ends a line at these too, and so do readers that use it.
ENDS_OF_LINES = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DAMAGED = "the file is damaged, copy or download it again"


def read_bounded(path: Path) -> bytes:
    """The bytes of a plain file.

    Raises `OSError` for others, such as a pipe, and for a larger one.
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > LIMIT_BYTES:
            raise OSError(errno.EFBIG, f"more than {LIMIT_BYTES:,} bytes")
        return file.read(LIMIT_BYTES)


def open_plain(path: Path) -> FileIO:
    """A plain file, opened for reading. Raises `OSError`."""
    if "\0" in str(path):  # of which Python raises a `ValueError`
        raise OSError(errno.EINVAL, "a name with a NUL, which no file has")
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    return FileIO(path)


def load_json(path: Path, advice: str = DAMAGED) -> Record:
    """The object in a JSON file.

    Raises `UserError`, with `advice`, where there is none that can be read.
    """
    try:
        return parse_object(path, read_bounded(path), advice=advice)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def parse_object(path: Path, text: bytes, part: str = "", advice: str = DAMAGED) -> Record:
    """The JSON object in `text`, which is (`part` of) the file `path`.

    Raises `UserError`, for repeated names too.
    """
    try:
        value = parse_json(text, is_strict=True)
    except RepeatedName as error:
        raise UserError(f"{path}: {error}: {part}named twice; the file is damaged") from None
    except ValueError:
        raise UserError(f"{path}: {part}not JSON; {advice}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: {part}a JSON object is expected; {advice}")
    return value


def read_tensor_header(path: Path) -> tuple[Record, int, int]:
    """Reads the header of a safetensors file, without checking the entries in it.

    Raises `UserError` where the file is cut or its header is no JSON object.

    Returns:
        The header, the position in bytes where the values begin, and the file's size in bytes.
    """
    try:
        file = open_plain(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{path}: truncated: {size:,} bytes, where the header alone claims {length:,}; "
                "copy or download it again"
            )
        if length > LIMIT_BYTES:
            raise UserError(
                f"{path}: its header claims {length:,} bytes; this is no safetensors file"
            )
        return parse_object(path, file.read(length), "header: "), 8 + length, size


def read_json_lines(path: Path) -> list[Record | None]:
    """The object on each line; None for a line that holds none. Empty where there is no such file.

    A last line without its end is dropped where it is cut: a run was killed, or is writing it.
    """
    return [value for _, value in read_lines_as_written(path)]


def read_lines_as_written(path: Path) -> list[tuple[bytes, Record | None]]:
    """As `read_json_lines`, each with its bytes, without the end of the line."""
    if not path.is_file():
        return []
    parsed = [(line, _parse(line)) for line in path.read_bytes().split(b"\n")]
    return parsed if parsed[-1][1] is not None else parsed[:-1]


def read_json_object(path: Path) -> Record:
    """The object in a file; empty where there is no such file, or none in it."""
    try:
        return _parse(read_bounded(path)) or {}
    except OSError:
        return {}


def append_json_lines(path: Path, lines: Iterable[Fields]) -> None:
    """Adds a line for each object, in place of the cut line that a killed run may have left at the
    end.
    """
    with path.open("ab+") as file:
        _drop_cut_line(file)
        for line in lines:
            # a lone surrogate becomes its JSON escape
            file.write(write_json_line(line).encode("utf-8", "backslashreplace") + b"\n")


def write_json_line(value: Fields) -> str:
    """A value as JSON on one line, for readers that split at any end of a line too."""
    return json.dumps(value, ensure_ascii=False).translate(ENDS_OF_LINES)


def _drop_cut_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
        end -= 1
    file.truncate(end)


class RepeatedName(ValueError):
    """Two values in one JSON object have the same name, which is the error's text."""


def parse_json(text: bytes | str, *, is_strict: bool = False) -> Any:
    """The value of a JSON text that comes from outside; an integer of more than MAX_DIGITS digits
    is a float.

    Raises `ValueError` where it is not JSON, or nested deeper than MAX_DEPTH; `RepeatedName` if
    `is_strict`.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    read_integer = _read_integer if LONG_NUMBER.search(text) else None  # json's own is faster
    try:
        value = json.loads(
            text, parse_int=read_integer, object_pairs_hook=_make_unique if is_strict else None
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value] if isinstance(value, list | dict) else []
    depth = 0
    while level and text.count("[") + text.count("{") > MAX_DEPTH:
        inside = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for values in inside for inner in values if isinstance(inner, list | dict)]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
    return value


def _make_unique(pairs: list[tuple[str, Any]]) -> Record:
    entries: Record = {}
    for name, value in pairs:
        if name in entries:
            raise RepeatedName(name)
        entries[name] = value
    return entries


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _parse(line: bytes) -> Record | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
