"""JSON files that a run leaves: JSON Lines that it appends to, which may end in the middle of a line, and single objects.

A line ends at "\\n" and nowhere else: JSON text may hold U+2028, U+0085 and the other ends that `str.splitlines` knows.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
