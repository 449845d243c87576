"""LoRA by peft, injected into the transformers model, which keeps its class and its names."""

from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.recipe.schema import Lora


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
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.float32)
        assert parameter.requires_grad == (".lora_" in name), f"{name}: requires_grad is {parameter.requires_grad}"
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
