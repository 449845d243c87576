"""Draws a report's plots as SVG paths, and the loss as a PNG.

SVG paths have coordinates from 0 to 1000 across and down; places of labels are percents of the
plot's width or height. The template stretches the paths to any width, but not their strokes and the
text, so that a plot is as legible on a phone as on a desktop.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

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
    strong = [y for line in lines if not line.faint for _, y in line.points]
    is_positive = min(values) > LOG_LEAST
    return is_positive and max(strong) >= LOG_FROM * min(strong)


BOX = 1000  # width and height of a plot in the coordinates of its SVG paths
# The colors of the runs in the PNG; page.css has the same for light mode.
COLORS = ("#2563c9", "#c8590c", "#18804e", "#8a46c2", "#b3294e", "#0e7c86")


@dataclass(frozen=True, slots=True)
class Line:
    """One line (or, with `dots`, separate points) of a chart, in the data's units."""

    label: str
    run: int  # the run's index, which chooses the color
    points: Points
    faint: bool = False  # drawn behind the others, without an entry in the legend
    dots: bool = False
    dashed: bool = False


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
    points: list[tuple[float, float, str]]
    steps: list[float]  # the step of each point


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


def make_charts(runs: Sequence[RunRecord], planned_bytes: Sequence[float | None]) -> list[Chart]:
    """Makes all plots for which at least one run has values.

    planned_bytes: Planned peak memory of each run; None for a run without a plan.
    """
    memory = _make_lines(runs, "peak_memory_bytes", 1 / 2**30)
    memory += _planned_lines(runs, planned_bytes)
    charts = [
        _make_chart("loss", "Loss", f"{_loss_unit(runs)}; faint: as logged, strong: smoothed, points: held-out", _loss_lines(runs), can_be_log=True),
        _make_chart("kl", *_name_kl(runs), _loss_lines(runs, "kl"), zero=True),
        _make_chart("cross_entropy", "Cross entropy", "nats per trained token, of the labels; points: held-out", _loss_lines(runs, "cross_entropy"), zero=True),
        _make_chart("output_loss", "Loss of the output", "nats per trained token, after the last layer, of early exits", _smooth_lines(runs, "output_loss")),
        _make_chart("masked_loss", "Loss of masked tokens", "nats per masked token", _smooth_lines(runs, "masked_loss")),
        *_preference_charts(runs),
        *_online_charts(runs),
        _make_chart("learning_rate", "Learning rate", "", _make_lines(runs, "learning_rate"), zero=True),
        _make_chart("grad_norm", "Gradient norm", "before clipping", _smooth_lines(runs, "grad_norm"), zero=True),
        _make_chart("tokens_per_second", "Tokens per second", "all ranks, padding not counted", _make_lines(runs, "tokens_per_second"), zero=True),
        _make_chart("mfu", "Model FLOP utilization", "%: FLOP per token x tokens per second over the devices' peak, "
        "FLOP being 6N + 12LHQT (4N for LoRA), T the mean length of a token's document, and 2N + 4LHQT for each forward alone", _make_lines(runs, "mfu", 100), zero=True),
        _make_chart("peak_memory_bytes", "Peak memory of the first rank", "GiB; dashed: planned", memory, zero=True),
        _make_chart("data_wait_seconds", "Waiting for data", "seconds between two lines of metrics", _make_lines(runs, "data_wait_seconds"), zero=True),
        _make_chart("router_aux_loss", "Auxiliary loss of the routers", "a step's mean, before its coefficient; balanced experts have their number a token", _make_lines(runs, "router_aux_loss")),
        _make_chart("largest_expert_share", "Busiest expert", "% of its layer's tokens; the layer where it is largest", _make_lines(runs, "largest_expert_share", 100), zero=True),
        _make_chart("idle_expert_share", "Idle experts", "% of a layer's experts without a token; the layer with most", _make_lines(runs, "idle_expert_share", 100), zero=True),
        _make_chart("exact_match", "Held-out questions answered exactly", "%", _make_lines(runs, "exact_match", 100, dots=True), zero=True),
        *(_make_chart(key.replace("/", "_"), key.partition("/")[2], "a function of the recipe, over the held-out answers", _make_lines(runs, key, dots=True), zero=True) for key in list_metrics(runs)),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


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
        yield Line(f"{run.name} planned", index, ends, dashed=True)


def _make_lines(
    runs: Sequence[RunRecord], key: str, scale: float = 1.0, dots: bool = False
) -> list[Line]:
    """Makes a line of `scale` times the metric `key` for each run that logged it."""
    series = ((index, run, run.series(key)) for index, run in enumerate(runs))
    return [
        Line(run.name, index, [(x, scale * y) for x, y in points], dots=dots)
        for index, run, points in series
        if points
    ]


def _smooth_lines(runs: Sequence[RunRecord], key: str) -> list[Line]:
    """Makes two lines for each run that logged `key`: faint as logged, and smoothed."""
    logged = _make_lines(runs, key)
    faint = [Line(line.label, line.run, line.points, faint=True) for line in logged]
    smoothed = []
    for line in logged:
        steps = [step for step, _ in line.points]
        values = smooth([value for _, value in line.points], smoothing_weight(len(steps)))
        smoothed.append(Line(line.label, line.run, list(zip(steps, values, strict=True))))
    return faint + smoothed


def _loss_lines(runs: Sequence[RunRecord], key: str = "loss") -> list[Line]:
    """Makes the lines of `_smooth_lines` and, as dots, the held-out values (key eval_KEY)."""
    held_out = [
        Line(f"{line.label} held-out", line.run, line.points, dots=True)
        for line in _make_lines(runs, f"eval_{key}")
    ]
    return _smooth_lines(runs, key) + held_out


def _loss_unit(runs: Sequence[RunRecord]) -> str:
    """Names the unit of the runs' losses; several are joined by "or"."""
    units = {
        "nats per trained token"
        if run.rows == "answers"
        else f"of {run.method}, per {ROWS[run.rows].averaged_over}"
        for run in runs
    }
    return " or ".join(sorted(units))


def _preference_charts(runs: Sequence[RunRecord]) -> list[Chart | None]:
    """Makes the charts of training on preferences and classes, except the loss.

    None stands for a chart of which no run has values. The metrics have TRL's names.
    """
    beta = "beta times the log-probability"
    if any(METHODS[run.method].needs_reference for run in runs):
        against = " above the reference's"
    else:
        against = " per token"
    both = "solid: chosen, dashed: rejected; points: held-out"
    percent = _preference_lines(runs, ("rewards/accuracies",), 100.0)
    return [
        _make_chart("reward_margins", "Reward margin", "chosen minus rejected; points: held-out", _preference_lines(runs, ("rewards/margins",))),
        _make_chart("reward_accuracies", "Pairs in order", "% whose chosen answer has the larger reward; points: held-out", percent, zero=True),
        _make_chart("rewards", "Rewards", f"{beta}{against}; {both}", _preference_lines(runs, ("rewards/chosen", "rewards/rejected"))),
        _make_chart("log_probabilities", "Log-probabilities", f"of an answer{'' if 'above' in against else against}; {both}", _preference_lines(runs, ("logps/chosen", "logps/rejected"))),
        _make_chart("accuracy", "Accuracy", "% of the documents whose class has the largest score; points: held-out", _preference_lines(runs, ("accuracy",), 100.0), zero=True),
        _make_chart("f1_macro", "F1", "the mean over the classes; points: held-out", _preference_lines(runs, ("f1_macro",)), zero=True),
        _make_chart("nll_loss", "Cross entropy of the chosen answers", "nats per trained token; points: held-out", _preference_lines(runs, ("nll_loss",))),
    ]  # fmt: skip


def _online_charts(runs: Sequence[RunRecord]) -> list[Chart | None]:
    """Makes the charts of training by rewards, except the loss; None for one without values."""
    ideal = "all where the model that samples is the one that learns"
    return [
        _make_chart("reward", "Reward", "mean of the step's completions; faint: as logged, strong: smoothed, points: held-out", _loss_lines(runs, "reward")),
        _make_chart("groups_without_signal", "Groups without signal", "% of the prompts whose completions all got the same reward", _make_lines(runs, "frac_reward_zero_std", 100), zero=True),
        _make_chart("completion_length", "Length of completions", "tokens; points: held-out", _loss_lines(runs, "completions/mean_length"), zero=True),
        _make_chart("entropy", "Entropy", "nats a token, of what was sampled from", _make_lines(runs, "entropy"), zero=True),
        _make_chart("tool_calls", "Calls of tools", "a completion", _make_lines(runs, "tools/call_frequency"), zero=True),
        _make_chart("log_ratio", "Largest raw log-ratio", "of a token between sampler and trainer: 0 in theory", _make_lines(runs, "log_ratio/max"), zero=True),
        _make_chart("staleness", "Staleness", "steps from the weights that sampled a token to those that learn from it", _make_lines(runs, "staleness/mean"), zero=True),
        _make_chart("clip_ratio", "Ratios outside the bounds", "% of the tokens, from which the loss learns nothing; 0 where each step samples", _make_lines(runs, "clip_ratio", 100), zero=True),
        _make_chart("explained_variance", "Explained variance", "% of the returns', by the critic's values at sampling", _make_lines(runs, "value/explained_variance", 100)),
        _make_chart("value_loss", "Loss of the critic", "half the squared error of a value", _make_lines(runs, "value/loss"), zero=True),
        _make_chart("corrected", "Corrected tokens", "% whose ratio of training to sampling is truncated or masked", _make_lines(runs, "importance_sampling/corrected", 100), zero=True),
        _make_chart("sample_size", "Effective sample size", f"% of the tokens; {ideal}", _make_lines(runs, "ratio/effective_sample_size", 100), zero=True),
    ]  # fmt: skip


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


def _preference_lines(
    runs: Sequence[RunRecord], keys: Sequence[str], scale: float = 1.0
) -> list[Line]:
    """Makes a line and held-out dots for each run and metric key.

    With several keys, such as rewards/chosen and rewards/rejected, the labels name the part behind
    the slash, and only the lines of the first key are solid.
    """
    lines = []
    for index, key in enumerate(keys):
        _, _, answer = key.partition("/")
        suffix = f" {answer}" if len(keys) > 1 else ""
        for line in _make_lines(runs, key, scale):
            lines.append(replace(line, label=line.label + suffix, dashed=index > 0))
        for line in _make_lines(runs, f"eval_{key}", scale, dots=True):
            lines.append(replace(line, label=f"{line.label}{suffix} held-out"))
    return lines


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


def _make_chart(
    key: str,
    title: str,
    note: str,
    lines: Sequence[Line],
    zero: bool = False,
    can_be_log: bool = False,
) -> Chart | None:
    """Makes a chart whose axes include all `lines`; returns None if they have no points.

    Args:
        key: Names the chart; unique on the page.
        title: What the chart shows.
        note: Its unit, and what its kinds of lines mean.
        lines: The lines to draw.
        zero: Whether the y axis must include 0.
        can_be_log: Whether the y axis may have a log scale; `is_log` decides.
    """
    lines = [replace(line, points=thin(line.points)) for line in lines]
    points = list(chain.from_iterable(line.points for line in lines))
    if not points:
        return None
    x_axis = _make_x_axis([x for x, _ in points])
    y_axis = _make_y_axis([y for _, y in points], zero, can_be_log and is_log(lines))

    def down(y: float) -> float:
        """Returns the place of `y` from the top, because SVG's y axis points down."""
        return 1 - y_axis.place(y)

    return Chart(
        key=key,
        title=title,
        note=note if y_axis.scale is float else f"{note}; log scale",
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
    finite = [(step, value) for step, value in line.points if math.isfinite(value)]
    places = [(across(step), down(value)) for step, value in finite]
    if line.dots:  # a stroke of length 0 with round ends stays a dot when the plot is stretched
        path = "".join(f"M{BOX * x:.1f} {BOX * y:.1f}h0" for x, y in places)
    else:
        path = "M" + "L".join(f"{BOX * x:.1f} {BOX * y:.1f}" for x, y in places)
    if line.faint:
        return DrawnLine(line.label, line.run, path, _choose_style(line), points=[], steps=[])
    points = [
        (round(100 * x, 2), round(100 * y, 2), format_compact(value))
        for (x, y), (_, value) in zip(places, finite, strict=True)
    ]
    steps = [step for step, _ in finite]
    return DrawnLine(line.label, line.run, path, _choose_style(line), points, steps)


def _choose_style(line: Line) -> str:
    """Returns the CSS class of a line, as page.css has it."""
    if line.dots:
        return "dots"
    if line.faint:
        return "faint"
    return "dashed" if line.dashed else "line"


def draw_loss_png(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes a PNG of all runs' losses to `path`: as logged (faint), smoothed, held-out (dots)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        points = run.series("loss")
        steps = [step for step, _ in points]
        losses = [loss for _, loss in points]
        axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1)
        axes.plot(
            steps,
            smooth(losses, smoothing_weight(len(losses))),
            color=color,
            linewidth=2,
            label=run.name,
        )
        if held_out := run.series("eval_loss"):
            axes.plot(
                *zip(*held_out, strict=True),
                "o",
                color=color,
                markersize=5,
                label=f"{run.name}, held-out",
            )
    axes.set(xlabel="step", ylabel=f"loss ({_loss_unit(runs)})")
    if (lines := _loss_lines(runs)) and is_log(lines):
        axes.set_yscale("log")
    axes.grid(color="#e4e1d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
