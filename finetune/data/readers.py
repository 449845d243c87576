"""Local files as rows. A damaged row is a `BadRow` in its place; a damaged file is a `UserError`.

JSON, CSV and text are read here, not through the `datasets` library: it unifies the columns of all rows (a key that one
message has is null in every other, "007" becomes 7), and names neither the file nor the row of what it cannot read.
"""

import csv
import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import IO, Any

from finetune.data.json_rows import (
    MAX_ROW_BYTES,
    NumberedRow,
    RepeatedKeys,
    RowDecoder,
    parse_line,
    read_array,
    read_wrapped_rows,
)
from finetune.data.messages import BadRow
from finetune.errors import UserError
from finetune.units import has_lines

PARQUET_ROWS = 32  # held at a time
BLANK_LINES = 1024  # after which those that follow are skipped together
UNPACKED_TIMES = 64  # what a .gz, Parquet or Arrow file unpacks to, as a multiple of its size; text makes 3 to 20
UNPACKED_BYTES = 64 * 2**20  # whatever its size
MAGIC = {
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
    b"\x1f\x8b": "a gzip file; end its name with .gz",
    b"PAR1": "a Parquet file; end its name with .parquet",
    b"ARROW1": "an Arrow file; end its name with .arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\x28\xb5\x2f\xfd": "a Zstandard file; unpack it, or pack it with gzip",
    b"BZh": "a bzip2 file; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "an xz file; unpack it, or pack it with gzip",
}
KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


def file_kind(path: str) -> str | None:
    """A file's kind by its name, with or without `.gz`; None where the name is of no known kind.

    >>> file_kind("data/math.jsonl.gz")
    'json'
    """
    return KINDS.get(Path(path.removesuffix(".gz")).suffix.lower())


def read_file(path: str) -> Iterator[NumberedRow]:
    """The rows of one file, each with its number (see `units.name_place`). Raises `UserError` if it breaks off."""
    match file_kind(path):
        case "json":
            return _read_json(path)
        case "csv":
            return _read_csv(path)
        case "text":
            return _read_text(path)
        case "parquet" | "arrow" as kind:
            return _read_columns(path, kind)
    raise UserError(f"{path}: unknown kind of file; known are {', '.join(KINDS)}, each with .gz too")


@contextmanager
def convert_os_errors(path: str) -> Iterator[None]:
    """Turns an `OSError` on `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Unpacked(io.RawIOBase):
    """What a gzip file holds, up to a bound: a few megabytes of zeros can stand for terabytes."""

    def __init__(self, packed: gzip.GzipFile, path: str) -> None:
        self._packed, self._path = packed, path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._packed.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._packed.readinto(buffer)
        _limit_unpacked(self._path, self._packed.tell())
        return count


def _limit_unpacked(path: str, size: int) -> None:
    most = max(UNPACKED_BYTES, UNPACKED_TIMES * Path(path).stat().st_size)
    if size > most:
        raise UserError(
            f"{path}: unpacks to more than {most // 2**20:,} MiB, {UNPACKED_TIMES} times its size; "
            "is it data? unpack it, and name the unpacked file"
        )


@contextmanager
def _open_unpacked(path: str) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked. Whatever fails while they are read is a `UserError`."""
    with convert_os_errors(path):
        try:
            if path.endswith(".gz"):
                with gzip.open(path, "rb") as packed:
                    yield io.BufferedReader(_Unpacked(packed, path), 2**20)
            else:
                with Path(path).open("rb") as stream:
                    yield stream
        except EOFError:
            raise UserError(
                f"{path}: the file is truncated: its gzip stream has no end; copy or download it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path}: not a valid gzip file: {error}; copy or download it again") from None


def _refuse_binary(path: str, stream: IO[bytes]) -> None:
    """Raises `UserError` where the file begins like no text in UTF-8; else the stream is at its start again."""
    start = stream.read(1024)
    stream.seek(0)
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if found is None and start.count(0) > len(start) // 4:  # a few are a damaged row, and the others are read
        found = "no text in UTF-8: many of its bytes are 0, as in UTF-16 or a binary file; save it as UTF-8"
    if found is not None:
        raise UserError(f"{path}: {found}")


def _read_lines(stream: IO[bytes]) -> Iterator[tuple[int, str | BadRow]]:
    """Lines that are not blank, with their numbers from 1; one that is too long is skipped without being held."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, BadRow(f"longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows")
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, BadRow(f"not UTF-8: {error.reason} at byte {error.start + 1}")
            continue
        if text.strip():
            yield number, text
        elif number % BLANK_LINES == 0 and isinstance(stream, io.BufferedReader):
            ahead = stream.peek()  # a copy of all that is buffered
            number += len(stream.read(len(ahead) - len(ahead.lstrip(b"\n"))))


def _read_text(path: str) -> Iterator[NumberedRow]:
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        for number, line in _read_lines(stream):
            yield number, line if isinstance(line, BadRow) else {"text": line}


def _read_json(path: str) -> Iterator[NumberedRow]:
    """A row a line (JSON Lines), or one array of rows, or one object that holds it, by how the file begins."""
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        first = next(_read_lines(stream), (0, ""))[1]
        stream.seek(0)
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from read_array(path, stream)
            return
        decoder = RowDecoder()
        if start.startswith(b"{") and isinstance(first, str) and isinstance(parse_line(first, decoder), BadRow):
            rows = read_wrapped_rows(path, stream)  # an object over many lines, or a damaged first row
            if rows is not None:
                yield from enumerate(rows, 1)
                return
            stream.seek(0)
        for number, (line_number, line) in enumerate(_read_lines(stream), 1):
            row = line if isinstance(line, BadRow) else parse_line(line, decoder)
            yield line_number if has_lines(path) else number, row


def _read_csv(path: str) -> Iterator[NumberedRow]:
    """Rows under the names of the first line; every value stays the text that it is."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        delimiter = "\t" if Path(path.removesuffix(".gz")).suffix.lower() == ".tsv" else ","
        reader = csv.reader(_decode_lines(path, stream), delimiter=delimiter, strict=True)
        columns: list[str] | None = None
        row_type: type[dict[str, Any]] = dict
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise UserError(f"{path}:{number}: a quoted field that begins here is never closed") from None
                yield number, BadRow(f"not CSV: {error}")
                continue
            if values is None:
                return
            if columns is None:
                columns = values
                _refuse_other_delimiter(path, columns, delimiter)
                row_type = dict if len(set(columns)) == len(columns) else RepeatedKeys
            elif len(values) == len(columns):
                yield number, row_type(zip(columns, values, strict=True))
            elif values:
                yield number, BadRow(f"{len(values)} fields where the first line names {len(columns)} columns")


def _refuse_other_delimiter(path: str, columns: list[str], delimiter: str) -> None:
    """Raises `UserError` where the first line names one column that looks like several: every row would be one text."""
    if len(columns) != 1:
        return
    ours, as_ours = ("tabs", "save it with tabs") if delimiter == "\t" else ("commas", "save it with commas")
    for sign, name, advice in ((";", "semicolons", as_ours), ("\t", "tabs", "end its name with .tsv")):
        if sign in columns[0]:
            raise UserError(f"{path}: its columns are separated by {name}, where {ours} are expected; {advice}")


def _decode_lines(path: str, stream: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES), b""), 1):
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            raise UserError(
                f"{path}:{number}: a line longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows"
            )
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """A few rows at a time: a dictionary's value can stand in every row, and takes its memory each time."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        _limit_unpacked(path, sum(group.total_byte_size for group in groups))
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            yield from batch.to_pylist()


def _count_unpacked_arrow(path: str) -> int:
    """The bytes that the buffers of an Arrow file declare, which pyarrow allocates a whole batch at a time.

    Each batch's metadata is a flatbuffer that lists its buffers; a compressed buffer begins with its unpacked size.
    """
    from pyarrow import ipc, memory_map

    total = 0
    with memory_map(path) as source:
        source.seek(8 if source.read(6) == b"ARROW1" else 0)  # a file is a stream between two marks
        for message in ipc.MessageReader.open_stream(source):
            if message.type not in ("record batch", "dictionary"):
                continue
            metadata, body = message.metadata.to_pybytes(), memoryview(message.body or b"")

            def follow(table: int, field: int, metadata: bytes = metadata) -> int:
                fields = table - struct.unpack_from("<i", metadata, table)[0]
                has_field = 4 + 2 * field < struct.unpack_from("<H", metadata, fields)[0]
                offset = struct.unpack_from("<H", metadata, fields + 4 + 2 * field)[0] if has_field else 0
                return table + offset + struct.unpack_from("<I", metadata, table + offset)[0] if offset else 0

            batch = follow(struct.unpack_from("<I", metadata)[0], 2)
            batch = follow(batch, 1) if message.type == "dictionary" else batch
            buffers = follow(batch, 2)
            if not buffers or not follow(batch, 3):
                continue  # nothing is compressed
            for i in range(struct.unpack_from("<I", metadata, buffers)[0]):
                start, size = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * i)
                total += max(0, struct.unpack_from("<q", body, start)[0]) if size >= 8 else 0
    return total


def _read_columns(path: str, kind: str) -> Iterator[NumberedRow]:
    """Parquet, and Arrow through the `datasets` library, streamed so that it makes no copy."""
    import datasets

    # What it cannot read it would log as well as raise.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    number = 0
    try:
        if kind == "parquet":
            rows = _parquet_rows(path)
        else:
            _limit_unpacked(path, _count_unpacked_arrow(path))
            rows = datasets.load_dataset(kind, data_files=[escape(path)], split="train", streaming=True)
        for row in rows:
            number += 1
            yield number, remove_none_values(row)
    except UserError:
        raise
    except Exception as error:  # pyarrow, fsspec and datasets each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: cannot be read as {kind} after row {number}: {reason}") from None


def remove_none_values(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow without the keys that Arrow added.

    The structs of a column all have the keys of every one of them, null where a row had none: a tool call with one
    argument has every argument of every tool. The columns themselves stay.

    >>> remove_none_values({"system": None, "call": {"name": "rain", "arguments": {"city": "Oslo", "days": None}}})
    {'system': None, 'call': {'name': 'rain', 'arguments': {'city': 'Oslo'}}}
    """
    return {column: _remove_none(value) for column, value in row.items()}


def _remove_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_none(inner) for key, inner in value.items() if inner is not None}
    return [_remove_none(inner) for inner in value] if isinstance(value, list) else value
