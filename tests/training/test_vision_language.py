"""Text training of vision-language checkpoints: whole in and whole out. The losses are those of transformers' own class, the export
is its files with the language model trained, and an adapter works on the class that a server opens."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.cli import main
from finetune.config.pretrained import load_config, trained_config
from finetune.config.schema import Model
from finetune.errors import UserError
from finetune.export.export import export
from finetune.files.run_files import read_benchmarks
from finetune.models.load import build_on_meta
from finetune.models.reach import find_unread
from tests.conftest import make_chat, slow_but
from tests.inference.test_evaluate import PROMPTS, make_task
from tests.training import reference
from tests.training.layouts import (
    assert_last_step_again_is_bit_equal,
    assert_losses,
    train_families,
    write_recipe,
)
from tests.training.test_preference_layouts import make_pairs
from tests.vision import FAMILIES, MORE, image_prompt, make_vision_model, text_prompt

STEPS = 3
LORA: dict[str, Any] = {
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj", "o_proj"],
}
WITH_LORA = ("gemma3", "qwen3_5", "qwen2_5_vl")
# (family, layout, ranks)
WANTED = [
    *((family, "single", 1) for family in FAMILIES),
    *((f"{family}-lora", "single", 1) for family in WITH_LORA),
    *((family, "full_shard", 2) for family in ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_5")),
    ("gemma3-lora", "full_shard", 2),
    ("gemma3", "ddp", 2),
    ("qwen3_vl", "FULL_SHARD", 2),
    ("gemma3-text", "single", 1),
    ("gemma3-dpo", "single", 1),
]
EXPORTED = [each for each in WANTED if each[1:] == ("single", 1)]
QUICK = [(name, "single", 1) for name in ("gemma3", "gemma3-text", "gemma3-lora")]
QUICK_FAMILIES = ("gemma3",)


@pytest.fixture(scope="module")
def recipes(folder: Path, slow_too: bool) -> dict[str, Path]:
    """Recipes of full training and of LoRA."""
    return make_recipes(folder, FAMILIES if slow_too else QUICK_FAMILIES)


def make_recipes(folder: Path, families: Iterable[str]) -> dict[str, Path]:
    data, pairs = (
        make_chat(folder / "chat.jsonl", rows=26),
        make_pairs(folder / "pairs.jsonl", rows=26),
    )
    paths = {}
    for family in families:
        model = make_vision_model(folder / family / "model", family)
        if family == "mistral3":  # as Mistral publishes it: untied, and config.json does not say so
            config = json.loads((model / "config.json").read_text())
            del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
            (model / "config.json").write_text(json.dumps(config))
        steps: dict[str, Any] = {
            "global_batch_size": 5,
            "max_steps": STEPS,
            "save_steps": 1,
            "packing": True,
        }
        paths[family] = write_recipe(folder / f"{family}.yaml", model, data, **steps)
        paths[f"{family}-lora"] = write_recipe(
            folder / f"{family}-lora.yaml", model, data, **steps | LORA
        )
        paths[f"{family}-text"] = write_recipe(
            folder / f"{family}-text.yaml", model, data, **steps, drop_vision=True
        )
        paths[f"{family}-dpo"] = write_recipe(
            folder / f"{family}-dpo.yaml", model, pairs, **steps, method="dpo"
        )
    return paths


@pytest.fixture(scope="module")
def runs(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Callable[[str, str, int], Path]:
    """(family, layout, ranks) -> the run's folder."""
    return train_families(folder, recipes, WANTED if slow_too else QUICK, EXPORTED)


def open_whole(path: Path) -> Any:
    """As a server opens it: with nothing missing and nothing left over."""
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(("family", "layout", "ranks"), slow_but(QUICK, WANTED))
def test_losses_and_gradients_are_those_of_the_whole_class(
    family: str, layout: str, ranks: int, runs: Callable[..., Path], recipes: dict[str, Path]
) -> None:
    assert_losses(runs(family, layout, ranks), reference.losses(recipes[family]))


@pytest.mark.parametrize("family", slow_but(["gemma3"], FAMILIES))
def test_the_export_is_the_checkpoint_with_its_language_model_trained(
    family: str, runs: Callable[..., Path], folder: Path
) -> None:
    """The same class, names and files beside them; what was not trained is equal bit for bit."""
    source, exported = folder / family / "model", runs(family, "single", 1) / "export"
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(exported / "model.safetensors"),
    )
    assert {name: value.dtype for name, value in before.items()} == {
        name: value.dtype for name, value in after.items()
    }
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("vis" in name or "projector" in name for name in moved)
    assert {name for name in before if "layers.1.mlp" in name and "vis" not in name} <= moved
    for name in ("preprocessor_config.json", "processor_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (source / name).read_bytes()
    configs = [json.loads((path / "config.json").read_text()) for path in (source, exported)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[1]["text_config"].get("use_cache") is not False
    whole = open_whole(exported)
    with torch.no_grad():
        assert torch.isfinite(whole(**image_prompt(family)).logits).all()


def test_without_its_tower_a_checkpoint_becomes_that_of_its_text_class(
    runs: Callable[..., Path],
) -> None:
    """Trained as in the whole, value by value."""
    from transformers import AutoModelForCausalLM

    exported, whole = (runs(name, "single", 1) / "export" for name in ("gemma3-text", "gemma3"))
    model, info = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Gemma3ForCausalLM" and not any(info.values()), info
    language_model = open_whole(whole).model.language_model.state_dict()
    found = {
        name.removeprefix("model."): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    assert found.keys() == language_model.keys()
    assert all(
        torch.allclose(value, language_model[name], atol=1e-6) for name, value in found.items()
    )
    assert not (exported / "preprocessor_config.json").exists()
    assert "AutoModelForCausalLM" in (exported / "README.md").read_text()


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_an_untrained_checkpoint_answers_an_image_as_before(
    family: str, folder: Path, tmp_path: Path
) -> None:
    source = make_vision_model(folder / family / "model", family)
    exported = export(source, tmp_path / "export", log=lambda _: None)
    with torch.no_grad():
        models = [open_whole(path) for path in (source, exported)]
        answers = [model(**image_prompt(family)).logits for model in models]
    before, after = (model.state_dict() for model in models)
    assert all(torch.equal(before[name], after[name]) for name in before)
    files = [load_file(path / "model.safetensors") for path in (source, exported)]
    assert {name: value.dtype for name, value in files[0].items()} == {
        n: value.dtype for n, value in files[1].items()
    }
    assert torch.allclose(*answers, atol=1e-4)  # sums depend on where in memory a tensor begins


@pytest.mark.parametrize("family", slow_but(["gemma3"], WITH_LORA))
def test_plain_peft_opens_the_adapter_on_the_whole_class(
    family: str, runs: Callable[..., Path], folder: Path
) -> None:
    """Its keys are those that peft writes; its logits are those of the merged export, and not the base's."""
    from peft import PeftModel

    run, base = runs(f"{family}-lora", "single", 1), open_whole(folder / family / "model")
    with torch.no_grad():
        plain = base(**text_prompt()).logits
        adapted = PeftModel.from_pretrained(base, run / "adapter")
        found = adapted(**text_prompt()).logits
        merged = open_whole(run / "export")(**text_prompt()).logits
    assert torch.allclose(found, merged, atol=1e-5)
    assert (found - plain).abs().max() > 1e-2
    own = {name.replace(".default", "") for name in adapted.state_dict() if ".lora_" in name}
    assert own == load_file(run / "adapter" / "adapter_model.safetensors").keys()
    assert all(".language_model." in name for name in own)


@pytest.mark.slow
def test_a_trained_checkpoint_is_talked_to_and_measured(
    runs: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers are those of the whole class, and lm-eval counts them."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluate]'")
    from transformers import AutoTokenizer

    export = runs("gemma3", "single", 1) / "export"
    run = Path(shutil.copytree(export.parent, tmp_path / "run"))
    model, tokenizer = open_whole(export), AutoTokenizer.from_pretrained(export)
    own = []
    for prompt in PROMPTS:
        asked = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        own.append(tokenizer.decode(ids, skip_special_tokens=True))
    capsys.readouterr()
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert (
        main(["chat", str(run), *asked, "--json", "--temperature", "0", "--max-new-tokens", "6"])
        == 0
    )
    answers = [
        json.loads(line)["answers"][0]["answer"] for line in capsys.readouterr().out.splitlines()
    ]
    assert answers == own
    make_task(tmp_path / "tasks", [*own[:3], "something else"])
    options = [
        "--tasks",
        "copied",
        "--include-path",
        str(tmp_path / "tasks"),
        "--apply-chat-template",
        "--no-compare",
    ]
    assert main(["evaluate", str(run), *options, "--batch-size", "2"]) == 0
    (result,) = read_benchmarks(run)
    assert (result.trained, result.samples) == (0.75, 4)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    runs: Callable[..., Path], recipes: dict[str, Path], tmp_path: Path
) -> None:
    assert_last_step_again_is_bit_equal(
        runs("gemma3", "single", 1), recipes["gemma3"], tmp_path, STEPS
    )


def test_an_adapter_without_effect_on_the_class_is_refused(
    runs: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    """Plain peft would only warn, and leave the base as it is."""
    adapter, other = runs("gemma3-lora", "single", 1) / "adapter", tmp_path / "other"
    shutil.copytree(adapter, other)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
    save_file(renamed, other / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match="Gemma3ForConditionalGeneration of this config has no such tensor"
    ):
        export(other, tmp_path / "export", log=lambda _: None)
    idle = {name: tensor * (".lora_B." not in name) for name, tensor in tensors.items()}
    save_file(idle, other / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the adapter changes nothing: every lora_B in it is zero"):
        export(other, tmp_path / "export", log=lambda _: None)


def test_layers_that_no_text_enters_are_found(tmp_path: Path) -> None:
    """Held against a backward of transformers' own class. DDP would wait for their gradients."""
    keys = Model(model_name_or_path=str(make_vision_model(tmp_path / "model", "mllama")))
    built = build_on_meta(trained_config(load_config(keys), keys), torch.float32)
    whole = open_whole(tmp_path / "model")
    whole(input_ids=torch.arange(5)[None]).logits.logsumexp(-1).sum().backward()
    unread = {name for name, parameter in whole.named_parameters() if parameter.grad is None}
    assert find_unread(built) == unread
    assert any("cross_attn" in name for name in unread)


@pytest.mark.slow
def test_further_families_train_as_the_whole_class(tmp_path: Path) -> None:
    recipes = make_recipes(tmp_path, MORE)
    wanted = [(recipe, "single", 1) for recipe in recipes if not recipe.endswith(("-text", "-dpo"))]
    on_two = [(family, layout, 2) for family in MORE for layout in ("full_shard", "ddp")]
    on_two.append(("mllama-lora", "ddp", 2))
    runs = train_families(tmp_path, recipes, wanted + on_two, wanted)
    for family in MORE:
        for layout, ranks in (("single", 1), ("full_shard", 2), ("ddp", 2)):
            assert_losses(runs(family, layout, ranks), reference.losses(recipes[family]))
        for run in (runs(family, "single", 1), runs(f"{family}-lora", "single", 1)):
            open_whole(run / "export")
