"""Reads weights that other tools publish packed in few bits, as tensors of plain numbers in fp32.

The tools are GPTQ, AWQ, AQLM, compressed-tensors and ModelOpt; docs/quantization.md says which
kinds of files are read. Most store integer codes in int32 words, and for each group of inputs a
scale and a zero, which is the code of the number 0. The number is (code - zero) * scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.config.quantization import find_bits, read_published_form
from finetune.constants import CONFIG_FILE, Names, Shape, ceil_div
from finetune.errors import UserError
from finetune.files.json_files import read_json_object
from finetune.files.tensors import Slices, StoredTensor, read, read_slice

WORD = 32  # bits
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # number i of the eight in AWQ's word is at place [i]
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7 of E2M1; 8 to 15: with a minus


@dataclass(frozen=True, slots=True)
class Parts:
    """The stored tensors of one packed weight. Its methods take the `end` of a tensor's name."""

    tensors: Mapping[str, StoredTensor]  # the end of the name, such as "qweight" -> the tensor
    bits: int  # of a code
    settings: Mapping[str, Any]  # the config's quantization_config

    def shape(self, end: str) -> Shape:
        return self.tensors[end].shape

    def read(self, end: str) -> Tensor:
        return read(self.tensors[end])

    def read_rows(self, end: str, rows: slice) -> Tensor:
        """Reads those rows of a tensor [rows, ...]."""
        _, *sizes = self.shape(end)
        other_slices = (slice(0, size) for size in sizes)
        return read_slice(self.tensors[end], (rows, *other_slices))

    def read_columns(self, end: str, columns: slice) -> Tensor:
        """Reads those columns of a tensor [rows, columns]."""
        all_rows = slice(0, self.shape(end)[0])
        return read_slice(self.tensors[end], (all_rows, columns))


FindShape = Callable[[Parts], tuple[int, int]]
"""Finds (outputs, inputs), the shape of the plain weight."""
ReadRows = Callable[[Parts, slice], Tensor]
"""Reads some rows of the plain weight, or of its scales: fp32[rows, columns]."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A way in which a tool packs weights.

    Attributes:
        required: The ends of the names of a weight's tensors, that of the codes first. Those of
            OPTIONAL may come with them.
        find_shape: Finds the shape of the plain weight.
        read_rows: Reads some rows of the plain weight.
        dtypes: The dtypes that the codes may have.
    """

    required: Names
    find_shape: FindShape
    read_rows: ReadRows
    dtypes: tuple[torch.dtype, ...]


def unpack_packed(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Replaces the packed weights among the tensors of `folder` by plain ones.

    A plain weight takes the place of all tensors of a packed weight. It is unpacked when it is
    read; nothing is read here. All tensors stay as they are if config.json names no kind of
    PACKINGS.

    A plain weight raises `UserError` when it is read, if its packed tensors do not fit each other.

    Args:
        stored: Name -> tensor of the files.
    """
    settings = read_json_object(folder / CONFIG_FILE).get("quantization_config")
    packing = PACKINGS.get(read_published_form(settings) or "")
    tensors = dict(stored)
    if packing is None or not isinstance(settings, Mapping):
        return tensors
    codes_end, *_ = packing.required
    for name, tensor in stored.items():
        layer = name.removesuffix(codes_end)
        if not name.endswith(f".{codes_end}") or tensor.dtype not in packing.dtypes:
            continue
        if not all(layer + end in stored for end in packing.required):
            continue
        ends = [end for end in (*packing.required, *OPTIONAL) if layer + end in stored]
        parts = Parts({end: stored[layer + end] for end in ends}, find_bits(settings), settings)
        for end in ends:
            del tensors[layer + end]
        weight = _make_plain(f"{layer}weight", parts, packing, str(folder))
        tensors[weight.name] = weight
    return tensors


def _make_plain(name: str, parts: Parts, packing: Packing, where: str) -> StoredTensor:
    """Makes a plain weight, fp32[outputs, inputs], that is unpacked from `parts` when it is read.

    where: The folder, for messages.
    """
    shape = packing.find_shape(parts)
    _, inputs = shape
    codes_end, *_ = packing.required
    codes = parts.tensors[codes_end]

    def read_values(slices: Slices) -> Tensor:
        rows, columns = slices
        try:
            values = packing.read_rows(parts, rows)
        except (RuntimeError, IndexError):  # torch raises them if shapes do not fit each other
            values = torch.empty(0, 0)
        if values.shape != (rows.stop - rows.start, inputs):
            sizes = {end: list(tensor.shape) for end, tensor in parts.tensors.items()}
            raise UserError(
                f"{where}: {name}: its packed tensors do not fit each other ({sizes}); copy the "
                "files again, or name the unquantized model"
            )
        return values[:, columns]

    return StoredTensor(name, shape, torch.float32, codes.parts, read_values)


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpacks int32[..., words] to codes int32[..., words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _find_words(parts: Parts, rows: slice) -> tuple[slice, slice]:
    """Finds the words that hold the codes of the outputs `rows`.

    Returns:
        (slice of the words, slice of the outputs among the codes of these words).
    """
    per_word = WORD // parts.bits
    first_word = rows.start // per_word
    words = slice(first_word, ceil_div(rows.stop, per_word))
    first_code = first_word * per_word
    return words, slice(rows.start - first_code, rows.stop - first_code)


def _spread_groups(values: Tensor, inputs: int) -> Tensor:
    """Repeats each group's value for all its inputs: [..., groups] -> [..., inputs]."""
    return values.repeat_interleave(inputs // values.shape[-1], -1)


def _dequantize(parts: Parts, index: str, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Computes (codes - zeros) * scales, fp32[outputs, inputs].

    Args:
        index: The end of the name of a tensor [inputs] that has each input's group. If the files
            lack it, the inputs lie group after group.
        codes: [outputs, inputs].
        zeros, scales: [outputs, groups].
    """
    if index in parts.tensors:
        group_of_input = parts.read(index).long()
        return (codes - zeros[:, group_of_input]) * scales[:, group_of_input]
    inputs = codes.shape[1]
    return (codes - _spread_groups(zeros, inputs)) * _spread_groups(scales, inputs)


# GPTQ: qweight int32[inputs * bits / 32, outputs], qzeros int32[groups, outputs * bits / 32],
# scales [groups, outputs], g_idx [inputs]: the group of each input.


def _find_gptq_shape(parts: Parts) -> tuple[int, int]:
    words, outputs = parts.shape("qweight")
    return outputs, words * WORD // parts.bits


def _read_gptq(parts: Parts, rows: slice) -> Tensor:
    words, rows_in_words = _find_words(parts, rows)
    codes = _unpack_words(parts.read_columns("qweight", rows).t().contiguous(), parts.bits)
    zeros = _unpack_words(parts.read_columns("qzeros", words), parts.bits)[:, rows_in_words].t()
    if parts.settings.get("checkpoint_format") != "gptq_v2":  # the first format stores zero - 1
        zeros = (zeros + 1) & ((1 << parts.bits) - 1)
    scales = parts.read_columns("scales", rows).t().float()
    return _dequantize(parts, "g_idx", codes, zeros, scales)


# AWQ: qweight int32[inputs, outputs * bits / 32], zeros and scales as GPTQ's.


def _find_awq_shape(parts: Parts) -> tuple[int, int]:
    inputs, words = parts.shape("qweight")
    return words * WORD // parts.bits, inputs


def _read_awq(parts: Parts, rows: slice) -> Tensor:
    words, rows_in_words = _find_words(parts, rows)

    def unpack(end: str) -> Tensor:
        """The codes of a tensor for these outputs: [outputs, its first dimension]."""
        numbers = _unpack_words(parts.read_columns(end, words), parts.bits)
        by_word = numbers.view(numbers.shape[0], -1, len(AWQ_PLACES))
        return by_word[..., list(AWQ_PLACES)].flatten(-2)[:, rows_in_words].t()

    codes = unpack("qweight")
    scales = parts.read_columns("scales", rows).t().float()
    inputs = codes.shape[1]
    return (codes - _spread_groups(unpack("qzeros"), inputs)) * _spread_groups(scales, inputs)


# AQLM: a weight is a grid of small matrices [height, width]. codes int[rows of the grid, columns of
# the grid, codebooks], codebooks [codebooks, entries, height, width], scales [rows of the grid, 1,
# 1, 1]. A matrix is the sum of one entry of each codebook, times the scale.


def _find_aqlm_shape(parts: Parts) -> tuple[int, int]:
    grid_rows, grid_columns = parts.shape("codes")[:2]
    height, width = parts.shape("codebooks")[2:4]
    return grid_rows * height, grid_columns * width


def _read_aqlm(parts: Parts, rows: slice) -> Tensor:
    books, size, height, width = parts.shape("codebooks")
    grid_rows = slice(rows.start // height, ceil_div(rows.stop, height))
    # Codes from half of the size on are negative in a signed dtype.
    codes = parts.read_rows("codes", grid_rows).long() % size
    entries = parts.read("codebooks").float().reshape(books * size, height * width)
    entry_ids = (codes + torch.arange(books) * size).flatten(0, 1)
    row_count, column_count, _ = codes.shape
    matrices = F.embedding_bag(entry_ids, entries, mode="sum")
    matrices = matrices.view(row_count, column_count, height, width)
    matrices = matrices * parts.read_rows("scales", grid_rows).float()
    values = matrices.transpose(1, 2).reshape(row_count * height, -1)
    first = rows.start - grid_rows.start * height
    return values[first : first + rows.stop - rows.start]


# compressed-tensors and ModelOpt: scales [outputs, groups], [outputs, 1], [blocks of outputs,
# blocks of inputs], or one for the whole weight.


def _read_grid(parts: Parts, end: str, rows: slice) -> Tensor:
    """Reads the scales or zeros `end` for some rows of the weight: fp32[rows, groups]."""
    values = parts.read(end).float()
    if values.numel() == 1:  # one for the whole weight
        return values.reshape(1, 1).expand(rows.stop - rows.start, 1)
    grid = values.reshape(values.shape[0], -1)
    codes_end = next(end for end in ("weight_packed", "weight") if end in parts.tensors)
    outputs, *_ = parts.shape(codes_end)
    block_height = max(1, outputs // grid.shape[0])
    return grid.repeat_interleave(block_height, 0)[rows]


def _find_pack_quantized_shape(parts: Parts) -> tuple[int, int]:
    outputs, words = parts.shape("weight_packed")
    return outputs, words * WORD // parts.bits


def _read_pack_quantized(parts: Parts, rows: slice) -> Tensor:
    codes = _unpack_words(parts.read_rows("weight_packed", rows), parts.bits)
    scales = _read_grid(parts, "weight_scale", rows)
    if "weight_zero_point" in parts.tensors:  # packed over the outputs
        packed = parts.read("weight_zero_point").t().contiguous()
        zeros = _unpack_words(packed, parts.bits).t()[rows]
    else:  # the middle of the codes
        zeros = torch.full_like(scales, 1 << (parts.bits - 1), dtype=torch.int32)
    return _dequantize(parts, "weight_g_idx", codes, zeros, scales)


def _find_plain_shape(parts: Parts) -> tuple[int, int]:
    outputs, inputs = parts.shape("weight")
    return outputs, inputs


def _read_plain(parts: Parts, rows: slice) -> Tensor:
    """Reads codes that are numbers themselves: FP8, or 8-bit integers."""
    codes = parts.read_rows("weight", rows).float()
    if "weight_zero_point" in parts.tensors:
        codes = codes - _spread_groups(_read_grid(parts, "weight_zero_point", rows), codes.shape[1])
    return codes * _spread_groups(_read_grid(parts, "weight_scale", rows), codes.shape[1])


def _make_fp4_readers(codes_end: str, read_scales: ReadRows) -> tuple[FindShape, ReadRows]:
    """Makes (find_shape, read_rows) for FP4: a byte holds two numbers, the first in its lower half.

    read_scales: Reads the scales of some rows, fp32[rows, groups].
    """

    def find_shape(parts: Parts) -> tuple[int, int]:
        outputs, row_bytes = parts.shape(codes_end)
        return outputs, 2 * row_bytes

    def read_rows(parts: Parts, rows: slice) -> Tensor:
        pairs = parts.read_rows(codes_end, rows)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])[codes]
        return values * _spread_groups(read_scales(parts, rows), codes.shape[1])

    return find_shape, read_rows


def _read_nvfp4_scales(parts: Parts, rows: slice) -> Tensor:
    """The groups' scales of compressed-tensors' NVFP4, which divides by the global scale."""
    global_scale = parts.read("weight_global_scale").float().reshape(())
    return parts.read_rows("weight_scale", rows).float() / global_scale


def _read_modelopt_scales(parts: Parts, rows: slice) -> Tensor:
    """The groups' scales of ModelOpt's NVFP4, which multiplies by the global scale."""
    global_scale = parts.read("weight_scale_2").float().reshape(())
    return parts.read_rows("weight_scale", rows).float() * global_scale


def _read_mxfp4_scales(parts: Parts, rows: slice) -> Tensor:
    """The groups' scales, which are stored as exponents of 2 plus 127."""
    return torch.exp2(parts.read_rows("weight_scale", rows).float() - 127)


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Ends of names of what may come with a weight; of these the first three are read.
OPTIONAL = (
    "g_idx",
    "weight_g_idx",
    "weight_zero_point",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "weight_shape",
)
GROUPED = ("qweight", "qzeros", "scales")
SCALED = ("weight", "weight_scale")
PACKED = ("weight_packed", "weight_scale")
# By the kind that `read_published_form` finds.
PACKINGS: Mapping[str, Packing] = {
    "gptq": Packing(GROUPED, _find_gptq_shape, _read_gptq, (torch.int32,)),
    "awq": Packing(GROUPED, _find_awq_shape, _read_awq, (torch.int32,)),
    "aqlm": Packing(
        ("codes", "codebooks", "scales"),
        _find_aqlm_shape,
        _read_aqlm,
        (torch.int8, torch.int16, torch.uint8),
    ),
    "pack-quantized": Packing(
        PACKED, _find_pack_quantized_shape, _read_pack_quantized, (torch.int32,)
    ),
    "float-quantized": Packing(SCALED, _find_plain_shape, _read_plain, FP8),
    "int-quantized": Packing(SCALED, _find_plain_shape, _read_plain, (torch.int8,)),
    "nvfp4-pack-quantized": Packing(
        (*PACKED, "weight_global_scale"),
        *_make_fp4_readers("weight_packed", _read_nvfp4_scales),
        (torch.uint8,),
    ),
    "mxfp4-pack-quantized": Packing(
        PACKED, *_make_fp4_readers("weight_packed", _read_mxfp4_scales), (torch.uint8,)
    ),
    "NVFP4": Packing(
        (*SCALED, "weight_scale_2"),
        *_make_fp4_readers("weight", _read_modelopt_scales),
        (torch.uint8,),
    ),
    "FP8": Packing(SCALED, _find_plain_shape, _read_plain, FP8),
}
