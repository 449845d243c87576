"""Sequence parallelism: a group of ranks divides the tokens of each row.

A decoder layer works on this rank's tokens. Attention needs the others too, and gets them in one of
two ways; `divides_heads` in config/layout.py chooses.

If the heads divide evenly over the ranks, each rank attends with some of the heads
(DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). An all-to-all before attention trades
tokens for heads, so that a rank has all tokens of its heads; a second all-to-all trades back after
attention. The backward of each is an all-to-all of the gradients. Activation checkpointing repeats
both, on every rank in the same order. If key-value heads do not divide evenly, they are repeated.

Otherwise the ranks gather the keys and values of the row, and each rank attends from its own tokens
(Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). The backward sums the gradients
of keys and values over the ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from finetune.distributed.world import all_to_all


def trade_tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives all heads of this rank's tokens for all tokens of this rank's heads: one all-to-all.

    Args:
        query: [rows, heads, tokens of this rank, head size].
        key: [rows, key-value heads, tokens of this rank, head size].
        value: Like `key`, but its head size may differ.
        group: The ranks of the sequence. Each has the same number of tokens, in order of rank.

    Returns:
        Query, key and value, each [rows, heads of this rank, tokens, head size]. If there is one
        row, they are views of one tensor.
    """
    ranks = group.size()
    rows, _, tokens, _ = query.shape
    parts = []  # of query, key and value
    shapes = []  # (heads of a rank, head size) of query, key and value
    for states in (query, _repeat_heads(key, ranks), _repeat_heads(value, ranks)):
        heads = states.shape[1] // ranks
        size = states.shape[3]
        by_rank = states.transpose(1, 2).reshape(rows, tokens, ranks, heads * size)
        parts.append(by_rank.movedim(2, 0))  # [ranks, rows, tokens, heads of a rank x head size]
        shapes.append((heads, size))
    received = all_to_all(torch.cat(parts, dim=-1), group)
    all_tokens = received.movedim(0, 1).flatten(1, 2)  # [rows, tokens, features of all three]
    split = torch.split(all_tokens, [heads * size for heads, size in shapes], dim=-1)
    query, key, value = (
        states.view(rows, ranks * tokens, *shape).transpose(1, 2)
        for states, shape in zip(split, shapes, strict=True)
    )
    return query, key, value


def trade_heads_for_tokens(output: Tensor, group: ProcessGroup) -> Tensor:
    """Gives all tokens of this rank's heads for all heads of this rank's tokens, after attention.

    [rows, tokens, heads of this rank, head size] -> [rows, tokens of this rank, heads, head size].
    """
    ranks = group.size()
    rows, tokens, heads, size = output.shape
    own_tokens = tokens // ranks
    sent = output.reshape(rows, ranks, own_tokens, heads * size).movedim(1, 0)
    received = all_to_all(sent, group)  # [ranks, rows, tokens of this rank, heads x head size]
    return received.movedim(0, 2).reshape(rows, own_tokens, ranks * heads, size)


def gather_keys(states: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers the keys, or the values, of all tokens of a row, with gradients.

    [rows, heads, tokens of this rank, head size] -> [rows, heads, tokens, head size].
    """
    gathered: Tensor = _GatherTokens.apply(states, group)  # type: ignore[no-untyped-call]
    return gathered


def take_heads(by_head: Tensor, group: ProcessGroup) -> Tensor:
    """Takes this rank's heads from a tensor with one number for every head.

    [heads] -> [heads of this rank].
    """
    return by_head.chunk(group.size())[group.rank()]


def _repeat_heads(states: Tensor, ranks: int) -> Tensor:
    """Repeats each key-value head, so that the number of heads is a multiple of `ranks`.

    [rows, heads, ...] -> [rows, lcm(heads, ranks), ...]. Copies of a head are neighbors.
    """
    heads = states.shape[1]
    return states.repeat_interleave(math.lcm(heads, ranks) // heads, dim=1)


class _GatherTokens(torch.autograd.Function):
    """Gathers tokens, dimension 2; the backward sums their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_tokens(states, group, dim=2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        parts = torch.stack(grad_outputs[0].chunk(ctx.group.size(), dim=2))
        return all_to_all(parts, ctx.group).sum(0), None


def gather_tokens(states: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """Gathers all tokens of a row, without gradients.

    [rows, tokens of this rank, ...] -> [rows, tokens, ...], if `dim`, the dimension of the tokens,
    is 1.
    """
    parts = [
        torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, states.contiguous(), group)
    return torch.cat(parts, dim)


def sum_over_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums `tensor` over the ranks of a sequence, with gradients.

    Every rank computes the same loss from the sum, and the backward sums the gradients of all these
    losses. So each rank must divide its loss by the number of ranks.

    Args:
        tensor: This rank's part of the sum.
        group: The ranks of the sequence. If None, `tensor` is already the sum.
    """
    if group is None:
        return tensor
    total: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks; the backward sums its gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        summed = _SumOverRanks.forward(ctx, grad_outputs[0], ctx.group)
        return summed, None
