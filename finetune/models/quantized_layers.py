"""Layers with frozen weights in 4 or 8 bits: put into a model on meta, sharded with it, filled with
each rank's bytes.

A weight is two flat parameters, its codes and its scales. Their bytes are seen as numbers of the
compute dtype, because FSDP2 gathers parameters of that dtype without converting them. FSDP2 may cut
them anywhere, also within a block or a number: no rank computes with its shard. It gathers all
shards of a layer's unit, and dequantizes as one rank would.
"""

from collections.abc import Collection, Mapping
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
from finetune.constants import Shape, ceil_div
from finetune.distributed.model_parts import (
    Values,
    find_local_slices,
    head_modules,
    is_experts,
    product_dtype,
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
    """Lists the weights that are quantized if frozen, by their names in the base model: of linear
    layers and experts.

    `model` may be on meta, and may have adapters.
    """
    linears = [f"{base_name(f'{name}.')}weight" for name, _ in linear_layers(model)]
    experts = [
        f"{path}.{name}" for path, module in expert_layers(model) for name in weights_of(module)
    ]
    return linears + [base_name(name) for name in experts]


def linear_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """The linear layers that are quantized if frozen, by name.

    Embeddings, norms and head are not, as in QLoRA.

    Raises `UserError` where the model has none.
    """
    head = head_modules(model)
    layers = []
    for name, module in text_modules(model):  # a vision tower keeps its precision
        if (
            isinstance(module, nn.Linear)
            and _is_plain(module)
            and module not in head
            and not is_adapter(f"{name}.")
        ):
            layers.append((name, module))
    if not layers:
        raise UserError(
            f"{', '.join(LOAD_KEYS)}: {type(model).__name__} has no linear layers to quantize; "
            "leave the key out"
        )
    return layers


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is no subclass with a forward that computes something else with its
    weight.
    """
    return type(linear).forward is nn.Linear.forward or type(linear).__name__ in SAME_PRODUCT


def expert_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of experts in the language model, by name: modules whose parameters hold all
    experts of a layer.
    """
    return [(name, module) for name, module in text_modules(model) if is_experts(module)]


def weights_of(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The weights [experts, rows, columns] of a layer of experts, not its biases."""
    return {
        name: weight
        for name, weight in experts.named_parameters(recurse=False)
        if weight.dim() == 3
    }


CODES = "codes"
SCALES = "scales"
# rows, columns, bits, quant_type, double quantization, block
Form = tuple[int, int, int, str, bool, int]


class QuantizedWeight(nn.Module):
    """A quantized, frozen weight [..., columns]: stands in a layer of experts under the name of the
    parameter.

    Attributes:
        full_shape, full_quantization: Of the weight as all ranks have it.
        part: The experts this rank keeps, as a slice of the first dimension; their codes and scales
            are those of the full weight.
        shape, quantization: Of that part.
        sizes: The bytes of its codes and of its scales, without padding.
        keeps_dequantized: Whether autograd may keep the dequantized weight for the backward.
    """

    leaf = ""  # ends the name of the weight after the module's

    def __init__(
        self,
        full_shape: Shape,
        quantization: Quantization,
        dtype: torch.dtype,
        block: int = BLOCK,
        part: slice | None = None,
    ) -> None:
        """Makes the parameters, on meta.

        Args:
            full_shape: [..., columns].
            quantization: Of the full weight.
            dtype: Of computation, as whose numbers the bytes are seen.
            block: Numbers under one scale, in 4 bits.
            part: None: all of the first dimension.
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
        """The weight of these experts alone, on meta."""
        taken = QuantizedWeight(
            self.full_shape, self.full_quantization, self.dtype, self.block, part
        )
        taken.keeps_dequantized = self.keeps_dequantized
        return taken

    def own_scales(self, scales: Tensor) -> Tensor:
        """Takes this part's scales from those of the full weight.

        Args:
            scales: uint8[bytes], as `pack_scales` lays them out.

        Returns:
            uint8[bytes]. Scales that were quantized again are fp32 where the part cuts one of their
            blocks.
        """
        if self.shape == self.full_shape:
            return scales
        first = self.count_blocks(self.part.start)
        last = self.count_blocks(self.part.stop)
        if not self.full_quantization.bnb_4bit_use_double_quant:
            return scales.view(torch.float32)[first:last].view(torch.uint8)
        no_codes = scales[:0]
        of_full_weight = QuantizedTensor(
            no_codes, scales, self.full_shape, self.full_quantization, self.block
        )
        if not self.quantization.bnb_4bit_use_double_quant:
            return unpack_scales(of_full_weight)[first:last].view(torch.uint8)
        scale_codes, nested_scales, mean = split_nested_scales(of_full_weight)
        own_nested = nested_scales[first // NESTED_BLOCK : last // NESTED_BLOCK]
        return join_nested_scales(scale_codes[first:last], own_nested, mean)

    def count_blocks(self, experts: int) -> int:
        """Counts the blocks of the first `experts` of the full weight, each of which has a scale: a
        block is a row in 8 bits, `block` numbers in 4.
        """
        if self.full_quantization.bits == 8:
            return experts * prod(self.full_shape[1:-1])
        return experts * prod(self.full_shape[1:]) // self.block

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which peft asks of a parameter that it adapts."""
        return self.get_parameter(CODES).dtype

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [..., columns] in `dtype`.

        Its unit must be gathered: this rank needs all bytes of the part.
        """
        weight: Tensor = _dequantize(
            self.get_parameter(CODES), self.get_parameter(SCALES), *self._form, dtype
        )
        return weight.view(self.shape)

    @property
    def _form(self) -> Form:
        keys = self.quantization
        assert keys.bits is not None
        double = keys.bnb_4bit_use_double_quant
        return (
            prod(self.shape[:-1]),
            self.shape[-1],
            keys.bits,
            keys.bnb_4bit_quant_type,
            double,
            self.block,
        )


class QuantizedLinear(QuantizedWeight, nn.Linear):
    """A linear layer with a quantized, frozen weight.

    The product is in the dtype of the input, or of autocast.

    Each forward dequantizes the weight, and each backward does so again. Where activations are
    recomputed (`keeps_dequantized`), the recomputed forward keeps the weight for the backward that
    follows it at once.
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
        """The weight in the compute dtype, dequantized at every access: DoRA asks for it."""
        return self.dequantize(self.dtype)

    def stored_weight(self, dtype: torch.dtype) -> tuple[Form | None, Tensor, Tensor | None]:
        """Returns what a backward needs: (form, codes, scales), or (None, weight in `dtype`, None)
        if autograd may keep it.
        """
        if self.keeps_dequantized:
            return None, self.dequantize(dtype), None
        return self._form, self.get_parameter(CODES), self.get_parameter(SCALES)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(product_dtype(inputs))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        if self.keeps_dequantized or not (inputs.requires_grad and torch.is_grad_enabled()):
            return F.linear(inputs, self.dequantize(inputs.dtype), bias)
        codes = self.get_parameter(CODES)
        scales = self.get_parameter(SCALES)
        product: Tensor = _DequantizedTwice.apply(inputs, codes, scales, bias, self._form)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        kind = self.quantization.bnb_4bit_quant_type if self.quantization.bits == 4 else "int8"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


# torch.compile cannot follow bytes that are seen as other numbers, and does not look into an
# operator.
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
    """Dequantizes a weight [rows, columns] from its parameters.

    Args:
        codes: [numbers], with padding.
        scales: [numbers], with padding.
        rows, columns, bits, quant_type, double, block: See `Form`.
        dtype: Of the result.
        after: The gradient that a backward has, which nothing is computed from. Without it
            torch.compile would merge the backward's call with the forward's, and keep the weight
            between them.
    """
    quantization = quantize_to(bits, quant_type, double)
    sizes = quantized_bytes(rows, columns, quantization, block)
    code_bytes = codes.view(torch.uint8)[: sizes.codes]
    scale_bytes = scales.view(torch.uint8)[: sizes.scales]
    return dequantize_tensor(
        QuantizedTensor(code_bytes, scale_bytes, (rows, columns), quantization, block), dtype
    )


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
    codes: Tensor, scales: Tensor, form: Form, dtype: torch.dtype, after: Tensor | None
) -> Tensor:
    """Dequantizes a layer's codes and scales to its weight [rows, columns] in `dtype`."""
    weight: Tensor = _dequantize(codes, scales, *form, dtype, after)
    return weight


class _DequantizedTwice(torch.autograd.Function):
    """F.linear with a frozen weight, which the backward dequantizes again."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, form: Form
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form = form
        return F.linear(inputs, _dequantize(codes, scales, *form, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor | None, None]:
        codes, scales = ctx.saved_tensors
        bias_gradient = None
        if ctx.needs_input_grad[3]:  # trained by `modules_to_save`
            bias_gradient = gradient.flatten(0, -2).sum(0)
        weight = _dequantize(codes, scales, *ctx.form, gradient.dtype, gradient)
        return gradient @ weight, None, None, bias_gradient, None


def recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """The modules whose activations are recomputed in the backward anyway."""
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
    """Puts quantized linear layers into `model`.

    Call it after adapters and activation checkpointing are in place.

    Args:
        model: On meta.
        quantization: How frozen weights are quantized; trained ones (modules_to_save) stay as they
            are.
        dtype: Of computation, as which the quantized bytes are kept.
        stored: The weights that the files hold quantized already; where there are any, no others
            are quantized.

    Returns:
        The names of the parameters that hold codes and scales.

    Raises:
        UserError: The model has no linear layers, or a weight is stored quantized that cannot be
            kept so.
    """
    checkpointed = recomputed_modules(model)
    added = set()
    not_kept = set(stored)
    for name, linear in linear_layers(model):
        weight = base_name(f"{name}.weight")
        if linear.weight.requires_grad or (stored and weight not in stored):
            continue
        not_kept.discard(weight)
        layer = QuantizedLinear(
            linear, quantization, dtype, stored[weight].block if stored else BLOCK
        )
        layer.keeps_dequantized = linear in checkpointed
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
    """The quantized linear layers and experts' weights of `model`, sharded or not, by name."""
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
    """Fills the quantized layers of the sharded `model`.

    All ranks with these layers call it together.

    Args:
        values: The plain weights. Each rank reads and quantizes the blocks that its shard of the
            codes touches; a double-quantized scale depends on all blocks of its weight, so ranks
            exchange their magnitudes.
        stored: The weights that the files hold quantized already; where there are any, those are
            read instead.
        shared: Names in the base of parameters that have their values.
    """
    for name, layer in quantized_layers(model):
        if base_name(f"{name}.{CODES}") in shared:
            continue
        weight = f"{name}{layer.leaf}"
        if stored:
            _fill_stored(layer, stored[base_name(weight)])
        else:
            _fill(weight, layer, values, world)


@torch.no_grad()
def _fill(weight: str, layer: QuantizedWeight, values: Values, world: World) -> None:
    """Quantizes the blocks of `weight` that this rank's shard of the codes touches, and shares
    their magnitudes.
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
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    if begin < end:
        # The same bytes, counted from the beginning of the full weight's codes.
        part_begin = layer.count_blocks(layer.part.start) * block_bytes
        begin += part_begin
        end += part_begin
        first_block = begin // block_bytes
        last_block = ceil_div(end, block_bytes)
        last_number = min(last_block * block, prod(shape))
        numbers = _read_numbers(weight, shape, values, first_block * block, last_number)
        numbers = numbers.to(world.device)
        blocks = numbers.view(-1, columns) if layer.quantization.bits == 8 else numbers
        block_codes, magnitudes[first_block:last_block] = quantize_blocks(
            blocks, layer.quantization
        )
        blocks_begin = first_block * block_bytes
        codes.copy_(block_codes[begin - blocks_begin : end - blocks_begin])
    if isinstance(layer.get_parameter(CODES), DTensor):  # so are experts that ranks divide
        # Blocks that two ranks share, and replicas of hybrid sharding, have the same magnitude on
        # each.
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX, world.stage_group)
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(layer.own_scales(pack_scales(magnitudes, layer.full_quantization))[begin:end])


@torch.no_grad()
def _fill_stored(layer: QuantizedWeight, stored: StoredQuantized) -> None:
    """Reads this rank's bytes of a weight that the files hold quantized."""
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    codes.copy_(stored.read_codes(begin, end))
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(stored.read_scales()[begin:end])


def _own_bytes(parameter: nn.Parameter, size: int) -> tuple[Tensor, int, int]:
    """Returns (this rank's bytes of a parameter, where they begin, where they end), without the
    padding behind its `size` bytes. Zeroes them and the padding.
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
    """Reads the numbers `begin` to `end` of a weight of `shape`, in row-major order."""
    row_size = prod(shape[1:])  # of an expert, where the weight is one of experts
    first = begin // row_size
    last = ceil_div(end, row_size)
    rows = values(weight, (slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.reshape(-1)[begin - first * row_size : end - first * row_size]
