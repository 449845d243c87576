"""Text files as rows: JSON, CSV and lines, gzipped or not.

A damaged row is a `BadRow`, a damaged file a `UserError`.

They are read here, not through the `datasets` library: it unifies the columns of all rows (a key
that one message has is null in every other, "007" becomes 7), and names neither the file nor the
row of what it cannot read. Of an array of rows one is held at a time.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from finetune.constants import Record
from finetune.data.messages import BadRow
from finetune.errors import UserError
from finetune.units import counted, has_lines

BLANK_LINES = 1024  # after which those that follow are skipped together
UNPACKED_TIMES = 30  # what a file unpacks to, as a multiple of its size; text makes 3 to 20
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


CHUNK_BYTES = 2**20
# a longer row is a broken file, or a whole corpus that belongs in several rows
MAX_ROW_BYTES = 16 * 2**20


class RepeatedKeys(dict[str, Any]):
    """A row in which, at any depth, two keys have the same name: only the last one's value is
    kept.
    """


NumberedRow = tuple[int, Record | BadRow]  # the number is that of `units.name_place`


class RowDecoder(json.JSONDecoder):
    """JSON that notices equal keys in one object; the `json` module silently drops all but the
    last.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> Record:
    result = dict(pairs)
    is_repeated = len(result) != len(pairs) or any(map(_has_repeated_keys, result.values()))
    return RepeatedKeys(result) if is_repeated else result


def _has_repeated_keys(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_repeated_keys, value))
    return isinstance(value, RepeatedKeys)


def file_kind(path: str) -> str | None:
    """A file's kind by its name, with or without `.gz`; None where the name is of no known kind.

    >>> file_kind("data/math.jsonl.gz")
    'json'
    """
    return KINDS.get(Path(path.removesuffix(".gz")).suffix.lower())


@contextmanager
def convert_os_errors(path: str) -> Iterator[None]:
    """Turns an `OSError` on `path` into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, up to a bound: a few megabytes can stand for terabytes."""

    def __init__(self, packed: gzip.GzipFile, path: str) -> None:
        self._packed = packed
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._packed.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._packed.readinto(buffer)
        limit_unpacked(self._path, self._packed.tell())
        return count


def most_unpacked(size: int) -> int:
    """The bytes that a file of `size` bytes may unpack to."""
    return max(UNPACKED_BYTES, UNPACKED_TIMES * size)


def limit_unpacked(path: str, size: int) -> None:
    """Raises `UserError` where a file unpacks to more than data does."""
    most = most_unpacked(Path(path).stat().st_size)
    if size > most:
        raise UserError(
            f"{path}: unpacks to more than {most // 2**20:,} MiB, {UNPACKED_TIMES} times its size; "
            "is it data? unpack it, as JSON Lines if it is of columns, and name the unpacked file"
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
                f"{path}: the file is truncated: its gzip stream has no end; copy or download it "
                "again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}: not a valid gzip file: {error}; copy or download it again"
            ) from None


def _refuse_binary(path: str, stream: IO[bytes]) -> None:
    """Raises `UserError` where the file begins like no text in UTF-8; else the stream is at its
    start again.
    """
    start = stream.read(1024)
    stream.seek(0)
    problem = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    # a few are a damaged row, and the others are read
    if problem is None and start.count(0) > len(start) // 4:
        problem = (
            "no text in UTF-8: many of its bytes are 0, as in UTF-16 or a binary file; save it as "
            "UTF-8"
        )
    if problem is not None:
        raise UserError(f"{path}: {problem}")


def _read_lines(stream: IO[bytes]) -> Iterator[tuple[int, str | BadRow]]:
    """Yields the lines that are not blank, with their numbers from 1.

    A line that is too long is a `BadRow`, and is never held in memory.
    """
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield (
                number,
                BadRow(f"longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows"),
            )
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
    """Yields the rows of a JSON file: one a line (JSON Lines), an array, or an object with a list.

    How the file begins says which.
    """
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
        if (
            start.startswith(b"{")
            and isinstance(first, str)
            and isinstance(parse_line(first, decoder), BadRow)
        ):
            # an object over many lines, or a damaged first row
            rows = read_wrapped_rows(path, stream)
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
        if Path(path.removesuffix(".gz")).suffix.lower() == ".tsv":
            delimiter = "\t"
        else:
            delimiter = ","
        reader = csv.reader(_decode_lines(path, stream), delimiter=delimiter, strict=True)
        columns: list[str] | None = None
        row_type: type[Record] = dict
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise UserError(
                        f"{path}:{number}: a quoted field that begins here is never closed"
                    ) from None
                yield number, BadRow(f"not CSV: {error}")
                continue
            if values is None:
                return
            if columns is None:
                columns = values
                _refuse_other_delimiter(path, columns, delimiter)
                if len(set(columns)) == len(columns):
                    row_type = dict
                else:
                    row_type = RepeatedKeys
            elif len(values) == len(columns):
                yield number, row_type(zip(columns, values, strict=True))
            elif values:
                yield (
                    number,
                    BadRow(
                        f"{len(values)} fields where the first line names {len(columns)} columns"
                    ),
                )


def _refuse_other_delimiter(path: str, columns: list[str], delimiter: str) -> None:
    """Raises `UserError` where the first line names one column that looks like several: every row
    would be one text.
    """
    if len(columns) != 1:
        return
    ours = "tabs" if delimiter == "\t" else "commas"
    for sign, name, advice in (
        (";", "semicolons", f"save it with {ours}"),
        ("\t", "tabs", "end its name with .tsv"),
    ):
        if sign in columns[0]:
            raise UserError(
                f"{path}: its columns are separated by {name}, where {ours} are expected; {advice}"
            )


def _decode_lines(path: str, stream: IO[bytes]) -> Iterator[str]:
    """Yields the lines as text. Raises `UserError` for one that is too long, or not UTF-8."""
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES), b""), 1):
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            raise UserError(
                f"{path}:{number}: a line longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into "
                "several rows"
            )
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}"
            ) from None


def parse_line(line: str, decoder: RowDecoder) -> Record | BadRow:
    """Parses the one row in `line`, or returns what is wrong with it."""
    try:
        value, end = decoder.raw_decode(line, _skip_space(line, 0))
        if _skip_space(line, end) < len(line):
            return BadRow(f"not JSON: more text after its value at character {end + 1}")
    except RecursionError:
        return BadRow("nested too deeply")
    except ValueError as error:
        return BadRow(f"not JSON: {error}")
    return _as_row(value)


def _as_row(value: Any) -> Record | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(f"a JSON object is expected, found {type(value).__name__}")


def read_array(path: str, stream: IO[bytes]) -> Iterator[NumberedRow]:
    """Yields the rows of `[{...}, {...}]`.

    They are parsed one by one, so that an error names its row, and one row at a time is held.
    """
    text = _Text(path, stream)
    text.at = text.buffer.index("[") + 1
    decoder = RowDecoder()
    number = 1
    while text.peek() not in ("]", ""):
        try:
            value = text.parse(decoder, number)
        except RecursionError:
            raise UserError(f"{path}, row {number}: nested too deeply") from None
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(
                f"{path}, row {number}: not JSON: {reason}; repair that row, since those after it "
                "cannot be read"
            ) from None
        yield number, _as_row(value)
        number += 1
        if text.peek() == ",":
            text.at += 1
        elif text.peek() != "]":
            break
    if text.peek() != "]":
        raise UserError(
            f"{path}, row {number}: the array is never closed; the file is truncated or damaged "
            "there"
        )
    text.at += 1
    if text.peek():
        raise UserError(
            f"{path}: more text after its array of {counted(number - 1, 'row')}; join the arrays "
            "into one"
        )


class _Text:
    """A stretch of a UTF-8 file; more is read as it is needed."""

    def __init__(self, path: str, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer = ""
        self.at = 0
        self._read()

    def peek(self) -> str:
        """Moves `at` to the next character that is no white space, and returns it; empty at the
        end.
        """
        while True:
            self.at = _skip_space(self.buffer, self.at)
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self._read():
                return ""

    def take(self, sign: str) -> None:
        """Moves after `sign`, which must come next. Raises `ValueError`."""
        if self.peek() != sign:
            raise ValueError(f"{sign} is expected")
        self.at += 1

    def parse(self, decoder: RowDecoder, number: int | None = None) -> Any:
        """Parses the value that begins at `at`, and moves `at` to its end.

        Args:
            decoder: Of one value.
            number: The row that the value is. Then the file is read on as far as a row may be long,
                since more text could complete it. None: text that is surely no JSON is an error at
                once.

        Raises:
            ValueError: It is no JSON.
            RecursionError: It is nested too deeply.
        """
        while True:
            try:
                value, end = decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                is_near_end = error.pos > len(self.buffer) - 10
                is_cut = error.msg.startswith("Unterminated string") or is_near_end
                if (is_cut or number) and self.grow(number or 1):
                    continue
                raise
            if end == len(self.buffer) and self.grow(number or 1):
                continue
            self.at = end
            return value

    def grow(self, number: int) -> bool:
        """Reads more of the row that begins at `at`; returns False at the end of the file.

        Raises `UserError` if it is too long.
        """
        if len(self.buffer) - self.at > MAX_ROW_BYTES:
            raise UserError(
                f"{self._path}, row {number}: longer than {MAX_ROW_BYTES // 2**20} MiB, or damaged "
                "so that it has no end"
            )
        return self._read()

    def _read(self) -> bool:
        """Drops what stands before `at`, and reads more; returns False at the end of the file.

        It reads as much as is buffered, so that a long row is not parsed too often.
        """
        self.buffer = self.buffer[self.at :]
        self.at = 0
        kept = len(self._decoder.getstate()[0])
        offset = self._stream.tell() - kept
        chunk = self._stream.read(max(CHUNK_BYTES, len(self.buffer)))
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            where = offset + error.start + 1
            raise UserError(f"{self._path}: not UTF-8: {error.reason} at byte {where}") from None
        self.buffer += text
        return bool(chunk)


def read_wrapped_rows(path: str, stream: IO[bytes]) -> Iterator[Record] | None:
    """Returns the rows of the one list of rows in an object, such as `{"data": [{...}, {...}]}`.

    The file is read twice: to find the list, and for its rows.

    Returns:
        None where the file is no JSON object.

    Raises:
        UserError: The object has no such list, or several.
    """
    # key -> for the kinds of values in its list: whether they are rows
    kinds: dict[str, set[bool]] = {}
    try:
        for key, value in _walk_object(_Text(path, stream)):
            if value is LIST and key in kinds:
                raise UserError(
                    f"{path}: two keys of its one object have the same name; only one could be "
                    "read: rename or join them"
                )
            kinds.setdefault(key, set())
            if value is not LIST:
                kinds[key].add(isinstance(value, dict))
    except (ValueError, RecursionError):
        return None
    lists = [key for key, are_lists in kinds.items() if are_lists == {True}]
    if len(lists) != 1:
        raise UserError(
            f"{path}: one JSON object; a list of rows, or one row a line (JSON Lines) is expected"
        )
    stream.seek(0)
    return (
        row for key, row in _walk_object(_Text(path, stream)) if key == lists[0] and row is not LIST
    )


LIST = object()  # marks the beginning of a key's list, or of its other value


def _walk_object(text: _Text) -> Iterator[tuple[str, Any]]:
    """Yields (key, LIST) for each key of one object, then (key, value) for each value in its list.

    A value that is no list is passed over. Raises `ValueError` where the text is no JSON object.
    """
    decoder = RowDecoder()
    text.peek()
    text.take("{")
    while True:
        text.peek()
        key = text.parse(decoder)
        if not isinstance(key, str):
            raise ValueError("a key is expected")
        text.take(":")
        yield key, LIST
        if has_list := text.peek() == "[":
            text.take("[")
        while not (has_list and text.peek() == "]"):
            text.peek()
            value = text.parse(decoder)
            if not has_list:
                break
            yield key, value
            if text.peek() != "]":
                text.take(",")
        if has_list:
            text.take("]")
        if text.peek() == "}":
            break
        text.take(",")
    text.take("}")
    if text.peek():
        raise ValueError("more text after its value")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


TEXT_READERS: Mapping[str, Callable[[str], Iterator[NumberedRow]]] = {
    "json": _read_json,
    "csv": _read_csv,
    "text": _read_text,
}
