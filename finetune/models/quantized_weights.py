"""Quantized weights: how their numbers are kept in 4 or 8 bits, and how files hold them.

Files of bitsandbytes hold the same bytes that training keeps.

Weights published in FP8 or MXFP4 become plain float32 weights. DeepSeek, Qwen3, GLM and MiniMax
publish a float8 `NAME` with `NAME_scale_inv`: a scale for each block of 128 x 128 numbers, or one
for all. gpt-oss publishes `NAME_blocks` (MXFP4, two numbers in a byte, transposed) with
`NAME_scales`: a power of two for each 32 numbers. Either becomes one tensor `NAME`, any slice of
which is computed from the slices of the files that it needs.
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
from finetune.files.json_files import read_json_object
from finetune.files.tensors import Slices, StoredTensor, read, read_slice
from finetune.models.packed_weights import unpack_packed

# Numbers that are quantized at once, since bitsandbytes takes some 16 bytes a number while it
# quantizes on a CPU. A multiple of every block.
NUMBERS_AT_ONCE = 1 << 22
# Numbers that are dequantized at once, since bitsandbytes counts them in 32 bits on a GPU.
LARGEST_KERNEL = 1 << 30


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A whole quantized weight. Returned by `quantize_tensor`."""

    # uint8[bytes]. At 4 bits a byte holds two numbers, the first in its upper half; at 8 bits the
    # bytes are int8 numbers.
    codes: Tensor
    scales: Tensor  # uint8[bytes], as `pack_scales` lays them out
    shape: Shape  # [..., columns]
    quantization: Quantization
    block: int = BLOCK  # numbers under one scale, at 4 bits


def quantize_tensor(values: Tensor, quantization: Quantization) -> QuantizedTensor:
    """Quantizes a whole weight, `values` [..., columns], on the device that it is on."""
    codes, magnitudes = quantize_blocks(values.flatten(0, -2), quantization)
    return QuantizedTensor(
        codes, pack_scales(magnitudes, quantization), tuple(values.shape), quantization
    )


def dequantize_tensor(quantized: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a weight, [..., columns] in `dtype`.

    In the compute dtype they are the numbers that the layer multiplies with.
    """
    rows = prod(quantized.shape[:-1])
    columns = quantized.shape[-1]
    if quantized.quantization.bits == 8:
        magnitudes = quantized.scales.view(torch.float32)  # of each row
        # The conversion and the products have the order of bitsandbytes' own on a CPU.
        numbers = quantized.codes.view(torch.int8).view(rows, columns).to(dtype)
        return numbers.mul_(magnitudes.unsqueeze(1).mul(1.0 / 127.0)).view(quantized.shape)
    ops = _bitsandbytes_ops()
    # The kernel gets the weight as one row of an even length. With several rows, bitsandbytes
    # 0.50.2 takes other blocks' scales on CPUs with AVX-512 if the length of a row is a multiple of
    # 16 and not of 64. For an odd length it has no kernel.
    block = quantized.block
    quant_type = quantized.quantization.bnb_4bit_quant_type
    parts = []
    for codes, magnitudes in zip(
        torch.split(quantized.codes, LARGEST_KERNEL // 2),
        torch.split(unpack_scales(quantized), LARGEST_KERNEL // block),
        strict=True,
    ):
        one_row = (1, 2 * codes.numel())
        part = ops.dequantize_4bit(codes, magnitudes, block, quant_type, one_row, dtype)
        parts.append(part.view(-1))
    flat: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat[: rows * columns].view(quantized.shape)


def quantize_blocks(values: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Quantizes consecutive blocks of a weight.

    Args:
        values: At 8 bits whole rows [rows, columns], each of which is a block. At 4 bits of any
            shape, cut into blocks of BLOCK numbers in row-major order; only the last block of the
            weight may be shorter.
        quantization: The bits, and at 4 bits the type of the codes.

    Returns:
        (codes uint8[bytes], the largest magnitude of each block fp32[blocks]).
    """
    from bitsandbytes import functional

    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        values = values.float()
    codes = []
    magnitudes = []
    if quantization.bits == 8:
        for rows in torch.split(values, max(1, NUMBERS_AT_ONCE // values.shape[1])):
            # Rounded to fp16 first, as transformers and bitsandbytes do.
            numbers, row_magnitudes, _ = functional.int8_vectorwise_quant(rows.to(torch.float16))
            codes.append(numbers.view(-1).view(torch.uint8))
            magnitudes.append(row_magnitudes)
        return torch.cat(codes), torch.cat(magnitudes)
    for part in torch.split(values.reshape(-1), NUMBERS_AT_ONCE):
        packed, state = functional.quantize_4bit(
            part, blocksize=BLOCK, quant_type=quantization.bnb_4bit_quant_type
        )
        codes.append(packed.view(-1))
        magnitudes.append(state.absmax)
    return torch.cat(codes), torch.cat(magnitudes)


def pack_scales(magnitudes: Tensor, quantization: Quantization) -> Tensor:
    """Packs the scales of a whole weight into bytes.

    Without double quantization, the bytes are those of the magnitudes in fp32. With it, the
    magnitudes less their mean are quantized, in blocks of NESTED_BLOCK. The bytes are, in this
    order: their codes uint8, zeros up to a multiple of 4 bytes, the largest magnitude of each such
    block in fp32, and the mean in fp32.

    Args:
        magnitudes: fp32[blocks], the largest magnitude of each block of the weight.
        quantization: How the weight is quantized.

    Returns:
        uint8[bytes].
    """
    from bitsandbytes import functional

    if quantization.bits == 8 or not quantization.bnb_4bit_use_double_quant:
        return magnitudes.contiguous().view(torch.uint8)
    with one_torch_thread():
        mean = magnitudes.mean()
    codes, state = functional.quantize_blockwise(magnitudes - mean, blocksize=NESTED_BLOCK)
    return join_nested_scales(codes, state.absmax, mean)


def join_nested_scales(codes: Tensor, magnitudes: Tensor, mean: Tensor) -> Tensor:
    """Joins the parts of double-quantized scales to bytes, as `pack_scales` lays them out.

    Args:
        codes: uint8[blocks].
        magnitudes: fp32[nested blocks].
        mean: fp32, one number.
    """
    filling = codes.new_zeros(-codes.numel() % FP32)  # for fp32 numbers at a multiple of 4 bytes
    return torch.cat([codes, filling, magnitudes.view(torch.uint8), mean.view(1).view(torch.uint8)])


def split_nested_scales(quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits double-quantized scales into what `join_nested_scales` takes: (codes uint8[blocks],
    magnitudes fp32[nested blocks], the mean, 0-dim fp32).
    """
    blocks = ceil_div(prod(quantized.shape), quantized.block)
    codes = quantized.scales[:blocks]
    magnitudes_and_mean = quantized.scales[round_up(blocks, FP32) :].view(torch.float32)
    return codes, magnitudes_and_mean[:-1], magnitudes_and_mean[-1]


def unpack_scales(quantized: QuantizedTensor) -> Tensor:
    """Returns the largest magnitude of each block of a 4-bit weight, fp32[blocks]."""
    if not quantized.quantization.bnb_4bit_use_double_quant:
        return quantized.scales.view(torch.float32)
    codes, nested_magnitudes, mean = split_nested_scales(quantized)
    values = nested_values(codes.device)
    magnitudes_less_mean: Tensor = _bitsandbytes_ops().dequantize_blockwise(
        codes, nested_magnitudes, values, NESTED_BLOCK, torch.float32
    )
    return magnitudes_less_mean + mean


# The values of codes are computed here: `finetune export` checks them while another thread imports
# modules that bitsandbytes imports too.


@cache
def nested_values(device: torch.device) -> Tensor:
    """Returns the value of each 8-bit code of double-quantized scales, fp32[256] (the dynamic tree
    of Dettmers 2016).
    """
    parts = [torch.tensor([0.0, 1.0])]
    for exponent in range(-6, 1):
        boundaries = torch.linspace(0.1, 1, 2 ** (exponent + 6) + 1)
        means = (boundaries[:-1] + boundaries[1:]) / 2 * 10.0**exponent
        parts += [means, -means]
    return torch.cat(parts).sort().values.to(device)


def four_bit_values(quant_type: str) -> Tensor:
    """Returns the value of each code of `nf4` or `fp4`, fp32[16]."""
    if quant_type == "fp4":
        magnitudes = torch.tensor([0, 1 / 16, 8, 12, 4, 6, 2, 3]) / 12
        return torch.cat([magnitudes, -magnitudes])
    values = torch.cat([-_normal_quantiles(7), torch.zeros(1), _normal_quantiles(8)])
    return values.sort().values / values.max()


def _normal_quantiles(count: int) -> Tensor:
    """Returns quantiles of the normal distribution above 0, whose probabilities lie between a half
    and that of the largest code of NF4 at equal distances, fp32[count].
    """
    probabilities = torch.linspace(0.9677083, 0.5, count + 1, dtype=torch.float64)
    quantiles: Tensor = torch.special.ndtri(probabilities[:-1])
    return quantiles.float()


def _bitsandbytes_ops() -> Any:
    import bitsandbytes  # noqa: F401  # registers them

    return torch.ops.bitsandbytes


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Makes torch compute on the CPU with one thread in this block.

    The order of a sum, and so the scales of a run, must not depend on the machine's cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread, and of those that it starts
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The ends of the names of the tensors that bitsandbytes' files hold beside a weight NAME.weight.
# After NAME.weight, if it has 4 bits; a tensor of STATE describes the weight, as bytes of JSON.
STATE = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
PARTS = (*STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
INT8_PARTS = (".SCB", ".weight_format")  # after NAME, if it has 8 bits


class _State(TypedDict):
    """What is read of the JSON that describes a 4-bit weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    shape: tuple[Annotated[int, Gt(0)], Annotated[int, Gt(0)]]
    nested_blocksize: NotRequired[Literal[256]]
    nested_offset: NotRequired[Annotated[float, AllowInfNan(False)]]


_STATE = TypeAdapter(_State)


@dataclass(frozen=True, slots=True)
class StoredQuantized:
    """A quantized weight in bitsandbytes' files."""

    codes: StoredTensor  # uint8[bytes], whatever dtype the file gives them
    scales: Mapping[str, StoredTensor]  # the tensors beside the weight, by the ends of their names
    shape: tuple[int, int]
    quantization: Quantization
    block: int  # numbers under one scale, at 4 bits
    mean: float  # of double-quantized scales; else 0

    def read_codes(self, begin: int, end: int) -> Tensor:
        """Reads the bytes `begin` to `end` of the codes."""
        return read_slice(self.codes, (slice(begin, end),))

    def read_scales(self) -> Tensor:
        """Reads the scales, uint8[bytes], as `pack_scales` lays them out."""
        if self.quantization.bits == 8:
            return read(self.scales[".SCB"]).float().view(-1).view(torch.uint8)
        magnitudes = read(self.scales[".absmax"]).view(-1)
        if not self.quantization.bnb_4bit_use_double_quant:
            return magnitudes.float().view(torch.uint8)
        return join_nested_scales(
            magnitudes, read(self.scales[".nested_absmax"]).float(), torch.tensor(self.mean)
        )

    def read_whole(self) -> QuantizedTensor:
        """Reads the weight with all of its blocks."""
        codes = self.read_codes(0, self.codes.shape[0])
        return QuantizedTensor(codes, self.read_scales(), self.shape, self.quantization, self.block)


def quantize_whole(weight: Tensor | StoredQuantized, quantization: Quantization) -> QuantizedTensor:
    """Returns a whole weight as training keeps it: read if the files hold it quantized, else
    quantized here.
    """
    if isinstance(weight, StoredQuantized):
        return weight.read_whole()
    return quantize_tensor(weight, quantization)


def split_quantized(
    stored: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """Splits the tensors of a folder into weights and what bitsandbytes stores beside them.

    Weights in other formats (FP8, MXFP4, packed) become plain ones, which are dequantized as they
    are read; so do quantized weights of single experts.

    Args:
        stored: The tensors of the folder, by name.
        where: The folder.

    Returns:
        (every weight by name, with the shape that it has in the model; the weights among them that
        are kept quantized).

    Raises:
        UserError: A weight is quantized with values or block sizes that bitsandbytes does not have,
            or a part of a weight is missing or does not fit.
    """
    quantized: dict[str, StoredQuantized] = {}
    stored = dequantize_published(stored, Path(where))
    for name in stored:
        for end in STATE:
            if name.endswith(end):
                weight = name.removesuffix(end)
                quantized[weight] = _collect_four_bit(weight, end, stored, where)
        if name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            quantized[weight] = _collect_eight_bit(weight, stored, where)
    beside = {f"{weight}{end}" for weight in quantized for end in PARTS}
    beside |= {
        f"{weight.removesuffix('.weight')}{end}" for weight in quantized for end in INT8_PARTS
    }
    weights = {name: tensor for name, tensor in stored.items() if name not in beside}
    for name in weights.keys() & quantized.keys():
        weights[name] = replace(weights[name], shape=quantized[name].shape)
        if SINGLE_EXPERT.search(name):
            weights[name] = _dequantize_expert(weights[name], quantized.pop(name))
    return fuse_linear_experts(weights, where), quantized


SINGLE_EXPERT = re.compile(r"\.experts\.(\w+\.)?\d+\.")


def _dequantize_expert(tensor: StoredTensor, quantized: StoredQuantized) -> StoredTensor:
    """Returns the weight of a single expert as a plain tensor, dequantized when it is read.

    In the model it is a part of a parameter with all experts, so no layer can keep its bytes.
    """

    def read_values(slices: Slices) -> Tensor:
        return dequantize_tensor(quantized.read_whole(), torch.float32)[slices]

    return replace(tensor, dtype=torch.float32, compute=read_values)


# The experts of Llama 4 as Axolotl saves them: as linear layers.
LINEAR_EXPERT = re.compile(r"(.*\.experts)\.(gate|up|down)_projs\.(\d+)\.weight")


def fuse_linear_experts(stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Joins the linear layers of experts (`LINEAR_EXPERT`) to the tensors that transformers has:
    gate_up_proj [experts, inputs, 2 x width] and down_proj [experts, width, outputs].

    Other tensors stay as they are.

    Raises `UserError` where an expert's layer is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    # layer -> gate, up or down -> expert -> its linear layer
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
            linears_by_expert = [[kinds[kind][expert] for kind in parts] for expert in experts]
            fused = _fuse_transposed(f"{layer}.{name}", linears_by_expert)
            tensors[fused.name] = fused
    return tensors


def _fuse_transposed(name: str, linears_by_expert: list[list[StoredTensor]]) -> StoredTensor:
    """Makes one tensor [experts, inputs, outputs] of the linear layers of experts, each [outputs,
    inputs]: transposed, and those of one expert side by side.
    """
    first_linears = linears_by_expert[0]
    inputs = first_linears[0].shape[1]
    outputs = sum(linear.shape[0] for linear in first_linears)
    shape = (len(linears_by_expert), inputs, outputs)

    def read_values(slices: Slices) -> Tensor:
        read_experts, read_inputs, read_outputs = slices
        matrices = [
            torch.cat([read(linear) for linear in linears])
            for linears in linears_by_expert[read_experts]
        ]
        return torch.stack([matrix.t()[read_inputs, read_outputs].float() for matrix in matrices])

    return StoredTensor(name, shape, torch.float32, first_linears[0].parts, read_values)


def _collect_four_bit(
    weight: str, state: str, stored: Mapping[str, StoredTensor], where: str
) -> StoredQuantized:
    """Collects and checks the tensors of a 4-bit weight.

    Args:
        weight: The name of the weight.
        state: The end of STATE that the files have for it.
        stored: The tensors of the folder.
        where: The folder, for messages.

    Raises:
        UserError: A tensor is missing, has another size, or holds other values of codes.
    """
    settings = _read_state(weight, state, stored, where)
    is_nested = "nested_offset" in settings
    parts = {end: stored[f"{weight}{end}"] for end in PARTS if f"{weight}{end}" in stored}
    code_values = {".quant_map": four_bit_values(settings["quant_type"])}
    rows, columns = settings["shape"]
    blocks = math.ceil(rows * columns / settings["blocksize"])
    scale_counts = {".absmax": blocks}
    if is_nested:
        code_values[".nested_quant_map"] = nested_values(torch.device("cpu"))
        scale_counts[".nested_absmax"] = math.ceil(blocks / NESTED_BLOCK)
    for end, values in code_values.items():
        if end in parts:
            stored_values = read(parts[end]).view(-1).float()
        else:
            stored_values = values[:0]  # too few: refused below
        if stored_values.shape != values.shape or not torch.allclose(
            stored_values, values, atol=1e-6
        ):
            raise _unreadable(where, f"{weight}{end}", "not the values that bitsandbytes uses")
    for end, count in scale_counts.items():
        if end not in parts or math.prod(parts[end].shape) != count:
            raise _unreadable(where, f"{weight}{end}", f"{count:,} scales are expected")
    return StoredQuantized(
        codes=_view_as_bytes(stored, weight, math.ceil(rows * columns / 2), where),
        scales=parts,
        shape=(rows, columns),
        quantization=quantize_to(4, settings["quant_type"], is_nested),
        block=settings["blocksize"],
        mean=settings.get("nested_offset", 0.0),
    )


def _collect_eight_bit(
    weight: str, stored: Mapping[str, StoredTensor], where: str
) -> StoredQuantized:
    """Collects and checks the tensors of an 8-bit weight, which has a scale for each row.

    Args:
        weight: The name of the weight.
        stored: The tensors of the folder.
        where: The folder, for messages.

    Raises:
        UserError: The weight is missing or no int8 matrix, or the number of scales is wrong.
    """
    scales = {".SCB": stored[f"{weight.removesuffix('.weight')}.SCB"]}
    shape = stored[weight].shape if weight in stored else ()
    if (
        len(shape) != 2
        or stored[weight].dtype != torch.int8
        or math.prod(scales[".SCB"].shape) != shape[0]
    ):
        raise _unreadable(where, weight, "8-bit rows with a scale each are expected")
    return StoredQuantized(
        codes=_view_as_bytes(stored, weight, math.prod(shape), where),
        scales=scales,
        shape=(shape[0], shape[1]),
        quantization=quantize_to(8),
        block=BLOCK,
        mean=0.0,
    )


def _read_state(weight: str, state: str, stored: Mapping[str, StoredTensor], where: str) -> _State:
    """Reads and checks bitsandbytes' description of a 4-bit weight.

    Raises `UserError` where it is no such description, or one of another type than `state`, the end
    of its name, says.
    """
    try:
        settings = _STATE.validate_json(bytes(read(stored[f"{weight}{state}"]).view(-1).tolist()))
    except (ValueError, TypeError):  # pydantic's ValidationError is a ValueError
        settings = None
    if settings is None or not state.endswith(settings["quant_type"]):
        raise _unreadable(
            where, f"{weight}{state}", "bitsandbytes' description of the weight is expected"
        )
    return settings


def _view_as_bytes(
    stored: Mapping[str, StoredTensor], name: str, size: int, where: str
) -> StoredTensor:
    """Returns the first `size` bytes of the tensor `name` as a tensor uint8[size].

    The file may hold the bytes as numbers of any dtype (`bnb_4bit_quant_storage`).

    Raises `UserError` where the tensor is missing, too short, or spread over several parts.
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


def _unreadable(where: str, name: str, problem: str) -> UserError:
    """Makes the error of a bitsandbytes tensor `name` in the folder `where`."""
    return UserError(
        f"{where}: {name}: {problem}; save the model again with bitsandbytes, or name the "
        "unquantized model"
    )


def dequantized_values(
    values: Values,
    quantization: Quantization,
    stored: Mapping[str, StoredQuantized],
    dtype: torch.dtype,
) -> Values:
    """Makes the values that a quantized model multiplies with: those of its weights after
    quantization, dequantized to `dtype`.

    Args:
        values: The plain weights.
        quantization: How the model quantizes them.
        stored: The weights that the files hold quantized. If there are any, no other weight is
            quantized, and `values` has the others.
        dtype: The dtype of the result.

    Returns:
        Values of matrices [rows, columns], by their names in the model or in its base.
    """

    def read_dequantized(name: str, slices: Slices) -> Tensor:
        stored_weight = stored.get(base_name(name))
        if stored and stored_weight is None:
            return values(name, slices)
        weight = stored_weight or values(name, (slice(None), slice(None)))
        return dequantize_tensor(quantize_whole(weight, quantization), dtype)[slices]

    return read_dequantized


# ends of the names of published tensors
FP8_SCALES = "_scale_inv"  # after the weight's name
BLOCKS = "_blocks"  # of MXFP4
SCALES = "_scales"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MXFP4_BLOCK = 32  # numbers under one scale, two in a byte


def dequantize_published(
    stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """Replaces weights in FP8, in MXFP4 or packed, and their scales, by plain tensors.

    It reads no value of these: a plain tensor is computed when it is read. Other tensors stay.

    Raises `UserError` where scales do not fit their weight.
    """
    tensors = unpack_packed(stored, folder)
    config_block = None
    for name, tensor in stored.items():
        fp8_scales = stored.get(name + FP8_SCALES)
        mxfp4_scales = stored.get(f"{name.removesuffix(BLOCKS)}{SCALES}")
        if fp8_scales is not None and tensor.dtype in FP8_DTYPES:
            config_block = config_block or _read_block_size(folder)
            tensors[name] = _dequantize_fp8(tensor, fp8_scales, config_block, str(folder))
            tensors.pop(name + FP8_SCALES)
            # a plain weight has none
            tensors.pop(f"{name.removesuffix('weight')}activation_scale", None)
        elif name.endswith(BLOCKS) and mxfp4_scales is not None and tensor.dtype == torch.uint8:
            plain_name = name.removesuffix(BLOCKS)
            tensors[plain_name] = _dequantize_mxfp4(plain_name, tensor, mxfp4_scales, str(folder))
            del tensors[name], tensors[mxfp4_scales.name]
    return tensors


def _dequantize_fp8(
    weight: StoredTensor, scales: StoredTensor, config_block: tuple[int, int], where: str
) -> StoredTensor:
    """Returns a weight in FP8 as a plain tensor, dequantized when it is read.

    Args:
        weight: [..., rows, columns].
        scales: One number, or [..., blocks down, blocks across].
        config_block: (rows, columns) of a block by config.json.
        where: The folder, for messages.
    """
    height, width = _find_block_size(weight, scales, config_block, where)

    def read_values(slices: Slices) -> Tensor:
        *leading, rows, columns = slices
        # the blocks that the slices touch
        down = slice(rows.start // height, ceil_div(rows.stop, height))
        across = slice(columns.start // width, ceil_div(columns.stop, width))
        block_scales = _read_scales(scales, (*leading, down, across))
        scale_of_number = block_scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
        top = rows.start - down.start * height
        left = columns.start - across.start * width
        rows_in_blocks = slice(top, top + rows.stop - rows.start)
        columns_in_blocks = slice(left, left + columns.stop - columns.start)
        numbers = read_slice(weight, slices).float()
        return numbers * scale_of_number[..., rows_in_blocks, columns_in_blocks]

    return replace(weight, dtype=torch.float32, compute=read_values)


def _find_block_size(
    weight: StoredTensor, scales: StoredTensor, config_block: tuple[int, int], where: str
) -> tuple[int, int]:
    """Finds the (rows, columns) of a block: the whole matrix under a single scale, else
    `config_block` if the scales fit it, else the weight's shape divided by that of the scales.

    Raises `UserError` where the scales fit the weight in none of these ways.
    """
    if len(weight.shape) < 2 or math.prod(weight.shape) == 0:
        raise _misfit(where, scales, weight)
    rows, columns = weight.shape[-2:]
    if math.prod(scales.shape) == 1:
        return rows, columns
    grid = scales.shape[-2:]  # (blocks down, blocks across)
    divided = (rows // max(1, grid[0]), columns // max(1, grid[-1]))
    # The config's first: if the last block of a row or column is short, dividing the shapes gives a
    # wrong size. transformers only divides.
    for height, width in (config_block, divided):
        if height and width and grid == (ceil_div(rows, height), ceil_div(columns, width)):
            return height, width
    raise _misfit(where, scales, weight)


def _read_scales(scales: StoredTensor, blocks: Sequence[slice]) -> Tensor:
    """Reads the scales of FP8 blocks, fp32[..., blocks down, blocks across]; fp32[1, 1] if there is
    one for all.
    """
    if math.prod(scales.shape) == 1:
        values = read(scales).reshape(1, 1)
    else:
        values = read_slice(scales, tuple(blocks))
    if values.dtype == torch.uint8:  # exponents of 2, to which 127 is added
        return torch.exp2(values.float() - 127)
    return values.float()


def _dequantize_mxfp4(
    name: str, blocks: StoredTensor, scales: StoredTensor, where: str
) -> StoredTensor:
    """Returns experts' weights in MXFP4 as a plain tensor [experts, inputs, outputs], dequantized
    when it is read.

    Args:
        name: The name of the plain tensor.
        blocks: uint8[experts, outputs, blocks, bytes of a block].
        scales: [experts, outputs, blocks].
        where: The folder, for messages.

    Raises:
        UserError: The shapes do not fit together.
    """
    if (
        len(blocks.shape) != 4
        or blocks.shape[:-1] != scales.shape
        or 2 * blocks.shape[-1] != MXFP4_BLOCK
    ):
        raise _misfit(where, scales, blocks)
    experts, outputs, blocks_per_output, _ = blocks.shape

    def read_values(slices: Slices) -> Tensor:
        # Not imported at the top: while a source is opened, another thread imports transformers.
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        read_experts, read_inputs, read_outputs = slices
        first_block = read_inputs.start // MXFP4_BLOCK
        end_block = ceil_div(read_inputs.stop, MXFP4_BLOCK)
        part = (read_experts, read_outputs, slice(first_block, end_block))
        values: Tensor = convert_moe_packed_tensors(  # which transposes
            read_slice(blocks, part), read_slice(scales, part), dtype=torch.float32
        )
        first_input = first_block * MXFP4_BLOCK
        return values[:, read_inputs.start - first_input : read_inputs.stop - first_input]

    shape = (experts, blocks_per_output * MXFP4_BLOCK, outputs)
    return StoredTensor(name, shape, torch.float32, blocks.parts, read_values)


def _read_block_size(folder: Path) -> tuple[int, int]:
    """Reads the (rows, columns) of an FP8 block from config.json; (1, 1) if it does not say."""
    settings = read_json_object(folder / CONFIG_FILE).get("quantization_config")
    sizes = settings.get("weight_block_size") if isinstance(settings, dict) else None
    if isinstance(sizes, list) and len(sizes) == 2:
        height, width = sizes
        if all(type(size) is int and size > 0 for size in sizes):
            return height, width
    return 1, 1


def _misfit(where: str, scales: StoredTensor, weight: StoredTensor) -> UserError:
    """Makes the error of scales whose shape does not fit that of their weight."""
    return UserError(
        f"{where}: {scales.name} has the shape {list(scales.shape)}, which does not fit "
        f"{list(weight.shape)} of {weight.name}; copy the files again, or name the unquantized "
        "model"
    )
