"""Layers that carry a state from token to token, over packed rows: the state starts again with each document.

Linear attention, Mamba, RWKV, xLSTM and short convolutions are such layers.

With the kernels' packages installed, transformers' own modules take the boundaries of all documents at once. Without
them, and in families whose modules would ignore the boundaries, a module runs over one document after the other.
config/families.py says which modules these are, and what they take.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from finetune.config.families import find_family
from finetune.distributed.language_model import trunk_of


@dataclass(slots=True)
class _Documents:
    """The documents of the forward that is running."""

    lengths: list[int] | None = None  # of a packed row; None: each row is one document
    boundaries: dict[str, Tensor] | None = None  # the arguments of transformers' modules, where kernels take them


def install_recurrence(model: Any) -> None:
    """Makes the recurrent modules of `model`, a `...ForCausalLM`, compute each document of a packed row by itself.

    Called before the model is sharded and before the trunk's other hooks, which drop the boundaries.
    """
    trunk = trunk_of(model)
    recurrence = find_family(trunk.config.model_type).recurrence
    if recurrence is None:
        return
    current = _Documents()
    has_kernels = bool(recurrence.packages) and all(map(importlib.util.find_spec, recurrence.packages))
    arguments = recurrence.arguments if has_kernels else ()
    trunk.register_forward_pre_hook(partial(_read_documents, current, arguments), with_kwargs=True)
    for module in recurrent_modules(model):
        module.forward = MethodType(partial(_run, type(module).forward, current), module)


def recurrent_modules(model: Any) -> list[nn.Module]:
    """Those of a model that carry a state from token to token."""
    trunk = trunk_of(model)
    recurrence = find_family(trunk.config.model_type).recurrence
    ends = () if recurrence is None else recurrence.modules
    return [module for module in trunk.modules() if type(module).__name__.endswith(ends)]


def _read_documents(
    current: _Documents, arguments: tuple[str, ...], _trunk: nn.Module, _args: Any, kwargs: dict[str, Any]
) -> None:
    """Sets `current` from the arguments of a forward."""
    current.lengths = current.boundaries = None
    starts: Tensor | None = kwargs.get("cu_seq_lens")
    if starts is None or len(starts) == 2:
        return
    if not arguments:
        current.lengths = list(kwargs.get("packed_lengths") or starts.diff().tolist())
        return
    tokens = kwargs["position_ids"].shape[-1]
    numbers = torch.arange(len(starts) - 1, dtype=torch.int32, device=starts.device)
    made = {
        "cu_seq_lens_q": starts.long(),
        "seq_idx": numbers.repeat_interleave(starts.diff(), output_size=tokens)[None],
    }
    current.boundaries = {name: made[name] for name in arguments}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _run(forward: Callable[..., Any], current: _Documents, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a recurrent module over the documents of `current`."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.numel() == 0:  # that of the packed attention, which Mamba's trunk hands on
        kwargs["attention_mask"] = None
    if current.boundaries is not None:
        return forward(module, *args, **kwargs | current.boundaries)
    lengths = current.lengths
    if lengths is None:
        return forward(module, *args, **kwargs)
    tokens = sum(lengths)

    def split(tensor: Tensor) -> Any:
        # One split, whose backward is one concatenation. That of a slice would fill the whole row for each document.
        is_of_tokens = tensor.dim() > 1 and tensor.shape[1] == tokens
        return iter(torch.split(tensor, lengths, dim=1)) if is_of_tokens else iter([tensor] * len(lengths))

    leaves, structure = tree_flatten((args, kwargs))
    columns = [split(leaf) if isinstance(leaf, Tensor) else iter([leaf] * len(lengths)) for leaf in leaves]
    outputs = []
    for row in zip(*columns, strict=True):
        own_args, own_kwargs = tree_unflatten(row, structure)
        outputs.append(forward(module, *own_args, **own_kwargs))
    return _join(outputs, lengths)


def _join(outputs: list[Any], lengths: list[int]) -> Any:
    """The outputs of all documents in one row; of what is no output of tokens, a last state, the last document's."""
    flat = [tree_flatten(output)[0] for output in outputs]
    joined = []
    for column in zip(*flat, strict=True):
        is_of_tokens = all(
            isinstance(each, Tensor) and each.dim() > 1 and each.shape[1] == length
            for each, length in zip(column, lengths, strict=True)
        )
        joined.append(torch.cat(column, dim=1) if is_of_tokens else column[-1])
    return tree_unflatten(joined, tree_flatten(outputs[-1])[1])
