"""Draws a report's plots as SVG paths, and the loss as a PNG.

SVG paths have coordinates from 0 to 1000 across and down; places of labels are percents of the
plot's width or height. The template stretches the paths to any width, but not their strokes and the
text, so that a plot is as legible on a phone as on a desktop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.methods import METHODS, ROWS
from finetune.report.run_data import RunRecord, list_metrics, smooth, smoothing_weight
from finetune.units import format_compact

Points = Sequence[tuple[float, float]]  # (step, value)


def thin(points: Points, most: int = 600) -> list[tuple[float, float]]:
    """Returns at most `most` of the points, without infinite and NaN values.

    Of every stretch of points it keeps the lowest and the highest one, so that spikes stay.
    """
    # differences of larger values would be infinite
    finite = [(step, value) for step, value in points if abs(value) < 1e300]
    if len(finite) <= most:
        return finite
    stretch = math.ceil(len(finite) / (most // 2))
    kept = []
    for start in range(0, len(finite), stretch):
        part = finite[start : start + stretch]
        # sorted by step; a set, as one point may be both
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Chooses at most `most` evenly spaced round numbers, from `low` or below to `high` or above.

    >>> choose_ticks(0.0, 9.3, most=6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low = low - pad
        high = high + pad
    exact_step = (high - low) / (most - 1)
    magnitude = 10.0 ** math.floor(math.log10(exact_step))
    for step in (m * magnitude for m in (1, 2, 2.5, 5, 10, 20)):
        # 1e-9: a bound that is a tick up to rounding needs no further tick
        first = math.floor(low / step + 1e-9)
        last = math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            return [round(index * step, 12) for index in range(first, last + 1)]
    return [low, high]


# A loss is drawn on a log scale if its highest smoothed value is this many times its lowest one.
LOG_FROM = 10.0
LOG_LEAST = 1e-30  # a log scale is not used for smaller values


def choose_log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Chooses at most `most` round numbers for a log scale, from `low` or below to `high` or above.

    They are 1, 2 and 5 times powers of ten if few are needed, else powers of ten.

    >>> choose_log_ticks(0.02, 4.0), choose_log_ticks(1e-7, 4.0)
    ([0.01, 0.1, 1.0, 10.0], [1e-07, 1e-05, 0.001, 0.1, 10.0])
    >>> choose_log_ticks(0.3, 4.0)
    [0.2, 0.5, 1.0, 2.0, 5.0]
    """
    first_power = math.floor(math.log10(low) + 1e-9)
    last_power = math.ceil(math.log10(high) - 1e-9)
    ticks = [m * 10.0**power for power in range(first_power, last_power + 1) for m in (1, 2, 5)]
    begin = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    if end - begin < most:
        return [float(f"{tick:.3g}") for tick in ticks[begin : end + 1]]
    stride = math.ceil((last_power - first_power) / (most - 1))
    count = math.ceil((last_power - first_power) / stride)
    return [10.0 ** (first_power + stride * index) for index in range(count + 1)]


def is_log(lines: Sequence["Line"]) -> bool:
    """Whether a loss is drawn on a log scale.

    All values must be above LOG_LEAST, and those of lines that are not faint must span LOG_FROM.
    """
    values = [y for line in lines for _, y in line.points]
    strong = [y for line in lines if line.style != "faint" for _, y in line.points]
    is_positive = min(values) > LOG_LEAST
    return is_positive and max(strong) >= LOG_FROM * min(strong)


BOX = 1000  # width and height of a plot in the coordinates of its SVG paths
# The colors of the runs in the PNG; page.css has the same for light mode.
COLORS = ("#2563c9", "#c8590c", "#18804e", "#8a46c2", "#b3294e", "#0e7c86")
# By a line's style: how matplotlib draws it in the PNG.
PNG_STYLES: Mapping[str, Mapping[str, Any]] = {
    "faint": {"alpha": 0.3, "linewidth": 1},
    "line": {"linewidth": 2},
    "dots": {"marker": "o", "linestyle": "", "markersize": 5},
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, in the data's units."""

    label: str
    run: int  # the run's index, which chooses the color
    points: Points
    # a CSS class: line, dashed, dots (separate points), or faint (drawn behind the others, without
    # an entry in the legend)
    style: str = "line"

    @property
    def drawn_style(self) -> str:
        """The style, but dots for a line of a single point, which could not be seen."""
        if self.style == "line" and len(self.points) == 1:
            return "dots"
        return self.style


Label = tuple[
    str, float
]  # (text, place in percent: of the width from the left, or height from top)


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line as an SVG path, with its points for the tooltip."""

    label: str
    run: int
    path: str
    style: str  # a CSS class
    # (x in percent, y in percent from the top, the value as text); none for a faint line
    points: list[tuple[float, float, str]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # the step of each point


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot as the template shows it."""

    key: str  # unique on the page
    title: str
    note: str  # unit and legend, below the title
    x_labels: list[Label]
    y_labels: list[Label]
    grid: str  # the SVG path of the horizontal grid lines
    lines: list[DrawnLine] = field(default_factory=list)


def _planned_lines(
    runs: Sequence[RunRecord], planned_bytes: Sequence[float | None]
) -> Iterator[Line]:
    """Yields a horizontal dashed line at each run's planned peak memory, in GiB.

    It spans the steps at which memory was logged, else those of the loss.
    """
    for index, (run, planned) in enumerate(zip(runs, planned_bytes, strict=True)):
        if planned is None:
            continue
        logged = run.series("peak_memory_bytes") or run.series("loss")
        steps = [step for step, _ in logged] or [0.0]
        level = planned / 2**30
        ends = [(steps[0], level), (steps[-1], level)]
        yield Line(f"{run.name} planned", index, ends, "dashed")


def _make_lines(
    runs: Sequence[RunRecord], key: str, scale: float = 1.0, suffix: str = "", style: str = "line"
) -> list[Line]:
    """Makes a line of `scale` times the metric `key` for each run that logged it.

    suffix: Appended to the run's name in the legend.
    """
    series = ((index, run, run.series(key)) for index, run in enumerate(runs))
    return [
        Line(run.name + suffix, index, [(x, scale * y) for x, y in points], style)
        for index, run, points in series
        if points
    ]


_dot_lines = partial(_make_lines, style="dots")


def _smooth_lines(runs: Sequence[RunRecord], key: str, scale: float = 1.0) -> list[Line]:
    """Makes two lines for each run that logged `key`: faint as logged, and smoothed."""
    smoothed = []
    for line in _make_lines(runs, key, scale):
        steps = [step for step, _ in line.points]
        values = smooth([value for _, value in line.points], smoothing_weight(len(steps)))
        smoothed.append(replace(line, points=list(zip(steps, values, strict=True))))
    return _make_lines(runs, key, scale, style="faint") + smoothed


def _loss_lines(runs: Sequence[RunRecord], key: str = "loss", scale: float = 1.0) -> list[Line]:
    """Makes the lines of `_smooth_lines` and, as dots, the held-out values (key eval_KEY)."""
    held_out = _dot_lines(runs, f"eval_{key}", scale, " held-out")
    return _smooth_lines(runs, key, scale) + held_out


def _compared_lines(
    runs: Sequence[RunRecord], key: str, scale: float, suffix: str = "", style: str = "line"
) -> list[Line]:
    """Makes a line of `key` and, as dots, the held-out values, for each run."""
    held_out = _dot_lines(runs, f"eval_{key}", scale, f"{suffix} held-out")
    return _make_lines(runs, key, scale, suffix, style) + held_out


def _answer_lines(runs: Sequence[RunRecord], key: str, scale: float) -> list[Line]:
    """Makes the lines of both answers of a pair: KEY/chosen solid, KEY/rejected dashed."""
    chosen = _compared_lines(runs, f"{key}/chosen", scale, " chosen")
    return chosen + _compared_lines(runs, f"{key}/rejected", scale, " rejected", "dashed")


def _loss_unit(runs: Sequence[RunRecord]) -> str:
    """Names the unit of the runs' losses; several are joined by "or"."""
    units = {
        "nats per trained token"
        if run.rows == "answers"
        else f"of {run.method}, per {ROWS[run.rows].averaged_over}"
        for run in runs
    }
    return " or ".join(sorted(units))


Measure = Callable[[Sequence[RunRecord], str, float], list[Line]]
"""Makes the lines of a plot: (runs, key of the metric, factor of its values) -> lines."""


class Plot(NamedTuple):
    """A plot of a metric."""

    key: str  # unique on the page
    title: str
    note: str  # unit and legend, below the title
    metric: str = ""  # the key in the metrics; empty: `key`
    scale: float = 1.0  # a factor of the metric's values
    lines: Measure = _make_lines
    zero: bool = True  # whether the y axis must include 0
    can_be_log: bool = False  # whether it may have a log scale; `is_log` decides


def make_charts(runs: Sequence[RunRecord], planned_bytes: Sequence[float | None]) -> list[Chart]:
    """Makes all plots for which at least one run has values.

    planned_bytes: Planned peak memory of each run; None for a run without a plan.
    """
    charts = []
    for plot in _list_plots(runs):
        lines = plot.lines(runs, plot.metric or plot.key, plot.scale)
        if plot.key == "peak_memory_bytes":
            lines += _planned_lines(runs, planned_bytes)
        charts.append(_make_chart(plot, lines))
    return [chart for chart in charts if chart is not None]


def _list_plots(runs: Sequence[RunRecord]) -> list[Plot]:
    """Lists the plots of all metrics, in the order of the page."""
    return [
        Plot("loss", "Loss", f"{_loss_unit(runs)}; faint: as logged, strong: smoothed, points: held-out", lines=_loss_lines, zero=False, can_be_log=True),
        Plot("kl", *_name_kl(runs), lines=_loss_lines),
        Plot("cross_entropy", "Cross entropy", "nats per trained token, of the labels; points: held-out", lines=_loss_lines),
        Plot("output_loss", "Loss of the output", "nats per trained token, after the last layer, of early exits", lines=_smooth_lines, zero=False),
        Plot("masked_loss", "Loss of masked tokens", "nats per masked token", lines=_smooth_lines, zero=False),
        *_list_preference_plots(runs),
        *ONLINE_PLOTS,
        Plot("learning_rate", "Learning rate", ""),
        Plot("grad_norm", "Gradient norm", "before clipping", lines=_smooth_lines),
        Plot("tokens_per_second", "Tokens per second", "all ranks, padding not counted"),
        Plot("mfu", "Model FLOP utilization", "%: FLOP per token x tokens per second over the devices' peak, "
        "FLOP being 6N + 12LHQT (4N for LoRA), T the mean length of a token's document, and 2N + 4LHQT for each forward alone", scale=100),
        Plot("peak_memory_bytes", "Peak memory of the first rank", "GiB; dashed: planned", scale=1 / 2**30),
        Plot("data_wait_seconds", "Waiting for data", "seconds between two lines of metrics"),
        Plot("router_aux_loss", "Auxiliary loss of the routers", "a step's mean, before its coefficient; balanced experts have their number a token", zero=False),
        Plot("largest_expert_share", "Busiest expert", "% of its layer's tokens; the layer where it is largest", scale=100),
        Plot("idle_expert_share", "Idle experts", "% of a layer's experts without a token; the layer with most", scale=100),
        Plot("exact_match", "Held-out questions answered exactly", "%", scale=100, lines=_dot_lines),
        *(Plot(key.replace("/", "_"), key.partition("/")[2], "a function of the recipe, over the held-out answers", key, lines=_dot_lines) for key in list_metrics(runs)),
    ]  # fmt: skip


def _list_preference_plots(runs: Sequence[RunRecord]) -> list[Plot]:
    """Lists the plots of training on preferences and classes. The metrics have TRL's names."""
    beta = "beta times the log-probability"
    if any(METHODS[run.method].needs_reference for run in runs):
        against = " above the reference's"
    else:
        against = " per token"
    both = "solid: chosen, dashed: rejected; points: held-out"
    return [
        Plot("reward_margins", "Reward margin", "chosen minus rejected; points: held-out", "rewards/margins", lines=_compared_lines, zero=False),
        Plot("reward_accuracies", "Pairs in order", "% whose chosen answer has the larger reward; points: held-out", "rewards/accuracies", 100, _compared_lines),
        Plot("rewards", "Rewards", f"{beta}{against}; {both}", lines=_answer_lines, zero=False),
        Plot("log_probabilities", "Log-probabilities", f"of an answer{'' if 'above' in against else against}; {both}", "logps", lines=_answer_lines, zero=False),
        Plot("accuracy", "Accuracy", "% of the documents whose class has the largest score; points: held-out", scale=100, lines=_compared_lines),
        Plot("f1_macro", "F1", "the mean over the classes; points: held-out", lines=_compared_lines),
        Plot("nll_loss", "Cross entropy of the chosen answers", "nats per trained token; points: held-out", lines=_compared_lines, zero=False),
    ]  # fmt: skip


ONLINE_PLOTS = (  # of training by rewards
    Plot("reward", "Reward", "mean of the step's completions; faint: as logged, strong: smoothed, points: held-out", lines=_loss_lines, zero=False),
    Plot("groups_without_signal", "Groups without signal", "% of the prompts whose completions all got the same reward", "frac_reward_zero_std", 100),
    Plot("completion_length", "Length of completions", "tokens; points: held-out", "completions/mean_length", lines=_loss_lines),
    Plot("entropy", "Entropy", "nats a token, of what was sampled from"),
    Plot("tool_calls", "Calls of tools", "a completion", "tools/call_frequency"),
    Plot("log_ratio", "Largest raw log-ratio", "of a token between sampler and trainer: 0 in theory", "log_ratio/max"),
    Plot("staleness", "Staleness", "steps from the weights that sampled a token to those that learn from it", "staleness/mean"),
    Plot("clip_ratio", "Ratios outside the bounds", "% of the tokens, from which the loss learns nothing; 0 where each step samples", scale=100),
    Plot("explained_variance", "Explained variance", "% of the returns', by the critic's values at sampling", "value/explained_variance", 100, zero=False),
    Plot("value_loss", "Loss of the critic", "half the squared error of a value", "value/loss"),
    Plot("corrected", "Corrected tokens", "% whose ratio of training to sampling is truncated or masked", "importance_sampling/corrected", 100),
    Plot("sample_size", "Effective sample size", "% of the tokens; all where the model that samples is the one that learns", "ratio/effective_sample_size", 100),
)  # fmt: skip


def _name_kl(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """Returns (title, note) of the plot of `kl`, which means different things by method.

    Several runs with different methods get the title of one of them.
    """
    if any(METHODS[run.method].samples for run in runs):
        return (
            "KL divergence",
            "a token, from the reference or the teacher, estimated on what was sampled",
        )
    rated = next((run.method for run in runs if METHODS[run.method].rows == "ratings"), None)
    if rated is None:
        return "Divergence from the teacher", "nats per trained token; points: held-out"
    return (
        "KL divergence",
        f"{rated}: from the reference, estimated on mismatched answers; points: held-out",
    )


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with ticks, which maps the values from `low` to `high` to places from 0 to 1."""

    ticks: list[float]
    low: float
    high: float
    scale: Callable[[float], float] = float  # log10 on a log scale

    def place(self, value: float) -> float:
        """Returns the place of `value`: 0 at `low`, 1 at `high`."""
        low = self.scale(self.low)
        return (self.scale(value) - low) / (self.scale(self.high) - low)


def _make_chart(plot: Plot, lines: Sequence[Line]) -> Chart | None:
    """Makes a chart whose axes include all `lines`; returns None if they have no points."""
    lines = [replace(line, points=thin(line.points)) for line in lines]
    points = list(chain.from_iterable(line.points for line in lines))
    if not points:
        return None
    x_axis = _make_x_axis([x for x, _ in points])
    y_axis = _make_y_axis([y for _, y in points], plot.zero, plot.can_be_log and is_log(lines))

    def down(y: float) -> float:
        """Returns the place of `y` from the top, because SVG's y axis points down."""
        return 1 - y_axis.place(y)

    return Chart(
        key=plot.key,
        title=plot.title,
        note=plot.note if y_axis.scale is float else f"{plot.note}; log scale",
        x_labels=[(f"{x:,.0f}", 100 * x_axis.place(x)) for x in x_axis.ticks],
        y_labels=[(format_compact(y), 100 * down(y)) for y in y_axis.ticks],
        grid="".join(f"M0 {BOX * down(y):.1f}H{BOX}" for y in y_axis.ticks),
        lines=[_draw_line(line, x_axis.place, down) for line in lines],
    )


def _make_x_axis(steps: Sequence[float]) -> Axis:
    """Makes an axis from the first step to the last, with ticks at round whole steps."""
    low = min(steps)
    high = max(steps)
    if high <= low:
        high = low + 1
    ticks = [x for x in choose_ticks(low, high, most=7) if low <= x <= high and x == int(x)]
    return Axis(ticks, low, high)


def _make_y_axis(values: Sequence[float], zero: bool, log: bool) -> Axis:
    """Makes an axis from the first tick to the last. Ticks include all values, and 0 if `zero`.

    With `log` it has a log scale.
    """
    low = min([*values, 0.0]) if zero else min(values)
    high = max(values)
    if high - low < 1e-3 * abs(high):  # the three digits of a label would show no difference
        low = high
    if log:
        ticks = choose_log_ticks(low, high)
        return Axis(ticks, ticks[0], ticks[-1], math.log10)
    if zero and high <= 0:
        high = 1.0
    ticks = choose_ticks(low, high)
    return Axis(ticks, ticks[0], ticks[-1])


def _draw_line(
    line: Line, across: Callable[[float], float], down: Callable[[float], float]
) -> DrawnLine:
    """Draws a line as an SVG path, with points for the tooltip unless it is faint.

    `across` and `down` map a step and a value to a place from 0 to 1, from the left and the top.
    """
    places = [(across(step), down(value)) for step, value in line.points]
    if line.drawn_style == "dots":
        # A stroke of length 0 with round ends stays a dot when it is stretched.
        path = "".join(f"M{BOX * x:.1f} {BOX * y:.1f}h0" for x, y in places)
    else:
        path = "M" + "L".join(f"{BOX * x:.1f} {BOX * y:.1f}" for x, y in places)
    drawn = DrawnLine(line.label, line.run, path, line.drawn_style)
    if line.style != "faint":
        for (x, y), (step, value) in zip(places, line.points, strict=True):
            drawn.points.append((round(100 * x, 2), round(100 * y, 2), format_compact(value)))
            drawn.steps.append(step)
    return drawn


def draw_loss_png(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes a PNG of all runs' losses to `path`: as logged (faint), smoothed, held-out (dots)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    lines = _loss_lines(runs)
    for line in lines:
        steps, losses = zip(*line.points, strict=True)
        label = None if line.style == "faint" else line.label
        color = COLORS[line.run % len(COLORS)]
        axes.plot(steps, losses, color=color, label=label, **PNG_STYLES[line.drawn_style])
    axes.set(xlabel="step", ylabel=f"loss ({_loss_unit(runs)})")
    if lines:
        axes.legend(frameon=False)
        axes.set_yscale("log" if is_log(lines) else "linear")
    axes.grid(color="#e4e1d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
