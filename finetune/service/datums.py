"""Checks a client's datums, deals them to the ranks, and groups results by datum."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX, Fields
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Example
from finetune.data.packing import deal_rows, make_filler, pack, pack_documents, pad_documents
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.service.losses import LOSSES
from finetune.units import FP32_MAX, is_fp32_number


class Limits(NamedTuple):
    """The limits of a datum."""

    vocabulary: int  # ids are below it
    tokens: int  # in a datum


def check_datums(data: Sequence[Fields], loss: str, options: Fields, limits: Limits) -> None:
    """Raises `UserError` for datums or options from which the loss cannot be computed.

    Args:
        data: The datums: `tokens`, and `inputs` by name.
        loss: The name of the loss.
        options: The options of the loss, by name.
        limits: Those of the model.
    """
    known = LOSSES.get(loss)
    if known is None:
        raise UserError(f"loss_fn: {loss!r} is not served; one of {', '.join(LOSSES)} is")
    for name, value in options.items():
        if name not in known.options or not is_fp32_number(value):
            names = ", ".join(known.options) or "none"
            raise UserError(f"loss_fn_config: {name}: {loss} takes numbers by these names: {names}")
    missing = [
        name for name, usual in known.options.items() if usual is None and name not in options
    ]
    if missing:
        raise UserError(
            f"loss_fn_config: {loss} has no default for {' and '.join(missing)}; give it"
        )
    if not data:
        raise UserError("data: at least one datum is expected")
    for place, datum in enumerate(data):
        _check_datum(datum, f"data[{place}]", loss, limits)


def _check_datum(datum: Fields, place: str, loss: str, limits: Limits) -> None:
    """Raises `UserError` for a faulty datum; `place` is its place in the request."""
    tokens = datum["tokens"]
    inputs = datum["inputs"]
    check_tokens(tokens, f"{place}.model_input", limits)
    expected = {"target_tokens", *LOSSES[loss].inputs}
    if inputs.keys() != expected:
        raise UserError(
            f"{place}.loss_fn_inputs: {loss} reads {', '.join(sorted(expected))}; given were "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    numbers = {
        name: _read_numbers(values, f"{place}.loss_fn_inputs: {name}")
        for name, values in inputs.items()
    }
    _check_shapes(numbers, len(tokens), f"{place}.loss_fn_inputs", loss)
    targets = numbers["target_tokens"]
    _check_ids(targets.ravel(), f"{place}.loss_fn_inputs.target_tokens", limits)
    if "sequence_ratio_mask" in inputs and not numbers["sequence_ratio_mask"].any():
        raise UserError(f"{place}.loss_fn_inputs: sequence_ratio_mask marks no token")


def _check_shapes(
    numbers: Mapping[str, NDArray[np.float64]], tokens: int, place: str, loss: str
) -> None:
    """Raises `UserError` for inputs that do not have a number for each token and target."""
    shape = numbers["target_tokens"].shape
    if shape[1:] not in ((), (1,)) and not LOSSES[loss].takes_several:
        several = " and ".join(name for name, known in LOSSES.items() if known.takes_several)
        raise UserError(f"{place}: {loss} takes one target for each token; {several} takes several")
    for name, values in numbers.items():
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
    """Raises `UserError` for tokens that are none, too many or not ids of the vocabulary."""
    if not tokens or len(tokens) > limits.tokens:
        raise UserError(f"{place}: {len(tokens)} tokens, where 1 to {limits.tokens} are expected")
    _check_ids(_read_numbers(tokens, place), place, limits)


def _read_numbers(values: Sequence[Any], place: str) -> NDArray[np.float64]:
    try:
        return np.array(values, np.float64, ndmin=1)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{place} holds a value that is no number") from None


def _check_ids(ids: NDArray[np.float64], place: str, limits: Limits) -> None:
    wrong = ids[(ids != np.floor(ids)) | (ids < 0) | (ids >= limits.vocabulary)]
    if wrong.size:
        raise UserError(f"{place}: {wrong[0]:.12g} is no id below {limits.vocabulary}")


def width_of(datum: Fields) -> int | None:
    """Returns the number of targets of a token where they are lists; None for single numbers."""
    first = datum["inputs"]["target_tokens"][0]
    return len(first) if isinstance(first, list) else None


def make_batch(data: Sequence[Fields], recipe: Recipe, world: World) -> StepBatch:
    """Makes the batch of this rank's share of the datums. All ranks give the same datums.

    The label of a token is the first of its targets. The other inputs are columns. The loss of the
    batch is a sum.
    """
    examples = []
    for datum in data:
        labels = _read_input(datum, "target_tokens", np.int32)[:, 0]
        examples.append(Example(np.array(datum["tokens"], np.int32), labels))
    lengths = np.array([len(example.input_ids) for example in examples])
    rows = [np.array([place]) for place in range(len(data))]
    if recipe.data.packing:
        packed = pack(lengths, recipe.data.max_length)
        rows = [packed[row] for row in range(len(packed))]
    mine = world.data_parallel
    size = recipe.batch.per_device_train_batch_size
    micro_batches = []
    for ids in deal_rows(rows, mine.rank, mine.size, size):
        micro_batches.append(_collate(ids, examples, data, is_packed=recipe.data.packing))
    return StepBatch(
        step=0,
        epoch=0.0,
        micro_batches=tuple(micro_batches),
        tokens=int(lengths.sum()),
        trained_tokens=1,  # the divisor of the loss
        squared_tokens=int(lengths @ lengths),
        groups=len(data),
        has_own_rows=True,
    )


def _collate(
    ids: Any, examples: Sequence[Example], data: Sequence[Fields], *, is_packed: bool
) -> MicroBatch:
    """Makes the micro-batch of the datums `ids`, with their inputs as columns."""
    if not len(ids):
        return make_filler(is_packed)
    ids = np.sort(ids)  # which sorts by client: `AdapterStack.deal` needs it
    chosen = [examples[index] for index in ids]
    micro_batch = pack_documents(chosen) if is_packed else pad_documents(chosen, 0)
    micro_batch = replace(micro_batch, example_ids=tuple(ids.tolist())).with_documents()
    datums = [data[index] for index in ids]
    names = datums[0]["inputs"].keys() - {"target_tokens"}
    if all(width_of(datum) is None for datum in datums):
        columns = {name: _spread(micro_batch, datums, name, 0.0)[:, 0] for name in names}
        return replace(micro_batch, columns=columns)
    columns = {name: _spread(micro_batch, datums, name, 0.0) for name in names}
    targets = _spread(micro_batch, datums, "target_tokens", IGNORE_INDEX)
    return replace(micro_batch, columns=columns, targets=targets.long())


def _read_input(datum: Fields, name: str, dtype: type = np.float32) -> NDArray[Any]:
    """Returns an input of a datum: [tokens, targets]."""
    values: NDArray[Any] = np.array(datum["inputs"][name], dtype)
    return values.reshape(len(values), -1)


def _spread(micro_batch: MicroBatch, data: Sequence[Fields], name: str, missing: float) -> Tensor:
    """Spreads an input of the datums over the positions of their micro-batch.

    Args:
        micro_batch: Holds the datums, in their order.
        data: The datums.
        name: The name of the input.
        missing: The number where there is no label, and where another datum has more targets.

    Returns:
        fp32[positions, targets], which is exact for ids below 2**24.
    """
    has_label, documents, places = micro_batch.find_labeled()
    values = [_read_input(datum, name) for datum in data]
    starts = torch.tensor([0, *accumulate(len(each) for each in values)])
    width = max(each.shape[1] for each in values)
    joined = torch.full((int(starts[-1]), width), missing)
    for start, each in zip(starts[:-1].tolist(), values, strict=True):
        joined[start : start + len(each), : each.shape[1]] = torch.from_numpy(each)
    column = torch.full((len(has_label), width), missing)
    column[has_label] = joined[(starts[documents] + places)[has_label]]
    return column


def by_datum(
    micro_batch: MicroBatch, values: Tensor, data: Sequence[Fields]
) -> dict[int, list[Any]]:
    """Groups values by datum.

    Args:
        micro_batch: Holds some of the datums.
        values: [positions, ...], or [positions, targets] where the micro-batch has targets.
        data: All datums of the batch.

    Returns:
        Index of a datum -> the values at its tokens.
    """
    has_label, documents, _ = micro_batch.find_labeled()
    values_of_datum: dict[int, list[Any]] = {}
    for document, index in enumerate(micro_batch.example_ids):
        own = values[has_label & (documents == document)]
        if micro_batch.targets is not None:
            width = width_of(data[index])
            own = own[:, 0] if width is None else own[:, :width]
        values_of_datum[index] = own.tolist()
    return values_of_datum
