"""Reads rows for classification: a text, a prompt with its completion or a conversation, and the
class that a model learns to name.
"""

from collections.abc import Iterable
from typing import Any

from finetune.config.methods import MULTI_LABEL
from finetune.config.schema import Data, DatasetSource
from finetune.data.formats import Columns, Group, ParsedRow, Row, parse_document, recognize_format
from finetune.data.messages import BadRow, list_columns, parse_list, parse_number

LABEL = "label"


def parse_class(row: Row, source: DatasetSource, data: Data) -> ParsedRow:
    """Reads a row and its class, which is one of the recipe's labels (multi-label: a list of them).

    Raises `BadRow` for a row without a class, and one that its format's parser rejects.

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
        is_name = isinstance(value, str) and value in data.labels
        listed = value if is_name else parse_list(value, name)
        values = listed if isinstance(listed, list) else [listed]
        class_indexes = {_find_class(each, name, data.labels) for each in values}
        label = write_classes(class_indexes)
    else:
        label = _find_class(value, name, data.labels)
    other_columns = {column: value for column, value in row.items() if column != name}
    row_format = source.type or recognize_format(other_columns, source)
    document = parse_document(row_format, columns, source, needs_answer=False)
    return ParsedRow((Group((document,), labels=(label,)),), row_format, columns.unused)


def write_classes(class_indexes: Iterable[int]) -> int:
    """Returns the label of a row that has several classes: bit i is set if it has class i.

    >>> read_classes(write_classes([0, 2]), 4)
    (True, False, True, False)
    """
    return sum(1 << index for index in class_indexes)


def read_classes(label: int, class_count: int) -> tuple[bool, ...]:
    """Returns for each class whether a row with this label of `write_classes` has it."""
    return tuple(bool(label >> index & 1) for index in range(class_count))


def _find_class(value: Any, name: str, labels: tuple[str, ...]) -> int:
    """Finds the index in `labels` of the class that a row gives by name or by index.

    The name is tried first: "1" or 1 may be the name of a class. A whole number may have a point,
    as pandas writes the numbers of a column in which others are missing.

    Raises `BadRow` if it is neither.

    Args:
        value: The row's class.
        name: Its column, for the error.
        labels: The recipe's classes.
    """
    index = parse_number(value)
    if isinstance(index, float) and index.is_integer():
        index = int(index)
    for class_name in (str(value), str(index)):
        if class_name in labels:
            return labels.index(class_name)
    is_index = isinstance(index, int) and not isinstance(index, bool)
    if is_index and 0 <= index < len(labels):
        return int(index)
    raise BadRow(
        f"{name}: {value!r} is none of labels ({', '.join(labels)}), nor a place among them from 0"
    )
