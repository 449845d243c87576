"""A base whose files hold 4-bit or 8-bit weights, as transformers saves them with bitsandbytes: found and read as they are."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune.errors import UserError
from finetune.models.quantize import QuantizedTensor, four_bit_values, join_nested_scales, nested_values
from finetune.quantization import BLOCK, NESTED_BLOCK
from finetune.recipe.schema import Quantization
from finetune.safetensors_io.tensors import StoredTensor, read, read_slice

# What the files hold beside a quantized weight, by the end of its name.
STATE = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")  # JSON as bytes
PARTS = (*STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")  # after NAME.weight
INT8_PARTS = (".SCB", ".weight_format")  # after NAME


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
        """The scales as `quantize.pack_scales` lays them out."""
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


def split_quantized(
    stored: Mapping[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """(every weight under its name and with its own shape, the quantized ones of them) of the tensors in a folder.

    Raises `UserError` where a weight is quantized with values or block sizes that bitsandbytes does not have.
    """
    quantized: dict[str, StoredQuantized] = {}
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
    quantization = Quantization(
        load_in_4bit=True, bnb_4bit_quant_type=settings["quant_type"], bnb_4bit_use_double_quant=is_nested
    )
    rows, columns = settings["shape"]
    known = {".quant_map": four_bit_values(settings["quant_type"])}
    if is_nested:
        known[".nested_quant_map"] = nested_values(torch.device("cpu"))
    for end, values in known.items():
        if end not in scales or not torch.allclose(read(scales[end]).view(-1).float(), values, atol=1e-6):
            raise _unreadable(where, f"{weight}{end}", "not the values that bitsandbytes uses")
    if is_nested and settings.get("nested_blocksize") != NESTED_BLOCK:
        raise _unreadable(where, weight, f"its scales are quantized in blocks of {settings.get('nested_blocksize')}")
    block = int(settings["blocksize"])
    blocks = math.ceil(rows * columns / block)
    sizes = {".absmax": blocks} | ({".nested_absmax": math.ceil(blocks / NESTED_BLOCK)} if is_nested else {})
    for end, size in sizes.items():
        if end not in scales or math.prod(scales[end].shape) != size:
            raise _unreadable(where, f"{weight}{end}", f"{size:,} scales are expected")
    codes = _as_bytes(stored, weight, math.ceil(rows * columns / 2), where)
    return StoredQuantized(
        codes, scales, (rows, columns), quantization, block, float(settings.get("nested_offset", 0.0))
    )


def _eight_bit(weight: str, stored: Mapping[str, StoredTensor], where: str) -> StoredQuantized:
    scales = {".SCB": stored[f"{weight.removesuffix('.weight')}.SCB"]}
    shape = stored[weight].shape if weight in stored else ()
    if len(shape) != 2 or stored[weight].dtype != torch.int8 or math.prod(scales[".SCB"].shape) != shape[0]:
        raise _unreadable(where, weight, "8-bit rows with a scale each are expected")
    codes = _as_bytes(stored, weight, math.prod(shape), where)
    return StoredQuantized(codes, scales, (shape[0], shape[1]), Quantization(load_in_8bit=True), BLOCK, 0.0)


def _read_state(weight: str, state: str, stored: Mapping[str, StoredTensor], where: str) -> dict[str, Any]:
    try:
        settings = json.loads(bytes(read(stored[f"{weight}{state}"]).view(-1).tolist()))
        rows, columns = settings["shape"]
        if settings["quant_type"] == state[-3:] and settings["blocksize"] % 2 == 0 and rows > 0 and columns > 0:
            return dict(settings)
    except (ValueError, KeyError, TypeError):
        pass
    raise _unreadable(where, f"{weight}{state}", "bitsandbytes' description of the weight is expected")


def _as_bytes(stored: Mapping[str, StoredTensor], name: str, size: int, where: str) -> StoredTensor:
    """The tensor as `size` single bytes. Its file may call them numbers of any dtype (`bnb_4bit_quant_storage`)."""
    tensor = stored.get(name)
    if tensor is None or len(tensor.parts) != 1 or tensor.byte_count < size:
        raise _unreadable(where, name, f"{size:,} bytes in one file are expected")
    (part,) = tensor.parts
    return replace(tensor, shape=(size,), dtype=torch.uint8, parts=(replace(part, offsets=(0,), shape=(size,)),))


def _unreadable(where: str, name: str, what: str) -> UserError:
    return UserError(f"{where}: {name}: {what}; save the model again with bitsandbytes, or name the unquantized model")
