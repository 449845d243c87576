"""A model's logits with a few rows of one tensor in memory at a time, so that any model's can be had on any machine."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.export.ahead import computed_ahead
from finetune.export.values import row_blocks

ROWS, TOKENS = 2, 16
# (name, start, stop) -> rows of a parameter or saved buffer; a scalar has one row, itself.
Rows = Callable[[str, int, int], torch.Tensor]
Unit = list[tuple[nn.Module, str, str]]  # (module, attribute, full name) of parameters that come and go together


def prompts(vocabulary: int) -> torch.Tensor:
    """The prompts on which logits are compared: int64[ROWS, TOKENS], the same for every model of this vocabulary.

    >>> prompts(100).shape, bool((prompts(7) < 7).all())
    (torch.Size([2, 16]), True)
    """
    return (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 7919 + 11) % vocabulary


@torch.no_grad()
def streamed_logits(model: nn.Module, rows: Rows) -> torch.Tensor:
    """The logits of `prompts`, float32[ROWS, TOKENS, vocabulary], computed in float32.

    `model` is on meta, and left so. A linear layer multiplies with a block of rows while the next is read, an embedding
    reads the rows that it is asked for, and any other module has its own parameters while its forward lasts.
    """
    hooks: list[Any] = []
    streamed: list[Any] = []
    for module, unit in _units(model):
        forward = STREAMED.get(type(module))  # a subclass may do otherwise
        if forward is not None:
            streamed.append(module)
            streamed[-1].forward = partial(forward, module, unit[0][2].rpartition(".")[0], rows)
        else:
            hooks.append(module.register_forward_pre_hook(lambda _, __, unit=unit: _fill(unit, rows)))
            hooks.append(module.register_forward_hook(lambda _, __, ___, unit=unit: _empty(unit)))
    for name, module in model.named_modules():
        _fill_buffers(name, module, rows)
    configured: Any = model
    ids = prompts(configured.config.get_text_config().vocab_size)
    try:
        logits: torch.Tensor = configured(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        for module in streamed:
            del module.forward
    return logits.float()


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, Unit]]:
    """The modules that own parameters, each with its own; where a module reads those of others within it, with all."""
    within: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in within:
            continue
        owners = [(name, module)]
        if getattr(module, "lora_magnitude_vector", None) or getattr(module, "lora_embedding_A", None):
            owners = list(module.named_modules(prefix=name))  # peft's DoRA layers and adapted embeddings
            within.update(owner for _, owner in owners)
        unit = [
            (owner, attribute, f"{owner_name}.{attribute}" if owner_name else attribute)
            for owner_name, owner in owners
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]
        if unit:
            yield module, unit


def _linear(module: nn.Linear, name: str, rows: Rows, inputs: torch.Tensor) -> torch.Tensor:
    # Made at once: small results kept between the blocks would leave the heap in pieces that no block fits into.
    result = inputs.new_empty(*inputs.shape[:-1], module.out_features)
    places = [(f"{name}.weight", *block) for block in row_blocks((module.out_features, module.in_features))]
    for (_, start, stop), block in zip(places, computed_ahead(rows, places), strict=True):
        result[..., start:stop] = functional.linear(inputs, block.float())
    return result if module.bias is None else result + rows(f"{name}.bias", 0, module.out_features).float()


def _embedding(module: nn.Embedding, name: str, rows: Rows, ids: torch.Tensor) -> torch.Tensor:
    found = [rows(f"{name}.weight", token, token + 1).float() for token in ids.flatten().tolist()]
    return torch.cat(found).reshape(*ids.shape, module.embedding_dim)


STREAMED: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.Linear: _linear, nn.Embedding: _embedding}


def _fill(unit: Unit, rows: Rows) -> None:
    for owner, attribute, name in unit:
        parameter = owner._parameters[attribute]
        assert parameter is not None
        owner._parameters[attribute] = nn.Parameter(_whole(name, parameter, rows), requires_grad=False)


def _empty(unit: Unit) -> None:
    for owner, attribute, _ in unit:
        parameter = owner._parameters[attribute]
        assert parameter is not None
        owner._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _fill_buffers(name: str, module: nn.Module, rows: Rows) -> None:
    for attribute in module._buffers.keys() - module._non_persistent_buffers_set:
        buffer = module._buffers[attribute]
        if buffer is not None:
            module._buffers[attribute] = _whole(f"{name}.{attribute}" if name else attribute, buffer, rows)


def _whole(name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
    tensor = rows(name, 0, like.shape[0] if like.dim() else 1)
    return tensor.float() if tensor.is_floating_point() else tensor
