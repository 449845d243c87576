"""Weights that are published in FP8 blocks or MXFP4, read as plain numbers by transformers' own conversions.

DeepSeek, Qwen3, GLM and MiniMax publish a float8 `NAME` with `NAME_scale_inv`, a scale for each block of 128 x 128
numbers, or one for all. gpt-oss publishes `NAME_blocks`, two numbers a byte, and `NAME_scales`, a power of two for each
32 of them, transposed. In place of both stands a tensor `NAME` in float32, whose every slice is computed from the
slices of the files that it needs.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from finetune.constants import CONFIG_FILE
from finetune.errors import UserError
from finetune.files.run_json import load_json
from finetune.files.tensors import ComputedPart, ReadSlice, Slices, StoredTensor, read_slice

FP8_SCALES, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MXFP4_BLOCK = 32  # numbers under a scale, in 16 bytes


def dequantize_published(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors of `folder` with plain ones in place of those in FP8 or MXFP4 and their scales. Reads no value.

    Raises `UserError` where scales do not fit their weight.
    """
    found, sizes = dict(stored), None
    for name, tensor in stored.items():
        scales, blocks = stored.get(name + FP8_SCALES), stored.get(f"{name.removesuffix(BLOCKS)}{SCALES}")
        if scales is not None and tensor.dtype in FP8_DTYPES:
            sizes = sizes or _block_sizes(folder)
            found[name] = _from_fp8(tensor, scales, sizes, str(folder))
            found.pop(name + FP8_SCALES)
            found.pop(f"{name.removesuffix('weight')}activation_scale", None)
        elif name.endswith(BLOCKS) and blocks is not None and tensor.dtype == torch.uint8:
            whole = _from_mxfp4(name.removesuffix(BLOCKS), tensor, blocks, str(folder))
            found |= {whole.name: whole}
            del found[name], found[blocks.name]
    return found


def _from_fp8(weight: StoredTensor, scales: StoredTensor, sizes: tuple[int, int], where: str) -> StoredTensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = weight.shape[-2:]
    grid = scales.shape[-2:] if math.prod(scales.shape) > 1 else (1, 1)
    if grid == (1, 1):
        height, width = rows, columns
    else:  # the last block of a row or column may be short; transformers misreads its size
        fits = grid == (-(-rows // sizes[0]), -(-columns // sizes[1]))
        height, width = sizes if fits else (rows // max(1, grid[0]), columns // max(1, grid[1]))
    if (-(-rows // max(1, height)), -(-columns // max(1, width))) != grid or len(weight.shape) < 2:
        raise _misfit(where, scales, weight)

    def read_values(slices: Slices) -> Tensor:
        *lead, across, along = slices
        first, last = across.start // height, -(-across.stop // height)
        left, right = along.start // width, -(-along.stop // width)
        blocks = slice(first * height, min(last * height, rows)), slice(left * width, min(right * width, columns))
        numbers = read_slice(weight, (*lead, *blocks))
        whole = numbers.new_zeros((*numbers.shape[:-2], (last - first) * height, (right - left) * width))
        whole[..., : numbers.shape[-2], : numbers.shape[-1]] = numbers
        if grid == (1, 1):
            scale = read_slice(scales, ()).reshape(1, 1)
        else:
            scale = read_slice(scales, (*lead, slice(first, last), slice(left, right)))
        scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        values: Tensor = Fp8Dequantize(None).convert({"weight": whole, "weight_scale_inv": scale})["weight"]
        top, start = across.start - blocks[0].start, along.start - blocks[1].start
        return values[..., top : top + across.stop - across.start, start : start + along.stop - along.start]

    return _computed(weight.name, weight.shape, weight, read_values)


def _from_mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor, where: str) -> StoredTensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape or 2 * blocks.shape[-1] != MXFP4_BLOCK:
        raise _misfit(where, scales, blocks)
    experts, outputs, groups, _ = blocks.shape

    def read_values(slices: Slices) -> Tensor:
        own, inputs, columns = slices
        first, last = inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK)
        part = (own, columns, slice(first, last))
        values: Tensor = convert_moe_packed_tensors(
            read_slice(blocks, part), read_slice(scales, part), dtype=torch.float32
        )
        return values[:, inputs.start - first * MXFP4_BLOCK : inputs.stop - first * MXFP4_BLOCK]

    return _computed(name, (experts, groups * MXFP4_BLOCK, outputs), blocks, read_values)


def _computed(name: str, shape: tuple[int, ...], source: StoredTensor, read_values: ReadSlice) -> StoredTensor:
    zeros, path = (0,) * len(shape), source.parts[0].path
    part = ComputedPart(path, 0, zeros, shape, read_values, zeros, tuple(range(len(shape))))
    return StoredTensor(name, shape, torch.float32, (part,))


def _block_sizes(folder: Path) -> tuple[int, int]:
    """The rows and columns of an FP8 block, by config.json; (1, 1) where it does not say."""
    settings = load_json(folder / CONFIG_FILE).get("quantization_config") if (folder / CONFIG_FILE).exists() else None
    found = settings.get("weight_block_size") if isinstance(settings, dict) else None
    is_pair = isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found)
    return (found[0], found[1]) if is_pair and found is not None else (1, 1)


def _misfit(where: str, scales: StoredTensor, weight: StoredTensor) -> UserError:
    return UserError(
        f"{where}: {scales.name} has the shape {list(scales.shape)}, which does not fit {list(weight.shape)} of "
        f"{weight.name}; copy the files again, or name the unquantized model"
    )
