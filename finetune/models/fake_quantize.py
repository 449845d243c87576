"""Quantization-aware training: linear layers that round as the quantized model will.

Jacob et al. 2018; torchao rounds in most schemes. Gradients pass the rounding as if it were not
there; in torchao's schemes, a number that is clamped has none. The weight that is rounded is the
one that the export quantizes: under LoRA the base with the adapter merged into it. It is computed
again in the backward instead of being kept, so that a layer keeps no more than a plain one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.config.quantization import SCHEMES
from finetune.config.schema import QuantizationAware
from finetune.constants import ADAPTER_NAME
from finetune.distributed.model_parts import product_dtype, text_linears
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class Rounding:
    """The functions that round a layer's inputs and weight.

    They compute the scales in each call, so all layers share them.
    """

    inputs: Callable[[Tensor], Tensor] | None  # None: inputs are not rounded
    weight: Callable[[Tensor], Tensor]

    def round_inputs(self, inputs: Tensor) -> Tensor:
        """Rounds the inputs, if the scheme rounds inputs."""
        return inputs if self.inputs is None else self.inputs(inputs)


def _make_torchao_config(keys: QuantizationAware) -> Any:
    """Makes torchao's config of a scheme of whole numbers, for torchao's `QATConfig`."""
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
    """Finds the linear layers that are quantized, by name.

    They are those of the language model, without the output head and adapters.
    """
    return {
        name: layer
        for name, layer in text_linears(model)
        if type(layer) in (nn.Linear, FakeQuantizedLinear)
    }


def fake_quantize(model: nn.Module, keys: QuantizationAware) -> int:
    """Makes the linear layers of `model` round as the recipe's scheme does.

    Call it after adapters are added, and before sharding.

    Returns:
        The number of layers that round.

    Raises:
        UserError: The group size does not divide a layer's number of inputs.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    assert keys.quantization_aware_training is not None
    group_size = SCHEMES[keys.quantization_aware_training].group_of(keys.qat_group_size)
    layers = find_quantizable(model)
    for name, layer in layers.items():
        if group_size is not None and layer.in_features % group_size:
            raise UserError(
                f"qat_group_size: {group_size} does not divide the {layer.in_features} inputs of "
                f"{name}; set one that does, or null for one scale a row"
            )
    rounding = _make_rounding(keys)
    for layer in layers.values():
        layer.__class__ = FakeQuantizedLinear
        layer.rounding = rounding  # type: ignore[assignment]
        layer.is_rounded = keys.fake_quant_after_n_steps == 0  # type: ignore[assignment]
    for module in model.modules():
        if type(module) is PeftLinear and isinstance(module.base_layer, FakeQuantizedLinear):
            module.__class__ = _make_adapted_class()
    return len(layers)


def _make_rounding(keys: QuantizationAware) -> Rounding:
    """Makes the rounding of the recipe's scheme, by ROUNDED_HERE or else by torchao."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    scheme = keys.quantization_aware_training
    if scheme in ROUNDED_HERE:
        round_inputs, round_weight = ROUNDED_HERE[scheme]
        return Rounding(
            partial(_round_straight_through, round_inputs),
            partial(_round_straight_through, round_weight),
        )
    # torchao makes its rounding functions for a layer; those of the smallest one serve all layers.
    sample = nn.Sequential(nn.Linear(keys.qat_group_size or 1, 1, bias=False))
    quantize_(sample, QATConfig(_make_torchao_config(keys), step="prepare"))
    sample_layer: Any = sample[0]
    return Rounding(sample_layer.activation_fake_quantizer, sample_layer.weight_fake_quantizer)


def round_to_mxfp4(numbers: Tensor) -> Tensor:
    """Rounds numbers [..., in] to values of MXFP4.

    A number has 4 bits, and 32 adjacent numbers of a row share a scale, a power of two.
    """
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    scales, codes = quantize_to_mxfp4(numbers)
    block = SCHEMES["mxfp4"].block
    rounded: Tensor = to_dtype(codes, scales, torch.float4_e2m1fn_x2, block, numbers.dtype)
    return rounded


def quantize_to_mxfp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes numbers [..., in] to MXFP4.

    Returns:
        (scales [..., in / 32], codes [..., in / 2] with two numbers in a byte).
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(
        numbers.contiguous(),
        torch.float4_e2m1fn_x2,
        SCHEMES["mxfp4"].block,
        ScaleCalculationMode.RCEIL,  # as in torchao's own quantization-aware training
    )
    return scales, codes


def round_to_nvfp4(numbers: Tensor) -> Tensor:
    """Rounds numbers [..., in] to values of NVFP4.

    A number has 4 bits, 16 adjacent numbers of a row share a scale in FP8, and all numbers share a
    scale in fp32.
    """
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    block = SCHEMES["nvfp4"].block
    rows = numbers.reshape(-1, numbers.shape[-1]).contiguous()
    # The clamp keeps the scale above 0: a block of zeros would be divided by it.
    largest = rows.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny * 2**20)
    scale = per_tensor_amax_to_scale(largest)
    block_scales, codes = nvfp4_quantize(rows, block, scale)
    values = f4_unpacked_to_f32(unpack_uint4(codes)).view(len(rows), -1, block)
    scales = scale * block_scales.float().view(len(rows), -1, 1)
    rounded: Tensor = values * scales
    return rounded.view(numbers.shape).to(numbers.dtype)


# a mean or largest magnitude that a scale is made of is at least this, as in BitNet b1.58's code
SMALLEST = 1e-5


def round_to_ternary(numbers: Tensor) -> Tensor:
    """Rounds a weight to -1, 0 or 1 times the mean magnitude of its numbers (BitNet b1.58)."""
    scale = 1.0 / numbers.float().abs().mean().clamp_(min=SMALLEST)
    return _round_scaled(numbers, scale, most=1).to(numbers.dtype)


def round_tokens(numbers: Tensor) -> Tensor:
    """Rounds inputs [..., in] to 8 bits: the largest magnitude of each token becomes 127 steps."""
    largest = numbers.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST)
    return _round_scaled(numbers, 127.0 / largest, most=127).to(numbers.dtype)


def _round_scaled(numbers: Tensor, scale: Tensor, most: int) -> Tensor:
    """Rounds numbers to multiples of 1 / scale, clamped to `most` of them in either direction.

    It computes in fp32. A tie goes up, as in onebitllms.
    """
    return (numbers.float() * scale).add_(0.5).floor_().clamp_(-most, most).div_(scale)


# schemes that this file rounds -> (what rounds inputs, what rounds a weight)
ROUNDED_HERE: Mapping[str | None, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mxfp4": (round_to_mxfp4, round_to_mxfp4),
    "nvfp4": (round_to_nvfp4, round_to_nvfp4),
    "int8-ternary": (round_tokens, round_to_ternary),
}


def _round_straight_through(round_numbers: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
    """Rounds numbers, and passes their gradient as if they were not rounded."""
    # torchao rounds only bf16 and fp32.
    roundable = numbers.float() if numbers.dtype == torch.float16 else numbers
    rounded: Tensor = _StraightThrough.apply(round_numbers, roundable)  # type: ignore[no-untyped-call]
    return rounded.to(numbers.dtype)


class _StraightThrough(torch.autograd.Function):
    """Rounds in the forward; the backward returns the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, round_numbers: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
        return round_numbers(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (gradient,) = gradients
        return None, gradient


def round_from_step(model: nn.Module, keys: QuantizationAware, step: int) -> None:
    """Turns rounding on from step `fake_quant_after_n_steps` on (0-based), and off before it.

    step: The step that is about to run, or the number of steps that have run.
    """
    if keys.quantization_aware_training is not None:
        for module in model.modules():
            if isinstance(module, FakeQuantizedLinear):
                module.is_rounded = step >= keys.fake_quant_after_n_steps


class FakeQuantizedLinear(nn.Linear):
    """A linear layer with the parameters of a plain one, which rounds while `is_rounded`."""

    rounding: Rounding
    is_rounded: bool
    is_exact = False  # does not round even so; `without_rounding` of models/probe.py sets it

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.is_rounded or self.is_exact:
            return super().forward(input)
        adapter_scale = 1.0  # there is no adapter
        return self.multiply(input.to(product_dtype(input)), adapter_scale, self.weight)

    def multiply(self, inputs: Tensor, scale: float, *weights: Tensor) -> Tensor:
        """Computes the layer's output from rounded inputs and a rounded weight.

        Args:
            inputs: [..., in].
            scale: The adapter's scale.
            weights: The layer's weight [out, in]; under LoRA also the adapter's A [rank, in] and B
                [out, rank].

        Returns:
            [..., out], in the dtype of products.
        """
        dtype = product_dtype(inputs)
        if torch.compiler.is_compiling():  # the compiler decides what is kept for the backward
            rounded_weight = self.rounding.weight(_merge(weights, scale, dtype))
            product = F.linear(self.rounding.round_inputs(inputs.to(dtype)), rounded_weight)
        else:
            product = _RoundedProduct.apply(self.rounding, dtype, scale, inputs, *weights)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(dtype)


@cache
def _make_adapted_class() -> type[nn.Module]:
    """Makes a class of peft's linear layer that rounds the base with the adapter merged into it.

    It is made in a function, since importing peft takes a second.
    """
    from peft.tuners.lora.layer import Linear as PeftLinear

    class RoundedLinear(PeftLinear):  # type: ignore[misc]
        def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> Tensor:
            # Other calls, such as those with the adapter off, are left to peft.
            is_usual = not (arguments or keys or self.disable_adapters or self.merged)
            base: FakeQuantizedLinear = self.base_layer
            if not is_usual or not base.is_rounded or base.is_exact:
                output: Tensor = super().forward(x, *arguments, **keys)
                return output
            a = self.lora_A[ADAPTER_NAME].weight
            b = self.lora_B[ADAPTER_NAME].weight
            return base.multiply(x, self.scaling[ADAPTER_NAME], base.weight, a, b)

    return RoundedLinear


def _merge(weights: tuple[Tensor, ...], scale: float, dtype: torch.dtype) -> Tensor:
    """Returns the weight with its adapter in `dtype`, as an export writes it.

    The adapter is added in fp32, and the sum is rounded once.

    Args:
        weights: (weight [out, in]), or (weight, A [rank, in], B [out, rank]).
        scale: The adapter's scale.
        dtype: The dtype of products.
    """
    weight, *adapter = weights
    if not adapter:
        return weight.to(dtype)
    a, b = adapter
    return (weight.float() + scale * (b.float() @ a.float())).to(dtype)


class _RoundedProduct(torch.autograd.Function):
    """Multiplies rounded inputs [..., in] by the rounded weight [out, in]: [..., out].

    It saves the inputs and weights unrounded, and the backward rounds them again.
    """

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
            rounded_weight = rounding.weight(_merge(weights, scale, dtype))
            return F.linear(rounding.round_inputs(inputs.to(dtype)), rounded_weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rounding, dtype, scale = ctx.settings
        (gradient,) = gradients
        _rounding, _dtype, _scale, *are_needed = ctx.needs_input_grad
        pairs = zip(ctx.saved_tensors, are_needed, strict=True)
        leaves = [tensor.detach().requires_grad_(is_needed) for tensor, is_needed in pairs]
        inputs, *weights = leaves
        with torch.autocast(gradient.device.type, enabled=False):
            with torch.enable_grad():  # from the leaves to what was multiplied
                rounded_inputs = rounding.round_inputs(inputs.to(dtype))
                rounded_weight = rounding.weight(_merge(tuple(weights), scale, dtype))
            rows = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
            factors = []  # those of the product that need a gradient
            factor_gradients = []
            if inputs.requires_grad:
                factors.append(rounded_inputs)
                factor_gradients.append((rows @ rounded_weight.detach()).view(inputs.shape))
            if rounded_weight.requires_grad:
                input_rows = rounded_inputs.detach().reshape(-1, inputs.shape[-1])
                factors.append(rounded_weight)
                factor_gradients.append(rows.t() @ input_rows)
        needed_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        leaf_gradients = iter(torch.autograd.grad(factors, needed_leaves, factor_gradients))
        return (
            None,
            None,
            None,
            *(next(leaf_gradients) if leaf.requires_grad else None for leaf in leaves),
        )
