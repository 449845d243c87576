"""The language model inside a model: of a vision-language one a part, of any other all of it.

A vision-language model is loaded whole. Its language model and output head are trained on text; the rest (the vision
tower, the projector) is frozen, sharded with them, and never computed.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

PARTS = ("language_model", "text_model")  # what transformers calls it
IN_FILES = re.compile(rf"(?:model\.)?(?:{'|'.join(PARTS)})\.(?:model\.)?(.*)")

Stored = TypeVar("Stored")


def trunk_of(model: Any) -> Any:
    """What lies between the tokens and the output head of `model`, a `...ForCausalLM` or a vision-language one."""
    base = base_of(model)
    part = next((part for name in PARTS if isinstance(part := getattr(base, name, None), nn.Module)), base)
    return part.model if hasattr(part, "lm_head") and part is not base else part  # Llama 4 holds a ...ForCausalLM


def language_model_of(model: Any) -> Any:
    """The model that transformers' switches of its language model are to be set on: itself, if it is nothing else."""
    return trunk_of(model) if has_other_parts(model) else model


def has_other_parts(model: Any) -> bool:
    """Whether `model` is more than a language model."""
    return trunk_of(model) is not base_of(model)


def other_parts(model: Any) -> list[nn.Module]:
    """What is beside the language model: vision tower, projector."""
    if not has_other_parts(model):
        return []
    trunk = trunk_of(model)
    return [part for part in base_of(model).children() if all(module is not trunk for module in part.modules())]


def text_names(model: Any) -> tuple[str, ...]:
    """The beginnings of the names of all parameters that work on text; ("",) where all do."""
    if not has_other_parts(model):
        return ("",)
    ends = (trunk_of(model), model.get_output_embeddings())
    return tuple(f"{name}." for name, module in model.named_modules() if any(module is end for end in ends))


def take_language_model(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The language model's tensors in the files of a vision-language checkpoint, by the names of its text class.

    >>> names = "model.language_model.norm.weight", "language_model.lm_head.weight", "model.visual.norm.weight"
    >>> list(take_language_model(dict.fromkeys(names)))
    ['model.norm.weight', 'lm_head.weight']
    """
    found = {}
    for name, tensor in stored.items():
        inside = IN_FILES.fullmatch(name)
        short = inside[1] if inside else name
        if inside or short.startswith("lm_head."):
            found[short if short.startswith("lm_head.") else f"model.{short}"] = tensor
    return found


def text_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that work on text, by name."""
    names = text_names(model)
    return [(name, module) for name, module in model.named_modules() if f"{name}.".startswith(names)]


def base_of(model: Any) -> Any:
    """`model` without its output head."""
    found = getattr(model, model.base_model_prefix, model)
    return getattr(model, "model", model) if found is model else found  # Llama 4's text class has another name there
