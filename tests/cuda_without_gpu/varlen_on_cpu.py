"""torch's varlen attention kernels for the CPU, so that the branch that CUDA takes runs, differentiates and compiles here."""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from finetune.models.attention_kernels import NEEDS_ENABLE_GQA, ScoreOptions


@cache
def register_cpu_kernels() -> None:
    """Registers plain kernels behind `torch.nn.attention.varlen.varlen_attn`, whose fake ones and autograd stay torch's."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def takes_varlen(_query: Tensor, _value: Tensor, options: ScoreOptions) -> bool:
    """In place of `document_attention._can_use_varlen`: on a CPU, in any precision, what goes to the kernel on CUDA."""
    return options.is_fusible and options.dropout == 0.0


def check_operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    *_: Any,
) -> None:
    """Refuses what ATen's `mha_varlen_fwd` refuses on CUDA, and what is neither causal nor to all of a document."""
    left, right = window_size
    if right == 0:
        assert is_causal == (left < 0), "a window is no causal attention of the kernel's"
    else:
        assert (left, right, is_causal) == (-1, -1, False), "all of a document is seen"
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32, (
        "mha_varlen_fwd: cu_seqlens must have dtype int32"
    )
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "the heads have one size"
    assert query.shape[-1] % 8 == 0, "mha_varlen_fwd: head_size should be a multiple of 8; pad it"
    assert query.shape[-1] <= 256, "mha_varlen_fwd: head dimension at most 256"
    assert enable_gqa or not NEEDS_ENABLE_GQA or query.shape[1] == key.shape[1] == value.shape[1]
    assert all(each.stride(-1) == 1 for each in (query, key, value)), (
        "mha_varlen_fwd: contiguous last dimension"
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, heads, head size] of each -> the attended values, log-sum-exp and random state; the last two are not read."""
    check_operands(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, *rest
    )
    assert int(cu_seq_q.diff().max()) <= max_q and int(cu_seq_k.diff().max()) <= max_k
    out = torch.empty_like(query)
    for rows, seen, weights in _weights(query, key, cu_seq_q, cu_seq_k, scale, window_size):
        out[rows] = (weights @ _repeated(value[seen], query)).transpose(0, 1)
    return (
        out,
        query.new_empty(query.shape[1], len(query), dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Any = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to query, key and value: Dao et al. 2022 (FlashAttention), appendix B.2."""
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for rows, seen, weights in _weights(query, key, cu_seq_q, cu_seq_k, scale, window_size):
        upstream = grad_out[rows].transpose(0, 1)
        to_weights = upstream @ _repeated(value[seen], query).transpose(1, 2)
        to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True)) * factor
        grads[0][rows] = (to_scores @ _repeated(key[seen], query)).transpose(0, 1)
        of_heads = (
            to_scores.transpose(1, 2) @ query[rows].transpose(0, 1),
            weights.transpose(1, 2) @ upstream,
        )
        for grad, each in zip(grads[1:], of_heads, strict=True):
            grad[seen] = each.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return grads


def _weights(
    query: Tensor,
    key: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    scale: float | None,
    window_size: Any,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """For each document its queries, which are the last of its tokens, its keys, and the attention weights [heads, queries, keys]."""
    left, right = window_size
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for spans in zip(
        itertools.pairwise(of_queries.tolist()), itertools.pairwise(of_keys.tolist()), strict=True
    ):
        rows, seen = (slice(*span) for span in spans)
        tokens, keys = (end - start for start, end in spans)
        visible = torch.ones(tokens, keys, dtype=torch.bool)
        visible = visible if right < 0 else visible.tril(keys - tokens)
        visible = visible if left < 0 else visible.triu(keys - tokens - left)
        scores = query[rows].transpose(0, 1) @ _repeated(key[seen], query).transpose(1, 2) * factor
        yield rows, seen, scores.masked_fill(~visible, -1e30).softmax(-1)


def _repeated(states: Tensor, query: Tensor) -> Tensor:
    """Keys or values [tokens, key-value heads, head size] for every head of `query`: [heads, tokens, head size]."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1).transpose(0, 1)
