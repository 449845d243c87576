"""Columns of a script's rows that its loss reads, such as advantages: a number for each trained
token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Examples
from finetune.errors import UserError
from finetune.units import is_fp32_number

# for each row: one number, fp32[1], or a number for each trained token, fp32[trained tokens]
Column = list[NDArray[np.float32]]


def read_columns(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], examples: Examples, place: str
) -> dict[str, Column]:
    """Reads the columns `names` of a script's rows.

    The value in a row is a number, or a list of a number for each trained token. Where a row is
    several documents that are compared, it is always a number.

    Args:
        rows: The rows of the script.
        names: The names of the columns.
        examples: The examples that were made of the rows.
        place: What errors call the rows.

    Returns:
        name -> values.

    Raises:
        UserError: A row did not become exactly one group of examples, a column is missing, a value
            is no finite number, or a list has another length.
    """
    size = examples.group_size
    is_one_to_one = (np.diff(examples.document) == 1).all()  # no document is skipped or split
    if len(examples) != len(rows) * size or not is_one_to_one:
        raise UserError(
            f"{place}: {len(rows)} rows have become {examples.groups} examples, and "
            f"{', '.join(names)} would not fit them; leave out rows without an answer, and raise "
            "max_length above the longest"
        )
    # 0: the row may not have a list
    list_lengths = examples.trained if size == 1 else np.zeros(len(rows), np.int32)
    columns: dict[str, Column] = {}
    for name in names:
        columns[name] = [
            _read_value(row, name, int(length), f"{place}, row {number}")
            for number, (row, length) in enumerate(zip(rows, list_lengths, strict=True), 1)
        ]
    return columns


def _read_value(
    row: Mapping[str, Any], name: str, list_length: int, place: str
) -> NDArray[np.float32]:
    """Reads the number, or the list of numbers, in a column of a row.

    Args:
        row: A row of the script.
        name: The name of the column.
        list_length: How many numbers a list must have; 0: a list is not allowed.
        place: What errors call the row.

    Returns:
        fp32[1] for a number, fp32[list_length] for a list.

    Raises:
        UserError: The column is missing, a value is no finite number, or the list has another
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
    if is_list and not list_length:
        raise UserError(f"{place}: {name}: a row of several answers has one number, not a list")
    if is_list and len(numbers) != list_length:
        raise UserError(
            f"{place}: {name}: {len(numbers)} numbers, but {list_length} tokens are trained on; "
            "give one for each, or one for the row"
        )
    return np.asarray(numbers, np.float32)


def attach_columns(
    batch: StepBatch, columns: Mapping[str, Column], examples: Examples
) -> StepBatch:
    """Adds the columns to each micro-batch of a batch, as a number for each trained position.

    Args:
        batch: A step's batch of these rows.
        columns: name -> values, from `read_columns`.
        examples: The examples that were made of the rows.
    """
    micro_batches = []
    for micro_batch in batch.micro_batches:
        tensors = {name: _spread(micro_batch, values, examples) for name, values in columns.items()}
        micro_batches.append(replace(micro_batch, columns=tensors))
    return replace(batch, micro_batches=tuple(micro_batches))


def _spread(micro_batch: MicroBatch, values: Column, examples: Examples) -> Tensor:
    """Puts the value of each row at the row's trained positions.

    Returns:
        fp32[positions], in the order of `trained_positions`: 0 where there is no label.
    """
    has_label, documents, positions = micro_batch.find_labeled()
    column = torch.zeros(len(has_label))
    for index, example_id in enumerate(micro_batch.example_ids):
        is_own = has_label & (documents == index)
        value = values[example_id // examples.group_size]
        if len(value) == 1:
            column[is_own] = float(value[0])
        else:
            # Trained tokens are counted over the whole document: this rank may have a part of it.
            ordinals = np.cumsum(examples[example_id].labels != IGNORE_INDEX) - 1
            column[is_own] = torch.from_numpy(value[ordinals[positions[is_own].numpy()]])
    return column
