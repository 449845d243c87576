"""Batches: what a rank trains on in one optimizer step, and the tensors of its micro-batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.constants import IGNORE_INDEX, Record

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank.

    Packed, all rows lie one after another in a single row, and `cu_seq_lens` says where each
    document begins; fewer than ROUND_TOKENS tokens of padding (for each rank that has a part of the
    row) come last, as a document of their own. Unpacked, each row is one document, padded on the
    right; attention is causal and padding comes last without labels, so that no mask is needed. The
    documents of a group (chosen, rejected) follow one another, and no group is in two
    micro-batches. A rank that has no row left in a step gets a filler, which has no document.

    Where ranks divide a row's tokens between them, `tokens` in the shapes below are this rank's,
    from `first_token` on; boundaries, lengths and documents are those of the whole row.
    """

    input_ids: Tensor  # int64[rows, tokens]
    labels: Tensor  # int64[rows, tokens]: the id to predict at this position, or IGNORE_INDEX
    position_ids: Tensor  # int64[rows, tokens]: from 0 in every document
    # int64[trained tokens, filled up to a multiple of ROUND_TOKENS with others]: where the
    # flattened labels are. Found on the host: a GPU's search would make the host wait.
    trained_positions: Tensor
    # int32[documents + 1]: where documents begin in the packed row, and its end
    cu_seq_lens: Tensor | None
    max_document_length: int
    example_ids: tuple[int, ...]
    document_lengths: tuple[int, ...] = ()  # tokens of each example
    # what `cu_seq_lens` says, known to the host without asking a GPU
    packed_lengths: tuple[int, ...] | None = None
    # Of each document of `packed_lengths` the place of the one that it continues, such as a prompt;
    # None: of none.
    continued: tuple[int | None, ...] | None = None
    token_mask: Tensor | None = None  # bool[rows, tokens]: False where padding; None: no token is
    # int64[len(trained_positions), targets]: several ids to score at each position in place of its
    # label, or IGNORE_INDEX; None: the label alone
    targets: Tensor | None = None
    # int64[len(trained_positions)]: which of the micro-batch's documents (by its place in
    # `example_ids`) each of them belongs to; 0 for those without a label. None where documents are
    # not compared.
    trained_documents: Tensor | None = None
    # bool[documents]: whether the answer is rated good; None where nothing is rated
    desirable: Tensor | None = None
    first_token: int = 0  # where this rank's tokens begin in the row
    # Where answers are rated, their prompts with other answers, which are looked at and not trained
    # on.
    mismatched: "MicroBatch | None" = None
    # The model's arguments for all images of the documents, such as pixel_values; those of a blank
    # image where other micro-batches have images and this one has none. None: the data holds no
    # image.
    images: Mapping[str, Tensor] | None = None
    image_counts: tuple[int, ...] = ()  # images of each document
    # int16[rows, tokens, layers, chosen]: the experts that each token's routers take; negative:
    # they choose
    experts: Tensor | None = None
    # What the loss reads beside the tokens: of sampled completions by `make_step_batch`, of a
    # script's rows by `Session.batch`.
    columns: Mapping[str, Tensor] | None = None

    @property
    def inputs(self) -> Record:
        """The model's keyword arguments."""
        names = ("input_ids", "labels", "position_ids", "trained_positions")
        inputs: Record = {name: getattr(self, name) for name in names}
        if self.token_mask is not None:
            inputs["token_mask"] = self.token_mask
        if self.experts is not None:
            inputs["replayed_experts"] = self.experts
        if self.cu_seq_lens is not None:
            inputs |= {
                "cu_seq_lens": self.cu_seq_lens,
                "max_document_length": self.max_document_length,
            }
            inputs |= {"packed_lengths": self.packed_lengths, "continued": self.continued}
        else:
            inputs["document_lengths"] = self.document_lengths
        if self.images is not None:
            inputs |= {"images": self.images, "image_counts": self.image_counts}
        return inputs

    def locate_documents(self) -> Iterator[tuple[int, int, slice]]:
        """Yields (example id, row, where its tokens are in the whole row) of each document."""
        start = 0
        row = 0
        for example_id, length in zip(self.example_ids, self.document_lengths, strict=True):
            yield example_id, row, slice(start, start + length)
            if self.cu_seq_lens is None:
                row += 1
            else:
                start += length

    def with_documents(self) -> "MicroBatch":
        """The same with `trained_documents`, also where documents are not compared."""
        if self.trained_documents is not None:
            return self
        return replace(self, trained_documents=_find_trained_documents(self))

    def find_labeled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Describes each of `trained_positions`.

        Returns:
            bool[positions]: whether it has a label.
            int64[positions]: the place in `example_ids` of its document; 0 without a label.
            int64[positions]: its place in that document.
        """
        documents = self.with_documents().trained_documents
        assert documents is not None
        positions = self.trained_positions
        has_label = self.labels.flatten()[positions] != IGNORE_INDEX
        return has_label, documents, self.position_ids.flatten()[positions]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`; from pinned memory the copy does not wait."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """The same in pinned host memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """The same with every tensor changed, those of `images`, `columns` and `mismatched` too."""
        changed: Record = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, Mapping):
                changed[field.name] = {key: change(tensor) for key, tensor in value.items()}
            elif isinstance(value, MicroBatch):
                changed[field.name] = value._map_tensors(change)
        return replace(self, **changed)


def copy_to(on_host: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device` without making the host wait."""
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


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


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's share of this rank. The counts are those of all ranks together."""

    step: int  # 0-based
    epoch: float  # epochs done after this step
    micro_batches: tuple[MicroBatch, ...]  # as many on every rank
    tokens: int  # of the step over all ranks, padding not counted
    trained_tokens: int  # of the step over all ranks: those with a label
    # of trained_tokens, those of each group's first document: of the chosen or rated answers
    chosen_tokens: int = 0
    # of the step over all ranks: the squares of its documents' lengths, which attention costs
    squared_tokens: int = 0
    # of the step over all ranks: pairs of chosen and rejected; documents where none belong together
    # (each completion of a prompt is one)
    groups: int = 0
    # whether a script gave the rows: their ids are then not those of the run's examples
    has_own_rows: bool = False
