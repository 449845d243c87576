"""Given an MLP of any family, when it keeps the outputs of gate and up alone, then every number is the same, bit for bit."""

from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from finetune.models.gating import install_gating
from finetune.models.load import build_on_meta
from tests.models import sweep
from tests.plan.traced import allocated_peak, saved_for_backward

GATED = (
    "llama",  # SiLU; gate and up are two layers
    "gemma2",  # GELU in its tanh form
    "phi3",  # gate and up are one layer
)


def make_layers(family: str, dtype: torch.dtype) -> list[Any]:
    """Twice the same random MLP, in training, of which one keeps less."""
    layers = []
    for gated in (False, True):
        model = build_on_meta(sweep.tiny_config(family), dtype)
        if gated:
            install_gating(model)
        layer: Any = next(module for module in model.modules() if hasattr(module, "down_proj"))
        assert ("forward" in vars(layer)) == gated
        layer.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(3)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        layers.append(layer)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", GATED)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_gradients_are_those_of_the_classes_own_forward(
    family: str, dtype: torch.dtype, autocast: bool
) -> None:
    results = []
    for layer in make_layers(family, dtype):
        hidden = next(layer.parameters()).shape[1]
        x = torch.randn(2, 37, hidden, generator=torch.Generator().manual_seed(4)).to(dtype)
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(x)
            with torch.no_grad():
                assert torch.equal(layer(x), output)
        output.float().square().sum().backward()
        results.append([output, x.grad, *(p.grad for p in layer.parameters())])
    for own, gated in zip(*results, strict=True):
        assert torch.equal(own, gated)


@pytest.mark.parametrize("family", GATED)
def test_it_keeps_a_quarter_less_and_its_peak_is_two_tensors_lower(family: str) -> None:
    tokens = 4096
    kept = []
    peaks = []
    for layer in make_layers(family, torch.float32):
        layer.requires_grad_(False)  # as under LoRA: no gradients of weights
        hidden = next(layer.parameters()).shape[1]
        width = layer.down_proj.weight.shape[1] * tokens * 4
        x = torch.randn(tokens, hidden).requires_grad_()
        of_output = torch.ones(tokens, layer.down_proj.weight.shape[0])
        with saved_for_backward(layer.parameters()) as saved:
            layer(x)
        kept.append(sum(saved.values()) / width)
        train = partial(lambda mlp, x, gradient: mlp(x).backward(gradient), layer, x, of_output)
        peaks.append(allocated_peak(train) / width)
    assert kept[0] - kept[1] == pytest.approx(1, abs=0.01)
    assert peaks[0] - peaks[1] == pytest.approx(2, abs=0.01)


def test_the_gradients_of_experts_are_those_of_transformers_gate() -> None:
    model = build_on_meta(sweep.tiny_config("qwen3_moe"), torch.float32)
    install_gating(model)
    experts: Any = next(module for module in model.modules() if hasattr(module, "_apply_gate"))
    assert "_apply_gate" in vars(experts)
    given = torch.randn(5, 24, dtype=torch.bfloat16)
    results = []
    for gate in (experts._apply_gate, partial(type(experts)._apply_gate, experts)):
        gate_up = given.clone().requires_grad_()
        product = gate(gate_up)
        product.float().square().sum().backward()
        results.append((product, gate_up.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


class Scaled(nn.SiLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input).mul(2)


def doubled(forward: Any) -> Any:
    @wraps(forward)  # its source is still that of `forward`
    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * forward(self, x)
        return doubled

    return twice


class Decorated(LlamaMLP):  # type: ignore[misc]
    @doubled
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WithArguments(LlamaMLP):  # type: ignore[misc]
    def forward(self, x, **_: Any):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_a_class_of_a_users_own_that_computes_something_else_stays_as_it_is() -> None:
    config = sweep.tiny_config("llama")
    for kind in (LlamaMLP, Decorated, WithArguments):
        model: Any = build_on_meta(config, torch.float32)
        mlp = model.model.layers[0].mlp = kind(config)
        install_gating(model)
        assert ("forward" in vars(mlp)) == (kind is LlamaMLP)
    mlp = model.model.layers[0].mlp = LlamaMLP(config)
    mlp.act_fn = Scaled()
    phi3: Any = build_on_meta(sweep.tiny_config("phi3"), torch.float32)
    other = phi3.model.layers[0].mlp
    other.act_fn, other.activation_fn = nn.SiLU(), nn.ReLU()  # it reads the second
    for each in (model, phi3):
        install_gating(each)
        assert "forward" not in vars(each.model.layers[0].mlp)


def test_another_activation_and_another_formula_stay_as_they_are() -> None:
    config = sweep.tiny_config("llama")
    config.hidden_act = "relu"
    for each in (config, sweep.tiny_config("nemotron")):
        model = build_on_meta(each, torch.float32)
        install_gating(model)
        assert not any("forward" in vars(module) for module in model.modules())
