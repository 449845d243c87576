"""What trains, by name: trainable_modules, frozen_modules, and modules_to_save and patterns of LoRA.

Held against a plain loop on transformers and peft, which shares nothing with the project but the order of the data.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.files.tensors import read, read_folder
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import (
    assert_losses,
    cross,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)

STEPS = 6
LAYOUTS = ("full_shard", "FULL_SHARD", "ddp")
MODES: dict[str, dict[str, Any]] = {
    "frozen": {"tied": True, "frozen_modules": ["embed_tokens", "layers.0"]},
    "trainable": {"trainable_modules": ["lm_head", r"layers\.[12]\.self_attn.*_proj"]},
    "whole": {
        "use_peft": True,
        "lora_r": 4,
        "modules_to_save": ["embed_tokens", "lm_head"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"k_proj": 3},
    },
    "whole-tied": {"tied": True, "use_peft": True, "lora_r": 4, "modules_to_save": ["lm_head"]},
}
# What each mode trains of the base, by transformers' names, written out.
TRAINED = {
    "frozen": r"model\.layers\.[12]\..*|model\.norm\.weight",
    "trainable": r"lm_head\.weight|model\.layers\.[12]\.self_attn\.[qkvo]_proj\.weight",
    "whole": r"model\.embed_tokens\.weight|lm_head\.weight",
    "whole-tied": r"model\.embed_tokens\.weight",
}
RESUMED = {
    "frozen": ("FULL_SHARD", "full_shard"),
    "whole-tied": ("full_shard", "FULL_SHARD"),
    "whole": ("full_shard", "full_shard"),
}
QUICK = {("full_shard", "frozen"), ("full_shard", "whole")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """Models, recipes, and every run of two ranks: `folder / f"{layout}-{mode}"`, and `resumed-{mode}`."""
    folder = tmp_path_factory.mktemp("parts")
    data = make_chat(folder / "chat.jsonl", rows=20)
    sizes: dict[str, Any] = {"hidden_size": 72, "vocab_size": 509, "num_hidden_layers": 3}
    models = {
        tied: make_model(folder / f"model-{tied}", tie_word_embeddings=tied, **sizes)
        for tied in (True, False)
    }
    runs = []
    for mode, given in MODES.items():
        model, keys = (
            models[given.get("tied", False)],
            {key: value for key, value in given.items() if key != "tied"},
        )
        keys = {"global_batch_size": 6, "max_steps": STEPS, "save_steps": 3} | keys
        recipe = write_recipe(folder / f"{mode}.yaml", model, data, **keys)
        runs += [
            (recipe, write_config(folder, layout), [f"output_dir={folder / f'{layout}-{mode}'}"])
            for layout in LAYOUTS
            if slow_too or (layout, mode) in QUICK
        ]
    for mode, (before, after) in RESUMED.items():
        if not slow_too:
            continue
        start = folder / f"{before}-{mode}" / "checkpoints" / "step-00000003"
        keys_ = [f"output_dir={folder / f'resumed-{mode}'}", f"resume_from_checkpoint={start}"]
        runs.append((folder / f"{mode}.yaml", write_config(folder, after), keys_))
    (folder / "printed.txt").write_text(train_all(folder, runs, ranks=2, timeout=400))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], list[tuple[float, float]]]:
    """The plain loop's loss and gradient norm of every step."""
    found: dict[str, list[tuple[float, float]]] = {}

    def prepare(mode: str) -> Callable[[Any], None]:
        def freeze(model: Any) -> None:
            if mode == "whole-tied":  # peft would give the head a copy of its own
                model.get_input_embeddings().weight.data = (
                    model.get_input_embeddings().weight.data.clone()
                )
                model.get_input_embeddings().weight.requires_grad_(True)
            elif mode != "whole":
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(re.fullmatch(TRAINED[mode], name) is not None)

        return freeze

    def train(mode: str) -> list[tuple[float, float]]:
        if mode not in found:
            recipe = folder / f"{mode}.yaml"
            if mode == "whole-tied":
                recipe = folder / "whole-tied-reference.yaml"
                keys = yaml.safe_load((folder / f"{mode}.yaml").read_text())
                recipe.write_text(yaml.safe_dump(keys | {"modules_to_save": []}))
            found[mode] = reference.train(recipe, prepare(mode))
        return found[mode]

    return train


@cross(LAYOUTS, MODES, QUICK)
def test_what_is_named_trains_in_every_layout_as_in_a_plain_loop(
    name: str, kind: str, folder: Path, expected: Callable[[str], list[tuple[float, float]]]
) -> None:
    lines = assert_losses(folder / f"{name}-{kind}", expected(kind))
    assert lines[-1]["loss"] < lines[0]["loss"]


@cross(["ddp", "full_shard"], MODES, QUICK)
def test_a_checkpoint_holds_what_changed_and_the_rest_as_it_was(
    name: str, kind: str, folder: Path
) -> None:
    keys = yaml.safe_load((folder / f"{kind}.yaml").read_text())
    base = load_file(Path(keys["model_name_or_path"]) / "model.safetensors")
    saved = read_model(folder / f"{name}-{kind}" / "checkpoints" / f"step-{STEPS:08}")
    plain = {key: tensor for key, tensor in saved.items() if ".lora_" not in key}
    if "use_peft" not in keys:
        assert plain.keys() == base.keys()
    changed = {key for key, tensor in plain.items() if not torch.equal(tensor, base[key])}
    assert changed == {key for key in base if re.fullmatch(TRAINED[kind], key)}
    if kind == "whole":
        ranks = {
            key.split("layers.")[1].split(".lora_A")[0]: t.shape[0]
            for key, t in saved.items()
            if "lora_A" in key
        }
        assert (ranks["0.self_attn.q_proj"], ranks["1.mlp.up_proj"], ranks["0.mlp.up_proj"]) == (
            2,
            5,
            4,
        )
    numbers = sum(
        tensor.numel() for key, tensor in saved.items() if ".lora_" in key or key in changed
    )
    assert f", {numbers:,} trained (" in (folder / "printed.txt").read_text()


def read_model(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: read(stored) for name, stored in read_folder(checkpoint / "model").items()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", RESUMED)
def test_another_layout_resumes_it_exactly(mode: str, folder: Path) -> None:
    before = [line["loss"] for line in steps_of(folder / f"{RESUMED[mode][0]}-{mode}")]
    after = [line["loss"] for line in steps_of(folder / f"resumed-{mode}")]
    assert after == pytest.approx(before[3:], rel=1e-5)


@pytest.mark.parametrize("mode", slow_but({"whole"}, ["whole", "whole-tied"]))
def test_the_export_is_the_model_that_peft_opens(mode: str, folder: Path) -> None:
    run, out = folder / f"full_shard-{mode}", folder / f"export-{mode}"
    assert main(["export", str(run), "--output", str(out)]) == 0
    base = yaml.safe_load((folder / f"{mode}.yaml").read_text())["model_name_or_path"]
    merged, theirs = (
        AutoModelForCausalLM.from_pretrained(out),
        AutoModelForCausalLM.from_pretrained(base),
    )
    adapted = PeftModel.from_pretrained(theirs, out / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits, original = (
            merged(input_ids=ids).logits,
            AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits,
        )
        torch.testing.assert_close(adapted(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-4)
    assert (logits - original).abs().max() > 1e-3
