"""The parts of a model: the model in its wrappers, its language model and decoder layers, and a
rank's part of a tensor.

The trunk is the language model without its output head. A vision-language model is loaded whole. If
it is trained on text alone, its other parts (vision tower, projector) are frozen, sharded with the
rest, and never computed.
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

from finetune.constants import SCORES, Names

PARTS = ("language_model", "text_model")  # transformers' names of a trunk beside other parts
IN_FILES = re.compile(rf"(?:model\.)?(?:{'|'.join(PARTS)})\.(?:model\.)?(.*)")

Stored = TypeVar("Stored")
Slices = tuple[slice, ...]
Values = Callable[[str, Slices], Tensor]
"""(the name of a parameter or persistent buffer, slices) -> the value within them, from files or
from a seed.
"""


def trunk_of(model: Any) -> Any:
    """Returns the trunk of `model`, a `...ForCausalLM` or a vision-language model: all between the
    tokens and the output head.
    """
    base = base_of(model)
    for name in PARTS:
        part = getattr(base, name, None)
        if isinstance(part, nn.Module):
            # Llama 4 has a ...ForCausalLM there
            return part.model if hasattr(part, "lm_head") else part
    return base


def head_of(model: Any) -> Any:
    """The output head of `model`, of the vocabulary or of scores; None without one."""
    head = model.get_output_embeddings()
    return getattr(model, SCORES, None) if head is None else head


def head_modules(model: Any) -> set[nn.Module]:
    """The output head and the modules in it, such as the base layer of an adapted one; none without
    a head.
    """
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
    """The model on which transformers' switches of a language model are set: the trunk, if `model`
    has other parts.
    """
    return trunk_of(model) if has_other_parts(model) else model


def has_other_parts(model: Any) -> bool:
    """Whether `model` has parts beside the language model."""
    return trunk_of(model) is not base_of(model)


def other_parts(model: Any) -> list[nn.Module]:
    """Returns the parts beside the language model: vision tower, projector."""
    if not has_other_parts(model):
        return []
    trunk = trunk_of(model)
    parts = []
    for part in base_of(model).children():
        holds_trunk = any(module is trunk for module in part.modules())
        if not holds_trunk:
            parts.append(part)
    return parts


def text_names(model: Any) -> Names:
    """The prefixes of the names of all parameters that work on text; ("",) if all do."""
    if not has_other_parts(model):
        return ("",)
    trunk = trunk_of(model)
    head = head_of(model)
    names = [name for name, module in model.named_modules() if module is trunk or module is head]
    return tuple(f"{name}." for name in names)


def take_language_model(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the language model's tensors of a vision-language checkpoint, by the names that a
    `...ForCausalLM` gives them.

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
        short = in_trunk[1] if in_trunk else name
        if short.startswith("lm_head."):
            renamed[short] = tensor
        elif in_trunk:
            renamed[f"model.{short}"] = tensor
    return renamed


def text_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that work on text, by name."""
    names = text_names(model)
    return [
        (name, module) for name, module in model.named_modules() if f"{name}.".startswith(names)
    ]


def base_of(model: Any) -> Any:
    """Returns the module that is `model` without its output head, as the forward of `model` calls
    it.
    """
    base = getattr(model, model.base_model_prefix, model)
    if base is model:  # the prefix of Llama 4's text class is not the name of its module
        base = getattr(model, "model", model)
    children = dict(base.named_children())
    # OPT's forward, and those of BART's kin, pass over the module that holds the decoder alone
    return children["decoder"] if children.keys() == {"decoder"} else base


def has_trained(model: nn.Module) -> bool:
    """Whether any parameter of `model` is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


def find_float32(model: Any, names: Iterable[str]) -> frozenset[str]:
    """Finds the names of parameters and buffers that transformers keeps in fp32 whatever the
    model's dtype.
    """
    modules = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not modules:
        return frozenset()
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, modules))})(\.|$)")
    return frozenset(filter(pattern.search, names))


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replaces the buffer of that name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, buffer)


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside the wrappers of DDP and FSDP1."""
    while isinstance(model, nn.parallel.DistributedDataParallel | Fsdp1):
        model = model.module
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of the language model: the modules that transformers would not split over
    devices.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = []
    for _, module in text_modules(model):
        # FSDP2 changes the class of a sharded module: it is FSDPLlamaDecoderLayer, say.
        if type(module).__name__.removeprefix("FSDP") in classes:
            layers.append(module)
    return layers


def tied_names(model: nn.Module) -> dict[str, str]:
    """Returns the other names of tied parameters -> the first name, as transformers names them in
    every layout.
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
    """Finds the slices of a tensor that this rank holds: all of it, if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that may be sharded.

    Unwraps torchao's tensor around a weight that FSDP gathers in 8 bits, since optimizers and
    checkpoints need the weight.
    """
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
    else:
        local = tensor
    return getattr(local, "_tensor", local)


def gather_whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, or the sum, whose parts may be on several ranks.

    All ranks of its mesh call it.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a product of `tensor` runs: autocast's, if that is on."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def place_like(like: Tensor, part: Tensor) -> Tensor:
    """Returns a tensor sharded like `like`, of which this rank has `part`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a layer's experts: one parameter has a matrix of all of them."""
    return [module for module in model.modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes `module` by one of its experts implementations."""
    return hasattr(type(module), "_apply_gate")  # set by the decorator of such classes
