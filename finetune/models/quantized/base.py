"""Quantized layers: put into a model on meta, sharded with it, then filled on every rank with its share of the bytes."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.config.quantization import BLOCK
from finetune.config.schema import Quantization
from finetune.distributed.parallelize import Slices, Values, find_local_slices
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.lora import base_name
from finetune.models.quantize import dequantize_tensor, linear_layers, pack_scales, quantize_blocks
from finetune.models.quantized.linear import CODES, SCALES, QuantizedLinear
from finetune.models.quantized_base import StoredQuantized, quantize_whole


def quantize_layers(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype, stored: Mapping[str, StoredQuantized]
) -> frozenset[str]:
    """Puts quantized layers, in `dtype`, into `model`, which is on meta, and returns the names of their parameters.

    `stored`: the weights that are quantized in the files already; where there are any, those and no others. Call it after
    adapters and activation checkpointing are in place. Raises `UserError` where no layer can be quantized, or one is stored
    quantized that cannot be kept so.
    """
    checkpointed = {
        inner
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", None) is True
        for inner in module.modules()
    }
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
            f"{min(left)} is stored in {quantization.bits} bits, but only frozen linear layers other than the output head are "
            "kept quantized here; name the unquantized model"
        )
    return frozenset(added)


def quantized_layers(model: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    """The quantized layers of `model`, sharded or not, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def fill_quantized_layers(
    model: nn.Module, values: Values, stored: Mapping[str, StoredQuantized], world: World
) -> None:
    """Fills the quantized layers of the sharded `model`: from files that hold them so (`stored`), or by quantizing `values`,
    of which every rank reads and quantizes the blocks that its shard of the codes touches. All ranks call it, since a
    double-quantized scale depends on all blocks of its weight."""
    for name, layer in quantized_layers(model):
        weight = f"{name}.weight"
        if stored:
            _fill_stored(layer, stored[base_name(weight)])
        else:
            _fill(weight, layer, values, world)


def dequantized_values(
    values: Values, quantization: Quantization, stored: Mapping[str, StoredQuantized], dtype: torch.dtype
) -> Values:
    """The weights that a model quantized from `values`, or `stored` so, multiplies with: each quantized whole and dequantized."""

    def dequantized(name: str, slices: Slices) -> Tensor:
        if stored and base_name(name) not in stored:
            return values(name, slices)
        whole = quantize_whole(stored.get(base_name(name)) or values(name, (slice(None), slice(None))), quantization)
        return dequantize_tensor(whole, dtype)[slices]

    return dequantized


@torch.no_grad()
def _fill(weight: str, layer: QuantizedLinear, values: Values, world: World) -> None:
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    in_rows = layer.quantization.bits == 8
    block = layer.in_features if in_rows else layer.block  # numbers
    block_bytes = block if in_rows else block // 2
    numbers = layer.out_features * layer.in_features
    magnitudes = torch.zeros(-(-numbers // block), device=world.device)
    if begin < end:
        first, last = begin // block_bytes, -(-end // block_bytes)
        part = _read_numbers(weight, layer, values, first * block, min(last * block, numbers)).to(world.device)
        own, magnitudes[first:last] = quantize_blocks(
            part.view(-1, layer.in_features) if in_rows else part, layer.quantization
        )
        codes.copy_(own[begin - first * block_bytes : end - first * block_bytes])
    if isinstance(layer.get_parameter(CODES), DTensor):
        # Blocks that two ranks share, and replicas of hybrid sharding, have the same magnitude on each.
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX)
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(pack_scales(magnitudes, layer.quantization)[begin:end])


@torch.no_grad()
def _fill_stored(layer: QuantizedLinear, stored: StoredQuantized) -> None:
    codes, begin, end = _own_bytes(layer.get_parameter(CODES), layer.sizes.codes)
    codes.copy_(stored.read_codes(begin, end))
    scales, begin, end = _own_bytes(layer.get_parameter(SCALES), layer.sizes.scales)
    scales.copy_(stored.read_scales()[begin:end])


def _own_bytes(parameter: nn.Parameter, size: int) -> tuple[Tensor, int, int]:
    """This rank's bytes of a parameter, and where they begin and end in the whole of `size` bytes. Its padding is zeroed."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    (bounds,) = find_local_slices(parameter)
    own = local.zero_().view(torch.uint8)
    begin = min(bounds.start * local.dtype.itemsize, size)
    end = min(begin + own.numel(), size)
    return own[: end - begin], begin, end


def _read_numbers(weight: str, layer: QuantizedLinear, values: Values, begin: int, end: int) -> Tensor:
    """The numbers `begin` to `end` of the weight, in row-major order, from the rows that hold them."""
    columns = layer.in_features
    first, last = begin // columns, -(-end // columns)
    rows = values(weight, (slice(first, last), slice(0, columns)))
    return rows.reshape(-1)[begin - first * columns : end - first * columns]
