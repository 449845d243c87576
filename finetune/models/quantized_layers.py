"""Layers with frozen weights in 4 or 8 bits: put into a model on meta, sharded with it, filled with each rank's bytes.

A weight is two flat parameters, its codes and its scales, whose bytes are seen as numbers of the compute dtype: FSDP2
gathers such parameters without converting them. It shards them anywhere, through blocks and single numbers too, because
no rank computes with its own part: a layer's unit is gathered whole, and dequantized as it would be on one rank.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.distributed.tensor import DTensor

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
from finetune.distributed.model_parts import Values, find_local_slices, is_experts, text_modules
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.quantized_weights import (
    QuantizedTensor,
    StoredQuantized,
    dequantize_tensor,
    join_nested_scales,
    pack_scales,
    quantize_blocks,
    split_nested_scales,
    unpack_scales,
)

SAME_PRODUCT = ("FalconLinear",)  # subclasses whose own forward multiplies by the weight and adds the bias


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


CODES, SCALES = "codes", "scales"
Form = tuple[int, int, int, str, bool, int]  # rows, columns, bits, quant_type, double quantization, block


class QuantizedWeight(nn.Module):
    """A quantized, frozen weight [..., columns]: stands in a layer of experts under the name of the parameter.

    part: The experts this rank keeps; their codes and scales are those of the whole weight.
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
    after: Tensor | None = None,
) -> Tensor:
    """The weight [rows, columns] of which `codes` and `scales` are the parameters, padding included.

    after: A backward passes its gradient. With the forward's arguments alone, torch.compile would merge both calls and
        keep the weight from one to the other.
    """
    quantization = quantize_to(bits, quant_type, double)
    sizes = quantized_bytes(rows, columns, quantization, block)
    code_bytes, scale_bytes = codes.view(torch.uint8)[: sizes.codes], scales.view(torch.uint8)[: sizes.scales]
    return dequantize_tensor(QuantizedTensor(code_bytes, scale_bytes, (rows, columns), quantization, block), dtype)


@_dequantize.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int,
    bits: int,
    quant_type: str,
    double: bool,
    block: int,
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


def dequantize_parameters(
    codes: Tensor, scales: Tensor, form: Form, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    """The weight of a layer of this `form`, from its parameters, as `dtype` [rows, columns].

    after: In a backward, its gradient.
    """
    weight: Tensor = _dequantize(codes, scales, *form, dtype, after)
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
        weight = _dequantize(codes, scales, *ctx.form, gradient.dtype, gradient)
        return gradient @ weight, None, None, of_bias, None


def recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """The modules whose activations are recomputed in the backward anyway."""
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True]
    return {inner for module in checkpointed for inner in module.modules()}


def quantize_layers(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype, stored: Mapping[str, StoredQuantized]
) -> frozenset[str]:
    """Puts quantized linear layers, in `dtype`, into `model` on meta, and returns the names of their parameters.

    `stored`: the weights that are quantized in the files already; where there are any, those and no others. Call it
    after adapters and activation checkpointing are in place. Raises `UserError` where no layer can be quantized, or one
    is stored quantized that cannot be kept so.
    """
    checkpointed = recomputed_modules(model)
    added, left = set(), set(stored)
    for name, linear in linear_layers(model):
        weight = base_name(f"{name}.weight")
        if linear.weight.requires_grad or (stored and weight not in stored):  # modules_to_save are trained
            continue
        left.discard(weight)
        layer = QuantizedLinear(linear, quantization, dtype, stored[weight].block if stored else BLOCK)
        layer.keeps_dequantized = linear in checkpointed
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        added |= {f"{name}.{CODES}", f"{name}.{SCALES}"}
    if left:
        raise UserError(
            f"{min(left)} is stored in {quantization.bits} bits, but only frozen linear layers other than the output "
            "head are kept quantized here; name the unquantized model"
        )
    return frozenset(added)


def quantized_layers(model: nn.Module) -> list[tuple[str, QuantizedWeight]]:
    """The quantized linear layers and experts' weights of `model`, sharded or not, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedWeight)]


def fill_quantized_layers(
    model: nn.Module, values: Values, stored: Mapping[str, StoredQuantized], world: World
) -> None:
    """Fills the quantized layers of the sharded `model`. All ranks with these layers call it together.

    Args:
        values: The plain weights. Each rank reads and quantizes the blocks that its shard of the codes touches; a
            double-quantized scale depends on all blocks of its weight, so ranks exchange their magnitudes.
        stored: The weights that the files hold quantized already; where there are any, those are read instead.
    """
    for name, layer in quantized_layers(model):
        weight = f"{name}{layer.leaf}"
        if stored:
            _fill_stored(layer, stored[base_name(weight)])
        else:
            _fill(weight, layer, values, world)


@torch.no_grad()
def _fill(weight: str, layer: QuantizedWeight, values: Values, world: World) -> None:
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    in_rows = layer.quantization.bits == 8
    columns, numbers = layer.whole[-1], prod(layer.whole)
    block = columns if in_rows else layer.block  # numbers
    block_bytes = block if in_rows else block // 2
    start = layer.part.start * prod(layer.whole[1:]) // block * block_bytes  # of this rank's experts
    begin, end = start + begin, start + end
    magnitudes = torch.zeros(-(-numbers // block), device=world.device)
    if begin < end:
        first, last = begin // block_bytes, -(-end // block_bytes)
        part = _read_numbers(weight, layer.whole, values, first * block, min(last * block, numbers)).to(world.device)
        own, magnitudes[first:last] = quantize_blocks(part.view(-1, columns) if in_rows else part, layer.quantization)
        codes.copy_(own[begin - first * block_bytes : end - first * block_bytes])
    if isinstance(layer.get_parameter(CODES), DTensor):
        # Blocks that two ranks share, and replicas of hybrid sharding, have the same magnitude on each.
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX, world.stage_group)
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(layer.own_scales(pack_scales(magnitudes, layer.whole_quantization))[begin:end])


@torch.no_grad()
def _fill_stored(layer: QuantizedWeight, stored: StoredQuantized) -> None:
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    codes.copy_(stored.read_codes(begin, end))
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(stored.read_scales()[begin:end])


def _own_bytes(parameter: nn.Parameter, size: int) -> tuple[Tensor, int, int]:
    """This rank's bytes of a parameter, and their begin and end in the whole of `size`; padding is zeroed."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    (bounds,) = find_local_slices(parameter)
    own = local.zero_().view(torch.uint8)
    begin = min(bounds.start * local.dtype.itemsize, size)
    end = min(begin + own.numel(), size)
    return own[: end - begin], begin, end


def _read_numbers(weight: str, shape: tuple[int, ...], values: Values, begin: int, end: int) -> Tensor:
    """The numbers `begin` to `end` of the weight, in row-major order, from the rows (or experts) that hold them."""
    each = prod(shape[1:])
    first, last = begin // each, -(-end // each)
    rows = values(weight, (slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.reshape(-1)[begin - first * each : end - first * each]
