"""Linear layers in FP8 against torchao's own, and which ones, against Accelerate's choice; what cannot be multiplied is refused."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config.layout import Fp8, Sharding, gathers_fp8
from finetune.config.schema import Lora, Model, Optimization, Quantization
from finetune.distributed.join import join, leave
from finetune.errors import UserError
from finetune.models.load import build_on_meta, load_model
from finetune.models.probe import without_rounding
from finetune.optim.optimizers import build_optimizer
from finetune.plan.plan import make_plan
from tests.conftest import make_model
from tests.plan.run_specs import recipe
from tests.plan.traced import saved_for_backward

pytest.importorskip("torchao")
from finetune.models.fp8 import Fp8Linear, _make_config, keep_scales_current, multiply_in_fp8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def sharding(layout: Any = "fsdp2", **keys: Any) -> Sharding:
    return Sharding(layout=layout, mixed_precision="bf16", fp8=Fp8(**keys), use_cpu=True)


def pair(name: Any, *, frozen: bool = False) -> tuple[Any, Fp8Linear]:
    """torchao's layer and ours, with the same weight."""
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    linear = nn.Linear(48, 32, dtype=torch.bfloat16)
    linear.weight.requires_grad_(not frozen)
    theirs = Float8Linear.from_float(linear, _make_config(sharding("single", recipe_name=name)))
    ours = copy.deepcopy(theirs)
    ours.__class__ = Fp8Linear
    return theirs, ours


def backward(layer: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 16, 48, generator=generator, dtype=torch.bfloat16).requires_grad_()
    product = layer(inputs)
    product.backward(torch.randn(product.shape, generator=generator, dtype=torch.bfloat16))
    assert inputs.grad is not None
    return [
        product.detach(),
        inputs.grad,
        *([] if layer.weight.grad is None else [layer.weight.grad]),
    ]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_products_and_gradients_are_torchaos(name: str, frozen: bool) -> None:
    theirs, ours = pair(name, frozen=frozen)
    expected, found = backward(theirs), backward(ours)
    assert len(found) == (2 if frozen else 3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    plain = nn.functional.linear(torch.ones(16, 48, dtype=torch.bfloat16), ours.weight, ours.bias)
    assert not torch.equal(ours(torch.ones(16, 48, dtype=torch.bfloat16)), plain)
    ours.is_exact = True
    assert torch.equal(ours(torch.ones(16, 48, dtype=torch.bfloat16)), plain)


def test_a_frozen_layer_does_not_keep_its_input() -> None:
    for frozen, kept_bytes in ((False, 16 * 48 * 2), (True, 0)):
        _, ours = pair("tensorwise", frozen=frozen)
        inputs = torch.randn(16, 48, dtype=torch.bfloat16).requires_grad_()
        with saved_for_backward(ours.parameters()) as kept:
            ours(inputs)
        assert sum(kept.values()) == kept_bytes


def test_under_a_cpus_autocast_the_product_is_in_its_dtype() -> None:
    _, ours = pair("tensorwise")
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(torch.randn(16, 48)).dtype == torch.bfloat16


def test_the_layers_are_those_that_accelerate_chooses(tmp_path: Path) -> None:
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8.float8_linear import Float8Linear
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(make_model(tmp_path / "model", intermediate_size=120))
    theirs, ours = build_on_meta(config, torch.float32), build_on_meta(config, torch.float32)
    convert_model_to_fp8_ao(theirs)
    count = multiply_in_fp8(ours, sharding())
    chosen = {name for name, module in theirs.named_modules() if isinstance(module, Float8Linear)}
    assert {
        name for name, module in ours.named_modules() if isinstance(module, Fp8Linear)
    } == chosen
    assert len(chosen) == count == 2 * 4 - 1  # 120 does not divide by 16: no MLP
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]


def test_adapters_stay_in_the_compute_dtype_and_scales_follow_every_update(tmp_path: Path) -> None:
    world = join(sharding())
    try:
        keys = Model(model_name_or_path=str(make_model(tmp_path / "model")))
        adapted: Any = load_model(keys, Lora(use_peft=True, lora_r=16), 0, world)[0]
        names = {name for name, module in adapted.named_modules() if isinstance(module, Fp8Linear)}
        assert len(names) == 13 and all(name.endswith("base_layer") for name in names)
        model: Any = load_model(keys, Lora(), 0, world)[0]
        optimizer = build_optimizer(model, Optimization(learning_rate=0.1))
        keep_scales_current(model, optimizer)
        inputs = torch.arange(32)[None]
        model(
            input_ids=inputs, labels=inputs, position_ids=inputs, trained_positions=inputs[0]
        ).backward()
        optimizer.step()
        for layer in (module for module in model.modules() if isinstance(module, Fp8Linear)):
            local = layer.weight._local_tensor
            scale = torch.finfo(torch.float8_e4m3fn).max / local._tensor.abs().max().double()
            assert torch.equal(local._precomputed_scale, scale.float())
        with without_rounding(model), torch.no_grad():
            exact = model(input_ids=inputs, use_cache=False).logits
        with torch.no_grad():
            assert not torch.equal(model(input_ids=inputs, use_cache=False).logits, exact)
    finally:
        leave(world)


@pytest.mark.parametrize(
    ("layout", "keys", "gathers"),
    [
        ("fsdp2", {}, True),
        ("fsdp2", {"recipe_name": "rowwise"}, False),
        ("fsdp2", {"enable_fsdp_float8_all_gather": False}, False),
        ("fsdp1", {}, False),
        ("ddp", {}, False),
    ],
)
def test_where_weights_are_gathered_in_8_bits(
    layout: str, keys: dict[str, Any], gathers: bool
) -> None:
    assert gathers_fp8(sharding(layout, **keys)) is gathers


def test_the_plan_refuses_the_same(tmp_path: Path) -> None:
    from dataclasses import replace

    def planned(folder: Path, **keys: Any) -> None:
        own = recipe(lora=bool(keys))
        make_plan(replace(own, model=Model(model_name_or_path=str(folder)), **keys), sharding(), 1)

    dense = make_model(tmp_path / "dense")
    with pytest.raises(UserError, match="a base in 4 bits is multiplied in bf16 only"):
        planned(dense, quantization=Quantization(load_in_4bit=True))
    with pytest.raises(UserError, match="remove use_dora"):
        planned(dense, lora=Lora(use_peft=True, use_dora=True))
    with pytest.raises(
        UserError, match="a mixture of experts cannot be combined with mixed_precision: fp8"
    ):
        planned(make_model(tmp_path / "experts", model_type="mixtral", num_local_experts=4))
    assert "torchao" in sys.modules
