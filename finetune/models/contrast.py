"""The contrastive loss of a whole step: each query beside the documents of all others, and its
gradient to each vector.

InfoNCE (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) over cosines, as sentence-transformers'
MultipleNegativesRankingLoss; of embeddings that are cut, the sum over their lengths (Kusupati et
al. 2022, arXiv:2205.13147, eq. 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import CONTRASTED_QUERIES
from finetune.models.cross_entropy import LossHead


def head_states(
    _head: LossHead, hidden: Tensor, _labels: Tensor, trained_positions: Tensor | None
) -> Tensor:
    """A `HeadFunction`: `model(..., head_function=head_states)` returns what the head would read,
    [positions, hidden].

    A head that multiplies its input does not change the cosines.
    """
    if trained_positions is None:
        return hidden
    return hidden[trained_positions]


@dataclass(frozen=True, slots=True)
class Contrast:
    """The loss and metrics of a step's vectors."""

    losses: Tensor  # fp64[queries]
    gradients: Tensor  # fp64[vectors, hidden]: of the sum of the losses
    places: Tensor  # int64[queries]: how many of the documents are nearer to the query than its own


def contrast(
    vectors: Tensor, group_size: int, temperature: float, dims: Sequence[int] = ()
) -> Contrast:
    """The losses of queries among all documents.

    Args:
        vectors: fp64[vectors, hidden]: group after group, each a query, its document and its
            negatives. Not normalized.
        group_size: Vectors in a group.
        temperature: By which cosines are divided.
        dims: The lengths that vectors are cut to, of which the losses are added; none: they are
            whole.
    """
    hidden = vectors.shape[1]
    leaves = vectors.detach().clone().requires_grad_()
    losses = vectors.new_zeros(len(vectors) // group_size)
    for dim in dims or (hidden,):
        losses += _add_gradients(leaves, dim, group_size, temperature)
    assert leaves.grad is not None, "there is a query"
    return Contrast(losses, leaves.grad, find_places(F.normalize(vectors, dim=1), group_size))


@torch.enable_grad()
def _add_gradients(leaves: Tensor, dim: int, group_size: int, temperature: float) -> Tensor:
    """fp64[queries]: their losses by vectors of length `dim`, whose gradient is added to that of
    `leaves`.
    """
    normalized = F.normalize(leaves[:, :dim], dim=1)
    units = normalized.detach().requires_grad_()
    losses = []
    for queries, documents, own in _split_queries(units, group_size):
        each = F.cross_entropy(
            units[queries] @ units[documents].T / temperature, own, reduction="none"
        )
        each.sum().backward()  # type: ignore[no-untyped-call]
        losses.append(each.detach())
    normalized.backward(units.grad)  # type: ignore[no-untyped-call]
    return torch.cat(losses)


@torch.no_grad()
def find_places(units: Tensor, group_size: int) -> Tensor:
    """int64[queries]: how many documents are nearer to a query than its own.

    Args:
        units: fp64[vectors, hidden] of length 1, as in `contrast`.
        group_size: Vectors in a group.
    """
    places = []
    for queries, documents, own in _split_queries(units, group_size):
        cosines = units[queries] @ units[documents].T
        places.append((cosines > cosines.gather(1, own[:, None])).sum(1))
    return torch.cat(places)


def _split_queries(units: Tensor, group_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (where some of the queries are, where all documents are, which of these is each
    query's own) for all queries.
    """
    groups = torch.arange(len(units), device=units.device).view(-1, group_size)
    queries = groups[:, 0]
    documents = groups[:, 1:].flatten()
    own = torch.arange(len(queries), device=units.device) * (group_size - 1)
    parts = zip(
        torch.split(queries, CONTRASTED_QUERIES), torch.split(own, CONTRASTED_QUERIES), strict=True
    )
    return [(some, documents, own_of_some) for some, own_of_some in parts]
