"""Metrics of a classifier's probabilities: the area under the ROC curve, the calibration error, and
the best temperature.
"""

import torch
from torch import Tensor

BINS = 15  # equal bins of confidence, from 0 to 1, in the calibration error
LEAST_TEMPERATURE = 1e-3  # the largest is 1 / LEAST_TEMPERATURE
HALVINGS = 60  # how often `fit_temperature` halves the interval that holds the temperature


def describe_probabilities(scores: Tensor, are_true: Tensor, has_several: bool) -> dict[str, float]:
    """Computes the metrics of the held-out documents' probabilities.

    auc: The area under the ROC curve of one class against the rest (Hand and Till 2001): how often
    a document of the class gets a larger probability of it than another document. It is averaged
    over the classes that some but not all documents have; without such a class, auc is left out.

    ece: The mean distance between confidence and accuracy in 15 bins of confidence (Guo et al.
    2017, arXiv:1706.04599, eq. 5). temperature: The divisor of the scores that gives these
    documents the least cross entropy (the same paper, section 4.2). ece_with_temperature: The ece
    of the scores divided by it.

    Args:
        scores: fp64[documents, classes].
        are_true: bool[documents, classes], whether a document has a class.
        has_several: Whether a document may have several classes; each is then decided alone.
    """
    temperature = fit_temperature(scores, are_true, has_several)
    described = {
        "ece": measure_calibration(scores, are_true, has_several),
        "temperature": temperature,
        "ece_with_temperature": measure_calibration(scores / temperature, are_true, has_several),
    }
    probabilities = _to_probabilities(scores, has_several)
    areas = []
    for class_probabilities, has_class in zip(probabilities.T, are_true.T, strict=True):
        if 0 < has_class.sum() < len(scores):
            areas.append(measure_area(class_probabilities, has_class))
    if areas:
        described["auc"] = sum(areas) / len(areas)
    return described


def measure_area(values: Tensor, are_true: Tensor) -> float:
    """Computes the area under the ROC curve: the share of (true, false) pairs of documents in which
    the true one has the larger value. A tie counts half.

    It follows from the ranks of the true documents (Mann and Whitney 1947).

    Args:
        values: fp64[documents].
        are_true: bool[documents], neither all true nor all false.
    """
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    # from 1 for the smallest value; equal values share their mean rank
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]
    positives = int(are_true.sum())
    negatives = len(values) - positives
    # the ranks of the true documents among themselves add up to positives * (positives + 1) / 2
    pairs_in_order = ranks[are_true].sum() - positives * (positives + 1) / 2
    return float(pairs_in_order / (positives * negatives))


def measure_calibration(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """Computes the expected calibration error of the decisions that the scores lead to.

    A document has one decision, its likeliest class; with `has_several`, one for each class. The
    arguments are those of `describe_probabilities`.
    """
    probabilities = _to_probabilities(scores, has_several)
    if has_several:
        confidence = torch.maximum(probabilities, 1 - probabilities).flatten()
        is_right = (scores > 0).flatten() == are_true.flatten()
    else:
        confidence, predicted_class = probabilities.max(1)
        is_right = are_true.gather(1, predicted_class[:, None]).squeeze(1)
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    # of each bin: its right decisions minus the sum of their confidence
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, is_right.double() - confidence)
    return float(gaps.abs().sum() / len(confidence))


def fit_temperature(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """Finds the temperature between 0.001 and 1000 with the least cross entropy, by bisection.

    The cross entropy is convex in 1 / temperature, so its slope changes sign at most once. The
    interval that is halved is that of log(1 / temperature). The arguments are those of
    `describe_probabilities`.
    """
    low = torch.tensor(LEAST_TEMPERATURE, dtype=torch.float64).log()
    high = -low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _compute_slope(scores, are_true, has_several, middle.exp()) < 0:
            low = middle
        else:
            high = middle
    log_inverse = (low + high) / 2
    return float((-log_inverse).exp())


def _compute_slope(
    scores: Tensor, are_true: Tensor, has_several: bool, inverse_temperature: Tensor
) -> float:
    """Computes the derivative of the summed cross entropy by the inverse of the temperature."""
    probabilities = _to_probabilities(scores * inverse_temperature, has_several)
    return float(((probabilities - are_true.double()) * scores).sum())


def _to_probabilities(scores: Tensor, has_several: bool) -> Tensor:
    """Turns scores into the probability of each class, fp64[documents, classes]."""
    return scores.sigmoid() if has_several else scores.softmax(1)
