"""Exports of models that write no text: their configs, their cards and the lines on how to use them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from finetune.config.methods import METHODS
from finetune.export.card import render_card
from finetune.export.export import export_source
from finetune.export.publish import ExportOptions
from finetune.export.source import Adapter, Source, open_source
from tests.conftest import make_model
from tests.export.test_lora_merge import make_adapter
from tests.vision import make_vision_model

HEADS: dict[str, tuple[str, Any]] = {
    "SEQ_CLS": ("reward", AutoModelForSequenceClassification),
    "TOKEN_CLS": ("process_reward", AutoModelForTokenClassification),
}
SCORE = "base_model.model.score.weight"


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_length_of_an_embedding_is_found_by_whatever_name_the_config_has_for_it(
    model_type: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", model_type=model_type)
    config = json.loads((model / "config.json").read_text())
    source = replace(open_source(model), state={"recipe": {"method": "embed"}})
    out = export_source(source, tmp_path / "out", ExportOptions(verify=False))
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    name = "n_embd" if model_type == "gpt2" else "hidden_size"
    assert pooling["word_embedding_dimension"] == config[name]


def make_scorer(base: Path, folder: Path, task_type: str) -> tuple[Path, Path]:
    """A folder of a model with a head of three scores, and one of an adapter with such a head for `base`."""
    config = AutoConfig.from_pretrained(base, num_labels=3)
    config.token_classification_bias = False
    _, auto_class = HEADS[task_type]
    model = auto_class.from_pretrained(base, config=config)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["score"], task_type=task_type
    )
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def run_use_lines(card: str, base: Path, adapter: Path) -> Any:
    """Runs the Python of the card's section "Use", and returns its `model`."""
    code = re.findall(r"```python\n(.*?)```", card.partition("## Use")[2], re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code.replace('"BASE"', repr(str(base))).replace("PATH_OR_NAME", str(adapter)), names)
    return names["model"]


@pytest.mark.parametrize("quantization", [{}, {"load_in_4bit": True}, {"load_in_8bit": True}])
@pytest.mark.parametrize("kind", [*HEADS, "CAUSAL_LM", "vision"])
def test_the_lines_of_an_adapters_card_open_it_on_its_base(
    kind: str, quantization: dict[str, bool], tmp_path: Path
) -> None:
    method = "sft"
    if kind == "vision":
        base = described = make_vision_model(tmp_path / "base", "qwen2_5_vl")
        adapter = tmp_path / "adapter"
        get_peft_model(
            AutoModelForImageTextToText.from_pretrained(base),
            LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        ).save_pretrained(adapter)
        class_name = "Qwen2_5_VLForConditionalGeneration"
    elif kind == "CAUSAL_LM":
        base = described = make_model(tmp_path / "base")
        adapter = make_adapter(base, tmp_path / "adapter", task_type=kind)
        class_name = "LlamaForCausalLM"
    else:
        base = make_model(tmp_path / "base")
        described, adapter = make_scorer(base, tmp_path, kind)
        method, auto_class = HEADS[kind]
        class_name = auto_class.__name__.replace("AutoModel", "Llama")
    source = Source(
        described,
        described,
        {},
        adapter=Adapter({"peft_type": "LORA"}, {}),
        state={"recipe": {"method": method, "use_peft": True, **quantization}},
    )
    model = run_use_lines(render_card(source, "a", is_adapter=True), base, adapter)
    opened = model.get_base_model()
    if kind == "vision":  # training quantizes the language model only
        tower = [type(module) for module in opened.model.visual.modules()]
        assert {kind for kind in tower if issubclass(kind, torch.nn.Linear)} == {torch.nn.Linear}
    if kind in HEADS:
        assert torch.equal(
            opened.score.weight, load_file(adapter / "adapter_model.safetensors")[SCORE]
        )
    assert type(opened).__name__ == class_name
    kinds = {
        type(module.base_layer).__name__
        for name, module in opened.named_modules()
        if name.endswith("q_proj")
    }
    bits = next(iter(quantization), "")
    assert kinds == {
        {"load_in_4bit": "Linear4bit", "load_in_8bit": "Linear8bitLt"}.get(bits, "Linear")
    }


@pytest.mark.parametrize("method", ["reward", "process_reward", "rerank", "embed", "sft"])
def test_no_program_that_writes_text_is_named_for_an_adapter_that_writes_none(
    method: str, tmp_path: Path
) -> None:
    described = base = make_model(tmp_path / "base", model_type="qwen2")
    task_type = "TOKEN_CLS" if method == "process_reward" else "SEQ_CLS"
    if method in ("reward", "process_reward", "rerank"):
        described, adapter = make_scorer(base, tmp_path, task_type)
    else:
        adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    source = open_source(adapter, base_model=str(described))
    source = replace(source, state={"recipe": {"method": method, "use_peft": True}})
    said: list[str] = []
    options = ExportOptions(model=False, verify=False)
    export_source(source, tmp_path / "out", options, said.append)
    assert any(line.startswith("use") for line in said) == (method == "sft")


ORIGINS = {
    "sft": "A causal language model",
    "masked_diffusion": "A language model that fills in masked tokens",
    "reward": "A reward model",
    "process_reward": "A process reward model",
    "classify": "A classifier",
    "embed": "An embedding model",
    "rerank": "A reranker",
}


def test_the_kind_of_every_method_without_a_language_model_is_named() -> None:
    assert {name for name, facts in METHODS.items() if facts.masks or not facts.writes_text} == {
        *ORIGINS
    } - {"sft"}


@pytest.mark.parametrize("method", ORIGINS)
def test_a_card_says_what_a_model_from_random_weights_is(method: str, tmp_path: Path) -> None:
    recipe = {"method": method, "model_config": "tiny.json"}
    source = Source(tmp_path, tmp_path, {}, state={"recipe": recipe})
    origin = f"\n{ORIGINS[method]}, trained from random weights.\n"
    assert origin in render_card(source, "a")
    source = replace(source, adapter=Adapter({"peft_type": "LORA"}, {}))
    origin = origin.replace("A", "A LoRA adapter for a", 1)
    assert origin in render_card(source, "a", is_adapter=True)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}},
            "A model with a head of scores.",
        ),
        ({"model_type": "llama"}, "A causal language model."),
    ],
)
def test_a_card_says_what_a_model_of_no_recipe_is(
    config: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"\n{kind}\n" in render_card(Source(tmp_path, tmp_path, {}), "a")
