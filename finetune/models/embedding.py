"""The embedding: noise on it in training (NEFTune), and the rows that it and the head gain with the
tokenizer.

New rows start at the mean of the others, and are trained under LoRA too.
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
    """The documents of a micro-batch, in order, and what seeds their noise."""

    seed: int
    step: int
    example_ids: Sequence[int]
    lengths: Sequence[int]  # tokens of each
    first_token: int = 0  # of the row: where the embeddings begin that a rank has of it


def install_embedding_noise(model: Any, alpha: float) -> None:
    """Makes `model(..., noisy_documents=NoisyDocuments)` add noise to its embeddings.

    Call it after `install_loss`.
    """
    embedding = model.get_input_embeddings()
    plain = model.forward
    documents: NoisyDocuments | None = None

    def add_noise(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        if documents is None:
            return embedded
        return embedded + make_noise(embedded, documents, alpha)

    @functools.wraps(plain)  # generation reads the signature
    def forward(*args: Any, noisy_documents: NoisyDocuments | None = None, **kwargs: Any) -> Any:
        nonlocal documents
        documents = noisy_documents
        try:
            return plain(*args, **kwargs)
        finally:
            documents = None

    embedding.register_forward_hook(add_noise)
    model.forward = forward


def make_noise(embedded: Tensor, documents: NoisyDocuments, alpha: float) -> Tensor:
    """The noise of `documents`, shaped like `embedded` [rows, tokens, hidden]; none on padding."""
    rows, tokens, hidden = embedded.shape
    noise = torch.zeros(rows, tokens, hidden, dtype=torch.float32, device=embedded.device)
    generator = torch.Generator(embedded.device)
    start = 0  # of the document, among the tokens of `embedded`
    for index, (example_id, length) in enumerate(
        zip(documents.example_ids, documents.lengths, strict=True)
    ):
        if index == 0 or rows > 1:
            start = -documents.first_token
        first = max(start, 0)
        end = min(start + length, tokens)
        if first < end:
            generator.manual_seed(seed_of(documents.seed, f"noise/{documents.step}/{example_id}"))
            bound = alpha / (length * hidden) ** 0.5
            row_noise = torch.empty(length, hidden, device=embedded.device).uniform_(
                -bound, bound, generator=generator
            )
            noise[index if rows > 1 else 0, first:end] = row_noise[first - start : end - start]
        start += length
    return noise.to(embedded.dtype)


BLOCK_ROWS = 4096  # read at once for the mean


def find_grown(
    model: Any, stored: Mapping[str, StoredTensor], vocabulary: Vocabulary | None
) -> dict[str, StoredTensor]:
    """The stored tensors of the embedding and the head of `model`, by name; none where the recipe
    adds no tokens.
    """
    if vocabulary is None or vocabulary.tokens == vocabulary.known:
        return {}
    names = [f"{module}.{leaf}" for module in _find_ends(model) for leaf in ("weight", "bias")]
    return {name: stored[name] for name in names if name in stored}


def grown_reader(tensor: StoredTensor, vocabulary: Vocabulary) -> Callable[[Slices], Tensor]:
    """Slices (fp32) of the embedding or head that `tensor` is the start of: [rows, hidden], or of
    its bias [rows].

    The rows of added tokens are the mean of those that the tokenizer knew, whether or not the file
    has room for them, and so are the rows that only fill up. The same on every rank and in every
    layout: each reads the whole mean itself.
    """
    stored = tensor.shape[0]
    known = min(vocabulary.known, stored)

    @cache
    def mean() -> Tensor:
        total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
        for start in range(0, known, BLOCK_ROWS):
            total += (
                read_slice(tensor, (slice(start, min(start + BLOCK_ROWS, known)),)).double().sum(0)
            )
        return (total / known).float()

    def read(slices: Slices) -> Tensor:
        wanted = range(vocabulary.rows)[slices[0]]
        rest = slices[1:]
        parts = []
        for start, stop, is_new in (
            (0, known, False),
            (known, vocabulary.tokens, True),
            (vocabulary.tokens, stored, False),
            (max(vocabulary.tokens, stored), vocabulary.rows, True),
        ):
            first = max(start, wanted.start)
            last = min(stop, wanted.stop)
            if first < last and is_new:
                row = mean()[rest]
                parts.append(row.expand(last - first, *row.shape))
            elif first < last:
                parts.append(read_slice(tensor, (slice(first, last), *rest)).float())
        return torch.cat(parts)

    return read


def train_new_tokens(model: Any, lora: Lora, vocabulary: Vocabulary | None) -> Lora:
    """`lora` with embedding and head in `modules_to_save` if tokens are added, which a frozen base
    cannot learn.
    """
    if vocabulary is None or vocabulary.tokens == vocabulary.known:
        return lora
    names = [re.escape(name) for name in _find_ends(model)]
    return replace(lora, modules_to_save=(*lora.modules_to_save, *names))


def refuse_frozen_tokens(model: Any, vocabulary: Vocabulary | None) -> None:
    """Raises `UserError` where tokens are added and the embedding or the head, which have to learn
    them, is frozen.
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
    """The names of the embedding and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]
