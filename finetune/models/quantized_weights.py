"""Quantized weights: their numbers in 4 or 8 bits, and how files hold them.

Files of bitsandbytes hold the bytes that training keeps. DeepSeek, Qwen3, GLM and MiniMax publish a
float8 `NAME` with `NAME_scale_inv`, a scale for each block of 128 x 128 numbers, or one for all.
gpt-oss publishes `NAME_blocks` (MXFP4), two numbers a byte, and `NAME_scales`, a power of two for
each 32 of them, transposed. In place of both stands a tensor `NAME` in float32, whose every slice
is computed from the slices of the files that it needs, by transformers' own conversions.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import torch
from annotated_types import Gt
from pydantic import AllowInfNan, TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

from finetune.config.module_names import base_name
from finetune.config.quantization import BLOCK, NESTED_BLOCK, quantize_to
from finetune.config.schema import Quantization
from finetune.constants import CONFIG_FILE, FP32, Shape, ceil_div, round_up
from finetune.distributed.model_parts import Values
from finetune.errors import UserError
from finetune.files.json_files import load_json
from finetune.files.tensors import ComputedPart, ReadSlice, Slices, StoredTensor, read, read_slice
from finetune.models.packed_weights import unpack_packed

# bitsandbytes takes some 16 bytes a number while it quantizes on a CPU; a multiple of every block
NUMBERS_AT_ONCE = 1 << 22
# numbers that are dequantized at once: bitsandbytes counts them in 32 bits on a GPU
LARGEST_KERNEL = 1 << 30


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantized weight. Returned by `quantize_tensor`."""

    # uint8[bytes]: at 4 bits two numbers in a byte, the first in its upper half; at 8 bits int8
    # numbers
    codes: Tensor
    scales: Tensor  # uint8[bytes], as `pack_scales` lays them out
    shape: Shape  # [..., columns]
    quantization: Quantization
    block: int = BLOCK  # numbers under one scale, at 4 bits


def quantize_tensor(values: Tensor, quantization: Quantization) -> QuantizedTensor:
    """`values` [..., columns], whole, in their own dtype and on their own device."""
    codes, magnitudes = quantize_blocks(values.flatten(0, -2), quantization)
    return QuantizedTensor(
        codes, pack_scales(magnitudes, quantization), tuple(values.shape), quantization
    )


def dequantize_tensor(quantized: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The numbers, `dtype` [..., columns]: what the layer multiplies with where `dtype` is the
    compute dtype.
    """
    rows = prod(quantized.shape[:-1])
    columns = quantized.shape[-1]
    if quantized.quantization.bits == 8:
        scales = quantized.scales.view(torch.float32)
        # In the order of bitsandbytes' own forward and backward on a CPU.
        numbers = quantized.codes.view(torch.int8).view(rows, columns).to(dtype)
        return numbers.mul_(scales.unsqueeze(1).mul(1.0 / 127.0)).view(quantized.shape)
    ops = _bitsandbytes_ops()
    # As one row of an even length. In several rows bitsandbytes 0.50.2 looks up other blocks'
    # scales on CPUs with AVX-512 where the length of a row is a multiple of 16 and not of 64; and
    # it has no kernel for an odd length.
    block = quantized.block
    quant_type = quantized.quantization.bnb_4bit_quant_type
    codes = torch.split(quantized.codes, LARGEST_KERNEL // 2)
    magnitudes = torch.split(unpack_scales(quantized), LARGEST_KERNEL // block)
    parts = [
        ops.dequantize_4bit(some, scales, block, quant_type, (1, 2 * some.numel()), dtype).view(-1)
        for some, scales in zip(codes, magnitudes, strict=True)
    ]
    flat: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat[: rows * columns].view(quantized.shape)


def quantize_blocks(values: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Returns (codes uint8[bytes], largest magnitudes fp32[blocks]) of consecutive blocks: at 4
    bits of any shape, in row-major order and with a shorter block at the end of the weight only; at
    8 bits of whole rows.
    """
    from bitsandbytes import functional

    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        values = values.float()
    if quantization.bits == 8:
        # Rounded to fp16 first, as transformers and bitsandbytes do it.
        parts = [
            functional.int8_vectorwise_quant(part.to(torch.float16))[:2]
            for part in torch.split(values, max(1, NUMBERS_AT_ONCE // values.shape[1]))
        ]
        return torch.cat([codes.view(-1).view(torch.uint8) for codes, _ in parts]), torch.cat(
            [m for _, m in parts]
        )
    codes = []
    magnitudes = []
    for part in torch.split(values.reshape(-1), NUMBERS_AT_ONCE):
        packed, state = functional.quantize_4bit(
            part, blocksize=BLOCK, quant_type=quantization.bnb_4bit_quant_type
        )
        codes.append(packed.view(-1))
        magnitudes.append(state.absmax)
    return torch.cat(codes), torch.cat(magnitudes)


def pack_scales(magnitudes: Tensor, quantization: Quantization) -> Tensor:
    """The scales of a whole weight, uint8[bytes], from the largest magnitudes of all of its blocks,
    fp32[blocks].

    fp32 magnitudes, or with double quantization their codes, filled up to a multiple of 4, the
    largest magnitudes of those, and the mean, both fp32.
    """
    from bitsandbytes import functional

    if quantization.bits == 8 or not quantization.bnb_4bit_use_double_quant:
        return magnitudes.contiguous().view(torch.uint8)
    with one_torch_thread():
        mean = magnitudes.mean()
    codes, state = functional.quantize_blockwise(magnitudes - mean, blocksize=NESTED_BLOCK)
    return join_nested_scales(codes, state.absmax, mean)


def join_nested_scales(codes: Tensor, magnitudes: Tensor, mean: Tensor) -> Tensor:
    """The parts of double-quantized scales (uint8[blocks], fp32[nested blocks], fp32), as
    `pack_scales` packs them.
    """
    filling = codes.new_zeros(-codes.numel() % FP32)
    return torch.cat([codes, filling, magnitudes.view(torch.uint8), mean.view(1).view(torch.uint8)])


def split_nested_scales(quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of double-quantized scales: codes uint8[blocks], fp32[nested blocks], and the mean,
    fp32[].
    """
    blocks = ceil_div(prod(quantized.shape), quantized.block)
    nested = quantized.scales[round_up(blocks, FP32) :].view(torch.float32)
    return quantized.scales[:blocks], nested[:-1], nested[-1]


def unpack_scales(quantized: QuantizedTensor) -> Tensor:
    """The largest magnitude of each block of a 4-bit weight, fp32[blocks]."""
    if not quantized.quantization.bnb_4bit_use_double_quant:
        return quantized.scales.view(torch.float32)
    codes, nested, mean = split_nested_scales(quantized)
    values = nested_values(nested.device)
    magnitudes: Tensor = _bitsandbytes_ops().dequantize_blockwise(
        codes, nested, values, NESTED_BLOCK, torch.float32
    )
    return magnitudes + mean


@cache
def nested_values(device: torch.device) -> Tensor:
    """Returns the values of the 8-bit codes of double-quantized scales, fp32[256] (Dettmers 2016,
    dynamic tree).
    """
    from bitsandbytes import functional

    values: Tensor = functional.create_dynamic_map().to(device)
    return values


def four_bit_values(quant_type: str) -> Tensor:
    """Returns the values of the 16 codes of `nf4` or `fp4`, fp32[16]."""
    from bitsandbytes import functional

    values: Tensor = functional.get_4bit_type(quant_type, device="cpu")
    return values


def _bitsandbytes_ops() -> Any:
    import bitsandbytes  # noqa: F401  # registers them

    return torch.ops.bitsandbytes


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """In this block torch computes on a CPU in the calling thread alone: the order of a sum, and so
    the scales of a run, must not depend on the machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for those that it starts
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# What the files hold beside a quantized weight, by the end of its name.
STATE = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")  # JSON as bytes
# after NAME.weight
PARTS = (*STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
INT8_PARTS = (".SCB", ".weight_format")  # after NAME


class _State(TypedDict):
    """The entries of a STATE that are used."""

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

    def read_codes(self, begin: int, end: int) -> Tensor:
        """The bytes `begin` to `end` of the codes."""
        return read_slice(self.codes, (slice(begin, end),))

    def read_scales(self) -> Tensor:
        """The scales as `linear.pack_scales` lays them out."""
        if self.quantization.bits == 8:
            return read(self.scales[".SCB"]).float().view(-1).view(torch.uint8)
        magnitudes = read(self.scales[".absmax"]).view(-1)
        if not self.quantization.bnb_4bit_use_double_quant:
            return magnitudes.float().view(torch.uint8)
        return join_nested_scales(
            magnitudes, read(self.scales[".nested_absmax"]).float(), torch.tensor(self.mean)
        )

    def read_whole(self) -> QuantizedTensor:
        """The weight with all of its blocks."""
        codes = self.read_codes(0, self.codes.shape[0])
        return QuantizedTensor(codes, self.read_scales(), self.shape, self.quantization, self.block)


def quantize_whole(weight: Tensor | StoredQuantized, quantization: Quantization) -> QuantizedTensor:
    """A whole weight in the bytes that training keeps: read where the files hold it so, else
    quantized.
    """
    if isinstance(weight, StoredQuantized):
        return weight.read_whole()
    return quantize_tensor(weight, quantization)


def split_quantized(
    stored: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """Returns (every weight under its name and with its own shape, the quantized ones of them) of
    the tensors in a folder.

    Those in FP8 or MXFP4 are plain weights, dequantized as they are read.

    Raises `UserError` where a weight is quantized with values or block sizes that bitsandbytes does
    not have.
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
    beside |= {
        f"{weight.removesuffix('.weight')}{end}" for weight in quantized for end in INT8_PARTS
    }
    weights = {name: tensor for name, tensor in stored.items() if name not in beside}
    for name in weights.keys() & quantized.keys():
        weights[name] = replace(weights[name], shape=quantized[name].shape)
        if OF_EXPERT.search(name):
            weights[name] = _dequantized(weights[name], quantized.pop(name))
    return fuse_linear_experts(weights, where), quantized


OF_EXPERT = re.compile(r"\.experts\.(\w+\.)?\d+\.")


def _dequantized(tensor: StoredTensor, quantized: StoredQuantized) -> StoredTensor:
    """The numbers of one expert, which is a part of a parameter: no layer keeps its bytes."""

    def read_values(slices: Slices) -> Tensor:
        return dequantize_tensor(quantized.read_whole(), torch.float32)[slices]

    return _computed(tensor.name, quantized.shape, tensor, read_values)


# The experts of Llama 4 as Axolotl saves them, as linear layers.
LINEAR_EXPERT = re.compile(r"(.*\.experts)\.(gate|up|down)_projs\.(\d+)\.weight")


def fuse_linear_experts(stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors with the experts' linear layers as transformers has them: gate_up_proj [experts,
    inputs, 2 x width] and down_proj [experts, width, outputs].

    Raises `UserError` where an expert is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    layers: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    for name, tensor in stored.items():
        match = LINEAR_EXPERT.fullmatch(name)
        if match is None:
            tensors[name] = tensor
        else:
            layer, kind, expert = match.groups()
            layers.setdefault(layer, {}).setdefault(kind, {})[int(expert)] = tensor
    for layer, kinds in layers.items():
        experts = range(len(kinds.get("down", {})))
        if any(sorted(kinds.get(kind, {})) != [*experts] for kind in ("gate", "up", "down")):
            raise UserError(f"{where}: {layer}: an expert's layer is missing; copy the files again")
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            columns = [[kinds[kind][expert] for kind in parts] for expert in experts]
            fused = _transposed(f"{layer}.{name}", columns)
            tensors[fused.name] = fused
    return tensors


def _transposed(name: str, columns: list[list[StoredTensor]]) -> StoredTensor:
    """The linear layers of each expert, transposed and side by side: [experts, inputs, outputs]."""
    first = columns[0]
    inputs = first[0].shape[1]
    shape = (len(columns), inputs, sum(tensor.shape[0] for tensor in first))

    def read_values(slices: Slices) -> Tensor:
        own, rows, outputs = slices
        joined = [torch.cat([read(each) for each in layers]) for layers in columns[own]]
        return torch.stack([matrix.t()[rows, outputs].float() for matrix in joined])

    return _computed(name, shape, first[0], read_values)


def _four_bit(
    weight: str, state: str, stored: Mapping[str, StoredTensor], where: str
) -> StoredQuantized:
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
        if end in scales:
            packed_scales = read(scales[end]).view(-1).float()
        else:
            packed_scales = values[:0]
        if packed_scales.shape != values.shape or not torch.allclose(
            packed_scales, values, atol=1e-6
        ):
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
    if (
        len(shape) != 2
        or stored[weight].dtype != torch.int8
        or math.prod(scales[".SCB"].shape) != shape[0]
    ):
        raise _unreadable(where, weight, "8-bit rows with a scale each are expected")
    codes = _as_bytes(stored, weight, math.prod(shape), where)
    return StoredQuantized(codes, scales, (shape[0], shape[1]), quantize_to(8), BLOCK, 0.0)


def _read_state(weight: str, state: str, stored: Mapping[str, StoredTensor], where: str) -> _State:
    """Reads and checks bitsandbytes' description of a 4-bit weight."""
    try:
        settings = _STATE.validate_json(bytes(read(stored[f"{weight}{state}"]).view(-1).tolist()))
    except (ValueError, TypeError):  # pydantic's ValidationError is a ValueError
        settings = None
    if settings is None or not state.endswith(settings["quant_type"]):
        raise _unreadable(
            where, f"{weight}{state}", "bitsandbytes' description of the weight is expected"
        )
    return settings


def _as_bytes(stored: Mapping[str, StoredTensor], name: str, size: int, where: str) -> StoredTensor:
    """The tensor as `size` single bytes.

    Its file may call them numbers of any dtype (`bnb_4bit_quant_storage`).
    """
    tensor = stored.get(name)
    if tensor is None or len(tensor.parts) != 1 or tensor.byte_count < size:
        raise _unreadable(where, name, f"{size:,} bytes in one file are expected")
    (part,) = tensor.parts
    return replace(
        tensor,
        shape=(size,),
        dtype=torch.uint8,
        parts=(replace(part, offsets=(0,), shape=(size,)),),
    )


def _unreadable(where: str, name: str, what: str) -> UserError:
    return UserError(
        f"{where}: {name}: {what}; save the model again with bitsandbytes, or name the unquantized "
        "model"
    )


def dequantized_values(
    values: Values,
    quantization: Quantization,
    stored: Mapping[str, StoredQuantized],
    dtype: torch.dtype,
) -> Values:
    """The weights that a model quantized from `values`, or `stored` so, multiplies with,
    dequantized.
    """

    def dequantized(name: str, slices: Slices) -> Tensor:
        if stored and base_name(name) not in stored:
            return values(name, slices)
        quantized = quantize_whole(
            stored.get(base_name(name)) or values(name, (slice(None), slice(None))), quantization
        )
        return dequantize_tensor(quantized, dtype)[slices]

    return dequantized


FP8_SCALES = "_scale_inv"
BLOCKS = "_blocks"
SCALES = "_scales"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MXFP4_BLOCK = 32  # numbers under a scale, in 16 bytes


def dequantize_published(
    stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """The tensors of `folder` with plain ones in place of those in FP8, MXFP4 or packed, and of
    their scales.

    Reads no value.

    Raises `UserError` where scales do not fit their weight.
    """
    tensors = unpack_packed(stored, folder)
    sizes = None
    for name, tensor in stored.items():
        scales = stored.get(name + FP8_SCALES)
        blocks = stored.get(f"{name.removesuffix(BLOCKS)}{SCALES}")
        if scales is not None and tensor.dtype in FP8_DTYPES:
            sizes = sizes or _block_sizes(folder)
            tensors[name] = _from_fp8(tensor, scales, sizes, str(folder))
            tensors.pop(name + FP8_SCALES)
            tensors.pop(f"{name.removesuffix('weight')}activation_scale", None)
        elif name.endswith(BLOCKS) and blocks is not None and tensor.dtype == torch.uint8:
            dequantized = _from_mxfp4(name.removesuffix(BLOCKS), tensor, blocks, str(folder))
            tensors |= {dequantized.name: dequantized}
            del tensors[name], tensors[blocks.name]
    return tensors


def _from_fp8(
    weight: StoredTensor, scales: StoredTensor, sizes: tuple[int, int], where: str
) -> StoredTensor:
    height, width = _fit_blocks(weight, scales, sizes, where)
    blocks = Fp8Blocks(weight, scales, height, width)
    return _computed(weight.name, weight.shape, weight, blocks.read)


def _fit_blocks(
    weight: StoredTensor, scales: StoredTensor, sizes: tuple[int, int], where: str
) -> tuple[int, int]:
    """Returns (rows, columns) of a block: `sizes`, or what the number of scales says.

    Raises `UserError` where the scales fit the weight in neither way.
    """
    if len(weight.shape) < 2 or math.prod(weight.shape) == 0:
        raise _misfit(where, scales, weight)
    rows, columns = weight.shape[-2:]
    if math.prod(scales.shape) == 1:
        return rows, columns
    grid = scales.shape[-2:]
    for height, width in (sizes, (rows // max(1, grid[0]), columns // max(1, grid[-1]))):
        # The last block of a row or column may be short; transformers misreads its size.
        if height and width and grid == (ceil_div(rows, height), ceil_div(columns, width)):
            return height, width
    raise _misfit(where, scales, weight)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A weight in FP8 with a scale for each block of `height` rows and `width` columns."""

    weight: StoredTensor
    scales: StoredTensor  # [..., blocks down, blocks across], or one number for all
    height: int
    width: int

    def read(self, slices: Slices) -> Tensor:
        """These slices of the weight, dequantized."""
        *lead, rows, columns = slices
        down = slice(rows.start // self.height, ceil_div(rows.stop, self.height))
        across = slice(columns.start // self.width, ceil_div(columns.stop, self.width))
        numbers = self._read_numbers(lead, down, across)
        values = _multiply_by_scales(numbers, self._read_scales(lead, down, across))
        top = rows.start - down.start * self.height
        left = columns.start - across.start * self.width
        own_rows = slice(top, top + rows.stop - rows.start)
        own_columns = slice(left, left + columns.stop - columns.start)
        return values[..., own_rows, own_columns]

    def _read_numbers(self, lead: Sequence[slice], down: slice, across: slice) -> Tensor:
        """Reads these blocks of numbers, the short ones filled with zeros."""
        rows, columns = self.weight.shape[-2:]
        height = (down.stop - down.start) * self.height
        width = (across.stop - across.start) * self.width
        top = down.start * self.height
        left = across.start * self.width
        stored = (slice(top, min(top + height, rows)), slice(left, min(left + width, columns)))
        numbers = read_slice(self.weight, (*lead, *stored))
        filled = numbers.new_zeros((*numbers.shape[:-2], height, width))
        filled[..., : numbers.shape[-2], : numbers.shape[-1]] = numbers
        return filled

    def _read_scales(self, lead: Sequence[slice], down: slice, across: slice) -> Tensor:
        """fp32[..., blocks down, blocks across]."""
        if math.prod(self.scales.shape) == 1:
            scales = read_slice(self.scales, ()).reshape(1, 1)
        else:
            scales = read_slice(self.scales, (*lead, down, across))
        if scales.dtype == torch.uint8:  # exponents
            return torch.exp2(scales.float() - 127)
        return scales.float()


def _multiply_by_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    # Not above: while a source is opened, another thread imports transformers.
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = {"weight": numbers, "weight_scale_inv": scales}
    converted = Fp8Dequantize(None).convert(stored)["weight"]
    # transformers 5.17 gives a list
    values: Tensor = converted[0] if isinstance(converted, list) else converted
    return values


def _from_mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor, where: str) -> StoredTensor:
    if (
        len(blocks.shape) != 4
        or blocks.shape[:-1] != scales.shape
        or 2 * blocks.shape[-1] != MXFP4_BLOCK
    ):
        raise _misfit(where, scales, blocks)
    experts, outputs, groups, _ = blocks.shape

    def read_values(slices: Slices) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # as for FP8

        own, inputs, columns = slices
        first = inputs.start // MXFP4_BLOCK
        last = ceil_div(inputs.stop, MXFP4_BLOCK)
        part = (own, columns, slice(first, last))
        values: Tensor = convert_moe_packed_tensors(
            read_slice(blocks, part), read_slice(scales, part), dtype=torch.float32
        )
        return values[:, inputs.start - first * MXFP4_BLOCK : inputs.stop - first * MXFP4_BLOCK]

    return _computed(name, (experts, groups * MXFP4_BLOCK, outputs), blocks, read_values)


def _computed(
    name: str, shape: Shape, source: StoredTensor, read_values: ReadSlice
) -> StoredTensor:
    zeros = (0,) * len(shape)
    path = source.parts[0].path
    part = ComputedPart(path, 0, zeros, shape, read_values, zeros, tuple(range(len(shape))))
    return StoredTensor(name, shape, torch.float32, (part,))


def _block_sizes(folder: Path) -> tuple[int, int]:
    """The rows and columns of an FP8 block, by config.json; (1, 1) where it does not say."""
    settings = None
    if (folder / CONFIG_FILE).exists():
        settings = load_json(folder / CONFIG_FILE).get("quantization_config")
    sizes = None
    if isinstance(settings, dict):
        sizes = settings.get("weight_block_size")
    is_pair = (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and size > 0 for size in sizes)
    )
    if is_pair and sizes is not None:
        return (sizes[0], sizes[1])
    return (1, 1)


def _misfit(where: str, scales: StoredTensor, weight: StoredTensor) -> UserError:
    return UserError(
        f"{where}: {scales.name} has the shape {list(scales.shape)}, which does not fit "
        f"{list(weight.shape)} of {weight.name}; copy the files again, or name the unquantized "
        "model"
    )
