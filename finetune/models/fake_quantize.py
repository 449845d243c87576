"""Linear layers that round weights and inputs as the quantized model will (quantization-aware
training), by torchao.

Jacob et al. 2018. Gradients pass the rounding as if it were not there, but where a number is
clamped. The weight that is rounded is the one that the export quantizes: under LoRA the base with
its adapter in it, as merged. It is computed again in the backward instead of being kept, so that a
layer keeps no more than a plain one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.config.module_names import is_adapter
from finetune.config.quantization import SCHEMES
from finetune.config.schema import QuantizationAware
from finetune.constants import ADAPTER_NAME
from finetune.distributed.model_parts import head_modules, product_dtype, text_modules
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of a layer's numbers. torchao finds the scales in each call: all layers share
    it.
    """

    inputs: Callable[[Tensor], Tensor] | None  # None: they are not rounded
    weight: Callable[[Tensor], Tensor]


def torchao_config(keys: QuantizationAware) -> Any:
    """torchao's name for a scheme of whole numbers: what `QATConfig` and `quantize_` take."""
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )

    assert keys.quantization_aware_training is not None
    scheme = SCHEMES[keys.quantization_aware_training]
    dtype = getattr(torch, f"int{scheme.weight_bits}")
    if keys.qat_group_size is None:
        granularity = PerAxis(0)
    else:
        granularity = PerGroup(keys.qat_group_size)
    if scheme.input_bits is None:
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)


def find_quantizable(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of the language model that are quantized, by name: all but the output head
    and adapters.
    """
    head = head_modules(model)
    quantizable = {}
    for name, module in text_modules(model):
        if not isinstance(module, nn.Linear) or type(module) not in (
            nn.Linear,
            FakeQuantizedLinear,
        ):
            continue
        if module not in head and not is_adapter(f"{name}.weight"):
            quantizable[name] = module
    return quantizable


def fake_quantize(model: nn.Module, keys: QuantizationAware) -> int:
    """Has the linear layers of `model` round as the scheme does; returns their number.

    After adapters, before sharding.

    Raises `UserError` where a layer's inputs are no multiple of the group size.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    assert keys.quantization_aware_training is not None
    group = SCHEMES[keys.quantization_aware_training].group_of(keys.qat_group_size)
    layers = find_quantizable(model)
    for name, layer in layers.items():
        if group is not None and layer.in_features % group:
            raise UserError(
                f"qat_group_size: {group} does not divide the {layer.in_features} inputs of "
                f"{name}; set one that does, or null for one scale a row"
            )
    rounding = _make_rounding(keys)
    for layer in layers.values():
        layer.__class__ = FakeQuantizedLinear
        layer.rounding = rounding  # type: ignore[assignment]
        layer.is_rounded = keys.fake_quant_after_n_steps == 0  # type: ignore[assignment]
    for module in model.modules():
        if type(module) is PeftLinear and isinstance(module.base_layer, FakeQuantizedLinear):
            module.__class__ = _adapted_class()
    return len(layers)


def _make_rounding(keys: QuantizationAware) -> Rounding:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    name = keys.quantization_aware_training
    if name in ROUNDED_HERE:
        return Rounding(*(partial(_pass_gradient, each) for each in ROUNDED_HERE[name]))
    sample = nn.Sequential(nn.Linear(keys.qat_group_size or 1, 1, bias=False))
    quantize_(sample, QATConfig(torchao_config(keys), step="prepare"))
    made: Any = sample[0]
    return Rounding(made.activation_fake_quantizer, made.weight_fake_quantizer)


def round_to_mxfp4(numbers: Tensor) -> Tensor:
    """Rounds [..., in] to what MXFP4 holds: 4 bits a number, a power of two for 32 of a row."""
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    scales, codes = quantize_to_mxfp4(numbers)
    block = SCHEMES["mxfp4"].block
    rounded: Tensor = to_dtype(codes, scales, torch.float4_e2m1fn_x2, block, numbers.dtype)
    return rounded


def quantize_to_mxfp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales [..., in / 32] and the codes [..., in / 2], two numbers a byte."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(
        numbers.contiguous(),
        torch.float4_e2m1fn_x2,
        SCHEMES["mxfp4"].block,
        ScaleCalculationMode.RCEIL,  # as torchao's own training for it
    )
    return scales, codes


def round_to_nvfp4(numbers: Tensor) -> Tensor:
    """Rounds [..., in] to what NVFP4 holds: 4 bits a number, a scale in FP8 for 16 of a row, and a
    scale in fp32 for all.
    """
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    block = SCHEMES["nvfp4"].block
    rows = numbers.reshape(-1, numbers.shape[-1]).contiguous()
    # not 0, by which a block of zeros would be divided
    largest = rows.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny * 2**20)
    scale = per_tensor_amax_to_scale(largest)
    block_scales, codes = nvfp4_quantize(rows, block, scale)
    values = f4_unpacked_to_f32(unpack_uint4(codes)).view(len(rows), -1, block)
    scales = scale * block_scales.float().view(len(rows), -1, 1)
    rounded: Tensor = values * scales
    return rounded.view(numbers.shape).to(numbers.dtype)


SMALLEST = 1e-5  # of what a scale is made of, as in the code of BitNet b1.58


def round_to_ternary(numbers: Tensor) -> Tensor:
    """Rounds a weight to -1, 0 or 1 times the mean size of its numbers (BitNet b1.58)."""
    scale = 1.0 / numbers.float().abs().mean().clamp_(min=SMALLEST)
    return _round_scaled(numbers, scale, 1).to(numbers.dtype)


def round_tokens(numbers: Tensor) -> Tensor:
    """Rounds inputs [..., in] to 8 bits, the largest of each token being 127 steps."""
    largest = numbers.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST)
    return _round_scaled(numbers, 127.0 / largest, 127).to(numbers.dtype)


def _round_scaled(numbers: Tensor, scale: Tensor, most: int) -> Tensor:
    """Rounds in fp32; a tie goes up, as in onebitllms."""
    return (numbers.float() * scale).add_(0.5).floor_().clamp_(-most, most).div_(scale)


# scheme -> what rounds (inputs, weights)
ROUNDED_HERE: Mapping[str | None, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mxfp4": (round_to_mxfp4, round_to_mxfp4),
    "nvfp4": (round_to_nvfp4, round_to_nvfp4),
    "int8-ternary": (round_tokens, round_to_ternary),
}


def _pass_gradient(round_numbers: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
    """Rounds; the gradient passes as if it did not. torchao rounds in bf16 and fp32 alone."""
    taken = numbers.float() if numbers.dtype == torch.float16 else numbers
    rounded: Tensor = _StraightThrough.apply(round_numbers, taken)  # type: ignore[no-untyped-call]
    return rounded.to(numbers.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, round_numbers: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
        return round_numbers(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def round_from_step(model: nn.Module, keys: QuantizationAware, step: int) -> None:
    """Turns rounding on where `fake_quant_after_n_steps` updates have been made before `step`
    (0-based), else off.
    """
    if keys.quantization_aware_training is not None:
        for module in model.modules():
            if isinstance(module, FakeQuantizedLinear):
                module.is_rounded = step >= keys.fake_quant_after_n_steps


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """In this block nothing is rounded: a difference in the last bit can move a number to the next
    step of its scale.
    """
    layers = [module for module in model.modules() if isinstance(module, FakeQuantizedLinear)]
    before = [layer.is_rounded for layer in layers]
    for layer in layers:
        layer.is_rounded = False
    try:
        yield
    finally:
        for layer, was_rounded in zip(layers, before, strict=True):
            layer.is_rounded = was_rounded


class FakeQuantizedLinear(nn.Linear):
    """A linear layer of the same parameters, which rounds while `is_rounded`."""

    rounding: Rounding
    is_rounded: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.is_rounded:
            return super().forward(input)
        return self.multiply(input.to(product_dtype(input)), 1.0, self.weight)

    def multiply(self, inputs: Tensor, scale: float, *weights: Tensor) -> Tensor:
        """The rounded product.

        `weights`: the layer's, and under LoRA the adapter's A and B, which count `scale`.
        """
        dtype = product_dtype(inputs)
        if torch.compiler.is_compiling():  # which decides itself what is kept
            rounded = self.rounding.weight(_merge(weights, scale, dtype))
            product = F.linear(_round_inputs(self.rounding, inputs.to(dtype)), rounded)
        else:
            product = _RoundedProduct.apply(self.rounding, dtype, scale, inputs, *weights)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(dtype)


@cache
def _adapted_class() -> type[nn.Module]:
    """peft's layer with another forward. Importing peft takes a second."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    class RoundedLinear(PeftLinear):  # type: ignore[misc]
        def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
            is_usual = not (arguments or keys or self.disable_adapters or self.merged)
            if not is_usual or not self.base_layer.is_rounded:
                output: Tensor = super().forward(x, *arguments, **keys)
                return output
            a = self.lora_A[ADAPTER_NAME].weight
            b = self.lora_B[ADAPTER_NAME].weight
            base: FakeQuantizedLinear = self.base_layer
            return base.multiply(x, self.scaling[ADAPTER_NAME], base.weight, a, b)

    return RoundedLinear


def _merge(weights: tuple[Tensor, ...], scale: float, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, as an export writes it: an adapter is added in float32, and the sum is
    rounded once.
    """
    weight, *adapter = weights
    if not adapter:
        return weight.to(dtype)
    a, b = adapter
    return (weight.float() + scale * (b.float() @ a.float())).to(dtype)


def _round_inputs(rounding: Rounding, inputs: Tensor) -> Tensor:
    if rounding.inputs is None:
        return inputs
    return rounding.inputs(inputs)


class _RoundedProduct(torch.autograd.Function):
    """[..., in] x [out, in] -> [..., out]. Keeps the inputs and the weights as they came."""

    @staticmethod
    def forward(
        ctx: Any,
        rounding: Rounding,
        dtype: torch.dtype,
        scale: float,
        inputs: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.settings = rounding, dtype, scale
        ctx.save_for_backward(inputs, *weights)
        with torch.autocast(inputs.device.type, enabled=False):
            rounded = rounding.weight(_merge(weights, scale, dtype))
            return F.linear(_round_inputs(rounding, inputs.to(dtype)), rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rounding, dtype, scale), (gradient,) = ctx.settings, gradients
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        leaves = [tensor.detach().requires_grad_(is_needed) for tensor, is_needed in pairs]
        inputs, *weights = leaves
        with torch.autocast(gradient.device.type, enabled=False):
            with torch.enable_grad():
                rounded_inputs = _round_inputs(rounding, inputs.to(dtype))
                rounded = rounding.weight(_merge(tuple(weights), scale, dtype))
            rows = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
            products = list[tuple[Tensor, Tensor]]()
            if inputs.requires_grad:
                products.append((rounded_inputs, (rows @ rounded.detach()).view(inputs.shape)))
            if rounded.requires_grad:
                of_weight = rows.t() @ rounded_inputs.detach().reshape(-1, inputs.shape[-1])
                products.append((rounded, of_weight))
        outputs, output_gradients = zip(*products, strict=True)
        leaf_gradients = iter(
            torch.autograd.grad(
                outputs, [each for each in leaves if each.requires_grad], output_gradients
            )
        )
        return (
            None,
            None,
            None,
            *(next(leaf_gradients) if each.requires_grad else None for each in leaves),
        )
