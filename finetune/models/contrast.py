"""The contrastive loss of a whole step, and its gradient to each vector.

Each query is compared with its own document and with the documents of all other queries. The loss
is InfoNCE (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) over cosines, as
sentence-transformers' MultipleNegativesRankingLoss. If embeddings are trained at several lengths,
it is the sum over the lengths (Kusupati et al. 2022, arXiv:2205.13147, eq. 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import CONTRASTED_QUERIES
from finetune.models.cross_entropy import LossHead


def head_states(
    _head: LossHead, hidden: Tensor, _labels: Tensor, trained_positions: Tensor
) -> Tensor:
    """Returns the head's inputs at the trained positions, [positions, hidden]; a `HeadFunction`.

    They are already multiplied by the head's `input_scale`, which does not change cosines.
    """
    return hidden[trained_positions]


@dataclass(frozen=True, slots=True)
class Contrast:
    """The losses of a step's queries, their gradients, and where each query ranks its document."""

    losses: Tensor  # fp64[queries]
    gradients: Tensor  # fp64[vectors, hidden]: the gradient of the sum of the losses
    places: Tensor  # int64[queries]: how many documents are nearer to the query than its own is


def contrast(
    vectors: Tensor, group_size: int, temperature: float, dims: Sequence[int] = ()
) -> Contrast:
    """Compares each query with the documents of all groups.

    Args:
        vectors: fp64[vectors, hidden], not normalized: group after group, each of them a query, its
            document and its negatives.
        group_size: Vectors in a group.
        temperature: What cosines are divided by.
        dims: The lengths that vectors are cut to; the losses are summed over them. Empty: vectors
            are used whole.
    """
    hidden = vectors.shape[1]
    leaves = vectors.detach().clone().requires_grad_()
    losses = vectors.new_zeros(len(vectors) // group_size)
    for dim in dims or (hidden,):
        losses += _compute_losses(leaves, dim, group_size, temperature)
    assert leaves.grad is not None, "there is a query"
    return Contrast(losses, leaves.grad, find_places(F.normalize(vectors, dim=1), group_size))


@torch.enable_grad()
def _compute_losses(leaves: Tensor, dim: int, group_size: int, temperature: float) -> Tensor:
    """Computes the losses over vectors cut to length `dim`; adds their gradient to `leaves.grad`.

    The backward of each part of the queries runs at once, so that the cosines of only one part are
    in memory. It stops at the unit vectors, and one backward through the normalization follows.

    Returns:
        fp64[queries].
    """
    normalized = F.normalize(leaves[:, :dim], dim=1)
    units = normalized.detach().requires_grad_()
    losses = []
    for queries, documents, own in _split_queries(units, group_size):
        # The cosines have no name, which would keep them in memory during the backward.
        query_losses = F.cross_entropy(
            units[queries] @ units[documents].T / temperature, own, reduction="none"
        )
        query_losses.sum().backward()  # type: ignore[no-untyped-call]
        losses.append(query_losses.detach())
    normalized.backward(units.grad)  # type: ignore[no-untyped-call]
    return torch.cat(losses)


@torch.no_grad()
def find_places(units: Tensor, group_size: int) -> Tensor:
    """Counts for each query the documents that are nearer to it than its own document is.

    Args:
        units: fp64[vectors, hidden], vectors of length 1 in the order of `contrast`.
        group_size: Vectors in a group.

    Returns:
        int64[queries].
    """
    places = []
    for queries, documents, own in _split_queries(units, group_size):
        cosines = units[queries] @ units[documents].T
        own_cosines = cosines.gather(1, own[:, None])
        places.append((cosines > own_cosines).sum(1))
    return torch.cat(places)


def _split_queries(units: Tensor, group_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Splits the queries into parts of CONTRASTED_QUERIES.

    Returns for each part (rows of its queries in `units`, rows of all documents in `units`, the
    index of each query's own document among the documents), all int64. The negatives are documents
    too.
    """
    groups = torch.arange(len(units), device=units.device).view(-1, group_size)
    queries = groups[:, 0]
    documents = groups[:, 1:].flatten()
    own = torch.arange(len(queries), device=units.device) * (group_size - 1)
    parts = zip(
        torch.split(queries, CONTRASTED_QUERIES), torch.split(own, CONTRASTED_QUERIES), strict=True
    )
    return [(part_queries, documents, part_own) for part_queries, part_own in parts]
