"""Attention inside each document of packed rows, without an O(tokens^2) mask, on every device,
without flash-attn.

On a CPU attention runs in float32: torch's bf16 backward there is half as fast, and compiles for
every length.

Ranks may share the tokens of a row: `distributed/sequence_parallel.py` gathers what their attention
reads.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask

from finetune.config.layout import divides_heads
from finetune.constants import Record
from finetune.distributed.model_parts import product_dtype
from finetune.distributed.sequence_parallel import (
    gather_keys,
    take_heads,
    trade_heads_for_tokens,
    trade_tokens_for_heads,
)
from finetune.errors import UserError
from finetune.models.attention_kernels import (
    Continued,
    RowDocuments,
    ScoreOptions,
    attend_documents,
    attend_from,
    attend_with_mask,
    make_masks,
)

NAME = "packed"
# Of the documents of a packed row, and of those in padded rows, which only long-context RoPE reads.
BOUNDARIES = (
    "cu_seq_lens",
    "max_document_length",
    "packed_lengths",
    "document_lengths",
    "image_tokens",
    "continued",
    "visible_tokens",
)
WHOLE_ROWS = RowDocuments()
# an attention_mask for a whole vision-language model, which then makes none of its own
NO_MASK: Record = {}
# arguments that transformers may pass and this attention does not take
UNSUPPORTED = ("position_bias",)


def prepare_for_packed(
    windows: frozenset[int | None], sequence_group: ProcessGroup | None, kwargs: Record
) -> Record:
    """Turns the arguments of a training forward into those that `packed_attention` reads;
    generation's stay as they are.
    """
    kwargs, given = split_boundaries(kwargs)
    boundaries, longest, lengths, _, images, places, visible = given
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask is not NO_MASK) or kwargs.get("use_cache") is not False:
        return kwargs
    masks: dict[int | None, BlockMask] = {}
    if windows:
        if kwargs.get("input_ids") is not None:
            ids = kwargs["input_ids"]
        else:
            ids = kwargs["inputs_embeds"]
        tokens = ids.shape[1] * (1 if sequence_group is None else sequence_group.size())
        masks = make_masks(windows, boundaries, tokens, ids.device)
    if places is None:
        continued = None
    else:
        continued = Continued.find(places, lengths, boundaries.device)
    # transformers leaves a four-dimensional mask alone. Without one, it compares position ids to
    # find packed documents in every forward: a host synchronization on CUDA, for a mask that
    # nothing reads.
    prepared = kwargs | {
        "attention_mask": torch.empty((0, 0, 0, 0), dtype=torch.bool),
        "documents": RowDocuments(boundaries, longest, lengths, masks, images, continued, visible),
    }
    if sequence_group is None:
        return prepared
    return prepared | {"sequence_group": sequence_group}


def split_boundaries(kwargs: Record) -> tuple[Record, list[Any]]:
    """The arguments without BOUNDARIES, and these; None for those that are missing."""
    others = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    return others, [kwargs.get(name) for name in BOUNDARIES]


@cache
def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    # For generation; training passes a mask of its own, see `prepare_for_packed`.
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    documents: RowDocuments = WHOLE_ROWS,
    sequence_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention inside each document; transformers' attention interface.

    Args:
        module: The attention layer.
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        attention_mask: Empty in training; what `sdpa_mask` made, in generation.
        dropout, scaling, sliding_window, softcap, s_aux (sinks): See `ScoreOptions`.
        documents: Of the rows; they say whether attention is causal.
        sequence_group: The ranks that divide a row's tokens between them. `tokens` are those of
            this rank then, and `documents` those of the whole row.
        kwargs: What else transformers passes; what `UNSUPPORTED` names is refused.

    Returns:
        [rows, tokens, heads, head size], and None for the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} needs {name}; set attn_implementation: eager for this "
                "model"
            )
    if sliding_window is None and shows_images_in_windows(getattr(module, "config", None)):
        documents = replace(documents, images=None)
    options = ScoreOptions(scaling, sliding_window, softcap, dropout, s_aux, _find_chunk(module))
    if attention_mask is None or attention_mask.numel() > 0:
        return attend_with_mask(module, query, key, value, attention_mask, options), None
    # Under autocast the rotated query and key are fp32 beside a bf16 value; the kernels want one
    # type.
    dtype = product_dtype(value)
    device = query.device.type
    if device == "cpu":
        compute_dtype = torch.promote_types(dtype, torch.float32)
    else:
        compute_dtype = dtype
    query, key, value = (states.to(compute_dtype) for states in (query, key, value))
    with torch.autocast(device, enabled=False):
        if sequence_group is None:
            return attend_documents(query, key, value, documents, options).to(dtype), None
        return _attend_across_ranks(
            query, key, value, documents, options, dtype, sequence_group
        ), None


def shows_images_in_windows(config: Any) -> bool:
    """Whether the tokens of an image see each other in layers with a window alone (Gemma 4's large
    models).

    `config`: of the language model.
    """
    return getattr(config, "use_bidirectional_attention", None) == "vision"


def _find_chunk(attention: Any) -> int | None:
    """The tokens of a chunk of a document, outside of which this layer sees nothing (Llama 4)."""
    config = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None) or ()
    is_chunked = "chunked_attention" in types and types[attention.layer_idx] == "chunked_attention"
    return config.attention_chunk_size if config is not None and is_chunked else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the collectives are no part of a compiled layer
def _attend_across_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: RowDocuments,
    options: ScoreOptions,
    dtype: torch.dtype,
    group: ProcessGroup,
) -> Tensor:
    """Does `attend_documents` where the tokens of a row are sharded over the ranks of `group`.

    The ranks trade tokens for heads: each attends over the whole row with some of the heads. If
    there are more ranks than heads, each gathers the keys and attends from its own tokens.

    Returns:
        The outputs at this rank's tokens, in `dtype`.
    """
    if not divides_heads(query.shape[1], group.size()):
        first = group.rank() * query.shape[2]
        key = gather_keys(key, group)
        value = gather_keys(value, group)
        return attend_from(query, key, value, first, documents, options).to(dtype)
    query, key, value = trade_tokens_for_heads(query, key, value, group)
    if options.sinks is not None:
        options = options._replace(sinks=take_heads(options.sinks, group))
    return trade_heads_for_tokens(
        attend_documents(query, key, value, documents, options).to(dtype), group
    )
