"""Rows of a source: a file, a glob, a folder, a function or a data set of the hub; and its hashes.

Parquet, Arrow and data sets of the hub are read by pyarrow and the `datasets` library, text files
by readers.py.
"""

import os
import re
import struct
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from glob import escape
from itertools import count, islice
from pathlib import Path
from typing import Any

import xxhash

from finetune.config import user_code
from finetune.config.schema import DatasetSource
from finetune.constants import ceil_div
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
from finetune.files.durable import CHECKSUM, checksum, hash_json
from finetune.files.json_files import refuse_lfs_pointer
from finetune.files.network import go_offline_without_network

BATCH_ROWS = 500
SAMPLE_BYTES = 64 * 1024  # of each sample that a stream's fingerprint is made of
UNREAD_COMPRESSION = (".zst", ".bz2", ".xz", ".zip")  # endings of files that are not read
# read of one source for a stream's fingerprint; at least two samples of each file are read
FINGERPRINT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some rows of one file, function or data set of the hub, in order."""

    file: str  # or the name of the function or of the data set
    numbers: tuple[int, ...]  # [rows]: the line or row number, see `units.name_place`
    rows: tuple[dict[str, Any] | BadRow, ...]


def read_rows(
    source: DatasetSource, *, streaming: bool = False, batch_rows: int = BATCH_ROWS
) -> Iterator[RowBatch]:
    """Yields the rows of a source in order, in batches of at most `batch_rows`.

    With `streaming`, a data set of the hub is streamed, and reading stops after `max_samples` rows.

    Raises `UserError` if nothing is at the source's path, or a file cannot be read.
    """
    if streaming and source.max_samples is not None:
        rows_left = source.max_samples
    else:
        rows_left = sys.maxsize
    for file, rows in _open_rows(source, streaming):
        for batch in _batch_rows(file, islice(rows, rows_left), batch_rows):
            rows_left -= len(batch.rows)
            yield batch


def draw_rows(source: DatasetSource, seed: int) -> tuple[Iterator[RowBatch], int | None]:
    """Draws `max_samples` of a source's rows at random, as `seed` decides.

    All rows are first read once to count them.

    Returns:
        The drawn rows in the order of the source, and the number of all rows of the source. Without
        `max_samples`: all rows, and None.

    Raises:
        UserError: Nothing is at the source's path, or a file cannot be read.
    """
    if source.max_samples is None:
        return read_rows(source), None
    total = sum(1 for _, rows in _open_rows(source) for _ in rows)
    permutation = make_generator(seed, "samples").permutation(total)
    drawn = set(permutation[: source.max_samples].tolist())
    return _select_rows(source, drawn), total


def _select_rows(source: DatasetSource, drawn: Collection[int]) -> Iterator[RowBatch]:
    """Yields batches of the rows whose indexes among all rows of the source are in `drawn`."""
    indexes = count()  # over all files
    for file, rows in _open_rows(source):
        chosen = (row for row in rows if next(indexes) in drawn)
        yield from _batch_rows(file, chosen, BATCH_ROWS)


def _open_rows(
    source: DatasetSource, streaming: bool = False
) -> Iterator[tuple[str, Iterator[NumberedRow]]]:
    """Yields (file, numbered rows) for each part of a file that `split` names.

    A function, or a data set of the hub, yields one pair: its name, and all its rows.
    """
    if source.function is not None:
        rows = user_code.read_rows(source.function)
        yield source.function, enumerate(map(remove_none_values, rows), 1)
        return
    splits = find_splits(source.path)
    if splits is None:
        rows = _keep_images_encoded(load_hub_rows(source, streaming))
        yield source.path, enumerate(map(remove_none_values, rows), 1)
        return
    for file, start, stop in _resolve_slices(source, splits):
        yield file, islice(read_file(file), start, stop)


def _keep_images_encoded(rows: Any) -> Any:
    """Keeps the `datasets` library from decoding images: rows then hold the images as stored.

    data/images.py decodes them, and bounds their size. Rows without images are returned unchanged.
    """
    if "Image(" not in str(rows.features):
        return rows
    if hasattr(rows, "to_iterable_dataset"):
        stream = rows.to_iterable_dataset()
    else:
        stream = rows
    return stream.decode(False)


def find_splits(path: str) -> dict[str, tuple[str, ...]] | None:
    """Maps each split of a local file, glob or folder to the split's files.

    A file or a glob has one split, train. Returns None if `path` is the name of a data set of the
    hub. Raises `UserError` if `path` is local and there is no such file or folder.
    """
    if not path.strip():
        raise UserError(
            "the path of the data is empty; name a file, a glob, a folder or a hub name"
        )
    with convert_os_errors(path):  # one of its parent folders may be unreadable
        if Path(path).is_dir():
            return _find_folder_splits(path)
        if Path(path).is_file():
            return {"train": (path,)}
        if Path(path).exists():
            raise UserError(
                f"{path}: a pipe or a device, not a file or folder; write its rows into a file"
            )
    if any(letter in path for letter in "*?["):
        paths = _list_glob_files(path)
        if not paths:
            raise UserError(f"{path}: no file matches")
        return {"train": paths}
    if ".py:" in path:
        raise UserError(f"{path}: a function is named by the key function, in place of path")
    if file_kind(path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise UserError(f"{path}: no such file or folder")
    return None


def list_files(source: DatasetSource) -> tuple[str, ...]:
    """Lists the local files of a source's split; empty for a data set of the hub.

    For a function, that is the file in which the function is defined, not the files that it reads.
    """
    if source.function is not None:
        return (str(user_code.file_of(source.function)),)
    splits = find_splits(source.path)
    if splits is None:
        return ()
    return tuple(file for name in _list_split_names(source, splits) for file in splits[name])


def _list_glob_files(pattern: str) -> tuple[str, ...]:
    """Lists the files that match a glob pattern, sorted."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if any(letter in part for letter in "*?["))
    folder = Path(*parts[:first])  # of names without a wildcard
    paths = sorted(str(p) for p in folder.glob(str(Path(*parts[first:]))) if p.is_file())
    return tuple(paths)


def _find_folder_splits(path: str) -> dict[str, tuple[str, ...]]:
    """Maps each split of a folder to its files, by the rules of the `datasets` library.

    They look for files or folders named train, test, validation, ...

    Raises `UserError` if the folder holds no data.
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
                files.update(file for file in matching if _accept_data_file(file))
        # If there are Arrow files, only they are data: `save_to_disk` also writes JSON beside them.
        arrow = {
            file for file in files if file_kind(file) == "arrow" and not _is_map_result(Path(file))
        }
        if files:
            splits[str(split)] = tuple(sorted(arrow or files))
    if not splits:
        raise UserError(
            f"{path}: no data in this folder; known are {', '.join(KINDS)}; text with .gz too"
        )
    return splits


def _accept_data_file(file: str) -> bool:
    """Whether a file is of a known kind.

    Raises `UserError` for a file of a known kind that is compressed by UNREAD_COMPRESSION.
    """
    path = Path(file)
    is_packed = path.suffix.lower() in UNREAD_COMPRESSION and file_kind(str(path.with_suffix("")))
    if is_packed and not file_kind(file):
        raise _make_unknown_kind_error(file)
    return file_kind(file) is not None


def _is_map_result(file: Path) -> bool:
    """Whether a file in a saved data set is the cached result of its `map` or `filter`.

    The `datasets` library writes such results beside the files that were read.
    """
    return file.name.startswith(("cache-", "tmp")) and file.with_name("dataset_info.json").exists()


def _list_split_names(source: DatasetSource, splits: dict[str, tuple[str, ...]]) -> list[str]:
    """Lists the splits that `source.split` names, in order: ["train", "test"] for train[:10%]+test.

    Raises `UserError` for a split that is not in `splits`.
    """
    names = re.findall(r"(?:^|\+)\s*([\w.-]+)", source.split)
    for name in names:
        if name not in splits:
            raise UserError(f"{source.path}: split {name}: no such split, only {', '.join(splits)}")
    return names


def _resolve_slices(
    source: DatasetSource, splits: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, int, int | None]]:
    """Yields (file, first row, row after the last) for each part of a file that `split` names.

    The rows count from 0. The row after the last is None for a whole file.
    """
    names = _list_split_names(source, splits)
    if "[" not in source.split:
        yield from ((file, 0, None) for name in names for file in splits[name])
        return
    import datasets

    sizes: dict[str, int] = {}
    for name in names:
        uncounted = _find_last_bound(source.split)
        for file in splits[name]:
            sizes[file] = count_rows(file, Path(file).stat().st_mtime_ns, uncounted)
            uncounted -= sizes[file]
    split_sizes = {name: sum(sizes[file] for file in splits[name]) for name in names}
    try:
        slices = datasets.ReadInstruction.from_spec(source.split).to_absolute(split_sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{source.path}: split {source.split}: {first_line(error)}; write it as train[:10%]"
        ) from None
    for slice_ in slices:
        rows_before = 0  # of the split, in earlier files
        for file in splits[slice_.splitname]:
            start = max(slice_.from_ - rows_before, 0)
            stop = min(slice_.to - rows_before, sizes[file])
            if start < stop:
                yield file, start, stop
            rows_before += sizes[file]


def _find_last_bound(split: str) -> int:
    """Returns how many rows of a split must be counted to know the rows of its slices.

    >>> _find_last_bound("train[:1000]"), _find_last_bound("train[5:20]+test[:10]")
    (1000, 20)
    >>> _find_last_bound("train[:10%]+test[:10]") == _find_last_bound("train[5:]") == sys.maxsize
    True
    """
    parts = split.split("+")
    matches = [re.fullmatch(r"\s*[\w.-]+\[(\d*):(\d+)\]\s*", part) for part in parts]
    bounds = [int(bound or 0) for match in matches if match for bound in match.groups()]
    has_other_slices = None in matches
    return sys.maxsize if has_other_slices else max(bounds)


@cache
def count_rows(file: str, modified_ns: int, most: int = sys.maxsize) -> int:
    """Counts the rows of a file, unusable rows included, up to `most`.

    `modified_ns`: the file's modification time. It is part of the cache's key, so a changed file is
    counted again.
    """
    return sum(1 for _ in islice(read_file(file), most))


def load_hub_rows(source: DatasetSource, streaming: bool) -> Any:
    """Loads a data set of the hub: from the Hugging Face cache or the network, or as a stream.

    Raises `UserError` if the `datasets` library cannot load it.
    """
    go_offline_without_network()
    import datasets  # after the line above: it reads once whether the process is offline

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
    """Groups the numbered rows of a file into batches of `size`; the last may be smaller."""
    while batch := tuple(islice(rows, size)):
        yield RowBatch(file, tuple(number for number, _ in batch), tuple(row for _, row in batch))


def hash_content(source: DatasetSource) -> dict[str, str]:
    """Maps each file of a source to a hash of the file's bytes.

    A data set of the hub has one entry: its name, with the `datasets` library's fingerprint.
    """
    files = {file: hash_file(file) for file in list_files(source)}
    return files or {source.path: load_hub_rows(source, streaming=False)._fingerprint}


def hash_file(file: str) -> str:
    """Hashes a file's bytes. Raises `UserError` if the file cannot be read."""
    with convert_os_errors(file):
        return str(checksum(Path(file))[CHECKSUM])


def fingerprint_samples(sources: tuple[DatasetSource, ...]) -> str | None:
    """Hashes evenly spread samples of the sources' files; None if a source is on the hub.

    A stream may be terabytes, so about FINGERPRINT_BYTES of a source are read, or two samples of
    each file if that is more. A change between two samples is therefore not noticed. Names and
    times of files do not count: a copy on another disk is the same stream.
    """
    samples_by_source = []
    for source in sources:
        paths = list_files(source)
        if not paths:
            return None
        max_samples = max(2, FINGERPRINT_BYTES // SAMPLE_BYTES // len(paths))  # of each file
        hash_file_samples = partial(_hash_samples, max_samples=max_samples)
        with ThreadPoolExecutor(8) as pool:
            samples_by_source.append(list(pool.map(hash_file_samples, paths)))
    return hash_json(samples_by_source)


def _hash_samples(path: str, max_samples: int) -> tuple[int, str]:
    """Returns a file's size in bytes, and a hash of at most `max_samples` samples.

    The first and the last SAMPLE_BYTES block of the file are among the samples.
    """
    digest = xxhash.xxh3_128()
    with convert_os_errors(path), Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last_block = max(0, ceil_div(size, SAMPLE_BYTES) - 1)
        samples = min(last_block + 1, max_samples)
        for sample in range(samples):
            block = sample * last_block // max(1, samples - 1)
            file.seek(block * SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
    return size, digest.hexdigest()


TURN_ROWS = 64  # rows that a stream reads of one source before it chooses the next


def interleave_sources(
    sources: tuple[DatasetSource, ...], skip: int = 0
) -> Iterator[tuple[DatasetSource, RowBatch, int]]:
    """Yields batches of rows from all sources in the ratio of their weights, endlessly.

    Each batch comes from the source whose number of rows is furthest behind its weight. Turns of
    equal batches would not do: a batch at the end of a file has fewer rows. A source that ends is
    read again from its first row.

    Args:
        sources: The sources.
        skip: The number of batches at the beginning that are read but not yielded.

    Yields:
        (source, batch, the smallest number of times that a source has been read to its end).

    Raises:
        UserError: A source has no rows.
    """
    weights = [source.weight / sum(source.weight for source in sources) for source in sources]
    passes = [0] * len(sources)
    readers = [read_rows(source, streaming=True, batch_rows=TURN_ROWS) for source in sources]
    rows_read = [0] * len(sources)
    batches = 0
    while True:
        rows_behind = [
            weight * (sum(rows_read) + 1) - rows
            for weight, rows in zip(weights, rows_read, strict=True)
        ]
        i = rows_behind.index(max(rows_behind))
        batch = next(readers[i], None)
        if batch is None:
            passes[i] += 1
            readers[i] = read_rows(sources[i], streaming=True, batch_rows=TURN_ROWS)
            batch = next(readers[i], None)
            if batch is None:
                raise UserError(f"{sources[i].origin}: it has no rows")
        rows_read[i] += len(batch.rows)
        batches += 1
        if batches > skip:
            yield sources[i], batch, min(passes)


def describe_source(source: DatasetSource) -> Any:
    """Returns a source's recipe keys, and (path, size, modification time) of each local file.

    This is quick, where hashing the files' content would take too long. A data set of the hub has
    no files.
    """
    files = [
        (file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns)
        for file in list_files(source)
    ]
    return asdict(source), files


PARQUET_ROWS = 32  # rows of a Parquet file that are in memory at a time, at most


def read_file(path: str) -> Iterator[NumberedRow]:
    """Yields the rows of a file, each with its line or row number (see `units.name_place`).

    Raises `UserError` if the file is of no known kind or cannot be read to its end.
    """
    kind = file_kind(path)
    if kind is None:
        raise _make_unknown_kind_error(path)
    with convert_os_errors(path):
        refuse_lfs_pointer(Path(path))
    if kind in TEXT_READERS:
        return TEXT_READERS[kind](path)
    return _read_columns(path, kind)


def _make_unknown_kind_error(path: str) -> UserError:
    return UserError(
        f"{path}: unknown kind of file; known are {', '.join(KINDS)}; text with .gz too"
    )


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file, a few in memory at a time.

    A small file can unpack to far more than the machine's memory, since one dictionary value can
    stand in every row. Raises `UserError` once the rows take more than `most_unpacked` bytes.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        json_columns = _find_json_columns(file.schema_arrow)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
        values = sum(
            group.column(i).num_values for group in groups for i in range(group.num_columns)
        )
        # At least 8 bytes a value: a null takes no byte in the file.
        limit_unpacked(path, max(sum(sizes), 8 * values))
        largest_row = max(sizes, default=1)  # a row may hold all of its group's dictionary values
        max_bytes = most_unpacked(Path(path).stat().st_size)
        rows = min(PARQUET_ROWS, max(1, max_bytes // max(1, largest_row)))
        unpacked = 0  # bytes
        for batch in file.iter_batches(batch_size=rows):
            unpacked += batch.nbytes + sum(map(_count_dictionary_bytes, batch.columns))
            limit_unpacked(path, unpacked)
            for row in batch.to_pylist():
                if json_columns:
                    json_values = {name: row[name] for name in json_columns}
                    row |= json_columns.decode_example(json_values)
                yield row


def _find_json_columns(schema: Any) -> Any:
    """Returns the features of the columns that the `datasets` library stored as JSON text."""
    from datasets import Features

    features = Features()
    if b"Json" in (schema.metadata or {}).get(b"huggingface", b""):
        features.update(Features.from_arrow_schema(schema))
    return Features({name: value for name, value in features.items() if "Json(" in str(value)})


def _count_dictionary_bytes_of_file(path: str) -> int:
    """Counts the bytes that the dictionary columns of an Arrow file take as rows.

    A value counts in each row where it stands, though the file holds it once.
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
        return sum(_count_dictionary_bytes(column) for batch in batches for column in batch.columns)


def _count_dictionary_bytes(column: Any) -> int:
    """Counts the bytes that dictionary values in an Arrow array take as rows.

    Text and bytes count by the length of each row's value, other values by the mean size of the
    dictionary's values. Looks into structs, maps and lists; 0 for an array without a dictionary.
    """
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        values = column.dictionary
        if not (
            types.is_string(values.type)
            or types.is_large_string(values.type)
            or types.is_binary(values.type)
            or types.is_large_binary(values.type)
        ):
            return int(values.nbytes // max(1, len(values)) * len(column))
        lengths = compute.binary_length(values).take(column.indices)
        return compute.sum(lengths).as_py() or 0
    if types.is_struct(column.type):
        return sum(map(_count_dictionary_bytes, column.flatten()))
    if types.is_map(column.type):
        return _count_dictionary_bytes(column.keys) + _count_dictionary_bytes(column.items)
    if hasattr(column, "flatten"):  # a list of any kind
        return _count_dictionary_bytes(column.flatten())
    return 0


# Fields of the tables in Arrow's metadata, by their numbers in Message.fbs.
HEADER = 2  # of Message
DICTIONARY_DATA = 1  # of DictionaryBatch
BUFFERS = 2  # of RecordBatch
COMPRESSION = 3  # of RecordBatch


def _count_unpacked_bytes(path: str) -> int:
    """Counts the bytes that the compressed buffers of an Arrow file unpack to, as they declare.

    pyarrow allocates the buffers of a whole batch at once, before any row can be counted. The
    metadata of a batch is a flatbuffer that lists the batch's buffers, and each compressed buffer
    begins with its unpacked size as an int64.
    """
    from pyarrow import ipc, memory_map

    total = 0
    with memory_map(path) as source:
        # An Arrow file is a stream between two marks, of which the first takes 8 bytes.
        source.seek(8 if source.read(6) == b"ARROW1" else 0)
        for message in ipc.MessageReader.open_stream(source):
            if message.type not in ("record batch", "dictionary"):
                continue
            metadata = message.metadata.to_pybytes()
            body = memoryview(message.body or b"")
            (message_table,) = struct.unpack_from("<I", metadata)
            batch = _follow_field(metadata, message_table, HEADER)
            if message.type == "dictionary":
                batch = _follow_field(metadata, batch, DICTIONARY_DATA)
            buffers = _follow_field(metadata, batch, BUFFERS)
            if not buffers or not _follow_field(metadata, batch, COMPRESSION):
                continue  # nothing is compressed
            # The vector of buffers: its length as a uint32, then (start, size) as two int64s each.
            (buffer_count,) = struct.unpack_from("<I", metadata, buffers)
            for i in range(buffer_count):
                start, size = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * i)
                if size >= 8:
                    (unpacked,) = struct.unpack_from("<q", body, start)
                    total += max(0, unpacked)  # -1: this buffer is not compressed
    return total


def _follow_field(flatbuffer: bytes, table: int, field: int) -> int:
    """Returns the position of the table or vector that a field of a flatbuffer table points to.

    Returns 0 if the table does not have the field. A table begins with a signed distance: its own
    position minus that of its vtable. The vtable holds its own size (uint16), the table's size, and
    the offset of each field (uint16).

    Args:
        flatbuffer: The flatbuffer.
        table: The position of the table.
        field: The number of the field, in the order of the table's schema.
    """
    (distance,) = struct.unpack_from("<i", flatbuffer, table)
    vtable = table - distance
    (vtable_size,) = struct.unpack_from("<H", flatbuffer, vtable)
    entry = 4 + 2 * field
    if entry >= vtable_size:
        return 0
    (offset,) = struct.unpack_from("<H", flatbuffer, vtable + entry)
    if not offset:
        return 0
    (target,) = struct.unpack_from("<I", flatbuffer, table + offset)
    return int(table + offset + target)


def _read_columns(path: str, kind: str) -> Iterator[NumberedRow]:
    """Yields the rows of a Parquet or Arrow file, numbered from 1.

    The `datasets` library reads Arrow files as a stream, which makes no copy of them. Raises
    `UserError` if the file cannot be read or unpacks to too much.
    """
    import datasets

    # The library would log what it cannot read, in addition to raising it.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    number = 0
    try:
        if path.endswith(".gz"):
            raise UserError(f"{path}: files of columns are not read from gzip; unpack it")
        if kind == "parquet":
            rows = _read_parquet(path)
        else:
            limit_unpacked(path, _count_unpacked_bytes(path))
            limit_unpacked(path, _count_dictionary_bytes_of_file(path))
            stream = datasets.load_dataset(
                kind, data_files=[escape(path)], split="train", streaming=True
            )
            rows = _keep_images_encoded(stream)
        for row in rows:
            number += 1
            yield number, remove_none_values(row)
    except UserError:
        raise
    except Exception as error:  # pyarrow, fsspec and datasets each have their own
        reason = first_line(error)
        raise UserError(f"{path}: cannot be read as {kind} after row {number}: {reason}") from None


def remove_none_values(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the keys with None at any depth inside a row's columns; the columns themselves stay.

    Arrow gives all structs of a column the same keys, with null where a row had no such key: a tool
    call with one argument has every argument of every tool.

    >>> remove_none_values(
    ...     {"system": None, "call": {"name": "rain", "arguments": {"city": "Oslo", "days": None}}}
    ... )
    {'system': None, 'call': {'name': 'rain', 'arguments': {'city': 'Oslo'}}}
    """
    return {column: _remove_none(value) for column, value in row.items()}


def _remove_none(value: Any) -> Any:
    """Removes the keys with None from `value` and all mappings in it; elements of lists stay."""
    if isinstance(value, dict):
        return {key: _remove_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_remove_none(inner) for inner in value]
    return value
