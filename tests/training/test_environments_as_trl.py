"""TRL's GRPOTrainer with the environments of a run, where its model samples what the run has sampled: prompts, tools, mask, rewards, loss."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

from finetune.config.reader import read_recipe
from finetune.data.tokenizer import load_tokenizer
from finetune.data.tool_calls import make_tool_turns
from tests.training.calling import (
    GENERATIONS,
    PROMPTS,
    check_first_step,
    pad,
    sample_again,
    trl_arguments,
)
from tests.training.layouts import steps_of
from tests.training.test_online import lines_of
from tests.training.test_online_environments import recipe, runs

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
__all__ = ["recipe", "runs"]  # the fixtures


def test_trl_meets_the_same_worlds_and_pays_the_same(
    recipe: Path, runs: Callable[..., Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    run, read = runs(1, "single"), read_recipe(str(recipe), [])
    tokenizer = load_tokenizer(read.model, read.data, (), read.rollout.environments)
    # TRL knows no such chat template
    tokenizer.response_template = make_tool_turns(read, tokenizer).response_template
    spec = importlib.util.spec_from_file_location("my_worlds", recipe.parent / "my_worlds.py")
    assert spec is not None and spec.loader is not None
    worlds = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worlds)

    class Product(worlds.Product):
        """Draws its own numbers, as an object in a process of ours does."""

        def reset(self, **row: Any) -> Any:
            self.drawn = random.Random(row.pop("seed"))
            self.drawing = worlds.random
            worlds.random = self.drawn
            try:
                return super().reset(**row)
            finally:
                worlds.random = self.drawing

        def multiply(self, a: int, b: int) -> int:
            """Multiplies two whole numbers.

            Args:
                a: A factor.
                b: A factor.
            """
            worlds.random = self.drawn
            try:
                return super().multiply(a, b)
            finally:
                worlds.random = self.drawing

    lines = [line for line in lines_of(run) if line["step"] == 1]
    rows = []
    data = [json.loads(line) for line in (recipe.parent / "train.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines[::GENERATIONS]):
        factor = int(line["prompt"].partition("What is ")[2].split()[0])
        row = next(row for row in data if row["a"] == factor)
        rows += [row | {"seed": str((read.run.seed, 0, place))}] * GENERATIONS
    args = trl_arguments(tmp_path / "trl", len(lines), reward_weights=[0.5])
    trainer = GRPOTrainer(
        str(read.model.model_name_or_path),
        [worlds.calls],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=Product,
    )
    schemas = [get_json_schema(tool) for tool in trainer._env_tools[None]]
    assert schemas == list(tokenizer.environments[""].tools)
    assert trainer.reward_func_names == ["calls", "Product"]
    masks = [line.get("tool_mask", [1] * len(line["token_ids"])) for line in lines]
    _, given = sample_again(trainer, lines, masks)
    batch = trainer._generate_and_score_completions(rows)
    prompts = [tokenizer.encode(line["prompt"], add_special_tokens=False) for line in lines]
    assert given[0] == prompts, "the same tokens after reset"
    assert len(given) == 2 and 0 < len(given[1]) < len(lines)
    whole = pad([[1] * len(ids) for ids in masks])
    assert torch.equal(batch["completion_ids"] * whole, pad([line["token_ids"] for line in lines]))
    assert torch.equal(batch["tool_mask"] * whole, pad(masks)), "the same tokens are trained on"
    advantages = torch.tensor([line["advantage"] for line in lines])
    torch.testing.assert_close(batch["advantages"], advantages, rtol=1e-5, atol=1e-5)
    first = steps_of(run)[0]
    metrics = trainer._metrics["train"]
    for ours, name in (
        ("rewards/Product", "rewards/Product/mean"),
        ("rewards/calls", "rewards/calls/mean"),
        ("reward", "reward"),
        ("tools/call_frequency", "tools/call_frequency"),
        ("tools/failure_frequency", "tools/failure_frequency"),
    ):
        assert metrics[name] == [pytest.approx(first[ours])], name
    assert len(lines) == PROMPTS * GENERATIONS
    check_first_step(first, trainer, batch)
