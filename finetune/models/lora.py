"""LoRA by peft: adapters injected into a transformers model, which keeps its class and names, and their first values."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from finetune.distributed.parallelize import Slices, Values
from finetune.errors import UserError
from finetune.recipe.schema import Lora

ADAPTER = ".default.weight"  # the end of an adapter's parameter name: ...lora_A.default.weight


def add_adapters(model: nn.Module, lora: Lora, base_dtype: torch.dtype) -> None:
    """Freezes `model` (still on meta) in `base_dtype` and injects fp32 adapters. Raises `UserError` where
    `lora_target_modules` names no layer of the model."""
    from peft import inject_adapter_in_model

    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wrong = (
        []
        if lora.lora_target_modules == "all-linear"
        else [m for m in lora.lora_target_modules if m.rpartition(".")[2] not in known]
    )
    if wrong:
        raise UserError(
            f"lora_target_modules: {', '.join(wrong)}: no such linear layer in {type(model).__name__}; it has {', '.join(sorted(known))}"
        )
    model.to(base_dtype)
    model.requires_grad_(False)
    inject_adapter_in_model(peft_config(lora, known), model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(torch.float32)
        assert parameter.requires_grad == is_adapter(name), f"{name}: requires_grad is {parameter.requires_grad}"
    assert any(p.requires_grad for p in model.parameters()), "the adapter is empty"


def peft_config(lora: Lora, linear_layers: set[str]) -> Any:
    """The recipe's adapter in peft's terms. `all-linear` is all of `linear_layers` but the head."""
    from peft import LoraConfig

    targets = linear_layers - {"lm_head"} if lora.lora_target_modules == "all-linear" else set(lora.lora_target_modules)
    return LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=sorted(targets),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def with_adapters(
    base: Values, shapes: Mapping[str, torch.Size], seed: int, multiplied: Values | None = None
) -> Values:
    """`base` for the frozen parameters; for adapters their start: A uniform (He et al. 2015 with a = sqrt 5, as in
    peft), B zero, and DoRA's magnitude the norm of each row of the base weight (Liu et al. 2024, eq. 5, at B = 0).

    `multiplied`: the weights that the layers multiply with, where these are not `base`."""
    multiplied = multiplied or base

    def values(name: str, slices: Slices) -> torch.Tensor:
        if not is_adapter(name):
            return base(name, slices)
        if ".lora_A." in name:
            bound = 1 / math.sqrt(shapes[name][1])
            generator = torch.Generator().manual_seed(seed_of(seed, name))
            return torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)[slices]
        if ".lora_B." in name:
            return torch.zeros(shapes[name])[slices]
        if ".lora_magnitude_vector." in name:
            layer = name.split(".lora_magnitude_vector.")[0]
            columns = slice(0, shapes[f"{layer}.lora_A{ADAPTER}"][1])
            rows = multiplied(f"{layer}.base_layer.weight", (slices[0], columns))
            norm: torch.Tensor = torch.linalg.vector_norm(rows.float(), dim=1)
            return norm
        raise AssertionError(f"{name}: an adapter parameter without a start value")

    return values


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """A parameter's name in the base model's files: peft moves an adapted layer's own into `base_layer`."""
    return name.replace(".base_layer.", ".")


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for the tensor or module `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
