"""How well a query's documents are ordered: recall, MRR and NDCG (Jarvelin and Kekalainen 2002)."""

import torch
from torch import Tensor

from finetune.training.objectives.preference import sum_and_count

NEAREST = 10  # documents, within which recall, mrr and ndcg look


def describe_places(places: Tensor) -> dict[str, Tensor]:
    """Metrics of how many documents, int64[queries], stand before the one that answers a query."""
    is_near = places < NEAREST
    metrics = {
        "recall@1": sum_and_count((places == 0).double()),
        f"recall@{NEAREST}": sum_and_count(is_near.double()),
        f"mrr@{NEAREST}": sum_and_count(torch.where(is_near, 1 / (places.double() + 1), 0.0)),
        f"ndcg@{NEAREST}": sum_and_count(torch.where(is_near, _discount(places), 0.0)),
    }
    return {name: pair.float() for name, pair in metrics.items()}


def describe_order(scores: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    """Metrics of a query's documents in the order of their scores.

    Of documents with one score, those that answer worse come first. Queries without a document that
    answers count in none of them.

    Args:
        scores: fp64[queries, documents].
        numbers: Of the same shape, how well each answers; 0: it does not.
    """
    worst_first = numbers.argsort(1)
    by_score = scores.gather(1, worst_first).sort(dim=1, descending=True, stable=True).indices
    ranked = numbers.gather(1, worst_first).gather(1, by_score)
    answers = (ranked > 0).double()
    is_answered = answers.any(1)
    relevant = answers.sum(1).clamp(min=1)
    discounts = _discount(torch.arange(ranked.shape[1], device=ranked.device))[:NEAREST]
    best = (ranked.sort(1, descending=True).values[:, :NEAREST] * discounts).sum(1)
    first = answers.argmax(1)
    gained = (ranked[:, :NEAREST] * discounts).sum(1)
    each = {
        "recall@1": answers[:, 0] / relevant,
        f"recall@{NEAREST}": answers[:, :NEAREST].sum(1) / relevant,
        f"mrr@{NEAREST}": torch.where(first < NEAREST, 1 / (first.double() + 1), 0.0),
        f"ndcg@{NEAREST}": gained / torch.where(is_answered, best, 1.0),
    }
    return {name: sum_and_count(values, is_answered) for name, values in each.items()}


def _discount(places: Tensor) -> Tensor:
    return 1 / torch.log2(places.double() + 2)
