"""A metric's values prepared for a plot: smoothed, thinned, and with ticks at round numbers."""

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]  # (step, value)


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Each value averaged with its neighbors, by weights that fall off as weight^distance on both sides.

    On both sides, so that the line does not lag behind a falling loss. Values that are not finite are ignored.

    >>> smooth([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    before, after = _running_sums(values, weight), _running_sums(values[::-1], weight)[::-1]
    found = []
    for value, (left, left_weight), (right, right_weight) in zip(values, before, after, strict=True):
        own = 1.0 if math.isfinite(value) else 0.0  # it is in both sums
        total = left_weight + right_weight - own
        found.append(round((left + right - (value if own else 0.0)) / total, 9) if total else value)
    return found


def _running_sums(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """At each value the weighted sum of it and all before it, and the sum of their weights."""
    total, weights, found = 0.0, 0.0, []
    for value in values:
        finite = math.isfinite(value)
        total, weights = weight * total + (value if finite else 0.0), weight * weights + finite
        found.append((total, weights))
    return found


def smoothing_weight(count: int) -> float:
    """The weight that averages about a fortieth of the line on each side, so that a short run keeps its shape."""
    return 1 - 1 / max(1.0, count / 40)


def thin(points: Points, most: int = 600) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and highest of every stretch, so that no spike is lost."""
    finite = [point for point in points if abs(point[1]) < 1e300]  # so that their differences are finite too
    if len(finite) <= most:
        return finite
    stretch = math.ceil(len(finite) / (most // 2))
    kept = []
    for start in range(0, len(finite), stretch):
        part = finite[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers, from at or below `low` to at or above `high`.

    >>> choose_ticks(0.0, 9.3, most=6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (most - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    for step in (m * magnitude for m in (1, 2, 2.5, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            return [round(index * step, 12) for index in range(first, last + 1)]
    return [low, high]


def format_compact(value: float) -> str:
    """A number for an axis or a tooltip.

    >>> [format_compact(value) for value in (0.0, 2e-05, 1234567, 0.3333, 5202.4)]
    ['0', '2e-5', '1.23M', '0.333', '5,202']
    """
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.3g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"
