"""Log-probabilities of the labels, token by token, of a linear head in chunks: for losses that weigh each document
otherwise.

The gradient to a token's hidden state is that of its log-probability times one number, which the backward brings: it is
prepared in the forward, as by `models/head/cross_entropy.py`. The weight's is a sum over tokens with those numbers;
where the head is trained, the backward computes the chunks a second time for it.
"""

from typing import Any

import torch
from torch import Tensor

from finetune.models.head.chunks import (
    PLAIN,
    ChunkOptions,
    compute_in_chunks,
    find_local_head,
    find_needed_gradients,
    product_dtype,
    scatter_rows,
)
from finetune.models.head.cross_entropy import CrossEntropyHead


def head_log_probabilities(
    head: CrossEntropyHead,
    hidden: Tensor,
    labels: Tensor,
    trained_positions: Tensor | None,
    temperature: float = 1.0,
) -> Tensor:
    """A `HeadFunction`: `model(..., head_function=head_log_probabilities)` returns fp32[trained positions].

    `temperature`: what the logits are divided by.
    """
    if trained_positions is None:
        trained_positions = torch.arange(len(labels), device=labels.device)
    weight, bias, shard = find_local_head(head.weight, head.bias)
    chunks = ChunkOptions(head.logits._replace(temperature=temperature), shard=shard, function=head.chunk_function)
    return linear_log_probabilities(hidden, weight, labels, trained_positions, chunks, bias=bias)


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    trained_positions: Tensor,
    chunks: ChunkOptions = PLAIN,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """log softmax(hidden @ weight.T + bias)[label] at each trained position.

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden]; its gradient is accumulated in fp32, and not computed where it is frozen.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        trained_positions: int64[positions], which no index comes in twice; one without a label gets 0 and no gradient.
        chunks: without label smoothing.
        bias: [vocabulary] or None.
    Returns:
        fp32[positions]. Under autocast the products run in its type, the softmax always in fp32.
    """
    tensors, needs_grad = (hidden, weight, bias, labels, trained_positions), find_needed_gradients(hidden, weight, bias)
    found: Tensor = _LinearLogProbabilities.apply(*tensors, chunks, needs_grad)  # type: ignore[no-untyped-call]
    return found


class _LinearLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        positions: Tensor,
        chunks: ChunkOptions,
        needs_grad: tuple[bool, ...],
    ) -> Tensor:
        dtype = product_dtype(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            trained, ids = hidden[positions].to(dtype), labels[positions]
            found = compute_in_chunks(trained, weight.to(dtype), bias, ids, chunks, (needs_grad[0], False, False))
        recomputes = any(needs_grad[1:])
        # Parameters are saved by autograd itself, so that FSDP has gathered them again when the backward reads them.
        ctx.save_for_backward(*(weight, bias, trained) if recomputes else (None, None, None), ids, positions)
        ctx.grad_hidden = found.grad_hidden
        ctx.options = (dtype, hidden.shape, hidden.dtype, chunks, needs_grad)
        return found.log_probabilities

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs  # fp32[positions]
        weight, bias, trained, ids, positions = ctx.saved_tensors
        dtype, shape, hidden_dtype, chunks, needs_grad = ctx.options
        prepared, ctx.grad_hidden = ctx.grad_hidden, None
        grad_hidden = grad_weight = grad_bias = None
        if prepared is not None:  # of minus the log-probability, per token; scaled in fp32
            scaled = (prepared.to(upstream.dtype) * -upstream[:, None]).to(hidden_dtype)
            grad_hidden = scatter_rows(scaled, positions, shape)
        if trained is not None:
            with torch.autocast(upstream.device.type, enabled=False):
                needed = (False, *needs_grad[1:])
                found = compute_in_chunks(trained, weight.to(dtype), bias, ids, chunks, needed, -upstream)
            grad_weight = None if found.grad_weight is None else found.grad_weight.to(weight.dtype)
            grad_bias = None if found.grad_bias is None or bias is None else found.grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
