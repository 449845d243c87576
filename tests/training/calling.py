"""What tests of tools and of environments share: a model that calls tools, its short online runs, and TRL's trainer beside them."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune.config.reader import RECIPES
from tests.training.layouts import train_all, write_config

STEPS, PROMPTS, GENERATIONS, MOST = 3, 6, 4, 60
Layouts = list[tuple[int, str]]  # ranks, and the name of a layout
EVERY: Layouts = [(1, "single"), (2, "full_shard"), (2, "ddp"), (2, "tp")]
QUICK = EVERY[:2]


def teach(folder: Path) -> None:
    """Leaves in `folder` the export of a model that has seen the quickstart of tools for some steps."""
    keys = [
        "max_steps=150",
        f"output_dir={folder / 'sft'}",
        f"dataset_cache_dir={folder / 'cache'}",
    ]
    sft = RECIPES / "quickstart_tools_sft.yaml"
    train_all(folder, [(sft, write_config(folder, "single"), keys)], ranks=1)


def write_short_run(path: Path, caller: Path, **own: Any) -> Path:
    """The recipe of a few online steps of the model that `caller` holds."""
    keys = {
        "method": "grpo",
        "model_name_or_path": str(caller / "sft" / "export"),
        "dataset_cache_dir": str(path.parent / "cache"),
        "max_tool_calling_iterations": 1,
        "num_generations": GENERATIONS,
        "max_completion_length": MOST,
        "log_completions": PROMPTS,
        "per_device_generation_batch_size": 5,
        "global_batch_size": PROMPTS,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
    }
    path.write_text(yaml.safe_dump(keys | own))
    return path


def train_layouts(folder: Path, recipe: Path, layouts: Layouts) -> Callable[[int, str], Path]:
    """Trains the recipe under each; (ranks, layout) -> the run's folder."""
    configs = {layout: write_config(folder, layout) for layout in ("single", "ddp", "full_shard")}
    configs["tp"] = write_config(folder, "full_shard", sizes={"tp_size": 2})
    for ranks in sorted({each[0] for each in layouts}):
        listed = [
            (recipe, configs[layout], [f"output_dir={folder}/{count}-{layout}"])
            for count, layout in layouts
            if count == ranks
        ]
        train_all(folder, listed, ranks=ranks)
    return lambda ranks, layout: folder / f"{ranks}-{layout}"


def trl_arguments(output: Path, completions: int, **own: Any) -> Any:
    """The arguments of TRL's GRPOTrainer for such a run."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=completions,
        num_generations=GENERATIONS,
        max_completion_length=MOST,
        max_tool_calling_iterations=1,
        loss_type="dapo",
        **own,
    )


def sample_again(
    trainer: Any, lines: Sequence[dict[str, Any]], masks: Sequence[list[int]]
) -> tuple[list[list[list[int]]], list[Any]]:
    """Has TRL's trainer sample what a run has sampled, by its `lines` and tool `masks`.

    Returns (the turns of each completion, what the trainer will be asked in each turn).
    """
    turns = []
    for line, mask in zip(lines, masks, strict=True):
        pairs = groupby(zip(mask, line["token_ids"], strict=True), lambda pair: pair[0])
        turns.append([[token for _, token in each] for by, each in pairs if by])
    given: list[Any] = []

    def sample(prompts: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        turn = len(given)
        given.append(prompts)
        return [each[turn] for each in turns if len(each) > turn], None

    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_single_turn = sample
    return turns, given


def pad(rows: list[list[int]], fill: int = 0, *, left: bool = False) -> torch.Tensor:
    longest = max(map(len, rows))
    filled = []
    for row in rows:
        rest = [fill] * (longest - len(row))
        filled.append(rest + row if left else row + rest)
    return torch.tensor(filled)


def check_first_step(first: dict[str, Any], trainer: Any, batch: dict[str, Any]) -> None:
    """The loss and the gradient norm of a run's first step are TRL's of the same completions."""
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    norm = torch.stack(
        [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    ).norm()
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
