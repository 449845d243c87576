"""The plots of a report as SVG paths, and the loss as a PNG.

Paths lie in a box of 1000 x 1000, labels are placed in percent of it. The template stretches the
box to any width, but not strokes and text: a plot is as legible on a phone as on a desktop.
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
    """Keeps at most `most` points: the lowest and the highest of every stretch, so that spikes stay."""
    # larger values would have infinite differences
    finite = [point for point in points if abs(point[1]) < 1e300]
    if len(finite) <= most:
        return finite
    stretch = math.ceil(len(finite) / (most // 2))
    kept = []
    for start in range(0, len(finite), stretch):
        part = finite[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Chooses at most `most` round numbers that reach from `low` or below to `high` or above.

    >>> choose_ticks(0.0, 9.3, most=6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low = low - pad
        high = high + pad
    rough = (high - low) / (most - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    for step in (m * magnitude for m in (1, 2, 2.5, 5, 10, 20)):
        first = math.floor(low / step + 1e-9)
        last = math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            return [round(index * step, 12) for index in range(first, last + 1)]
    return [low, high]


# A loss is drawn on a log scale where its highest value is this many times its lowest one.
LOG_FROM = 10.0
LOG_LEAST = 1e-30  # a log scale cannot show smaller values


def choose_log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Chooses at most `most` round numbers for a log scale, from `low` or below to `high` or above.

    >>> choose_log_ticks(0.02, 4.0), choose_log_ticks(1e-7, 4.0)
    ([0.01, 0.1, 1.0, 10.0], [1e-07, 1e-05, 0.001, 0.1, 10.0])
    >>> choose_log_ticks(0.3, 4.0)
    [0.2, 0.5, 1.0, 2.0, 5.0]
    """
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    within = [m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5)]
    begin = max(index for index, tick in enumerate(within) if tick <= low * (1 + 1e-9))
    end = min(index for index, tick in enumerate(within) if tick >= high * (1 - 1e-9))
    if end - begin < most:
        return [float(f"{tick:.3g}") for tick in within[begin : end + 1]]
    stride = math.ceil((last - first) / (most - 1))
    count = math.ceil((last - first) / stride)
    return [10.0 ** (first + stride * index) for index in range(count + 1)]


def is_log(lines: Sequence["Line"]) -> bool:
    """Whether a loss is drawn on a log scale: it is positive, and its strong lines span LOG_FROM."""
    values = [y for line in lines for _, y in line.points]
    strong = [y for line in lines if not line.faint for _, y in line.points]
    is_positive = min(values) > LOG_LEAST
    return is_positive and max(strong) >= LOG_FROM * min(strong)


BOX = 1000
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


Label = tuple[str, float]  # (text, place along the axis in percent)


@dataclass(frozen=True, slots=True)
class DrawnLine:
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
    lines: list[DrawnLine] = field(default_factory=list)


def make_charts(runs: Sequence[RunRecord], planned_bytes: Sequence[float | None]) -> list[Chart]:
    """Makes every plot for which some run has a number.

    planned_bytes: Each run's planned peak memory; None where it has no plan.
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
        _make_chart("mfu", "Model FLOP utilization", "%: (6N + 12LHQT) x tokens per second over "
        "the devices' peak, T the mean length of a token's " "document; 4N for LoRA", _make_lines(runs, "mfu", 100), zero=True),
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
    """A level dashed line at each run's planned peak memory, in GiB, over all of its steps."""
    for index, (run, planned) in enumerate(zip(runs, planned_bytes, strict=True)):
        if planned is None:
            continue
        measured = run.series("peak_memory_bytes") or run.series("loss")
        steps = [step for step, _ in measured] or [0.0]
        level = planned / 2**30
        ends = [(steps[0], level), (steps[-1], level)]
        yield Line(f"{run.name} planned", index, ends, dashed=True)


def _make_lines(
    runs: Sequence[RunRecord], key: str, scale: float = 1.0, dots: bool = False
) -> list[Line]:
    series = ((index, run, run.series(key)) for index, run in enumerate(runs))
    return [
        Line(run.name, index, [(x, scale * y) for x, y in points], dots=dots)
        for index, run, points in series
        if points
    ]


def _smooth_lines(runs: Sequence[RunRecord], key: str) -> list[Line]:
    raw = _make_lines(runs, key)
    faint = [Line(line.label, line.run, line.points, faint=True) for line in raw]
    strong = []
    for line in raw:
        values = smooth([y for _, y in line.points], smoothing_weight(len(line.points)))
        strong.append(
            Line(line.label, line.run, list(zip((x for x, _ in line.points), values, strict=True)))
        )
    return faint + strong


def _loss_lines(runs: Sequence[RunRecord], key: str = "loss") -> list[Line]:
    held_out = [
        Line(f"{line.label} held-out", line.run, line.points, dots=True)
        for line in _make_lines(runs, f"eval_{key}")
    ]
    return _smooth_lines(runs, key) + held_out


def _loss_unit(runs: Sequence[RunRecord]) -> str:
    units = {
        "nats per trained token"
        if run.rows == "answers"
        else f"of {run.method}, per {ROWS[run.rows].averaged_over}"
        for run in runs
    }
    return " or ".join(sorted(units))


def _preference_charts(runs: Sequence[RunRecord]) -> list[Chart | None]:
    """Makes the charts of preference training beside the loss, by TRL's names. `points`: held-out."""
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
    """Makes the charts of training by rewards beside the loss. `points`: held-out."""
    whole = "all where the model that samples is the one that learns"
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
        _make_chart("sample_size", "Effective sample size", f"% of the tokens; {whole}", _make_lines(runs, "ratio/effective_sample_size", 100), zero=True),
    ]  # fmt: skip


def _name_kl(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """The title and the note of the plot of `kl`, by the methods of the runs."""
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
    """A line and held-out points for each run and key; lines of the second key on are dashed."""
    lines = []
    for number, key in enumerate(keys):
        side = f" {key.partition('/')[2]}" if len(keys) > 1 else ""
        for line in _make_lines(runs, key, scale):
            lines.append(replace(line, label=line.label + side, dashed=number > 0))
        for line in _make_lines(runs, f"eval_{key}", scale, dots=True):
            lines.append(replace(line, label=f"{line.label}{side} held-out"))
    return lines


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis between two ends, with its ticks."""

    ticks: list[float]
    low: float
    high: float
    scale: Callable[[float], float] = float  # log10 on a log scale

    def place(self, value: float) -> float:
        """The place of `value`: 0 at `low`, 1 at `high`."""
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
    """Makes one chart with axes around all `lines`; None where there is nothing to draw.

    Args:
        zero: The y axis includes 0.
        can_be_log: The y axis has a log scale where `is_log` says so.
    """
    lines = [replace(line, points=thin(line.points)) for line in lines]
    points = list(chain.from_iterable(line.points for line in lines))
    if not points:
        return None
    x_axis = _make_x_axis([x for x, _ in points])
    y_axis = _make_y_axis([y for _, y in points], zero, can_be_log and is_log(lines))

    def down(y: float) -> float:
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
    """Makes an axis from the first step to the last, with ticks at round steps."""
    low = min(steps)
    high = max(steps)
    if high <= low:
        high = low + 1
    ticks = [x for x in choose_ticks(low, high, most=7) if low <= x <= high and x == int(x)]
    return Axis(ticks, low, high)


def _make_y_axis(values: Sequence[float], zero: bool, log: bool) -> Axis:
    """Makes an axis between two round numbers that include all values, and 0 if `zero`."""
    low = min([*values, 0.0]) if zero else min(values)
    high = max(values)
    if high - low < 1e-3 * abs(high):  # the three digits of a label would show no difference
        low = high
    if log:
        ticks = choose_log_ticks(low, high)
        return Axis(ticks, ticks[0], ticks[-1], math.log10)
    ticks = choose_ticks(low, high if high > 0 or not zero else 1.0)
    return Axis(ticks, ticks[0], ticks[-1])


def _draw_line(
    line: Line, across: Callable[[float], float], down: Callable[[float], float]
) -> DrawnLine:
    placed = [(across(x), down(y), x, y) for x, y in line.points if math.isfinite(y)]
    if line.dots:  # a stroke of length 0 with round ends stays a dot when the box is stretched
        path = "".join(f"M{BOX * x:.1f} {BOX * y:.1f}h0" for x, y, _, _ in placed)
    else:
        path = "M" + "L".join(f"{BOX * x:.1f} {BOX * y:.1f}" for x, y, _, _ in placed)
    if line.faint:
        return DrawnLine(line.label, line.run, path, _style(line), [], [])
    points = [
        (round(100 * x, 2), round(100 * y, 2), format_compact(value)) for x, y, _, value in placed
    ]
    return DrawnLine(
        line.label, line.run, path, _style(line), points, [step for _, _, step, _ in placed]
    )


def _style(line: Line) -> str:
    """The CSS class of a line."""
    if line.dots:
        return "dots"
    if line.faint:
        return "faint"
    return "dashed" if line.dashed else "line"


def draw_loss_png(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes a PNG of every run's loss to `path`: as logged (faint), smoothed, held-out (points)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        points = run.series("loss")
        steps = [x for x, _ in points]
        losses = [y for _, y in points]
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
