"""Values from a seed: a pure function of (seed, name, slices), the family's own initialization."""

from typing import Any

import torch

from finetune.config.schema import Model
from finetune.models.load import build_on_meta
from finetune.models.weights import seeded_values
from finetune.pretrained_config import load_config

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
