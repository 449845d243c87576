"""Linear layers, and layers of experts, with frozen weights in 4 or 8 bits.

A weight is two flat parameters, its codes and its scales, whose bytes are seen as numbers of the compute dtype: FSDP2
gathers such parameters without converting them. It shards them anywhere, through blocks and single numbers too, because
no rank computes with its own part: a layer's unit is gathered whole, and dequantized as it would be on one rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from finetune.config.module_names import base_name, is_adapter
from finetune.config.quantization import (
    BLOCK,
    LOAD_KEYS,
    NESTED_BLOCK,
    divide_quantization,
    quantize_to,
    quantized_bytes,
)
from finetune.config.schema import Quantization
from finetune.constants import FP32
from finetune.distributed.language_model import text_modules
from finetune.errors import UserError
from finetune.models.moe.experts import is_experts

NUMBERS_AT_ONCE = (
    1 << 22
)  # bitsandbytes takes some 16 bytes a number while it quantizes on a CPU; a multiple of every block
LARGEST_KERNEL = 1 << 30  # numbers that are dequantized at once: bitsandbytes counts them in 32 bits on a GPU
SAME_PRODUCT = ("FalconLinear",)  # subclasses whose own forward multiplies by the weight and adds the bias


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized weight. Returned by `quantize_tensor`."""

    codes: Tensor  # uint8[bytes]: at 4 bits two numbers in a byte, the first in its upper half; at 8 bits int8 numbers
    scales: Tensor  # uint8[bytes], as `pack_scales` lays them out
    shape: tuple[int, ...]  # [..., columns]
    quantization: Quantization
    block: int = BLOCK  # numbers under one scale, at 4 bits


def quantize_tensor(values: Tensor, quantization: Quantization) -> QuantizedTensor:
    """`values` [..., columns], whole, in their own dtype and on their own device."""
    codes, magnitudes = quantize_blocks(values.flatten(0, -2), quantization)
    return QuantizedTensor(codes, pack_scales(magnitudes, quantization), tuple(values.shape), quantization)


def dequantize_tensor(quantized: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The numbers, `dtype` [..., columns]: what the layer multiplies with where `dtype` is the compute dtype."""
    rows, columns = prod(quantized.shape[:-1]), quantized.shape[-1]
    if quantized.quantization.bits == 8:
        scales = quantized.scales.view(torch.float32)
        # In the order of bitsandbytes' own forward and backward on a CPU.
        numbers = quantized.codes.view(torch.int8).view(rows, columns).to(dtype)
        return numbers.mul_(scales.unsqueeze(1).mul(1.0 / 127.0)).view(quantized.shape)
    ops = _bitsandbytes_ops()
    # As one row of an even length. In several rows bitsandbytes 0.50.2 looks up other blocks' scales on CPUs with
    # AVX-512 where the length of a row is a multiple of 16 and not of 64; and it has no kernel for an odd length.
    block, quant_type = quantized.block, quantized.quantization.bnb_4bit_quant_type
    codes = torch.split(quantized.codes, LARGEST_KERNEL // 2)
    magnitudes = torch.split(unpack_scales(quantized), LARGEST_KERNEL // block)
    parts = [
        ops.dequantize_4bit(some, scales, block, quant_type, (1, 2 * some.numel()), dtype).view(-1)
        for some, scales in zip(codes, magnitudes, strict=True)
    ]
    flat: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat[: rows * columns].view(quantized.shape)


def quantize_blocks(values: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """(codes uint8[bytes], largest magnitudes fp32[blocks]) of consecutive blocks: at 4 bits of any shape, in row-major
    order and with a shorter block at the end of the weight only; at 8 bits of whole rows."""
    from bitsandbytes import functional

    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        values = values.float()
    if quantization.bits == 8:
        # Rounded to fp16 first, as transformers and bitsandbytes do it.
        parts = [
            functional.int8_vectorwise_quant(part.to(torch.float16))[:2]
            for part in torch.split(values, max(1, NUMBERS_AT_ONCE // values.shape[1]))
        ]
        return torch.cat([codes.view(-1).view(torch.uint8) for codes, _ in parts]), torch.cat([m for _, m in parts])
    codes, magnitudes = [], []
    for part in torch.split(values.reshape(-1), NUMBERS_AT_ONCE):
        packed, state = functional.quantize_4bit(part, blocksize=BLOCK, quant_type=quantization.bnb_4bit_quant_type)
        codes.append(packed.view(-1))
        magnitudes.append(state.absmax)
    return torch.cat(codes), torch.cat(magnitudes)


def pack_scales(magnitudes: Tensor, quantization: Quantization) -> Tensor:
    """The scales of a whole weight, uint8[bytes], from the largest magnitudes of all of its blocks, fp32[blocks].

    fp32 magnitudes, or with double quantization their codes, filled up to a multiple of 4, the largest magnitudes of
    those, and the mean, both fp32.
    """
    from bitsandbytes import functional

    if quantization.bits == 8 or not quantization.bnb_4bit_use_double_quant:
        return magnitudes.contiguous().view(torch.uint8)
    with _one_thread():
        mean = magnitudes.mean()
    codes, state = functional.quantize_blockwise(magnitudes - mean, blocksize=NESTED_BLOCK)
    return join_nested_scales(codes, state.absmax, mean)


def join_nested_scales(codes: Tensor, magnitudes: Tensor, mean: Tensor) -> Tensor:
    """The parts of double-quantized scales (uint8[blocks], fp32[nested blocks], fp32), as `pack_scales` packs them."""
    filling = codes.new_zeros(-codes.numel() % FP32)
    return torch.cat([codes, filling, magnitudes.view(torch.uint8), mean.view(1).view(torch.uint8)])


def split_nested_scales(quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of double-quantized scales: codes uint8[blocks], fp32[nested blocks], and the mean, fp32[]."""
    blocks = -(-prod(quantized.shape) // quantized.block)
    nested = quantized.scales[-(-blocks // FP32) * FP32 :].view(torch.float32)
    return quantized.scales[:blocks], nested[:-1], nested[-1]


def unpack_scales(quantized: QuantizedTensor) -> Tensor:
    """The largest magnitude of each block of a 4-bit weight, fp32[blocks]."""
    if not quantized.quantization.bnb_4bit_use_double_quant:
        return quantized.scales.view(torch.float32)
    codes, nested, mean = split_nested_scales(quantized)
    values = nested_values(nested.device)
    magnitudes: Tensor = _bitsandbytes_ops().dequantize_blockwise(codes, nested, values, NESTED_BLOCK, torch.float32)
    return magnitudes + mean


@cache
def nested_values(device: torch.device) -> Tensor:
    """What the 8-bit codes of double-quantized scales stand for, fp32[256] (Dettmers 2016, dynamic tree)."""
    from bitsandbytes import functional

    values: Tensor = functional.create_dynamic_map().to(device)
    return values


def four_bit_values(quant_type: str) -> Tensor:
    """What the 16 codes of `nf4` or `fp4` stand for, fp32[16]."""
    from bitsandbytes import functional

    values: Tensor = functional.get_4bit_type(quant_type, device="cpu")
    return values


def quantized_weights(model: nn.Module) -> list[str]:
    """The weights of `model`, by their names in the base model, that are quantized: those of linear layers but for the
    output head, and of experts. `model` may be on meta, and may have adapters."""
    linears = [f"{base_name(f'{name}.')}weight" for name, _ in linear_layers(model)]
    experts = [f"{path}.{name}" for path, module in expert_layers(model) for name in weights_of(module)]
    return linears + [base_name(name) for name in experts]


def linear_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """The linear layers that are quantized if frozen, by name. Embeddings, norms and head are not, as in QLoRA.

    Raises `UserError` where the model has none.
    """
    head = set(model.get_output_embeddings().modules())  # of an adapted head, its base layer too
    found = [
        (name, module)
        for name, module in text_modules(model)  # a vision tower keeps its precision
        # A subclass with a forward of its own computes something else with its weight.
        if isinstance(module, nn.Linear)
        and (type(module).forward is nn.Linear.forward or type(module).__name__ in SAME_PRODUCT)
        if module not in head and not is_adapter(f"{name}.")
    ]
    if not found:
        raise UserError(
            f"{', '.join(LOAD_KEYS)}: {type(model).__name__} has no linear layers to quantize; leave the key out"
        )
    return found


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of the language model that hold all experts of a layer in one parameter each, by name."""
    return [(name, module) for name, module in text_modules(model) if is_experts(module)]


def weights_of(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The weights [experts, rows, columns] of a layer of experts, not its biases."""
    return {name: weight for name, weight in experts.named_parameters(recurse=False) if weight.dim() == 3}


def _bitsandbytes_ops() -> Any:
    import bitsandbytes  # noqa: F401  # registers them

    return torch.ops.bitsandbytes


@contextmanager
def _one_thread() -> Iterator[None]:
    """A CPU's sum depends on the number of threads; the scales of a run must not. On a GPU this changes nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


CODES, SCALES = "codes", "scales"
Form = tuple[int, int, int, str, bool, int]  # rows, columns, bits, quant_type, double quantization, block


class QuantizedWeight(nn.Module):
    """A quantized, frozen weight [..., columns]: stands in a layer of experts under the name of the parameter.

    `part`: of the `whole` weight, the experts that this rank alone keeps, with the codes and scales of the whole.
    """

    leaf = ""  # ends the name of the weight after the module's

    def __init__(
        self,
        whole: tuple[int, ...],
        quantization: Quantization,
        dtype: torch.dtype,
        block: int = BLOCK,
        part: slice | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.whole, self.whole_quantization, self.part = whole, quantization, part or slice(0, whole[0])
        self.shape, self.block = (self.part.stop - self.part.start, *whole[1:]), block
        self.quantization = quantization if part is None else divide_quantization(prod(self.shape), quantization)
        self.sizes = quantized_bytes(prod(self.shape[:-1]), self.shape[-1], self.quantization, block)
        self.keeps_dequantized = False  # whether what is dequantized is left for autograd to keep
        for name, size in ((CODES, self.sizes.codes), (SCALES, self.sizes.scales)):
            numbers = torch.empty(-(-size // dtype.itemsize), dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))

    def take_part(self, part: slice) -> "QuantizedWeight":
        """The weight, on meta, of these experts alone."""
        taken = QuantizedWeight(self.whole, self.whole_quantization, self.dtype, self.block, part)
        taken.keeps_dequantized = self.keeps_dequantized
        return taken

    def own_scales(self, scales: Tensor) -> Tensor:
        """What this part keeps of the `scales` of the whole weight."""
        if self.shape == self.whole:
            return scales
        each = prod(self.whole[1:-1]) if self.whole_quantization.bits == 8 else prod(self.whole[1:])
        under = 1 if self.whole_quantization.bits == 8 else self.block  # numbers, or rows, under a scale
        first, last = self.part.start * each // under, self.part.stop * each // under
        if not self.whole_quantization.bnb_4bit_use_double_quant:
            return scales.view(torch.float32)[first:last].view(torch.uint8)
        whole = QuantizedTensor(scales[:0], scales, self.whole, self.whole_quantization, self.block)
        if not self.quantization.bnb_4bit_use_double_quant:
            return unpack_scales(whole)[first:last].view(torch.uint8)
        codes, nested, mean = split_nested_scales(whole)
        return join_nested_scales(codes[first:last], nested[first // NESTED_BLOCK : last // NESTED_BLOCK], mean)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which peft asks of a parameter that it adapts."""
        return self.get_parameter(CODES).dtype

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as `dtype` [..., columns], where this rank has the whole of it."""
        weight: Tensor = _dequantize(self.get_parameter(CODES), self.get_parameter(SCALES), *self._form, dtype)
        return weight.view(self.shape)

    @property
    def _form(self) -> Form:
        keys = self.quantization
        assert keys.bits is not None
        double = keys.bnb_4bit_use_double_quant
        return prod(self.shape[:-1]), self.shape[-1], keys.bits, keys.bnb_4bit_quant_type, double, self.block


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """A linear layer with a quantized, frozen weight. The product is in the dtype of the input, or of autocast.

    The weight is dequantized in every forward, and again in backward. In a decoder layer whose activations are
    checkpointed (`keeps_dequantized`) it is not dequantized a third time: the recomputed forward keeps it for the
    backward that follows.
    """

    leaf = ".weight"

    def __init__(self, linear: nn.Linear, quantization: Quantization, dtype: torch.dtype, block: int = BLOCK) -> None:
        super().__init__((linear.out_features, linear.in_features), quantization, dtype, block)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the compute dtype, dequantized at every access: DoRA asks for it."""
        return self.dequantize(self.dtype)

    def stored_weight(self, dtype: torch.dtype) -> tuple[Form | None, Tensor, Tensor | None]:
        """What a backward needs of the weight: form, codes and scales; or the weight in `dtype` alone, if kept so."""
        if self.keeps_dequantized:
            return None, self.dequantize(dtype), None
        return self._form, self.get_parameter(CODES), self.get_parameter(SCALES)

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        if self.keeps_dequantized or not (inputs.requires_grad and torch.is_grad_enabled()):
            return F.linear(inputs, self.dequantize(inputs.dtype), bias)
        codes, scales = self.get_parameter(CODES), self.get_parameter(SCALES)
        product: Tensor = _DequantizedTwice.apply(inputs, codes, scales, bias, self._form)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        kind = self.quantization.bnb_4bit_quant_type if self.quantization.bits == 4 else "int8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


# An operator of its own, into which torch.compile does not look: it cannot follow bytes that are seen as other numbers.
@library.custom_op("finetune::dequantize", mutates_args=())
def _dequantize(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int,
    bits: int,
    quant_type: str,
    double: bool,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [rows, columns] of which `codes` and `scales` are the parameters, padding included."""
    quantization = quantize_to(bits, quant_type, double)
    sizes = quantized_bytes(rows, columns, quantization, block)
    code_bytes, scale_bytes = codes.view(torch.uint8)[: sizes.codes], scales.view(torch.uint8)[: sizes.scales]
    return dequantize_tensor(QuantizedTensor(code_bytes, scale_bytes, (rows, columns), quantization, block), dtype)


@_dequantize.register_fake
def _(codes: Tensor, scales: Tensor, rows: int, columns: int, *form: Any) -> Tensor:
    return codes.new_empty((rows, columns), dtype=form[-1])


def dequantize_parameters(codes: Tensor, scales: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """The weight of a layer of this `form`, from its parameters, as `dtype` [rows, columns]."""
    weight: Tensor = _dequantize(codes, scales, *form, dtype)
    return weight


class _DequantizedTwice(torch.autograd.Function):
    """F.linear with a frozen weight, whose backward dequantizes the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form = form
        return F.linear(inputs, _dequantize(codes, scales, *form, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        codes, scales = ctx.saved_tensors
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None  # trained by `modules_to_save`
        return gradient @ _dequantize(codes, scales, *ctx.form, gradient.dtype), None, None, of_bias, None
