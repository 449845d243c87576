"""Finds the parts of a model, and a rank's part of a tensor.

The parts are the transformers model inside its wrappers, the language model, the trunk (the
language model without its output head) and the decoder layers. A vision-language model is loaded
whole. If it is trained on text alone, its other parts (vision tower, projector) are frozen, sharded
with the rest, and never computed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.config.module_names import is_adapter
from finetune.constants import SCORES, Names

# the names that transformers gives the language model inside a vision-language model
PARTS = ("language_model", "text_model")
# the name in a file of a language model's tensor; its group is the name without the prefixes
IN_FILES = re.compile(rf"(?:model\.)?(?:{'|'.join(PARTS)})\.(?:model\.)?(.*)")

Stored = TypeVar("Stored")
Slices = tuple[slice, ...]
Values = Callable[[str, Slices], Tensor]
"""A function (name of a parameter or persistent buffer, slices) -> the values within the slices,
from files or from a seed.
"""


def trunk_of(model: Any) -> Any:
    """Returns the trunk of `model`: embedding, decoder layers and last norm, without output head.

    `model` is a `...ForCausalLM` or a vision-language model.
    """
    base = base_of(model)
    for name in PARTS:
        part = getattr(base, name, None)
        if isinstance(part, nn.Module):
            # Llama 4's `language_model` is a ...ForCausalLM, with the trunk inside
            return part.model if hasattr(part, "lm_head") else part
    return base


def head_of(model: Any) -> Any:
    """Returns the output head of `model`, over the vocabulary or of scores; None without a head."""
    head = model.get_output_embeddings()
    return getattr(model, SCORES, None) if head is None else head


def head_modules(model: Any) -> set[nn.Module]:
    """Returns the output head and all modules inside it; empty if `model` has no head.

    A head with an adapter has modules inside, such as its base layer.
    """
    head = head_of(model)
    return set() if head is None else set(head.modules())


def has_scores(model: Any) -> bool:
    """Returns whether the output head scores documents, in place of the tokens of a vocabulary."""
    return (
        isinstance(getattr(model, SCORES, None), nn.Linear)
        and model.get_output_embeddings() is None
    )


def language_model_of(model: Any) -> Any:
    """Returns the module that takes transformers' settings of a language model.

    It is the trunk of a vision-language model, and else `model`.
    """
    return trunk_of(model) if has_other_parts(model) else model


def has_other_parts(model: Any) -> bool:
    """Returns whether `model` has parts beside the language model, such as a vision tower."""
    return trunk_of(model) is not base_of(model)


def other_parts(model: Any) -> list[nn.Module]:
    """Returns the parts beside the language model (vision tower, projector); empty if none."""
    if not has_other_parts(model):
        return []
    trunk = trunk_of(model)
    parts = []
    for part in base_of(model).children():
        holds_trunk = any(module is trunk for module in part.modules())
        if not holds_trunk:
            parts.append(part)
    return parts


def trains_tower(model: Any) -> bool:
    """Whether a part beside the language model is trained: a vision tower or a projector."""
    return any(
        parameter.requires_grad for part in other_parts(model) for parameter in part.parameters()
    )


def text_names(model: Any) -> Names:
    """Returns the name prefixes of the parameters that work on text: those of trunk and head.

    Without other parts it is the empty prefix, with which every name begins.
    """
    if not has_other_parts(model):
        return ("",)
    trunk = trunk_of(model)
    head = head_of(model)
    names = [name for name, module in model.named_modules() if module is trunk or module is head]
    return tuple(f"{name}." for name in names)


def take_language_model(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the language model's tensors out of a vision-language checkpoint.

    Their names become those of a `...ForCausalLM`.

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
        in_trunk = IN_FILES.fullmatch(name)
        short_name = in_trunk[1] if in_trunk else name
        if short_name.startswith("lm_head."):
            renamed[short_name] = tensor
        elif in_trunk:
            renamed[f"model.{short_name}"] = tensor
    return renamed


def text_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Lists (name, module) of each module of `model` that works on text."""
    prefixes = text_names(model)
    return [
        (name, module) for name, module in model.named_modules() if f"{name}.".startswith(prefixes)
    ]


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Returns the name of a module within `model`."""
    names: dict[nn.Module, str] = {each: name for name, each in model.named_modules()}
    return names[module]


def text_linears(model: Any) -> list[tuple[str, nn.Linear]]:
    """Lists (name, layer) of each linear layer on text, without the output head and adapters."""
    head = head_modules(model)
    return [
        (name, module)
        for name, module in text_modules(model)
        if isinstance(module, nn.Linear) and module not in head and not is_adapter(f"{name}.")
    ]


def base_of(model: Any) -> Any:
    """Returns the module that the forward of `model` calls before the output head.

    For a model without such a module it is `model`.
    """
    base = getattr(model, model.base_model_prefix, model)
    if base is model:  # the prefix of Llama 4's text class is not the name of its module
        base = getattr(model, "model", model)
    children = dict(base.named_children())
    # In OPT and the BART family, a module whose only child is the decoder lies between, and the
    # forward of `model` calls the decoder directly.
    return children["decoder"] if children.keys() == {"decoder"} else base


def has_trained(model: nn.Module) -> bool:
    """Returns whether any parameter of `model` is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


def find_float32(model: Any, names: Iterable[str]) -> frozenset[str]:
    """Returns those of `names` that transformers keeps in fp32, whatever the model's dtype.

    `names` are names of parameters and buffers.
    """
    modules = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not modules:
        return frozenset()
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, modules))})(\.|$)")
    return frozenset(filter(pattern.search, names))


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces the parameter or buffer of `model` with the given dotted name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)


def unwrap(model: nn.Module) -> Any:
    """Returns the transformers model inside the wrappers of DDP and FSDP1."""
    while isinstance(model, nn.parallel.DistributedDataParallel | Fsdp1):
        model = model.module
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Lists the decoder layers of the language model.

    They are the modules of the classes that transformers does not split over devices.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = []
    for _, module in text_modules(model):
        # FSDP2 changes the class of a sharded module, for example to FSDPLlamaDecoderLayer.
        if type(module).__name__.removeprefix("FSDP") in classes:
            layers.append(module)
    return layers


def tied_names(model: nn.Module) -> dict[str, str]:
    """Returns each further name of a tied parameter -> its first name.

    The names are those of the unwrapped transformers model, in every layout.
    """
    first_names: dict[nn.Parameter, str] = {}
    tied = {}
    for wrapped_name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_tensor_name(wrapped_name)
        first = first_names.setdefault(parameter, name)
        if first != name:
            tied[name] = first
    return tied


def find_local_slices(tensor: Tensor) -> Slices:
    """Returns the slices of a tensor that this rank holds: all of it if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor; the tensor itself if it is not sharded.

    Under FSDP with 8-bit all-gathers, torchao wraps the weight in a tensor of its own. That wrapper
    is removed, since optimizers and checkpoints need the weight.
    """
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
    else:
        local = tensor
    return getattr(local, "_tensor", local)


def gather_whole(tensor: Tensor) -> Tensor:
    """Returns a tensor whole: shards are gathered, partial sums added up.

    All ranks of the tensor's mesh call it. A plain tensor is returned as it is.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product with `tensor` runs.

    It is autocast's dtype while autocast is on, else the tensor's.
    """
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def place_like(like: Tensor, part: Tensor) -> Tensor:
    """Returns a tensor that is sharded like `like` and has `part` as this rank's shard.

    It is `part` if `like` is not sharded.
    """
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Lists the modules that hold a layer's experts, stacked: a parameter has those of all."""
    return [module for module in model.modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Returns whether `module` holds experts that transformers computes by a chosen kernel."""
    # transformers' decorator of such classes, `use_experts_implementation`, sets this attribute
    return hasattr(type(module), "_apply_gate")
