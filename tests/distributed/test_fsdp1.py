"""Units of FSDP, and what FSDP1 cannot train: it is refused in a sentence, before weights are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.layout import Sharding
from finetune.distributed.parallelize import find_wrap_classes
from finetune.errors import UserError
from finetune.models.cross_entropy import CrossEntropyHead
from tests.ranks import ROOT, launch_ranks
from tests.training.layouts import write_config

SIZES = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1}


def make_llama(is_tied: bool) -> Any:
    """On meta, with the head that trains it: a linear layer's subclass."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, tie_word_embeddings=is_tied)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        model.lm_head = CrossEntropyHead(32, 64, bias=False)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize("is_tied", [True, False])
def test_no_unit_of_a_size_holds_the_embedding_or_a_linear_layer(is_tied: bool) -> None:
    """The head is one, and would be a unit apart from the embedding that it is tied to."""
    sharding = Sharding(layout="fsdp2", wrapping="SIZE_BASED_WRAP", min_num_params=1)
    units = find_wrap_classes(make_llama(is_tied), sharding)
    assert units == ("LlamaAttention", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm")


@pytest.mark.parametrize(
    ("layout", "name", "is_tied", "said"),
    [
        ("fsdp1", "Embedding", True, "whose weights are tied; name LlamaDecoderLayer alone"),
        ("fsdp2", "Linear", True, "whose weights are tied"),
        ("fsdp2", "LlamaModel", False, "and the embedding is a unit itself"),
        ("fsdp1", "LlamaModel", False, None),
        ("fsdp2", "Embedding", False, None),
    ],
)
def test_a_named_unit_that_cannot_be_one_is_refused(
    layout: Any, name: str, is_tied: bool, said: str | None
) -> None:
    sharding = Sharding(layout=layout, wrap_classes=("LlamaDecoderLayer", name), source="my.yaml")
    if said is None:
        assert name in find_wrap_classes(make_llama(is_tied), sharding)
    else:
        with pytest.raises(UserError, match=rf"my\.yaml: wraps {name}: .*{said}"):
            find_wrap_classes(make_llama(is_tied), sharding)


def test_tied_weights_are_trained_in_units_of_any_size(
    tiny_llama: Callable[..., Path], tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    config = tmp_path / "fsdp1.yaml"
    config.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": SIZES}))
    losses = {}
    for ranks, flags in ((1, []), (2, ["--config", str(config)])):
        folder = tmp_path / f"run-{ranks}"
        recipe = tiny_recipe(
            model_name_or_path=str(model),
            output_dir=str(folder),
            packing=False,
            export_at_end=False,
        )
        script = ROOT / "finetune" / "run.py"
        ended = launch_ranks(script, ["--recipe", str(recipe), *flags], ranks=ranks)
        assert ended.returncodes == (0,) * ranks, ended.outputs[0]
        lines = map(json.loads, (folder / "metrics.jsonl").open())
        losses[ranks] = [line["loss"] for line in lines if "loss" in line]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)


def test_lora_under_fsdp1_on_one_rank_is_refused_by_name(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(tmp_path, "FULL_SHARD")
    recipe = tiny_recipe(use_peft=True)
    ended = launch_ranks(
        ROOT / "finetune" / "run.py", ["--recipe", str(recipe), "--config", str(config)], ranks=1
    )
    assert ended.returncodes == (2,), ended.outputs[0]
    place, said = ended.outputs[0].splitlines()[-1].split(": ", 1)
    assert place.startswith(f"{config}:") and said == (
        "frozen parameters (LoRA's base, frozen_modules) cannot be combined with FSDP1 with NO_SHARD or one rank "
        f"({config}); use ddp, or for one rank accelerate_config: single, or set fsdp_version: 2"
    )
    assert "Traceback" not in ended.outputs[0]
