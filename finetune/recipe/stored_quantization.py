"""How a base was quantized, by the config.json of its files or by the recipe of a run. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from finetune.errors import UserError
from finetune.recipe.schema import Quantization


def describe_quantization(quantization: Quantization) -> str:
    """For messages.

    >>> describe_quantization(Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True))
    '4 bits (nf4, double quantization)'
    >>> describe_quantization(Quantization(load_in_8bit=True))
    '8 bits (int8)'
    """
    kind = quantization.bnb_4bit_quant_type if quantization.bits == 4 else "int8"
    double = ", double quantization" if quantization.bits == 4 and quantization.bnb_4bit_use_double_quant else ""
    return f"{quantization.bits} bits ({kind}{double})"


def read_recipe_quantization(recipe: Mapping[str, Any]) -> Quantization:
    """How a run's base was quantized, by its recipe as files hold it."""
    return Quantization(
        load_in_4bit=recipe.get("load_in_4bit") is True,
        load_in_8bit=recipe.get("load_in_8bit") is True,
        bnb_4bit_quant_type="fp4" if recipe.get("bnb_4bit_quant_type") == "fp4" else "nf4",
        bnb_4bit_use_double_quant=recipe.get("bnb_4bit_use_double_quant") is True,
    )


def read_stored_quantization(config: Any, name: str) -> Quantization | None:
    """How the files of a model are quantized, by its config; None where they are not.

    Raises `UserError` for every kind but that of bitsandbytes.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(settings.get("quant_method") or "")
    in_4_bits, in_8_bits = settings.get("load_in_4bit") is True, settings.get("load_in_8bit") is True
    if method not in ("", "bitsandbytes", "QuantizationMethod.BITS_AND_BYTES") or in_4_bits == in_8_bits:
        raise UserError(
            f"{name}: its weights are quantized ({method or 'quantization_config'}), and only those of bitsandbytes can be "
            "trained on; name the unquantized model, and set use_peft and load_in_4bit: true to keep it in 4 bits"
        )
    quant_type = settings.get("bnb_4bit_quant_type", "fp4")
    if in_8_bits:
        return Quantization(load_in_8bit=True)
    return Quantization(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4" if quant_type == "nf4" else "fp4",
        bnb_4bit_use_double_quant=settings.get("bnb_4bit_use_double_quant") is True,
    )
