"""Checks a client's datums, deals them to the ranks, and groups results by datum.

A datum is a client's training example: the `tokens` that the model reads, and by name the `inputs`
of the loss, with a number (or a row of numbers) for each token. One of them is `target_tokens`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Example
from finetune.data.packing import deal_rows, make_filler, pack, pack_documents, pad_documents
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.service.losses import LOSSES
from finetune.units import FP32_MAX, is_fp32_number


class Limits(NamedTuple):
    """The limits that the model sets for a datum."""

    vocabulary: int  # every id is below it
    tokens: int  # the most tokens in a datum


def check_datums(
    data: Sequence[Mapping[str, Any]], loss: str, options: Mapping[str, Any], limits: Limits
) -> None:
    """Raises `UserError` for datums or options from which the loss cannot be computed.

    Args:
        data: The datums.
        loss: The name of the loss.
        options: The options of the loss, by name.
        limits: The model's limits.
    """
    token_loss = LOSSES.get(loss)
    if token_loss is None:
        raise UserError(f"loss_fn: {loss!r} is not served; one of {', '.join(LOSSES)} is")
    for name, value in options.items():
        if name not in token_loss.options or not is_fp32_number(value):
            names = ", ".join(token_loss.options) or "none"
            raise UserError(f"loss_fn_config: {name}: {loss} takes numbers by these names: {names}")
    missing = [
        name
        for name, default in token_loss.options.items()
        if default is None and name not in options
    ]
    if missing:
        raise UserError(
            f"loss_fn_config: {loss} has no default for {' and '.join(missing)}; give it"
        )
    if not data:
        raise UserError("data: at least one datum is expected")
    for index, datum in enumerate(data):
        _check_datum(datum, f"data[{index}]", loss, limits)


def _check_datum(datum: Mapping[str, Any], place: str, loss: str, limits: Limits) -> None:
    """Raises `UserError` for a faulty datum.

    place: Where the datum is in the request, for messages, such as data[3].
    """
    tokens = datum["tokens"]
    inputs = datum["inputs"]
    check_tokens(tokens, f"{place}.model_input", limits)
    expected = {"target_tokens", *LOSSES[loss].inputs}
    if inputs.keys() != expected:
        raise UserError(
            f"{place}.loss_fn_inputs: {loss} reads {', '.join(sorted(expected))}; given were "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    arrays = {
        name: _read_numbers(values, f"{place}.loss_fn_inputs: {name}")
        for name, values in inputs.items()
    }
    _check_shapes(arrays, len(tokens), f"{place}.loss_fn_inputs", loss)
    targets = arrays["target_tokens"]
    _check_ids(targets.ravel(), f"{place}.loss_fn_inputs.target_tokens", limits)
    if "sequence_ratio_mask" in inputs and not arrays["sequence_ratio_mask"].any():
        raise UserError(f"{place}.loss_fn_inputs: sequence_ratio_mask marks no token")


def _check_shapes(
    inputs: Mapping[str, NDArray[np.float64]], tokens: int, place: str, loss: str
) -> None:
    """Raises `UserError` unless every input has one finite number for each token and target.

    Args:
        inputs: The inputs of a datum by name: [tokens], or [tokens, targets].
        tokens: The number of tokens of the datum.
        place: Where the inputs are in the request, for messages.
        loss: The name of the loss.
    """
    shape = inputs["target_tokens"].shape
    has_one_target = shape[1:] in ((), (1,))
    if not has_one_target and not LOSSES[loss].takes_several:
        several = " and ".join(name for name, each in LOSSES.items() if each.takes_several)
        raise UserError(f"{place}: {loss} takes one target for each token; {several} takes several")
    for name, values in inputs.items():
        if len(values) != tokens:
            raise UserError(
                f"{place}: {name} has {len(values)} numbers for {tokens} tokens; one for each "
                "token is expected"
            )
        if values.shape != shape:
            raise UserError(
                f"{place}: {name} has the shape {[*values.shape]}, target_tokens {[*shape]}; the "
                "same is expected"
            )
        if not values.size:
            raise UserError(f"{place}: {name} is a table without columns")
        if not (np.abs(values) <= FP32_MAX).all():
            raise UserError(f"{place}: {name} holds a value that is no finite number in fp32")


def check_tokens(tokens: Sequence[Any], place: str, limits: Limits) -> None:
    """Raises `UserError` for no tokens, too many, or any that is no id of the vocabulary.

    place: Where the tokens are in the request, for messages.
    """
    if not tokens or len(tokens) > limits.tokens:
        raise UserError(f"{place}: {len(tokens)} tokens, where 1 to {limits.tokens} are expected")
    _check_ids(_read_numbers(tokens, place), place, limits)


def _read_numbers(values: Sequence[Any], place: str) -> NDArray[np.float64]:
    """Reads numbers, or lists of numbers, as an array. Raises `UserError` where this fails."""
    try:
        return np.array(values, np.float64, ndmin=1)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{place} holds a value that is no number") from None


def _check_ids(ids: NDArray[np.float64], place: str, limits: Limits) -> None:
    """Raises `UserError` for a number that is no id of the vocabulary."""
    wrong = ids[(ids != np.floor(ids)) | (ids < 0) | (ids >= limits.vocabulary)]
    if wrong.size:
        raise UserError(f"{place}: {wrong[0]:.12g} is no id below {limits.vocabulary}")


def count_targets(datum: Mapping[str, Any]) -> int | None:
    """Counts the targets of each token of a datum. None if they are numbers, not lists."""
    first = datum["inputs"]["target_tokens"][0]
    return len(first) if isinstance(first, list) else None


def make_batch(data: Sequence[Mapping[str, Any]], recipe: Recipe, world: World) -> StepBatch:
    """Makes the batch of this rank's share of the datums. All ranks pass the same datums.

    The label of a token is its first target. The other inputs of the loss are columns of the
    micro-batches. The loss of the batch is a sum over positions, not a mean.
    """
    examples = []
    for datum in data:
        labels = _read_input(datum, "target_tokens", np.int32)[:, 0]
        examples.append(Example(np.array(datum["tokens"], np.int32), labels))
    lengths = np.array([len(example.input_ids) for example in examples])
    if recipe.data.packing:
        packed = pack(lengths, recipe.data.max_length)
        rows = [packed[row] for row in range(len(packed))]
    else:
        rows = [np.array([index]) for index in range(len(data))]
    group = world.data_parallel
    size = recipe.batch.per_device_train_batch_size
    micro_batches = []
    for indexes in deal_rows(rows, group.rank, group.size, size):
        micro_batches.append(_collate(indexes, examples, data, is_packed=recipe.data.packing))
    return StepBatch(
        step=0,
        epoch=0.0,
        micro_batches=tuple(micro_batches),
        tokens=int(lengths.sum()),
        trained_tokens=1,  # the loss is divided by it: the sum stays a sum
        squared_tokens=int(lengths @ lengths),
        groups=len(data),
        has_own_rows=True,
    )


def _collate(
    indexes: Any, examples: Sequence[Example], data: Sequence[Mapping[str, Any]], *, is_packed: bool
) -> MicroBatch:
    """Makes the micro-batch of some datums, with the inputs of the loss as columns.

    Args:
        indexes: int64[datums], the indexes of these datums in `data`; empty: a filler is made.
        examples: The examples of all datums.
        data: All datums.
        is_packed: Whether the datums share one row; else each has a padded row.
    """
    if not len(indexes):
        return make_filler(is_packed)
    # The datums of an adapter are adjacent in `data`, so this also sorts by adapter, as
    # `AdapterStack.assign_tokens` requires.
    in_order = np.sort(indexes)
    chosen = [examples[index] for index in in_order]
    micro_batch = pack_documents(chosen) if is_packed else pad_documents(chosen, 0)
    micro_batch = replace(micro_batch, example_ids=tuple(in_order.tolist())).with_documents()
    datums = [data[index] for index in in_order]
    names = datums[0]["inputs"].keys() - {"target_tokens"}
    if all(count_targets(datum) is None for datum in datums):
        columns = {name: _lay_out_input(micro_batch, datums, name, 0.0)[:, 0] for name in names}
        return replace(micro_batch, columns=columns)
    columns = {name: _lay_out_input(micro_batch, datums, name, 0.0) for name in names}
    targets = _lay_out_input(micro_batch, datums, "target_tokens", IGNORE_INDEX)
    return replace(micro_batch, columns=columns, targets=targets.long())


def _read_input(datum: Mapping[str, Any], name: str, dtype: type = np.float32) -> NDArray[Any]:
    """Reads an input of a datum: [tokens, targets], with one column for single numbers."""
    values: NDArray[Any] = np.array(datum["inputs"][name], dtype)
    return values.reshape(len(values), -1)


def _lay_out_input(
    micro_batch: MicroBatch, data: Sequence[Mapping[str, Any]], name: str, missing: float
) -> Tensor:
    """Lays an input of the datums out over the positions of their micro-batch.

    Args:
        micro_batch: The micro-batch that has these datums.
        data: The datums of the micro-batch, in the order of its `example_ids`.
        name: The name of the input.
        missing: The number at positions without a label, and for the targets that a datum lacks
            where another datum of the micro-batch has more.

    Returns:
        fp32[positions, targets], which is exact for ids below 2**24.
    """
    has_label, documents, tokens = micro_batch.find_labeled()
    values = [_read_input(datum, name) for datum in data]
    starts = torch.tensor([0, *accumulate(len(each) for each in values)])
    width = max(each.shape[1] for each in values)
    joined = torch.full((int(starts[-1]), width), missing)
    for start, each in zip(starts[:-1].tolist(), values, strict=True):
        joined[start : start + len(each), : each.shape[1]] = torch.from_numpy(each)
    column = torch.full((len(has_label), width), missing)
    column[has_label] = joined[(starts[documents] + tokens)[has_label]]
    return column


def group_by_datum(
    micro_batch: MicroBatch, values: Tensor, data: Sequence[Mapping[str, Any]]
) -> dict[int, list[Any]]:
    """Groups values at the positions of a micro-batch by datum.

    Args:
        micro_batch: The micro-batch, with some of the datums; a filler has none.
        values: [positions, ...], or [positions, targets] if the micro-batch has targets.
        data: All datums of the batch.

    Returns:
        Index of a datum -> the values at its tokens, as nested lists.
    """
    has_label, documents, _ = micro_batch.find_labeled()
    values_of_datum: dict[int, list[Any]] = {}
    for document, index in enumerate(micro_batch.example_ids):
        at_tokens = values[has_label & (documents == document)]
        if micro_batch.targets is not None:
            width = count_targets(data[index])
            at_tokens = at_tokens[:, 0] if width is None else at_tokens[:, :width]
        values_of_datum[index] = at_tokens.tolist()
    return values_of_datum
