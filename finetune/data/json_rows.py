"""JSON as rows: one a line, or an array of them, of which one is held at a time."""

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from finetune.data.messages import BadRow
from finetune.errors import UserError

CHUNK_BYTES = 2**20
MAX_ROW_BYTES = 16 * 2**20  # a longer row is a broken file, or a whole corpus that belongs in several rows


class RepeatedKeys(dict[str, Any]):
    """A row in which, at any depth, two keys have the same name: only the last one's value is kept."""


NumberedRow = tuple[int, dict[str, Any] | BadRow]  # the number is that of `units.name_place`


class RowDecoder(json.JSONDecoder):
    """JSON that notices equal keys in one object; the `json` module silently drops all but the last."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_make_object)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    is_repeated = len(result) != len(pairs) or any(map(_has_repeated_keys, result.values()))
    return RepeatedKeys(result) if is_repeated else result


def _has_repeated_keys(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_repeated_keys, value))
    return isinstance(value, RepeatedKeys)


def parse_line(line: str, decoder: RowDecoder) -> dict[str, Any] | BadRow:
    """The one row in `line`."""
    try:
        value, end = decoder.raw_decode(line, _skip_space(line, 0))
        if _skip_space(line, end) < len(line):
            return BadRow(f"not JSON: more text after its value at character {end + 1}")
    except RecursionError:
        return BadRow("nested too deeply")
    except ValueError as error:
        return BadRow(f"not JSON: {error}")
    return _as_row(value)


def _as_row(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow(f"a JSON object is expected, found {type(value).__name__}")


def read_array(path: str, stream: IO[bytes]) -> Iterator[NumberedRow]:
    """The rows of `[{...}, {...}]`, parsed one by one, so that an error knows its row and only one is held."""
    text = _Text(path, stream)
    text.at = text.buffer.index("[") + 1
    decoder, number = RowDecoder(), 1
    while text.peek() not in ("]", ""):
        try:
            value = text.parse(decoder, number)
        except RecursionError:
            raise UserError(f"{path}, row {number}: nested too deeply") from None
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{path}, row {number}: not JSON: {reason}; the rows after it cannot be read") from None
        yield number, _as_row(value)
        number += 1
        if text.peek() == ",":
            text.at += 1
        elif text.peek() != "]":
            break
    if text.peek() != "]":
        raise UserError(f"{path}, row {number}: the array is never closed; the file is truncated or damaged there")


class _Text:
    """A stretch of a UTF-8 file; more is read as it is needed."""

    def __init__(self, path: str, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.at = "", 0
        self._read()

    def peek(self) -> str:
        """Moves `at` to the next character that is no white space, and returns it; empty at the end."""
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
        """The value that begins at `at`, and moves to its end. Raises `ValueError`, `RecursionError`.

        Of row `number` all is read that could end it; else what is surely no JSON is an error at once.
        """
        while True:
            try:
                value, end = decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.buffer) - 10
                if (is_cut or number) and self.grow(number or 1):
                    continue
                raise
            if end == len(self.buffer) and self.grow(number or 1):
                continue
            self.at = end
            return value

    def grow(self, number: int) -> bool:
        """Reads more of the row that begins at `at`; False at the end. Raises `UserError` if it is too long."""
        if len(self.buffer) - self.at > MAX_ROW_BYTES:
            raise UserError(
                f"{self._path}, row {number}: longer than {MAX_ROW_BYTES // 2**20} MiB, or damaged so that it "
                "has no end"
            )
        return self._read()

    def _read(self) -> bool:
        """Reads as much as is buffered, so that a long row is not parsed too often."""
        self.buffer, self.at = self.buffer[self.at :], 0
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


def read_wrapped_rows(path: str, stream: IO[bytes]) -> Iterator[dict[str, Any]] | None:
    """The one list of rows in `{"data": [{...}, {...}]}`, read a second time; None where the file is no such object."""
    kinds: dict[str, set[bool]] = {}  # of each key's list: whether its values are rows
    try:
        for key, value in _walk_object(_Text(path, stream)):
            if value is LIST and key in kinds:
                raise UserError(
                    f"{path}: two keys of its one object have the same name; only one could be read: rename "
                    "or join them"
                )
            kinds.setdefault(key, set())
            if value is not LIST:
                kinds[key].add(isinstance(value, dict))
    except (ValueError, RecursionError):
        return None
    lists = [key for key, found in kinds.items() if found == {True}]
    if len(lists) != 1:
        raise UserError(f"{path}: one JSON object; a list of rows, or one row a line (JSON Lines) is expected")
    stream.seek(0)
    return (row for key, row in _walk_object(_Text(path, stream)) if key == lists[0] and row is not LIST)


LIST = object()  # the beginning of a list, or of another value


def _walk_object(text: _Text) -> Iterator[tuple[str, Any]]:
    """(key, LIST) for each key of one object, and (key, value) for its list's values. Raises `ValueError`."""
    decoder = RowDecoder()
    text.peek()
    text.take("{")
    while True:
        text.peek()
        key, has_list = text.parse(decoder), False
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
