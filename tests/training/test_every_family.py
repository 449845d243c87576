"""Given a recipe of any causal family of transformers, when it trains on one rank, on two replicas, or sharded with activation
checkpointing, whole or by adapters, then every step has the same loss and gradient norm; the trainer gives what the model samples
the probabilities with which it was sampled; and the sizes that the config class has by itself can be planned."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING

from finetune.checkpoint.folders import step_folder
from finetune.config.accelerate_file import read_sharding
from finetune.config.families import find_family
from finetune.config.pretrained import load_config
from finetune.config.reader import read_recipe
from finetune.config.schema import Model
from finetune.errors import UserError
from finetune.export.logits import check_streamed_logits
from finetune.flops import flop_per_token_of
from finetune.plan.plan import make_plan
from tests.conftest import make_chat, make_tokenizer, slow_but
from tests.models import sweep
from tests.ranks import run_python
from tests.training.layouts import assert_losses, steps_of, train_all, write_config, write_recipe

# No gradient reaches the bias by which its router only chooses experts, for which DDP would wait.
QUICK = ["ernie4_5_moe"]
WHOLE: list[str] = []
ADAPTERS = ["use_peft=true", "lora_r=4"]
# Its class's own forward passes over the module that holds its decoder, where documents are kept apart.
QUICK_SAMPLED = ["opt"]
CONV1D = ("gpt2", "gpt-sw3", "openai-gpt")  # of which nothing has adapters
NO_ATTENTION = ("qwen4_exp_text",)  # at two layers
RANDOM = ("phimoe",)  # draws experts while it trains
NOT_RECOMPUTED = ("ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt")  # by transformers


def read_page() -> dict[str, dict[str, Any]]:
    """Family -> the keys with which docs/families.md says that it trains, on packed rows if it can."""
    keys: dict[str, dict[str, Any]] = {}
    page = sweep.PAGE.read_text().partition("## Vision-language classes")[0]
    for packed, padded, families in re.findall(
        r"^\| (.+?) \| (.+?) \| (`.+) \|$", page, re.MULTILINE
    ):
        chosen: dict[str, Any]
        if packed == "trains":
            chosen = {"packing": True}
        elif padded == "trains":
            chosen = {"packing": False}
        elif padded == "trains with `attn_implementation: eager`":
            chosen = {"packing": False, "attn_implementation": "eager"}
        else:
            continue
        keys |= dict.fromkeys(re.findall(r"`(.+?)`", families), chosen)
    return {family: chosen for family, chosen in keys.items() if family not in RANDOM}


KEYS = read_page()
OF_TEXT = [family for family in sweep.families() if not sweep.is_composite(family)]


def is_sampled(family: str) -> bool:
    """Whether a rule lets the model sample itself."""
    facts = find_family(family)
    if family in NO_ATTENTION:
        return False
    return not facts.counts_positions and (
        facts.recurrence is None or facts.recurrence.can_be_sampled
    )


@pytest.fixture
def recipe(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps of two micro-batches on one rank, without dropout."""
    tokenizer = make_tokenizer()
    rows = len(tokenizer) + 10
    for sizes in (sweep.TINY, sweep.SPECIAL.get(family, {})):
        for key in ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"):
            if sizes is sweep.TINY or key in sizes:
                monkeypatch.setitem(sizes, key, rows)
    sweep.save_tiny(family, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {key: 0.0 for key in content if "drop" in key}))
    return write_recipe(
        tmp_path / "recipe.yaml",
        tmp_path / "model",
        make_chat(tmp_path / "chat.jsonl", rows=24),
        **KEYS[family],
        global_batch_size=4,
        per_device_train_batch_size=1,
        max_steps=3,
        adam_epsilon=1e-4,  # by 1e-8 a gradient that is nearly zero would move as far as any other
    )


@pytest.mark.parametrize("family", slow_but(QUICK, KEYS))
def test_each_layout_has_the_losses_of_one_rank(family: str, recipe: Path, tmp_path: Path) -> None:
    single = write_config(tmp_path, "single")
    ddp = write_config(tmp_path, "ddp")
    sharded = write_config(tmp_path, "full_shard", checkpointing=family not in NOT_RECOMPUTED)
    kinds = {"whole": WHOLE} if family in CONV1D else {"whole": WHOLE, "adapters": ADAPTERS}
    alone = [
        (recipe, single, [*keys, f"output_dir={tmp_path / kind}"]) for kind, keys in kinds.items()
    ]
    on_two = [
        (recipe, config, [*keys, f"output_dir={tmp_path / f'{kind}-{config.stem}'}"])
        for kind, keys in kinds.items()
        for config in (ddp, sharded)
    ]
    train_all(tmp_path, alone, ranks=1)
    train_all(tmp_path, on_two, ranks=2)
    for kind in kinds:
        expected = [(line["loss"], line["grad_norm"]) for line in steps_of(tmp_path / kind)]
        for config in (ddp, sharded):
            assert_losses(tmp_path / f"{kind}-{config.stem}", expected, norms=1e-3)


@pytest.mark.parametrize("family", slow_but(QUICK, KEYS))
def test_a_sharded_run_resumes(family: str, recipe: Path, tmp_path: Path) -> None:
    """Also where a rank has no element of a weight that got no gradient."""
    sharded = write_config(tmp_path, "full_shard")
    keys = [f"output_dir={tmp_path / 'run'}", "save_steps=1", "save_total_limit=null"]
    train_all(tmp_path, [(recipe, sharded, keys)], ranks=2)
    whole = steps_of(tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(step_folder(tmp_path / "run", step))
    (tmp_path / "run" / "finished.json").unlink()
    printed = train_all(tmp_path, [(recipe, sharded, keys)], ranks=2)
    assert "resumed at step 1" in printed
    again = steps_of(tmp_path / "run")
    assert [line["step"] for line in again] == [1, 2, 3]
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]


@pytest.mark.parametrize("family", slow_but(QUICK_SAMPLED, filter(is_sampled, KEYS)))
def test_the_trainer_scores_what_was_sampled_as_the_sampler_did(
    family: str, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def other(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]\n"
    )
    prompts = [{"prompt": f"What is {i}?" + " Tell me." * (i % 5)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    online = yaml.safe_load(recipe.read_text()) | {
        "method": "grpo",
        "datasets": [{"path": str(tmp_path / "prompts.jsonl")}],
        "rewards": [f"{tmp_path / 'rewards.py'}:other"],
        "num_generations": 2,
        "max_completion_length": 12,
        "max_length": 96,
        "max_steps": 2,
        "output_dir": str(tmp_path / "run"),
    }
    recipe.write_text(yaml.safe_dump(online))
    train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), [])], ranks=1)
    for line in steps_of(tmp_path / "run"):
        assert line["grad_norm"] > 0
        assert line["log_ratio/max"] < 1e-3


@pytest.mark.parametrize("family", slow_but(["opt", "gpt_neo"], KEYS))
def test_what_is_longer_than_its_positions_trains_or_is_refused(
    family: str, recipe: Path, tmp_path: Path
) -> None:
    """A document, and a packed row of short ones. On a GPU, a table that ends would end the
    process.
    """
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes. " * 300}]
    (tmp_path / "long.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    single = write_config(tmp_path, "single")
    for data, rows in (("long", 1), ("chat", 4)):
        keys = [
            f"datasets=[{{path: {tmp_path / data}.jsonl}}]",
            f"output_dir={tmp_path / data}",
            "max_length=1024",
            f"per_device_train_batch_size={rows}",
            "max_steps=1",
        ]
        command = ["finetune/run.py", "--config", str(single), "--recipe", str(recipe), *keys]
        assert "Traceback" not in run_python(command).stderr


@pytest.mark.parametrize("family", slow_but(["gemma4_text"], OF_TEXT))
def test_sizes_as_published_are_planned_or_refused_in_a_sentence(
    family: str, tmp_path: Path
) -> None:
    """A tiny config of ours had heads of one size, where Gemma 4's differ from layer to layer."""
    try:
        config = CONFIG_MAPPING[family]()
    except (TypeError, ValueError):
        pytest.skip("the config class has no defaults")
    config.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    data = make_chat(tmp_path / "chat.jsonl", rows=4)
    path = write_recipe(tmp_path / "recipe.yaml", tmp_path / "model", data, packing=True)
    sharding = read_sharding(str(write_config(tmp_path, "full_shard")), None, {})
    with suppress(UserError):
        make_plan(read_recipe(str(path)), sharding, 8)
    flop_per_token_of(config.get_text_config(), parameters=1, length=1)
    with suppress(UserError):
        check_streamed_logits(load_config(Model(model_name_or_path=str(tmp_path / "model"))))
