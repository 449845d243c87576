"""Sequence parallelism: the ranks of a sequence divide the tokens of a row, and trade them for
heads, or gather them, around attention.

A decoder layer works on this rank's tokens. If there are enough heads, the ranks divide them
(DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): an all-to-all before attention trades
tokens for heads, so that a rank has every token of its heads, and a second one trades back after
attention. The backward of each is an all-to-all of the gradients; under activation checkpointing
every rank repeats both in the same order. Fewer key-value heads than ranks are repeated.

If there are more ranks than heads, they gather the keys and values of the row, and each attends
from its own tokens (Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). The
backward sums the gradients of keys and values over the ranks.
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
    """Trades all heads of this rank's tokens for all tokens of this rank's heads, in one
    all-to-all.

    Args:
        query: [rows, heads, tokens of this rank, head size].
        key: [rows, key-value heads, tokens of this rank, head size].
        value: As `key`, with its own head size.
        group: The ranks of the sequence. Each has the same number of tokens, in order of rank.

    Returns:
        [rows, heads / ranks, tokens, head size] of each; views of one tensor if there is one row.
    """
    ranks = group.size()
    rows, _, tokens, _ = query.shape
    parts = []
    shapes = []  # (heads of a rank, head size)
    for states in (query, _repeat_heads(key, ranks), _repeat_heads(value, ranks)):
        heads = states.shape[1] // ranks
        size = states.shape[3]
        by_rank = states.transpose(1, 2).reshape(rows, tokens, ranks, heads * size)
        parts.append(by_rank.movedim(2, 0))  # [ranks, rows, tokens, heads of a rank x head size]
        shapes.append((heads, size))
    received = all_to_all(torch.cat(parts, dim=-1), group).movedim(0, 1).flatten(1, 2)
    split = torch.split(received, [heads * size for heads, size in shapes], dim=-1)
    query, key, value = (
        states.view(rows, ranks * tokens, *shape).transpose(1, 2)
        for states, shape in zip(split, shapes, strict=True)
    )
    return query, key, value


def trade_heads_for_tokens(output: Tensor, group: ProcessGroup) -> Tensor:
    """Trades the output of attention, all tokens of this rank's heads, for all heads of this rank's
    tokens.

    [rows, tokens, heads of this rank, head size] -> [rows, tokens of this rank, heads, head size].
    """
    rows, tokens, heads, size = output.shape
    sent = output.reshape(rows, group.size(), tokens // group.size(), heads * size).movedim(1, 0)
    received = all_to_all(sent, group)  # [ranks, rows, tokens of this rank, heads x head size]
    return received.movedim(0, 2).reshape(rows, tokens // group.size(), group.size() * heads, size)


def gather_keys(states: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers the keys or values of the row's tokens, with gradients.

    [rows, heads, tokens of this rank, head size] -> [rows, heads, tokens, head size].
    """
    gathered: Tensor = _GatherTokens.apply(states, group)  # type: ignore[no-untyped-call]
    return gathered


def take_heads(of_heads: Tensor, group: ProcessGroup) -> Tensor:
    """Takes this rank's part of a tensor that has one number for every head, [heads]."""
    return of_heads.chunk(group.size())[group.rank()]


def _repeat_heads(states: Tensor, ranks: int) -> Tensor:
    """Repeats key-value heads [rows, heads, ...] until their number is a multiple of `ranks`."""
    return states.repeat_interleave(math.lcm(states.shape[1], ranks) // states.shape[1], dim=1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_tokens(states, group, dim=2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        parts = torch.stack(grad_outputs[0].chunk(ctx.group.size(), dim=2))
        return all_to_all(parts, ctx.group).sum(0), None


def gather_tokens(states: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """Gathers the tokens of a row, without gradients.

    [rows, tokens of this rank, ...] -> [rows, tokens, ...]; `dim`: that of the tokens.
    """
    parts = [
        torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, states.contiguous(), group)
    return torch.cat(parts, dim)


def sum_over_group(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums `tensor` over the ranks of a sequence, with gradients.

    Every rank computes the same loss from the sum, so each must count 1 / ranks of that loss.

    Args:
        tensor: This rank's part of the sum.
        group: The ranks of the sequence; None returns `tensor`.
    """
    if group is None:
        return tensor
    total: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.forward(ctx, grad_outputs[0], ctx.group), None
