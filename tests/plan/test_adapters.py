"""The planned memory of adapters that peft computes, against what torch allocates."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from finetune.config.schema import Lora, Quantization
from finetune.models.quantized_layers import QuantizedLinear
from finetune.plan.temporary_memory import dora_base_bytes
from tests.conftest import slow_but
from tests.plan.run_specs import LLAMA_31_8B, make_spec
from tests.plan.small_steps import SMALL, planned_share
from tests.plan.traced import allocated_after

NF4 = Quantization(load_in_4bit=True)

CASES = list(product([False, True], [False, True], [0.0, 0.1]))


@pytest.mark.parametrize(
    ("autocast", "recomputes", "dropout"), slow_but([(False, False, 0.0), (True, True, 0.1)], CASES)
)
def test_dora_is_planned_with_its_outputs_and_its_norms(
    autocast: bool, recomputes: bool, dropout: float
) -> None:
    """The norms take as much for few tokens as for many."""
    lora = Lora(use_peft=True, lora_r=8, use_dora=True, lora_dropout=dropout)
    for tokens in (64, 512):
        share = planned_share(
            SMALL, lora=lora, autocast=autocast, recomputes=recomputes, tokens=tokens
        )
        assert 1 <= share < 1.25, (tokens, share)


def test_dora_with_dropout_keeps_a_dequantized_base() -> None:
    """As the layer does that training puts in place of a linear one."""
    from peft import LoraConfig, inject_adapter_in_model

    measured = {}
    planned = {}
    for dropout in (0.0, 0.1):
        lora = Lora(use_peft=True, lora_r=8, use_dora=True, lora_dropout=dropout)
        layer = QuantizedLinear(nn.Linear(512, 512, bias=False), NF4, torch.bfloat16)
        model = nn.Sequential(OrderedDict(linear=layer.to_empty(device="cpu")))
        config = LoraConfig(target_modules=["linear"], use_dora=True, lora_dropout=dropout)
        inject_adapter_in_model(config, model).to(torch.bfloat16)
        inputs = torch.randn(1, 512, dtype=torch.bfloat16, requires_grad=True)
        measured[dropout] = allocated_after(partial(model, inputs))
        spec = make_spec(LLAMA_31_8B, ranks=1)
        recipe = replace(spec.recipe, lora=lora, quantization=NF4)
        planned[dropout] = dora_base_bytes(replace(spec, recipe=recipe))
    of_weight = 2 * 512 * 512
    assert (measured[0.1] - measured[0.0]) // of_weight == 1
    assert planned == {
        0.0: 0,
        0.1: 2 * sum(linear.numel for linear in spec.architecture.linears(0)),
    }
    adapters_of_queries = replace(lora, lora_target_modules=("q_proj",))
    recipe = replace(spec.recipe, lora=adapters_of_queries, quantization=NF4)
    assert dora_base_bytes(replace(spec, recipe=recipe)) == 2 * LLAMA_31_8B["hidden_size"] ** 2  # type: ignore[operator]


@pytest.mark.parametrize(
    ("autocast", "recomputes"),
    slow_but([(True, False), (True, True)], product([False, True], [False, True])),
)
def test_dropout_of_adapters_is_planned(autocast: bool, recomputes: bool) -> None:
    """Under autocast it is computed in fp32, as a whole step shows."""
    lora = Lora(use_peft=True, lora_r=8, lora_dropout=0.1)
    share = planned_share(SMALL, lora=lora, autocast=autocast, recomputes=recomputes)
    assert 1 <= share < 1.15, share
