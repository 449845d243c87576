"""What layouts.py measures, as a table and as a plot."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One layout on one number of ranks. Bytes are those of the rank that holds most."""

    layout: str
    ranks: int
    device: str
    parameters: int  # of the whole model, counted
    parameter_bytes: int  # between steps
    gathered_bytes: int  # parameters that stand whole between forward and backward
    gradient_bytes: int  # when the optimizer steps
    optimizer_bytes: int
    peak_memory_bytes: int  # CPU: the growth of the resident set over the imports; CUDA: allocated
    tokens_per_second: float  # over all ranks
    calls: dict[str, int]  # of one step on rank 0, by kind
    planned_calls: dict[str, int]  # by finetune/plan/speed.py
    planned_bytes: dict[str, int]
    # the same; of each call the larger of what goes in and what comes out
    communicated_bytes: dict[str, int]
    activation_bytes: int  # kept from the forward to the backward of a micro-batch


def table(results: list[Measured]) -> str:
    """The results as Markdown."""

    def mib(count: int) -> str:
        return f"{count / 2**20:.1f}"

    lines = [
        "| Ranks | Layout | Parameters | Gradients | Optimizer | State, of the whole | Gathered "
        "at backward | Activations | Peak memory | Tokens/s | Calls a step (MiB) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        state = r.parameter_bytes + r.gradient_bytes + r.optimizer_bytes
        moved = {kind: mib(count) for kind, count in r.communicated_bytes.items()}
        calls = (
            ", ".join(f"{count} {kind} ({moved[kind]})" for kind, count in sorted(r.calls.items()))
            or "none"
        )
        lines.append(
            f"| {r.ranks} | {r.layout} | {mib(r.parameter_bytes)} | {mib(r.gradient_bytes)} | "
            f"{mib(r.optimizer_bytes)} | {state / (16 * r.parameters):.0%} | "
            f"{mib(r.gathered_bytes)} | {mib(r.activation_bytes)} | {mib(r.peak_memory_bytes)} | "
            f"{r.tokens_per_second:,.0f} | {calls} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: list[Measured], path: Path) -> None:
    """State per rank as stacked bars, and tokens per second, of the largest number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    most = max(r.ranks for r in results)
    shown = [r for r in results if r.ranks == most or r.layout == "single"][::-1]
    names = [r.layout for r in shown]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 0.45 * len(shown) + 1.6), sharey=True)
    start = [0.0] * len(shown)
    for part, label in (
        ("parameter", "parameters"),
        ("gradient", "gradients"),
        ("optimizer", "optimizer state"),
    ):
        sizes = [getattr(r, f"{part}_bytes") / 2**20 for r in shown]
        left.barh(names, sizes, left=start, label=label)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    left.set_xlabel("state per rank, MiB")
    left.legend(loc="lower right")
    right.barh(names, [r.tokens_per_second for r in shown], color="tab:gray")
    right.set_xlabel("tokens per second, all ranks together")
    figure.suptitle(
        f"{shown[0].parameters / 1e6:.1f}M parameters, fp32, {most} ranks on {shown[0].device}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
