"""Quantization-aware training as torchtune, Axolotl and Automodel ask for it, in our keys."""

from collections.abc import Mapping
from typing import Any

from finetune.config.quantization import SCHEMES

# torchao's quantizers, and pairs of Axolotl's dtypes (inputs, weights) -> our scheme, and its usual group.
QUANTIZERS: Mapping[str, tuple[str, int | None]] = {
    "Int8DynActInt4WeightQATQuantizer": ("int8-int4", 256),
    "Int4WeightOnlyQATQuantizer": ("int4-packed", 256),
    "Float8ActInt4WeightQATQuantizer": ("fp8-int4", 128),
}
DTYPES: Mapping[tuple[str, str], tuple[str, int | None]] = {
    ("int8", "int4"): ("int8-int4", 32),
    ("None", "int4"): ("int4-packed", 128),
    ("float8_e4m3fn", "int4"): ("fp8-int4", 128),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8-fp8", None),
    ("nvfp4", "nvfp4"): ("nvfp4", 16),
    ("mxfp4", "mxfp4"): ("mxfp4", 32),
}
HEAD_ROUNDED = "the output head is rounded there too, where its inputs divide into groups"
ADAPTER_APART = (
    "the base alone is rounded there, beside its adapter; here base and adapter together, as they are exported"
)


def asks_for_rounding(theirs: Mapping[str, Any]) -> bool:
    """Whether a file of training asks for it."""
    qat = theirs.get("qat")
    is_on = isinstance(qat, dict) and qat.get("enabled", True)
    return bool(is_on or ("dataset" in theirs and isinstance(theirs.get("quantizer"), dict)))


def find_rounding(theirs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Our keys; None where a file asks for none, or for what torchao does not finish here.

    >>> find_rounding({"qat": {"activation_dtype": "int8", "weight_dtype": "int4", "fake_quant_after_n_steps": 9}})
    {'quantization_aware_training': 'int8-int4', 'qat_group_size': 32, 'fake_quant_after_n_steps': 9}
    """
    if not asks_for_rounding(theirs):
        return None
    qat = theirs.get("qat") or {}
    quantizer = theirs.get("quantizer") or qat.get("quantizer") or qat.get("qat_config") or {}
    name = str(quantizer.get("_component_") or quantizer.get("_target_") or "").rsplit(".", 1)[-1]
    dtypes = tuple(str(qat.get(key)).removeprefix("torch.") for key in ("activation_dtype", "weight_dtype"))
    scheme, usual = QUANTIZERS.get(name) or DTYPES.get((dtypes[0], dtypes[1]), ("", None))
    if scheme not in SCHEMES or SCHEMES[scheme].refused:
        return None
    keys: dict[str, Any] = {"quantization_aware_training": scheme}
    keys["qat_group_size"] = quantizer.get("groupsize") or qat.get("group_size") or usual
    after = theirs.get("fake_quant_after_n_steps") or qat.get("fake_quant_after_n_steps")
    return keys | ({"fake_quant_after_n_steps": after} if after else {})
