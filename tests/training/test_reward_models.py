"""Reward models that pay sampled completions: their scores are those of transformers' class over what a run has saved, in every
layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import UserError
from finetune.plan.plan import make_plan
from finetune.run import fine_tune
from tests.conftest import make_chat, make_model, make_tokenizer, slow_but
from tests.training.layouts import assert_bit_equal, steps_of, train_all, train_kinds, write_config

STEPS = 2
# name -> ranks, layout, its sizes, keys of the recipe
RUNS: dict[str, tuple[int, str, dict[str, int], list[str]]] = {
    "single": (1, "single", {}, []),
    "text": (1, "single", {}, []),
    "unpacked": (1, "single", {}, ["packing=false"]),
    "ddp": (2, "ddp", {}, []),
    "tp": (2, "full_shard", {"tp_size": 2}, []),
    "pipeline": (2, "full_shard", {}, ["pipeline_parallel_size=2"]),
    "fsdp2": (3, "full_shard", {}, []),
    "lora": (2, "full_shard", {}, ["use_peft=true", "lora_r=4"]),
}
QUICK = ("text", "lora")
TEMPLATE = (
    "{% for m in messages %}<|judge|>{{ m['role'] | upper }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|judge|>ASSISTANT: {% endif %}"
)


def make_reward_model(folder: Path, labels: int = 1) -> Path:
    """A model of scores, whose tokenizer and template are not those of the model in training."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|judge|>"])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    for saved in (LlamaForSequenceClassification(config), tokenizer):
        saved.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    chats = make_chat(folder / "chat.jsonl", rows=9)
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"{n} and {n} is"}) + "\n" for n in range(9)))
    model = make_model(folder / "model", initializer_range=0.3)
    make_reward_model(folder / "helpful" / "export")
    common = {
        "method": "grpo",
        "model_name_or_path": str(model),
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["length", "helpful/export"],
        "reward_weights": [0.5, 1.0],
        "num_generations": 3,
        "max_completion_length": 12,
        "log_completions": 8,
        "max_length": 100,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 1,
        "export_at_end": False,
    }
    written = {}
    for name, data in (("chat", chats), ("text", asked)):
        written[name] = folder / f"{name}.yaml"
        sources = {key: [{"path": str(data)}] for key in ("datasets", "eval_datasets")}
        written[name].write_text(yaml.safe_dump(common | sources))
    return written


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str], Path]:
    wanted = [(name, find_kind(name)) for name in (RUNS if slow_too else QUICK)]
    run_folder = train_kinds(folder, RUNS, recipes, wanted, {})
    return lambda name: run_folder(name, find_kind(name))


def find_kind(name: str) -> str:
    """The recipe of a run."""
    return "text" if name == "text" else "chat"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score_plainly(line: dict[str, Any], folder: Path, name: str) -> float:
    """What transformers' class gives a completion of completions.jsonl, by the reward model's own tokenizer."""
    judge = folder / "helpful" / "export"
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    trained = AutoTokenizer.from_pretrained(folder / "model")
    said = trained.decode(line["token_ids"], skip_special_tokens=True)
    prompt = trained.decode(
        trained.encode(line["prompt"], add_special_tokens=False), skip_special_tokens=True
    )
    if name == "text":
        inputs = tokenizer(prompt + said + tokenizer.eos_token, return_tensors="pt")
    else:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[0, 0].item()


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_rewards_are_the_scores_of_transformers_class(
    name: str, runs: Callable[[str], Path], folder: Path
) -> None:
    run = runs(name)
    lines = read_lines(run / "completions.jsonl")
    assert len(lines) == 2 * 4 * 3
    plain = [score_plainly(line, folder, name) for line in lines]
    assert len(set(plain)) > 12
    assert [line["rewards"]["helpful"] for line in lines] == pytest.approx(
        plain, rel=1e-5, abs=1e-5
    )
    for number, metrics in enumerate(steps_of(run)):
        mean = sum(plain[12 * number : 12 * number + 12]) / 12
        assert metrics["rewards/helpful"] == pytest.approx(mean, rel=1e-5, abs=1e-5)
        assert metrics["reward"] == pytest.approx(
            mean + 0.5 * metrics["rewards/length"], rel=1e-5, abs=1e-5
        )
    assert any("eval_rewards/helpful" in line for line in read_lines(run / "metrics.jsonl"))


def test_a_run_resumes_exactly_and_says_where_the_reward_model_has_changed(
    runs: Callable[[str], Path], recipes: dict[str, Path], folder: Path
) -> None:
    whole = runs("text")
    again = folder / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    (again / "finished.json").unlink()
    config = write_config(folder, "single")
    train_all(folder, [(recipes["text"], config, [f"output_dir={again}"])], ranks=1)
    assert_bit_equal(whole, again, STEPS)
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    (again / "finished.json").unlink()
    file = folder / "helpful" / "export" / "config.json"
    before = file.read_text()
    file.write_text(before.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(
        UserError, match="rewards: the same models are named, but their files have changed"
    ):
        fine_tune(
            read_recipe(str(recipes["text"]), [f"output_dir={again}"]),
            read_sharding(str(config), None, {}),
        )
    file.write_text(before)


def test_a_dry_run_builds_it_and_the_plan_counts_it(
    recipes: dict[str, Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(folder, "single")
    recipe = read_recipe(str(recipes["chat"]), [f"output_dir={folder / 'dry'}"])
    single = read_sharding(str(config), None, {})
    fine_tune(recipe, single, dry_run=True)
    plan = make_plan(recipe, single, 1)
    without = make_plan(
        read_recipe(str(recipes["chat"]), ["rewards=[length]", "reward_weights=[1]"]), single, 1
    )
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "helpful" / "export")
    size = 4 * sum(parameter.numel() for parameter in judge.parameters())
    for phase, other in zip(plan.phases, without.phases, strict=True):
        assert phase.peak.rewards == size and not other.peak.rewards
    capsys.readouterr()
    assert main(["plan", "--recipe", str(recipes["chat"]), "--config", str(config)]) == 0
    assert "reward     " in capsys.readouterr().out


def test_what_gives_no_one_score_is_refused(folder: Path, recipes: dict[str, Path]) -> None:
    classes = make_reward_model(folder / "classes", labels=3)
    single = read_sharding(str(write_config(folder, "single")), None, {})
    refused = {
        folder / "model": "is a LlamaForCausalLM, which scores no text; name a model of one score",
        classes: "gives 3 scores, those of classes; name a model of one score",
        folder / "cache": "has no config.json",
    }
    for model, sentence in refused.items():
        recipe = read_recipe(str(recipes["chat"]), [f"rewards=[{model}]", "reward_weights=[1]"])
        for act in (lambda: make_plan(recipe, single, 1), lambda: fine_tune(recipe, single)):  # noqa: B023
            with pytest.raises(UserError, match=f"rewards: .*{sentence}"):
                act()
    with pytest.raises(UserError, match="no such file or folder, here or in the recipe's folder"):
        read_recipe(str(recipes["chat"]), ["rewards=[./nowhere]"])
    with pytest.raises(UserError, match="did you mean length"):
        read_recipe(str(recipes["chat"]), ["rewards=[lenght]"])


def test_inspect_shows_what_a_reward_model_reads(
    recipes: dict[str, Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--recipe", str(recipes["chat"]), "--rows", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "helpful" / "export")
    rows = (folder / "chat.jsonl").read_text().splitlines()
    for row, line in zip(shown, rows, strict=False):
        messages = json.loads(line)["messages"]
        assert row["rewards_read"] == {
            "helpful": tokenizer.apply_chat_template(messages, tokenize=False)
        }
