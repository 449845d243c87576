"""How well the scores of classes order documents, and how true their probabilities are."""

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # of confidence
LEAST_TEMPERATURE = 1e-3
HALVINGS = 60  # of the interval in which the temperature is looked for


def describe_probabilities(scores: Tensor, are_true: Tensor, has_several: bool) -> dict[str, float]:
    """Measures of all held-out documents.

    auc: The mean over classes of how often a document of the class has a larger probability of it
    than another document (Hand and Till 2001, one against the rest); of the classes that some have.

    ece: The mean distance of confidence from accuracy, over 15 bins of confidence (Guo et al. 2017,
    arXiv:1706.04599, eq. 5). temperature: By which scores are divided, so that the cross entropy of
    these documents is least (the same, section 4.2).

    Args:
        scores: fp64[documents, classes].
        are_true: bool of the same shape.
        has_several: A document may have several classes, of which each is decided alone.
    """
    temperature = fit_temperature(scores, are_true, has_several)
    described = {
        "ece": measure_calibration(scores, are_true, has_several),
        "temperature": temperature,
        "ece_with_temperature": measure_calibration(scores / temperature, are_true, has_several),
    }
    shares = scores.sigmoid() if has_several else scores.softmax(1)
    areas = [
        measure_area(shares[:, index], are_true[:, index])
        for index in range(scores.shape[1])
        if 0 < are_true[:, index].sum() < len(scores)
    ]
    if areas:
        described["auc"] = sum(areas) / len(areas)
    return described


def measure_area(values: Tensor, are_true: Tensor) -> float:
    """The area under the ROC curve of `values`, fp64[documents]; ties count half."""
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]
    hits = int(are_true.sum())
    above = ranks[are_true].sum() - hits * (hits + 1) / 2
    return float(above / (hits * (len(values) - hits)))


def measure_calibration(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """The expected calibration error of what is decided by `scores`."""
    if has_several:
        shares = scores.sigmoid().flatten()
        confidence = torch.maximum(shares, 1 - shares)
        is_right = (scores > 0).flatten() == are_true.flatten()
    else:
        confidence, decided = scores.softmax(1).max(1)
        is_right = are_true.gather(1, decided[:, None])[:, 0]
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(
        0, bins, is_right.double() - confidence
    )
    return float(gaps.abs().sum() / len(confidence))


def fit_temperature(scores: Tensor, are_true: Tensor, has_several: bool) -> float:
    """The temperature with the least cross entropy, from 0.001 to 1000.

    The cross entropy is convex in its inverse, whose place is found by halving an interval.
    """
    least = torch.tensor(LEAST_TEMPERATURE, dtype=torch.float64).log()
    low = least
    high = -least
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = _slope(scores, are_true, has_several, middle.exp())
        if slope < 0:
            low = middle
        else:
            high = middle
    return float((-(low + high) / 2).exp())


def _slope(scores: Tensor, are_true: Tensor, has_several: bool, inverse: Tensor) -> float:
    """The derivative of the cross entropy by the inverse of the temperature."""
    if has_several:
        shares = (scores * inverse).sigmoid()
    else:
        shares = F.softmax(scores * inverse, 1)
    return float(((shares - are_true.double()) * scores).sum())
