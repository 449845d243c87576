"""Metrics of how well a query's documents are ordered: recall, MRR and NDCG (Jarvelin and
Kekalainen 2002).
"""

import torch
from torch import Tensor

from finetune.training.objectives.objective import Metrics
from finetune.training.objectives.preference import sum_and_count

NEAREST = 10  # how many of a query's first documents recall, MRR and NDCG look at


def describe_places(places: Tensor) -> Metrics:
    """Makes the metrics of queries that are answered by exactly one document.

    `places`: int64[queries], how many documents come before the one that answers the query.
    """
    is_near = places < NEAREST
    return {
        "recall@1": sum_and_count((places == 0).double()),
        f"recall@{NEAREST}": sum_and_count(is_near.double()),
        f"mrr@{NEAREST}": sum_and_count(torch.where(is_near, 1 / (places.double() + 1), 0.0)),
        f"ndcg@{NEAREST}": sum_and_count(torch.where(is_near, _discount(places), 0.0)),
    }


def describe_order(scores: Tensor, relevance: Tensor) -> Metrics:
    """Makes the metrics of how the scores order each query's documents.

    Documents with equal scores are ordered as badly as possible: the least relevant first. Queries
    without a relevant document are left out of the means.

    Args:
        scores: fp64[queries, documents].
        relevance: fp64[queries, documents]; 0: the document does not answer the query.
    """
    ranked = _rank(scores, relevance)
    is_relevant = (ranked > 0).double()
    has_relevant = is_relevant.any(1)
    relevant_count = is_relevant.sum(1).clamp(min=1)
    first_relevant = is_relevant.argmax(1)
    gain = _compute_gain(ranked)
    best_gain = _compute_gain(ranked.sort(1, descending=True).values)
    by_query = {
        "recall@1": is_relevant[:, 0] / relevant_count,
        f"recall@{NEAREST}": is_relevant[:, :NEAREST].sum(1) / relevant_count,
        f"mrr@{NEAREST}": torch.where(
            first_relevant < NEAREST, 1 / (first_relevant.double() + 1), 0.0
        ),
        f"ndcg@{NEAREST}": gain / torch.where(has_relevant, best_gain, 1.0),
    }
    return {name: sum_and_count(values, has_relevant) for name, values in by_query.items()}


def _rank(scores: Tensor, relevance: Tensor) -> Tensor:
    """Returns the relevance of each query's documents, sorted by their scores, the highest first.

    [queries, documents], as both arguments.
    """
    # Sorted by relevance first, since the stable sort by scores keeps the order of equal scores.
    least_relevant_first = relevance.argsort(1)
    scores = scores.gather(1, least_relevant_first)
    relevance = relevance.gather(1, least_relevant_first)
    return relevance.gather(1, scores.sort(dim=1, descending=True, stable=True).indices)


def _compute_gain(ranked: Tensor) -> Tensor:
    """Computes the discounted cumulative gain of each query's NEAREST first documents, [queries].

    `ranked`: [queries, documents], the relevance of the documents in their order.
    """
    nearest = ranked[:, :NEAREST]
    places = torch.arange(nearest.shape[1], device=ranked.device)
    return (nearest * _discount(places)).sum(1)


def _discount(places: Tensor) -> Tensor:
    """Computes the factor of a document's relevance in the gain, by its place from 0."""
    return 1 / torch.log2(places.double() + 2)
