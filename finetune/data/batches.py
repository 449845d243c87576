"""Batches: what a rank trains on in one optimizer step, and the tensors of its micro-batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank.

    Packed: the documents lie one after another in a single row, and `cu_seq_lens` says where each
    begins. Padding comes last, as a document of its own; it rounds the row up to a multiple of
    ROUND_TOKENS tokens for each rank that has a part of the row.

    Padded: each row is one document, with padding on the right. No attention mask is needed,
    because attention is causal and the padding has no labels.

    The documents of a group (chosen, rejected) follow one another, and no group is in two
    micro-batches. A rank that has no row left in a step gets a filler, which has no document.

    Several ranks may share a row. `tokens` in the shapes below are then this rank's, from
    `first_token` on; boundaries, lengths and documents are those of the whole row.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    position_ids: Tensor  # int64[rows, tokens]: from 0 in every document
    # int64[positions]: the indexes of the trained tokens in the flattened `labels`. Unlabeled
    # positions fill it up to a multiple of ROUND_TOKENS. The host finds them: it would have to wait
    # for a GPU's search.
    trained_positions: Tensor
    # int32[documents + 1]: where each document begins in the packed row, then where the row ends;
    # None: the rows are padded
    cu_seq_lens: Tensor | None
    max_document_length: int
    example_ids: tuple[int, ...]  # the example of each document; padding has none
    document_lengths: tuple[int, ...] = ()  # tokens of each document in `example_ids`
    # The lengths between the entries of `cu_seq_lens`, padding included. The host reads them
    # without waiting for a GPU.
    packed_lengths: tuple[int, ...] | None = None
    # For each document of `packed_lengths`, the index of the document (such as a prompt) that it
    # continues, or None if it begins by itself. None in place of the tuple: no document continues
    # another.
    continued: tuple[int | None, ...] | None = None
    # bool[rows, tokens]: False where padding; None: there is no padding
    token_mask: Tensor | None = None
    # int64[positions, targets]: the ids to score at each of `trained_positions` in place of its
    # label, filled up with IGNORE_INDEX; None: the label alone is scored
    targets: Tensor | None = None
    # int64[positions]: the document of each of `trained_positions`, as an index into `example_ids`;
    # 0 for positions without a label. None: documents are not compared.
    trained_documents: Tensor | None = None
    # bool[documents]: whether the answer is rated good; None where nothing is rated
    desirable: Tensor | None = None
    first_token: int = 0  # where this rank's tokens begin in the row
    # For rated answers: each prompt with an answer to another prompt. A forward measures it; it is
    # not trained on.
    mismatched: "MicroBatch | None" = None
    # The model's arguments for all images of the documents, such as pixel_values. If these
    # documents hold no image, but others of the data do: the arguments for a blank image.
    # None: the data holds no image.
    images: Mapping[str, Tensor] | None = None
    image_counts: tuple[int, ...] = ()  # images of each document
    # int16[rows, tokens, layers, chosen]: the experts that each layer's router must choose for each
    # token; negative: the router chooses
    experts: Tensor | None = None
    # What the loss reads besides the tokens. `make_step_batch` makes it for sampled completions,
    # `Session.batch` for a script's rows.
    columns: Mapping[str, Tensor] | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward."""
        names = ["input_ids", "labels", "position_ids", "trained_positions"]
        if self.cu_seq_lens is None:
            names.append("document_lengths")
        else:
            names += ["cu_seq_lens", "max_document_length", "packed_lengths", "continued"]
        if self.token_mask is not None:
            names.append("token_mask")
        if self.images is not None:
            names += ["images", "image_counts"]
        inputs: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.experts is not None:
            inputs["replayed_experts"] = self.experts
        return inputs

    def locate_documents(self) -> Iterator[tuple[int, int, slice]]:
        """Yields (example id, row, slice of the row's tokens) of each document.

        The slice is of the whole row, also where ranks share the row. Padding is not a document.
        """
        start = 0
        row = 0
        for example_id, length in zip(self.example_ids, self.document_lengths, strict=True):
            yield example_id, row, slice(start, start + length)
            if self.cu_seq_lens is None:
                row += 1
            else:
                start += length

    def with_documents(self) -> "MicroBatch":
        """Returns the micro-batch with `trained_documents`, which are found if they are None."""
        if self.trained_documents is not None:
            return self
        return replace(self, trained_documents=_find_trained_documents(self))

    def find_labeled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Says for each of `trained_positions` whether it is labeled, and where it is.

        Returns:
            bool[positions]: whether the position has a label.
            int64[positions]: its document, as an index into `example_ids`; 0 without a label.
            int64[positions]: its position in that document, from 0.
        """
        documents = self.with_documents().trained_documents
        assert documents is not None
        positions = self.trained_positions
        has_label = self.labels.flatten()[positions] != IGNORE_INDEX
        return has_label, documents, self.position_ids.flatten()[positions]

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns a copy on `device`. The host does not wait for a copy from pinned memory."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Returns a copy in pinned host memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Applies `change` to every tensor, those of `images`, `columns` and `mismatched` too."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, Mapping):
                changed[field.name] = {key: change(tensor) for key, tensor in value.items()}
            elif isinstance(value, MicroBatch):
                changed[field.name] = value._map_tensors(change)
        return replace(self, **changed)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device` without making the host wait."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _find_trained_documents(micro_batch: MicroBatch) -> Tensor:
    """Finds the document of each of `trained_positions`.

    Returns:
        int64[positions]: indexes into `example_ids`; 0 for positions without a label.
    """
    positions = micro_batch.trained_positions
    if micro_batch.cu_seq_lens is None:
        # each row is one document
        row_length = micro_batch.labels.shape[1]
        documents = positions // row_length
    else:
        # all documents are in one row, of which this rank may have a part
        in_whole_row = positions + micro_batch.first_token
        boundaries = micro_batch.cu_seq_lens.long()
        documents = torch.searchsorted(boundaries, in_whole_row, right=True) - 1
    has_label = micro_batch.labels.flatten()[positions] != IGNORE_INDEX
    return torch.where(has_label, documents, 0)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What this rank trains on in one optimizer step. Every count is of all ranks together."""

    step: int  # 0-based
    epoch: float  # epochs done after this step
    micro_batches: tuple[MicroBatch, ...]  # of this rank; every rank has the same number of them
    tokens: int  # padding is not counted
    trained_tokens: int  # tokens with a label, of which `mismatched` ones do not count
    # trained tokens of the first document of each group: the chosen, or the rated answer
    chosen_tokens: int = 0
    # sum of the squared lengths of the documents, to which the cost of attention is proportional
    squared_tokens: int = 0
    # groups of documents that are compared, such as chosen with rejected; where none are compared,
    # documents (each completion is one)
    groups: int = 0
    # whether a script gave the rows: their ids are then not those of the run's examples
    has_own_rows: bool = False
    # the batches that a script has sent backward for the same step before this one
    batches_before: int = 0

    @property
    def draws(self) -> str:
        """The text that seeds what is drawn for the batch, such as dropout: the step, and which of
        the step's batches it is if there are several.
        """
        return f"{self.step}/{self.batches_before}" if self.batches_before else str(self.step)
