"""Prompts with images: sampled as they are trained, and as transformers' whole class computes them, in every layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

from tests.training.layouts import steps_of, train_all, write_config
from tests.vision import (
    add_processor,
    make_image_chat,
    make_vision_model,
    open_processor,
    process_row,
)

STEPS, PROMPTS, GENERATIONS, MOST, TEMPERATURE = 2, 4, 3, 12, 1.3
IMAGE = "\ufffc"
REWARDS = '''
def even(completion_ids, prompts, answer, **columns):
    """Tokens with an even id; the place of an image is in the text, and no column has one."""
    assert not columns.keys() & {"image", "images", "messages"}, columns.keys()
    assert all(sum("\\ufffc" in turn["content"] for turn in prompt) for prompt in prompts)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
'''
MODES: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False, "attn_implementation": "sdpa"},
    "reference": {"beta": 0.3},
    "tower": {},
    "again": {"num_iterations": 2, "importance_sampling_correction": "token_truncate"},
}
FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "internvl", "llava_next"),
    *("qwen2_vl", "glm4v", "qwen3_5", "mistral3", "pixtral", "gemma4", "idefics3"),
    *("qwen3_vl_moe", "qwen3_5_moe", "glm46v"),
)
TOWER = {
    "llava": ["language_model", "lm_head", "vision_tower", "multi_modal_projector"],
    "qwen2_5_vl": ["visual", "language_model", "lm_head"],
}
EVERY = [
    *((1, "single", family, "packed") for family in FAMILIES),
    *((2, layout, "qwen2_5_vl", "packed") for layout in ("ddp", "full_shard")),
    *((2, layout, "llava", "tower") for layout in ("ddp", "full_shard")),
    (1, "single", "llava", "tower"),
    (1, "single", "qwen2_5_vl", "padded"),
    (1, "single", "qwen2_5_vl", "reference"),
    (1, "single", "qwen2_5_vl", "again"),
    (2, "full_shard", "gemma3", "packed"),
    (2, "full_shard", "qwen3_vl", "packed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("online-images")


@pytest.fixture(scope="module")
def recipes(folder: Path) -> Callable[..., Path]:
    data = make_image_chat(folder, rows=14)
    (folder / "my_rewards.py").write_text(REWARDS)

    def write(family: str, mode: str) -> Path:
        path = folder / f"{family}-{mode}.yaml"
        model = folder / family
        if not model.exists():
            add_processor(make_vision_model(model, family), family)
        own = MODES[mode] | (
            {"trainable_modules": TOWER[family]} if mode == "tower" else {}
        )
        keys = {
            "method": "grpo",
            "model_name_or_path": str(model),
            "datasets": [{"path": str(data)}],
            "eval_datasets": [{"path": str(data), "max_samples": 3}],
            "dataset_cache_dir": str(folder / "cache"),
            "rewards": ["my_rewards.py:even", "length"],
            "num_generations": GENERATIONS,
            "max_completion_length": MOST,
            "temperature": TEMPERATURE,
            "log_completions": PROMPTS,
            "per_device_generation_batch_size": 7,
            "max_length": {"idefics3": 512, "gemma4": 512}.get(family, 160),
            "global_batch_size": PROMPTS,
            "per_device_train_batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "export_at_end": False,
        }
        path.write_text(yaml.safe_dump(keys | own))
        return path

    return write


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: Callable[..., Path]) -> Callable[..., Path]:
    """(ranks, layout, family, mode) -> the run's folder."""

    def run(ranks: int, layout: str, family: str, mode: str) -> Path:
        output = folder / f"{ranks}-{layout}-{family}-{mode}"
        if not output.exists():
            one = (recipes(family, mode), write_config(folder, layout), [f"output_dir={output}"])
            train_all(folder, [one], ranks=ranks)
        return output

    return run


@pytest.mark.parametrize(("ranks", "layout", "family", "mode"), EVERY)
def test_the_ratio_between_sampler_and_trainer_is_one(
    ranks: int, layout: str, family: str, mode: str, runs: Callable[..., Path]
) -> None:
    for line in steps_of(runs(ranks, layout, family, mode)):
        print(line["log_ratio/mean"], line["log_ratio/max"])
        assert 0 < line["log_ratio/mean"] < 1e-5
