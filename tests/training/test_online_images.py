"""Prompts with images: sampled as they are trained, and as transformers' whole class computes them, in every layout."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.data.packing import StoredBatches
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import UserError
from finetune.models.load import build_teacher
from finetune.plan.plan import make_plan
from finetune.rollout.completion_rows import RowOptions, make_step_batch
from finetune.rollout.engine import Ended, Rollout, Sampled
from tests.conftest import slow_but
from tests.data.world import Rank
from tests.ranks import launch_ranks
from tests.training import reference
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config, write_recipe
from tests.vision import add_processor, make_image_chat, make_vision_model, open_processor

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
    "again": {"num_iterations": 2, "importance_sampling_correction": "token_truncate"}
    | {"save_steps": 1},
}
FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "internvl", "llava_next"),
    *("qwen2_vl", "glm4v", "qwen3_5", "mistral3", "pixtral", "gemma4", "idefics3"),
    *("qwen3_vl_moe", "qwen3_5_moe", "glm46v", "gemma4_large"),
)
LONG_IMAGES = ("idefics3", "gemma4", "gemma4_large")
TOWER = {
    "llava": ["language_model", "lm_head", "vision_tower", "multi_modal_projector"],
    "qwen2_5_vl": ["visual", "language_model", "lm_head"],
}
AGAIN = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen3_5", "mistral3")
EVERY = [
    *((1, "single", family, "packed") for family in FAMILIES),
    *((1, "single", family, "again") for family in AGAIN),
    *((2, layout, "qwen2_5_vl", "packed") for layout in ("ddp", "full_shard")),
    *((2, layout, "llava", "tower") for layout in ("ddp", "full_shard")),
    (1, "single", "llava", "tower"),
    (1, "single", "qwen2_5_vl", "padded"),
    (1, "single", "qwen2_5_vl", "reference"),
    (2, "full_shard", "gemma3", "packed"),
    (2, "full_shard", "qwen3_vl", "packed"),
]


QUICK = [(1, "single", "llava", "tower"), (1, "single", "qwen3_vl", "again")]


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
            if family == "gemma3":  # of whose tokens the last would see no image through 16
                config = (model / "config.json").read_text()
                widened = config.replace('"sliding_window": 16', '"sliding_window": 32')
                assert widened != config
                (model / "config.json").write_text(widened)
        own = MODES[mode] | ({"trainable_modules": TOWER[family]} if mode == "tower" else {})
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
            "max_length": 512 if family in LONG_IMAGES else 160,
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
def runs(folder: Path, recipes: Callable[..., Path], slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout, family, mode) -> the run's folder."""

    wanted = EVERY if slow_too else QUICK
    for ranks in (1, 2):
        listed = [
            (
                recipes(family, mode),
                write_config(folder, layout),
                [f"output_dir={folder}/{count}-{layout}-{family}-{mode}"],
            )
            for count, layout, family, mode in wanted
            if count == ranks
        ]
        train_all(folder, listed, ranks=ranks)
    return lambda *which: folder / "-".join(map(str, which))


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("ranks", "layout", "family", "mode"), slow_but(QUICK, EVERY))
def test_the_ratio_between_sampler_and_trainer_is_one(
    ranks: int, layout: str, family: str, mode: str, runs: Callable[..., Path]
) -> None:
    """At 3e-7 or so; in the first update on what was sampled, where there are several."""
    steps = steps_of(runs(ranks, layout, family, mode))
    assert len(steps) == STEPS
    for line in steps[:1] if mode == "again" else steps:
        assert 0 < line["log_ratio/mean"] < 1e-5
        assert line["log_ratio/max"] < 5e-5


@pytest.mark.parametrize(
    ("ranks", "layout", "family", "mode"), slow_but(QUICK, [each for each in EVERY if each[0] == 2])
)
def test_every_layout_samples_the_same_tokens_and_has_the_same_losses(
    ranks: int, layout: str, family: str, mode: str, runs: Callable[..., Path]
) -> None:
    run = runs(ranks, layout, family, mode)
    one = runs(1, "single", family, mode)
    mine, theirs = lines_of(run), lines_of(one)
    assert len(mine) == STEPS * PROMPTS * GENERATIONS
    assert [line["token_ids"] for line in mine] == [line["token_ids"] for line in theirs]
    for line, truth in zip(steps_of(run), steps_of(one), strict=True):
        for name in ("grad_norm", "reward", "entropy"):
            assert line[name] == pytest.approx(truth[name], rel=1e-5), name
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "layout", "family", "mode"),
    slow_but(QUICK, [each for each in EVERY if each[3] == "again"]),
)
def test_sampled_tokens_have_the_log_probabilities_of_the_plain_model(
    ranks: int, layout: str, family: str, mode: str, runs: Callable[..., Path], folder: Path
) -> None:
    """Of transformers' class on one row at a time, with what its processor makes of the images."""
    checkpoint = runs(ranks, layout, family, mode) / "checkpoints" / "step-00000001"
    lines = [json.loads(line) for line in (checkpoint / "rollouts.jsonl").open()]
    assert len(lines) == PROMPTS * GENERATIONS
    loaded = AutoModelForImageTextToText.from_pretrained(folder / family, dtype=torch.float32)
    model = loaded.eval()
    processor = open_processor(folder / family, family)
    blind = []
    for line in lines:
        inputs = process_prompt(folder / "images.jsonl", line["example_id"], processor)
        assert inputs["input_ids"][0].tolist() == line["prompt_ids"]
        sampled = line["sampled"]["token_ids"]
        expected = score(model, inputs, sampled)
        found = torch.tensor(line["sampled"]["log_probabilities"])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        blind.append((score(model, inputs, sampled) - found).abs().max().item())
    assert max(blind) > 1e-3, blind  # what is in the images decides


KILLED = Path(__file__).with_name("killed_while_sampling.py")


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_updates_ends_as_if_nobody_had(
    runs: Callable[..., Path], recipes: Callable[..., Path], folder: Path
) -> None:
    """Its checkpoint holds the completions, and their prompts' images are read again."""
    recipe, config = recipes("llava", "again"), write_config(folder, "single")
    run = folder / "killed"
    codes = []
    for place in ("step,2", "nowhere,None"):
        arguments = [place, str(recipe), str(config), f"output_dir={run}"]
        codes += launch_ranks(KILLED, arguments, ranks=1).returncodes
    assert codes == [-signal.SIGKILL, 0]
    whole = runs(1, "single", "llava", "again")
    assert_bit_equal(run, whole, STEPS)
    assert lines_of(run) == lines_of(whole)


def test_a_sampled_token_of_an_image_ends_a_completion_and_is_learned(tmp_path: Path) -> None:
    """A completion in training has no place for an image of its own."""
    model = add_processor(make_vision_model(tmp_path / "model", "llava"), "llava")
    data = make_image_chat(tmp_path, rows=4)
    keys = {"method": "grpo", "rewards": ["length"], "num_generations": 2, "max_length": 400}
    recipe = read_recipe(write_recipe(tmp_path / "r.yaml", model, data, **keys, packing=True))
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    prompts = prepare_data(recipe, tokenizer, reference.Alone()).train
    assert isinstance(prompts, StoredBatches)
    prompt = prompts.examples[0].input_ids.tolist()
    sampled = [
        Sampled([9, last], [-1.0, -2.0], 0.0, Ended.STOPPED, versions=[]) for last in (262, 8)
    ]
    rollout = Rollout(
        example_ids=np.array([0, 0]),
        prompts=[prompt, prompt],
        sampled=sampled,
        scores=np.zeros((2, 1)),
        rewards=np.array([0.0, 1.0]),
        failures=0,
        generations=2,
        sampled_groups=1,
        flat_groups=0,
    )
    options = RowOptions(recipe, Rank(0, 1), 0, False, prompts)
    [micro_batch] = make_step_batch(rollout, options).micro_batches
    assert micro_batch.images is not None and micro_batch.image_counts == (1, 1)
    assert len(micro_batch.images["pixel_values"]) == 2
    assert (micro_batch.input_ids == 262).sum() == 2 * prompt.count(262)
    assert micro_batch.labels[micro_batch.labels >= 0].tolist() == [9, 262, 9, 8]


def test_images_that_cross_attention_reads_are_refused(tmp_path: Path) -> None:
    model = add_processor(make_vision_model(tmp_path / "model", "mllama"), "mllama")
    keys = {"method": "grpo", "rewards": ["length"], "max_length": 400, "packing": True}
    data = make_image_chat(tmp_path, rows=4)
    recipe = read_recipe(write_recipe(tmp_path / "r.yaml", model, data, **keys))
    with pytest.raises(
        UserError, match="rows with images, which mllama reads by cross attention, cannot be"
    ):
        prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), reference.Alone())


def test_the_reference_has_no_tower_either_under_drop_vision(recipes: Callable[..., Path]) -> None:
    """It is built as the model is, with the files' names of the language model, and the plan counts as much."""
    recipe = read_recipe(str(recipes("gemma3", "reference")), ["drop_vision=true"])
    world: Any = SimpleNamespace(sharding=read_sharding("single", None, {}))
    model, *_ = build_teacher(recipe, world)
    planned = make_plan(recipe, world.sharding, 1, on_cpu=True).spec.teacher_bytes
    assert planned == sum(parameter.nbytes for parameter in model.parameters())


def process_prompt(file: Path, row: int, processor: Any) -> dict[str, Any]:
    from transformers.image_utils import load_image

    messages = json.loads(file.read_text().splitlines()[row])["messages"][:-1]
    contents = [turn["content"] for turn in messages if isinstance(turn["content"], list)]
    parts = [part for content in contents for part in content if part["type"] == "image"]
    pictures = [load_image(str(file.parent / part["path"])) for part in parts]
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    made = processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    return dict(made)


@torch.no_grad()
def score(model: Any, inputs: dict[str, Any], sampled: list[int]) -> torch.Tensor:
    """The log-probabilities of `sampled` behind a prompt; the last token is not read."""
    prompt = inputs["input_ids"]
    behind = torch.tensor([sampled[:-1]], dtype=torch.int64)
    whole = {"input_ids": torch.cat([prompt, behind], 1)}
    for name in inputs.keys() & {"attention_mask", "token_type_ids", "mm_token_type_ids"}:
        filled = torch.full_like(behind, int(name == "attention_mask"))
        whole[name] = torch.cat([inputs[name], filled], 1)
    logits = model(**{**inputs, **whole}).logits[0, prompt.shape[1] - 1 :]
    scores = (logits.float() / TEMPERATURE).log_softmax(-1)
    return scores.gather(1, torch.tensor(sampled)[:, None])[:, 0]
