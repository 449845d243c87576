"""Parts of a model by name. Imports no torch.

A pattern is a regular expression for the end of a module's name, in whole parts of it: `mlp` names every MLP,
`layers.[0-3].mlp` those of four layers, `lm_head` the head. The rule is peft's (`peft.utils.other.get_pattern_key`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from finetune.config.schema import Lora, Model
from finetune.errors import UserError

SHOWN_MODULES = 12  # where a pattern matches none


def find_problem(pattern: str) -> str | None:
    """What is wrong with a pattern by itself; None where it is one.

    >>> find_problem("*.mlp")
    '*.mlp: not a regular expression (nothing to repeat at position 0); any text is .*, as in layers.*.mlp'
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

    >>> is_within("model.layers.11.mlp.up_proj.weight", ["layers.1.mlp"]), is_within("lm_head.weight", ["lm_head"])
    (False, True)
    """
    parts = parameter.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(is_named(module, pattern) for pattern in patterns for module in modules)


def find_value(module: str, pattern_values: Mapping[str, int] | None, default: int) -> int:
    """The value of the first pattern that names `module`, as in peft's rank_pattern and alpha_pattern."""
    return next((value for pattern, value in (pattern_values or {}).items() if is_named(module, pattern)), default)


def find_trained(tensors: Sequence[Sequence[str]], model: Model, text: tuple[str, ...] = ("",)) -> set[str]:
    """The tensors that `trainable_modules` and `frozen_modules` leave trained, each by its first name.

    `tensors`: all names of each parameter; one that is tied has several. `text`: the beginnings of the names that text
    reaches; only a pattern that names none of these reaches the vision tower.

    Raises `UserError` where a pattern names no part of the model, where tied weights would be trained under one name
    and frozen under another, or where nothing is trained.
    """
    refuse_unmatched("trainable_modules", model.trainable_modules, tensors)
    refuse_unmatched("frozen_modules", model.frozen_modules, tensors)
    of_text = [name for names in tensors if names[0].startswith(text) for name in names]
    beside = [each for each in model.trainable_modules if not any(is_within(name, [each]) for name in of_text)]
    tensors = [names for names in tensors if names[0].startswith(text) or is_within(names[0], beside)]
    trained = set()
    for names in tensors:
        chosen = [name for name in names if is_within(name, model.trainable_modules)] or (
            [] if model.trainable_modules else list(names)
        )
        frozen = [name for name in names if is_within(name, model.frozen_modules)]
        if model.trainable_modules and chosen and frozen and not set(chosen) & set(frozen):
            raise UserError(
                f"trainable_modules: {chosen[0]} is tied to {frozen[0]}, which frozen_modules names: they are one "
                "tensor; remove one of the two"
            )
        if chosen and not frozen:
            trained.add(names[0])
    if not trained:
        raise UserError("trainable_modules, frozen_modules: no parameter is left to train; freeze fewer modules")
    return trained


def is_saved_whole(names: Iterable[str], lora: Lora) -> bool:
    """Whether a parameter of the base, by any of its `names`, is trained whole beside adapters (modules_to_save)."""
    return lora.use_peft and any(is_within(name, lora.modules_to_save) for name in names)


def is_parameter_named(name: str, targets: Iterable[str]) -> bool:
    """Whether one of `targets` is the end of a parameter's name, in whole parts: peft's rule for target_parameters.

    >>> is_parameter_named("layers.0.mlp.experts.down_proj", ["experts.down_proj"]), is_parameter_named("mlp.x_proj", ["proj"])
    (True, False)
    """  # noqa: E501
    return any(name == target or name.endswith(f".{target}") for target in targets)


def refuse_unknown_layers(lora: Lora, layers: Sequence[str], model: str, *, has_experts: bool) -> None:
    """Raises `UserError` if `lora_target_modules` names no linear layer in `layers`. `model`: its name in messages."""
    targets = () if lora.lora_target_modules == "all-linear" else lora.lora_target_modules
    wrong = [target for target in targets if not any(is_parameter_named(layer, [target]) for layer in layers)]
    if wrong:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        experts = "; routed experts are adapted with lora_target_parameters" if has_experts else ""
        raise UserError(
            f"lora_target_modules: {', '.join(wrong)}: no such linear layer in {model}; it has {known}{experts}"
        )


def refuse_other_parameters(targets: Iterable[str], experts: Sequence[str], parameters: Sequence[str]) -> None:
    """Raises `UserError` where one of `lora_target_parameters` names anything but `experts`, parameters that each hold
    all experts of a layer. `parameters`: all names of the model's."""
    known = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in experts}))
    for target in targets:
        named = [name for name in parameters if is_parameter_named(name, [target])]
        if not experts:
            raise UserError(
                f"lora_target_parameters: {target}: the model has no parameters that hold a layer's experts; leave "
                "the key out, and name linear layers in lora_target_modules"
            )
        if not named:
            raise UserError(
                f"lora_target_parameters: {target}: names no parameter of the model; those of its experts are {known}"
            )
        if others := [name for name in named if name not in experts]:
            raise UserError(
                f"lora_target_parameters: {target}: {others[0]} does not hold a layer's experts, as {known} do; adapt "
                "linear layers with lora_target_modules, and train others whole with modules_to_save"
            )


def refuse_unadapted(lora: Lora, adapted: Iterable[str]) -> None:
    """Raises `UserError` where a pattern of rank_pattern or alpha_pattern names none of the `adapted` layers and
    parameters, and where one of these is trained whole as well."""
    layers = list(adapted)
    for layer in layers:
        if is_saved_whole([layer], lora):
            raise UserError(
                f"modules_to_save: trains {layer} whole, and lora_target_parameters adapts it; remove one of the two"
            )
    for key, values in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in values or {}:
            if not any(is_named(layer, pattern) for layer in layers):
                raise UserError(f"{key}: {pattern}: names no adapted layer of the model; see lora_target_modules")


def refuse_adapted_head(head: str, names: Iterable[str], lora: Lora) -> None:
    """Raises `UserError` if `lora_target_modules` names the output head, whose module is `head`.

    One that is trained whole gets no adapter, and so may be named.
    """
    if lora.lora_target_modules == "all-linear" or is_saved_whole(names, lora):
        return
    for target in lora.lora_target_modules:
        if f".{head}".endswith(f".{target}"):
            raise UserError(
                f"lora_target_modules: {target}: names the output head, which cannot have an adapter: its "
                "product is computed "
                f"with the loss, in chunks; remove it, or train the head whole with modules_to_save: [{target}]"
            )


def refuse_unreached(key: str, patterns: Iterable[str], reached: Sequence[Sequence[str]]) -> None:
    """Raises `UserError` if one of `patterns` names parameters, but none that text has `reached`."""
    for pattern in patterns:
        if not any(is_within(name, [pattern]) for names in reached for name in names):
            raise UserError(
                f"{key}: {pattern}: names nothing of the language model, and text trains no other part of a "
                "vision-language model; leave it out"
            )


def refuse_unmatched(key: str, patterns: Iterable[str], tensors: Iterable[Sequence[str]]) -> None:
    """Raises `UserError` where one of `patterns` names nothing among the parameters."""
    parameters = [name for names in tensors for name in names]
    for pattern in patterns:
        if not any(is_within(name, [pattern]) for name in parameters):
            modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
            short = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module) for module in modules))
            more = f" and {len(short) - SHOWN_MODULES} more" if len(short) > SHOWN_MODULES else ""
            raise UserError(
                f"{key}: {pattern}: names no module of the model; it has {', '.join(short[:SHOWN_MODULES])}{more}"
            )
