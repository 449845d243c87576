"""The tensors of a model by its config alone: transformers' class, built on meta, and what each
part of it holds.

For the plan of models whose layers its tables do not give.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.config.facts import ModelFacts
from finetune.config.families import find_family
from finetune.config.pretrained import read_facts
from finetune.distributed.model_parts import (
    decoder_layers,
    head_modules,
    head_of,
    is_experts,
    other_parts,
    text_names,
    trunk_of,
)
from finetune.errors import UserError, on_one_line
from finetune.flops import count_attention_layers, read_head_size
from finetune.models.experts import count_active
from finetune.models.load import build_on_meta, forget_quantization
from finetune.models.lora import find_name_suffix
from finetune.models.quantized_layers import weights_of

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by transformers' name of the parameter, a tied one's first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The parameters of a decoder layer, or of all that is in none; a tied one is in the first that
    has it.
    """

    shapes: Shapes
    linears: tuple[str, ...]  # the weights [out, in] of linear layers, but for the head's
    # the weights of the linear layers that all-linear adapts, under each name of a tied one
    adaptable: Shapes
    experts: tuple[str, ...]  # the weights of routed experts
    routed: tuple[str, ...]  # these, and biases
    is_transposed: bool  # the weights of experts are [experts, in, out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's parameters, part by part. Returned by `outline_model`."""

    layers: tuple[Part, ...]
    layer_names: str  # their classes, and how many of each kind there are
    embedding: tuple[str, Shape]
    tail: Part  # all else that works on text
    head: str | None  # the name of its weight; None where the embedding is the head
    head_name: str  # the same, or its second name where it is the embedding
    beside: tuple[Shapes, ...]  # towers, projectors
    prefix: str  # the name of the language model
    text_names: tuple[str, ...]
    heads: int
    key_value_heads: int
    head_size: float
    attending_layers: int
    idle: int  # numbers that do not work on a given token
    facts: ModelFacts


def outline_model(config: Mapping[str, Any], where: str) -> Outline:
    """Describes the model of a config.json, named `where` in errors.

    Raises `UserError` where transformers has no class for it, or cannot build it.
    """
    model = build_class(config, where)
    named = [*model.named_parameters(remove_duplicate=False)]
    names = {parameter: name for name, parameter in reversed(named)}  # the first of each
    trunk = trunk_of(model)
    layers = list_layers(model)
    embedding = model.get_input_embeddings().weight
    head = head_of(model).weight
    taken: set[Any] = {embedding}
    beside = [_take(part, names, taken) for part in other_parts(model)]
    taken.update(module for part in other_parts(model) for module in part.modules())
    on_text = text_names(model)
    loose = {  # of llava_next the line break between two rows of an image
        names[parameter]: tuple(parameter.shape)
        for parameter in model.parameters()
        if parameter not in taken and not names[parameter].startswith(on_text)
    }
    taken.update(parameter for parameter in model.parameters() if names[parameter] in loose)
    described = tuple(_describe(model, layer, names, taken) for layer in layers)
    heads = getattr(trunk.config, "num_attention_heads", None) or 1
    active = count_active(model)
    idle = sum(parameter.numel() - numbers for parameter, numbers in active.items())
    idle += sum(active[parameter] for part in other_parts(model) for parameter in part.parameters())
    return Outline(
        layers=described,
        layer_names=_name_layers(layers, getattr(trunk.config, "layer_types", None)),
        embedding=(names[embedding], tuple(embedding.shape)),
        tail=_describe(model, model, names, taken),
        head=None if head is embedding else names[head],
        head_name=_name_head(model),
        beside=tuple(part for part in (*beside, loose) if part),
        prefix=next(name for name, module in model.named_modules() if module is trunk),
        text_names=on_text,
        heads=heads,
        key_value_heads=getattr(trunk.config, "num_key_value_heads", None) or heads,
        head_size=read_head_size(trunk.config),
        attending_layers=count_attention_layers(trunk.config),
        idle=idle,
        facts=read_facts(model.config, where),
    )


def build_class(config: Mapping[str, Any], where: str) -> Any:
    """The transformers model of a config.json, on meta."""
    from transformers import AutoConfig

    try:
        read = AutoConfig.for_model(**config)
    except Exception as error:  # each family checks its config in its own way
        raise UserError(
            f"{where}: {on_one_line(error)}; name the config.json of a transformers model"
        ) from None
    forget_quantization(read)
    try:
        with torch.device("meta"):  # else a tensor of any size would be there for a moment
            return build_on_meta(read, torch.float32)
    except UserError:  # of the few whose classes compute numbers while they are built
        return build_on_meta(read, torch.float32)


def list_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a model: the outermost that transformers does not split, else those of
    its longest list.
    """
    layers = decoder_layers(model)
    inside = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    if outermost := [layer for layer in layers if layer not in inside]:
        return outermost
    lists = (module for module in trunk_of(model).modules() if isinstance(module, nn.ModuleList))
    return list(max(lists, key=len, default=()))


def _take(
    module: nn.Module, names: Mapping[nn.Parameter, str], taken: set[Any]
) -> dict[str, Shape]:
    """The parameters of `module` that are not `taken` yet, which they are afterwards."""
    own = [parameter for parameter in module.parameters() if parameter not in taken]
    taken.update(own)
    return {names[parameter]: tuple(parameter.shape) for parameter in own}


def _name_head(model: Any) -> str:
    """The name of the output head's weight, which may be the embedding's too."""
    head = head_of(model)
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _describe(
    model: Any, part: nn.Module, names: Mapping[nn.Parameter, str], taken: set[Any]
) -> Part:
    shapes = _take(part, names, taken)
    left_out = find_family(trunk_of(model).config.model_type).unadaptable
    head = head_modules(model)
    linears = [
        module for module in part.modules() if isinstance(module, nn.Linear) and module not in head
    ]
    experts = [module for module in part.modules() if is_experts(module)]

    def own(parameters: Iterable[Any]) -> tuple[str, ...]:
        return tuple(name for name in map(names.__getitem__, parameters) if name in shapes)

    modules = {module: name for name, module in model.named_modules()}
    adaptable = {modules[linear]: linear.weight for linear in linears if linear not in taken}
    taken.update(linears)
    return Part(
        shapes=shapes,
        linears=own(linear.weight for linear in linears),
        adaptable={
            f"{name}.weight": tuple(weight.shape)
            for name, weight in adaptable.items()
            if find_name_suffix(name) not in left_out
        },
        experts=own(weight for module in experts for weight in weights_of(module).values()),
        routed=own(parameter for module in experts for parameter in module.parameters()),
        is_transposed=any(getattr(module, "is_transposed", False) for module in experts),
    )


def _name_layers(layers: Iterable[Any], kinds: Any) -> str:
    """The classes of the layers, each with its number; of layers of one class the kinds.

    >>> class Layer: pass
    >>> _name_layers(
    ...     [Layer(), Layer(), Layer()], ["linear_attention", "linear_attention", "full_attention"]
    ... )
    '3 x Layer (2 linear_attention, 1 full_attention)'
    """
    classes = Counter(type(layer).__name__ for layer in layers)
    named = ", ".join(f"{number} x {name}" for name, number in classes.items())
    if len(classes) != 1 or not kinds or len(set(kinds)) == 1:
        return named
    return f"{named} ({', '.join(f'{number} {kind}' for kind, number in Counter(kinds).items())})"
