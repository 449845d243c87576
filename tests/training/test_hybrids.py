"""Hybrids of attention with linear attention, state spaces or convolutions, on packed rows and two ranks: losses and norms are
those of transformers (and peft) over one document at a time, and what is exported opens there."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from finetune.config.families import FAMILIES
from finetune.models.lora import find_name_suffix
from tests.conftest import let_states_last, make_chat, make_tokenizer, slow_but
from tests.models import sweep
from tests.training import reference
from tests.training.layouts import steps_of, train_all, write_config

RECURRENT = [name for name, family in FAMILIES.items() if family.recurrence is not None]
QUICK = ["lfm2"]
QUICK_RUNS = ("full",)
RUNS = {
    "full": ("full_shard", "packing=true"),
    "padded": ("ddp", "packing=false"),
    "lora": ("ddp", "use_peft=true"),
}
MOVED = {
    "qwen3_next": ("down_proj", "gate_proj", "up_proj")
}  # plain peft moves these onto routed experts
VERIFIED = re.compile(
    r"/export: .* verified: every value, and (identical logits|logits within \S+) in a separate process"
)


def write(folder: Path, family: str, data: Path) -> Path:
    """A recipe of a tiny model of the family, whose vocabulary is the tokenizer's."""
    from transformers import AutoModelForCausalLM

    tokenizer, config = make_tokenizer(), sweep.tiny_config(family)
    # Some families' tokenizers add a token.
    config.vocab_size, config.tie_word_embeddings = len(tokenizer) + 2, False
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    model = let_states_last(AutoModelForCausalLM.from_config(config))
    for saved in (model, tokenizer):
        saved.save_pretrained(folder / family / "model")
    recipe = {
        "model_name_or_path": str(folder / family / "model"),
        "datasets": [{"path": str(data)}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,  # by 1e-8 a gradient that is nearly zero would move as far as any other
        "logging_steps": 1,
    }
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def find_adapted(folder: Path, family: str) -> list[str]:
    """The linear layers of a model, but for the head and what has no adapters in its family."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    left_out = {"lm_head", "head", *FAMILIES[family].unadaptable, *MOVED.get(family, ())}
    names = {
        find_name_suffix(name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] not in left_out
    }
    return sorted(names)


@pytest.mark.parametrize("family", slow_but(QUICK, RECURRENT))
def test_they_train_packed_on_two_ranks_to_a_verified_export(
    family: str, slow_too: bool, tmp_path: Path
) -> None:
    recipe = write(tmp_path, family, make_chat(tmp_path / "chat.jsonl", rows=24))
    runs = []
    wanted = {name: RUNS[name] for name in (RUNS if slow_too else QUICK_RUNS)}
    adapted = find_adapted(tmp_path / family / "model", family)  # all-linear, by name
    for name, (layout, key) in wanted.items():
        config = write_config(tmp_path, layout, checkpointing=layout == "full_shard")
        by_name = [f"lora_target_modules={adapted}"] if name == "lora" and family in MOVED else []
        runs.append((recipe, config, [key, f"output_dir={tmp_path / name}", *by_name]))
    printed = train_all(tmp_path, runs, ranks=2, timeout=500)
    assert len(VERIFIED.findall(printed)) == len(wanted), printed
    if "lora" in wanted:
        assert "lora/adapter: an adapter of" in printed
        is_named = "lora_target_modules: all-linear: without" in printed
        assert is_named == bool(FAMILIES[family].unadaptable), printed
    for name, (_, key) in wanted.items():
        keys = yaml.safe_load(recipe.read_text()) | {key.partition("=")[0]: key.endswith("true")}
        if "use_peft" in keys:
            keys["lora_target_modules"] = adapted
        (own := tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
        reference.assert_as_near(steps_of(tmp_path / name), own)
