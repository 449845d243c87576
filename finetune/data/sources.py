"""Where rows come from: a file, a glob, a folder or a hub name, and which split of it; and hashes
of what they hold.

Parquet, Arrow and data sets of the hub are read by pyarrow and the `datasets` library, text files
by readers.py.
"""

import json
import os
import re
import struct
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from glob import escape
from itertools import count, islice
from pathlib import Path
from typing import Any

import xxhash

from finetune.config import user_code
from finetune.config.schema import DatasetSource
from finetune.constants import Record, ceil_div
from finetune.data.examples import make_generator
from finetune.data.messages import BadRow
from finetune.data.readers import (
    KINDS,
    TEXT_READERS,
    NumberedRow,
    convert_os_errors,
    file_kind,
    limit_unpacked,
    most_unpacked,
)
from finetune.errors import UserError, first_line
from finetune.files.durable import CHECKSUM, checksum
from finetune.files.network import go_offline_without_network

BATCH_ROWS = 500
SAMPLE_BYTES = 64 * 1024  # of a file, read for a stream's fingerprint
PACKED = (".zst", ".bz2", ".xz", ".zip")  # compressed files, which are not read
# of one source, read for its fingerprint at most; but two samples of each file at least
FINGERPRINT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some rows of one file, or of a data set of the hub."""

    file: str
    numbers: tuple[int, ...]  # [rows]: see `units.name_place`
    rows: tuple[Record | BadRow, ...]


def read_rows(
    source: DatasetSource, *, streaming: bool = False, batch_rows: int = BATCH_ROWS
) -> Iterator[RowBatch]:
    """Yields the rows of a source in their order, at most `batch_rows` at a time.

    `streaming`: a data set of the hub is streamed, and only the first `max_samples` rows are read.

    Raises `UserError` where nothing is at its path, or a file cannot be read.
    """
    if streaming and source.max_samples is not None:
        left = source.max_samples
    else:
        left = sys.maxsize
    for file, rows in _open_rows(source, streaming):
        for batch in _batch_rows(file, islice(rows, left), batch_rows):
            left -= len(batch.rows)
            yield batch


def draw_rows(source: DatasetSource, seed: int) -> tuple[Iterator[RowBatch], int | None]:
    """Draws `max_samples` of a source's rows: the first of a permutation that the seed decides.

    All rows are read once to count them, without being tokenized.

    Returns:
        The drawn rows in the order of the source, and the number of all its rows. Where the source
        has no `max_samples`: all rows, and None.

    Raises:
        UserError: Nothing is at its path, or a file cannot be read.
    """
    if source.max_samples is None:
        return read_rows(source), None
    total = sum(1 for _, rows in _open_rows(source) for _ in rows)
    drawn = set(make_generator(seed, "samples").permutation(total)[: source.max_samples].tolist())
    return _select_rows(source, drawn), total


def _select_rows(source: DatasetSource, drawn: Collection[int]) -> Iterator[RowBatch]:
    first = count()
    for file, rows in _open_rows(source):
        chosen = (row for row in rows if next(first) in drawn)
        yield from _batch_rows(file, chosen, BATCH_ROWS)


def _open_rows(
    source: DatasetSource, streaming: bool = False
) -> Iterator[tuple[str, Iterator[NumberedRow]]]:
    """Yields (file, its numbered rows) for every stretch that `split` names.

    The name of a function, or of a data set of the hub, stands in the place of a file.
    """
    if source.function is not None:
        rows = user_code.read_rows(source.function)
        yield source.function, enumerate(map(remove_none_values, rows), 1)
        return
    splits = find_splits(source.path)
    if splits is None:
        rows = _keep_encoded(load_hub_rows(source, streaming))
        yield source.path, enumerate(map(remove_none_values, rows), 1)
        return
    for file, start, stop in _resolve_slices(source, splits):
        yield file, islice(read_file(file), start, stop)


def _keep_encoded(rows: Any) -> Any:
    """Makes rows of the `datasets` library keep images as they are stored.

    data/images.py opens them, and bounds their size.
    """
    if "Image(" not in str(rows.features):
        return rows
    if hasattr(rows, "to_iterable_dataset"):
        stream = rows.to_iterable_dataset()
    else:
        stream = rows
    return stream.decode(False)


def find_splits(path: str) -> dict[str, tuple[str, ...]] | None:
    """Maps each split of a local file, glob or folder to its files; None for a hub name.

    Raises `UserError` if nothing is there.
    """
    if not path.strip():
        raise UserError(
            "the path of the data is empty; name a file, a glob, a folder or a hub name"
        )
    with convert_os_errors(path):  # one of its parent folders may be unreadable
        if Path(path).is_dir():
            return _folder_splits(path)
        if Path(path).is_file():
            return {"train": (path,)}
        if Path(path).exists():
            raise UserError(
                f"{path}: a pipe or a device, not a file or folder; write its rows into a file"
            )
    if any(letter in path for letter in "*?["):
        paths = _match_glob(path)
        if not paths:
            raise UserError(f"{path}: no file matches")
        return {"train": paths}
    if ".py:" in path:
        raise UserError(f"{path}: a function is named by the key function, in place of path")
    if file_kind(path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise UserError(f"{path}: no such file or folder")
    return None


def list_files(source: DatasetSource) -> tuple[str, ...]:
    """The local files of a source's split; none for a hub name.

    Of a function its file, not what that reads.
    """
    if source.function is not None:
        return (str(user_code.file_of(source.function)),)
    splits = find_splits(source.path)
    if splits is None:
        return ()
    return tuple(f for name in _split_names(source, splits) for f in splits[name])


def _match_glob(pattern: str) -> tuple[str, ...]:
    path = Path(pattern)
    first = next(i for i, part in enumerate(path.parts) if any(letter in part for letter in "*?["))
    folder = Path(*path.parts[:first])
    paths = sorted(str(p) for p in folder.glob(str(Path(*path.parts[first:]))) if p.is_file())
    return tuple(paths)


def _folder_splits(path: str) -> dict[str, tuple[str, ...]]:
    """Finds a folder's splits by the `datasets` library's own rules: files or folders named train,
    test, validation, ...
    """
    from datasets.data_files import get_data_patterns, resolve_pattern

    splits: dict[str, tuple[str, ...]] = {}
    try:
        patterns_by_split = get_data_patterns(escape(path))
    except FileNotFoundError:
        patterns_by_split = {}
    for split, patterns in patterns_by_split.items():
        files: set[str] = set()
        for pattern in patterns:
            with suppress(FileNotFoundError):
                matching = resolve_pattern(pattern, escape(path))
                files.update(file for file in matching if _is_data(file))
        # A folder that `save_to_disk` wrote holds Arrow files and, beside them, JSON that is not
        # data.
        arrow = {
            file for file in files if file_kind(file) == "arrow" and not _is_left_over(Path(file))
        }
        if files:
            splits[str(split)] = tuple(sorted(arrow or files))
    if not splits:
        raise UserError(
            f"{path}: no data in this folder; known are {', '.join(KINDS)}, each with .gz too"
        )
    return splits


def _is_data(file: str) -> bool:
    """Whether a file is of a known kind. Raises `UserError` for data in a format of `PACKED`."""
    path = Path(file)
    is_packed = path.suffix.lower() in PACKED and file_kind(str(path.with_suffix("")))
    if is_packed and not file_kind(file):
        raise _unknown_kind(file)
    return file_kind(file) is not None


def _is_left_over(file: Path) -> bool:
    """Whether `map` or `filter` of the `datasets` library has put its own result beside the rows
    that it read.
    """
    return file.name.startswith(("cache-", "tmp")) and file.with_name("dataset_info.json").exists()


def _split_names(source: DatasetSource, splits: dict[str, tuple[str, ...]]) -> list[str]:
    """The splits that `split` names, in its order."""
    names = re.findall(r"(?:^|\+)\s*([\w.-]+)", source.split)
    for name in names:
        if name not in splits:
            raise UserError(f"{source.path}: split {name}: no such split, only {', '.join(splits)}")
    return names


def _resolve_slices(
    source: DatasetSource, splits: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, int, int | None]]:
    """Yields (file, first row, row after the last) for every stretch that `split` names."""
    names = _split_names(source, splits)
    if "[" not in source.split:
        yield from ((file, 0, None) for name in names for file in splits[name])
        return
    import datasets

    sizes = {
        file: count_rows(file, Path(file).stat().st_mtime_ns)
        for name in names
        for file in splits[name]
    }
    rows = {name: sum(sizes[file] for file in splits[name]) for name in names}
    try:
        stretches = datasets.ReadInstruction.from_spec(source.split).to_absolute(rows)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{source.path}: split {source.split}: {first_line(error)}; write it as train[:10%]"
        ) from None
    for stretch in stretches:
        first = 0
        for file in splits[stretch.splitname]:
            start = max(stretch.from_ - first, 0)
            stop = min(stretch.to - first, sizes[file])
            if start < stop:
                yield file, start, stop
            first += sizes[file]


@cache
def count_rows(file: str, modified_ns: int) -> int:
    """Counts the rows of a file, bad ones too; again once its time `modified_ns` has changed."""
    return sum(1 for _ in read_file(file))


def load_hub_rows(source: DatasetSource, streaming: bool) -> Any:
    """A data set of the hub, downloaded (or found in the Hugging Face cache), or streamed."""
    go_offline_without_network()
    import datasets  # reads once whether the process is offline

    try:
        return datasets.load_dataset(
            source.path, source.name, split=source.split, streaming=streaming
        )
    except Exception as error:  # whatever the hub client, the network or the library raise
        reason = first_line(error)
        raise UserError(
            f"{source.path}: no such file or folder, and not loaded as a hub data set: {reason}"
        ) from None


def _batch_rows(file: str, rows: Iterator[NumberedRow], size: int) -> Iterator[RowBatch]:
    while batch := tuple(islice(rows, size)):
        yield RowBatch(file, tuple(number for number, _ in batch), tuple(row for _, row in batch))


def hash_content(source: DatasetSource) -> dict[str, str]:
    """Maps each file of a source to a hash of its bytes.

    Of a data set of the hub, maps its name to the fingerprint that `datasets` gives it.
    """
    files = {file: hash_file(file) for file in list_files(source)}
    return files or {source.path: load_hub_rows(source, streaming=False)._fingerprint}


def hash_file(file: str) -> str:
    """A hash of a file's bytes. Raises `UserError` where it cannot be read."""
    with convert_os_errors(file):
        return str(checksum(Path(file))[CHECKSUM])


def fingerprint_samples(sources: tuple[DatasetSource, ...]) -> str | None:
    """Hashes samples of the sources' files; returns None where a source is of the hub.

    The samples are spread evenly, and are all of a source's bytes up to FINGERPRINT_BYTES. A stream
    may be terabytes, which would be read before the first step: so a change between two samples is
    not noticed. Names and times do not count: a copy on another disk is the same stream.
    """
    content = []
    for source in sources:
        paths = list_files(source)
        if not paths:
            return None
        samples = max(2, FINGERPRINT_BYTES // SAMPLE_BYTES // len(paths))
        with ThreadPoolExecutor(8) as pool:
            content.append(
                list(pool.map(lambda path, most=samples: _hash_samples(path, most), paths))
            )
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def _hash_samples(path: str, most: int) -> tuple[int, str]:
    """A file's size in bytes and a hash of at most `most` samples of it, the first and the last
    among them.
    """
    digest = xxhash.xxh3_128()
    with convert_os_errors(path), Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, ceil_div(size, SAMPLE_BYTES) - 1)  # number of the last sample
        count = min(last + 1, most)
        for index in range(count):
            file.seek(index * last // max(1, count - 1) * SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
    return size, digest.hexdigest()


TURN_ROWS = 64  # rows read from one source before the next is chosen


def interleave_sources(
    sources: tuple[DatasetSource, ...], skip: int = 0
) -> Iterator[tuple[DatasetSource, RowBatch, int]]:
    """Yields (source, some of its rows, full passes over every source so far), endlessly.

    The next source is the one whose rows are furthest behind its weight, for a batch at the end of
    a file has few rows. A source that ends is read again.

    Args:
        sources: With their weights.
        skip: So many batches at the beginning are read, and not yielded.
    """
    weights = [source.weight / sum(source.weight for source in sources) for source in sources]
    passes = [0] * len(sources)
    readers = [read_rows(source, streaming=True, batch_rows=TURN_ROWS) for source in sources]
    given = [0] * len(sources)  # rows
    batches = 0
    while True:
        due = [
            weight * (sum(given) + 1) - rows for weight, rows in zip(weights, given, strict=True)
        ]
        i = due.index(max(due))
        batch = next(readers[i], None)
        if batch is None:
            passes[i] += 1
            readers[i] = read_rows(sources[i], streaming=True, batch_rows=TURN_ROWS)
            batch = next(readers[i], None)
            if batch is None:
                raise UserError(f"{sources[i].origin}: it has no rows")
        given[i] += len(batch.rows)
        batches += 1
        if batches > skip:
            yield sources[i], batch, min(passes)


def describe_source(source: DatasetSource) -> Any:
    """Describes a source by its keys and, where it is local, by its files with size and time.

    Their content would take too long to hash.
    """
    if source.function:
        splits = {"function": list_files(source)}
    else:
        splits = find_splits(source.path) or {}
    files = [
        (file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns)
        for f in splits.values()
        for file in f
    ]
    return asdict(source), files


PARQUET_ROWS = 32  # held at a time


def read_file(path: str) -> Iterator[NumberedRow]:
    """The rows of one file, each with its number (see `units.name_place`).

    Raises `UserError` if it breaks off.
    """
    kind = file_kind(path)
    if kind is None:
        raise _unknown_kind(path)
    if kind in TEXT_READERS:
        return TEXT_READERS[kind](path)
    return _read_columns(path, kind)


def _unknown_kind(path: str) -> UserError:
    return UserError(
        f"{path}: unknown kind of file; known are {', '.join(KINDS)}, each with .gz too"
    )


def _parquet_rows(path: str) -> Iterator[Record]:
    """Yields the rows of a Parquet file, read a few at a time.

    A value of a dictionary can stand in every row, and takes its memory each time.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
        values = sum(
            group.column(i).num_values for group in groups for i in range(group.num_columns)
        )
        limit_unpacked(path, max(sum(sizes), 8 * values))  # a null takes no byte in the file
        largest_row = max(sizes, default=1)  # all of a group's dictionaries may be in it
        rows = min(
            PARQUET_ROWS, max(1, most_unpacked(Path(path).stat().st_size) // max(1, largest_row))
        )
        unpacked = 0
        for batch in file.iter_batches(batch_size=rows):
            unpacked += batch.nbytes + sum(map(_count_repeated, batch.columns))
            limit_unpacked(path, unpacked)
            yield from batch.to_pylist()


def _count_repeated_arrow(path: str) -> int:
    """Counts the bytes that an Arrow file's rows have in columns that are dictionaries.

    A value of a dictionary may stand in every row, and counts each time.
    """
    from pyarrow import ipc, memory_map

    with memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = ipc.open_file(source)
        else:
            reader = ipc.open_stream(source)
        if "dictionary<" not in str(reader.schema):
            return 0
        if is_file:
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = reader
        return sum(_count_repeated(column) for batch in batches for column in batch.columns)


def _count_repeated(column: Any) -> int:
    """Counts the bytes of an Arrow array's rows that come from dictionaries."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        values = column.dictionary
        if not (
            types.is_string(values.type)
            or types.is_large_string(values.type)
            or types.is_binary(values.type)
        ):
            return int(values.nbytes // max(1, len(values)) * len(column))
        lengths = compute.binary_length(values).take(column.indices)
        return compute.sum(lengths).as_py() or 0
    if types.is_struct(column.type):
        return sum(map(_count_repeated, column.flatten()))
    if types.is_list(column.type) or types.is_large_list(column.type):
        return _count_repeated(column.flatten())
    return 0


def _count_unpacked_arrow(path: str) -> int:
    """Counts the bytes that an Arrow file's compressed buffers declare to unpack to.

    pyarrow allocates them a whole batch at a time. Each batch's metadata is a flatbuffer that lists
    its buffers; a compressed buffer begins with its unpacked size.
    """
    from pyarrow import ipc, memory_map

    total = 0
    with memory_map(path) as source:
        source.seek(8 if source.read(6) == b"ARROW1" else 0)  # a file is a stream between two marks
        for message in ipc.MessageReader.open_stream(source):
            if message.type not in ("record batch", "dictionary"):
                continue
            metadata = message.metadata.to_pybytes()
            body = memoryview(message.body or b"")
            batch = _follow_field(metadata, struct.unpack_from("<I", metadata)[0], 2)
            if message.type == "dictionary":
                batch = _follow_field(metadata, batch, 1)
            buffers = _follow_field(metadata, batch, 2)
            if not buffers or not _follow_field(metadata, batch, 3):
                continue  # nothing is compressed
            for i in range(struct.unpack_from("<I", metadata, buffers)[0]):
                start, size = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * i)
                if size >= 8:
                    total += max(0, struct.unpack_from("<q", body, start)[0])
    return total


def _follow_field(flatbuffer: bytes, table: int, field: int) -> int:
    """Returns where the table or vector in field number `field` of a table begins; 0 without it.

    table: Where the table begins.
    """
    fields = table - struct.unpack_from("<i", flatbuffer, table)[0]
    has_field = 4 + 2 * field < struct.unpack_from("<H", flatbuffer, fields)[0]
    if not has_field:
        return 0
    offset = struct.unpack_from("<H", flatbuffer, fields + 4 + 2 * field)[0]
    if not offset:
        return 0
    return int(table + offset + struct.unpack_from("<I", flatbuffer, table + offset)[0])


def _read_columns(path: str, kind: str) -> Iterator[NumberedRow]:
    """Yields the numbered rows of a Parquet or Arrow file.

    The `datasets` library reads Arrow; streamed, it makes no copy.
    """
    import datasets

    # What it cannot read it would log as well as raise.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    number = 0
    try:
        if kind == "parquet":
            rows = _parquet_rows(path)
        else:
            limit_unpacked(path, _count_unpacked_arrow(path))
            limit_unpacked(path, _count_repeated_arrow(path))
            stream = datasets.load_dataset(
                kind, data_files=[escape(path)], split="train", streaming=True
            )
            rows = _keep_encoded(stream)
        for row in rows:
            number += 1
            yield number, remove_none_values(row)
    except UserError:
        raise
    except Exception as error:  # pyarrow, fsspec and datasets each have their own
        reason = first_line(error)
        raise UserError(f"{path}: cannot be read as {kind} after row {number}: {reason}") from None


def remove_none_values(row: Record) -> Record:
    """A row of Arrow without the keys that Arrow added.

    The structs of a column all have the keys of every one of them, null where a row had none: a
    tool call with one argument has every argument of every tool. The columns themselves stay.

    >>> remove_none_values(
    ...     {"system": None, "call": {"name": "rain", "arguments": {"city": "Oslo", "days": None}}}
    ... )
    {'system': None, 'call': {'name': 'rain', 'arguments': {'city': 'Oslo'}}}
    """
    return {column: _remove_none(value) for column, value in row.items()}


def _remove_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_remove_none(inner) for inner in value]
    return value
