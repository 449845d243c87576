"""The plan of a run in FP8: what FSDP gathers, what a cast holds, by torch's own allocator, and the time at both peaks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config.layout import Fp8
from finetune.flops import FP8_SPEEDUP, flop_per_token
from finetune.plan.speed import estimate_speed
from finetune.plan.temporary_memory import fp8_bytes, plan_layout_memory
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, make_spec
from tests.plan.traced import allocated_peak

FP8 = replace(FULL_SHARD, fp8=Fp8())


def test_a_layer_is_gathered_in_8_bits_but_for_its_norms_and_the_first_projection() -> None:
    spec, bf16 = (
        make_spec(LLAMA_31_8B, ranks=8, sharding=sharding) for sharding in (FP8, FULL_SHARD)
    )
    hidden, key_value, inner = 4096, 1024, 14336
    linears = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner
    first = hidden * hidden  # q_proj of layer 0
    gathered = linears - first + 2 * (first + 2 * hidden)
    layer = plan_layout_memory(spec).layer
    assert layer.gathered == layer.arriving == gathered
    assert plan_layout_memory(bf16).layer.gathered == 2 * (linears + 2 * hidden)
    assert len(spec.fp8_weights) == 32 * 7 - 1


def test_rowwise_gathers_in_bf16() -> None:
    rowwise = make_spec(LLAMA_31_8B, ranks=8, sharding=replace(FP8, fp8=Fp8("rowwise")))
    bf16 = make_spec(LLAMA_31_8B, ranks=8)
    assert plan_layout_memory(rowwise) == plan_layout_memory(bf16)


def test_the_time_is_at_both_peaks() -> None:
    spec, bf16 = (
        make_spec(LLAMA_31_8B, ranks=1, sharding=sharding) for sharding in (FP8, FULL_SHARD)
    )
    seconds, plain = estimate_speed(spec, 0.4), estimate_speed(bf16, 0.4)
    multiplied = sum(spec.fp8_weights.values())
    whole = flop_per_token(
        parameters=8_030_261_248 - 128256 * 4096, layers=32, heads=32, head_size=128, length=8192
    )
    share = 6 * multiplied / whole
    assert plain.flop_per_token == whole
    assert seconds.seconds_per_step / plain.seconds_per_step == pytest.approx(
        1 - share * (1 - 1 / FP8_SPEEDUP)
    )
    accurate = make_spec(LLAMA_31_8B, ranks=1, sharding=replace(FP8, fp8=Fp8("rowwise_with_gw_hp")))
    assert (
        seconds.seconds_per_step
        < estimate_speed(accurate, 0.4).seconds_per_step
        < plain.seconds_per_step
    )


@pytest.mark.parametrize(("hidden", "is_said"), [(2048, True), (4096, False)])
def test_narrow_layers_get_a_remark_that_bf16_is_faster(hidden: int, is_said: bool) -> None:
    spec = make_spec(LLAMA_31_8B | {"hidden_size": hidden, "head_dim": 128}, ranks=1, sharding=FP8)
    notes = [str(problem) for problem in spec.find_problems() if problem.is_note]
    assert any("the casts to FP8 cost more" in note for note in notes) == is_said


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_what_a_layer_holds_while_it_casts(name: Any, tokens: int) -> None:
    """On a CPU: of torch's allocator, at the highest, without what the layer returns."""
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    from finetune.models.fp8 import Fp8Linear, _make_config

    sharding = replace(FP8, layout="single", fp8=Fp8(name))
    config = LLAMA_31_8B | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
    }
    spec = replace(make_spec(config, ranks=1, sharding=sharding), device="cpu")
    measured = []
    for out, into in ((352, 128), (128, 352)):
        layer = Float8Linear.from_float(
            nn.Linear(into, out, bias=False, dtype=torch.bfloat16), _make_config(sharding)
        )
        layer.__class__ = Fp8Linear
        inputs = torch.randn(tokens, into, dtype=torch.bfloat16).requires_grad_()
        products: list[torch.Tensor] = []
        forward = allocated_peak(
            lambda layer=layer, inputs=inputs, products=products: products.append(layer(inputs))
        )
        grad = torch.randn_like(products[0])
        back = allocated_peak(lambda grad=grad, products=products: products[0].backward(grad))
        returned = inputs.nbytes + layer.weight.nbytes
        measured += [forward - products[0].nbytes, back - returned]
    planned = fp8_bytes(spec, tokens)
    assert max(measured) <= planned
    if name != "tensorwise" or multiplies_copies():
        assert planned <= 1.6 * max(measured)


def multiplies_copies() -> bool:
    """Whether this CPU has no product of numbers in 8 bits with one scale: torch then multiplies copies in fp32, as is planned."""
    a, b = (torch.zeros(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())
    return (
        allocated_peak(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16))
        > 2 * 4 * a.numel()
    )
