"""NEFTune (Jain et al. 2023): uniform noise on the embeddings while training.

A document's noise is a pure function of the seed, the step and the document, so that it is the same on every layout and in
every packing. Its bound is alpha / sqrt(tokens x hidden size) with the document's own tokens: those of a padded batch, which
other implementations take, would depend on the documents beside it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.models.lora import seed_of


class NoisyDocuments(NamedTuple):  # not a dataclass, whose fields FSDP1 would set
    """The documents of a micro-batch, in order, and what seeds their noise."""

    seed: int
    step: int
    example_ids: Sequence[int]
    lengths: Sequence[int]  # tokens of each
    first_token: int = 0  # of the row: where the embeddings begin that a rank has of it


def install_embedding_noise(model: Any, alpha: float) -> None:
    """Makes `model(..., noisy_documents=NoisyDocuments)` add noise to its embeddings. Call it after `install_loss`."""
    embedding, plain = model.get_input_embeddings(), model.forward
    documents: NoisyDocuments | None = None

    def add_noise(_module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        return embedded if documents is None else embedded + make_noise(embedded, documents, alpha)

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
    """The noise of `documents`, shaped like `embedded` [rows, tokens, hidden]: one after another in a single row, or one
    in each row; none on padding."""
    rows, tokens, hidden = embedded.shape
    noise = torch.zeros(rows, tokens, hidden, dtype=torch.float32, device=embedded.device)
    generator = torch.Generator(embedded.device)
    start = 0  # of the document, among the tokens of `embedded`
    for index, (example_id, length) in enumerate(zip(documents.example_ids, documents.lengths, strict=True)):
        if index == 0 or rows > 1:
            start = -documents.first_token
        first, end = max(start, 0), min(start + length, tokens)
        if first < end:
            generator.manual_seed(seed_of(documents.seed, f"noise/{documents.step}/{example_id}"))
            bound = alpha / (length * hidden) ** 0.5
            whole = torch.empty(length, hidden, device=embedded.device).uniform_(-bound, bound, generator=generator)
            noise[index if rows > 1 else 0, first:end] = whole[first - start : end - start]
        start += length
    return noise.to(embedded.dtype)
