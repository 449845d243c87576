"""Rows with a class: a text, a prompt with its completion or a conversation, and the label that a
model learns.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from finetune.config.methods import MULTI_LABEL
from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import (
    CONVERSATION_COLUMNS,
    PARSERS,
    Columns,
    Conversation,
    Document,
    Group,
    ParsedRow,
    Row,
    make_conversation,
    make_message,
    recognize_format,
)
from finetune.data.messages import BadRow, list_columns, role_of

LABEL = "label"
ANSWERING = ("assistant", "gpt", "model")  # roles
EMPTY = make_message("assistant", "")  # in the place of the answer, which a conversation needs


def parse_class(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a row with its class, one of the recipe's labels, or with several of them.

    Raises `BadRow`.

    >>> parse_class(
    ...     {"text": "Hurrah!", "label": "good"},
    ...     DatasetSource(path="mood.jsonl"),
    ...     Data(labels=("bad", "good")),
    ... ).groups
    (Group(documents=(Text(text='Hurrah!'),), rating=0, labels=(1,)),)
    """
    columns = Columns(row)
    name = source.label_column or LABEL
    if row.get(name) is None:
        raise BadRow(
            f"{name}: no class; its columns are {list_columns(row) or 'none'} (label_column names "
            "it)"
        )
    value = columns.take(name)
    if data.problem_type == MULTI_LABEL:
        values = value if isinstance(value, list) else [value]
        places = {_find_class(each, name, data.labels) for each in values}
        label = write_classes(places)
    else:
        label = _find_class(value, name, data.labels)
    others = {column: value for column, value in row.items() if column != name}
    row_format = source.type or recognize_format(others, source)
    is_conversation = row_format in ("messages", "sharegpt")
    if is_conversation:
        document = _read_conversation(columns, source)
    else:
        document = PARSERS[row_format](columns, source)
    return ParsedRow((Group((document,), labels=(label,)),), row_format, columns.unused)


def write_classes(places: Iterable[int]) -> int:
    """Returns the label of a row with the classes at `places`: a bit for each class.

    >>> read_classes(write_classes([0, 2]), 4)
    (True, False, True, False)
    """
    return sum(1 << place for place in places)


def read_classes(label: int, classes: int) -> tuple[bool, ...]:
    """Returns for each class whether a row with this label has it; `classes` counts them."""
    return tuple(bool(label >> place & 1) for place in range(classes))


def _find_class(value: Any, name: str, labels: tuple[str, ...]) -> int:
    """Returns the place of a class among `labels`, by its name or else by its place.

    Raises `BadRow` where it is none of them.
    """
    if str(value) in labels:
        return labels.index(str(value))
    is_place = isinstance(value, int) and not isinstance(value, bool)
    if is_place and 0 <= value < len(labels):
        return int(value)
    raise BadRow(
        f"{name}: {value!r} is none of labels ({', '.join(labels)}), nor a place among them from 0"
    )


def _read_conversation(columns: Columns, source: DatasetSource) -> Document:
    """Reads the messages of a row, whoever speaks last."""
    present = [name for name in CONVERSATION_COLUMNS if columns.row.get(name) is not None]
    usual = present[0] if present else CONVERSATION_COLUMNS[0]
    turns = columns.take_messages(source.messages_column or usual)
    if not turns:
        raise BadRow("messages: an empty list")
    if role_of(turns[-1]) in ANSWERING:
        return make_conversation(columns, turns)
    conversation: Conversation = make_conversation(columns, [*turns, EMPTY])
    return replace(
        conversation, messages=conversation.messages[:-1], trained=conversation.trained[:-1]
    )
