"""What a run changes about the embedding: noise in training (NEFTune), and rows for added tokens.

The head gains the same rows. They start at the mean of the rows of known tokens, and are trained
under LoRA too.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.config.pretrained import Vocabulary
from finetune.config.schema import Lora
from finetune.distributed.model_parts import Slices
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, read_slice
from finetune.models.lora import seed_of


class NoisyDocuments(NamedTuple):  # not a dataclass, whose fields FSDP1 would set
    """The documents of a micro-batch in order, and what the seeds of their noise are made of."""

    seed: int
    draws: str  # `StepBatch.draws`
    example_ids: Sequence[int]
    lengths: Sequence[int]  # tokens of each document
    first_token: int = 0  # where this rank's tokens begin in the row


def install_embedding_noise(model: Any, alpha: float) -> None:
    """Makes `model(..., noisy_documents=NoisyDocuments)` add noise to its embeddings.

    Without the argument there is no noise. Call this after `install_loss`.

    alpha: NEFTune's, in the bound of the noise: alpha / sqrt(tokens of the document x hidden).
    """
    embedding = model.get_input_embeddings()
    plain_forward = model.forward
    documents: NoisyDocuments | None = None

    def add_noise(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        if documents is None:
            return embedded
        return embedded + make_noise(embedded, documents, alpha)

    @functools.wraps(plain_forward)  # generation reads the signature
    def forward(*args: Any, noisy_documents: NoisyDocuments | None = None, **kwargs: Any) -> Any:
        nonlocal documents
        documents = noisy_documents
        try:
            return plain_forward(*args, **kwargs)
        finally:
            documents = None

    embedding.register_forward_hook(add_noise)
    model.forward = forward


def make_noise(embedded: Tensor, documents: NoisyDocuments, alpha: float) -> Tensor:
    """Makes the noise of `documents`, zero on padding.

    A document's noise depends only on the seed, the batch's draws, its example id and its length:
    not on its place in a batch, nor on the ranks that share a row.

    Args:
        embedded: [rows, tokens of this rank, hidden].
        documents: One in each row; several if there is only one row.
        alpha: See `install_embedding_noise`.

    Returns:
        A tensor of the shape and dtype of `embedded`.
    """
    rows, tokens, hidden = embedded.shape
    noise = torch.zeros(rows, tokens, hidden, dtype=torch.float32, device=embedded.device)
    generator = torch.Generator(embedded.device)
    start = -documents.first_token  # of the document, among the tokens of this rank
    for index, (example_id, length) in enumerate(
        zip(documents.example_ids, documents.lengths, strict=True)
    ):
        row = index if rows > 1 else 0
        first = max(start, 0)
        end = min(start + length, tokens)
        if first < end:
            generator.manual_seed(seed_of(documents.seed, f"noise/{documents.draws}/{example_id}"))
            bound = alpha / (length * hidden) ** 0.5
            document_noise = torch.empty(length, hidden, device=embedded.device).uniform_(
                -bound, bound, generator=generator
            )
            noise[row, first:end] = document_noise[first - start : end - start]
        if rows == 1:  # the next document follows in the same row
            start += length
    return noise.to(embedded.dtype)


BLOCK_ROWS = 4096  # of a tensor, read at once for the mean


def find_grown(
    model: Any, stored: Mapping[str, StoredTensor], vocabulary: Vocabulary | None
) -> dict[str, StoredTensor]:
    """Finds the tensors that gain rows for added tokens: those of the embedding and the head.

    Empty if the recipe adds no tokens.

    stored: The tensors of the files, by name.
    """
    if vocabulary is None or vocabulary.tokens == vocabulary.known:
        return {}
    names = [f"{module}.{leaf}" for module in _find_ends(model) for leaf in ("weight", "bias")]
    return {name: stored[name] for name in names if name in stored}


def make_grown_reader(tensor: StoredTensor, vocabulary: Vocabulary) -> Callable[[Slices], Tensor]:
    """Makes a function that reads slices (fp32) of `tensor`, grown to the rows of `vocabulary`.

    A row of an added token is the mean of the rows of the tokens that the tokenizer knew, even if
    the file has a row for the new token. So is a row beyond the file that only fills up the tensor.
    Every rank computes the mean over all of these rows, so that each layout has the same values.

    Args:
        tensor: The embedding or the head, [rows, hidden], or its bias, [rows].
        vocabulary: Its first `known` rows are taken for the tokens that the tokenizer knew.
    """
    stored = tensor.shape[0]
    known = min(vocabulary.known, stored)

    @cache
    def compute_mean() -> Tensor:
        total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
        for start in range(0, known, BLOCK_ROWS):
            rows = read_slice(tensor, (slice(start, min(start + BLOCK_ROWS, known)),))
            total += rows.double().sum(0)
        return (total / known).float()

    def read(slices: Slices) -> Tensor:
        row_slice, *column_slices = slices
        wanted = range(vocabulary.rows)[row_slice]
        # a rank may have no rows
        parts = [read_slice(tensor, (slice(0, 0), *column_slices)).float()]
        for start, stop, is_new in (
            (0, known, False),
            (known, vocabulary.tokens, True),  # added tokens
            (vocabulary.tokens, stored, False),  # the file's rows without a token
            (max(vocabulary.tokens, stored), vocabulary.rows, True),  # beyond the file
        ):
            first = max(start, wanted.start)
            end = min(stop, wanted.stop)
            if first < end and is_new:
                row = compute_mean()[tuple(column_slices)]
                parts.append(row.expand(end - first, *row.shape))
            elif first < end:
                parts.append(read_slice(tensor, (slice(first, end), *column_slices)).float())
        return torch.cat(parts)

    return read


def train_new_tokens(model: Any, lora: Lora, vocabulary: Vocabulary | None) -> Lora:
    """Returns `lora`, with the embedding and the head in `modules_to_save` if tokens are added.

    Frozen, they could not learn the new tokens.
    """
    if vocabulary is None or vocabulary.tokens == vocabulary.known:
        return lora
    names = [re.escape(name) for name in _find_ends(model)]
    return replace(lora, modules_to_save=(*lora.modules_to_save, *names))


def refuse_frozen_tokens(model: Any, vocabulary: Vocabulary | None) -> None:
    """Raises `UserError` if tokens are added but the embedding or the head is frozen.

    Both have to learn the new tokens.
    """
    if vocabulary is None or vocabulary.tokens == vocabulary.known:
        return
    for name in _find_ends(model):
        if not model.get_submodule(name).weight.requires_grad:
            raise UserError(
                f"added_tokens: {name} is frozen (trainable_modules, frozen_modules), so that the "
                "new tokens would never be learned; train it too"
            )


def _find_ends(model: Any) -> list[str]:
    """Returns the names of the embedding and the head as modules of `model`."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]
