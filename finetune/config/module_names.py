"""Modules of a model by name: patterns of them, and their names in published files.

Imports no torch.

A pattern is a regular expression for the end of a module's name, in whole parts of it: `mlp` names
every MLP, `layers.[0-3].mlp` those of four layers, `lm_head` the head. The rule is peft's
(`peft.utils.other.get_pattern_key`). Published files have other names for some modules than
transformers 5: its own table of conversions says both. Its text is read, since importing it would
take seconds, and torch.
"""

import ast
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.config.facts import find_linear_layers
from finetune.config.schema import Lora, Model, Recipe, recipe_keys
from finetune.constants import ROTATION, Names
from finetune.errors import UserError

SHOWN_MODULES = 12  # where a pattern matches none
PEFT_PREFIX = "base_model.model."  # of every tensor's name in a PEFT folder


def find_problem(pattern: str) -> str | None:
    """Says what is wrong with a pattern by itself; None where it is one.

    >>> find_problem("*.mlp").partition("; ")[2]
    'any text is .*, as in layers.*.mlp'
    """
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern}: not a regular expression ({error}); any text is .*, as in layers.*.mlp"
    return None


def is_named(module: str, pattern: str) -> bool:
    """Whether `pattern` names this very module.

    >>> [is_named(f"model.layers.11.{module}", "mlp") for module in ("mlp", "mlp.up_proj")]
    [True, False]
    """
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def is_within(parameter: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter is in a module that one of `patterns` names, or is itself what it names.

    >>> (
    ...     is_within("model.layers.11.mlp.up_proj.weight", ["layers.1.mlp"]),
    ...     is_within("lm_head.weight", ["lm_head"]),
    ... )
    (False, True)
    """
    parts = parameter.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(any(is_named(module, pattern) for module in modules) for pattern in patterns)


def find_value(module: str, pattern_values: Mapping[str, int] | None, default: int) -> int:
    """Returns the value of the first pattern that names `module`, as in peft's rank_pattern and
    alpha_pattern.
    """
    return next(
        (value for pattern, value in (pattern_values or {}).items() if is_named(module, pattern)),
        default,
    )


def find_trained(tensors: Sequence[Sequence[str]], model: Model, text: Names = ("",)) -> set[str]:
    """Finds the parameters that `trainable_modules` and `frozen_modules` leave trained.

    Args:
        tensors: All names of each parameter; one that is tied has several.
        model: With the two keys.
        text: How the names of parameters begin that text reaches. Only a pattern that names none of
            these reaches the vision tower.

    Returns:
        The first name of each trained parameter.

    Raises:
        UserError: A pattern names no part of the model; tied weights would be trained under one
            name and frozen under another; or nothing is trained.
    """
    refuse_unmatched("trainable_modules", model.trainable_modules, tensors)
    refuse_unmatched("frozen_modules", model.frozen_modules, tensors)
    of_text = list(chain.from_iterable(names for names in tensors if names[0].startswith(text)))
    of_vision = [  # patterns
        pattern
        for pattern in model.trainable_modules
        if not any(is_within(name, [pattern]) for name in of_text)
    ]
    trained = {
        names[0]
        for names in tensors
        if (names[0].startswith(text) or is_within(names[0], of_vision))
        and _is_trained(names, model)
    }
    if not trained:
        raise UserError(
            "trainable_modules, frozen_modules: no parameter is left to train; freeze fewer modules"
        )
    return trained


def _is_trained(names: Sequence[str], model: Model) -> bool:
    """Whether a parameter with these names is trained. Raises `UserError` where tied names differ
    in that.
    """
    chosen = list(names)
    if model.trainable_modules:
        chosen = [name for name in names if is_within(name, model.trainable_modules)]
    frozen = [name for name in names if is_within(name, model.frozen_modules)]
    if model.trainable_modules and chosen and frozen and not set(chosen) & set(frozen):
        raise UserError(
            f"trainable_modules: {chosen[0]} is tied to {frozen[0]}, which frozen_modules names: "
            "they are one tensor; remove one of the two"
        )
    return bool(chosen) and not frozen


def is_saved_whole(names: Iterable[str], lora: Lora) -> bool:
    """Whether a parameter of the base, by any of its `names`, is trained whole beside adapters
    (modules_to_save).
    """
    return lora.use_peft and any(is_within(name, lora.modules_to_save) for name in names)


def is_parameter_named(name: str, targets: Iterable[str]) -> bool:
    """Whether one of `targets` is the end of a parameter's name, in whole parts: peft's rule for
    target_parameters.

    >>> (
    ...     is_parameter_named("layers.0.mlp.experts.down_proj", ["experts.down_proj"]),
    ...     is_parameter_named("mlp.x_proj", ["proj"]),
    ... )
    (True, False)
    """
    return any(name == target or name.endswith(f".{target}") for target in targets)


def refuse_unknown_layers(
    lora: Lora, layers: Sequence[str], model: str, *, has_experts: bool
) -> None:
    """Refuses names in `lora_target_modules` that match no linear layer.

    Args:
        lora: With the names.
        layers: The names of the model's linear layers.
        model: Its name in the message.
        has_experts: Whether the message also gives the key for routed experts.

    Raises:
        UserError: A name matches none.
    """
    wrong = [
        target
        for target in lora.named_targets
        if not any(is_parameter_named(layer, [target]) for layer in layers)
    ]
    if wrong:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        experts = ""
        if has_experts:
            experts = "; routed experts are adapted with lora_target_parameters"
        raise UserError(
            f"lora_target_modules: {', '.join(wrong)}: no such linear layer in {model}; it has "
            f"{known}{experts}"
        )


def refuse_other_parameters(
    targets: Iterable[str], experts: Sequence[str], parameters: Sequence[str]
) -> None:
    """Raises `UserError` where one of `lora_target_parameters` names anything but `experts`,
    parameters that each hold all experts of a layer.

    `parameters`: all names of the model's.
    """
    known = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in experts}))
    for target in targets:
        named = [name for name in parameters if is_parameter_named(name, [target])]
        if not experts:
            raise UserError(
                f"lora_target_parameters: {target}: the model has no parameters that hold a "
                "layer's experts; leave the key out, and name linear layers in lora_target_modules"
            )
        if not named:
            raise UserError(
                f"lora_target_parameters: {target}: names no parameter of the model; those of its "
                f"experts are {known}"
            )
        if others := [name for name in named if name not in experts]:
            raise UserError(
                f"lora_target_parameters: {target}: {others[0]} does not hold a layer's experts, "
                f"as {known} do; adapt linear layers with lora_target_modules, and train others "
                "whole with modules_to_save"
            )


def refuse_unadapted(lora: Lora, adapted: Iterable[str]) -> None:
    """Raises `UserError` where a pattern of rank_pattern or alpha_pattern names none of the
    `adapted` layers and parameters, and where one of these is trained whole as well.
    """
    layers = list(adapted)
    for layer in layers:
        if is_saved_whole([layer], lora):
            raise UserError(
                f"modules_to_save: trains {layer} whole, and lora_target_parameters adapts it; "
                "remove one of the two"
            )
    for key, values in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in values or {}:
            if not any(is_named(layer, pattern) for layer in layers):
                raise UserError(
                    f"{key}: {pattern}: names no adapted layer of the model; see "
                    "lora_target_modules"
                )


def refuse_undivided(lora: Lora, widths: Mapping[str, int]) -> None:
    """Raises `UserError` where blocks of `oft_block_size` do not divide the inputs of a layer.

    Args:
        lora: The recipe's section.
        widths: The numbers that each adapted layer reads.
    """
    block = lora.oft_block_size
    if block is None:
        return
    for name, width in widths.items():
        if width % block:
            fitting = max(size for size in range(1, min(block, width) + 1) if width % size == 0)
            raise UserError(
                f"oft_block_size: {block}: {name} reads {width:,} numbers, which blocks of {block} "
                f"do not divide; set oft_block_size: {fitting}, or name others in "
                "lora_target_modules"
            )


def gives_head_adapter(head: str, names: Iterable[str], lora: Lora) -> bool:
    """Whether `lora_target_modules` names the output head, and gives it an adapter.

    One that is trained whole gets none, and so may be named.

    Args:
        head: The head's module.
        names: All names of its weight.
        lora: The recipe's section.
    """
    return is_parameter_named(head, lora.named_targets) and not is_saved_whole(names, lora)


def refuse_unmatched(
    key: str, patterns: Iterable[str], tensors: Collection[Sequence[str]], text: Names = ("",)
) -> None:
    """Raises `UserError` where one of `patterns` names no parameter, or none that text reaches (see
    `find_trained`).
    """
    parameters = list(chain.from_iterable(tensors))
    reached = list(chain.from_iterable(names for names in tensors if names[0].startswith(text)))
    for pattern in patterns:
        if not any(is_within(name, [pattern]) for name in parameters):
            modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
            short = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module) for module in modules))
            more = ""
            if len(short) > SHOWN_MODULES:
                more = f" and {len(short) - SHOWN_MODULES} more"
            raise UserError(
                f"{key}: {pattern}: names no module of the model; it has "
                f"{', '.join(short[:SHOWN_MODULES])}{more}"
            )
        if not any(is_within(name, [pattern]) for name in reached):
            raise UserError(
                f"{key}: {pattern}: names nothing of the language model, and text trains no other "
                "part of a vision-language model; leave it out"
            )


EXPERTS = ".experts.*."  # in the name of a tensor of one expert
NAMED = ("lora_target_modules", "lora_target_parameters")  # beside the keys that take patterns


def adopt_published_names(recipe: Recipe, model_type: str) -> Recipe:
    """Replaces names of published modules by those of the modules that hold them, with a line for
    each.

    A layer of each routed expert (Mixtral's `w1`) is part of one parameter in transformers 5, which
    is adapted.
    """
    lines: list[str] = []
    keys = [key for key in recipe_keys().values() if key.is_patterns or key.name in NAMED]
    for key in keys:
        section = getattr(recipe, key.section)
        value = getattr(section, key.name)
        if isinstance(value, tuple | Mapping):
            renamed = _rename(value, find_renames(model_type))
        else:
            renamed = value
        if renamed != value:
            pairs = (
                f"{old} is {new}" for old, new in zip(value, renamed, strict=True) if old != new
            )
            lines += [f"{key.name}: {pair} in transformers 5" for pair in pairs]
            recipe = replace(recipe, **{key.section: replace(section, **{key.name: renamed})})
    lora = recipe.lora
    experts = find_expert_layers(model_type)
    moved = [each for each in lora.named_targets if each in experts]
    if moved:
        parameters = dict.fromkeys(experts[each] for each in moved)
        lines.append(
            f"lora_target_modules: {', '.join(moved)}: the experts of a layer are one parameter in "
            f"transformers 5; {' and '.join(parameters)} get adapters, as by lora_target_parameters"
        )
        kept = tuple(each for each in lora.lora_target_modules if each not in moved)
        both = tuple(dict.fromkeys([*lora.lora_target_parameters, *parameters]))
        recipe = replace(
            recipe, lora=replace(lora, lora_target_modules=kept, lora_target_parameters=both)
        )
    return replace(recipe, renamed=tuple(lines)) if lines else recipe


@cache
def find_renames(model_type: str) -> Mapping[str, str]:
    """Maps parts of names in the files of a family to those in its modules.

    >>> dict(find_renames("mixtral")), dict(find_renames("llama"))
    ({'block_sparse_moe': 'mlp'}, {})
    """
    renames = {}
    for call in _find_conversions(model_type, "WeightRenaming"):
        old, new = (_as_name(part) for part in call)
        if old and new and old != new:
            renames[old] = new
    return renames


@cache
def find_expert_layers(model_type: str) -> Mapping[str, str]:
    """Maps the layers of each expert in a family's files to the parameter that holds all experts.

    >>> dict(find_expert_layers("mixtral"))
    {'w1': 'experts.gate_up_proj', 'w3': 'experts.gate_up_proj', 'w2': 'experts.down_proj'}
    """
    layers: dict[str, str] = {}
    for sources, target in _find_conversions(model_type, "WeightConverter"):
        listed = [sources] if isinstance(sources, str) else sources or []
        if not isinstance(target, str) or ".experts." not in f".{target}":
            continue
        if not all(EXPERTS in each for each in listed):
            continue
        parameter = f"experts.{target.rpartition('experts.')[2]}"
        for source in listed:
            layer = source.removesuffix(".weight").rpartition(".")[2]
            layers[layer] = parameter
    return {
        name: parameter
        for name, parameter in layers.items()
        if name not in find_linear_layers(model_type)
    }


def _rename(value: Any, renames: Mapping[str, str]) -> Any:
    """Renames the modules in patterns: a list of them, or a mapping's keys."""
    if isinstance(value, Mapping):
        return {rename_pattern(pattern, renames): each for pattern, each in value.items()}
    return tuple(rename_pattern(pattern, renames) for pattern in value)


def rename_pattern(pattern: str, renames: Mapping[str, str]) -> str:
    """Returns a pattern with the names that `find_renames` has; one that has them stays as it is.

    >>> renames = {"language_model": "model.language_model"}
    >>> [rename_pattern(name, renames) for name in ("language_model.a", "model.language_model.a")]
    ['model.language_model.a', 'model.language_model.a']
    """
    for old, new in renames.items():
        parts = r"\\?\.".join(map(re.escape, old.split(".")))
        before = new.removesuffix(old)
        renamed = ""
        if before and before != new:
            renamed = rf"(?<!{re.escape(before)})(?<!{re.escape(re.escape(before))})"
        pattern = re.sub(rf"(?<!\w){renamed}{parts}(?!\w)", new, pattern)
    return pattern


def _as_name(part: Any) -> str | None:
    """Returns the one name, in parts of a module's name, that a pattern of transformers matches;
    None where it may match several.
    """
    if not isinstance(part, str):
        return None
    name = part.replace("\\.", ".").strip("^.").removesuffix(".weight")
    return name if re.fullmatch(r"\w+(\.\w+)*", name) else None


@cache
def _find_conversions(model_type: str, kind: str) -> tuple[tuple[Any, Any], ...]:
    """Returns (source, target) of each conversion of a kind that transformers has for a family.

    `kind`: the class of the conversion, such as WeightRenaming.
    """
    conversions_of, aliases = _read_table()
    conversions = conversions_of.get(model_type)
    if conversions is None:
        conversions = conversions_of.get(aliases.get(model_type, ""))
    return tuple(_read_calls(conversions, kind))


def find_alias(model_type: str) -> str | None:
    """Returns the other family whose conversions transformers applies to this one.

    >>> find_alias("qwen3_moe"), find_alias("qwen2_moe")
    ('qwen2_moe', None)
    """
    return _read_table()[1].get(model_type)


@cache
def _read_table() -> tuple[Mapping[str, ast.List], Mapping[str, str]]:
    """Reads (family -> the list of its conversions, family -> the one whose conversions it
    shares).
    """
    spec = importlib.util.find_spec("transformers")
    if spec is not None and spec.origin:
        path = Path(spec.origin).parent / "conversion_mapping.py"
    else:
        path = Path()
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
    """Yields (source, target) of each call of `kind` in a list of conversions."""
    if conversions is None:
        return
    for call in conversions.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id != kind:
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        nodes = [
            *call.args[:2],
            *(named[key] for key in ("source_patterns", "target_patterns") if key in named),
        ]
        with suppress(ValueError):  # a pattern that is computed
            source, target = map(ast.literal_eval, nodes)
            yield source, target


def is_adapter(name: str) -> bool:
    return ".lora_" in name or ROTATION in name


def base_name(name: str) -> str:
    """Returns a parameter's name in the base's files: peft moves an adapted layer's own into one or
    more `base_layer`.

    >>> base_name("layers.0.mlp.experts.base_layer.base_layer.down_proj")
    'layers.0.mlp.experts.down_proj'
    """
    return re.sub(r"(\.base_layer)+\.", ".", name)


def peft_name(name: str) -> str:
    """Returns PEFT's name of an adapter's tensor, without its prefix.

    `name`: of the tensor in PEFT's model, in its file, or in a checkpoint of ours.

    >>> (
    ...     peft_name("a.lora_magnitude_vector.default.weight"),
    ...     peft_name("base_model.model.a.lora_A.weight"),
    ... )
    ('a.lora_magnitude_vector', 'a.lora_A.weight')
    """
    short = re.sub(
        r"\.(lora_\w+|oft_R|modules_to_save)\.default\b", r".\1", name.removeprefix(PEFT_PREFIX)
    )
    return short.replace(".modules_to_save.", ".").replace(
        ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
    )
