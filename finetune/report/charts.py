"""The plots of a report, as geometry: lines in a box of 1000 x 1000, and labels placed in percent.

The template stretches the box to any width and keeps strokes and text at their size, so that a phone shows a plot that
is as legible as on a desk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from finetune.report.run_data import RunRecord
from finetune.report.series import Points, compact, smoothed, smoothing_weight, thinned, ticks

BOX = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """One line (or, with `dots`, a row of points) in a chart, in data's units."""

    label: str
    run: int  # which run, for the color
    points: Points
    faint: bool = False  # behind the others and not in the legend
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """A text at an axis, `at` percent from its start."""

    text: str
    at: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A line as an SVG path, with its points for the tooltip."""

    label: str
    run: int
    path: str
    style: str
    points: list[tuple[float, float, str]]  # x in percent, y in percent, the value as text
    steps: list[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot ready for the template."""

    key: str
    title: str
    note: str
    x_labels: list[Label]
    y_labels: list[Label]
    grid: str
    lines: list[Drawn] = field(default_factory=list)


def charts(runs: Sequence[RunRecord], planned_bytes: Sequence[float | None]) -> list[Chart]:
    """Every plot for which some run has a number. `planned_bytes`: each run's planned peak of memory, where known."""
    memory = _lines(runs, "peak_memory_bytes", lambda value: value / 2**30)
    memory += [
        Line(
            f"{run.name} planned",
            index,
            [(_steps(run)[0], planned / 2**30), (_steps(run)[1], planned / 2**30)],
            dashed=True,
        )
        for index, (run, planned) in enumerate(zip(runs, planned_bytes, strict=True))
        if planned is not None
    ]
    found = [
        _chart("loss", "Loss", "nats per trained token; faint: as logged, strong: smoothed, points: held-out", _loss(runs)),
        _chart("learning_rate", "Learning rate", "", _lines(runs, "learning_rate"), zero=True),
        _chart("grad_norm", "Gradient norm", "before clipping", _with_smoothed(runs, "grad_norm"), zero=True),
        _chart("tokens_per_second", "Tokens per second", "all ranks, padding not counted", _lines(runs, "tokens_per_second"), zero=True),
        _chart("mfu", "Model FLOP utilization", "%: (6N + 12LHQT) x tokens per second over the devices' peak, 4N for LoRA", _lines(runs, "mfu", lambda v: 100 * v), zero=True),
        _chart("peak_memory_bytes", "Peak memory of the first rank", "GiB; dashed: planned", memory, zero=True),
        _chart("data_wait_seconds", "Waiting for data", "seconds between two lines of metrics", _lines(runs, "data_wait_seconds"), zero=True),
        _chart("exact_match", "Held-out questions answered exactly", "%", _lines(runs, "exact_match", lambda v: 100 * v, dots=True), zero=True),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _steps(run: RunRecord) -> tuple[float, float]:
    steps = [point[0] for point in run.series("peak_memory_bytes") or run.series("loss")] or [0.0]
    return steps[0], steps[-1]


def _lines(
    runs: Sequence[RunRecord], key: str, scale: Callable[[float], float] = lambda value: value, dots: bool = False
) -> list[Line]:
    found = ((index, run, run.series(key)) for index, run in enumerate(runs))
    return [
        Line(run.name, index, [(x, scale(y)) for x, y in points], dots=dots) for index, run, points in found if points
    ]


def _with_smoothed(runs: Sequence[RunRecord], key: str) -> list[Line]:
    raw = _lines(runs, key)
    faint = [Line(line.label, line.run, line.points, faint=True) for line in raw]
    strong = []
    for line in raw:
        values = smoothed([y for _, y in line.points], smoothing_weight(len(line.points)))
        strong.append(Line(line.label, line.run, list(zip((x for x, _ in line.points), values, strict=True))))
    return faint + strong


def _loss(runs: Sequence[RunRecord]) -> list[Line]:
    held_out = [Line(f"{line.label} held-out", line.run, line.points, dots=True) for line in _lines(runs, "eval_loss")]
    return _with_smoothed(runs, "loss") + held_out


def _chart(key: str, title: str, note: str, lines: Sequence[Line], zero: bool = False) -> Chart | None:
    """The chart, with axes around all lines; None where there is nothing to draw."""
    lines = [Line(n.label, n.run, thinned(n.points), n.faint, n.dots, n.dashed) for n in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    y_low, y_high = min([y for _, y in points] + [0.0] * zero), max(y for _, y in points)
    y_ticks = ticks(y_low, y_high if y_high > 0 or not zero else 1.0)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    x_high = x_high if x_high > x_low else x_low + 1
    x_ticks = [x for x in ticks(x_low, x_high, most=7) if x_low <= x <= x_high and x == int(x)]

    def across(x: float) -> float:
        return (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return 1 - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    return Chart(
        key=key,
        title=title,
        note=note,
        x_labels=[Label(f"{x:,.0f}", 100 * across(x)) for x in x_ticks],
        y_labels=[Label(compact(y), 100 * down(y)) for y in y_ticks],
        grid="".join(f"M0 {BOX * down(y):.1f}H{BOX}" for y in y_ticks),
        lines=[_drawn(line, across, down) for line in lines],
    )


def _drawn(line: Line, across: Callable[[float], float], down: Callable[[float], float]) -> Drawn:
    placed = [(across(x), down(y), x, y) for x, y in line.points if math.isfinite(y)]
    if line.dots:  # a stroke of no length with round ends is a dot at any stretch
        path = "".join(f"M{BOX * x:.1f} {BOX * y:.1f}h0" for x, y, _, _ in placed)
    else:
        path = "M" + "L".join(f"{BOX * x:.1f} {BOX * y:.1f}" for x, y, _, _ in placed)
    style = "dots" if line.dots else "faint" if line.faint else "dashed" if line.dashed else "line"
    points = [] if line.faint else [(round(100 * x, 2), round(100 * y, 2), compact(value)) for x, y, _, value in placed]
    return Drawn(line.label, line.run, path, style, points, [step for _, _, step, _ in placed] if points else [])
