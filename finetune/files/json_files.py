"""Reads JSON from files that are not trusted, with limits on size, nesting and digits.

It reads whole files, JSON Lines, and the headers of safetensors files. Imports no torch.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from finetune.errors import UserError

# Limit on a file, and on a safetensors header, as in the reference implementation of safetensors.
LIMIT_BYTES = 100_000_000
MAX_DEPTH = 100
MAX_DIGITS = 20  # digits of an integer; 2^64 has 20
LONG_NUMBER = re.compile(f"[0-9]{{{MAX_DIGITS + 1}}}")
# Python's str.splitlines also ends a line at these characters; here they become JSON escapes.
ENDS_OF_LINES = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DAMAGED = "the file is damaged, copy or download it again"


def read_bounded(path: Path) -> bytes:
    """Returns the bytes of a regular file of at most LIMIT_BYTES.

    Raises `OSError` if the file is larger, cannot be read, or is no regular file (such as a pipe).
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > LIMIT_BYTES:
            raise OSError(errno.EFBIG, f"more than {LIMIT_BYTES:,} bytes")
        return file.read(LIMIT_BYTES)


def open_plain(path: Path) -> FileIO:
    """Opens a regular file for reading. Raises `OSError` for anything else, such as a pipe."""
    if "\0" in str(path):  # Python would raise a `ValueError`
        raise OSError(errno.EINVAL, "a name with a NUL, which no file has")
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    return FileIO(path)


def load_json(path: Path, advice: str = DAMAGED) -> dict[str, Any]:
    """Reads a JSON file and returns the object in it.

    Raises `UserError` if the file cannot be read or holds no JSON object. `advice` is what the
    message then says to do about the content.
    """
    try:
        return parse_object(path, read_bounded(path), advice=advice)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def parse_object(path: Path, text: bytes, part: str = "", advice: str = DAMAGED) -> dict[str, Any]:
    """Parses `text`, the content of the file `path`, as one JSON object.

    `part`: how messages name the text if it is only a part of the file, with a colon and a space
    behind ("header: "). Raises `UserError` if `text` is no JSON object, or an object in it has two
    entries of one name.
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


# the first bytes of the text that stands for a file in a clone without Git LFS
LFS_POINTER = b"version https://git-lfs"


def refuse_lfs_pointer(path: Path) -> None:
    """Raises `UserError` if a clone without Git LFS has a pointer in place of the file `path`."""
    if path.is_file():
        with path.open("rb") as file:
            _refuse_lfs_start(path, file.read(len(LFS_POINTER)))


def _refuse_lfs_start(path: Path, start: bytes) -> None:
    if start == LFS_POINTER:
        raise UserError(
            f"{path}: a pointer of Git LFS in place of the file; fetch the file with `git lfs pull`"
        )


def read_tensor_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Reads the header of a safetensors file, without checking the entries in it.

    Raises `UserError` if the file is shorter than its header or the header is no JSON object.

    Returns:
        The header, the position in bytes where the values begin, and the file's size in bytes.
    """
    try:
        file = open_plain(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        _refuse_lfs_start(path, file.read(len(LFS_POINTER)))
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")  # of the header, in bytes
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


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """Returns the JSON object on each line of a file, or None for a line without one.

    The list is empty if the file does not exist. A last line that is incomplete is left out: a run
    was killed while writing it, or is still writing it.
    """
    return [value for _, value in read_lines_as_written(path)]


def read_lines_as_written(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields (bytes of the line with its newline, JSON object or None) for each line of a file.

    Holds one line at a time. A missing file and an incomplete last line are treated as in
    `read_json_lines`.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            value = _parse_object_or_none(line)
            # a last line without a newline may have been finished all the same
            if value is not None or line.endswith(b"\n"):
                yield line, value


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file cannot be read or holds no object."""
    try:
        return _parse_object_or_none(read_bounded(path)) or {}
    except OSError:
        return {}


def append_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line for each object to a file, which is made if it is missing.

    An incomplete last line, as a killed run leaves it, is removed first.
    """
    with path.open("ab+") as file:
        _drop_incomplete_line(file)
        for line in lines:
            # UTF-8 has no lone surrogates; "backslashreplace" writes their JSON escapes
            file.write(write_json_line(line).encode("utf-8", "backslashreplace") + b"\n")


def write_json_line(value: Mapping[str, Any]) -> str:
    """Writes a value as JSON on one line, even for readers that split lines as `str.splitlines`."""
    return json.dumps(value, ensure_ascii=False).translate(ENDS_OF_LINES)


def _drop_incomplete_line(file: Any) -> None:
    """Truncates the file behind its last newline; to nothing if it has none."""
    end = file.seek(0, os.SEEK_END)
    while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
        end -= 1
    file.truncate(end)


class RepeatedName(ValueError):
    """An object in JSON text has two entries of the same name. The error's text is that name."""


def parse_json(text: bytes | str, *, is_strict: bool = False) -> Any:
    """Parses JSON text that is not trusted. An integer of more than MAX_DIGITS digits is a float.

    Raises `ValueError` if it is no JSON or is nested deeper than MAX_DEPTH. With `is_strict`,
    raises `RepeatedName` (a `ValueError`) for two entries of one name.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    # without a long number, json's own function (None) is used, because it is faster
    read_integer = _read_integer if LONG_NUMBER.search(text) else None
    try:
        value = json.loads(
            text, parse_int=read_integer, object_pairs_hook=_require_unique if is_strict else None
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    # a text with at most MAX_DEPTH opening brackets cannot be nested deeper
    has_many_brackets = text.count("[") + text.count("{") > MAX_DEPTH
    if has_many_brackets and _is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deep")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth` in a value."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return False
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object's entries. Raises `RepeatedName` if two have one name."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise RepeatedName(name)
        entries[name] = value
    return entries


def _read_integer(digits: str) -> int | float:
    """Reads an integer of JSON text; as a float if it has more than MAX_DIGITS characters."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _parse_object_or_none(text: bytes) -> dict[str, Any] | None:
    """Parses JSON text; returns None if it is no JSON, or a value other than an object."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
