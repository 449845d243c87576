"""Sequence parallelism: ranks share the tokens of a row, and trade them for heads, or gather them,
around attention.

A decoder layer works on this rank's tokens. Where the ranks divide the heads (DeepSpeed-Ulysses,
Jacobs et al. 2023, arXiv:2309.14509), an all-to-all before attention trades tokens for heads: a
rank gets every token of its heads. A second one trades back after attention. The backward of each
is the all-to-all that returns the gradients; under activation checkpointing every rank repeats both
in the same order. Fewer key-value heads than ranks are repeated.

More ranks than heads gather the keys and values of the row, and each attends from its own tokens
(Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Backward, their gradients are
summed over the ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.distributed.world import all_to_all


def trade_tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of this rank's tokens in, all tokens of this rank's heads out, in one all-to-all.

    Args:
        query: [rows, heads, tokens of this rank, head size].
        key, value: [rows, key-value heads, tokens of this rank, head size]. Every rank has as many
            tokens, in order of rank.

    Returns:
        [rows, heads / ranks, tokens, head size], and so on; views of one tensor where there is one
        row.
    """
    ranks = group.size()
    states = [query, *(_repeat_heads(each, ranks) for each in (key, value))]
    rows, _, tokens, _ = query.shape
    sizes = [(each.shape[1] // ranks, each.shape[3]) for each in states]
    parts = [
        # [ranks, rows, tokens, heads of a rank x head size]
        each.transpose(1, 2).reshape(rows, tokens, ranks, count * size).movedim(2, 0)
        for each, (count, size) in zip(states, sizes, strict=True)
    ]
    received = all_to_all(torch.cat(parts, dim=-1), group).movedim(0, 1).flatten(1, 2)
    split = torch.split(received, [count * size for count, size in sizes], dim=-1)
    query, key, value = (
        each.view(rows, ranks * tokens, *shape).transpose(1, 2)
        for each, shape in zip(split, sizes, strict=True)
    )
    return query, key, value


def trade_heads_for_tokens(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of this rank's heads in, all heads of this rank's tokens out: what attention
    returns.

    output: [rows, tokens, heads of this rank, head size] -> [rows, tokens of this rank, heads, head
    size].
    """
    rows, tokens, heads, size = output.shape
    sent = output.reshape(rows, group.size(), tokens // group.size(), heads * size).movedim(1, 0)
    received = all_to_all(sent, group)  # [ranks, rows, tokens of this rank, heads x head size]
    return received.movedim(0, 2).reshape(rows, tokens // group.size(), group.size() * heads, size)


def gather_keys(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[rows, heads, tokens of this rank, head size] -> [rows, heads, tokens, head size], with
    gradients.
    """
    gathered: Tensor = _GatherTokens.apply(states, group)  # type: ignore[no-untyped-call]
    return gathered


def take_heads(of_heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor [heads] that holds one number for every head."""
    return of_heads.chunk(group.size())[group.rank()]


def _repeat_heads(states: Tensor, ranks: int) -> Tensor:
    """Repeats key-value heads [rows, heads, ...] until their number is a multiple of `ranks`."""
    return states.repeat_interleave(math.lcm(states.shape[1], ranks) // states.shape[1], dim=1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_tokens(states, group, dim=2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        parts = torch.stack(grad_outputs[0].chunk(ctx.group.size(), dim=2))
        return all_to_all(parts, ctx.group).sum(0), None


def gather_tokens(states: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """[rows, tokens of this rank, ...] of every rank of a sequence -> [rows, tokens, ...], without
    gradients.
    """
    parts = [
        torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, states.contiguous(), group)
    return torch.cat(parts, dim)


def sum_over_group(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums `tensor` over the ranks of a sequence, with gradients.

    Every rank computes the same loss from the sum, so each must count 1 / ranks of that loss.

    Args:
        tensor: This rank's part of the sum.
        group: The ranks that share a sequence; None returns `tensor`.
    """
    if group is None:
        return tensor
    total: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.forward(ctx, grad_outputs[0], ctx.group), None
