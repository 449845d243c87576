"""In bf16, a family's log-probabilities and gradients are as near to those in fp32 as those of transformers and peft in bf16.

Tests in fp32 do not cast. What is rounded in 16 bits and should not be, as RoPE's frequencies or a router's bias, shows here."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import finetune
from finetune.config.layout import MixedPrecision, Sharding
from tests.conftest import make_model
from tests.models.families import EVERY, relative_distance
from tests.ranks import ROOT

LENGTH = 1900  # tokens; at such a distance RoPE of rounded frequencies turns by another angle
TEXT = "".join(chr(97 + (i * i * 7 + i * 3) % 26) if i % 6 else " " for i in range(LENGTH))
ROWS = [{"messages": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": TEXT}]}]
# (family, what of it differs from tests/models/families.py at this size)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt_oss": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "granite": {},
    "smollm3": {},
    "nemotron": {},
    "gpt_neox": {},
    "lfm2": {},
    "qwen3_5_text": {},
}
QUICK = ("llama", "qwen3")
# method -> (recipe keys, mixed_precision, dtype of transformers' weights)
METHODS: dict[str, tuple[dict[str, Any], MixedPrecision, torch.dtype]] = {
    "full": ({}, "bf16", torch.float32),
    "full, weights in bf16": ({"dtype": "bfloat16"}, "no", torch.bfloat16),
    "lora": (
        {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"},
        "bf16",
        torch.bfloat16,
    ),
}
Measured = tuple[Tensor, dict[str, Tensor]]  # log-probabilities of the labels, gradients by name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in CASES],
)
def test_bf16_is_as_near_to_fp32_as_in_transformers(
    family: str, method: str, tmp_path: Path
) -> None:
    keys, precision, dtype = METHODS[method]
    folder = make_model(
        tmp_path / "model",
        model_type=family,
        initializer_range=0.15,
        max_position_embeddings=2048,
        **EVERY[family] | CASES[family],
    )
    recipe = {
        "model_name_or_path": str(folder),
        "datasets": [{"path": str(ROOT / "recipes" / "quickstart" / "train.jsonl")}],
        "output_dir": str(tmp_path / "run"),
        "max_length": 2048,
        "max_steps": 1,
        "global_batch_size": 1,
        "learning_rate": 1e-3,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe | keys))
    sharding = Sharding(layout="single", mixed_precision=precision, use_cpu=True)
    with finetune.Session(finetune.load_recipe(file), sharding) as session:
        batch = session.batch(ROWS)
        ours = session.log_probabilities(batch)[0].detach()
        ours = ours[ours != 0]  # its end is padding
        session.forward_backward(batch)
        weights = dict(session.model.named_parameters())
        our_gradients = {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
        (micro_batch,) = batch.micro_batches
    is_adapted = method == "lora"
    adapters = {name: weight.detach() for name, weight in weights.items()} if is_adapted else None
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    theirs, their_gradients = measure(folder, dtype, autocast, micro_batch.inputs, adapters)
    true, true_gradients = measure(
        folder, torch.float32, nullcontext(), micro_batch.inputs, adapters
    )
    assert our_gradients.keys() == their_gradients.keys() == true_gradients.keys()
    assert relative_distance(ours, true) < 1.1 * relative_distance(theirs, true)
    our_gradient, their_gradient, true_gradient = (
        torch.cat([gradients[name].float().flatten() for name in true_gradients])
        for gradients in (our_gradients, their_gradients, true_gradients)
    )
    assert relative_distance(our_gradient, true_gradient) < 1.1 * relative_distance(
        their_gradient, true_gradient
    )
    assert relative_distance(theirs, true) > 1e-4  # it is bf16


def measure(
    folder: Path,
    dtype: torch.dtype,
    autocast: AbstractContextManager[Any],
    inputs: dict[str, Tensor],
    adapters: dict[str, Tensor] | None,
) -> Measured:
    """One row by transformers' model, with peft's adapters of the given weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    prefix = ""
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        prefix = "base_model.model."
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.data = adapters[name.removeprefix(prefix)].clone()
    with autocast:
        logits = model.train()(input_ids=inputs["input_ids"], use_cache=False).logits[0]
    labels = inputs["labels"][0]
    is_trained = labels != -100
    scores = torch.log_softmax(logits[is_trained].float(), -1)
    chosen = scores.gather(1, labels[is_trained][:, None])[:, 0]
    (-chosen.mean()).backward()
    gradients = {
        name.removeprefix(prefix): weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return chosen.detach(), gradients
