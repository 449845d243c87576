"""A model's logits, computed with a few rows of one tensor in memory at a time: any model's, on any machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.errors import UserError
from finetune.export.blocks import prefetch, row_blocks
from finetune.models.moe.experts import is_experts

ROWS, TOKENS = 2, 16
# (name, start, stop) -> rows of a parameter or saved buffer; a scalar has one row, itself.
Rows = Callable[[str, int, int], torch.Tensor]


def prompts(vocabulary: int) -> torch.Tensor:
    """The prompts on which logits are compared: int64[ROWS, TOKENS], the same for every model of this vocabulary.

    >>> prompts(100).shape, bool((prompts(7) < 7).all())
    (torch.Size([2, 16]), True)
    """
    return (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 7919 + 11) % vocabulary


@torch.no_grad()
def stream_logits(model: nn.Module, rows: Rows) -> torch.Tensor:
    """The logits of `prompts`, float32[ROWS, TOKENS, vocabulary], computed in float32.

    Raises `UserError` where the model computes with something that has no values.
    """
    plain: Any = model
    with stream(model, [rows]):
        logits: torch.Tensor = plain(
            input_ids=prompts(plain.config.get_text_config().vocab_size), use_cache=False
        ).logits
    return logits.float()


@contextmanager
def stream(model: nn.Module, variants: Sequence[Rows]) -> Iterator[None]:
    """In this block `model`, which is on meta and stays there, computes with values that are read as they are needed.

    A linear layer multiplies with a block of rows while the next is read, an embedding reads the rows of its tokens, and any
    other parameter is read when a module, its owner or another, uses it. With several `variants` of the model the inputs are
    those of each, one after the other in dimension 0, and only the weights of linear layers may differ.
    """
    parameters = {module: module._parameters for module in model.modules()}
    read = _Reader(variants[0])
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        forward = STREAMED.get(type(module))  # a subclass may compute something else
        if forward is not None:
            module.forward = partial(forward, module, name, variants)
        stored = _StoredExperts if is_experts(module) else _StoredParameters
        module.__dict__["_parameters"] = stored(module._parameters, prefix, read)
        _read_buffers(prefix, module, variants[0])
    try:
        with _NoMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        for module, own in parameters.items():
            module.__dict__["_parameters"] = own
            if type(module) in STREAMED:
                del module.forward


class _Reader:
    """Reads whole tensors. The last one is kept: a module may ask for it again, if only for its dtype."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.latest: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if self.latest is None or self.latest[0] != name:
            self.latest = None  # freed before the next is read
            self.latest = (name, _read_whole(name, like, self.rows))
        return self.latest[1]


class _StoredParameters(dict[str, nn.Parameter | None]):
    """A module's parameters on meta, each of which is read when an attribute of the module is.

    A hook around its owner's forward would not suffice: Mamba's mixers read the weight of their convolution, and DoRA that
    of its base layer, without calling them.
    """

    def __init__(self, on_meta: Mapping[str, nn.Parameter | None], prefix: str, read: _Reader) -> None:
        super().__init__(on_meta)
        self.prefix, self.read = prefix, read

    def __getitem__(self, attribute: str) -> Any:
        on_meta = super().__getitem__(attribute)
        return None if on_meta is None else self.read(self.prefix + attribute, on_meta)


class _StoredExperts(_StoredParameters):
    """The parameters of all experts of a layer, of which one expert's are read at a time, as the loop over them uses them."""

    def __getitem__(self, attribute: str) -> Any:
        on_meta = dict.__getitem__(self, attribute)
        return None if on_meta is None else _EachExpert(self.prefix + attribute, self.read.rows)


class _EachExpert:
    """A parameter that is indexed by the number of an expert, and by nothing else."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.name, self.rows = name, rows

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self.rows(self.name, int(expert), int(expert) + 1)[0].float()


class _NoMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises on a computation with a meta tensor, which has no values: a copy of one is whatever was in memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, result))):
            raise UserError(
                f"the logits cannot be computed a tensor at a time: {function} has an operand without values"
            )
        return result


def _linear(module: nn.Linear, name: str, variants: Sequence[Rows], inputs: torch.Tensor) -> torch.Tensor:
    # Allocated once: small results kept between the blocks would fragment the heap until no block fits.
    result = inputs.new_empty(*inputs.shape[:-1], module.out_features)
    places = list(row_blocks((module.out_features, module.in_features)))

    def read_blocks(start: int, stop: int) -> list[torch.Tensor]:
        return [rows(f"{name}.weight", start, stop) for rows in variants]

    for (start, stop), blocks in zip(places, prefetch(read_blocks, places), strict=True):
        parts = zip(result.chunk(len(variants)), inputs.chunk(len(variants)), blocks, strict=True)
        for own_result, own_inputs, block in parts:
            own_result[..., start:stop] = functional.linear(own_inputs, block.float())
    return result if module.bias is None else result + module.bias


def _embedding(module: nn.Embedding, name: str, variants: Sequence[Rows], ids: torch.Tensor) -> torch.Tensor:
    tokens, places = torch.unique(ids, return_inverse=True)
    found = torch.cat([variants[0](f"{name}.weight", token, token + 1).float() for token in tokens.tolist()])
    return found[places]


STREAMED: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.Linear: _linear, nn.Embedding: _embedding}


def _read_buffers(prefix: str, module: nn.Module, rows: Rows) -> None:
    for attribute in module._buffers.keys() - module._non_persistent_buffers_set:
        buffer = module._buffers[attribute]
        if buffer is not None:
            module._buffers[attribute] = _read_whole(prefix + attribute, buffer, rows)


def _read_whole(name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
    tensor = rows(name, 0, like.shape[0] if like.dim() else 1)
    return tensor.float() if tensor.is_floating_point() else tensor
