"""Layers with frozen weights in 4 or 8 bits: put into a model on meta, sharded with it, filled with
each rank's bytes.

A quantized weight is two flat parameters: the codes of its numbers, and the scales of its blocks.
Their bytes are viewed as numbers of the compute dtype, because FSDP2 gathers parameters of that
dtype without converting them. FSDP2 may cut these parameters anywhere, also within a block or a
number of the weight, so no rank computes with its shard. It gathers all shards of a layer's unit,
and dequantizes as one rank would.
"""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.distributed.tensor import DTensor

from finetune.config.module_names import base_name
from finetune.config.quantization import (
    BLOCK,
    LOAD_KEYS,
    NESTED_BLOCK,
    divide_quantization,
    quantize_to,
    quantized_bytes,
)
from finetune.config.schema import Quantization
from finetune.constants import Shape, ceil_div
from finetune.distributed.model_parts import (
    Values,
    find_local_slices,
    is_experts,
    product_dtype,
    text_linears,
    text_modules,
)
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

# subclasses of nn.Linear whose own forward computes what nn.Linear's does
SAME_PRODUCT = ("FalconLinear",)


def quantized_weights(model: nn.Module) -> list[str]:
    """Lists the weights of linear layers and of experts that are quantized if they are frozen.

    `model` may be on meta, and may have adapters. The names are those of the base model.
    """
    of_linears = [f"{base_name(f'{name}.')}weight" for name, _ in linear_layers(model)]
    return of_linears + [base_name(name) for name in list_expert_weights(model)]


def linear_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """Lists the linear layers whose weights are quantized if they are frozen, as (name, layer).

    Embeddings, norms and the output head are not quantized, as in QLoRA.

    Raises `UserError` where the model has no such layer.
    """
    layers = [(name, layer) for name, layer in text_linears(model) if _is_plain(layer)]
    if not layers:
        raise UserError(
            f"{', '.join(LOAD_KEYS)}: {type(model).__name__} has no linear layers to quantize; "
            "leave the key out"
        )
    return layers


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer multiplies as nn.Linear does; a subclass may compute something else."""
    return type(linear).forward is nn.Linear.forward or type(linear).__name__ in SAME_PRODUCT


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists the modules of the language model whose parameters hold all experts of a layer, as
    (name, module).
    """
    return [(name, module) for name, module in text_modules(model) if is_experts(module)]


def expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights [experts, rows, columns] in a layer of experts by name; no biases."""
    return {
        name: weight
        for name, weight in experts.named_parameters(recurse=False)
        if weight.dim() == 3
    }


def list_expert_weights(model: nn.Module) -> list[str]:
    """Lists the names of the weights that hold all experts of a layer."""
    return [
        f"{path}.{name}" for path, module in expert_layers(model) for name in expert_weights(module)
    ]


CODES = "codes"
SCALES = "scales"
# How a weight is quantized, as arguments of `dequantize_bytes`: (rows, columns, bits, quant_type,
# double quantization, block).
Form = tuple[int, int, int, str, bool, int]


class QuantizedWeight(nn.Module):
    """A quantized, frozen weight [..., columns].

    In a layer of experts it replaces the parameter of the same name.

    Attributes:
        full_shape, full_quantization: Of the weight with the experts of all ranks.
        part: The experts that this rank keeps, as a slice of the first dimension. Their codes and
            scales are taken from those of the full weight.
        shape, quantization: Of that part.
        sizes: The bytes of the part's codes and scales, without padding.
        keeps_dequantized: Whether autograd may keep the dequantized weight for the backward.
    """

    leaf = ""  # what follows the module's name in the name of the weight

    def __init__(
        self,
        full_shape: Shape,
        quantization: Quantization,
        dtype: torch.dtype,
        block: int = BLOCK,
        part: slice | None = None,
    ) -> None:
        """Makes the parameters of the codes and scales, on meta.

        Args:
            full_shape: [..., columns].
            quantization: How the full weight is quantized.
            dtype: The compute dtype, as which the bytes are viewed.
            block: Numbers under one scale, in 4 bits; not read in 8 bits.
            part: The experts to keep, as a slice of the first dimension; None for all.
        """
        nn.Module.__init__(self)
        self.full_shape = full_shape
        self.full_quantization = quantization
        self.part = part or slice(0, full_shape[0])
        self.shape = (self.part.stop - self.part.start, *full_shape[1:])
        self.block = block
        if part is None:
            self.quantization = quantization
        else:
            self.quantization = divide_quantization(prod(self.shape), quantization)
        self.sizes = quantized_bytes(
            prod(self.shape[:-1]), self.shape[-1], self.quantization, block
        )
        self.keeps_dequantized = False
        for name, size in ((CODES, self.sizes.codes), (SCALES, self.sizes.scales)):
            numbers = torch.empty(ceil_div(size, dtype.itemsize), dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))

    def take_part(self, part: slice) -> "QuantizedWeight":
        """Returns a quantized weight of these experts alone, on meta."""
        weight_part = QuantizedWeight(
            self.full_shape, self.full_quantization, self.dtype, self.block, part
        )
        weight_part.keeps_dequantized = self.keeps_dequantized
        return weight_part

    def select_scales(self, scales: Tensor) -> Tensor:
        """Selects the scales of this part from those of the full weight.

        Args:
            scales: uint8[bytes], of the full weight, as `pack_scales` lays them out.

        Returns:
            uint8[bytes], of the part, in the same layout. If the part cuts a block of
            double-quantized scales, they become fp32.
        """
        if self.shape == self.full_shape:
            return scales
        first_block = self.count_blocks(self.part.start)
        end_block = self.count_blocks(self.part.stop)
        if not self.full_quantization.bnb_4bit_use_double_quant:
            return scales.view(torch.float32)[first_block:end_block].view(torch.uint8)
        no_codes = scales[:0]
        full_weight = QuantizedTensor(
            no_codes, scales, self.full_shape, self.full_quantization, self.block
        )
        if not self.quantization.bnb_4bit_use_double_quant:
            return unpack_scales(full_weight)[first_block:end_block].view(torch.uint8)
        scale_codes, nested_scales, mean = split_nested_scales(full_weight)
        part_nested = nested_scales[first_block // NESTED_BLOCK : end_block // NESTED_BLOCK]
        return join_nested_scales(scale_codes[first_block:end_block], part_nested, mean)

    def count_blocks(self, experts: int) -> int:
        """Counts the blocks, and so the scales, of the first `experts` experts of the full weight.

        In 8 bits a block is a row, in 4 bits `self.block` numbers.
        """
        if self.full_quantization.bits == 8:
            return experts * prod(self.full_shape[1:-1])
        return experts * prod(self.full_shape[1:]) // self.block

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype. peft reads it from a parameter that it adapts."""
        return self.get_parameter(CODES).dtype

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [..., columns] of this rank's part in `dtype`.

        FSDP must have gathered the unit, since this needs all bytes of the part.
        """
        weight: Tensor = dequantize_bytes(
            self.get_parameter(CODES), self.get_parameter(SCALES), *self._form, dtype
        )
        return weight.view(self.shape)

    @property
    def _form(self) -> Form:
        """The arguments of `dequantize_bytes` for this rank's part."""
        keys = self.quantization
        assert keys.bits is not None
        rows = prod(self.shape[:-1])
        columns = self.shape[-1]
        double = keys.bnb_4bit_use_double_quant
        return rows, columns, keys.bits, keys.bnb_4bit_quant_type, double, self.block


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """A linear layer with a quantized, frozen weight.

    The product is in the dtype of the input, or of autocast if that is on.

    Each forward dequantizes the weight, and each backward does so again. With `keeps_dequantized`,
    autograd keeps the dequantized weight instead: under activation checkpointing the backward
    follows the recomputed forward at once.
    """

    leaf = ".weight"

    def __init__(
        self, linear: nn.Linear, quantization: Quantization, dtype: torch.dtype, block: int = BLOCK
    ) -> None:
        super().__init__((linear.out_features, linear.in_features), quantization, dtype, block)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [out, in] in the compute dtype, for DoRA. Each access dequantizes it."""
        return self.dequantize(self.dtype)

    def stored_weight(self, dtype: torch.dtype) -> tuple[Form | None, Tensor, Tensor | None]:
        """Returns what a backward needs of the weight: (form, codes, scales), to dequantize it.

        With `keeps_dequantized` it returns (None, the weight in `dtype`, None).
        """
        if self.keeps_dequantized:
            return None, self.dequantize(dtype), None
        return self._form, self.get_parameter(CODES), self.get_parameter(SCALES)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., in] -> [..., out]."""
        inputs = inputs.to(product_dtype(inputs))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        needs_gradient = inputs.requires_grad and torch.is_grad_enabled()
        if self.keeps_dequantized or not needs_gradient:
            return F.linear(inputs, self.dequantize(inputs.dtype), bias)
        codes = self.get_parameter(CODES)
        scales = self.get_parameter(SCALES)
        product: Tensor = _DequantizedTwice.apply(inputs, codes, scales, bias, self._form)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        kind = self.quantization.bnb_4bit_quant_type if self.quantization.bits == 4 else "int8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


# An operator, because torch.compile cannot trace through views of bytes as other numbers, and does
# not look into an operator.
@library.custom_op("finetune::dequantize", mutates_args=())
def dequantize_bytes(
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
    """Dequantizes a weight, [rows, columns] in `dtype`, from its parameters.

    Args:
        codes: The parameter of the codes: flat, in the compute dtype, with padding at the end.
        scales: The parameter of the scales, likewise.
        rows, columns, bits, quant_type, double, block: See `Form`.
        dtype: The dtype of the result.
        after: In a backward, the gradient. It is not read. Without it torch.compile would merge the
            backward's call with the forward's, and keep the weight between them.
    """
    quantization = quantize_to(bits, quant_type, double)
    sizes = quantized_bytes(rows, columns, quantization, block)
    code_bytes = codes.view(torch.uint8)[: sizes.codes]
    scale_bytes = scales.view(torch.uint8)[: sizes.scales]
    return dequantize_tensor(
        QuantizedTensor(code_bytes, scale_bytes, (rows, columns), quantization, block), dtype
    )


@dequantize_bytes.register_fake
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


class _DequantizedTwice(torch.autograd.Function):
    """F.linear with a quantized weight, which the backward dequantizes a second time."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, form: Form
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form = form
        return F.linear(inputs, dequantize_bytes(codes, scales, *form, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        codes, scales = ctx.saved_tensors
        _, _, _, trains_bias, _ = ctx.needs_input_grad  # `modules_to_save` may train the bias
        bias_gradient = None
        if trains_bias:
            bias_gradient = gradient.flatten(0, -2).sum(0)
        weight = dequantize_bytes(codes, scales, *ctx.form, gradient.dtype, gradient)
        return gradient @ weight, None, None, bias_gradient, None


def recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """Returns the modules under activation checkpointing: the backward runs their forward again."""
    checkpointed = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", None) is True
    ]
    return {inner for module in checkpointed for inner in module.modules()}


def quantize_layers(
    model: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    stored: Mapping[str, StoredQuantized],
) -> frozenset[str]:
    """Replaces the linear layers of `model` that have frozen weights by quantized ones.

    Call it after adapters and activation checkpointing are in place.

    Args:
        model: On meta.
        quantization: How frozen weights are quantized. Trained ones (modules_to_save) stay as they
            are.
        dtype: The compute dtype, as which the quantized bytes are viewed.
        stored: The weights that the files hold quantized, by name in the base model. If there are
            any, no other weight is quantized.

    Returns:
        The names of the parameters that hold codes and scales.

    Raises:
        UserError: The model has no linear layers, or the files hold a weight quantized whose layer
            cannot be.
    """
    recomputed = recomputed_modules(model)
    added = set()
    not_kept = set(stored)
    for name, linear in linear_layers(model):
        weight = base_name(f"{name}.weight")
        if linear.weight.requires_grad or (stored and weight not in stored):
            continue
        not_kept.discard(weight)
        block = stored[weight].block if stored else BLOCK
        layer = QuantizedLinear(linear, quantization, dtype, block)
        layer.keeps_dequantized = linear in recomputed
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        added |= {f"{name}.{CODES}", f"{name}.{SCALES}"}
    if not_kept:
        raise UserError(
            f"{min(not_kept)} is stored in {quantization.bits} bits, but only frozen linear layers "
            "other than the output head are kept quantized here; name the unquantized model"
        )
    return frozenset(added)


def quantized_layers(model: nn.Module) -> list[tuple[str, QuantizedWeight]]:
    """Lists the quantized linear layers and experts' weights of `model`, as (name, module).

    `model` may be sharded.
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
    ]


def fill_quantized_layers(
    model: nn.Module,
    values: Values,
    stored: Mapping[str, StoredQuantized],
    world: World,
    shared: Collection[str] = (),
) -> None:
    """Fills this rank's codes and scales of the quantized layers.

    All ranks with these layers call it together.

    Args:
        model: Sharded or not, with memory for its parameters.
        values: The plain weights. Each rank reads and quantizes the blocks that its shard of the
            codes touches. A double-quantized scale depends on all blocks of its weight, so ranks
            exchange the largest magnitudes of their blocks.
        stored: The weights that the files hold quantized, by name in the base model. If there are
            any, they are read instead.
        world: The ranks of the run.
        shared: The parameters that have their values already, by name in the base model.
    """
    for name, layer in quantized_layers(model):
        if base_name(f"{name}.{CODES}") in shared:
            continue
        weight = f"{name}{layer.leaf}"
        if stored:
            _fill_from_stored(layer, stored[base_name(weight)])
        else:
            _fill_from_plain(weight, layer, values, world)


@torch.no_grad()
def _fill_from_plain(weight: str, layer: QuantizedWeight, values: Values, world: World) -> None:
    """Quantizes the blocks of a plain weight that this rank's shard of the codes touches, and
    exchanges the blocks' largest magnitudes with the other ranks.

    `weight`: its name for `values`.
    """
    shape = layer.full_shape
    columns = shape[-1]
    if layer.quantization.bits == 8:
        block = columns  # numbers
        block_bytes = block
    else:
        block = layer.block
        block_bytes = block // 2
    # Of all blocks of the full weight; 0 for those that this rank does not quantize.
    magnitudes = torch.zeros(ceil_div(prod(shape), block), device=world.device)
    codes, begin, end = _clear_own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    if begin < end:
        # From here on, bytes are counted from the beginning of the full weight's codes.
        part_begin = layer.count_blocks(layer.part.start) * block_bytes
        begin += part_begin
        end += part_begin
        first_block = begin // block_bytes
        end_block = ceil_div(end, block_bytes)
        end_number = min(end_block * block, prod(shape))
        numbers = _read_numbers(weight, shape, values, first_block * block, end_number)
        numbers = numbers.to(world.device)
        blocks = numbers.view(-1, columns) if layer.quantization.bits == 8 else numbers
        block_codes, magnitudes[first_block:end_block] = quantize_blocks(blocks, layer.quantization)
        blocks_begin = first_block * block_bytes
        codes.copy_(block_codes[begin - blocks_begin : end - blocks_begin])
    # The codes are a DTensor where ranks divide the experts, too.
    if isinstance(layer.get_parameter(CODES), DTensor):
        # MAX, since several ranks may quantize one block, with the same magnitude: the block lies
        # across their shards, or the ranks are replicas of hybrid sharding.
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX, world.stage_group)
    scales, begin, end = _clear_own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    full_scales = pack_scales(magnitudes, layer.full_quantization)
    scales.copy_(layer.select_scales(full_scales)[begin:end])


@torch.no_grad()
def _fill_from_stored(layer: QuantizedWeight, stored: StoredQuantized) -> None:
    """Reads this rank's codes and scales of a weight that the files hold quantized."""
    codes, begin, end = _clear_own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    codes.copy_(stored.read_codes(begin, end))
    scales, begin, end = _clear_own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(stored.read_scales()[begin:end])


def _clear_own_bytes(parameter: nn.Parameter, size: int) -> tuple[Tensor, int, int]:
    """Sets this rank's shard of a parameter to zeros, and returns the bytes to fill.

    Args:
        parameter: Codes or scales, flat, sharded or not.
        size: The parameter's bytes without the padding at the end.

    Returns:
        (a uint8 view of this rank's bytes without padding, where they begin in the whole parameter,
        where they end); the view is empty if the rank has padding alone.
    """
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
    else:
        local = parameter.detach()
    (bounds,) = find_local_slices(parameter)
    own = local.zero_().view(torch.uint8)
    begin = min(bounds.start * local.dtype.itemsize, size)
    end = min(begin + own.numel(), size)
    return own[: end - begin], begin, end


def _read_numbers(weight: str, shape: Shape, values: Values, begin: int, end: int) -> Tensor:
    """Reads the numbers from `begin` to `end` of a weight of `shape`, flat, in row-major order.

    `weight`: its name for `values`.
    """
    row_size = prod(shape[1:])  # numbers; of experts' weights, a row is one expert
    first_row = begin // row_size
    end_row = ceil_div(end, row_size)
    rows = values(weight, (slice(first_row, end_row), *(slice(0, size) for size in shape[1:])))
    return rows.reshape(-1)[begin - first_row * row_size : end - first_row * row_size]
