"""The counted architecture against the model that transformers builds from the same config."""

from typing import Any

import pytest
import torch

from finetune.config.facts import find_layer_class
from finetune.config.families import PLANNED
from finetune.errors import UserError
from finetune.models.head_factors import measure_head_factors
from finetune.plan.architecture import read_architecture, split_config
from tests.vision import whole_config

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_MIXTURE = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "q_lora_rank": None,
}
VARIANTS = [
    SMALL_MIXTURE,
    {},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False, "head_dim": 24},
    {"mlp_only_layers": [0]},
]
BIASES = {"attention_bias": True, "mlp_bias": True}


def _built(
    model_type: str, config: dict[str, object]
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[model_type](**config), attn_implementation="eager"
        )
    model.tie_weights()
    return {name: tuple(p.shape) for name, p in model.named_parameters()}, set(
        model._no_split_modules
    )


@pytest.mark.parametrize("model_type", PLANNED)
def test_every_family_has_the_names_and_shapes_that_transformers_builds(model_type: str) -> None:
    for variant in [*VARIANTS, BIASES]:
        if model_type == "olmoe" and "head_dim" in variant:
            continue  # transformers gives such a model norms of another width, with which it does not run
        config = {"model_type": model_type, **TINY, **variant}
        shapes, wrapped = _built(model_type, {**TINY, **variant})
        architecture = read_architecture(config, "config.json")
        assert {tensor.name: tensor.shape for tensor in architecture.tensors()} == shapes, variant
        assert architecture.parameters == sum(tensor.numel for tensor in architecture.tensors())
        assert find_layer_class(model_type) in wrapped


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        *((model_type, {}) for model_type in PLANNED),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("cohere", {}),
    ],
)
def test_what_a_class_does_to_its_scores_is_read(model_type: str, config: dict[str, Any]) -> None:
    """By the keys of config.json in the table, by the class's forward in a family without a row."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**TINY, **config))
    logits = measure_head_factors(model).logits
    architecture = read_architecture({"model_type": model_type, **TINY, **config}, "config.json")
    assert architecture.scales_logits == (logits.scale != 1.0)
    assert architecture.caps_logits == (logits.softcap is not None)


@pytest.mark.parametrize("model_type", PLANNED)
def test_a_config_that_leaves_sizes_out_is_read_as_transformers_reads_it(model_type: str) -> None:
    bare = {
        "num_hidden_layers": 1,
        "vocab_size": 1000,
    }  # the tokens' ids of some classes lie above a smaller one
    shapes, _ = _built(
        model_type, {**bare, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    )
    architecture = read_architecture({"model_type": model_type, **bare}, "config.json")
    assert {tensor.name: tensor.shape for tensor in architecture.tensors()} == shapes


def test_a_family_that_transformers_does_not_know_is_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"config\.json: .*mambo.*; name the config.json of a transformers model$"
    ):
        read_architecture({"model_type": "mambo"}, "config.json")


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (
            {"model_type": "mixtral"},
            46.7e9,
            12.9e9,
        ),  # Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088): 47B, 13B
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
            30.5e9,
            3.3e9,
        ),  # Qwen3-30B-A3B's card
        (
            {"model_type": "olmoe", "intermediate_size": 1024},
            6.9e9,
            1.3e9,
        ),  # OLMoE-1B-7B (Muennighoff et al. 2024, arXiv:2409.02060)
        ({"model_type": "qwen2_moe"}, 14.3e9, 2.7e9),  # Qwen1.5-MoE-A2.7B's card
        # DeepSeek-V3 (arXiv:2412.19437), without the layer that predicts a second token; 37B with one embedding of two
        ({"model_type": "deepseek_v3"}, 671e9, 37.6e9),
        # gpt-oss (arXiv:2508.10925), table 1; its active ones are without the input embedding
        ({"model_type": "gpt_oss"}, 116.83e9, 5.13e9 + 201088 * 2880),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
            20.91e9,
            3.61e9 + 201088 * 2880,
        ),
    ],
)
def test_a_mixture_has_its_published_numbers_of_parameters(
    config: dict[str, object], total: float, active: float
) -> None:
    architecture = read_architecture(config, "config.json")
    assert architecture.parameters == pytest.approx(total, rel=0.01)
    assert architecture.parameters - architecture.idle_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_experts_are_counted_in_a_config_that_transformers_wrote(family: str) -> None:
    """It writes Qwen3's num_experts, as published configs have it, as num_local_experts."""
    from transformers import AutoConfig

    key = "n_routed_experts" if family == "deepseek_v3" else "num_experts"
    written = AutoConfig.for_model(family, **{key: 16}).to_dict()
    mixture = read_architecture(written, "config.json").mixture
    assert mixture is not None and mixture.experts == 16


@pytest.mark.parametrize(
    "family",
    ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "internvl"],
)
def test_a_vision_language_model_has_the_names_and_shapes_that_transformers_builds(
    family: str,
) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = whole_config(family)
    with init_empty_weights():
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    architecture = read_architecture(
        split_config(config | {"architectures": [type(model).__name__]}), "config.json"
    )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in architecture.tensors()} == shapes
    assert find_layer_class(architecture.model_type) in model._no_split_modules


GEMMA_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
}
GEMMA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "image_size": 896,
}
QWEN_2_5 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
}
QWEN_3 = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
MISTRAL = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "vocab_size": 131072,
}


@pytest.mark.parametrize(
    ("config", "total"),
    [  # the parameters that the hub counts in the files of gemma-3-4b-it, Qwen2.5-VL-7B, Qwen3-VL-8B, Mistral-Small-3.1
        (
            {
                "model_type": "gemma3",
                "text_config": GEMMA_TEXT,
                "vision_config": GEMMA_VISION | {"vision_use_head": False},
            },
            4_300_079_472,
        ),
        (
            QWEN_2_5
            | {
                "model_type": "qwen2_5_vl",
                "num_key_value_heads": 4,
                "vision_config": {"hidden_size": 1280},
            },
            8_292_166_656,
        ),
        (
            {
                "model_type": "qwen3_vl",
                "text_config": QWEN_3 | {"model_type": "qwen3_vl_text"},
                "vision_config": {"out_hidden_size": 4096},
            },
            8_767_123_696,
        ),
        (
            {
                "model_type": "mistral3",
                "text_config": MISTRAL | {"model_type": "mistral"},
                "vision_config": {"patch_size": 14},
            },
            24_011_361_280,
        ),
    ],
)
def test_a_vision_language_model_has_its_published_number_of_parameters(
    config: dict[str, object], total: int
) -> None:
    prefixes = {
        "gemma3": "Gemma3",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen3_vl": "Qwen3VL",
        "mistral3": "Mistral3",
    }
    prefix = prefixes[str(config["model_type"])]
    whole = config | {"architectures": [f"{prefix}ForConditionalGeneration"]}
    assert read_architecture(split_config(whole), "config.json").parameters == total


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_layers_for_multi_token_prediction_are_those_of_transformers(
    model_type: str, layers: int
) -> None:
    """Held against the model that transformers drafts with, and the copies of embedding and head in published files."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    config = {**TINY, **SMALL_MIXTURE, "num_nextn_predict_layers": layers, "num_key_value_heads": 4}
    with torch.device("meta"):
        main = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[model_type](**config), attn_implementation="eager"
        )
        drafting = MtpModel(main, layers)
    own = sum(p.numel() for name, p in drafting.named_parameters() if name.startswith("layers."))
    architecture = read_architecture({"model_type": model_type, **config}, "config.json")
    assert (
        architecture.carried_parameters
        == own + layers * 2 * config["vocab_size"] * config["hidden_size"]
    )
    without = read_architecture(
        {"model_type": model_type, **config, "num_nextn_predict_layers": 0}, "config.json"
    )
    assert without.carried_parameters == 0 and without.parameters == architecture.parameters
