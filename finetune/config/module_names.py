"""Names of a model's modules: which of them a pattern names, and what published files call them.

A pattern is a regular expression for whole parts at the end of a module's name: `mlp` names every
MLP, `layers.[0-3].mlp` those of four layers, `lm_head` the head. The rule is peft's
(`peft.utils.other.get_pattern_key`).

Published files have other names for some modules than transformers 5. Its conversion_mapping.py
lists both names. The text of that file is parsed, since importing it would take seconds, and torch.
This module imports no torch.
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

SHOWN_MODULES = 12  # the most modules in the message about a pattern that matches none
PEFT_PREFIX = "base_model.model."  # with which every tensor's name in a PEFT folder begins


def find_problem(pattern: str) -> str | None:
    """Says why `pattern` is no regular expression; None if it is one.

    >>> find_problem("*.mlp").partition("; ")[2]
    'any text is .*, as in layers.*.mlp'
    """
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern}: not a regular expression ({error}); any text is .*, as in layers.*.mlp"
    return None


def is_named(module: str, pattern: str) -> bool:
    """Whether `pattern` names this module itself, not only a module that contains it.

    >>> [is_named(f"model.layers.11.{module}", "mlp") for module in ("mlp", "mlp.up_proj")]
    [True, False]
    """
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def is_within(parameter: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` names the parameter or a module that contains it.

    >>> (
    ...     is_within("model.layers.11.mlp.up_proj.weight", ["layers.1.mlp"]),
    ...     is_within("lm_head.weight", ["lm_head"]),
    ... )
    (False, True)
    """
    parts = parameter.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]  # the last: the parameter
    return any(any(is_named(name, pattern) for name in names) for pattern in patterns)


def find_value(module: str, pattern_values: Mapping[str, int] | None, default: int) -> int:
    """Returns the value of the first pattern that names `module`, or `default` if none does.

    `pattern_values`: peft's rank_pattern or alpha_pattern; None is an empty one.
    """
    return next(
        (value for pattern, value in (pattern_values or {}).items() if is_named(module, pattern)),
        default,
    )


def find_trained(
    tensors: Sequence[Sequence[str]], model: Model, text_prefixes: Names = ("",)
) -> set[str]:
    """Finds the parameters that the recipe trains, by `trainable_modules` and `frozen_modules`.

    A parameter of the vision tower is trained only if a pattern of `trainable_modules` names it and
    no parameter that works on text.

    Args:
        tensors: All names of each parameter; a tied one has several.
        model: With the two keys.
        text_prefixes: The prefixes of the names of parameters that work on text; ("",): all do.

    Returns:
        The first name of each trained parameter.

    Raises:
        UserError: A pattern names no part of the model; tied weights would be trained under one
            name and frozen under another; or nothing is trained.
    """
    refuse_unmatched("trainable_modules", model.trainable_modules, tensors)
    refuse_unmatched("frozen_modules", model.frozen_modules, tensors)
    text_names = _list_names(tensors, text_prefixes)
    vision_patterns = [
        pattern
        for pattern in model.trainable_modules
        if not any(is_within(name, [pattern]) for name in text_names)
    ]
    trained = {
        names[0]
        for names in tensors
        if (names[0].startswith(text_prefixes) or is_within(names[0], vision_patterns))
        and _is_trained(names, model)
    }
    if not trained:
        raise UserError(
            "trainable_modules, frozen_modules: no parameter is left to train; freeze fewer modules"
        )
    return trained


def _list_names(tensors: Iterable[Sequence[str]], prefixes: Names) -> list[str]:
    """Lists all names of the parameters whose first name begins with one of `prefixes`."""
    return list(chain.from_iterable(names for names in tensors if names[0].startswith(prefixes)))


def _is_trained(names: Sequence[str], model: Model) -> bool:
    """Whether a parameter with these names is trained.

    `trainable_modules` must name it or be empty, and `frozen_modules` must not name it.

    Raises `UserError` if the two keys name a tied parameter by different names.
    """
    trainable = list(names)
    if model.trainable_modules:
        trainable = [name for name in names if is_within(name, model.trainable_modules)]
    frozen = [name for name in names if is_within(name, model.frozen_modules)]
    if model.trainable_modules and trainable and frozen and not set(trainable) & set(frozen):
        raise UserError(
            f"trainable_modules: {trainable[0]} is tied to {frozen[0]}, which frozen_modules "
            "names: they are one tensor; remove one of the two"
        )
    return bool(trainable) and not frozen


def is_saved_whole(names: Iterable[str], lora: Lora) -> bool:
    """Whether a parameter of the base is trained whole beside adapters: modules_to_save names it by
    any of its `names`.
    """
    return lora.use_peft and any(is_within(name, lora.modules_to_save) for name in names)


def is_parameter_named(name: str, targets: Iterable[str]) -> bool:
    """Whether one of `targets` is a parameter's name or whole parts at the end of it.

    This is peft's rule for target_parameters: targets are plain text, not patterns.

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
    """Refuses names in `lora_target_modules` that name no linear layer.

    Args:
        lora: With the names.
        layers: The names of the model's linear layers.
        model: What the message calls the model.
        has_experts: Whether the message also gives the key for routed experts.

    Raises:
        UserError: A name is that of no linear layer.
    """
    unknown = [
        target
        for target in lora.named_targets
        if not any(is_parameter_named(layer, [target]) for layer in layers)
    ]
    if unknown:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        experts = ""
        if has_experts:
            experts = "; routed experts are adapted with lora_target_parameters"
        raise UserError(
            f"lora_target_modules: {', '.join(unknown)}: no such linear layer in {model}; it has "
            f"{known}{experts}"
        )


def refuse_other_parameters(
    targets: Iterable[str], experts: Sequence[str], parameters: Sequence[str]
) -> None:
    """Refuses names in `lora_target_parameters` that name anything but parameters of experts.

    Args:
        targets: The names.
        experts: The names of the parameters that each hold all experts of a layer.
        parameters: The names of all parameters of the model.

    Raises:
        UserError: A name is that of no parameter, or of one that does not hold experts.
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
    """Refuses patterns of ranks and alphas that name nothing adapted, and adapters on parameters
    that are trained whole.

    Args:
        lora: With rank_pattern, alpha_pattern and modules_to_save.
        adapted: The names of the layers and parameters that have adapters.

    Raises:
        UserError: A pattern names none of `adapted`, or modules_to_save names one of them.
    """
    adapted_names = list(adapted)
    for name in adapted_names:
        if is_saved_whole([name], lora):
            raise UserError(
                f"modules_to_save: trains {name} whole, and lora_target_parameters adapts it; "
                "remove one of the two"
            )
    for key, values in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in values or {}:
            if not any(is_named(name, pattern) for name in adapted_names):
                raise UserError(
                    f"{key}: {pattern}: names no adapted layer of the model; see "
                    "lora_target_modules"
                )


def refuse_undivided(lora: Lora, widths: Mapping[str, int]) -> None:
    """Raises `UserError` if `oft_block_size` does not divide the input width of an adapted layer.

    Args:
        lora: With oft_block_size; None checks nothing.
        widths: The name of each adapted layer -> its input width.
    """
    block = lora.oft_block_size
    if block is None:
        return
    for name, width in widths.items():
        if width % block:
            divisor = max(size for size in range(1, min(block, width) + 1) if width % size == 0)
            raise UserError(
                f"oft_block_size: {block}: {name} reads {width:,} numbers, which blocks of {block} "
                f"do not divide; set oft_block_size: {divisor}, or name others in "
                "lora_target_modules"
            )


def gives_head_adapter(head: str, names: Iterable[str], lora: Lora) -> bool:
    """Whether the output head gets an adapter.

    It does if `lora_target_modules` names it and it is not trained whole.

    Args:
        head: The name of the head's module.
        names: All names of the head's weight; several if it is tied to the embedding.
        lora: The recipe's section.
    """
    return is_parameter_named(head, lora.named_targets) and not is_saved_whole(names, lora)


def refuse_unmatched(
    key: str,
    patterns: Iterable[str],
    tensors: Collection[Sequence[str]],
    text_prefixes: Names = ("",),
) -> None:
    """Raises `UserError` if a pattern names no parameter, or none that works on text.

    Args:
        key: The recipe's key that has the patterns, for the message.
        patterns: The patterns.
        tensors: All names of each parameter; a tied one has several.
        text_prefixes: The prefixes of the names of parameters that work on text; ("",): all do.
    """
    parameters = list(chain.from_iterable(tensors))
    text_parameters = _list_names(tensors, text_prefixes)
    for pattern in patterns:
        if not any(is_within(name, [pattern]) for name in parameters):
            modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
            # one name for the same module of all layers
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module) for module in modules))
            more = ""
            if len(kinds) > SHOWN_MODULES:
                more = f" and {len(kinds) - SHOWN_MODULES} more"
            raise UserError(
                f"{key}: {pattern}: names no module of the model; it has "
                f"{', '.join(kinds[:SHOWN_MODULES])}{more}"
            )
        if not any(is_within(name, [pattern]) for name in text_parameters):
            raise UserError(
                f"{key}: {pattern}: names nothing of the language model, and text trains no other "
                "part of a vision-language model; leave it out"
            )


SINGLE_EXPERT = ".experts.*."  # in transformers' pattern for the tensors of single experts
# The keys that name modules or parameters by plain text, not by patterns.
TARGET_KEYS = ("lora_target_modules", "lora_target_parameters")


def adopt_published_names(recipe: Recipe, model_type: str) -> Recipe:
    """Replaces names of modules in published files by transformers' names for them.

    `Recipe.renamed` gets a line for each replacement; without any the recipe is returned as it is.
    """
    recipe, lines = _rename_modules(recipe, model_type)
    recipe, expert_lines = _move_expert_targets(recipe, model_type)
    lines += expert_lines
    return replace(recipe, renamed=tuple(lines)) if lines else recipe


def _rename_modules(recipe: Recipe, model_type: str) -> tuple[Recipe, list[str]]:
    """Replaces published names in every key that names modules, and returns a line for each."""
    lines: list[str] = []
    renames = find_renames(model_type)
    keys = [key for key in recipe_keys().values() if key.is_patterns or key.name in TARGET_KEYS]
    for key in keys:
        section = getattr(recipe, key.section)
        value = getattr(section, key.name)
        renamed = value
        if isinstance(value, Mapping):
            renamed = {rename_pattern(pattern, renames): each for pattern, each in value.items()}
        elif isinstance(value, tuple):
            renamed = tuple(rename_pattern(pattern, renames) for pattern in value)
        if renamed != value:
            pairs = (
                f"{old} is {new}" for old, new in zip(value, renamed, strict=True) if old != new
            )
            lines += [f"{key.name}: {pair} in transformers 5" for pair in pairs]
            recipe = replace(recipe, **{key.section: replace(section, **{key.name: renamed})})
    return recipe, lines


def _move_expert_targets(recipe: Recipe, model_type: str) -> tuple[Recipe, list[str]]:
    """Moves layers of single experts from lora_target_modules to lora_target_parameters.

    In transformers 5 such a layer (Mixtral's `w1`) is part of one parameter that holds all experts,
    and this parameter gets the adapters. Returns a line about it too, or none.
    """
    lora = recipe.lora
    experts = find_expert_layers(model_type)
    moved = [target for target in lora.named_targets if target in experts]
    if not moved:
        return recipe, []
    parameters = dict.fromkeys(experts[target] for target in moved)
    line = (
        f"lora_target_modules: {', '.join(moved)}: the experts of a layer are one parameter in "
        f"transformers 5; {' and '.join(parameters)} get adapters, as by lora_target_parameters"
    )
    lora = replace(
        lora,
        lora_target_modules=tuple(
            target for target in lora.lora_target_modules if target not in moved
        ),
        lora_target_parameters=tuple(dict.fromkeys([*lora.lora_target_parameters, *parameters])),
    )
    return replace(recipe, lora=lora), [line]


@cache
def find_renames(model_type: str) -> Mapping[str, str]:
    """Maps names of modules in a family's published files to transformers' names for them.

    >>> dict(find_renames("mixtral")), dict(find_renames("llama"))
    ({'block_sparse_moe': 'mlp'}, {})
    """
    renames = {}
    for source, target in _find_conversions(model_type, "WeightRenaming"):
        old = _as_name(source)
        new = _as_name(target)
        if old and new and old != new:
            renames[old] = new
    return renames


@cache
def find_expert_layers(model_type: str) -> Mapping[str, str]:
    """Maps layers of single experts in a family's published files to the parameter that holds all.

    A layer is left out if the family has a linear layer of the same name.

    >>> dict(find_expert_layers("mixtral"))
    {'w1': 'experts.gate_up_proj', 'w3': 'experts.gate_up_proj', 'w2': 'experts.down_proj'}
    """
    layers: dict[str, str] = {}
    for sources, target in _find_conversions(model_type, "WeightConverter"):
        source_patterns = [sources] if isinstance(sources, str) else sources or []
        if not isinstance(target, str) or ".experts." not in f".{target}":
            continue
        if not all(SINGLE_EXPERT in source for source in source_patterns):
            continue
        parameter = f"experts.{target.rpartition('experts.')[2]}"
        for source in source_patterns:
            layer = source.removesuffix(".weight").rpartition(".")[2]
            layers[layer] = parameter
    return {
        name: parameter
        for name, parameter in layers.items()
        if name not in find_linear_layers(model_type)
    }


def rename_pattern(pattern: str, renames: Mapping[str, str]) -> str:
    """Replaces the old names of modules in a pattern by the new ones.

    A new name may end with the old one, as below: where it is already there, nothing is replaced.

    `renames`: as `find_renames` returns it.

    >>> renames = {"language_model": "model.language_model"}
    >>> [rename_pattern(name, renames) for name in ("language_model.a", "model.language_model.a")]
    ['model.language_model.a', 'model.language_model.a']
    """
    for old, new in renames.items():
        old_name = r"\\?\.".join(map(re.escape, old.split(".")))  # a pattern may escape its dots
        prefix = new.removesuffix(old)
        not_renamed = ""
        if prefix and prefix != new:
            escaped_prefix = re.escape(prefix)  # as it stands in a pattern that escapes its dots
            not_renamed = rf"(?<!{re.escape(prefix)})(?<!{re.escape(escaped_prefix)})"
        pattern = re.sub(rf"(?<!\w){not_renamed}{old_name}(?!\w)", new, pattern)
    return pattern


def _as_name(part: Any) -> str | None:
    """Reads a pattern of transformers as plain parts of a module's name, without `.weight`.

    Returns None if it is no plain text: it may match several names, or is a list of patterns.
    """
    if not isinstance(part, str):
        return None
    name = part.replace("\\.", ".").strip("^.").removesuffix(".weight")
    return name if re.fullmatch(r"\w+(\.\w+)*", name) else None


@cache
def _find_conversions(model_type: str, kind: str) -> tuple[tuple[Any, Any], ...]:
    """Returns (source, target) of each conversion that transformers has for a family.

    The source is what published files have, the target what transformers has: a pattern or a list
    of patterns. `kind`: the class of the conversion, such as WeightRenaming.
    """
    conversions_of_families, aliases = _read_table()
    conversions = conversions_of_families.get(model_type)
    if conversions is None:
        conversions = conversions_of_families.get(aliases.get(model_type, ""))
    return tuple(_read_calls(conversions, kind))


def find_alias(model_type: str) -> str | None:
    """Returns the other family whose conversions transformers uses for this one; None if there is
    none.

    >>> find_alias("qwen3_moe"), find_alias("qwen2_moe")
    ('qwen2_moe', None)
    """
    _, aliases = _read_table()
    return aliases.get(model_type)


@cache
def _read_table() -> tuple[Mapping[str, ast.List], Mapping[str, str]]:
    """Reads transformers' conversions from the text of its conversion_mapping.py.

    Returns:
        Family -> the list of its conversions, and family -> the other family whose conversions it
        shares. Both are empty if transformers or the file is missing.
    """
    spec = importlib.util.find_spec("transformers")
    source = ""
    if spec is not None and spec.origin:
        path = Path(spec.origin).parent / "conversion_mapping.py"
        if path.is_file():
            source = path.read_text("utf-8")
    conversions: dict[str, ast.List] = {}
    aliases: dict[str, str] = {}
    for table in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.List):
                conversions[str(key.value)] = value
            elif isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                aliases[str(key.value)] = str(value.value)
    return conversions, aliases


def _read_calls(conversions: ast.List | None, kind: str) -> Iterator[tuple[Any, Any]]:
    """Yields (source, target) of each call of the class `kind` in a list of conversions.

    A call whose patterns are not literals is left out.
    """
    if conversions is None:
        return
    for call in conversions.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id != kind:
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        patterns = [
            *call.args[:2],
            *(keywords[key] for key in ("source_patterns", "target_patterns") if key in keywords),
        ]
        with suppress(ValueError):  # a pattern is computed
            source, target = map(ast.literal_eval, patterns)
            yield source, target


def is_adapter(name: str) -> bool:
    """Whether a tensor with this name belongs to an adapter, of LoRA or of OFT."""
    return ".lora_" in name or ROTATION in name


def base_name(name: str) -> str:
    """Returns a parameter's name before peft wrapped the layer, without any `base_layer`.

    >>> base_name("layers.0.mlp.experts.base_layer.base_layer.down_proj")
    'layers.0.mlp.experts.down_proj'
    """
    return re.sub(r"(\.base_layer)+\.", ".", name)


def is_copied(name: str, adapter_config: Mapping[str, Any]) -> bool:
    """Whether PEFT trains a copy of the tied weight `name` of a base that it copies one weight of.

    It copies what modules_to_save names, and with ensure_weight_tying all that is tied to it. Any
    other weight keeps the base's values.

    `adapter_config`: the content of adapter_config.json.
    """
    if adapter_config.get("ensure_weight_tying"):
        return True
    # peft takes a name in its list as any end of a module's name
    ends = tuple(adapter_config.get("modules_to_save") or ())
    return name.removesuffix(".weight").endswith(ends)


# In PEFT's names: the original of a module that modules_to_save has copied and trained.
ORIGINAL_MODULE = ".original_module."


def peft_name(name: str) -> str:
    """Returns the name of an adapter's tensor in PEFT's file, without the prefix of the file.

    `name`: the tensor's name in PEFT's model, in its file, or in a checkpoint of ours.

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
