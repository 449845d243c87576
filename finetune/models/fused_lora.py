"""A linear layer with its LoRA adapter as one operation: y = x W^T + s (x A^T) B^T (Hu et al. 2021, eq. 3).

peft adds them layer by layer: in the forward it writes three more tensors of the output's size (the adapter's product,
scaled, and the sum), and in the backward two (the scaled gradient, and the second gradient of the input). Under
autocast each adapter keeps a cast copy of the input that several layers share. Here the adapter is added by the product
itself, and the input is kept as it is.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from finetune.constants import ADAPTER_NAME
from finetune.models.quantized.linear import Form, QuantizedLinear, dequantize_parameters


def fuse_adapters(model: nn.Module) -> int:
    """Has the LoRA layers of `model` whose adapters are plain compute in one operation; returns how many they are.

    Layers with dropout or DoRA stay peft's. For layouts in which the adapter's matrices are whole in the forward of the
    layer: not under FSDP1, whose units they are, nor tensor parallelism, which divides them.
    """
    from peft.tuners.lora.layer import Linear

    layers = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for layer in layers:
        layer.__class__ = _fused_class()
    return len(layers)


def _is_plain(layer: Any) -> bool:
    has_dropout = isinstance(layer.lora_dropout[ADAPTER_NAME], nn.Dropout)
    return not (
        has_dropout or layer.lora_variant or layer.fan_in_fan_out or layer.lora_B[ADAPTER_NAME].bias is not None
    )


@cache
def _fused_class() -> type[nn.Module]:
    """peft's layer with another forward, under the same name. Importing peft takes a second."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    class Linear(PeftLinear):  # type: ignore[misc]
        def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
            is_usual = not (arguments or keys or self.disable_adapters or self.merged)
            if not is_usual or not _is_fusable(self.base_layer):
                output: Tensor = super().forward(x, *arguments, **keys)
                return output
            return _multiply(self, x)

    return Linear


def _is_fusable(base: nn.Module) -> bool:
    """Whether this layer's weight and bias are frozen, and multiplied as they are, or dequantized."""
    bias: Any = base.bias
    return type(base) in (nn.Linear, QuantizedLinear) and (bias is None or not bias.requires_grad)


def _multiply(layer: Any, x: Tensor) -> Tensor:
    base, device = layer.base_layer, x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    form, weight, scales = base.stored_weight(dtype) if type(base) is QuantizedLinear else (None, base.weight, None)
    a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    product: Tensor = _LoraLinear.apply(x, a, b, layer.scaling[ADAPTER_NAME], base.bias, dtype, form, weight, scales)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], product.shape[-1])  # outside, so that a model may add to it in place (Falcon)


class _LoraLinear(torch.autograd.Function):
    """[..., in] -> [rows, out]; weight [out, in], or codes and scales under a `form`; a [rank, in], b [out, rank].

    Computed in `dtype`, whatever autocast says. Kept for the backward: the input as it came, and x A^T [..., rank].
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        bias: Tensor | None,
        dtype: torch.dtype,
        form: Form | None,
        weight: Tensor,
        scales: Tensor | None,
    ) -> Tensor:
        ctx.scale, ctx.dtype, ctx.form = scale, dtype, form
        with torch.autocast(inputs.device.type, enabled=False):
            rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
            base = _restore(weight, scales, form, dtype).t()
            product = rows @ base if bias is None else torch.addmm(bias.to(dtype), rows, base)
            inner = rows @ a.to(dtype).t()
            product = torch.addmm(product, inner, b.to(dtype).t(), alpha=scale)
        ctx.save_for_backward(inputs, inner, a, b, weight, scales)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, inner, a, b, weight, scales = ctx.saved_tensors
        dtype, of_inputs, of_a, of_b = ctx.dtype, None, None, None
        with torch.autocast(inputs.device.type, enabled=False):
            of_output = gradient.to(dtype)
            of_inner = (of_output @ b.to(dtype)) * ctx.scale
            if ctx.needs_input_grad[2]:
                of_b = ((of_output.t() @ inner) * ctx.scale).to(b.dtype)
            if ctx.needs_input_grad[1]:
                of_a = (of_inner.t() @ inputs.reshape(-1, inputs.shape[-1]).to(dtype)).to(a.dtype)
            if ctx.needs_input_grad[0]:
                of_rows = of_output @ _restore(weight, scales, ctx.form, dtype)
                # Not addmm_, which models/cpu_products.py cannot override.
                of_inputs = torch.addmm(of_rows, of_inner, a.to(dtype), out=of_rows).view(inputs.shape).to(inputs.dtype)
        return of_inputs, of_a, of_b, None, None, None, None, None, None


def _restore(weight: Tensor, scales: Tensor | None, form: Form | None, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] as `dtype`."""
    if form is None:
        return weight.to(dtype)
    assert scales is not None
    return dequantize_parameters(weight, scales, form, dtype)
