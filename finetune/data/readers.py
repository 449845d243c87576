"""Reads rows from text files: JSON, CSV and lines, gzipped or not.

A damaged row is a `BadRow` in its place, a damaged file raises `UserError`. Rows are read one at a
time, those of a JSON array too.

The `datasets` library is not used, for two reasons. It unifies the columns of all rows: a key that
one message has becomes null in every other one, and "007" becomes 7. And its errors name neither
the file nor the row that cannot be read.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from finetune.data.messages import BadRow
from finetune.errors import UserError
from finetune.units import counted, has_lines

# A blank line whose number is a multiple of this is skipped together with those that follow it.
BLANK_LINES = 1024
# A file may unpack to this multiple of its size (text takes 3 to 20), or to this many bytes if that
# is more.
UNPACKED_TIMES = 30
UNPACKED_BYTES = 64 * 2**20
SAVE_AS_UTF_8 = "save it as UTF-8"  # what to do with a text in another encoding
# first bytes of a file that is no UTF-8 text -> what it is and what to do
MAGIC = {
    b"\xff\xfe": f"text in UTF-16; {SAVE_AS_UTF_8}",
    b"\xfe\xff": f"text in UTF-16; {SAVE_AS_UTF_8}",
    b"\x1f\x8b": "a gzip file; end its name with .gz",
    b"PAR1": "a Parquet file; end its name with .parquet",
    b"ARROW1": "an Arrow file; end its name with .arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\x28\xb5\x2f\xfd": "a Zstandard file; unpack it, or pack it with gzip",
    b"BZh": "a bzip2 file; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "an xz file; unpack it, or pack it with gzip",
}
# ending of a file's name -> kind of file
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
# the beginning of an object with its rows in a list, as `json.dump` writes it on one line; the keys
# before the list have no lists or objects
ROWS_ON_ONE_LINE = re.compile(
    rb"""\{\s*("[^"]*"\s*:\s*("[^"]*"|[\w.+-]+)\s*,\s*)*"""
    rb""""(data|rows|examples|instances|train)"\s*:\s*\[\s*\{"""
)


CHUNK_BYTES = 2**20  # read from a file at once, at least
# A longer row is a damaged file, or a whole corpus that belongs in several rows.
MAX_ROW_BYTES = 16 * 2**20


class RepeatedKeys(dict[str, Any]):
    """A row or object that has two equal keys, in itself or at any depth.

    It keeps only the value of the last one.
    """


# (number, row); the number is the one that `units.name_place` shows: of the line or of the row
NumberedRow = tuple[int, dict[str, Any] | BadRow]


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object of its keys and values; `RepeatedKeys` if keys are equal at any depth."""
    json_object = dict(pairs)
    has_equal_keys = len(json_object) != len(pairs)
    if has_equal_keys or any(map(_has_repeated_keys, json_object.values())):
        return RepeatedKeys(json_object)
    return json_object


def _has_repeated_keys(value: Any) -> bool:
    """Whether a decoded JSON value has equal keys in one of its objects."""
    if isinstance(value, list):
        return any(map(_has_repeated_keys, value))
    return isinstance(value, RepeatedKeys)


# Without the hook, the `json` module would silently drop all but the last of equal keys.
DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def file_kind(path: str) -> str | None:
    """Returns the kind of a file by its name, with or without `.gz`; None for an unknown ending.

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


class _Unpacked(gzip.GzipFile):
    """The content of a gzip file as a stream.

    Reading raises `UserError` at a bound, because a few megabytes may unpack to terabytes.
    """

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        limit_unpacked(self.name, self.tell())
        return count


def most_unpacked(size: int) -> int:
    """Returns how many bytes a file of `size` bytes may unpack to; a small file may to 64 MiB."""
    return max(UNPACKED_BYTES, UNPACKED_TIMES * size)


def limit_unpacked(path: str, size: int) -> None:
    """Raises `UserError` if `size` is more bytes than the file at `path` may unpack to."""
    most = most_unpacked(Path(path).stat().st_size)
    if size > most:
        raise UserError(
            f"{path}: unpacks to more than {most // 2**20:,} MiB, the most for a file of its size; "
            "is it data? unpack it, as JSON Lines if it is of columns, and name the unpacked file"
        )


@contextmanager
def _open_unpacked(path: str) -> Iterator[IO[bytes]]:
    """Opens a file as a stream of its unpacked bytes.

    An error of the file system or of gzip in the block becomes a `UserError`.
    """
    with convert_os_errors(path):
        try:
            if path.endswith(".gz"):
                with _Unpacked(path, "rb") as unpacked:
                    yield io.BufferedReader(unpacked, buffer_size=2**20)
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
    """Raises `UserError` if a file does not begin like text in UTF-8.

    Otherwise the stream is at the file's start again.
    """
    start = stream.read(1024)
    stream.seek(0)
    problem = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    # A few zero bytes are a damaged row, and the other rows can be read.
    if problem is None and start.count(0) > len(start) // 4:
        problem = (
            "no text in UTF-8: many of its bytes are 0, as in UTF-16 or a binary file; save it as "
            "UTF-8"
        )
    if problem is not None:
        raise UserError(f"{path}: {problem}")


def _read_lines(stream: IO[bytes]) -> Iterator[tuple[int, str | BadRow]]:
    """Yields (number from 1, line without its end) for each line that is not blank.

    A line that is too long or no UTF-8 is a `BadRow`. No more than MAX_ROW_BYTES of it are held.
    """
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        text = _decode_line(line, number)
        if isinstance(text, BadRow):
            rest = line
            while rest and not rest.endswith(b"\n"):  # of a line that is too long
                rest = stream.readline(MAX_ROW_BYTES)
            yield number, text
        elif text.strip():
            yield number, text.rstrip("\r\n")
        elif number % BLANK_LINES == 0 and isinstance(stream, io.BufferedReader):
            # skip all blank lines in the buffer at once
            buffered = stream.peek()
            line_ends = len(buffered) - len(buffered.lstrip(b"\n"))
            number += len(stream.read(line_ends))


def _decode_line(line: bytes, number: int) -> str | BadRow:
    """Decodes line `number` of a file; returns a `BadRow` if it is too long or not UTF-8."""
    if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
        return BadRow(f"longer than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error.reason} at byte {error.start + 1}; {SAVE_AS_UTF_8}")


def _read_text(path: str) -> Iterator[NumberedRow]:
    """Yields each line of a file that is not blank as the row {"text": line}."""
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        for number, line in _read_lines(stream):
            yield number, line if isinstance(line, BadRow) else {"text": line}


def _read_json(path: str) -> Iterator[NumberedRow]:
    """Yields the rows of a JSON file in one of three forms, which its beginning shows.

    The rows are the lines of the file (JSON Lines), an array, or the one list of rows in an object.
    """
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        _, first_line = next(_read_lines(stream), (0, ""))
        stream.seek(0)
        start = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from _read_array(path, stream)
            return
        # JSON Lines with a damaged first row, unless it is one object over many lines
        is_line_damaged = isinstance(first_line, str) and isinstance(
            _parse_line(first_line), BadRow
        )
        # JSON Lines with such a column, unless it is one object on one line
        has_list_of_rows = not has_lines(path) and ROWS_ON_ONE_LINE.match(start)
        if start.startswith(b"{") and (is_line_damaged or has_list_of_rows):
            rows = _read_wrapped_rows(path, stream)
            if rows is not None:
                yield from enumerate(rows, 1)
                return
            stream.seek(0)
        for number, (line_number, line) in enumerate(_read_lines(stream), 1):
            row = line if isinstance(line, BadRow) else _parse_line(line)
            yield line_number if has_lines(path) else number, row


def _read_csv(path: str) -> Iterator[NumberedRow]:
    """Yields the rows of a CSV file, each with the column names of the first line.

    Every value stays text. A row has the number of the line that it begins on.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    with _open_unpacked(path) as stream:
        _refuse_binary(path, stream)
        if Path(path.removesuffix(".gz")).suffix.lower() == ".tsv":
            delimiter = "\t"
        else:
            delimiter = ","
        reader = csv.reader(_decode_lines(path, stream), delimiter=delimiter, strict=True)
        columns: list[str] | None = None
        row_type: type[dict[str, Any]] = dict
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
                if len(set(columns)) != len(columns):
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
    """Raises `UserError` if the only column's name looks like several, separated by another sign.

    Every row would otherwise be read as a single value.
    """
    if len(columns) != 1:
        return
    only_column = columns[0]
    expected = "tabs" if delimiter == "\t" else "commas"
    for sign, name, advice in (
        (";", "semicolons", f"save it with {expected}"),
        ("\t", "tabs", "end its name with .tsv"),
    ):
        if sign in only_column:
            raise UserError(
                f"{path}: its columns are separated by {name}, where {expected} are expected; "
                f"{advice}"
            )


def _decode_lines(path: str, stream: IO[bytes]) -> Iterator[str]:
    """Yields the lines of a CSV file as text.

    Raises `UserError` for a line that is too long or not UTF-8.
    """
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES), b""), 1):
        text = _decode_line(line, number)
        if isinstance(text, BadRow):
            raise UserError(f"{path}:{number}: {text}")
        yield text


def _parse_line(line: str) -> dict[str, Any] | BadRow:
    """Parses a line of JSON Lines; returns its row, or a `BadRow` that says what is wrong."""
    try:
        value, end = DECODER.raw_decode(line, _skip_space(line, 0))
        if _skip_space(line, end) < len(line):
            return BadRow(f"not JSON: more text after its value at character {end + 1}")
    except RecursionError:
        return BadRow("nested too deeply")
    except ValueError as error:
        return BadRow(f"not JSON: {error}")
    return _as_row(value)


def _as_row(value: Any) -> dict[str, Any] | BadRow:
    """Returns a JSON value if it is an object, otherwise a `BadRow`."""
    if isinstance(value, dict):
        return value
    return BadRow(f"a JSON object is expected, found {type(value).__name__}")


def _read_array(path: str, stream: IO[bytes]) -> Iterator[NumberedRow]:
    """Yields the rows of a file that is one JSON array, `[{...}, {...}]`, numbered from 1.

    The rows are parsed one by one. So an error can name its row, and only one row is held at a
    time.

    Raises `UserError` at a row that is no JSON, an array that is not closed, and text behind it.
    """
    text = _TextBuffer(path, stream)
    text.position = text.buffer.index("[") + 1
    number = 1
    while text.peek() not in ("]", ""):
        try:
            value = text.parse(number)
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
            text.position += 1
        elif text.peek() != "]":
            break
    if text.peek() != "]":
        raise UserError(
            f"{path}, row {number}: the array is never closed; the file is truncated or damaged "
            "there"
        )
    text.position += 1
    if text.peek():
        raise UserError(
            f"{path}: more text after its array of {counted(number - 1, 'row')}; join the arrays "
            "into one"
        )


class _TextBuffer:
    """The part of a UTF-8 file that is being parsed; more is read when it is needed.

    `position` is the next character of `buffer` to parse. What stands before it may be dropped.
    """

    def __init__(self, path: str, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer = ""
        self.position = 0
        self._read()

    def peek(self) -> str:
        """Skips white space and returns the next character, without moving past it.

        Returns "" at the end of the file.
        """
        while True:
            self.position = _skip_space(self.buffer, self.position)
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self._read():
                return ""

    def take(self, sign: str) -> None:
        """Moves past `sign`. Raises `ValueError` if it is not the next sign."""
        if self.peek() != sign:
            raise ValueError(f"{sign} is expected")
        self.position += 1

    def parse(self, number: int | None = None) -> Any:
        """Parses the value that begins at `position`, and moves past it.

        Args:
            number: The number of the row that the value is. After any JSON error more of the file
                is then read, up to the length that a row may have. None: the value is not known to
                be a row. More is then read only if the error looks like the end of the buffer.

        Raises:
            ValueError: The value is no JSON.
            RecursionError: The value is nested too deeply.
            UserError: The value is longer than a row may be.
        """
        while True:
            try:
                value, end = DECODER.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                is_near_end = error.pos > len(self.buffer) - 10  # as where `false` is cut
                is_cut = error.msg.startswith("Unterminated string") or is_near_end
                if (is_cut or number) and self.read_more(number or 1):
                    continue
                raise
            # At the end of the buffer a number may be cut in two.
            if end == len(self.buffer) and self.read_more(number or 1):
                continue
            self.position = end
            return value

    def read_more(self, number: int) -> bool:
        """Reads more of row `number`, which begins at `position`; False at the end of the file.

        Raises `UserError` if the row is too long.
        """
        if len(self.buffer) - self.position > MAX_ROW_BYTES:
            raise UserError(
                f"{self._path}, row {number}: longer than {MAX_ROW_BYTES // 2**20} MiB, or damaged "
                "so that it has no end"
            )
        return self._read()

    def _read(self) -> bool:
        """Drops what stands before `position`, and reads more; False at the end of the file.

        It reads CHUNK_BYTES, or as many bytes as the buffer has characters if these are more. So a
        long row, which is parsed from its beginning after each read, is parsed only a few times.
        """
        self.buffer = self.buffer[self.position :]
        self.position = 0
        # the bytes of a character that the last chunk cut in two
        undecoded_bytes, _ = self._decoder.getstate()
        offset = self._stream.tell() - len(undecoded_bytes)
        chunk = self._stream.read(max(CHUNK_BYTES, len(self.buffer)))
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            byte = offset + error.start + 1
            raise UserError(
                f"{self._path}: not UTF-8: {error.reason} at byte {byte}; {SAVE_AS_UTF_8}"
            ) from None
        self.buffer += text
        return bool(chunk)


def _read_wrapped_rows(path: str, stream: IO[bytes]) -> Iterator[dict[str, Any]] | None:
    """Returns the rows of a file that is one object with a list of rows: `{"data": [{...}, ...]}`.

    The file is read twice: first to find the list, then for its rows.

    Returns:
        The rows; None if the file is no JSON object.

    Raises:
        UserError: Two keys are equal, or there is not exactly one key with a list of rows.
    """
    # key -> whether the values in its list are rows: {True} for a list of rows alone
    are_rows: dict[str, set[bool]] = {}
    try:
        for key, value in _walk_object(_TextBuffer(path, stream)):
            if value is KEY_BEGINS and key in are_rows:
                raise UserError(
                    f"{path}: two keys of its one object have the same name; only one could be "
                    "read: rename or join them"
                )
            are_rows.setdefault(key, set())
            if value is not KEY_BEGINS:
                are_rows[key].add(isinstance(value, dict))
    except (ValueError, RecursionError):
        return None
    row_lists = [key for key, kinds in are_rows.items() if kinds == {True}]
    if len(row_lists) != 1:
        raise UserError(
            f"{path}: one JSON object; a list of rows, or one row a line (JSON Lines) is expected"
        )
    (rows_key,) = row_lists
    stream.seek(0)
    return (
        value
        for key, value in _walk_object(_TextBuffer(path, stream))
        if key == rows_key and value is not KEY_BEGINS
    )


KEY_BEGINS = object()  # what `_walk_object` yields once for each key


def _walk_object(text: _TextBuffer) -> Iterator[tuple[str, Any]]:
    """Walks through a file that is one JSON object.

    Yields (key, KEY_BEGINS) for each key, and if its value is a list, then (key, item) for each
    item. Any other value is skipped. Raises `ValueError` if the file is no JSON object.
    """
    text.peek()
    text.take("{")
    while True:
        text.peek()
        key = text.parse()
        if not isinstance(key, str):
            raise ValueError("a key is expected")
        text.take(":")
        yield key, KEY_BEGINS
        if text.peek() == "[":
            text.take("[")
            while text.peek() != "]":
                yield key, text.parse()
                if text.peek() != "]":
                    text.take(",")
            text.take("]")
        else:
            text.parse()
        if text.peek() == "}":
            break
        text.take(",")
    text.take("}")
    if text.peek():
        raise ValueError("more text after its value")


def _skip_space(text: str, position: int) -> int:
    """Returns the position of the first character from `position` on that is no JSON white space.

    At the end of the text this is its length.
    """
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


# kind of a text file -> function that yields its rows
TEXT_READERS: Mapping[str, Callable[[str], Iterator[NumberedRow]]] = {
    "json": _read_json,
    "csv": _read_csv,
    "text": _read_text,
}
