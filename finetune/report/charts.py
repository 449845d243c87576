"""The plots of a report: as SVG paths in a box of 1000 x 1000 with labels in percent, and the loss as a PNG.

The template stretches the box to any width but not its strokes and text, so that a plot is as legible on a phone as on
a desktop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune.config.methods import METHODS
from finetune.report.run_data import RunRecord, list_metrics
from finetune.units import format_compact

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


BOX = 1000
# What the loss of a method that compares, or samples, is averaged over.
ROWS = {"pairs": "pair", "ratings": "rated answer", "prompts": "token or completion"}
COLORS = ("#2563c9", "#c8590c", "#18804e", "#8a46c2", "#b3294e", "#0e7c86")  # of the PNG; page.css's by light


@dataclass(frozen=True, slots=True)
class Line:
    """One line (or, with `dots`, separate points) of a chart, in the data's units."""

    label: str
    run: int  # which run, for the color
    points: Points
    faint: bool = False  # behind the others and not in the legend
    dots: bool = False
    dashed: bool = False


Label = tuple[str, float]  # a text at an axis, and where, in percent from its start


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
    """Every plot for which some run has a number. `planned_bytes`: each run's planned peak memory, where known."""
    memory = _make_lines(runs, "peak_memory_bytes", lambda value: value / 2**30)
    memory += [
        Line(
            f"{run.name} planned",
            index,
            [(_step_range(run)[0], planned / 2**30), (_step_range(run)[1], planned / 2**30)],
            dashed=True,
        )
        for index, (run, planned) in enumerate(zip(runs, planned_bytes, strict=True))
        if planned is not None
    ]
    found = [
        _make_chart("loss", "Loss", f"{_loss_unit(runs)}; faint: as logged, strong: smoothed, points: held-out", _loss_lines(runs)),
        _make_chart("kl", *_name_kl(runs), _loss_lines(runs, "kl"), zero=True),
        _make_chart("cross_entropy", "Cross entropy", "nats per trained token, of the labels; points: held-out", _loss_lines(runs, "cross_entropy"), zero=True),
        *_preference_charts(runs),
        *_online_charts(runs),
        _make_chart("learning_rate", "Learning rate", "", _make_lines(runs, "learning_rate"), zero=True),
        _make_chart("grad_norm", "Gradient norm", "before clipping", _smooth_lines(runs, "grad_norm"), zero=True),
        _make_chart("tokens_per_second", "Tokens per second", "all ranks, padding not counted", _make_lines(runs, "tokens_per_second"), zero=True),
        _make_chart("mfu", "Model FLOP utilization", "%: (6N + 12LHQT) x tokens per second over the devices' peak, T the mean length of a token's " "document; 4N for LoRA", _make_lines(runs, "mfu", lambda v: 100 * v), zero=True),
        _make_chart("peak_memory_bytes", "Peak memory of the first rank", "GiB; dashed: planned", memory, zero=True),
        _make_chart("data_wait_seconds", "Waiting for data", "seconds between two lines of metrics", _make_lines(runs, "data_wait_seconds"), zero=True),
        _make_chart("router_aux_loss", "Auxiliary loss of the routers", "a step's mean, before its coefficient; balanced experts have their number a token", _make_lines(runs, "router_aux_loss")),
        _make_chart("largest_expert_share", "Busiest expert", "% of its layer's tokens; the layer where it is largest", _make_lines(runs, "largest_expert_share", lambda v: 100 * v), zero=True),
        _make_chart("idle_expert_share", "Idle experts", "% of a layer's experts without a token; the layer with most", _make_lines(runs, "idle_expert_share", lambda v: 100 * v), zero=True),
        _make_chart("exact_match", "Held-out questions answered exactly", "%", _make_lines(runs, "exact_match", lambda v: 100 * v, dots=True), zero=True),
        *(_make_chart(key.replace("/", "_"), key.partition("/")[2], "a function of the recipe, over the held-out answers", _make_lines(runs, key, dots=True), zero=True) for key in list_metrics(runs)),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _step_range(run: RunRecord) -> tuple[float, float]:
    steps = [point[0] for point in run.series("peak_memory_bytes") or run.series("loss")] or [0.0]
    return steps[0], steps[-1]


def _make_lines(
    runs: Sequence[RunRecord], key: str, scale: Callable[[float], float] = lambda value: value, dots: bool = False
) -> list[Line]:
    found = ((index, run, run.series(key)) for index, run in enumerate(runs))
    return [
        Line(run.name, index, [(x, scale(y)) for x, y in points], dots=dots) for index, run, points in found if points
    ]


def _smooth_lines(runs: Sequence[RunRecord], key: str) -> list[Line]:
    raw = _make_lines(runs, key)
    faint = [Line(line.label, line.run, line.points, faint=True) for line in raw]
    strong = []
    for line in raw:
        values = smooth([y for _, y in line.points], smoothing_weight(len(line.points)))
        strong.append(Line(line.label, line.run, list(zip((x for x, _ in line.points), values, strict=True))))
    return faint + strong


def _loss_lines(runs: Sequence[RunRecord], key: str = "loss") -> list[Line]:
    held_out = [
        Line(f"{line.label} held-out", line.run, line.points, dots=True) for line in _make_lines(runs, f"eval_{key}")
    ]
    return _smooth_lines(runs, key) + held_out


def _loss_unit(runs: Sequence[RunRecord]) -> str:
    units = {
        "nats per trained token" if run.rows == "answers" else f"of {run.method}, per {ROWS[run.rows]}" for run in runs
    }
    return " or ".join(sorted(units))


def _preference_charts(runs: Sequence[RunRecord]) -> list[Chart | None]:
    """What preference training shows beside the loss, by TRL's names; points: held-out."""
    beta = "beta times the log-probability"
    against = " above the reference's" if any(METHODS[run.method].needs_reference for run in runs) else " per token"
    both = "solid: chosen, dashed: rejected; points: held-out"
    percent = _preference_lines(runs, ("rewards/accuracies",), 100.0)
    return [
        _make_chart("reward_margins", "Reward margin", "chosen minus rejected; points: held-out", _preference_lines(runs, ("rewards/margins",))),
        _make_chart("reward_accuracies", "Pairs in order", "% whose chosen answer has the larger reward; points: held-out", percent, zero=True),
        _make_chart("rewards", "Rewards", f"{beta}{against}; {both}", _preference_lines(runs, ("rewards/chosen", "rewards/rejected"))),
        _make_chart("log_probabilities", "Log-probabilities", f"of an answer{'' if 'above' in against else against}; {both}", _preference_lines(runs, ("logps/chosen", "logps/rejected"))),
        _make_chart("nll_loss", "Cross entropy of the chosen answers", "nats per trained token; points: held-out", _preference_lines(runs, ("nll_loss",))),
    ]  # fmt: skip


def _online_charts(runs: Sequence[RunRecord]) -> list[Chart | None]:
    """What training by rewards shows beside the loss; points: held-out."""
    whole = "all where the model that samples is the one that learns"
    return [
        _make_chart("reward", "Reward", "mean of the step's completions; faint: as logged, strong: smoothed, points: held-out", _loss_lines(runs, "reward")),
        _make_chart("groups_without_signal", "Groups without signal", "% of the prompts whose completions all got the same reward", _make_lines(runs, "frac_reward_zero_std", lambda v: 100 * v), zero=True),
        _make_chart("completion_length", "Length of completions", "tokens; points: held-out", _loss_lines(runs, "completions/mean_length"), zero=True),
        _make_chart("entropy", "Entropy", "nats a token, of what was sampled from", _make_lines(runs, "entropy"), zero=True),
        _make_chart("tool_calls", "Calls of tools", "a completion", _make_lines(runs, "tools/call_frequency"), zero=True),
        _make_chart("log_ratio", "Largest raw log-ratio", "of a token between sampler and trainer: 0 in theory", _make_lines(runs, "log_ratio/max"), zero=True),
        _make_chart("clip_ratio", "Ratios outside the bounds", "% of the tokens, from which the loss learns nothing; 0 where each step samples", _make_lines(runs, "clip_ratio", lambda v: 100 * v), zero=True),
        _make_chart("corrected", "Corrected tokens", "% whose ratio of training to sampling is truncated or masked", _make_lines(runs, "importance_sampling/corrected", lambda v: 100 * v), zero=True),
        _make_chart("sample_size", "Effective sample size", f"% of the tokens; {whole}", _make_lines(runs, "ratio/effective_sample_size", lambda v: 100 * v), zero=True),
    ]  # fmt: skip


def _name_kl(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """The title and the note of the plot of `kl`, logged by distillation and by methods that learn from ratings."""
    if any(METHODS[run.method].samples for run in runs):
        return "KL divergence", "a token, from the reference or the teacher, estimated on what was sampled"
    rated = next((run.method for run in runs if METHODS[run.method].rows == "ratings"), None)
    if rated is None:
        return "Divergence from the teacher", "nats per trained token; points: held-out"
    return "KL divergence", f"{rated}: from the reference, estimated on mismatched answers; points: held-out"


def _preference_lines(runs: Sequence[RunRecord], keys: Sequence[str], scale: float = 1.0) -> list[Line]:
    """A line for each run and key, dashed from the second key on, with its held-out points."""
    found = []
    for number, key in enumerate(keys):
        side = f" {key.partition('/')[2]}" if len(keys) > 1 else ""
        for line in _make_lines(runs, key, lambda value: scale * value):
            found.append(replace(line, label=line.label + side, dashed=number > 0))
        for line in _make_lines(runs, f"eval_{key}", lambda value: scale * value, dots=True):
            found.append(replace(line, label=f"{line.label}{side} held-out"))
    return found


def _make_chart(key: str, title: str, note: str, lines: Sequence[Line], zero: bool = False) -> Chart | None:
    """The chart with axes around all `lines`, from 0 if `zero`; None where there is nothing to draw."""
    lines = [replace(line, points=thin(line.points)) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    y_low, y_high = min([y for _, y in points] + [0.0] * zero), max(y for _, y in points)
    if y_high - y_low < 1e-3 * abs(y_high):  # flat, in the three digits of a label
        y_low = y_high
    y_ticks = choose_ticks(y_low, y_high if y_high > 0 or not zero else 1.0)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    x_high = x_high if x_high > x_low else x_low + 1
    x_ticks = [x for x in choose_ticks(x_low, x_high, most=7) if x_low <= x <= x_high and x == int(x)]

    def across(x: float) -> float:
        return (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return 1 - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    return Chart(
        key=key,
        title=title,
        note=note,
        x_labels=[(f"{x:,.0f}", 100 * across(x)) for x in x_ticks],
        y_labels=[(format_compact(y), 100 * down(y)) for y in y_ticks],
        grid="".join(f"M0 {BOX * down(y):.1f}H{BOX}" for y in y_ticks),
        lines=[_draw_line(line, across, down) for line in lines],
    )


def _draw_line(line: Line, across: Callable[[float], float], down: Callable[[float], float]) -> DrawnLine:
    placed = [(across(x), down(y), x, y) for x, y in line.points if math.isfinite(y)]
    if line.dots:  # a stroke of no length with round ends stays a dot when stretched
        path = "".join(f"M{BOX * x:.1f} {BOX * y:.1f}h0" for x, y, _, _ in placed)
    else:
        path = "M" + "L".join(f"{BOX * x:.1f} {BOX * y:.1f}" for x, y, _, _ in placed)
    style = "dots" if line.dots else "faint" if line.faint else "dashed" if line.dashed else "line"
    points = (
        []
        if line.faint
        else [(round(100 * x, 2), round(100 * y, 2), format_compact(value)) for x, y, _, value in placed]
    )
    return DrawnLine(line.label, line.run, path, style, points, [step for _, _, step, _ in placed] if points else [])


def draw_loss_png(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes the loss of every run to `path`: as logged (faint), smoothed, and held-out (points)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color, points = COLORS[index % len(COLORS)], run.series("loss")
        steps, losses = [x for x, _ in points], [y for _, y in points]
        axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(losses, smoothing_weight(len(losses))), color=color, linewidth=2, label=run.name)
        if held_out := run.series("eval_loss"):
            axes.plot(*zip(*held_out, strict=True), "o", color=color, markersize=5, label=f"{run.name}, held-out")
    axes.set(xlabel="step", ylabel=f"loss ({_loss_unit(runs)})")
    axes.grid(color="#e4e1d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
