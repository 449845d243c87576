"""LoRA on the experts of a mixture, by peft's adapters of parameters (`target_parameters`).

One parameter holds all E experts of a layer, and its adapter a pair of factors for each of them, in two matrices: A
[E r, in], expert after expert, and B [out, r E], whose columns of one rank are those of all experts. Where several
parameters of a module are adapted, peft nests the adapters, the last parameter's outermost; so an adapter's name says
which one it belongs to only by the number of its `base_layer`s.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from finetune.config.module_patterns import is_parameter_named, refuse_other_parameters
from finetune.config.schema import Lora
from finetune.errors import UserError
from finetune.models.moe.experts import is_experts


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """A parameter with an adapter. Returned by `find_adapted_parameters`."""

    name: str  # in the base model
    shape: tuple[int, ...]  # [experts, out, in], or [out, in]
    is_transposed: bool  # [experts, in, out]


def find_adapted_parameters(model: nn.Module, targets: Collection[str]) -> dict[str, AdaptedParameter]:
    """The prefix of an adapter's names -> the parameter of `model`, which has no adapters yet, that it adapts.

    The rule is peft's (`BaseTuner._inject_parameters`): a target names parameters by the end of their names.
    """
    found = {}
    for path, module in model.named_modules():
        matched = [
            (f"{path}.{name}", parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if is_parameter_named(f"{path}.{name}", targets)
        ]
        is_transposed = bool(getattr(module, "is_transposed", False))
        for depth, (name, parameter) in enumerate(reversed(matched)):
            found[path + ".base_layer" * depth] = AdaptedParameter(name, tuple(parameter.shape), is_transposed)
    return found


def refuse_unadaptable(model: nn.Module, lora: Lora) -> None:
    """Raises `UserError` where one of `lora_target_parameters` names anything but parameters that hold a layer's
    experts."""
    experts = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_experts(module) and parameter.dim() == 3
    ]
    refuse_other_parameters(lora.lora_target_parameters, experts, [name for name, _ in model.named_parameters()])


def find_adapters_of(experts: nn.Module, model: nn.Module) -> list[Any]:
    """peft's adapters (ParamWrapper) of the parameters of `experts`, a module in `model`, from the outermost."""
    wrappers: Iterator[Any] = (module for module in model.modules() if hasattr(module, "parameter_name"))
    return [wrapper for wrapper in wrappers if wrapper.get_base_layer() is experts]


def inject_adapters(model: nn.Module, config: Any) -> None:
    """Puts the adapters of `config`, a peft LoraConfig, into `model`: on exactly the modules and parameters that it
    names."""
    from peft import inject_adapter_in_model

    with _own_names():
        inject_adapter_in_model(config, model)


@contextmanager
def _own_names() -> Iterator[None]:
    """In this block peft takes names as they are. In many mixtures it reads `gate_proj` as transformers 4 used it, for
    a routed expert's layer, and would move the adapters of shared experts and dense layers onto the routed experts."""
    from peft.utils import transformers_weight_conversion

    convert: Any = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = convert


def config_for_peft(model: nn.Module, config: Any, adapted: Collection[str]) -> Any:
    """`config` in words that plain peft reads as they are meant; `adapted`: all adapted modules of `model`.

    A layer whose name peft would take for a routed expert's is named by its weight, as a parameter: the tensors of its
    adapter are the same. Raises `UserError` where peft could not open the adapter.
    """
    renamed = {name for name in config.target_modules or () if _is_renamed(model, config, name)}
    if not renamed:
        return config
    if config.use_dora:
        raise UserError(
            f"use_dora: peft cannot open such an adapter on {', '.join(sorted(renamed))} of "
            f"{type(model).__name__}, which it takes "
            "for layers of the routed experts; leave use_dora out, or name others in lora_target_modules"
        )
    config = copy.deepcopy(config)
    weights = [f"{module}.weight" for module in adapted if is_parameter_named(module, renamed)]
    config.target_parameters = [*(config.target_parameters or ()), *sorted(weights)]
    config.target_modules = sorted(set(config.target_modules) - renamed)
    config.lora_dropout = 0.0  # of the training only, and refused for parameters
    for patterns in ("rank_pattern", "alpha_pattern"):
        setattr(config, patterns, {rf"({key})(\.weight)?": value for key, value in getattr(config, patterns).items()})
    return config


def _is_renamed(model: nn.Module, config: Any, target: str) -> bool:
    """Whether plain peft would put adapters that are meant for `target` on something else."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    alone = copy.copy(config)
    alone.target_modules, alone.target_parameters = {target}, None
    alone.rank_pattern, alone.alpha_pattern = {}, {}
    try:
        convert_peft_config_for_transformers(alone, model, None)
    except ValueError:  # one half of two layers that are one in transformers 5
        return True
    return set(alone.target_modules) != {target}
