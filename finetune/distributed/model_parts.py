"""The parts of a model: what its wrappers hold, its language model and decoder layers, and a rank's
part of a tensor.

A vision-language model is loaded whole. Its language model and output head are trained on text; the
rest (the vision tower, the projector) is frozen, sharded with them, and never computed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.constants import SCORES

PARTS = ("language_model", "text_model")  # what transformers calls it
IN_FILES = re.compile(rf"(?:model\.)?(?:{'|'.join(PARTS)})\.(?:model\.)?(.*)")

Stored = TypeVar("Stored")
Slices = tuple[slice, ...]
Values = Callable[[str, Slices], torch.Tensor]
"""The value of a named parameter or persistent buffer within the given slices: from files, from a
seed, wherever.
"""


def trunk_of(model: Any) -> Any:
    """Returns the trunk of `model`, a `...ForCausalLM` or a vision-language one: all between the
    tokens and the output head.
    """
    base = base_of(model)
    part = next(
        (part for name in PARTS if isinstance(part := getattr(base, name, None), nn.Module)), base
    )
    # Llama 4 holds a ...ForCausalLM
    if hasattr(part, "lm_head") and part is not base:
        return part.model
    return part


def head_of(model: Any) -> Any:
    """The output head of `model`: the vocabulary's, or that of scores."""
    head = model.get_output_embeddings()
    return getattr(model, SCORES, None) if head is None else head


def head_modules(model: Any) -> set[nn.Module]:
    """The output head's modules: of an adapted head, its base layer too; none without a head."""
    head = head_of(model)
    return set() if head is None else set(head.modules())


def has_scores(model: Any) -> bool:
    """Whether the output head computes scores of a document, and not of the tokens of a
    vocabulary.
    """
    return (
        isinstance(getattr(model, SCORES, None), nn.Linear)
        and model.get_output_embeddings() is None
    )


def language_model_of(model: Any) -> Any:
    """The model that transformers' switches of its language model are to be set on: itself, if it
    is nothing else.
    """
    return trunk_of(model) if has_other_parts(model) else model


def has_other_parts(model: Any) -> bool:
    """Whether `model` is more than a language model."""
    return trunk_of(model) is not base_of(model)


def other_parts(model: Any) -> list[nn.Module]:
    """Returns the parts beside the language model: vision tower, projector."""
    if not has_other_parts(model):
        return []
    trunk = trunk_of(model)
    return [
        part
        for part in base_of(model).children()
        if all(module is not trunk for module in part.modules())
    ]


def text_names(model: Any) -> tuple[str, ...]:
    """The beginnings of the names of all parameters that work on text; ("",) where all do."""
    if not has_other_parts(model):
        return ("",)
    ends = (trunk_of(model), head_of(model))
    return tuple(
        f"{name}." for name, module in model.named_modules() if any(module is end for end in ends)
    )


def take_language_model(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The language model's tensors in the files of a vision-language checkpoint, by the names of
    its text class.

    >>> names = (
    ...     "model.language_model.norm.weight",
    ...     "language_model.lm_head.weight",
    ...     "model.visual.norm.weight",
    ... )
    >>> list(take_language_model(dict.fromkeys(names)))
    ['model.norm.weight', 'lm_head.weight']
    """
    renamed = {}
    for name, tensor in stored.items():
        inside = IN_FILES.fullmatch(name)
        short = inside[1] if inside else name
        if inside or short.startswith("lm_head."):
            renamed[short if short.startswith("lm_head.") else f"model.{short}"] = tensor
    return renamed


def text_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that work on text, by name."""
    names = text_names(model)
    return [
        (name, module) for name, module in model.named_modules() if f"{name}.".startswith(names)
    ]


def base_of(model: Any) -> Any:
    """`model` without its output head."""
    inner = getattr(model, model.base_model_prefix, model)
    # Llama 4's text class has another name there
    return getattr(model, "model", model) if inner is model else inner


def has_trained(model: nn.Module) -> bool:
    """Whether anything in `model` is trained; nothing of a teacher is."""
    return any(parameter.requires_grad for parameter in model.parameters())


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside the wrappers of DDP and FSDP1."""
    while isinstance(model, nn.parallel.DistributedDataParallel | Fsdp1):
        model = model.module
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the language model that transformers itself would not split over devices."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives a sharded module a class of its own, FSDP<its class>.
    return [
        module
        for _, module in text_modules(model)
        if type(module).__name__.removeprefix("FSDP") in classes
    ]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The second names of tied parameters -> the first; both as transformers names them, in every
    layout.
    """
    first: dict[nn.Parameter, str] = {}
    names = (
        (clean_tensor_name(name), parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return {
        name: first[parameter]
        for name, parameter in names
        if first.setdefault(parameter, name) != name
    }


def find_local_slices(tensor: torch.Tensor) -> Slices:
    """The slices of the whole tensor that this rank holds; all of it if the tensor is not
    sharded.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded.

    Unwraps torchao's tensor around a weight that FSDP gathers in 8 bits: state and update work on
    the weight itself.
    """
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
    else:
        local = tensor
    return getattr(local, "_tensor", local)


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, or of a sum, whose parts may be on several ranks.

    All ranks of its mesh call it.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a product of `tensor` runs: autocast's, where that is on."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def place_like(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor of this rank's `part`, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer in one parameter each."""
    return [module for module in model.modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes `module` by one of its experts implementations, which its
    decorator marks.
    """
    return hasattr(type(module), "_apply_gate")
