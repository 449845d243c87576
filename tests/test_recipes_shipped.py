"""Every shipped recipe: it is read, its Accelerate file goes with it, and its model is planned on meta, without weights."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.cli import main
from finetune.config.accelerate_file import read_sharding
from finetune.config.pretrained import is_vision_language, load_config, text_config_of
from finetune.config.reader import RECIPES, read_recipe, to_dict, write_recipe
from finetune.distributed.parallelize import find_wrap_classes
from finetune.models.load import build_on_meta
from finetune.models.lora import add_adapters
from tests.conftest import slow_but

FILES = sorted(RECIPES.glob("*.yaml"))


@dataclass(frozen=True)
class Published:
    """What a model's page on the hub says of it: config.json's sizes, and the parameters counted in its safetensors."""

    model_type: str
    parameters: int
    layer: str
    sizes: dict[str, Any]


LLAMA = {
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
}
PUBLISHED = {
    "meta-llama/Llama-3.1-8B": Published(
        "llama",
        8_030_261_248,
        "LlamaDecoderLayer",
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        "llama",
        1_235_814_400,
        "LlamaDecoderLayer",
        LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.3-70B-Instruct": Published(
        "llama",
        70_553_706_496,
        "LlamaDecoderLayer",
        LLAMA
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(
        "mistral",
        7_248_023_552,
        "MistralDecoderLayer",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
        }
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
    ),
    "Qwen/Qwen3-4B-Base": Published(
        "qwen3",
        4_022_468_096,
        "Qwen3DecoderLayer",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
        }
        | {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "google/gemma-3-1b-it": Published(
        "gemma3_text",
        999_885_952,
        "Gemma3DecoderLayer",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
        }
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "HuggingFaceTB/SmolLM3-3B-Base": Published(
        "smollm3",
        3_075_098_624,
        "SmolLM3DecoderLayer",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
        }
        | {
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "pad_token_id": 128004,
        },
    ),
}
PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"] = PUBLISHED["meta-llama/Llama-3.1-8B"]


def test_the_promised_recipes_are_there() -> None:
    assert {
        "quickstart",
        "llama31_8b_full",
        "llama31_8b_lora",
        "llama32_1b_full",
        "llama33_70b_full",
    } | {"llama31_8b_qlora", "llama33_70b_qlora"} <= {file.stem for file in FILES}
    families = {file.stem.partition("_")[0].rstrip("0123456789") for file in FILES}
    assert {"mistral", "qwen", "gemma", "smollm"} <= families


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_read_and_written_as_the_same(file: Path, tmp_path: Path) -> None:
    recipe = read_recipe(file.stem)
    assert recipe.batch.global_batch_size is not None, "the same losses on any number of ranks"
    write_recipe(recipe, tmp_path / "again.yaml")
    assert to_dict(read_recipe(str(tmp_path / "again.yaml"))) == to_dict(recipe)


# A model with adapters takes seconds: of Llama's with the same adapters, one a commit.
ALIKE = ("llama31_8b_dpo", "llama31_8b_qlora", "llama33_70b_qlora")


@pytest.mark.parametrize(
    "file",
    slow_but([file for file in FILES if file.stem not in ALIKE], FILES),
    ids=lambda file: file.stem,
)
def test_its_model_is_planned_on_meta(file: Path) -> None:
    recipe = read_recipe(file.stem)
    ranks = "64" if recipe.run.accelerate_config == "fsdp_hybrid_shard" else "1"
    sharding = read_sharding(None, recipe.run.accelerate_config, {"WORLD_SIZE": ranks})
    assert sharding.layout == "fsdp2"

    while str(recipe.model.model_name_or_path).startswith("runs/"):
        # runs/NAME/export: what another recipe has trained
        base = str(recipe.model.model_name_or_path).split("/")[1]
        recipe = replace(recipe, model=read_recipe(base).model)
    if recipe.model.model_config is not None:
        config, layer, parameters = load_config(recipe.model), "LlamaDecoderLayer", None
    else:
        published = PUBLISHED[str(recipe.model.model_name_or_path)]
        config = AutoConfig.for_model(published.model_type, **published.sizes)
        layer, parameters = published.layer, published.parameters
    model = build_on_meta(config, getattr(torch, recipe.model.dtype))
    assert all(parameter.is_meta for parameter in model.parameters())
    if parameters is None:
        about = 0.5e6 if recipe.teacher is not None else 1e6  # a student of half the size
        about = (
            0.23e6
            if recipe.model.model_config is not None and is_vision_language(config)
            else about
        )
        about = 0.18e6 if "tools" in file.stem else about
        assert 0.9 < sum(p.numel() for p in model.parameters()) / about < 1.1
    else:
        assert sum(p.numel() for p in model.parameters()) == parameters

    if recipe.lora.use_peft:
        add_adapters(model, recipe.lora, torch.bfloat16)
        linear = [m.base_layer for m in model.modules() if hasattr(m, "base_layer")]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == sum(recipe.lora.lora_r * (m.in_features + m.out_features) for m in linear)
        assert len(linear) == 7 * config.num_hidden_layers
    beside = ("CLIPVisionModel", "LlavaMultiModalProjector") if is_vision_language(config) else ()
    assert find_wrap_classes(model, sharding) == (layer, *beside)
    layers = sum(type(module).__name__ == layer for module in model.modules())
    assert layers == text_config_of(config).num_hidden_layers


@pytest.mark.parametrize(
    ("name", "gpus", "memory"),
    [
        ("llama31_8b_full", 8, "80GiB"),
        ("llama31_8b_lora", 1, "24GiB"),
        ("llama31_8b_qlora", 1, "12GiB"),
        ("llama31_8b_dpo", 1, "24GiB"),
        ("llama33_70b_qlora", 1, "80GiB"),
        ("llama33_70b_qlora", 2, "48GiB"),
        ("llama32_1b_full", 1, "40GiB"),
        ("llama33_70b_full", 64, "80GiB"),
        ("mistral_7b_lora", 1, "24GiB"),
        ("qwen3_4b_full", 2, "80GiB"),
        ("qwen3_4b_full", 4, "40GiB"),
        ("gemma3_1b_full", 1, "40GiB"),
        ("smollm3_3b_full", 1, "80GiB"),
    ],
)
def test_it_fits_the_gpus_that_its_first_lines_name(
    name: str, gpus: int, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comment = " ".join(
        line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if line.startswith("#")
    )
    assert memory.removesuffix("GiB") in comment
    published = PUBLISHED[str(read_recipe(name).model.model_name_or_path)]
    AutoConfig.for_model(published.model_type, dtype="bfloat16", **published.sizes).save_pretrained(
        tmp_path
    )
    plan = ["plan", "--recipe", name, "--num-processes", str(gpus), "--gpu-memory", memory]
    assert main([*plan, f"model_name_or_path={tmp_path}", "--json"]) == 0
    if "finetune plan:" in comment:  # what the plan says is quoted, for each number of ranks
        quoted = float(re.findall(rf"([\d.]+)(?: GiB)? on {['one', 'two'][gpus - 1]}", comment)[0])
        assert quoted == round(json.loads(capsys.readouterr().out)["peak_bytes"] / 2**30, 1)
