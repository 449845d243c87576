"""Weights that other tools publish packed in few bits, as tensors of plain numbers.

Those of GPTQ, AWQ, AQLM, compressed-tensors and ModelOpt, in float32.

`Q`, `z`, `s`: codes, the code that stands for zero, and the scale of a group of inputs. The number
is (Q - z) s. docs/quantization.md says which kinds are read.
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
from finetune.files.tensors import ComputedPart, Slices, StoredTensor, read, read_slice

WORD = 32  # bits
# where AWQ's packing puts the eight numbers of a word
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, then the same below zero


@dataclass(frozen=True, slots=True)
class Parts:
    """The stored tensors of one weight, by the ends of names, and the width of its codes."""

    tensors: Mapping[str, StoredTensor]
    bits: int
    settings: Mapping[str, Any]

    def shape(self, end: str) -> Shape:
        return self.tensors[end].shape

    def read(self, end: str) -> Tensor:
        return read(self.tensors[end])

    def read_rows(self, end: str, rows: slice) -> Tensor:
        """Reads those rows of a tensor [rows, ...]."""
        others = (slice(0, size) for size in self.shape(end)[1:])
        return read_slice(self.tensors[end], (rows, *others))

    def read_columns(self, end: str, columns: slice) -> Tensor:
        """Reads those columns of a tensor [rows, columns]."""
        return read_slice(self.tensors[end], (slice(0, self.shape(end)[0]), columns))


FindShape = Callable[[Parts], tuple[int, int]]
ReadRows = Callable[[Parts, slice], Tensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """A kind of files.

    Attributes:
        needs: The ends of the names of a weight's tensors, the codes first.
        beside: Those of what may come with them.
        find_shape: The weight's rows and columns.
        read_rows: Its numbers, fp32[rows, columns], of some rows.
        dtypes: Of the codes.
    """

    needs: Names
    beside: Names
    find_shape: FindShape
    read_rows: ReadRows
    dtypes: tuple[torch.dtype, ...]


def unpack_packed(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors of `folder` with plain ones in place of packed weights and what is beside them,
    where its config.json names a kind that is read.

    Reads no value.

    Raises `UserError` where the tensors of a weight do not fit each other.
    """
    settings = read_json_object(folder / CONFIG_FILE).get("quantization_config")
    packing = PACKINGS.get(read_published_form(settings) or "")
    tensors = dict(stored)
    if packing is None or not isinstance(settings, Mapping):
        return tensors
    codes = packing.needs[0]
    for name, tensor in stored.items():
        layer = name.removesuffix(codes)
        needed = [layer + end for end in packing.needs]
        if not name.endswith(f".{codes}") or tensor.dtype not in packing.dtypes:
            continue
        if not all(each in stored for each in needed):
            continue
        ends = [end for end in (*packing.needs, *packing.beside) if layer + end in stored]
        parts = Parts({end: stored[layer + end] for end in ends}, find_bits(settings), settings)
        for end in ends:
            del tensors[layer + end]
        weight = _plain(f"{layer}weight", parts, packing, str(folder))
        tensors[weight.name] = weight
    return tensors


def _plain(name: str, parts: Parts, packing: Packing, where: str) -> StoredTensor:
    shape = packing.find_shape(parts)
    source = parts.tensors[packing.needs[0]]

    def read_values(slices: Slices) -> Tensor:
        rows, columns = slices
        try:
            values = packing.read_rows(parts, rows)
        except (RuntimeError, IndexError):  # torch's, of shapes that do not fit each other
            values = torch.empty(0, 0)
        if values.shape != (rows.stop - rows.start, shape[1]):
            sizes = {end: list(tensor.shape) for end, tensor in parts.tensors.items()}
            raise UserError(
                f"{where}: {name}: its packed tensors do not fit each other ({sizes}); copy the "
                "files again, or name the unquantized model"
            )
        return values[:, columns]

    zeros = (0, 0)
    part = ComputedPart(source.parts[0].path, 0, zeros, shape, read_values, zeros, (0, 1))
    return StoredTensor(name, shape, torch.float32, (part,))


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32[..., words] -> int32[..., words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _outputs_of_words(parts: Parts, rows: slice) -> tuple[slice, slice]:
    """The words that hold these outputs, and where the outputs are among theirs."""
    per_word = WORD // parts.bits
    first = rows.start // per_word
    words = slice(first, ceil_div(rows.stop, per_word))
    return words, slice(rows.start - first * per_word, rows.stop - first * per_word)


def _by_group(values: Tensor, inputs: int) -> Tensor:
    """[..., groups] -> [..., inputs], each group's value for its inputs."""
    return values.repeat_interleave(inputs // values.shape[-1], -1)


def _scale_groups(parts: Parts, index: str, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The values of codes [outputs, inputs], whose group `index` says where the files have it."""
    if index in parts.tensors:
        groups = parts.read(index).long()
        return (codes - zeros[:, groups]) * scales[:, groups]
    inputs = codes.shape[1]
    return (codes - _by_group(zeros, inputs)) * _by_group(scales, inputs)


# GPTQ: qweight int32[inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32], scales
# [groups, outputs], g_idx [inputs], the group of each input.


def _shape_of_gptq(parts: Parts) -> tuple[int, int]:
    words, outputs = parts.shape("qweight")
    return outputs, words * WORD // parts.bits


def _read_gptq(parts: Parts, rows: slice) -> Tensor:
    words, own = _outputs_of_words(parts, rows)
    codes = _unpack(parts.read_columns("qweight", rows).t().contiguous(), parts.bits)
    zeros = _unpack(parts.read_columns("qzeros", words), parts.bits)[:, own].t()
    if parts.settings.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << parts.bits) - 1)
    scales = parts.read_columns("scales", rows).t().float()
    return _scale_groups(parts, "g_idx", codes, zeros, scales)


# AWQ: qweight int32[inputs, outputs * bits / 32], zeros and scales as GPTQ's.


def _shape_of_awq(parts: Parts) -> tuple[int, int]:
    inputs, words = parts.shape("qweight")
    return words * WORD // parts.bits, inputs


def _read_awq(parts: Parts, rows: slice) -> Tensor:
    words, own = _outputs_of_words(parts, rows)

    def unpack(end: str) -> Tensor:
        numbers = _unpack(parts.read_columns(end, words), parts.bits)
        in_words = numbers.view(numbers.shape[0], -1, len(AWQ_PLACES))
        return in_words[..., list(AWQ_PLACES)].flatten(-2)[:, own].t()

    codes = unpack("qweight")
    scales = parts.read_columns("scales", rows).t().float()
    inputs = codes.shape[1]
    return (codes - _by_group(unpack("qzeros"), inputs)) * _by_group(scales, inputs)


# AQLM: codes int[output groups, input groups, codebooks], codebooks [codebooks, size, outputs,
# inputs] of a group, scales [output groups, 1, 1, 1]. A group is the sum of its codes' entries.


def _shape_of_aqlm(parts: Parts) -> tuple[int, int]:
    groups = parts.shape("codes")
    sizes = parts.shape("codebooks")
    return groups[0] * sizes[2], groups[1] * sizes[3]


def _read_aqlm(parts: Parts, rows: slice) -> Tensor:
    books, size, height, width = parts.shape("codebooks")
    groups = slice(rows.start // height, ceil_div(rows.stop, height))
    codes = parts.read_rows("codes", groups).long() % size
    entries = parts.read("codebooks").float().reshape(books * size, height * width)
    flat = (codes + torch.arange(books) * size).flatten(0, 1)
    values = F.embedding_bag(flat, entries, mode="sum")
    values = values.view(codes.shape[0], codes.shape[1], height, width)
    values = values * parts.read_rows("scales", groups).float()
    whole = values.transpose(1, 2).reshape(codes.shape[0] * height, -1)
    first = rows.start - groups.start * height
    return whole[first : first + rows.stop - rows.start]


# compressed-tensors and ModelOpt: scales [outputs, groups], [outputs, 1], blocks, or one for all.


def _read_grid(parts: Parts, end: str, rows: slice) -> Tensor:
    """The values of `end`, fp32[rows, columns / group], for these rows."""
    values = parts.read(end).float()
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows.stop - rows.start, 1)
    grid = values.reshape(values.shape[0], -1)
    codes = next(end for end in ("weight_packed", "weight") if end in parts.tensors)
    height = max(1, parts.shape(codes)[0] // grid.shape[0])
    return grid.repeat_interleave(height, 0)[rows]


def _shape_of_words(parts: Parts) -> tuple[int, int]:
    outputs, words = parts.shape("weight_packed")
    return outputs, words * WORD // parts.bits


def _read_words(parts: Parts, rows: slice) -> Tensor:
    codes = _unpack(parts.read_rows("weight_packed", rows), parts.bits)
    scales = _read_grid(parts, "weight_scale", rows)
    zero = torch.full_like(scales, 1 << (parts.bits - 1), dtype=torch.int32)
    if "weight_zero_point" in parts.tensors:  # packed over the outputs
        packed = parts.read("weight_zero_point").t().contiguous()
        zero = _unpack(packed, parts.bits).t()[rows]
    return _scale_groups(parts, "weight_g_idx", codes, zero, scales)


def _shape_of_plain(parts: Parts) -> tuple[int, int]:
    outputs, inputs = parts.shape("weight")
    return outputs, inputs


def _read_plain(parts: Parts, rows: slice) -> Tensor:
    """Codes that are numbers: FP8, or integers of 8 bits."""
    codes = parts.read_rows("weight", rows).float()
    if "weight_zero_point" in parts.tensors:
        codes = codes - _by_group(_read_grid(parts, "weight_zero_point", rows), codes.shape[1])
    return codes * _by_group(_read_grid(parts, "weight_scale", rows), codes.shape[1])


def _fp4(codes_end: str, read_scales: ReadRows) -> tuple[FindShape, ReadRows]:
    """Returns (find_shape, read_rows) of two numbers a byte, the first in its lower half."""

    def find_shape(parts: Parts) -> tuple[int, int]:
        outputs, half = parts.shape(codes_end)
        return outputs, 2 * half

    def read_rows(parts: Parts, rows: slice) -> Tensor:
        halves = parts.read_rows(codes_end, rows)
        codes = torch.stack([halves & 15, halves >> 4], -1).flatten(-2).long()
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])[codes]
        return values * _by_group(read_scales(parts, rows), codes.shape[1])

    return find_shape, read_rows


def _scales_of_nvfp4(parts: Parts, rows: slice) -> Tensor:
    of_all = parts.read("weight_global_scale").float().reshape(())
    return parts.read_rows("weight_scale", rows).float() / of_all


def _scales_of_modelopt(parts: Parts, rows: slice) -> Tensor:
    of_all = parts.read("weight_scale_2").float().reshape(())
    return parts.read_rows("weight_scale", rows).float() * of_all


def _scales_of_mxfp4(parts: Parts, rows: slice) -> Tensor:
    return torch.exp2(parts.read_rows("weight_scale", rows).float() - 127)


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "weight_shape", "weight_g_idx")
ZERO = "weight_zero_point"
GROUPED = ("qweight", "qzeros", "scales")
SCALED = ("weight", "weight_scale")
PACKED = ("weight_packed", "weight_scale")
PACKINGS: Mapping[str, Packing] = {
    "gptq": Packing(GROUPED, ("g_idx",), _shape_of_gptq, _read_gptq, (torch.int32,)),
    "awq": Packing(GROUPED, (), _shape_of_awq, _read_awq, (torch.int32,)),
    "aqlm": Packing(
        ("codes", "codebooks", "scales"),
        (),
        _shape_of_aqlm,
        _read_aqlm,
        (torch.int8, torch.int16, torch.uint8),
    ),
    "pack-quantized": Packing(
        PACKED, (ZERO, *INPUTS), _shape_of_words, _read_words, (torch.int32,)
    ),
    "float-quantized": Packing(SCALED, (ZERO, *INPUTS), _shape_of_plain, _read_plain, FP8),
    "int-quantized": Packing(SCALED, (ZERO, *INPUTS), _shape_of_plain, _read_plain, (torch.int8,)),
    "nvfp4-pack-quantized": Packing(
        (*PACKED, "weight_global_scale"),
        INPUTS,
        *_fp4("weight_packed", _scales_of_nvfp4),
        (torch.uint8,),
    ),
    "mxfp4-pack-quantized": Packing(
        PACKED, INPUTS, *_fp4("weight_packed", _scales_of_mxfp4), (torch.uint8,)
    ),
    "NVFP4": Packing(
        (*SCALED, "weight_scale_2"), INPUTS, *_fp4("weight", _scales_of_modelopt), (torch.uint8,)
    ),
    "FP8": Packing(SCALED, INPUTS, _shape_of_plain, _read_plain, FP8),
}
