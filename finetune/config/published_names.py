"""Names of modules as a family's published files have them, and as transformers 5 has them. Imports no torch.

transformers' own table of conversions says both. Its text is read: importing it would take seconds, and torch.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from finetune.config.families import find_linear_layers
from finetune.config.schema import Recipe, recipe_keys

EXPERTS = ".experts.*."  # in the name of a tensor of one expert
NAMED = ("lora_target_modules", "lora_target_parameters")  # beside the keys that take patterns


def adopt_published_names(recipe: Recipe, model_type: str) -> Recipe:
    """`recipe` with names of published modules replaced by those of the modules that hold them, and a line for each.

    A layer of each routed expert (Mixtral's `w1`) is part of one parameter in transformers 5, which is adapted.
    """
    lines: list[str] = []
    keys = [key for key in recipe_keys().values() if key.is_patterns or key.name in NAMED]
    for key in keys:
        section = getattr(recipe, key.section)
        value = getattr(section, key.name)
        renamed = _rename(value, find_renames(model_type)) if isinstance(value, tuple | Mapping) else value
        if renamed != value:
            pairs = (f"{old} is {new}" for old, new in zip(value, renamed, strict=True) if old != new)
            lines += [f"{key.name}: {pair} in transformers 5" for pair in pairs]
            recipe = replace(recipe, **{key.section: replace(section, **{key.name: renamed})})
    lora, experts = recipe.lora, find_expert_layers(model_type)
    moved = [each for each in lora.lora_target_modules if each in experts and lora.lora_target_modules != "all-linear"]
    if moved:
        parameters = dict.fromkeys(experts[each] for each in moved)
        lines.append(
            f"lora_target_modules: {', '.join(moved)}: the experts of a layer are one parameter in transformers 5; "
            f"{' and '.join(parameters)} get adapters, as by lora_target_parameters"
        )
        kept = tuple(each for each in lora.lora_target_modules if each not in moved)
        both = tuple(dict.fromkeys([*lora.lora_target_parameters, *parameters]))
        recipe = replace(recipe, lora=replace(lora, lora_target_modules=kept, lora_target_parameters=both))
    return replace(recipe, renamed=tuple(lines)) if lines else recipe


@cache
def find_renames(model_type: str) -> Mapping[str, str]:
    """Parts of names in the files of a family -> in its modules.

    >>> dict(find_renames("mixtral")), dict(find_renames("llama"))
    ({'block_sparse_moe': 'mlp'}, {})
    """
    found = {}
    for call in _find_conversions(model_type, "WeightRenaming"):
        old, new = (_as_name(part) for part in call)
        if old and new and old != new:
            found[old] = new
    return found


@cache
def find_expert_layers(model_type: str) -> Mapping[str, str]:
    """Layers of each expert in a family's files, which its modules lack -> the parameter of all experts.

    >>> dict(find_expert_layers("mixtral"))
    {'w1': 'experts.gate_up_proj', 'w3': 'experts.gate_up_proj', 'w2': 'experts.down_proj'}
    """
    found: dict[str, str] = {}
    for sources, target in _find_conversions(model_type, "WeightConverter"):
        listed = [sources] if isinstance(sources, str) else sources or []
        if isinstance(target, str) and ".experts." in f".{target}" and all(EXPERTS in each for each in listed):
            parameter = f"experts.{target.rpartition('experts.')[2]}"
            found |= {each.removesuffix(".weight").rpartition(".")[2]: parameter for each in listed}
    return {name: parameter for name, parameter in found.items() if name not in find_linear_layers(model_type)}


def _rename(value: Any, renames: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {_rename_pattern(pattern, renames): each for pattern, each in value.items()}
    return tuple(_rename_pattern(pattern, renames) for pattern in value)


def _rename_pattern(pattern: str, renames: Mapping[str, str]) -> str:
    for old, new in renames.items():
        parts = r"\\?\.".join(map(re.escape, old.split(".")))
        pattern = re.sub(rf"(?<!\w){parts}(?!\w)", new, pattern)
    return pattern


def _as_name(part: Any) -> str | None:
    """The parts of a module's name that a pattern of transformers stands for; None for one that is not only these."""
    name = str(part).replace("\\.", ".").strip("^.").removesuffix(".weight") if isinstance(part, str) else ""
    return name if re.fullmatch(r"\w+(\.\w+)*", name) else None


@cache
def _find_conversions(model_type: str, kind: str) -> tuple[tuple[Any, Any], ...]:
    """The (source, target) of each conversion of a kind that transformers lists for a family."""
    listed, aliases = _read_table()
    return tuple(_read_calls(listed.get(model_type) or listed.get(aliases.get(model_type, "")), kind))


@cache
def _read_table() -> tuple[Mapping[str, ast.List], Mapping[str, str]]:
    """(family -> the list of its conversions, family -> the one whose conversions it shares)."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / "conversion_mapping.py" if spec is not None and spec.origin else Path()
    tree = ast.parse(path.read_text("utf-8") if path.is_file() else "")
    listed: dict[str, ast.List] = {}
    aliases: dict[str, str] = {}
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.List):
                listed[str(key.value)] = value
            elif isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                aliases[str(key.value)] = str(value.value)
    return listed, aliases


def _read_calls(conversions: ast.List | None, kind: str) -> Iterator[tuple[Any, Any]]:
    for call in conversions.elts if conversions is not None else ():
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != kind:
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        nodes = [*call.args[:2], *(named[key] for key in ("source_patterns", "target_patterns") if key in named)]
        with suppress(ValueError):  # a pattern that is computed
            source, target = map(ast.literal_eval, nodes)
            yield source, target
