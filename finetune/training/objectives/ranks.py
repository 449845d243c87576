"""How well a query's documents are ordered: recall, MRR and NDCG (Jarvelin and Kekalainen 2002)."""

import torch
from torch import Tensor

from finetune.training.objectives.objective import Metrics
from finetune.training.objectives.preference import sum_and_count

NEAREST = 10  # documents, within which recall, mrr and ndcg look


def describe_places(places: Tensor) -> Metrics:
    """Metrics of queries that one document answers each.

    `places`: int64[queries], how many documents stand before that one.
    """
    is_near = places < NEAREST
    return {
        "recall@1": sum_and_count((places == 0).double()),
        f"recall@{NEAREST}": sum_and_count(is_near.double()),
        f"mrr@{NEAREST}": sum_and_count(torch.where(is_near, 1 / (places.double() + 1), 0.0)),
        f"ndcg@{NEAREST}": sum_and_count(torch.where(is_near, _discount(places), 0.0)),
    }


def describe_order(scores: Tensor, relevance: Tensor) -> Metrics:
    """Metrics of queries' documents in the order of their scores.

    Of documents with equal scores, the less relevant come first. Queries without a relevant
    document count in no metric.

    Args:
        scores: fp64[queries, documents].
        relevance: Of the same shape; 0: the document does not answer the query.
    """
    ranked = _rank(scores, relevance)
    is_relevant = (ranked > 0).double()
    has_relevant = is_relevant.any(1)
    relevant = is_relevant.sum(1).clamp(min=1)
    first = is_relevant.argmax(1)
    gain = _discounted_gain(ranked)
    best_gain = _discounted_gain(ranked.sort(1, descending=True).values)
    by_query = {
        "recall@1": is_relevant[:, 0] / relevant,
        f"recall@{NEAREST}": is_relevant[:, :NEAREST].sum(1) / relevant,
        f"mrr@{NEAREST}": torch.where(first < NEAREST, 1 / (first.double() + 1), 0.0),
        f"ndcg@{NEAREST}": gain / torch.where(has_relevant, best_gain, 1.0),
    }
    return {name: sum_and_count(values, has_relevant) for name, values in by_query.items()}


def _rank(scores: Tensor, relevance: Tensor) -> Tensor:
    """Sorts the relevance of each query's documents by their scores, the highest first."""
    least_relevant_first = relevance.argsort(1)
    scores = scores.gather(1, least_relevant_first)
    relevance = relevance.gather(1, least_relevant_first)
    return relevance.gather(1, scores.sort(dim=1, descending=True, stable=True).indices)


def _discounted_gain(ranked: Tensor) -> Tensor:
    """DCG of each query's first documents, from their relevance in order; [queries]."""
    nearest = ranked[:, :NEAREST]
    places = torch.arange(nearest.shape[1], device=ranked.device)
    return (nearest * _discount(places)).sum(1)


def _discount(places: Tensor) -> Tensor:
    """What the relevance of a document counts by its place, from 0."""
    return 1 / torch.log2(places.double() + 2)
