"""Linear layers with a frozen weight in 4 or 8 bits.

A weight is two flat parameters, its codes and its scales, whose bytes are seen as numbers of the compute dtype: FSDP2 gathers
such parameters without converting them. It shards them anywhere, through blocks and single numbers too, because no rank
computes with its own part: a layer's unit is gathered whole, and dequantized as it would be on one rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from finetune.config.quantization import BLOCK, quantized_bytes
from finetune.config.schema import Quantization
from finetune.models.quantize import QuantizedTensor, dequantize_tensor

CODES, SCALES = "codes", "scales"
Form = tuple[int, int, int, str, bool, int]  # rows, columns, bits, quant_type, double quantization, block


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized, frozen weight. The product is in the dtype of the input, or of autocast.

    The weight is dequantized in every forward, and again in backward. In a decoder layer whose activations are checkpointed
    (`keeps_dequantized`) it is not dequantized a third time: the recomputed forward keeps it for the backward that follows.
    """

    def __init__(self, linear: nn.Linear, quantization: Quantization, dtype: torch.dtype, block: int = BLOCK) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantization, self.block = quantization, block
        self.sizes = quantized_bytes(self.out_features, self.in_features, quantization, block)
        for name, size in ((CODES, self.sizes.codes), (SCALES, self.sizes.scales)):
            numbers = torch.empty(-(-size // dtype.itemsize), dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        self.keeps_dequantized = False

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in the compute dtype, dequantized at every access: DoRA asks for it."""
        return self.dequantize(self.get_parameter(CODES).dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as `dtype` [out_features, in_features], where this rank has the whole of it."""
        weight: Tensor = _dequantize(self.get_parameter(CODES), self.get_parameter(SCALES), *self._form, dtype)
        return weight

    def stored_weight(self, dtype: torch.dtype) -> tuple[Form | None, Tensor, Tensor | None]:
        """What a backward needs of the weight: form, codes and scales; or the weight in `dtype` alone, where it is kept so."""
        if self.keeps_dequantized:
            return None, self.dequantize(dtype), None
        return self._form, self.get_parameter(CODES), self.get_parameter(SCALES)

    @property
    def _form(self) -> Form:
        keys = self.quantization
        assert keys.bits is not None
        double = keys.bnb_4bit_use_double_quant
        return self.out_features, self.in_features, keys.bits, keys.bnb_4bit_quant_type, double, self.block

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
    quantization = Quantization(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="fp4" if quant_type == "fp4" else "nf4",
        bnb_4bit_use_double_quant=double,
    )
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
