"""Causal attention inside each document of a packed row, by the kernel that the device has for it.

On CUDA one kernel handles all documents: torch's own varlen flash attention, or flex_attention (block_attention.py) for what that
cannot. Elsewhere, and with dropout of capped scores, in fp32 or for the widest heads, each document is a causal SDPA, or written out;
how long each is the host knows.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from finetune.constants import LARGEST_FLASH_HEAD
from finetune.models.attention_inputs import RowDocuments, ScoreOptions
from finetune.models.block_attention import attend_in_blocks, can_attend_in_blocks

# torch 2.12 and later reject fewer key-value heads than heads without it; 2.11 has no such argument.
NEEDS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
FLASH_HEAD_MULTIPLE = 8  # the kernel refuses other head sizes and leaves the padding to its caller


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Causal attention in each document. query: [rows, heads, tokens, head size] -> [rows, tokens, heads, head size]."""
    if _can_use_varlen(query, value, options):
        return _attend_varlen(query, key, value, documents.boundaries, documents.longest, options)
    mask = documents.masks.get(options.window)
    if mask is not None and can_attend_in_blocks(query, value, options):
        return attend_in_blocks(query, key, value, mask, options)
    if documents.boundaries is None:
        return _attend_causally(query, key, value, options).transpose(1, 2)
    out: Tensor = _attend_each_document(query, key, value, documents, options)
    return out


def _can_use_varlen(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Whether torch's flash attention computes this: on CUDA, in half precision, values no wider than queries, nothing else."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    sizes = value.shape[-1] <= query.shape[-1] <= LARGEST_FLASH_HEAD
    return query.is_cuda and half and sizes and options.is_fusible and options.dropout == 0.0


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor | None, longest: int | None, options: ScoreOptions
) -> Tensor:
    """torch's varlen flash attention over all documents at once. query: [rows, heads, tokens, head size]."""
    rows, heads, tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:  # DeepSeek's heads; the kernel wants one size
        value = F.pad(value, (0, size - value_size))
    if cu_seq_lens is None or longest is None:
        cu_seq_lens = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        longest = tokens
    grouped: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads and NEEDS_ENABLE_GQA else {}
    query, key, value = [each.transpose(1, 2).reshape(rows * tokens, -1, size) for each in (query, key, value)]
    padding = -size % FLASH_HEAD_MULTIPLE  # zeros add nothing to the scores, and zeros to the output
    query, key, value = [F.pad(each, (0, padding)) for each in (query, key, value)] if padding else (query, key, value)
    scale = size**-0.5 if options.scale is None else options.scale  # the padded size is not the head's
    # Flash attention counts the tokens BEFORE a query, transformers counts the query itself too.
    window = (-1 if options.window is None else options.window - 1, 0)
    boundaries = (cu_seq_lens, cu_seq_lens, longest, longest)
    out = varlen_attn(query, key, value, *boundaries, scale=scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # and not with the log-sum-exp, which is not asked for
    return out[..., :value_size].reshape(rows, tokens, heads, value_size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _attend_each_document(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Causal attention over each document by itself. query: [1, heads, tokens, head size] -> [1, tokens, heads, ...]."""
    assert documents.boundaries is not None
    lengths = list(documents.lengths or documents.boundaries.diff().tolist())
    states = zip(*(torch.split(each, lengths, dim=2) for each in (query, key, value)), strict=True)
    return torch.cat([_attend_causally(q, k, v, options).transpose(1, 2) for q, k, v in states], dim=1)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """Causal attention over whole rows. query: [rows, heads, tokens, head size] -> the same shape."""
    tokens = query.shape[2]
    windowed = options.window is not None and options.window < tokens
    if options.is_fusible and not windowed:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=options.dropout, scale=options.scale, enable_gqa=True
        )
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if options.window is not None:
        visible = visible.triu(1 - options.window)
    if not options.is_fusible:
        return _attend_unfused(query, key, value, visible, options)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=options.dropout, scale=options.scale, enable_gqa=True
    )


def _attend_unfused(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: ScoreOptions) -> Tensor:
    """Attention written out, for models that cap the scores (Gemma 2) or have sinks (gpt-oss), which no SDPA of torch can."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # Not -inf: a padding token that sees nothing would become NaN, and so would what reads it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(weights, options.dropout) @ value


def attend_with_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Attention under a mask or a cache: transformers' SDPA, or written out where SDPA cannot."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.is_fusible:
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=options.dropout, scaling=options.scale
        )[0]
        return out
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    return _attend_unfused(query, key, value, mask, options).transpose(1, 2).contiguous()
