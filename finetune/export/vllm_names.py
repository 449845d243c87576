"""A LoRA adapter under the names by which vLLM loads it, in families where these are not
transformers'.

Where vLLM adapts a layer's outputs in parts, each part has all of A, and its own rows of B: the
products are the same, and A is stored and multiplied once more for each part.
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

LORA = ".lora_"


def has_other_names(names: Iterable[str], model_type: str) -> bool:
    """Whether vLLM knows one of an adapter's tensors by another name; `names`: in peft's terms."""
    modules = find_family(model_type).vllm_modules
    return any(rename_for_vllm(name, modules) != (name,) for name in names)


def name_for_vllm(
    adapter: Adapter, values: Iterable[Value], target: TargetModel, where: str
) -> tuple[dict[str, Any], list[Value]]:
    """The content of adapter_config.json and the tensors under vLLM's names.

    Both are the adapter's own where vLLM has no others. `values`: its tensors, under peft's names.

    Raises:
        UserError: Where vLLM loads no such adapter under any name.
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
    modules = find_family(model_type).vllm_modules
    renamed = [part for value in values for part in _rename(value, modules)]
    return adapter.config | _describe(adapter, target, modules), renamed


def _rename(value: Value, modules: Mapping[str, Names]) -> list[Value]:
    """A tensor under its new names; B in equal parts of its rows, where it has several."""
    module, mark, factor = value.name.rpartition(LORA)
    names = rename_for_vllm(module, modules)
    parts = []
    for number, name in enumerate(names):
        part = replace(value, name=f"{name}{mark}{factor}")
        if factor.startswith("B"):
            part = _cut(part, number, len(names))
        parts.append(part)
    return parts


def _cut(value: Value, number: int, count: int) -> Value:
    """The part `number` of `count` equal ones of a tensor's rows."""
    height = value.shape[0] // count
    first = number * height
    return replace(
        value,
        shape=(height, *value.shape[1:]),
        rows=lambda start, stop: value.rows(first + start, first + stop),
    )


def _describe(
    adapter: Adapter, target: TargetModel, modules: Mapping[str, Names]
) -> dict[str, Any]:
    """The keys of adapter_config.json that name modules. A pattern is replaced by the names of the
    modules that it gives a rank or alpha of their own: it may match no new name, or others.
    """
    config = adapter.config
    parameters = find_adapted_parameters(target.model, config.get("target_parameters") or ())
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    targets = set()
    for tensor in adapter.tensors:
        module, _, factor = tensor.rpartition(LORA)
        if factor != "A.weight":
            continue
        # a pattern names a parameter where target_parameters does
        named = parameters[module].name if module in parameters else module
        names = rename_for_vllm(named.removesuffix(".weight"), modules)
        if named == module or named.endswith(".weight"):  # and not a parameter of experts
            targets |= {name.rpartition(".")[2] for name in names}
        for key, chosen in patterns.items():
            if value := find_value(named, config.get(key), 0):
                chosen |= {re.escape(name): value for name in names}
    return {"target_modules": sorted(targets), NAMES_KEY: "vllm", **patterns}
