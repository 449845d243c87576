"""Quantized weights: recipe keys, schemes of QAT, forms of quantized files, and bytes of a weight.

Imports no torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from finetune.config.keys import Positive
from finetune.constants import FP32
from finetune.errors import UserError, name_page


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantized.

    The scales of weights are symmetric: they have no offset. Inputs rounded to whole numbers have a
    scale and an offset for each token. A scheme with blocks rounds inputs as it rounds weights.
    """

    weight_bits: int
    input_bits: int | None = None  # None: inputs are not rounded
    is_float: bool = False  # codes are floats; False: codes are whole numbers
    # numbers that share a scale of one byte; None: qat_group_size gives the number
    block: int | None = None
    is_ternary: bool = False  # weights are -1, 0 or 1, times one scale for the whole layer
    # why QAT refuses the scheme: where torchao can quantize with it, since elsewhere the quantized
    # model cannot be compared with the trained one; empty: QAT accepts the scheme
    refused: str = ""
    # why compressed-tensors exports cannot hold a model trained with the scheme; empty: they can
    not_exported: str = ""

    def group_of(self, qat_group_size: int | None) -> int | None:
        """Returns how many numbers of a row share one scale.

        Returns None if the whole row, or for a ternary scheme the whole layer, shares one.
        """
        if self.is_ternary:
            return None
        return self.block or qat_group_size

    def stored_bytes(self, itemsize: int, group: int | None) -> float:
        """Counts the bytes of one weight in an export: a code and a share of a scale.

        Args:
            itemsize: Bytes of a scale, unless the scheme has blocks with scales of one byte.
            group: Weights that share a scale; None: a whole row, whose scale is not counted.
        """
        if self.block:
            return self.weight_bits / 8 + 1 / self.block
        # where inputs are rounded, each code has a byte of its own
        code_bytes = 1 if self.input_bits else self.weight_bits / 8
        scale_bytes = itemsize / group if group else 0
        return code_bytes + scale_bytes


WITH_MSLK = "torchao packs 4-bit weights with kernels of the mslk package, on a GPU"
SCHEMES: Mapping[str, Scheme] = {
    "int4": Scheme(4),
    "int8": Scheme(8),
    "int8-int4": Scheme(4, 8),
    "int8-int8": Scheme(8, 8),
    "int4-packed": Scheme(4, refused=WITH_MSLK),
    "fp8-int4": Scheme(4, 8, refused=WITH_MSLK),
    "fp8-fp8": Scheme(
        8, 8, is_float=True, refused="torchao quantizes to FP8 on GPUs from Ada and MI300 on"
    ),
    "nvfp4": Scheme(
        4,
        4,
        is_float=True,
        block=16,
        not_exported="its inputs need a scale that is measured on data",
    ),
    "mxfp4": Scheme(4, 4, is_float=True, block=32),
    "int8-ternary": Scheme(
        2,
        8,
        is_ternary=True,
        not_exported="the plain export holds what was trained, which the package onebitllms packs",
    ),
}
# The schemes of a compressed-tensors export. fp8-fp8 is among them although QAT refuses it.
EXPORTED = (
    "fp8-fp8",
    *(name for name, scheme in SCHEMES.items() if not scheme.refused and not scheme.not_exported),
)
# The schemes of QAT.
TRAINED = tuple(name for name, scheme in SCHEMES.items() if not scheme.refused)
if TYPE_CHECKING:
    SchemeName = str
else:
    SchemeName = Literal[tuple(SCHEMES)]


# Each key below has a type, marks and a help text in `Annotated`, and then a default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The keys of QLoRA: LoRA adapters on a base model that bitsandbytes keeps in 4 or 8 bits."""

    load_in_4bit: Annotated[
        bool,
        "Keep the linear layers of LoRA's frozen base in 4 bits; embeddings, norms and the head "
        "stay in the compute dtype. Needs the bitsandbytes package; not under FSDP1.",
    ] = False
    load_in_8bit: Annotated[
        bool, "The same in 8 bits: each row scaled as in LLM.int8, multiplied in the compute dtype."
    ] = False
    bnb_4bit_quant_type: Annotated[
        Literal["nf4", "fp4"],
        "The 16 values of 4 bits: nf4 (for normally distributed weights) or fp4.",
    ] = "nf4"
    bnb_4bit_use_double_quant: Annotated[
        bool, "Quantize the scales of 4 bits as well: 0.37 bits less for each parameter."
    ] = False

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Bits per number of a quantized weight, or None if nothing is quantized."""
        if self.load_in_4bit:
            return 4
        return 8 if self.load_in_8bit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationAware:
    """The keys of QAT: training of a model that torchao will quantize. See docs/quantization.md."""

    quantization_aware_training: Annotated[
        SchemeName | None,
        "Round the weights of linear layers, and the inputs where two numbers are named, in every "
        "forward as this scheme will: int8-int4 is inputs of 8 bits, scaled for each token, and "
        "weights of 4; mxfp4 and nvfp4 round both to 4-bit floats in blocks of 32 and 16; "
        "int8-ternary is BitNet b1.58. The output head stays as it is. What is trained and saved "
        "has full precision; export_formats: [safetensors, compressed-tensors] quantizes it.",
    ] = None
    qat_group_size: Annotated[
        Positive | None,
        (
            "Numbers of a weight's row that share one scale; null: the row. It must divide the "
            "inputs of every layer."
        ),
    ] = 32
    fake_quant_after_n_steps: Annotated[
        int, Ge(0), "Round only after this many optimizer steps, when the weights have settled."
    ] = 0


LOAD_KEYS = ("load_in_4bit", "load_in_8bit")
QLORA: Mapping[str, Any] = {"use_peft": True, "load_in_4bit": True}
# Numbers of a 4-bit weight that share a scale. They are counted in row-major order over the whole
# weight, so a block may begin in one row and end in the next.
BLOCK = 64
NESTED_BLOCK = 256  # scales that share a scale themselves, with bnb_4bit_use_double_quant
CARD_CHARACTERS = 1 << 14  # how much of a model card is searched for the name of the base model


@dataclass(frozen=True, slots=True)
class QuantizedBytes:
    """The bytes in memory of one weight that bitsandbytes quantizes."""

    codes: int  # bytes of the quantized numbers: two numbers a byte at 4 bits, one at 8 bits
    scales: int  # bytes of the scales, and of the scales of scales


def quantized_bytes(
    rows: int, columns: int, quantization: Quantization, block: int = BLOCK
) -> QuantizedBytes:
    """Counts the bytes of a quantized weight [rows, columns], for the loader and for the plan.

    `block`: numbers that share a scale at 4 bits.

    >>> quantized_bytes(4096, 4096, Quantization(load_in_4bit=True))
    QuantizedBytes(codes=8388608, scales=1048576)
    >>> quantized_bytes(4096, 4096, Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True))
    QuantizedBytes(codes=8388608, scales=266244)
    >>> quantized_bytes(4096, 4096, Quantization(load_in_8bit=True))
    QuantizedBytes(codes=16777216, scales=16384)
    """
    numbers = rows * columns
    if quantization.bits == 8:
        return QuantizedBytes(codes=numbers, scales=rows * FP32)
    codes = math.ceil(numbers / 2)
    blocks = math.ceil(numbers / block)
    if not quantization.bnb_4bit_use_double_quant:
        return QuantizedBytes(codes, scales=blocks * FP32)
    # Each scale is a code of one byte. Padding makes their bytes a multiple of 4, since fp32
    # numbers follow: a scale for each NESTED_BLOCK codes, and the mean of the scales.
    scale_codes = math.ceil(blocks / FP32) * FP32
    nested_scales = math.ceil(blocks / NESTED_BLOCK) * FP32
    return QuantizedBytes(codes, scales=scale_codes + nested_scales + FP32)


def divide_quantization(numbers: int, quantization: Quantization) -> Quantization:
    """Returns the quantization of the experts of one rank, under expert parallelism.

    Double quantization is switched off if the border between two ranks would cut a block of
    NESTED_BLOCK scales. `numbers`: how many weights the experts of one rank have.
    """
    cuts_block = quantization.bnb_4bit_use_double_quant and numbers % (BLOCK * NESTED_BLOCK)
    if cuts_block:
        return replace(quantization, bnb_4bit_use_double_quant=False)
    return quantization


def describe_quantization(quantization: Quantization) -> str:
    """Names a quantization to 4 or 8 bits, for messages.

    >>> describe_quantization(Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True))
    '4 bits (nf4, double quantization)'
    >>> describe_quantization(Quantization(load_in_8bit=True))
    '8 bits (int8)'
    """
    kind = quantization.bnb_4bit_quant_type if quantization.bits == 4 else "int8"
    double = ""
    if quantization.bits == 4 and quantization.bnb_4bit_use_double_quant:
        double = ", double quantization"
    return f"{quantization.bits} bits ({kind}{double})"


def quantize_to(bits: int | None, quant_type: Any = None, double: bool = False) -> Quantization:
    """Makes a `Quantization` with `bits` bits a number; `bits` None: nothing is quantized.

    Args:
        bits: 4, 8 or None.
        quant_type: At 4 bits "fp4"; anything else means nf4.
        double: At 4 bits, whether scales are quantized too.
    """
    return Quantization(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="fp4" if quant_type == "fp4" else "nf4",
        bnb_4bit_use_double_quant=double,
    )


def read_recipe_quantization(recipe: Mapping[str, Any]) -> Quantization:
    """Reads how the base of a run is quantized from the recipe as a mapping.

    Values of the mapping are not validated, so only a literal true switches a key on.
    """
    bits: Literal[4, 8] | None = None
    if recipe.get("load_in_4bit") is True:
        bits = 4
    elif recipe.get("load_in_8bit") is True:
        bits = 8
    return quantize_to(
        bits, recipe.get("bnb_4bit_quant_type"), recipe.get("bnb_4bit_use_double_quant") is True
    )


def name_load_key(quantization: Quantization, *, of_teacher: bool) -> str:
    """Returns the recipe key that asks for this quantization of the base or the teacher."""
    if of_teacher:
        return "teacher_load_in_4bit"
    return f"load_in_{quantization.bits}bit"


# Forms of quantized files that are dequantized when they are read -> their tensors in words. A form
# is named by quant_method, for compressed-tensors by format, and for ModelOpt by quant_algo.
# models/quantized_weights.py reads FP8 blocks and MXFP4, models/packed_weights.py the rest.
PUBLISHED = {
    "mxfp4": "MXFP4 (blocks of 32 numbers in 4 bits, as _blocks and _scales)",
    "fp8": "FP8 (blocks with a scale each, as weight and weight_scale_inv)",
    "gptq": "GPTQ (groups in int32, as qweight, qzeros and scales)",
    "awq": "AWQ (4-bit groups in int32, as qweight, qzeros and scales)",
    "aqlm": "AQLM (sums of entries of codebooks, as codes, codebooks and scales)",
    "pack-quantized": "groups of integers in int32, as weight_packed and weight_scale",
    "float-quantized": "FP8 with a scale for each row or tensor, as weight and weight_scale",
    "int-quantized": "8-bit integers, as weight and weight_scale",
    "nvfp4-pack-quantized": (
        "NVFP4 (blocks of 16 numbers in 4 bits, as weight_packed, weight_scale and "
        "weight_global_scale)"
    ),
    "mxfp4-pack-quantized": "MXFP4 (blocks of 32 numbers in 4 bits, as weight_packed)",
    "NVFP4": "NVFP4 (blocks of 16 numbers in 4 bits, as weight, weight_scale and weight_scale_2)",
    "FP8": "FP8 with a scale for each tensor, as weight and weight_scale",
}
PACKED_BITS = (2, 4, 8)  # they divide the 32 bits of a packed integer


def read_published_form(settings: Any) -> str | None:
    """Returns the name in `PUBLISHED` for the files that a `quantization_config` describes.

    Returns None for any other form, and for variants of a form that are not read: other bits, AWQ
    without zero points, or another layout. `settings`: a mapping, a configuration object of
    transformers, or None.

    >>> read_published_form({"quant_method": "gptq", "bits": 4})
    'gptq'
    >>> read_published_form({"quant_method": "gptq", "bits": 3})
    """
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping):
        return None
    quant_method = settings.get("quant_method")
    quant_method = str(getattr(quant_method, "value", quant_method))  # an enum or text
    name = {
        "compressed-tensors": str(settings.get("format")),
        "modelopt": str(settings.get("quant_algo")),
    }.get(quant_method, quant_method)
    is_other_awq = name == "awq" and (
        str(settings.get("version") or "gemm").lower() != "gemm"
        or settings.get("zero_point") is False
    )
    is_other_gptq = name == "gptq" and settings.get("checkpoint_format", "gptq") not in (
        "gptq",
        "gptq_v2",
    )
    is_packed = name in ("gptq", "awq", "pack-quantized")
    has_readable_bits = not is_packed or find_bits(settings) in PACKED_BITS
    is_readable = name in PUBLISHED and has_readable_bits
    return name if is_readable and not (is_other_awq or is_other_gptq) else None


def find_bits(settings: Mapping[str, Any]) -> int:
    """Returns the bits of one packed number that a `quantization_config` states.

    Returns 0 if it states none, or if groups of layers differ in them.

    >>> find_bits({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}})
    4
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        bits = settings.get("bits") or settings.get("w_bit")
        return bits if isinstance(bits, int) else 0
    bits_of_groups = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    bits = bits_of_groups.pop() if len(bits_of_groups) == 1 else None
    return bits if isinstance(bits, int) else 0


def read_stored_quantization(settings: Any, name: str) -> Quantization | None:
    """Reads how bitsandbytes quantized a model's files from `quantization_config`.

    Args:
        settings: `quantization_config` of config.json; None if it has none.
        name: The model's name, for errors.

    Returns:
        None if the files are not quantized, or have a form of `PUBLISHED`, which is dequantized.

    Raises:
        UserError: The files are quantized in another way, or `settings` is no mapping.
    """
    if settings is None or read_published_form(settings) is not None:
        return None
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, dict):
        raise UserError(f"{name}: quantization_config: a mapping is expected; fix its config.json")
    method = str(settings.get("quant_method") or "")
    in_4_bits = settings.get("load_in_4bit") is True
    in_8_bits = settings.get("load_in_8bit") is True
    if (
        method not in ("", "bitsandbytes", "QuantizationMethod.BITS_AND_BYTES")
        or in_4_bits == in_8_bits
    ):
        kinds = [
            str(kind)
            for kind in (settings.get("format"), settings.get("quant_algo"), settings.get("bits"))
            if kind
        ]
        form = "".join(f", {kind}" for kind in kinds)
        raise UserError(
            f"{name}: its weights are quantized ({method or 'quantization_config'}{form}), in a "
            f"way that is not read ({name_page('quantization')} has those that are); name the "
            f"unquantized model ({_find_unquantized(name)}), and set use_peft and load_in_4bit: "
            "true to keep it in 4 bits"
        )
    if in_8_bits:
        return quantize_to(8)
    # bitsandbytes' default is fp4, that of `quantize_to` nf4
    if settings.get("bnb_4bit_quant_type") == "nf4":
        quant_type = "nf4"
    else:
        quant_type = "fp4"
    return quantize_to(4, quant_type, settings.get("bnb_4bit_use_double_quant") is True)


def _find_unquantized(name: str) -> str:
    """Describes in words the model that a quantized model was made from.

    It is named after `base_model` of the model card, if `name` is a folder with such a card, or a
    file in it.
    """
    path = Path(name)
    folder = path.parent if path.is_file() else path
    card = folder / "README.md"
    text = ""
    if card.is_file():
        text = card.read_text("utf-8", "replace")[:CARD_CHARACTERS]
    base_model = re.search(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]+/[\w.-]+)", text, re.MULTILINE)
    if base_model:
        return f"{base_model[1]}, by its model card"
    return "the BF16 files that these were made from"
