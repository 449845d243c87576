"""Attention that keeps packed documents apart without an O(tokens^2) mask, on every device, with no flash-attn build.

After `install_attention` a transformers model's forward accepts `cu_seq_lens` (int32[documents + 1], the boundaries of the
documents in the one packed row) and `max_document_length` (int); without them every row is one document padded on the
right. Generation, which passes an attention mask or a cache, runs transformers' SDPA.

On CUDA one varlen kernel (torch's own flash attention) handles all documents. On a CPU each document is a causal SDPA in
float32 whatever the precision: torch's backward there is half as fast in bf16, and compiles a kernel for every length.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from finetune.errors import UserError

NAME = "packed"
UNSUPPORTED = (
    "position_bias",
)  # arguments that transformers may pass and this attention does not support: learned biases
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
LARGEST_FLASH_HEAD = 256
# torch 2.12 and later reject fewer key-value heads than heads without it; 2.11 has no such argument.
NEEDS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# A recipe's name -> the module of its package, the compute capabilities (major) that it is for, torch's name for it.
FLASH_PACKAGES = {
    "flash_attention_3": ("flash_attn_interface", (9,), "FA3"),
    "flash_attention_4": ("flash_attn.cute", (9, 10), "FA4"),
}
FLASH_HEAD_MULTIPLE = 8  # the kernel refuses other head sizes and leaves the padding to its caller


def install_attention(model: Any, implementation: str = "auto") -> None:
    """Makes `model` (an `XForCausalLM`) use the attention that the recipe's `attn_implementation` names.

    `auto` is this module's, with torch's own kernels, or with those of an installed package (flash_attention_3 and _4); any
    other name is transformers' own, which finds the documents in the position ids (sdpa, eager, flex_attention) or receives
    their boundaries (flash_attention_2, and flash_attention_3 where its package is not installed).
    Raises `UserError` where a layer keeps a state across documents, or where the implementation is not available.
    """
    if implementation in FLASH_PACKAGES and activate_flash_kernels(implementation):
        implementation = "auto"
    if implementation == "auto":
        _refuse_stateful_layers(model.config)
        _register()
    try:
        model.set_attn_implementation(NAME if implementation == "auto" else implementation)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"attn_implementation: {implementation} cannot be used with {type(model).__name__} here "
            f"({str(error).splitlines()[0]}); leave the key out for packed attention that needs no extra package"
        ) from error
    rewrite = {
        "auto": _prepare_for_packed,
        "flash_attention_2": _prepare_for_flash,
        "flash_attention_3": _prepare_for_flash,
    }
    # A hook on the trunk, whose every caller passes `use_cache`: False is training.
    getattr(model, model.base_model_prefix).register_forward_pre_hook(
        lambda _, args, kwargs: (args, rewrite.get(implementation, _drop_boundaries)(kwargs)), with_kwargs=True
    )


def activate_flash_kernels(implementation: str) -> bool:
    """Makes torch's attention use the FlashAttention 3 or 4 of an installed package, by torch's own switch; False where
    FlashAttention 3 is not installed, since transformers finds kernels of it on the hub.

    Raises `UserError` where this GPU cannot run it, or where FlashAttention 4 is not installed.
    """
    package, capabilities, name = FLASH_PACKAGES[implementation]
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found[0] not in capabilities:
        here = "this is a CPU run" if found is None else f"this GPU has {found[0]}.{found[1]}"
        needed = " or ".join(f"{major}.x" for major in capabilities)
        raise UserError(
            f"attn_implementation: {implementation} needs a GPU of compute capability {needed}, and {here}; leave the key out"
        )
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        if implementation == "flash_attention_3":
            return False
        raise UserError(
            f"attn_implementation: {implementation} needs the package that has {package} ({error}); install it, or leave the key out"
        ) from error
    return True


def _refuse_stateful_layers(config: Any) -> None:
    unknown = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if unknown:
        raise UserError(
            f"{config.model_type} has {', '.join(sorted(unknown))} layers, in which packed documents cannot be kept "
            "apart; set packing: false and attn_implementation: sdpa"
        )


# From the arguments of a training forward to those that the implementation reads. Generation's stay as they are.


def _prepare_for_packed(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("attention_mask") is None and kwargs.get("use_cache") is False:
        # transformers leaves a four-dimensional mask alone. Without one, it compares position ids to find packed
        # documents in every forward: a host synchronization on CUDA, for a mask that nothing reads.
        return kwargs | {"attention_mask": torch.empty((0, 0, 0, 0), dtype=torch.bool)}
    return kwargs


def _prepare_for_flash(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    boundaries, longest = kwargs.pop("cu_seq_lens", None), kwargs.pop("max_document_length", None)
    if boundaries is None:
        return kwargs
    names = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    return kwargs | names


def _drop_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens", "max_document_length")}


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    # For generation; training passes a mask of its own, see `_prepare_for_packed`.
    AttentionMaskInterface.register(NAME, sdpa_mask)


class ScoreOptions(NamedTuple):
    """What attention does with the products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(head size)
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # softcap * tanh(scores / softcap)
    dropout: float = 0.0  # of the weights
    sinks: Tensor | None = None  # [heads]: a score that takes its part of the softmax and gives no value (gpt-oss)

    @property
    def is_fusible(self) -> bool:
        """Whether torch's fused kernels compute such scores."""
        return self.softcap is None and self.sinks is None


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
    s_aux: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    max_document_length: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document; transformers' attention interface.

    Args:
        query: [rows, heads, tokens, head size]; key and value: [rows, key-value heads, tokens, head size].
        attention_mask: empty in training; what `sdpa_mask` made, in generation.
        dropout, scaling, sliding_window, softcap, s_aux (sinks): see `ScoreOptions`.
        cu_seq_lens: int32[documents + 1] of the one row, or None where each row is one document.
        max_document_length: tokens.
    Returns:
        [rows, tokens, heads, head size], and None for the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} needs {name}; set attn_implementation: eager for this model")
    options = ScoreOptions(scaling, sliding_window, softcap, dropout, s_aux)
    if attention_mask is None or attention_mask.numel() > 0:
        return _attend_with_mask(module, query, key, value, attention_mask, options), None
    # Under autocast the rotated query and key are fp32 beside a bf16 value; the kernels want one type.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype
    query, key, value = (states.to(compute_dtype) for states in (query, key, value))
    with torch.autocast(device, enabled=False):
        if _can_use_varlen(query, value, options):
            return _attend_varlen(query, key, value, cu_seq_lens, max_document_length, options), None
        if cu_seq_lens is None:
            return _attend_causally(query, key, value, options).transpose(1, 2).to(dtype), None
        return _attend_each_document(query, key, value, cu_seq_lens, options).to(dtype), None


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
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, options: ScoreOptions
) -> Tensor:
    """Causal attention over each document by itself. query: [1, heads, tokens, head size] -> [1, tokens, heads, ...]."""
    lengths = cu_seq_lens.diff().tolist()
    documents = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([_attend_causally(q, k, v, options).transpose(1, 2) for q, k, v in documents], dim=1)


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
    """Attention written out, for models that cap the scores (Gemma 2) or have sinks (gpt-oss), which no fused kernel of
    torch can."""
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


def _attend_with_mask(
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
