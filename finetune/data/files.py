"""Local files as rows. A damaged row is a `BadRow` in its place; a damaged file is a `UserError`, for rows would be lost.

JSON, CSV and text are read here, not through the `datasets` library: it unifies the columns of all rows (a key that one
message has is null in every other, "007" becomes 7), and names neither the file nor the row of what it cannot read.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from finetune.data.formats import BadRow
from finetune.errors import UserError

MAX_ROW_BYTES = 16 * 2**20  # a longer row is a broken file, or a corpus in one piece that belongs in several rows
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

NumberedRow = tuple[int, dict[str, Any] | BadRow]  # the number is the line in its file, or the row's own from 1


def kind_of(path: str) -> str | None:
    """What a file's name says of its kind, `.gz` set aside; None where it says nothing known.

    >>> kind_of("data/math.jsonl.gz")
    'json'
    """
    return KINDS.get(Path(path.removesuffix(".gz")).suffix.lower())


def read_file(path: str) -> Iterator[NumberedRow]:
    """The rows of one file, each with its number. Raises `UserError` where the file cannot be read to its end."""
    match kind_of(path):
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
def readable(path: str) -> Iterator[None]:
    """Turns the operating system's refusal of `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked. What goes wrong while they are read becomes a `UserError`."""
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as stream:
            yield stream  # type: ignore[misc]
    except EOFError:
        raise UserError(f"{path}: the file is cut off: its gzip stream has no end; copy or download it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not a sound gzip file: {error}; copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, str | BadRow]]:
    """Lines that are not blank, with their numbers from 1; one that is too long is passed over without being held."""
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


def _read_text(path: str) -> Iterator[NumberedRow]:
    with _opened(path) as stream:
        for number, line in _lines(stream):
            yield number, line if isinstance(line, BadRow) else {"text": line}


def _read_json(path: str) -> Iterator[NumberedRow]:
    """A row a line (JSON Lines), or one array of rows, or one object that holds it; told apart by how the file begins."""
    with _opened(path) as stream:
        first = next(_lines(stream), (0, ""))[1]
        stream.seek(0)
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from _rows_of_array(path, stream.read())
            return
        if start.startswith(b"{") and isinstance(first, str) and isinstance(_parsed(first), BadRow):
            rows = _rows_inside(path, stream.read())  # laid out over many lines, or a first row that is damaged
            if rows is not None:
                yield from enumerate(rows, 1)
                return
            stream.seek(0)
        for number, line in _lines(stream):
            yield number, line if isinstance(line, BadRow) else _parsed(line)


def _parsed(line: str) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line)
    except RecursionError:
        return BadRow("nested too deeply")
    except ValueError as error:
        return BadRow(f"not JSON: {error}")
    return row if isinstance(row, dict) else BadRow(f"a JSON object is expected, found {type(row).__name__}")


def _rows_of_array(path: str, raw: bytes) -> Iterator[NumberedRow]:
    """The rows of `[{...}, {...}]`, parsed one by one, so that an error knows its row."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    decoder = json.JSONDecoder()
    position, number = _past_space(text, text.index("[") + 1), 1
    while position < len(text) and text[position] != "]":
        try:
            row, position = decoder.raw_decode(text, position)
        except RecursionError:
            raise UserError(f"{path}:{number}: nested too deeply") from None
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; the rows after it cannot be read") from None
        yield number, row if isinstance(row, dict) else BadRow("a JSON object is expected")
        position, number = _past_space(text, position), number + 1
        if text[position : position + 1] == ",":
            position = _past_space(text, position + 1)
        elif text[position : position + 1] != "]":
            break
    if text[position : position + 1] != "]":
        raise UserError(f"{path}:{number}: the array of rows has no end; the file is cut off or damaged there")


def _rows_inside(path: str, raw: bytes) -> list[dict[str, Any]] | None:
    """The one list of rows in `{"data": [{...}, {...}]}`; None where the file is no such object."""
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    lists = [v for v in whole.values() if isinstance(v, list) and v and all(isinstance(row, dict) for row in v)]
    if len(lists) != 1:
        raise UserError(f"{path}: one JSON object; a list of rows, or one row a line (JSON Lines) is expected")
    return list(lists[0])


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _read_csv(path: str) -> Iterator[NumberedRow]:
    """Rows under the names of the first line; every value stays the text that it is."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _opened(path) as stream:
        delimiter = "\t" if Path(path.removesuffix(".gz")).suffix.lower() == ".tsv" else ","
        reader = csv.reader(_decoded(path, stream), delimiter=delimiter, strict=True)
        columns: list[str] | None = None
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise UserError(f"{path}:{number}: a quoted field that begins here never ends") from None
                yield number, BadRow(f"not CSV: {error}")
                continue
            if values is None:
                return
            if columns is None:
                columns = values
            elif len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            elif values:
                yield number, BadRow(f"{len(values)} fields where the first line names {len(columns)} columns")


def _decoded(path: str, stream: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None


def _read_columns(path: str, kind: str) -> Iterator[NumberedRow]:
    """Parquet and Arrow, through the `datasets` library, streamed so that it makes no copy."""
    import datasets

    # What it cannot read it would log as well as raise.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    number = 0
    try:
        for row in datasets.load_dataset(kind, data_files=[path], split="train", streaming=True):
            number += 1
            yield number, row
    except Exception as error:  # pyarrow, fsspec and datasets each have their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: cannot be read as {kind} after row {number}: {reason}") from None
