"""Lists a model's parameters from its config alone: builds transformers' class on the meta device
and describes each part.

The plan uses it for models that its own tables do not describe.
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
from finetune.constants import Names, Shape
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
from finetune.flops import count_attention_layers, count_heads, list_layer_configs, read_head_size
from finetune.models.experts import count_active
from finetune.models.load import build_on_meta, forget_quantization
from finetune.models.quantized_layers import weights_of

Shapes = Mapping[str, Shape]  # by transformers' name of the parameter, a tied one's first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The parameters of one decoder layer, or of all modules outside the layers.

    A tied parameter belongs to the first part that uses it.
    """

    shapes: Shapes
    linears: Names  # weights [out, in] of linear layers, without the head's
    adaptable: Shapes  # weights that all-linear adapts; a tied one under each of its names
    experts: Names  # weights of routed experts
    routed: Names  # weights and biases of routed experts
    is_transposed: bool  # the weights of experts are [experts, in, out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's parameters, part by part. Returned by `outline_model`."""

    layers: tuple[Part, ...]
    layer_names: str  # the layers' classes, and how many of each kind there are
    embedding: tuple[str, Shape]
    tail: Part  # text parameters outside layers and embedding: the final norm, the head
    head: str | None  # the name of the head's weight; None where it is tied to the embedding
    head_name: str  # the name of the head's weight, tied or not
    beside: tuple[Shapes, ...]  # towers, projectors
    prefix: str  # the name of the language model within the model
    text_names: Names  # as `text_names` returns them
    heads: int
    key_value_heads: int
    head_size: float
    attending_layers: int
    idle: int  # elements that do no work on a text token: experts not chosen, towers
    facts: ModelFacts


def outline_model(config: Mapping[str, Any], where: str) -> Outline:
    """Describes the model of a config.json, named `where` in errors.

    Raises `UserError` where transformers has no class for it, or cannot build it.
    """
    model = build_class(config, where)
    trunk = trunk_of(model)
    layers = list_layers(model)
    names = _name_parameters(model)
    embedding = model.get_input_embeddings().weight
    head = head_of(model).weight
    layer_configs = list_layer_configs(trunk.config)
    heads = max(map(count_heads, layer_configs)) or 1
    taken: set[Any] = {embedding}
    beside = _describe_beside(model, names, taken)
    described = tuple(_describe(model, layer, names, taken) for layer in layers)
    return Outline(
        layers=described,
        layer_names=_name_layers(layers, getattr(trunk.config, "layer_types", None)),
        embedding=(names[embedding], tuple(embedding.shape)),
        tail=_describe(model, model, names, taken),
        head=None if head is embedding else names[head],
        head_name=_name_head(model),
        beside=beside,
        prefix=next(name for name, module in model.named_modules() if module is trunk),
        text_names=text_names(model),
        heads=heads,
        key_value_heads=max(map(_count_key_value_heads, layer_configs)) or heads,
        head_size=max(map(read_head_size, layer_configs)),
        attending_layers=count_attention_layers(trunk.config),
        idle=_count_idle(model),
        facts=read_facts(model.config, where),
    )


def _count_key_value_heads(config: Any) -> int:
    """Of a layer; 0 where the config does not say."""
    return getattr(config, "num_key_value_heads", None) or 0


def build_class(config: Mapping[str, Any], where: str) -> Any:
    """Builds the transformers model of a config.json on the meta device."""
    from transformers import AutoConfig

    try:
        read = AutoConfig.for_model(**config)
    except Exception as error:  # each family checks its config in its own way
        raise UserError(
            f"{where}: {on_one_line(error)}; name the config.json of a transformers model"
        ) from None
    forget_quantization(read)
    try:
        with torch.device("meta"):  # a tensor made on the CPU first could be of any size
            return build_on_meta(read, torch.float32)
    except UserError:  # a few classes compute numbers while they are built
        return build_on_meta(read, torch.float32)


def list_layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the outermost modules that transformers does not split, else the entries
    of the longest module list.
    """
    layers = decoder_layers(model)
    inside = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    if outermost := [layer for layer in layers if layer not in inside]:
        return outermost
    lists = (module for module in trunk_of(model).modules() if isinstance(module, nn.ModuleList))
    return list(max(lists, key=len, default=()))


def _name_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of every parameter; of a tied one its first."""
    named = [*model.named_parameters(remove_duplicate=False)]
    return {parameter: name for name, parameter in reversed(named)}


def _name_head(model: Any) -> str:
    """The name of the output head's weight, which may be tied to the embedding."""
    head = head_of(model)
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _describe_beside(
    model: Any, names: Mapping[nn.Parameter, str], taken: set[Any]
) -> tuple[Shapes, ...]:
    """The shapes of each tower and projector, then of loose parameters beside the text model.

    llava_next has a loose parameter: the line break between two rows of an image. `_take` explains
    `taken`.
    """
    beside = []
    for part in other_parts(model):
        beside.append(_take(part.parameters(), names, taken))
        taken.update(part.modules())
    on_text = text_names(model)
    loose = [each for each in model.parameters() if not names[each].startswith(on_text)]
    beside.append(_take(loose, names, taken))
    return tuple(shapes for shapes in beside if shapes)


def _take(
    parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str], taken: set[Any]
) -> dict[str, Shape]:
    """The shapes by name of those `parameters` that no part before has taken.

    taken: The parameters of the parts before, to which these are added.
    """
    own = [parameter for parameter in parameters if parameter not in taken]
    taken.update(own)
    return {names[parameter]: tuple(parameter.shape) for parameter in own}


def _describe(
    model: Any, part: nn.Module, names: Mapping[nn.Parameter, str], taken: set[Any]
) -> Part:
    """Describes `part` of `model`.

    taken: The parameters and linear layers of the parts before, to which these are added.
    """
    shapes = _take(part.parameters(), names, taken)
    head = head_modules(model)
    linears = [
        module for module in part.modules() if isinstance(module, nn.Linear) and module not in head
    ]
    adaptable = _list_adaptable(model, [linear for linear in linears if linear not in taken])
    taken.update(linears)
    experts = [module for module in part.modules() if is_experts(module)]

    def name_own(parameters: Iterable[Any]) -> Names:
        return tuple(names[each] for each in parameters if names[each] in shapes)

    return Part(
        shapes=shapes,
        linears=name_own(linear.weight for linear in linears),
        adaptable=adaptable,
        experts=name_own(weight for module in experts for weight in weights_of(module).values()),
        routed=name_own(parameter for module in experts for parameter in module.parameters()),
        is_transposed=any(getattr(module, "is_transposed", False) for module in experts),
    )


def _list_adaptable(model: Any, linears: Iterable[nn.Linear]) -> Shapes:
    """The weights of those `linears` to which all-linear adds an adapter."""
    left_out = find_family(trunk_of(model).config.model_type).unadaptable
    module_names = {module: name for name, module in model.named_modules()}
    adaptable = {}
    for linear in linears:
        name = module_names[linear]
        if name.rpartition(".")[2] not in left_out:
            adaptable[f"{name}.weight"] = tuple(linear.weight.shape)
    return adaptable


def _count_idle(model: Any) -> int:
    """Counts the elements that do no work on a text token: experts not chosen, towers."""
    active = count_active(model)
    idle = sum(parameter.numel() - used for parameter, used in active.items())
    for part in other_parts(model):
        idle += sum(active[parameter] for parameter in part.parameters())
    return idle


def _name_layers(layers: Iterable[Any], kinds: Any) -> str:
    """Names the layers' classes with their numbers, and the `kinds` where all are of one class.

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
