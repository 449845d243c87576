"""The rules of quantization-aware training and of quantized exports."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import gcd
from typing import Any

from finetune.config.facts import Case, Need, Rule
from finetune.config.layout_rules import BF16, has_fp8, has_tp
from finetune.config.quantization import EXPORTED, SCHEMES, TRAINED
from finetune.config.recipe_rules import is_set, no_effect
from finetune.config.schema import QuantizationAware

COMPRESSED = "compressed-tensors"
KEY = "quantization_aware_training"
OFF: Mapping[str, Any] = {KEY: None}


def is_on(case: Case) -> bool:
    return case[KEY] is not None


def exports(name: str) -> Callable[[Case], bool]:
    """A condition: a run ends with an export in the format `name`."""
    return lambda case: case["export_at_end"] and name in case["export_formats"]


def _beside(
    name: str,
    key: str,
    when: Callable[[Case], object],
    why: str,
    advice: str,
    *,
    fix: Mapping[str, Any] | None = None,
    needs: tuple[Need, ...] = (),
) -> Rule:
    return Rule(
        name=f"{name} with {KEY}",
        keys=(KEY, key),
        needs=needs,
        when=lambda c: is_on(c) and when(c),
        message=f"{KEY}: {{{KEY}}} cannot be combined with {name}: {why}",
        advice=advice,
        fix=fix,
    )


def _uneven_widths(case: Case) -> list[int]:
    """Inputs of linear layers that the group size does not divide, by the sizes that a config names."""
    model, group = case.model, case["qat_group_size"]
    widths = {model.hidden, model.heads * model.head_size, model.intermediate} - {0}
    return sorted(width for width in widths if group is not None and width % group)


def _advise_group_size(case: Case) -> str:
    model = case.model
    return f"set it to a divisor of {gcd(model.hidden, model.heads * model.head_size, model.intermediate)}, or to null"


RULES: tuple[Rule, ...] = (
    Rule(
        name="a scheme that torchao does not finish here", keys=(KEY,),
        when=lambda c: is_on(c) and SCHEMES[c[KEY]].refused,
        message=lambda c: f"{KEY}: {c[KEY]}: {SCHEMES[c[KEY]].refused}, so that the quantized model could not be "
        "compared with the one that was trained",
        advice=f"use one of {', '.join(TRAINED)}", fix=OFF,
    ),
    *(
        no_effect(key.name, f"without {KEY}", lambda c: not is_on(c), KEY)
        for key in fields(QuantizationAware)[1:]
    ),
    Rule(
        name="an export without a folder", keys=("export_formats",),
        when=lambda c: "safetensors" not in c["export_formats"],
        message="export_formats: without safetensors a run's folder has no model to chat with",
        advice="add it", fix={"export_formats": ("safetensors",)},
    ),
    no_effect("export_formats", "with export_at_end: false", is_set("export_at_end", False), "export_at_end"),
    no_effect(
        "export_quantization", "without export_formats: [safetensors, compressed-tensors]",
        lambda c: COMPRESSED not in c["export_formats"], "export_formats",
    ),
    Rule(
        name="a quantized export without a scheme", keys=("export_formats", "export_quantization", KEY),
        when=lambda c: COMPRESSED in c["export_formats"] and not (is_on(c) or c["export_quantization"]),
        message="export_formats: compressed-tensors: no scheme", advice="set export_quantization, such as int8-int8",
    ),
    Rule(
        name="a scheme that is not exported", keys=("export_quantization",),
        when=lambda c: c["export_quantization"] not in (None, *EXPORTED),
        message="export_quantization: {export_quantization}: not written", advice=f"use one of {', '.join(EXPORTED)}",
    ),
    Rule(
        name="a quantized mixture", keys=("export_formats",), needs=("model",),
        when=lambda c: COMPRESSED in c["export_formats"] and (c.model.experts or c.is_whole),
        message="export_formats: compressed-tensors: {name} is a mixture or has a vision tower, which is not quantized",
        advice="remove it",
    ),
    Rule(
        name="a family that is not exported as GGUF", keys=("export_formats",), needs=("model",),
        when=lambda c: "gguf" in c["export_formats"] and (c.model.family.llama_cpp is None or c.is_whole),
        message="export_formats: gguf: {model.model_type} is not among the families that are exported as GGUF",
        advice="remove it",
    ),
    Rule(
        name="rounding after the end", keys=("fake_quant_after_n_steps", "max_steps"),
        when=lambda c: c["fake_quant_after_n_steps"] >= (c.steps or c["max_steps"] or 1e99),
        message=lambda c: f"fake_quant_after_n_steps: {c['fake_quant_after_n_steps']}: the run ends after "
        f"{c.steps or c['max_steps']} steps, and nothing would be rounded",
        advice="set a smaller number", fix={"fake_quant_after_n_steps": 0},
    ),
    *(
        _beside(
            key, key, is_set(key, True), "the base is quantized already, and what is trained is not merged into it",
            f"remove {key}, or the scheme", fix={key: False},
        )
        for key in ("load_in_4bit", "load_in_8bit")
    ),
    _beside(
        "use_dora", "use_dora", is_set("use_dora", True), "only plain adapters are added to the weight that is rounded",
        "remove one of the two", fix={"use_dora": False},
    ),
    _beside(
        "lora_dropout", "lora_dropout", is_set("lora_dropout"),
        "base and adapter are rounded together, so that the adapter has no input of its own", "set it to 0",
        fix={"lora_dropout": 0},
    ),
    _beside(
        "lora_target_parameters", "lora_target_parameters", is_set("lora_target_parameters"),
        "only adapters of linear layers are added to the weight that is rounded", "name the layers in "
        "lora_target_modules", fix={"lora_target_parameters": ()},
    ),
    _beside(
        "a method that samples", "method", lambda c: c.recipe.method_facts.samples,
        "one rounded input more or less changes a ratio of probabilities, which must begin at 1", "remove the scheme",
        fix=OFF,
    ),
    _beside(
        "tp_size", "tp_size", has_tp, "a scale is that of a part of a row that one rank holds", "set tp_size: 1",
        fix={"tp_size": 1}, needs=("layout",),
    ),
    _beside(
        "mixed_precision: fp8", "mixed_precision", has_fp8, "both replace the products of the same layers",
        "set mixed_precision: bf16", fix=BF16, needs=("layout",),
    ),
    _beside(
        "a quantized base", "model_name_or_path", lambda c: c.model.quantization is not None,
        "the base is quantized already", "name the unquantized model", needs=("model",),
    ),
    _beside(
        "a mixture of experts", "model_name_or_path", lambda c: c.model.experts,
        "torchao quantizes linear layers, and the experts of a layer are one parameter", "remove the scheme", fix=OFF,
        needs=("model",),
    ),
    _beside(
        "recurrent layers", "model_name_or_path", lambda c: c.model.family.recurrence is not None,
        "their kernels read weights of linear layers past the rounding", "remove the scheme", fix=OFF,
        needs=("model",),
    ),
    Rule(
        name="groups that do not divide", keys=("qat_group_size", KEY, "model_name_or_path"), needs=("model",),
        when=lambda c: is_on(c) and _uneven_widths(c),
        message=lambda c: f"qat_group_size: {c['qat_group_size']} does not divide "
        f"{' and '.join(map(str, _uneven_widths(c)))}, the inputs of linear layers of {c.name}",
        advice=_advise_group_size, fix={"qat_group_size": None},
    ),
)  # fmt: skip
