"""Lists a model's parameters from its config alone.

It builds transformers' class on the meta device and describes each part. The plan uses it for
models that its own tables do not describe.
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
    name_of,
    other_parts,
    text_names,
    trunk_of,
)
from finetune.errors import UserError, on_one_line
from finetune.flops import count_attention_layers, count_heads, list_layer_configs, read_head_size
from finetune.models.experts import count_active
from finetune.models.head_factors import measure_head_factors
from finetune.models.load import build_on_meta, forget_quantization
from finetune.models.lora import names_of_parameters
from finetune.models.loss_chunks import LogitTransform
from finetune.models.quantized_layers import expert_weights

# Transformers' name of a parameter (the first name of a tied one) -> its shape.
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The parameters of one decoder layer, or of the text modules outside the layers.

    A tied parameter belongs to the first part that uses it.
    """

    shapes: Shapes
    linears: Names  # weights [out, in] of linear layers, but not of the head
    adaptable: Shapes  # weights that all-linear adapts; a tied weight has an entry for each layer
    experts: Names  # weights of routed experts
    routed: Names  # weights and biases of routed experts
    is_transposed: bool  # whether the weights of experts are [experts, in, out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's parameters, part by part. Returned by `outline_model`."""

    layers: tuple[Part, ...]
    layer_names: str  # the classes and kinds of layers with their numbers, as a text
    embedding: tuple[str, Shape]
    tail: Part  # text parameters outside layers and embedding: the final norm, the head
    head: str | None  # the name of the head's weight; None if it is tied to the embedding
    head_name: str  # the name of the head's weight, tied or not
    beside: tuple[Shapes, ...]  # of towers and projectors, then of other parameters not on text
    prefix: str  # the name of the language model within the model
    text_names: Names  # as `text_names` returns them
    heads: int  # of attention, in the layer with the most
    key_value_heads: int  # in the layer with the most
    head_size: float  # in the layer with the largest
    attending_layers: int  # number of layers with attention
    logits: LogitTransform  # what the class does to its head's scores before the softmax
    idle: int  # elements that do no work on a text token: experts not chosen, towers
    facts: ModelFacts


def outline_model(config: Mapping[str, Any], where: str) -> Outline:
    """Describes the model of a config.json, which errors call `where`.

    Raises `UserError` if transformers has no class for it, or cannot build it, or if its logits
    cannot be trained here (`measure_head_factors`).
    """
    model = build_class(config, where)
    trunk = trunk_of(model)
    layers = list_layers(model)
    # A tied parameter goes by its first name.
    names = {parameter: first for parameter, (first, *_) in names_of_parameters(model).items()}
    embedding = model.get_input_embeddings().weight
    head = head_of(model).weight
    layer_configs = list_layer_configs(trunk.config)
    heads = max(map(count_heads, layer_configs)) or 1
    # Each part describes only what no part before it has claimed, so the tail is what is left.
    claimed: set[Any] = {embedding}
    beside = _describe_beside(model, names, claimed)
    layer_parts = tuple(_describe(model, layer, names, claimed) for layer in layers)
    tail = _describe(model, model, names, claimed)
    return Outline(
        layers=layer_parts,
        layer_names=_name_layers(layers, getattr(trunk.config, "layer_types", None)),
        embedding=(names[embedding], tuple(embedding.shape)),
        tail=tail,
        head=None if head is embedding else names[head],
        head_name=f"{name_of(model, head_of(model))}.weight",
        beside=beside,
        prefix=name_of(model, trunk),
        text_names=text_names(model),
        heads=heads,
        key_value_heads=max(map(_count_key_value_heads, layer_configs)) or heads,
        head_size=max(map(read_head_size, layer_configs)),
        attending_layers=count_attention_layers(trunk.config),
        logits=measure_head_factors(model).logits,
        idle=_count_idle(model),
        facts=read_facts(model.config, where),
    )


def _count_key_value_heads(config: Any) -> int:
    """The key-value heads in a layer's config; 0 if it does not say."""
    return getattr(config, "num_key_value_heads", None) or 0


def build_class(config: Mapping[str, Any], where: str) -> Any:
    """Builds the transformers model of a config.json on the meta device.

    Raises `UserError`, which calls the config `where`, if transformers cannot build it.
    """
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.for_model(**config)
    except Exception as error:  # each family checks its config in its own way
        raise UserError(
            f"{where}: {on_one_line(error)}; name the config.json of a transformers model"
        ) from None
    forget_quantization(model_config)
    try:
        # Without it a class may make a tensor on the CPU first, which could be of any size.
        with torch.device("meta"):
            return build_on_meta(model_config, torch.float32)
    except UserError:  # a few classes read values while they are built, which meta does not have
        return build_on_meta(model_config, torch.float32)


def list_layers(model: Any) -> list[nn.Module]:
    """Finds the decoder layers of `model`.

    They are the outermost of the modules that transformers does not split over devices. If the
    class names no such modules, they are the entries of the trunk's longest module list.
    """
    layers = decoder_layers(model)
    nested = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    if outermost := [layer for layer in layers if layer not in nested]:
        return outermost
    lists = (module for module in trunk_of(model).modules() if isinstance(module, nn.ModuleList))
    return list(max(lists, key=len, default=()))


def _describe_beside(
    model: Any, names: Mapping[nn.Parameter, str], claimed: set[Any]
) -> tuple[Shapes, ...]:
    """Lists the shapes of each tower and projector, then of other parameters that are not of text.

    llava_next has such a parameter: the line break between two rows of an image.

    Args:
        claimed: The parameters and modules of the parts before, to which these are added.
    """
    beside = []
    for part in other_parts(model):
        beside.append(_claim(part.parameters(), names, claimed))
        claimed.update(part.modules())
    text_prefixes = text_names(model)
    loose = [
        parameter
        for parameter in model.parameters()
        if not names[parameter].startswith(text_prefixes)
    ]
    beside.append(_claim(loose, names, claimed))
    return tuple(shapes for shapes in beside if shapes)


def _claim(
    parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str], claimed: set[Any]
) -> dict[str, Shape]:
    """Adds those of `parameters` to `claimed` that are not in it yet, and returns their shapes."""
    unclaimed = [parameter for parameter in parameters if parameter not in claimed]
    claimed.update(unclaimed)
    return {names[parameter]: tuple(parameter.shape) for parameter in unclaimed}


def _describe(
    model: Any, part: nn.Module, names: Mapping[nn.Parameter, str], claimed: set[Any]
) -> Part:
    """Describes `part` of `model`, without what an earlier part has too.

    Args:
        claimed: The parameters and modules of earlier parts; those of `part` are added.
    """
    shapes = _claim(part.parameters(), names, claimed)
    head = head_modules(model)
    linears = [
        module for module in part.modules() if isinstance(module, nn.Linear) and module not in head
    ]
    # By module, not by parameter: each layer of a tied weight can have an adapter of its own.
    unclaimed_linears = [linear for linear in linears if linear not in claimed]
    adaptable = _list_adaptable(model, unclaimed_linears)
    claimed.update(linears)
    experts = [module for module in part.modules() if is_experts(module)]

    def name_own(parameters: Iterable[Any]) -> Names:
        """The names of those `parameters` that belong to this part."""
        return tuple(names[parameter] for parameter in parameters if names[parameter] in shapes)

    return Part(
        shapes=shapes,
        linears=name_own(linear.weight for linear in linears),
        adaptable=adaptable,
        experts=name_own(
            weight for module in experts for weight in expert_weights(module).values()
        ),
        routed=name_own(parameter for module in experts for parameter in module.parameters()),
        is_transposed=any(getattr(module, "is_transposed", False) for module in experts),
    )


def _list_adaptable(model: Any, linears: Iterable[nn.Linear]) -> Shapes:
    """Lists the weights of those `linears` to which all-linear adds an adapter, with shapes."""
    unadaptable = find_family(trunk_of(model).config.model_type).unadaptable
    module_names = {module: name for name, module in model.named_modules()}
    adaptable = {}
    for linear in linears:
        name = module_names[linear]
        _, _, last_part = name.rpartition(".")
        if last_part not in unadaptable:
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
    """Describes the layers: how many there are of each class, and of each kind in a single class.

    kinds: The config's kind of each layer; None if it has none.

    >>> class Layer: pass
    >>> _name_layers(
    ...     [Layer(), Layer(), Layer()], ["linear_attention", "linear_attention", "full_attention"]
    ... )
    '3 x Layer (2 linear_attention, 1 full_attention)'
    """
    classes = Counter(type(layer).__name__ for layer in layers)
    class_text = ", ".join(f"{count} x {name}" for name, count in classes.items())
    if len(classes) != 1 or not kinds or len(set(kinds)) == 1:
        return class_text
    kind_text = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
    return f"{class_text} ({kind_text})"
