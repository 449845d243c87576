"""A client's datums: checked before anything is done with them, and dealt out to the ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.examples import Example
from finetune.data.packing import deal_rows, make_filler, pack, pack_documents, pad_documents
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.service.losses import LOSSES


class Limits(NamedTuple):
    """The limits of a datum's numbers."""

    vocabulary: int
    tokens: int  # of a datum


def check_datums(
    data: Sequence[Mapping[str, Any]], loss: str, options: Mapping[str, Any], limits: Limits
) -> None:
    """Raises `UserError` for what the loss cannot be computed from, before any rank begins.

    Args:
        data: Each with its `tokens`, and its `inputs` by name.
        loss, options: What the client asks for, and its numbers.
        limits: Of the model.
    """
    known = LOSSES.get(loss)
    if known is None:
        raise UserError(f"loss_fn: {loss!r} is not served; one of {', '.join(LOSSES)} is")
    for name, value in options.items():
        if name not in known.options or not _is_finite(value):
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


def _check_datum(datum: Mapping[str, Any], place: str, loss: str, limits: Limits) -> None:
    tokens = datum["tokens"]
    inputs = datum["inputs"]
    check_tokens(tokens, f"{place}.model_input", limits)
    expected = {"target_tokens", *LOSSES[loss].inputs}
    if inputs.keys() != expected:
        raise UserError(
            f"{place}.loss_fn_inputs: {loss} reads {', '.join(sorted(expected))}; given were "
            f"{', '.join(sorted(inputs)) or 'none'}"
        )
    for name, values in inputs.items():
        if len(values) != len(tokens):
            raise UserError(
                f"{place}.loss_fn_inputs: {name} has {len(values)} numbers for {len(tokens)} "
                "tokens; one for each token is expected"
            )
        if not all(map(_is_finite, values)):
            raise UserError(f"{place}.loss_fn_inputs: {name} holds a value that is no number")
    check_tokens(inputs["target_tokens"], f"{place}.loss_fn_inputs.target_tokens", limits)
    if "sequence_ratio_mask" in inputs and not any(inputs["sequence_ratio_mask"]):
        raise UserError(f"{place}.loss_fn_inputs: sequence_ratio_mask marks no token")


def check_tokens(tokens: Sequence[Any], place: str, limits: Limits) -> None:
    """Raises `UserError` for a text that is empty, too long or holds an id that is none."""
    if not tokens or len(tokens) > limits.tokens:
        raise UserError(f"{place}: {len(tokens)} tokens, where 1 to {limits.tokens} are expected")
    wrong = [token for token in tokens if token != int(token) or not 0 <= token < limits.vocabulary]
    if wrong:
        raise UserError(f"{place}: {wrong[0]} is no id below {limits.vocabulary}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def make_batch(data: Sequence[Mapping[str, Any]], recipe: Recipe, world: World) -> StepBatch:
    """This rank's share of the datums, each of whose positions has a label; their other inputs are
    columns.

    All ranks give the same. A loss over it is divided by nothing.
    """
    examples = [
        Example(
            np.array(datum["tokens"], np.int32),
            np.array(datum["inputs"]["target_tokens"], np.int32),
        )
        for datum in data
    ]
    lengths = np.array([len(example.input_ids) for example in examples])
    rows = [np.array([place]) for place in range(len(data))]
    if recipe.data.packing:
        packed = pack(lengths, recipe.data.max_length)
        rows = [packed[row] for row in range(len(packed))]
    mine = world.data_parallel
    size = recipe.batch.per_device_train_batch_size
    return StepBatch(
        step=0,
        epoch=0.0,
        micro_batches=tuple(
            _collate(ids, examples, data, is_packed=recipe.data.packing)
            for ids in deal_rows(rows, mine.rank, mine.size, size)
        ),
        tokens=int(lengths.sum()),
        trained_tokens=1,  # what the loss is divided by
        squared_tokens=int(lengths @ lengths),
        groups=len(data),
        has_own_rows=True,
    )


def _collate(
    ids: Any, examples: Sequence[Example], data: Sequence[Mapping[str, Any]], *, is_packed: bool
) -> MicroBatch:
    if not len(ids):
        return make_filler(is_packed)
    ids = np.sort(ids)  # by the client that they are of, where there are several
    chosen = [examples[index] for index in ids]
    micro_batch = pack_documents(chosen) if is_packed else pad_documents(chosen, 0)
    micro_batch = replace(micro_batch, example_ids=tuple(ids.tolist())).with_documents()
    names = data[ids[0]]["inputs"].keys() - {"target_tokens"}
    columns = {name: _spread(micro_batch, data, name) for name in names}
    return replace(micro_batch, columns=columns)


def _spread(micro_batch: MicroBatch, data: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """fp32[positions]: an input's number at each token, 0 where there is no label."""
    has_label, documents, places = micro_batch.find_labeled()
    values = [np.array(data[i]["inputs"][name], np.float32) for i in micro_batch.example_ids]
    starts = torch.tensor([0, *accumulate(len(each) for each in values)])
    joined = torch.from_numpy(np.concatenate(values))
    column = torch.zeros(len(has_label))
    column[has_label] = joined[(starts[documents] + places)[has_label]]
    return column


def by_datum(micro_batch: MicroBatch, values: Tensor) -> dict[int, list[float]]:
    """The values at the tokens of each datum, in order, by the datum's place among all."""
    has_label, documents, _ = micro_batch.find_labeled()
    return {
        example: values[has_label & (documents == index)].tolist()
        for index, example in enumerate(micro_batch.example_ids)
    }
