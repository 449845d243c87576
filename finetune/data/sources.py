"""Where rows come from: a file, a glob, a folder or a hub name, and which split of it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.json_rows import NumberedRow
from finetune.data.messages import BadRow
from finetune.data.readers import KINDS, kind_of, read_file, readable, remove_none_values
from finetune.errors import UserError
from finetune.recipe.schema import DatasetSource

BATCH_ROWS = 500


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some rows of one file, or of a data set of the hub."""

    file: str
    numbers: tuple[int, ...]  # [rows]: the row's line in its file, or its number from 1
    rows: tuple[dict[str, Any] | BadRow, ...]


def read_rows(source: DatasetSource, *, streaming: bool = False, batch_rows: int = BATCH_ROWS) -> Iterator[RowBatch]:
    """The rows of a source in their order, at most `batch_rows` at a time. Raises `UserError` where there are none, or a file cannot be read."""
    splits = local_splits(source.path)
    if splits is None:
        yield from _batched(source.path, enumerate(map(remove_none_values, hub_rows(source, streaming)), 1), batch_rows)
        return
    for file, start, stop in _slices(source, splits):
        yield from _batched(file, islice(read_file(file), start, stop), batch_rows)


def local_splits(path: str) -> dict[str, tuple[str, ...]] | None:
    """split -> files, for a local file, glob or folder; None for a hub name. Raises `UserError` where nothing is there."""
    with readable(path):  # a folder on the way to it may be closed to us
        if Path(path).is_dir():
            return _folder_splits(path)
        if Path(path).is_file():
            return {"train": (path,)}
        if Path(path).exists():
            raise UserError(f"{path}: neither a file nor a folder, but a pipe or a device; write its rows into a file")
    if any(letter in path for letter in "*?["):
        found = _glob(path)
        if not found:
            raise UserError(f"{path}: no file here has such a name")
        return {"train": found}
    if kind_of(path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise UserError(f"{path}: no such file or folder")
    return None


def files_of(source: DatasetSource) -> tuple[str, ...]:
    """The local files that a source's split names; empty for a hub name."""
    splits = local_splits(source.path)
    return () if splits is None else tuple(f for name in _names(source, splits) for f in splits[name])


def _glob(pattern: str) -> tuple[str, ...]:
    path = Path(pattern)
    first = next(i for i, part in enumerate(path.parts) if any(letter in part for letter in "*?["))
    folder = Path(*path.parts[:first])
    found = sorted(str(p) for p in folder.glob(str(Path(*path.parts[first:]))) if p.is_file())
    return tuple(found)


def _folder_splits(path: str) -> dict[str, tuple[str, ...]]:
    """By the `datasets` library's own rules for folders: files or folders named train, test, validation, ..."""
    from datasets.data_files import get_data_patterns, resolve_pattern

    splits: dict[str, tuple[str, ...]] = {}
    try:
        patterns = get_data_patterns(escape(path))
    except FileNotFoundError:
        patterns = {}
    for split, names in patterns.items():
        files: set[str] = set()
        for name in names:
            try:
                files.update(file for file in resolve_pattern(name, escape(path)) if kind_of(file))
            except FileNotFoundError:
                continue
        # A folder that `save_to_disk` wrote holds Arrow files and, beside them, JSON that is not data.
        arrow = {file for file in files if kind_of(file) == "arrow"}
        if files:
            splits[str(split)] = tuple(sorted(arrow or files))
    if not splits:
        raise UserError(f"{path}: the folder holds no data; known are {', '.join(KINDS)}, each with .gz too")
    return splits


def _names(source: DatasetSource, splits: dict[str, tuple[str, ...]]) -> list[str]:
    """The splits that `split` names, in its order."""
    names = re.findall(r"(?:^|\+)\s*([\w.-]+)", source.split)
    for name in names:
        if name not in splits:
            raise UserError(f"{source.path}: split {name}: there is no such split; there is {', '.join(splits)}")
    return names


def _slices(source: DatasetSource, splits: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, int, int | None]]:
    """(file, first row, row behind the last) for every stretch that `split` names."""
    names = _names(source, splits)
    if "[" not in source.split:
        yield from ((file, 0, None) for name in names for file in splits[name])
        return
    import datasets

    sizes = {file: count_rows(file, Path(file).stat().st_mtime_ns) for name in names for file in splits[name]}
    rows = {name: sum(sizes[file] for file in splits[name]) for name in names}
    try:
        stretches = datasets.ReadInstruction.from_spec(source.split).to_absolute(rows)
    except (ValueError, AssertionError) as error:
        raise UserError(f"{source.path}: split {source.split}: {error}") from None
    for stretch in stretches:
        begin = 0
        for file in splits[stretch.splitname]:
            start, stop = max(stretch.from_ - begin, 0), min(stretch.to - begin, sizes[file])
            if start < stop:
                yield file, start, stop
            begin += sizes[file]


@cache
def count_rows(file: str, modified_ns: int) -> int:
    """Rows in a file, bad ones too."""
    return sum(1 for _ in read_file(file))


def hub_rows(source: DatasetSource, streaming: bool) -> Any:
    """A data set of the hub, downloaded (or found in the Hugging Face cache), or streamed."""
    import datasets

    try:
        return datasets.load_dataset(source.path, source.name, split=source.split, streaming=streaming)
    except Exception as error:  # whatever the hub client, the network or the library raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{source.path}: not here as a file or folder, and as a hub data set: {reason}") from None


def _batched(file: str, rows: Iterator[NumberedRow], size: int) -> Iterator[RowBatch]:
    while batch := tuple(islice(rows, size)):
        yield RowBatch(file, tuple(number for number, _ in batch), tuple(row for _, row in batch))
