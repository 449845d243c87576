"""Renames a LoRA adapter for vLLM, which has other names than transformers in some families.

Sometimes several modules of vLLM stand for one of transformers, each for an equal part of the
layer's outputs. Each of them gets all of A, and the rows of B of its part. The products are the
same; only A is stored and multiplied more often.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from finetune.config.families import find_family
from finetune.config.module_names import find_value
from finetune.config.served import NAMES_KEY, rename_for_vllm, why_not_loaded
from finetune.constants import Names
from finetune.errors import UserError
from finetune.export.source import Adapter
from finetune.export.target import TargetModel, Value
from finetune.models.lora import find_adapted_parameters

# precedes "A.weight" or "B.weight" in the names of an adapter's tensors, after the module
LORA = ".lora_"


def has_other_names(names: Iterable[str], model_type: str) -> bool:
    """Whether vLLM has another name for one of an adapter's tensors. `names`: peft's names."""
    vllm_modules = find_family(model_type).vllm_modules
    return any(rename_for_vllm(name, vllm_modules) != (name,) for name in names)


def name_for_vllm(
    adapter: Adapter, values: Iterable[Value], target: TargetModel, where: str
) -> tuple[dict[str, Any], list[Value]]:
    """Returns the content of adapter_config.json and the tensors, both under vLLM's names.

    If vLLM has the same names as peft, both are unchanged.

    Args:
        adapter: The adapter.
        values: The adapter's tensors, under peft's names.
        target: The base model.
        where: Names the adapter in errors.

    Raises:
        UserError: vLLM loads no adapter of this kind, whatever its names.
    """
    reason = why_not_loaded(adapter.config)
    if reason is not None:
        raise UserError(
            f"{where}: --adapter-names: vLLM loads no adapter with {reason}; export the merged "
            "model without --adapter-only"
        )
    model_type = str(target.config_json.get("model_type"))
    if not has_other_names(adapter.tensors, model_type):
        return adapter.config, list(values)
    vllm_modules = find_family(model_type).vllm_modules
    renamed = [part for value in values for part in _rename(value, vllm_modules)]
    return adapter.config | _rename_in_config(adapter, target, vllm_modules), renamed


def _rename(value: Value, vllm_modules: Mapping[str, Names]) -> list[Value]:
    """Returns a tensor under vLLM's names, one value for each name.

    With several names A is repeated, and B is cut into equal parts of its rows.
    """
    module, separator, factor = value.name.rpartition(LORA)
    vllm_names = rename_for_vllm(module, vllm_modules)
    parts = []
    for index, vllm_name in enumerate(vllm_names):
        part = replace(value, name=f"{vllm_name}{separator}{factor}")
        if factor.startswith("B"):
            part = _cut_rows(part, index, len(vllm_names))
        parts.append(part)
    return parts


def _cut_rows(value: Value, index: int, count: int) -> Value:
    """Cuts a tensor's rows into `count` equal parts and returns the part `index`, from 0."""
    part_rows = value.shape[0] // count
    first_row = index * part_rows
    return replace(
        value,
        shape=(part_rows, *value.shape[1:]),
        rows=lambda start, stop: value.rows(first_row + start, first_row + stop),
    )


def _rename_in_config(
    adapter: Adapter, target: TargetModel, vllm_modules: Mapping[str, Names]
) -> dict[str, Any]:
    """Makes the keys of adapter_config.json that name modules, with vLLM's names.

    Patterns of ranks and alphas are replaced by the full names of the modules that they match: a
    pattern that is kept might match none of vLLM's names, or too many.
    """
    config = adapter.config
    parameters = find_adapted_parameters(target.model, config.get("target_parameters") or ())
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    target_modules = set()
    for tensor_name in adapter.tensors:
        module, _, factor = tensor_name.rpartition(LORA)
        if factor != "A.weight":  # each module once
            continue
        # peft's patterns name a parameter if target_parameters adapts it, and else the module
        adapted = parameters[module].name if module in parameters else module
        vllm_names = rename_for_vllm(adapted.removesuffix(".weight"), vllm_modules)
        is_expert_parameter = adapted != module and not adapted.endswith(".weight")
        if not is_expert_parameter:
            target_modules |= {name.rpartition(".")[2] for name in vllm_names}
        for key, new_patterns in patterns.items():
            if value := find_value(adapted, config.get(key), 0):  # 0: no pattern matches
                new_patterns |= {re.escape(name): value for name in vllm_names}
    return {"target_modules": sorted(target_modules), NAMES_KEY: "vllm", **patterns}
