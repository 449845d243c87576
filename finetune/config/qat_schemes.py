"""The schemes of quantization-aware training: the bits of weights and inputs, and what torchao does not finish."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantized. The weights' scales are symmetric; inputs have a scale and an offset a token."""

    weight_bits: int
    input_bits: int | None = None  # None: inputs are not rounded
    is_float: bool = False
    refused: str = ""  # why what it trains cannot be quantized, and so not compared with what was trained

    def stored_bytes(self, itemsize: int, group: int | None) -> float:
        """Bytes of a number in an export: its code, and its part of a scale of `itemsize` bytes. Beside rounded inputs
        a code has a byte of its own."""
        return (1 if self.input_bits else self.weight_bits / 8) + (itemsize / group if group else 0)


WITH_MSLK = "torchao packs 4-bit weights with kernels of the mslk package, on a GPU"
SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(4),
    "int8": Scheme(8),
    "int8-int4": Scheme(4, 8),
    "int8-int8": Scheme(8, 8),
    "int4-packed": Scheme(4, refused=WITH_MSLK),
    "fp8-int4": Scheme(4, 8, refused=WITH_MSLK),
    "fp8-fp8": Scheme(8, 8, is_float=True, refused="torchao quantizes to FP8 on GPUs from Ada and MI300 on"),
    "nvfp4": Scheme(4, 4, refused="torchao quantizes to NVFP4 on GPUs of Blackwell"),
    "mxfp4": Scheme(4, 4, refused="torchao quantizes to MXFP4 on GPUs of Blackwell"),
}
EXPORTED = ("fp8-fp8", *(name for name, scheme in SCHEMES.items() if not scheme.refused))
TRAINED = tuple(name for name, scheme in SCHEMES.items() if not scheme.refused)
if TYPE_CHECKING:
    SchemeName = str
else:
    SchemeName = Literal[tuple(SCHEMES)]
