"""How well the scores of classes order documents, and how true their probabilities are."""

import torch
from torch import Tensor

BINS = 15  # of confidence
LEAST_TEMPERATURE = 1e-3
HALVINGS = 60  # of the interval in which the temperature lies


def describe_probabilities(scores: Tensor, are_true: Tensor, has_several: bool) -> dict[str, float]:
    """Measures the order and the calibration of all held-out documents.

    auc: for one class, how often a document that has it gets a larger probability of it than one
    that has not (Hand and Till 2001, one against the rest). The mean over those classes that some
    documents have and others have not.

    ece: the mean distance of confidence from accuracy, over 15 bins of confidence (Guo et al. 2017,
    arXiv:1706.04599, eq. 5). temperature: the divisor of scores with the least cross entropy of
    these documents (the same, section 4.2).

    Args:
        scores: fp64[documents, classes].
        are_true: bool of the same shape, whether a document has a class.
        has_several: A document may have several classes, of which each is decided alone.
    """
    temperature = fit_temperature(scores, are_true, has_several)
    described = {
        "ece": measure_calibration(scores, are_true, has_several),
        "temperature": temperature,
        "ece_with_temperature": measure_calibration(scores / temperature, are_true, has_several),
    }
    probabilities = _to_probabilities(scores, has_several)
    areas = []
    for of_class, is_true in zip(probabilities.T, are_true.T, strict=True):
        if 0 < is_true.sum() < len(scores):
            areas.append(measure_area(of_class, is_true))
    if areas:
        described["auc"] = sum(areas) / len(areas)
    return described


def measure_area(values: Tensor, are_true: Tensor) -> float:
    """Measures the area under the ROC curve of `values`, fp64[documents]; ties count half.

    From the ranks of the true documents (Mann and Whitney 1947).
    """
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]  # from 1; equal values share their mean
    hits = int(are_true.sum())
    pairs_in_order = ranks[are_true].sum() - hits * (hits + 1) / 2
    return float(pairs_in_order / (hits * (len(values) - hits)))


def measure_calibration(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """Measures the expected calibration error of the decisions by `scores`."""
    probabilities = _to_probabilities(scores, has_several)
    if has_several:
        confidence = torch.maximum(probabilities, 1 - probabilities).flatten()
        is_right = (scores > 0).flatten() == are_true.flatten()
    else:
        confidence, decided = probabilities.max(1)
        is_right = are_true.gather(1, decided[:, None])[:, 0]
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, is_right.double() - confidence)
    return float(gaps.abs().sum() / len(confidence))


def fit_temperature(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """Finds the temperature with the least cross entropy, from 0.001 to 1000.

    The cross entropy is convex in the inverse of the temperature, so that its slope has one root:
    an interval of the inverse's logarithm is halved until it is found.
    """
    low = torch.tensor(LEAST_TEMPERATURE, dtype=torch.float64).log()
    high = -low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _slope(scores, are_true, has_several, middle.exp()) < 0:
            low = middle
        else:
            high = middle
    return float((-(low + high) / 2).exp())


def _slope(scores: Tensor, are_true: Tensor, has_several: bool, inverse: Tensor) -> float:
    """The derivative of the cross entropy by the inverse of the temperature."""
    probabilities = _to_probabilities(scores * inverse, has_several)
    return float(((probabilities - are_true.double()) * scores).sum())


def _to_probabilities(scores: Tensor, has_several: bool) -> Tensor:
    """The probability of each class, fp64[documents, classes]."""
    return scores.sigmoid() if has_several else scores.softmax(1)
