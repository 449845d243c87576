"""Quantized weights: the recipe's keys, the schemes of QAT, how files are quantized, and a weight's
bytes.

No torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from finetune.config.keys import Positive, SameOnResume
from finetune.config.methods import Method
from finetune.constants import FP32
from finetune.errors import UserError, name_page


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantized.

    The weights' scales are symmetric. Inputs that are rounded to whole numbers have a scale and an
    offset a token; in blocks they are rounded as the weights are.
    """

    weight_bits: int
    input_bits: int | None = None  # None: inputs are not rounded
    is_float: bool = False
    block: int | None = None  # numbers under a scale of one byte; None: as qat_group_size says
    is_ternary: bool = False  # weights are -1, 0 or 1 times one number for all of a layer's
    # why what it trains cannot be quantized, and so not compared with what was trained
    refused: str = ""
    not_exported: str = ""  # why what it trains is not written in its format

    def group_of(self, given: int | None) -> int | None:
        """Returns how many numbers of a row have one scale; None: all of them, or of the layer.

        `given`: qat_group_size.
        """
        if self.is_ternary:
            return None
        return self.block or given

    def stored_bytes(self, itemsize: int, group: int | None) -> float:
        """Counts the bytes of a number in an export: its code, and its part of a scale.

        Args:
            itemsize: Bytes of a scale. Blocks have scales of one byte.
            group: Numbers under one scale; None: so many that their scale does not count.
        """
        if self.block:
            return self.weight_bits / 8 + 1 / self.block
        # beside rounded inputs a code has a byte of its own
        code = 1 if self.input_bits else self.weight_bits / 8
        scale = itemsize / group if group else 0
        return code + scale


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
EXPORTED = (
    "fp8-fp8",
    *(name for name, scheme in SCHEMES.items() if not scheme.refused and not scheme.not_exported),
)
TRAINED = tuple(name for name, scheme in SCHEMES.items() if not scheme.refused)
if TYPE_CHECKING:
    SchemeName = str
else:
    SchemeName = Literal[tuple(SCHEMES)]


# A key: its type and marks, then its help and default.
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A base model in 4 or 8 bits under LoRA's adapters (QLoRA), by bitsandbytes."""

    load_in_4bit: Annotated[
        bool,
        SameOnResume,
        "Keep the linear layers of LoRA's frozen base in 4 bits; embeddings, norms and the head "
        "stay in the compute dtype. Needs the bitsandbytes package; not under FSDP1.",
    ] = False
    load_in_8bit: Annotated[
        bool,
        SameOnResume,
        "The same in 8 bits: each row scaled as in LLM.int8, multiplied in the compute dtype.",
    ] = False
    bnb_4bit_quant_type: Annotated[
        Literal["nf4", "fp4"],
        SameOnResume,
        "The 16 values of 4 bits: nf4 (for normally distributed weights) or fp4.",
    ] = "nf4"
    bnb_4bit_use_double_quant: Annotated[
        bool,
        SameOnResume,
        "Quantize the scales of 4 bits as well: 0.37 bits less for each parameter.",
    ] = False

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Bits per number of a quantized weight, or None if nothing is quantized."""
        if self.load_in_4bit:
            return 4
        return 8 if self.load_in_8bit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationAware:
    """Training for a model that will be quantized, by torchao (QAT): docs/quantization.md."""

    quantization_aware_training: Annotated[
        SchemeName | None,
        SameOnResume,
        "Round the weights of linear layers, and the inputs where two numbers are named, in every "
        "forward as this scheme will: int8-int4 is inputs of 8 bits, scaled for each token, and "
        "weights of 4; mxfp4 and nvfp4 round both to 4-bit floats in blocks of 32 and 16; "
        "int8-ternary is BitNet b1.58. The output head stays as it is. What is trained and saved "
        "has full precision; export_formats: [safetensors, compressed-tensors] quantizes it.",
    ] = None
    qat_group_size: Annotated[
        Positive | None,
        SameOnResume,
        (
            "Numbers of a weight's row that share one scale; null: the row. It must divide the "
            "inputs of every layer."
        ),
    ] = 32
    fake_quant_after_n_steps: Annotated[
        int,
        Ge(0),
        SameOnResume,
        "Round only after this many optimizer steps, when the weights have settled.",
    ] = 0


LOAD_KEYS = ("load_in_4bit", "load_in_8bit")
QLORA: Mapping[str, Any] = {"use_peft": True, "load_in_4bit": True}
# numbers of a 4-bit weight under one scale, in row-major order over the whole weight: blocks cross
# rows
BLOCK = 64
CARD_BYTES = 1 << 14  # of a model card, within which its front matter ends
NESTED_BLOCK = 256  # scales under one scale of their own, with bnb_4bit_use_double_quant


@dataclass(frozen=True, slots=True)
class QuantizedBytes:
    """The bytes of one quantized weight in memory."""

    codes: int  # the numbers: two in a byte at 4 bits, one at 8 bits
    scales: int


def quantized_bytes(
    rows: int, columns: int, quantization: Quantization, block: int = BLOCK
) -> QuantizedBytes:
    """Returns the bytes of a weight [rows, columns], which loading and the plan must agree on.

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
    # A byte for each scale, filled up to where an fp32 number may begin; their own scales; and the
    # mean of all of them.
    nested = math.ceil(blocks / FP32) * FP32 + (math.ceil(blocks / NESTED_BLOCK) + 1) * FP32
    return QuantizedBytes(math.ceil(numbers / 2), nested)


def divide_quantization(numbers: int, quantization: Quantization) -> Quantization:
    """Returns how a rank keeps the `numbers` of its own experts.

    Scales stay in fp32 where a rank's share would cut a block of scales that are quantized again.
    """
    is_cut = quantization.bnb_4bit_use_double_quant and numbers % (BLOCK * NESTED_BLOCK)
    if is_cut:
        return replace(quantization, bnb_4bit_use_double_quant=False)
    return quantization


def describe_quantization(quantization: Quantization) -> str:
    """Names a quantization, for messages.

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
    """Returns the quantization of a base to 4 bits (`quant_type`: fp4, else nf4), to 8 bits, or to
    none.
    """
    return Quantization(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="fp4" if quant_type == "fp4" else "nf4",
        bnb_4bit_use_double_quant=double,
    )


def read_recipe_quantization(recipe: Mapping[str, Any]) -> Quantization:
    """Reads how a run's base is quantized from its recipe as files hold it."""
    bits: Literal[4, 8] | None = None
    if recipe.get("load_in_4bit") is True:
        bits = 4
    elif recipe.get("load_in_8bit") is True:
        bits = 8
    return quantize_to(
        bits, recipe.get("bnb_4bit_quant_type"), recipe.get("bnb_4bit_use_double_quant") is True
    )


def name_load_key(quantization: Quantization, *, of_teacher: bool) -> str:
    """Returns the key that asks for a quantization of the base, or of the teacher."""
    if of_teacher:
        return "teacher_load_in_4bit"
    return f"load_in_{quantization.bits}bit"


def read_teacher_quantization(settings: Any, method: Method) -> Quantization:
    """Reads how a teacher is kept: as its files are quantized, else as the recipe says.

    `settings`: the `quantization_config` of its config.
    """
    stored = read_stored_quantization(settings, str(method.teacher_model_name_or_path))
    return stored or quantize_teacher(method)


def quantize_teacher(method: Method) -> Quantization:
    """Reads how the recipe says that a teacher is kept."""
    if method.teacher_load_in_4bit:
        return quantize_to(4, double=True)
    return Quantization()


# What the files of other kinds hold for a weight, by method, or format of compressed-tensors, or
# ModelOpt's algorithm. All are read as plain numbers: FP8 blocks and MXFP4 by
# models/quantized_weights.py, the others by models/packed_weights.py.
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
PACKED_BITS = (2, 4, 8)  # that divide a word


def read_published_form(settings: Any) -> str | None:
    """Returns the kind of `PUBLISHED` that a `quantization_config` names; None for any other kind.

    >>> read_published_form({"quant_method": "gptq", "bits": 4})
    'gptq'
    >>> read_published_form({"quant_method": "gptq", "bits": 3})
    """
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping):
        return None
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method))
    name = {
        "compressed-tensors": str(settings.get("format")),
        "modelopt": str(settings.get("quant_algo")),
    }.get(method, method)
    is_other_awq = name == "awq" and (
        str(settings.get("version") or "gemm").lower() != "gemm"
        or settings.get("zero_point") is False
    )
    is_other_gptq = name == "gptq" and settings.get("checkpoint_format", "gptq") not in (
        "gptq",
        "gptq_v2",
    )
    has_bits = name not in ("gptq", "awq", "pack-quantized") or find_bits(settings) in PACKED_BITS
    is_known = name in PUBLISHED and has_bits and not (is_other_awq or is_other_gptq)
    return name if is_known else None


def find_bits(settings: Mapping[str, Any]) -> int:
    """Returns the bits of a packed number, by a `quantization_config`; 0 where it names several or
    none.

    >>> find_bits({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}})
    4
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        bits = settings.get("bits") or settings.get("w_bit")
        return bits if isinstance(bits, int) else 0
    named = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    only = named.pop() if len(named) == 1 else None
    return only if isinstance(only, int) else 0


def read_stored_quantization(settings: Any, name: str) -> Quantization | None:
    """Reads how files are quantized by bitsandbytes from their `quantization_config`.

    Args:
        settings: The section of the model's config.
        name: The model, for errors.

    Returns:
        None where they are not quantized, or are read as plain numbers (see `PUBLISHED`).

    Raises:
        UserError: They are quantized in another way.
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
    if settings.get("bnb_4bit_quant_type") == "nf4":
        quant_type = "nf4"
    else:
        quant_type = "fp4"
    return quantize_to(4, quant_type, settings.get("bnb_4bit_use_double_quant") is True)


def _find_unquantized(name: str) -> str:
    """Names the model that a quantized one was made from, as the card in its folder says."""
    card = Path(name) / "README.md"
    text = ""
    if card.is_file():
        text = card.read_text("utf-8", "replace")[:CARD_BYTES]
    base_model = re.search(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]+/[\w.-]+)", text, re.MULTILINE)
    if base_model:
        return f"{base_model[1]}, by its model card"
    return "the BF16 files that these were made from"
