"""Attention that keeps packed documents apart without an O(tokens^2) mask, on every device, with no flash-attn build.

`install` gives a transformers model our attention. From then on its forward takes `cu_seq_lens` (int32[documents + 1],
the documents' boundaries in the one packed row) and `max_document_length` (int), or neither where every row is one
document padded on the right. Generation, which brings an attention mask or a cache, runs as transformers' SDPA.

On CUDA one varlen kernel (torch's own flash attention) serves all documents. On a CPU each document is a causal SDPA in
float32 whatever the precision: torch's backward there takes twice as long in bf16, and compiles a kernel for every length.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from finetune.errors import UserError

NAME = "packed"
# What transformers may hand to an attention function and this one cannot honor: attention sinks, learned biases.
UNSUPPORTED = ("s_aux", "position_bias")
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
LARGEST_FLASH_HEAD = 256
# torch 2.12 and later refuse fewer key-value heads than heads without it; 2.11 takes them as they are.
ASKS_FOR_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
FLASH_HEAD_MULTIPLE = 8  # the kernel refuses other head sizes and leaves the padding to its caller


def install(model: Any, implementation: str = "auto") -> None:
    """Gives `model` (an `XForCausalLM`) the attention that the recipe's `attn_implementation` names.

    `auto` is ours; any other name is transformers' own, which finds the documents in the position ids
    (sdpa, eager, flex_attention) or is handed their boundaries (flash_attention_2 and _3).
    UserError where the model's layers cannot be kept to a document, or where the implementation is not to be had.
    """
    if implementation == "auto":
        _refuse_unsupported(model.config)
        _register()
    try:
        model.set_attn_implementation(NAME if implementation == "auto" else implementation)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attn_implementation: {implementation} cannot be used with {type(model).__name__} here "
            f"({str(error).splitlines()[0]}); leave the key out for packed attention that needs no extra package"
        ) from error
    rewrite = {"auto": _for_ours, "flash_attention_2": _for_flash, "flash_attention_3": _for_flash}
    # On the trunk, which is told `use_cache` by whoever calls it: False is training.
    getattr(model, model.base_model_prefix).register_forward_pre_hook(
        lambda _, args, kwargs: (args, rewrite.get(implementation, _for_position_ids)(kwargs)), with_kwargs=True
    )


def _refuse_unsupported(config: Any) -> None:
    unknown = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if unknown:
        raise UserError(
            f"{config.model_type} has {', '.join(sorted(unknown))} layers, in which packed documents cannot be kept "
            "apart; set packing: false and attn_implementation: sdpa"
        )


# What a training forward brings -> what the implementation reads. Generation passes through untouched.


def _for_ours(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("attention_mask") is None and kwargs.get("use_cache") is False:
        # A mask that is four-dimensional already is handed on as it is. Without one, transformers compares position
        # ids to find packed documents in every forward: a host synchronization on CUDA, for a mask nobody reads.
        return kwargs | {"attention_mask": torch.empty((0, 0, 0, 0), dtype=torch.bool)}
    return kwargs


def _for_flash(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    boundaries, longest = kwargs.pop("cu_seq_lens", None), kwargs.pop("max_document_length", None)
    if boundaries is None:
        return kwargs
    names = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    return kwargs | names


def _for_position_ids(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens", "max_document_length")}


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # of generation only: training brings its own, see `_for_ours`


class Scores(NamedTuple):
    """What is done to the products of queries and keys."""

    scale: float | None = None  # left out, 1 / sqrt(head size)
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # softcap * tanh(scores / softcap)
    dropout: float = 0.0  # of the weights


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens: Tensor | None = None,
    max_document_length: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document; transformers' attention interface.

    Args:
        query: [rows, heads, tokens, head size]; key and value: [rows, key-value heads, tokens, head size].
        attention_mask: empty in training; what `sdpa_mask` made, in generation.
        dropout, scaling, sliding_window, softcap: see `Scores`.
        cu_seq_lens: int32[documents + 1] of the one row, or None where each row is one document.
        max_document_length: tokens.
    Returns:
        [rows, tokens, heads, head size], and None for the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} needs {name}; set attn_implementation: eager for this model")
    scores = Scores(scaling, sliding_window, softcap, dropout)
    if attention_mask is None or attention_mask.numel() > 0:
        return _generation(module, query, key, value, attention_mask, scores), None
    # Under autocast the rotated query and key are fp32 beside a bf16 value; the kernels want one type.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype
    query, key, value = (states.to(compute_dtype) for states in (query, key, value))
    with torch.autocast(device, enabled=False):
        if _varlen_serves(query, value, scores):
            return _varlen(query, key, value, cu_seq_lens, max_document_length, scores), None
        if cu_seq_lens is None:
            return _document(query, key, value, scores).transpose(1, 2).to(dtype), None
        return _each_document(query, key, value, cu_seq_lens, scores).to(dtype), None


def _varlen_serves(query: Tensor, value: Tensor, scores: Scores) -> bool:
    """Whether torch's flash attention computes this: on CUDA, in half precision, heads of one size, nothing else."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    sizes = query.shape[-1] == value.shape[-1] <= LARGEST_FLASH_HEAD
    return query.is_cuda and half and sizes and scores.softcap is None and scores.dropout == 0.0


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor | None, longest: int | None, scores: Scores
) -> Tensor:
    """torch's varlen flash attention over all documents at once. query: [rows, heads, tokens, head size]."""
    rows, heads, tokens, size = query.shape
    if cu_seq_lens is None or longest is None:
        cu_seq_lens = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        longest = tokens
    grouped: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads and ASKS_FOR_GROUPED_HEADS else {}
    query, key, value = [each.transpose(1, 2).reshape(rows * tokens, -1, size) for each in (query, key, value)]
    padding = -size % FLASH_HEAD_MULTIPLE  # zeros add nothing to the scores, and zeros to the output
    query, key, value = [F.pad(each, (0, padding)) for each in (query, key, value)] if padding else (query, key, value)
    scale = size**-0.5 if scores.scale is None else scores.scale  # the padded size is not the head's
    # Flash attention counts the tokens BEFORE a query, transformers counts the query itself too.
    window = (-1 if scores.window is None else scores.window - 1, 0)
    boundaries = (cu_seq_lens, cu_seq_lens, longest, longest)
    out = varlen_attn(query, key, value, *boundaries, scale=scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # and not with the log-sum-exp, which is not asked for
    return out[..., :size].reshape(rows, tokens, heads, size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _each_document(query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, scores: Scores) -> Tensor:
    """Causal attention over each document by itself. query: [1, heads, tokens, head size] -> [1, tokens, heads, ...]."""
    lengths = cu_seq_lens.diff().tolist()
    documents = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([_document(q, k, v, scores).transpose(1, 2) for q, k, v in documents], dim=1)


def _document(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Causal attention over whole rows. query: [rows, heads, tokens, head size] -> the same shape."""
    tokens = query.shape[2]
    windowed = scores.window is not None and scores.window < tokens
    if scores.softcap is None and not windowed:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=scores.dropout, scale=scores.scale, enable_gqa=True
        )
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if scores.window is not None:
        visible = visible.triu(1 - scores.window)
    if scores.softcap is not None:
        return _softcapped(query, key, value, visible, scores, scores.softcap)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=scores.dropout, scale=scores.scale, enable_gqa=True
    )


def _softcapped(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, how: Scores, softcap: float) -> Tensor:
    """Attention written out, for models that cap the scores (Gemma 2): no fused kernel of torch's does."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if how.scale is None else how.scale)
    scores = softcap * torch.tanh(scores / softcap)
    # Not -inf: a padding token that sees nothing would become NaN, and spread.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, how.dropout) @ value


def _generation(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attention under a mask or a cache, as transformers' SDPA has it, and with capped scores, which it refuses."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if scores.softcap is None:
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=scores.dropout, scaling=scores.scale
        )[0]
        return out
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    return _softcapped(query, key, value, mask, scores, scores.softcap).transpose(1, 2).contiguous()
