"""What a base in 4 or 8 bits takes: the bytes of a weight's codes and scales, which loading and the plan must agree on. No torch."""

import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.distributed.accelerate_config import Sharding
    from finetune.recipe.schema import Quantization

BLOCK = 64  # numbers of a 4-bit weight under one scale, in row-major order over the whole weight: blocks cross rows
NESTED_BLOCK = 256  # scales under one scale of their own, with bnb_4bit_use_double_quant
FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class QuantizedBytes:
    """The bytes of one quantized weight in memory."""

    codes: int  # the numbers: two in a byte at 4 bits, one at 8 bits
    scales: int

    def padded(self, itemsize: int) -> int:
        """Both together as they are kept: as numbers of the compute dtype, which has `itemsize` bytes."""
        return sum(math.ceil(size / itemsize) * itemsize for size in (self.codes, self.scales))


def quantized_bytes(rows: int, columns: int, quantization: "Quantization", block: int = BLOCK) -> QuantizedBytes:
    """The bytes of a weight [rows, columns].

    >>> from finetune.recipe.schema import Quantization
    >>> quantized_bytes(4096, 4096, Quantization(load_in_4bit=True))
    QuantizedBytes(codes=8388608, scales=1048576)
    >>> quantized_bytes(4096, 4096, Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True))
    QuantizedBytes(codes=8388608, scales=266244)
    >>> quantized_bytes(4096, 4096, Quantization(load_in_8bit=True))
    QuantizedBytes(codes=16777216, scales=16384)
    """
    numbers = rows * columns
    if quantization.bits == 8:
        return QuantizedBytes(numbers, rows * FP32)
    blocks = math.ceil(numbers / block)
    if not quantization.bnb_4bit_use_double_quant:
        return QuantizedBytes(math.ceil(numbers / 2), blocks * FP32)
    # A byte for each scale, filled up to where an fp32 number may begin; their own scales; and the mean of all of them.
    nested = math.ceil(blocks / FP32) * FP32 + (math.ceil(blocks / NESTED_BLOCK) + 1) * FP32
    return QuantizedBytes(math.ceil(numbers / 2), nested)


def check_quantization(quantization: "Quantization", sharding: "Sharding") -> None:
    """Raises `UserError` where the base cannot be quantized: in this layout, or without the package."""
    if quantization.bits is None:
        return
    key = f"load_in_{quantization.bits}bit"
    if sharding.layout == "fsdp1":
        raise UserError(
            f"{sharding.source}: {key}: FSDP1 flattens and converts the parameters of a layer together, which quantized ones "
            "do not survive; set fsdp_version: 2"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{key} needs bitsandbytes; pip install bitsandbytes, or leave {key} out")
