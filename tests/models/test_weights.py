"""Values from a seed: a pure function of (seed, name, slices), the family's own initialization."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM, LlamaModel

from finetune.config.pretrained import load_config
from finetune.config.schema import Model
from finetune.errors import UserError
from finetune.models.load import build_on_meta
from finetune.models.weights import seeded_values
from tests.vision import whole_config

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.05,
}
QUERY = "model.layers.1.self_attn.q_proj"


def values_of(seed: int) -> Any:
    config = load_config(Model(model_config=SIZES))
    return seeded_values(lambda: build_on_meta(config, torch.float32), seed)


def everything(*shape: int) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def test_a_slice_is_a_part_of_the_whole_and_order_does_not_matter() -> None:
    whole = values_of(1)(f"{QUERY}.weight", everything(64, 64))
    values = values_of(1)
    values("model.embed_tokens.weight", everything(300, 64))
    part = values(f"{QUERY}.weight", (slice(10, 20), slice(0, 64)))
    assert torch.equal(part, whole[10:20])
    assert not torch.equal(values_of(2)(f"{QUERY}.weight", everything(64, 64)), whole)


def test_it_is_the_familys_own_initialization() -> None:
    values = values_of(1)
    assert abs(values(f"{QUERY}.weight", everything(64, 64)).std().item() - 0.05) < 0.005
    assert torch.equal(values("model.norm.weight", everything(64)), torch.ones(64))


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl"])
def test_a_vision_language_model_is_initialized_as_by_transformers(family: str) -> None:
    """Its tower by the tower's own rules, some of which stand in the module that holds the weights."""
    config = AutoConfig.for_model(**whole_config(family))
    whole = AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(whole).__name__]
    values = seeded_values(lambda: build_on_meta(config, torch.float32), 0)
    for name, parameter in whole.named_parameters():
        found = values(name, everything(*parameter.shape))
        assert found.isfinite().all() and (found.std() > 0) == (parameter.std() > 0), name
        if parameter.numel() > 300 and parameter.std() > 0:
            assert found.std().item() == pytest.approx(parameter.std().item(), rel=0.25), name


def test_a_parameter_that_gets_no_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    monkeypatch.setattr(LlamaModel, "_init_weights", lambda self, module: None)
    with pytest.raises(
        UserError, match=f"model_config: transformers gives {QUERY}.weight no value"
    ):
        values_of(1)(f"{QUERY}.weight", everything(64, 64))
