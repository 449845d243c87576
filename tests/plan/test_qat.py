"""The plan of quantization-aware training: what a layer holds while it rounds, beside torch's own allocator."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from finetune.config.layout import Sharding
from finetune.config.schema import Lora, QuantizationAware
from finetune.models.fake_quantize import FakeQuantizedLinear, fake_quantize
from finetune.plan.peaks import find_peak
from finetune.plan.temporary_memory import rounded_bytes
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, make_spec
from tests.plan.traced import allocated_peak

pytest.importorskip("torchao")


class Layer(nn.Module):
    base_model_prefix = "model"

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out, bias=False)

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("scheme", ["int4", "int8-int4", "mxfp4", "nvfp4", "int8-ternary"])
@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_layer_holds_while_it_rounds(scheme: str, tokens: int, adapted: bool) -> None:
    keys = QuantizationAware(quantization_aware_training=scheme)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
    }
    spec = make_spec(LLAMA_31_8B | sizes, ranks=1, sharding=Sharding(layout="single"))
    lora = Lora(use_peft=adapted, lora_r=8)
    spec = replace(
        spec, device="cpu", recipe=replace(spec.recipe, quantization_aware=keys, lora=lora)
    )
    measured = []
    for into, out in ((128, 352), (352, 128)):
        model = Layer(into, out)
        fake_quantize(model, keys)
        layer = model.linear
        assert isinstance(layer, FakeQuantizedLinear)
        weights = [layer.weight]
        if adapted:
            layer.weight.requires_grad_(False)
            weights += [
                torch.randn(8, into, requires_grad=True),
                torch.randn(out, 8, requires_grad=True),
            ]
        inputs = torch.randn(tokens, into).requires_grad_()
        product = layer.multiply(inputs, 1.0, *weights)
        wanted = [inputs, *(each for each in weights if each.requires_grad)]
        gradient = torch.ones_like(product)
        back = allocated_peak(lambda p=product, w=wanted, g=gradient: torch.autograd.grad(p, w, g))
        measured.append(back - sum(each.nbytes for each in wanted))
    planned = rounded_bytes(spec, tokens)
    assert max(measured) <= planned <= 1.5 * max(measured)


def test_rounding_keeps_nothing_more_for_the_backward() -> None:
    keys = QuantizationAware(quantization_aware_training="int4")
    plain = make_spec(LLAMA_31_8B, ranks=8, sharding=FULL_SHARD)
    aware = replace(plain, recipe=replace(plain.recipe, quantization_aware=keys))
    added = find_peak(aware).allocated - find_peak(plain).allocated
    assert 0 <= added <= rounded_bytes(aware, aware.tokens) == 5 * 2 * 4096 * 14336
