"""QLoRA on the mixtures whose names convert: by the family that a name says, losses and gradients are those of transformers, peft and
bitsandbytes alone, with the experts in 4 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune.convert.conversion import convert_file
from finetune.convert.model_names import (
    UNTRIED_IN_FEW_BITS,
    find_refused_models,
    guess_family,
    guess_vision_family,
    is_mixture,
)
from finetune.convert.value_conversion import Conversion
from tests.conftest import let_states_last, make_chat, make_tokenizer
from tests.models.sweep import tiny_config
from tests.training import reference
from tests.training.layouts import assert_losses, train_families, write_recipe
from tests.vision import VOCABULARY, WITH_TOWER_ALONE, make_vision_model

pytest.importorskip("bitsandbytes")

NAMES = {
    "mistralai/Mistral-Small-4-119B-2603": "mistral4",
    "google/gemma-4-26B-A4B-it": "gemma4_text",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe_text",
    "reflection/Beam-1.0-501B-A23B": "beam",
    "arcee-ai/Trinity-Nano-Preview": "afmoe",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear",
    "inclusionAI/Ling-3.0-tiny": "bailing_hybrid",
    "tencent/Hunyuan-A13B-Instruct": "hunyuan_v1_moe",
    "tencent/Hy3-preview": "hy_v3",
    "rednote-hilab/dots.llm1.inst": "dots1",
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie4_5_moe",
    "microsoft/Phi-3.5-MoE-instruct": "phimoe",
    "allenai/FlexOlmo-7x7B-1T": "flex_olmo",
    "upstage/Solar-Open-100B": "solar_open",
    "CohereLabs/command-a-plus-05-2026": "cohere2_moe",
    "zai-org/GLM-5.3-Flash-BF16": "glm5_next_text",
    "zai-org/GLM-5.2": "glm_moe_dsa",
    "zai-org/GLM-4.7-Flash": "glm4_moe_lite",
    "zai-org/GLM-4.5-Air": "glm4_moe",
    "ai21labs/AI21-Jamba-1.5-Large": "jamba",
    "MiniMaxAI/MiniMax-M2": "minimax_m2",
}
FAMILIES = [family for family in NAMES.values() if family not in UNTRIED_IN_FEW_BITS]
UNPACKED = ("glm5_next_text",)  # whose linear attention reads no boundaries of documents
# On a CPU bitsandbytes dequantizes a matrix rightly where its rows are a multiple of 64.
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
OWN: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}


def make_mixture(folder: Path, family: str) -> Path:
    from transformers import AutoModelForCausalLM

    if family in WITH_TOWER_ALONE:
        return make_vision_model(folder, WITH_TOWER_ALONE[family])
    tokenizer, config = make_tokenizer(), tiny_config(family)
    sizes = {
        name: 64 for name in (*WIDTHS, "q_lora_rank", "kv_lora_rank") if getattr(config, name, None)
    }
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    vocabulary = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY)
    for name, value in (sizes | vocabulary | ids | OWN.get(family, {})).items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = let_states_last(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert any(
        ".experts." in name and parameter.dim() == 3 for name, parameter in model.named_parameters()
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_a_name_says_its_family(name: str, family: str) -> None:
    assert guess_family(name) == family and is_mixture(name)
    refused = list(find_refused_models({"base_model": name, "load_in_4bit": True}))
    assert bool(refused) == (family in UNTRIED_IN_FEW_BITS)


@pytest.mark.parametrize(
    ("name", "family", "whole"),
    [
        ("google/medgemma-4b-it", "gemma3_text", "gemma3"),
        ("google/medgemma-27b-text-it", "gemma3_text", "gemma3_text"),
        ("google/translategemma-4b-it", "gemma3_text", "gemma3"),
        ("google/functiongemma-270m-it", "gemma3_text", "gemma3_text"),
        ("google/txgemma-9b-chat", "gemma2", "gemma2"),
        ("google/gemma-4-31B-it", "gemma4_text", "gemma4"),
    ],
)
def test_a_model_on_a_gemma_is_of_its_family(name: str, family: str, whole: str) -> None:
    """By model_type of their config.json."""
    assert (guess_family(name), guess_vision_family(name)) == (family, whole)


def convert(folder: Path, **keys: Any) -> Conversion:
    """The conversion of a file of Axolotl's with these keys."""
    file = {
        "base_model": "org/model",
        "sequence_len": 64,
        "datasets": [{"path": "a", "type": "completion"}],
    }
    (folder / "theirs.yaml").write_text(yaml.safe_dump(file | keys))
    return convert_file(folder / "theirs.yaml")


def test_a_pattern_that_leaves_shared_experts_out_is_listed(tmp_path: Path) -> None:
    """peft matches a pattern with the whole name, and a list of names with its end."""
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    keys = {"base_model": "mistralai/Mistral-Small-4-119B-2603", "adapter": "lora"}
    found = convert(tmp_path, lora_target_modules=pattern, **keys)
    assert any("shared experts get adapters" in line for line in found.differences)
    assert "q_proj" not in found.recipe["lora_target_modules"]  # queries come out of a latent
    by_name = convert(tmp_path, lora_target_modules=["o_proj", "up_proj"], **keys)
    assert not any("shared experts" in line for line in by_name.differences)


def test_a_pattern_of_a_text_model_names_its_layers(tmp_path: Path) -> None:
    pattern = r"model.text_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    keys = {
        "base_model": "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        "adapter": "lora",
        "trust_remote_code": True,
    }
    found = convert(tmp_path, processor_type="AutoProcessor", lora_target_modules=pattern, **keys)
    assert found.recipe["lora_target_modules"] == ["q_proj", "up_proj"]
    assert not any("vision tower by these names" in line for line in found.differences)
    assert "trust_remote_code" not in found.recipe


def test_no_key_of_axolotls_is_lost(tmp_path: Path) -> None:
    """A mapping under `tokens`, which only the older examples have, and the loss at which a run is stopped."""
    found = convert(tmp_path, tokens={"pad_token": "<|padding|>"}, loss_watchdog_threshold=5.0)
    assert any(line.startswith("tokens: ") for line in found.differences)
    assert any(line.startswith("loss_watchdog_threshold: 5.0") for line in found.remarks)


@pytest.mark.parametrize(
    ("name", "experts"), [("meta-llama/Llama-3.3-70B-Instruct", 1), ("zai-org/GLM-4.7", 32)]
)
def test_a_model_that_is_not_here_has_layers_for_a_pipeline_and_experts_in_each_stage(
    name: str, experts: int, tmp_path: Path
) -> None:
    sizes = {"strategy": "fsdp2", "tp_size": 1, "pp_size": 2, "ep_size": experts}
    model = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": name,
    }
    data = {
        "_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset",
        "dataset_name": "a/b",
    }
    file = {
        "step_scheduler": {"global_batch_size": 64},
        "model": model,
        "distributed": sizes,
        "dataset": data,
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(file))
    found = convert_file(tmp_path / "theirs.yaml")
    assert found.recipe["pipeline_parallel_size"] == 2 and "0 layers" not in str(found.remarks)
    assert found.recipe.get("expert_parallel_size", 1) == experts
    assert "the run has" not in str(found.remarks)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    data = make_chat(folder / "chat.jsonl", rows=8)
    keys: dict[str, Any] = {
        "global_batch_size": 2,
        "max_steps": 2,
        "use_peft": True,
        "load_in_4bit": True,
        "lora_r": 4,
    }
    keys |= {"lora_target_modules": ["o_proj"]}
    return {
        family: write_recipe(
            folder / f"{family}.yaml",
            make_mixture(folder / family / "model", family),
            data,
            packing=family not in UNPACKED,
            **keys,
        )
        for family in FAMILIES
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_its_losses_are_those_of_transformers_peft_and_bitsandbytes(
    family: str, recipes: dict[str, Path]
) -> None:
    folder = recipes[family].parent
    runs = train_families(folder, recipes, [(family, "single", 1)], [])
    assert_losses(runs(family, "single", 1), reference.losses(recipes[family]))


def test_a_key_of_mixtures_refuses_true_as_a_number_of_experts() -> None:
    """Though True equals 1 in Python."""
    for value, is_refused in ((True, True), (2, True), (1, False), (False, False)):
        assert bool(list(find_refused_models({"use_moe": value}))) == is_refused
