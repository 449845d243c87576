"""Run folders as a run leaves them, for the report's tests."""

import json
import math
from pathlib import Path

import yaml

STEPS = 60


PAIRS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def _compare(step: int) -> dict[str, float]:
    """The metrics of preference training at a step: margins that grow, both answers less probable than before."""
    margin, chosen = 2 - 2 * math.exp(-step / 20) + 0.1 * math.sin(step), -0.01 * step
    accuracy = 0.5 + 0.5 * min(1.0, step / 40)
    values = (
        chosen,
        chosen - margin,
        margin,
        accuracy,
        -20 + 10 * chosen,
        -21 + 10 * (chosen - margin),
    )
    return dict(zip(PAIRS, values, strict=True)) | {"kl": 0.02 * step, "nll_loss": 1 / (1 + step)}


def make_run(
    folder: Path,
    recipe: Path,
    *,
    learning_rate: float = 1e-3,
    ranks: int = 2,
    diverges: bool = False,
    is_preference: bool = False,
) -> Path:
    """A finished run of STEPS steps on CPU ranks, with every file that DESIGN names but weights."""
    from finetune.config.reader import read_recipe, write_recipe

    folder.mkdir(parents=True)
    lines: list[dict[str, object]] = [
        {"step": 0, "epoch": 0.0, "eval_loss": 5.5},
        {"step": 0, "exact_match": 0.0},
    ]
    compared = (
        [{}] * (STEPS + 1) if not is_preference else [_compare(step) for step in range(STEPS + 1)]
    )
    lines[0] |= {f"eval_{name}": value for name, value in compared[0].items()}
    for step in range(1, STEPS + 1):
        lines.append(
            {
                "step": step,
                "epoch": step / 30,
                "loss": (9.0 * step if diverges else 0.4 + 5 * math.exp(-step / 15))
                + 0.1 * math.sin(step),
                "learning_rate": learning_rate * (1 - step / STEPS),
                "grad_norm": 1 + math.cos(step) / 3,
                "tokens": step * 512,
                "trained_tokens": step * 200,
                "tokens_per_second": 5000 + 100 * math.sin(step),
                "mfu": 0.4,
                "peak_memory_bytes": 2**30 + step,
                "data_wait_seconds": 0.01,
                **compared[step],
            }
        )
    held_out = {f"eval_{name}": value for name, value in compared[STEPS].items()}
    lines += [
        {"step": STEPS, "epoch": 2.0, "eval_loss": 0.45, **held_out},
        {"step": STEPS, "exact_match": 0.5},
    ]
    _write_lines(folder / "metrics.jsonl", lines)
    asked = [("What is <b>two</b> & three?", "5"), ("Six?", "6")]
    _write_lines(
        folder / "samples.jsonl",
        [
            {
                "step": step,
                "prompt": prompt,
                "answer": ("" if step == 0 else "5") if expected else f"Once, at {step}.",
                "expected": expected,
            }
            for step in (0, STEPS)
            for prompt, expected in [*asked, ("Tell me a story.", "")]
        ],
    )
    write_recipe(
        read_recipe(str(recipe), [f"learning_rate={learning_rate}"]), folder / "recipe.yaml"
    )
    sharding = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2},
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(sharding))
    _write(
        folder / "environment.json",
        {"ranks": ranks, "device": "CPU, 2 cores", "layout": "fsdp2", "packages": {"torch": "2"}},
    )
    finding = {
        "severity": "warning",
        "rows": 3,
        "of": 24,
        "what": "are duplicates",
        "where": ["chat.jsonl:7"],
    }
    source = {"path": "data/chat.jsonl", "rows_read": 2417, "examples": 2400, "tokens": 9000}
    report = {"rows": 24, "sources": [source], "lengths": {"median": 31}, "findings": [finding]}
    if is_preference:
        none = {"desirable": 0, "undesirable": 0}
        report |= {"pairs": 15, **none, "held_out_groups": {"pairs": 5, **none}}
    _write(folder / "data_report.json", report)
    manifest = folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    _write(
        manifest,
        {
            "step": STEPS,
            "files": {"model/a": {"size": 3_000_000}, "optimizer/b": {"size": 6_000_000}},
        },
    )
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def _write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
