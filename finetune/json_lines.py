"""JSON files that a run leaves: JSON Lines that it appends to, which may end in the middle of a line, and single objects.

A line ends at "\\n" and nowhere else: JSON text may hold U+2028, U+0085 and the other ends that `str.splitlines` knows.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
LONG_NUMBER = re.compile(rb"[0-9]{19}")


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """The object on each line; None for a line that holds none. Empty where there is no such file.

    A last line without its end is dropped where it is cut: a run was killed, or is writing it.
    """
    if not path.is_file():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    found = [_parse(line) for line in lines]
    last = _parse(tail)
    return found if last is None else [*found, last]


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file, or none in it."""
    try:
        return _parse(path.read_bytes()) or {}
    except OSError:
        return {}


def append_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds a line for each object, in place of the cut line that a killed run may have left at the end."""
    with path.open("ab+") as file:
        _drop_cut_line(file)
        for line in lines:
            # a lone surrogate becomes its JSON escape
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _drop_cut_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
        end -= 1
    file.truncate(end)


def parse_json(text: bytes) -> Any:
    """The value of a JSON text that comes from outside; an integer of more digits than any count has is a float.

    Raises `ValueError` where it is not JSON, or nested deeper than MAX_DEPTH.
    """
    read_integer = _read_integer if LONG_NUMBER.search(text) else None  # json's own is faster
    try:
        value = json.loads(text.decode("utf-8"), parse_int=read_integer)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level, depth = [value], 0
    while level and text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
    return value


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
