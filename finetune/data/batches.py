"""Batches: what a rank trains on in one optimizer step, and the tensors of its micro-batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX, ROUND_TOKENS
from finetune.data.examples import Examples
from finetune.data.images import ImageProcessor
from finetune.data.messages import BadRow
from finetune.errors import UserError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank.

    Packed, all rows lie one after another in a single row, and `cu_seq_lens` says where each document begins; fewer
    than ROUND_TOKENS tokens of padding (for each rank that has a part of the row) come last, as a document of their
    own. Unpacked, each row is one document, padded on the right; attention is causal and padding comes last without
    labels, so that no mask is needed. The documents of a group (chosen, rejected) follow one another, and no group is
    in two micro-batches. A rank that has no row left in a step gets a filler, which has no document.

    Where ranks divide a row's tokens between them, `tokens` in the shapes below are this rank's, from `first_token` on;
    boundaries, lengths and documents are those of the whole row.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    position_ids: Tensor  # int64[rows, tokens]: from 0 in every document
    # int64[trained tokens, filled up to a multiple of ROUND_TOKENS with others]: where the flattened labels are. Found
    # on the host: a GPU's search would make the host wait.
    trained_positions: Tensor
    cu_seq_lens: Tensor | None  # int32[documents + 1]: where documents begin in the packed row, and its end
    max_document_length: int
    example_ids: tuple[int, ...]
    document_lengths: tuple[int, ...] = ()  # tokens of each example
    packed_lengths: tuple[int, ...] | None = None  # what `cu_seq_lens` says, known to the host without asking a GPU
    # Of each document of `packed_lengths` the place of the one that it continues, such as a prompt; None: of none.
    continued: tuple[int | None, ...] | None = None
    token_mask: Tensor | None = None  # bool[rows, tokens]: False where padding; None: no token is
    # int64[len(trained_positions)]: which of the micro-batch's documents (by its place in `example_ids`) each of them
    # belongs to; 0 for those without a label. None where documents are not compared.
    trained_documents: Tensor | None = None
    desirable: Tensor | None = None  # bool[documents]: whether the answer is rated good; None where nothing is rated
    first_token: int = 0  # where this rank's tokens begin in the row
    # Where answers are rated, their prompts with other answers, which are looked at and not trained on.
    mismatched: "MicroBatch | None" = None
    # The model's arguments for all images of the documents, such as pixel_values; those of a blank image where other
    # micro-batches have images and this one has none. None: the data holds no image.
    images: Mapping[str, Tensor] | None = None
    image_counts: tuple[int, ...] = ()  # images of each document
    rollout: Mapping[str, Tensor] | None = None  # of sampled completions, what the loss reads beside their tokens

    @property
    def inputs(self) -> dict[str, Any]:
        """The model's keyword arguments."""
        names = ("input_ids", "labels", "position_ids", "trained_positions")
        inputs: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.token_mask is not None:
            inputs["token_mask"] = self.token_mask
        if self.cu_seq_lens is not None:
            inputs |= {"cu_seq_lens": self.cu_seq_lens, "max_document_length": self.max_document_length}
            inputs |= {"packed_lengths": self.packed_lengths, "continued": self.continued}
        else:
            inputs["document_lengths"] = self.document_lengths
        if self.images is not None:
            inputs |= {"images": self.images, "image_counts": self.image_counts}
        return inputs

    def with_documents(self) -> "MicroBatch":
        """The same with `trained_documents`, also where documents are not compared."""
        if self.trained_documents is not None:
            return self
        return replace(self, trained_documents=_find_trained_documents(self))

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`; from pinned memory the copy does not wait."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """The same in pinned host memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: Any = {name: change(value) for name, value in found.items() if isinstance(value, Tensor)}
        mismatched = self.mismatched and self.mismatched._map_tensors(change)
        maps = {name: value for name, value in found.items() if isinstance(value, Mapping)}  # images, rollout
        changed |= {name: {key: change(each) for key, each in value.items()} for name, value in maps.items()}
        return replace(self, **changed, mismatched=mismatched)


def collate(
    examples: Examples,
    ids: Ids,
    *,
    packing: bool,
    pad_token_id: int,
    part: int = 0,
    parts: int = 1,
    images: ImageProcessor | None = None,
) -> MicroBatch:
    """The examples `ids` as one micro-batch, or one of several `parts` of its tokens; a filler where there are none."""
    if not examples.is_rated:
        micro_batch = _collate(examples, ids, packing, pad_token_id, part, parts)
        return micro_batch if images is None else _add_images(micro_batch, examples, images)
    ratings = torch.from_numpy(examples.take(ids).find_ratings())
    rated, mismatched = (_collate(examples, ids[first::2], packing, pad_token_id, part, parts) for first in (0, 1))
    return replace(rated, desirable=ratings > 0, mismatched=mismatched)


def _collate(examples: Examples, ids: Ids, packing: bool, pad_token_id: int, part: int, parts: int) -> MicroBatch:
    if len(ids) == 0:
        micro_batch = make_filler(packing, parts)
    else:
        micro_batch = _pack(examples, ids, parts) if packing else _pad(examples, ids, pad_token_id, parts)
    if parts > 1:
        micro_batch = _take_part(micro_batch, part, parts)
    if examples.group_size == 1:
        return micro_batch
    return replace(micro_batch, trained_documents=_find_trained_documents(micro_batch))


def _add_images(micro_batch: MicroBatch, examples: Examples, images: ImageProcessor) -> MicroBatch:
    """The micro-batch with the pixels of its documents' images. Raises `UserError` where one cannot be read."""
    ids = micro_batch.example_ids
    found = [image for example_id in ids for image in examples.read_images(example_id)]
    try:
        inputs = images.make_inputs(found) if found else images.blank_inputs
    except BadRow as problem:
        raise UserError(f"one of {', '.join(map(examples.where, ids))}: {problem}") from None
    return replace(micro_batch, images=inputs, image_counts=tuple(map(examples.count_images, ids)))


def _take_part(micro_batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """A rank's part of the tokens, whose number `parts` divides."""
    tokens = micro_batch.labels.shape[1] // parts
    first, names = part * tokens, ("input_ids", "labels", "position_ids", "token_mask")
    mine = {name: getattr(micro_batch, name)[:, first : first + tokens].contiguous() for name in names}
    return replace(
        micro_batch, **mine, trained_positions=_find_trained_positions(mine["labels"].numpy()), first_token=first
    )


def _pack(examples: Examples, ids: Ids, parts: int) -> MicroBatch:
    lengths = examples.lengths[ids].astype(np.int64)
    tokens = int(lengths.sum())
    padding = -tokens % (ROUND_TOKENS * parts)
    picked = [examples[example_id] for example_id in ids]
    # The padding repeats a token of the text. The pad token's embedding may be zero, and where a document holds nothing
    # else, Gemma 3n, which takes the square root of its states' mean square, has a gradient of 0 x infinity.
    input_ids = np.full(tokens + padding, picked[0].input_ids[0], np.int64)
    labels = np.full(tokens + padding, IGNORE_INDEX, np.int64)
    np.concatenate([example.input_ids for example in picked], out=input_ids[:tokens])
    np.concatenate([example.labels for example in picked], out=labels[:tokens])
    lengths = np.append(lengths, padding) if padding else lengths  # a document of its own, which no other attends to
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids)[None],
        labels=torch.from_numpy(labels)[None],
        position_ids=torch.from_numpy(positions)[None],
        trained_positions=_find_trained_positions(labels),
        cu_seq_lens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_document_length=int(lengths.max()),
        example_ids=tuple(ids.tolist()),
        document_lengths=tuple(examples.lengths[ids].tolist()),
        packed_lengths=tuple(lengths.tolist()),
        token_mask=(torch.arange(tokens + padding) < tokens)[None],
    )


def _pad(examples: Examples, ids: Ids, pad_token_id: int, parts: int) -> MicroBatch:
    longest = -(-int(examples.lengths[ids].max()) // parts) * parts
    input_ids = np.full((len(ids), longest), pad_token_id, np.int64)
    labels = np.full((len(ids), longest), IGNORE_INDEX, np.int64)
    lengths = torch.from_numpy(examples.lengths[ids].astype(np.int64))
    for row, example_id in enumerate(ids):
        example = examples[example_id]
        input_ids[row, : len(example.input_ids)] = example.input_ids
        labels[row, : len(example.labels)] = example.labels
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(longest).repeat(len(ids), 1),
        trained_positions=_find_trained_positions(labels),
        cu_seq_lens=None,
        max_document_length=longest,
        example_ids=tuple(ids.tolist()),
        document_lengths=tuple(examples.lengths[ids].tolist()),
        token_mask=torch.arange(longest) < lengths[:, None],
    )


def _find_trained_positions(labels: Ids) -> Tensor:
    """Where the flattened `labels` are, and then places without one, which add nothing to the loss."""
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    others = np.flatnonzero(labels == IGNORE_INDEX)[: -len(trained) % ROUND_TOKENS]
    return torch.from_numpy(np.concatenate((trained, others)))


def _find_trained_documents(micro_batch: MicroBatch) -> Tensor:
    """The document of each of `trained_positions`; 0 for those without a label."""
    positions = micro_batch.trained_positions
    if micro_batch.cu_seq_lens is None:
        documents = positions // micro_batch.labels.shape[1]
    else:
        in_row = positions + micro_batch.first_token
        documents = torch.searchsorted(micro_batch.cu_seq_lens.long(), in_row, right=True) - 1
    has_label = micro_batch.labels.flatten()[positions] != IGNORE_INDEX
    return torch.where(has_label, documents, 0)


def make_filler(packing: bool, parts: int = 1) -> MicroBatch:
    """ROUND_TOKENS tokens a rank without a label, for ranks that have no row: they take part in the step's collectives
    and add nothing. Not a single token: torch.compile treats a size of 1 as a constant, and would compile the layers
    again."""
    tokens = ROUND_TOKENS * parts
    return MicroBatch(
        input_ids=torch.ones(1, tokens, dtype=torch.int64),  # 0 is often the pad token, see `_pack`
        labels=torch.full((1, tokens), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.arange(tokens)[None],
        trained_positions=torch.zeros(0, dtype=torch.int64),
        cu_seq_lens=torch.tensor([0, tokens], dtype=torch.int32) if packing else None,
        max_document_length=tokens,
        example_ids=(),
        packed_lengths=(tokens,) if packing else None,
        token_mask=torch.zeros(1, tokens, dtype=torch.bool),
    )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's share of this rank. The counts are those of all ranks together."""

    step: int  # 0-based
    epoch: float  # epochs done after this step
    micro_batches: tuple[MicroBatch, ...]  # as many on every rank
    tokens: int  # of the step over all ranks, padding not counted
    trained_tokens: int  # of the step over all ranks: those with a label
    chosen_tokens: int = 0  # of trained_tokens, those of each group's first document: of the chosen or rated answers
    squared_tokens: int = 0  # of the step over all ranks: the squares of its documents' lengths, which attention costs
    groups: int = 0  # of the step over all ranks: pairs of chosen and rejected; documents where none belong together
    has_own_rows: bool = False  # that a script has given, so that their numbers are not those of the run's examples
