"""Columns of a script's rows that its loss reads, such as advantages: numbers beside the trained
tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX, Fields
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Examples
from finetune.errors import UserError
from finetune.units import is_fp32_number

Column = list[NDArray[np.float32]]  # of each row: [1], or [trained tokens]


def read_columns(
    rows: Sequence[Fields], names: Sequence[str], examples: Examples, place: str
) -> dict[str, Column]:
    """Reads the columns `names` of rows, each a number or a list with one for each trained token.

    Args:
        rows: As they were given.
        names: Which columns.
        examples: What was made of the rows.
        place: The rows, for errors.

    Raises:
        UserError: For rows that are not one example each, a value that is no number, and a list of
            another length.
    """
    size = examples.group_size
    if len(examples) != len(rows) * size or (np.diff(examples.document) != 1).any():
        raise UserError(
            f"{place}: {len(rows)} rows have become {examples.groups} examples, and "
            f"{', '.join(names)} would not fit them; leave out rows without an answer, and raise "
            "max_length above the longest"
        )
    trained = examples.trained if size == 1 else np.zeros(len(rows), np.int32)
    columns: dict[str, Column] = {}
    for name in names:
        columns[name] = [
            _read_value(row, name, int(count), f"{place}, row {number}")
            for number, (row, count) in enumerate(zip(rows, trained, strict=True), 1)
        ]
    return columns


def _read_value(row: Fields, name: str, trained: int, place: str) -> NDArray[np.float32]:
    """Reads the number in a row's column, or its list of numbers.

    Args:
        row: As it was given.
        name: The column.
        trained: Numbers that a list must have: one for each trained token. 0: no list may stand
            here.
        place: The row, for errors.

    Returns:
        fp32[1], or of a list fp32[trained].

    Raises:
        UserError: The column is missing, holds what is no finite number, or a list of another
            length.
    """
    if name not in row:
        raise UserError(f"{place}: has no column {name}")
    value = row[name]
    if hasattr(value, "tolist"):
        value = value.tolist()
    is_list = isinstance(value, list | tuple)
    numbers = value if is_list else [value]
    for number in numbers:
        if not is_fp32_number(number):
            raise UserError(f"{place}: {name}: {number!r} is no finite number")
    if is_list and not trained:
        raise UserError(f"{place}: {name}: a row of several answers has one number, not a list")
    if is_list and len(numbers) != trained:
        raise UserError(
            f"{place}: {name}: {len(numbers)} numbers, but {trained} tokens are trained on; give "
            "one for each, or one for the row"
        )
    return np.asarray(numbers, np.float32)


def attach_columns(
    batch: StepBatch, columns: Mapping[str, Column], examples: Examples
) -> StepBatch:
    """Returns the batch with the columns in its micro-batches, a number for each trained token."""
    micro_batches = []
    for micro_batch in batch.micro_batches:
        spread = {name: _spread(micro_batch, values, examples) for name, values in columns.items()}
        micro_batches.append(replace(micro_batch, columns=spread))
    return replace(batch, micro_batches=tuple(micro_batches))


def _spread(micro_batch: MicroBatch, values: Column, examples: Examples) -> Tensor:
    """Puts each row's value at its trained tokens.

    Returns:
        fp32[positions], in the order of `trained_positions`: 0 where there is no label.
    """
    has_label, documents, places = micro_batch.find_labeled()
    column = torch.zeros(len(has_label))
    for index, example_id in enumerate(micro_batch.example_ids):
        own = has_label & (documents == index)
        value = values[example_id // examples.group_size]
        if len(value) == 1:
            column[own] = float(value[0])
        else:
            # counted over the whole document, of which this rank may have a part
            ordinals = np.cumsum(examples[example_id].labels != IGNORE_INDEX) - 1
            column[own] = torch.from_numpy(value[ordinals[places[own].numpy()]])
    return column
