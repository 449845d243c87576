"""Quantized layers: put into a model on meta, sharded with it, then filled with each rank's bytes."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import torch
import torch.distributed as dist
from annotated_types import Gt
from pydantic import AllowInfNan, TypeAdapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import TypedDict

from finetune.config.module_names import base_name
from finetune.config.quantization import BLOCK, NESTED_BLOCK, quantize_to
from finetune.config.schema import Quantization
from finetune.distributed.parallelize import Slices, Values, find_local_slices, local_part
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, read, read_slice
from finetune.models.moe.experts import compute_experts, find_factors, take_over_adapters
from finetune.models.quantized.linear import (
    CODES,
    SCALES,
    QuantizedLinear,
    QuantizedTensor,
    QuantizedWeight,
    dequantize_tensor,
    expert_layers,
    four_bit_values,
    join_nested_scales,
    linear_layers,
    nested_values,
    pack_scales,
    quantize_blocks,
    quantize_tensor,
    weights_of,
)
from finetune.models.quantized.published import dequantize_published


def quantize_experts(
    model: nn.Module,
    experts: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    checkpointed: Container[nn.Module],
) -> list[str]:
    """Puts quantized weights, in `dtype`, into `experts`, a layer of `model` on meta; returns their parameters' names.

    `checkpointed`: the modules whose activations are recomputed anyway.
    """
    names = []
    for name, parameter in weights_of(experts).items():
        if parameter.requires_grad:  # modules_to_save
            continue
        delattr(experts, name)
        weight = QuantizedWeight(tuple(parameter.shape), quantization, dtype)
        weight.keeps_dequantized = experts in checkpointed
        setattr(experts, name, weight)
        names += [f"{name}.{CODES}", f"{name}.{SCALES}"]
    if names:
        experts.forward = _QuantizedExperts(experts, take_over_adapters(model, experts)).forward
    return names


def quantized_children(experts: nn.Module) -> dict[str, QuantizedWeight]:
    """The weights of `experts` that are quantized, by name."""
    return {name: each for name, each in experts.named_children() if isinstance(each, QuantizedWeight)}


def expert_weights(experts: nn.Module) -> dict[str, Tensor]:
    """The parameters of `experts` as this rank has them, those that are quantized dequantized."""
    weights = {name: local_part(parameter) for name, parameter in experts.named_parameters(recurse=False)}
    return weights | {name: each.dequantize(each.dtype) for name, each in quantized_children(experts).items()}


def recompute_dequantized(experts: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """What `compute` returns. A backward dequantizes weights of `experts` again, so that nothing is kept."""
    weights = quantized_children(experts).values()
    if not torch.is_grad_enabled() or all(weight.keeps_dequantized for weight in weights):
        return compute(*inputs)
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random


class _QuantizedExperts:
    """What `module`, a layer of experts with quantized weights and peft's `adapters`, computes."""

    def __init__(self, module: nn.Module, adapters: Sequence[Any]) -> None:
        self.module, self.adapters = module, adapters

    def forward(self, *inputs: Any) -> Any:
        return recompute_dequantized(self.module, self.compute, *inputs)

    def compute(self, *inputs: Any) -> Any:
        weights = expert_weights(self.module)
        experts: int = self.module.num_experts  # type: ignore[assignment]
        return compute_experts(self.module, weights, experts, *inputs, factors=find_factors(self.adapters))


# What the files hold beside a quantized weight, by the end of its name.
STATE = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")  # JSON as bytes
PARTS = (*STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")  # after NAME.weight
INT8_PARTS = (".SCB", ".weight_format")  # after NAME


class _State(TypedDict):
    """What is used of a STATE."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    shape: tuple[Annotated[int, Gt(0)], Annotated[int, Gt(0)]]
    nested_blocksize: NotRequired[Literal[256]]
    nested_offset: NotRequired[Annotated[float, AllowInfNan(False)]]


_STATE = TypeAdapter(_State)


@dataclass(frozen=True, slots=True)
class StoredQuantized:
    """A quantized weight in files."""

    codes: StoredTensor  # uint8[bytes], whatever dtype the file gives them
    scales: Mapping[str, StoredTensor]  # by the end of their names
    shape: tuple[int, int]
    quantization: Quantization
    block: int
    mean: float  # of the scales, where they are quantized too

    def read_codes(self, begin: int, end: int) -> torch.Tensor:
        """The bytes `begin` to `end` of the codes."""
        return read_slice(self.codes, (slice(begin, end),))

    def read_scales(self) -> torch.Tensor:
        """The scales as `linear.pack_scales` lays them out."""
        if self.quantization.bits == 8:
            return read(self.scales[".SCB"]).float().view(-1).view(torch.uint8)
        magnitudes = read(self.scales[".absmax"]).view(-1)
        if not self.quantization.bnb_4bit_use_double_quant:
            return magnitudes.float().view(torch.uint8)
        return join_nested_scales(magnitudes, read(self.scales[".nested_absmax"]).float(), torch.tensor(self.mean))

    def read_whole(self) -> QuantizedTensor:
        """The weight with all of its blocks."""
        codes = self.read_codes(0, self.codes.shape[0])
        return QuantizedTensor(codes, self.read_scales(), self.shape, self.quantization, self.block)


def quantize_whole(weight: torch.Tensor | StoredQuantized, quantization: Quantization) -> QuantizedTensor:
    """A whole weight in the bytes that training keeps: read where the files hold it so, else quantized."""
    return weight.read_whole() if isinstance(weight, StoredQuantized) else quantize_tensor(weight, quantization)


def split_quantized(
    stored: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """(every weight under its name and with its own shape, the quantized ones of them) of the tensors in a folder.
    Those in FP8 or MXFP4 are plain weights, dequantized as they are read.

    Raises `UserError` where a weight is quantized with values or block sizes that bitsandbytes does not have.
    """
    quantized: dict[str, StoredQuantized] = {}
    stored = dequantize_published(stored, Path(where))
    for name in stored:
        for end in STATE:
            if name.endswith(end):
                weight = name.removesuffix(end)
                quantized[weight] = _four_bit(weight, end, stored, where)
        if name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            quantized[weight] = _eight_bit(weight, stored, where)
    beside = {f"{weight}{end}" for weight in quantized for end in PARTS}
    beside |= {f"{weight.removesuffix('.weight')}{end}" for weight in quantized for end in INT8_PARTS}
    weights = {
        name: replace(tensor, shape=quantized[name].shape) if name in quantized else tensor
        for name, tensor in stored.items()
        if name not in beside
    }
    return weights, quantized


def _four_bit(weight: str, state: str, stored: Mapping[str, StoredTensor], where: str) -> StoredQuantized:
    settings = _read_state(weight, state, stored, where)
    is_nested = "nested_offset" in settings
    scales = {end: stored[f"{weight}{end}"] for end in PARTS if f"{weight}{end}" in stored}
    known = {".quant_map": four_bit_values(settings["quant_type"])}
    rows, columns = settings["shape"]
    blocks = math.ceil(rows * columns / settings["blocksize"])
    sizes = {".absmax": blocks}
    if is_nested:
        known[".nested_quant_map"] = nested_values(torch.device("cpu"))
        sizes[".nested_absmax"] = math.ceil(blocks / NESTED_BLOCK)
    for end, values in known.items():
        found = read(scales[end]).view(-1).float() if end in scales else values[:0]
        if found.shape != values.shape or not torch.allclose(found, values, atol=1e-6):
            raise _unreadable(where, f"{weight}{end}", "not the values that bitsandbytes uses")
    for end, size in sizes.items():
        if end not in scales or math.prod(scales[end].shape) != size:
            raise _unreadable(where, f"{weight}{end}", f"{size:,} scales are expected")
    return StoredQuantized(
        codes=_as_bytes(stored, weight, math.ceil(rows * columns / 2), where),
        scales=scales,
        shape=(rows, columns),
        quantization=quantize_to(4, settings["quant_type"], is_nested),
        block=settings["blocksize"],
        mean=settings.get("nested_offset", 0.0),
    )


def _eight_bit(weight: str, stored: Mapping[str, StoredTensor], where: str) -> StoredQuantized:
    scales = {".SCB": stored[f"{weight.removesuffix('.weight')}.SCB"]}
    shape = stored[weight].shape if weight in stored else ()
    if len(shape) != 2 or stored[weight].dtype != torch.int8 or math.prod(scales[".SCB"].shape) != shape[0]:
        raise _unreadable(where, weight, "8-bit rows with a scale each are expected")
    codes = _as_bytes(stored, weight, math.prod(shape), where)
    return StoredQuantized(codes, scales, (shape[0], shape[1]), quantize_to(8), BLOCK, 0.0)


def _read_state(weight: str, state: str, stored: Mapping[str, StoredTensor], where: str) -> _State:
    """What bitsandbytes says of a 4-bit weight. Checked, for a file may come from anyone."""
    try:
        settings = _STATE.validate_json(bytes(read(stored[f"{weight}{state}"]).view(-1).tolist()))
    except (ValueError, TypeError):  # pydantic's ValidationError is a ValueError
        settings = None
    if settings is None or not state.endswith(settings["quant_type"]):
        raise _unreadable(where, f"{weight}{state}", "bitsandbytes' description of the weight is expected")
    return settings


def _as_bytes(stored: Mapping[str, StoredTensor], name: str, size: int, where: str) -> StoredTensor:
    """The tensor as `size` single bytes. Its file may call them numbers of any dtype (`bnb_4bit_quant_storage`)."""
    tensor = stored.get(name)
    if tensor is None or len(tensor.parts) != 1 or tensor.byte_count < size:
        raise _unreadable(where, name, f"{size:,} bytes in one file are expected")
    (part,) = tensor.parts
    return replace(tensor, shape=(size,), dtype=torch.uint8, parts=(replace(part, offsets=(0,), shape=(size,)),))


def _unreadable(where: str, name: str, what: str) -> UserError:
    return UserError(f"{where}: {name}: {what}; save the model again with bitsandbytes, or name the unquantized model")


def quantize_layers(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype, stored: Mapping[str, StoredQuantized]
) -> frozenset[str]:
    """Puts quantized layers, in `dtype`, into `model`, which is on meta, and returns the names of their parameters.

    `stored`: the weights that are quantized in the files already; where there are any, those and no others. Call it
    after adapters and activation checkpointing are in place. Raises `UserError` where no layer can be quantized, or one
    is stored quantized that cannot be kept so.
    """
    checkpointed = {
        inner
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", None) is True
        for inner in module.modules()
    }
    added, left = set(), set(stored)
    if not stored:
        for path, experts in expert_layers(model):
            added |= {f"{path}.{name}" for name in quantize_experts(model, experts, quantization, dtype, checkpointed)}
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
    """Fills the quantized layers of the sharded `model`: from files that hold them so (`stored`), or by quantizing
    `values`, of which every rank reads and quantizes the blocks that its shard of the codes touches. All ranks with
    these layers call it, since a double-quantized scale depends on all blocks of its weight."""
    for name, layer in quantized_layers(model):
        weight = f"{name}{layer.leaf}"
        if stored:
            _fill_stored(layer, stored[base_name(weight)])
        else:
            _fill(weight, layer, values, world)


def dequantized_values(
    values: Values, quantization: Quantization, stored: Mapping[str, StoredQuantized], dtype: torch.dtype
) -> Values:
    """The weights that a model quantized from `values`, or `stored` so, multiplies with, dequantized."""

    def dequantized(name: str, slices: Slices) -> Tensor:
        if stored and base_name(name) not in stored:
            return values(name, slices)
        whole = quantize_whole(stored.get(base_name(name)) or values(name, (slice(None), slice(None))), quantization)
        return dequantize_tensor(whole, dtype)[slices]

    return dequantized


@torch.no_grad()
def _fill(weight: str, layer: QuantizedWeight, values: Values, world: World) -> None:
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    in_rows = layer.quantization.bits == 8
    columns, numbers = layer.whole[-1], math.prod(layer.whole)
    block = columns if in_rows else layer.block  # numbers
    block_bytes = block if in_rows else block // 2
    start = layer.part.start * math.prod(layer.whole[1:]) // block * block_bytes  # of this rank's experts
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
    each = math.prod(shape[1:])
    first, last = begin // each, -(-end // each)
    rows = values(weight, (slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.reshape(-1)[begin - first * each : end - first * each]
