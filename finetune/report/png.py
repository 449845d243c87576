"""The loss curve as a PNG, for where no browser is: chats, papers, pull requests."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from finetune.report.run_data import RunRecord
from finetune.report.series import smoothed, smoothing_weight

COLORS = ("#2563c9", "#c8590c", "#18804e", "#8a46c2", "#b3294e", "#0e7c86")


def can_draw() -> bool:
    """Whether matplotlib is at hand; it comes with `pip install "finetune[plots]"`."""
    return find_spec("matplotlib") is not None


def draw_loss(runs: Sequence[RunRecord], path: Path) -> None:
    """Writes the loss of every run, as logged (faint) and smoothed, with the held-out losses as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color, points = COLORS[index % len(COLORS)], run.series("loss")
        steps, losses = [x for x, _ in points], [y for _, y in points]
        axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, smoothed(losses, smoothing_weight(len(losses))), color=color, linewidth=2, label=run.name)
        if held_out := run.series("eval_loss"):
            axes.plot(*zip(*held_out, strict=True), "o", color=color, markersize=5, label=f"{run.name}, held-out")
    axes.set(xlabel="step", ylabel="loss (nats per trained token)")
    axes.grid(color="#e4e1d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
