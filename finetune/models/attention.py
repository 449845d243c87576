"""This project's attention, as transformers calls it: inside each document of packed rows.

It needs neither a mask of [tokens, tokens] for a packed row nor the flash-attn package, and runs on
every device. On a CPU it computes in float32: torch's bf16 backward is half as fast there, and
compiles again for every length.

Under sequence parallelism the ranks share the tokens of a row, and
`distributed/sequence_parallel.py` exchanges what attention reads.
"""

import sys
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask

from finetune.config.layout import divides_heads
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
SCALED_NAME = "scaled_by_position"
# The arguments of a forward that describe its documents; models/documents.py explains them. Only
# long-context RoPE reads `document_lengths`, the only one that padded rows always have.
BOUNDARIES = (
    "cu_seq_lens",
    "max_document_length",
    "packed_lengths",
    "document_lengths",
    "image_tokens",
    "continued",
    "visible_tokens",
)
WHOLE_ROWS = RowDocuments()  # each row is one document
# An `attention_mask` for a whole vision-language model: transformers takes a dict for masks that
# are ready, and makes none.
NO_MASK: dict[str, Any] = {}
# arguments that transformers may pass and that this attention cannot compute with
UNSUPPORTED = ("position_bias",)


def prepare_for_packed(
    windows: frozenset[int | None], sequence_group: ProcessGroup | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Turns the arguments of a training forward into those that `packed_attention` reads.

    A forward with an attention mask or a cache, as in generation, only loses BOUNDARIES.

    Args:
        windows: Of `find_windows`: the sliding windows of layers that need a mask of blocks.
        sequence_group: The ranks that share the tokens of a row; None: a rank has whole rows.
        kwargs: The arguments of the language model's forward.
    """
    kwargs, values = split_boundaries(kwargs)
    boundaries, longest, lengths, _, images, continued_places, visible = values
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask is not NO_MASK) or kwargs.get("use_cache") is not False:
        return kwargs
    masks: dict[int | None, BlockMask] = {}
    if windows:
        if kwargs.get("input_ids") is not None:
            ids = kwargs["input_ids"]
        else:
            ids = kwargs["inputs_embeds"]
        ranks = 1 if sequence_group is None else sequence_group.size()
        row_tokens = ids.shape[1] * ranks
        masks = make_masks(windows, boundaries, row_tokens, ids.device)
    if continued_places is None:
        continued = None
    else:
        continued = Continued.find(continued_places, lengths, boundaries.device)
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


def split_boundaries(kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Returns (the arguments without BOUNDARIES, the values of BOUNDARIES in their order).

    The value of a missing argument is None.
    """
    remaining = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    return remaining, [kwargs.get(name) for name in BOUNDARIES]


@cache
def register() -> None:
    """Registers `packed_attention` with transformers as the implementation NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    # For generation; training passes a mask of its own, see `prepare_for_packed`.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def scale_by_position(attention: Any) -> None:
    """Makes an attention layer scale each query by the token's position in its document.

    transformers scales the queries of Llama 4's layers without RoPE by the place in the row. A
    token has another place in a packed row, behind padding on the left, and on ranks that share a
    row. After this call, whoever calls the module passes `query_positions`.

    attention: A module of class `Llama4TextAttention`, or with its attributes.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(SCALED_NAME, _attend_scaled)
    attention.attn_temperature_tuning = False  # transformers' own scaling
    attention.eager_attention = sys.modules[type(attention).__module__].eager_attention_forward
    attention.trunk_config = attention.config
    attention.config = copy(attention.config)
    attention.config._attn_implementation = SCALED_NAME


def _attend_scaled(
    module: Any, query: Tensor, *args: Any, query_positions: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Scales the queries, and runs the attention that the trunk's config names.

    Args:
        module: Prepared by `scale_by_position`.
        query: [rows, heads, tokens, head size].
        args, kwargs: The other arguments of transformers' interface.
        query_positions: int64[rows, tokens], or [1, tokens] for all rows.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    steps = torch.floor((query_positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    query = (query * scales[:, None, :, None]).to(query.dtype)
    name = module.trunk_config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, module.eager_attention)
    out: tuple[Tensor, Tensor | None] = attend(module, query, *args, **kwargs)
    return out


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
    """Computes attention inside each document, with the signature of transformers' interface.

    Args:
        module: The attention layer.
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        attention_mask: Empty in training, by `prepare_for_packed`: `documents` takes its place. In
            generation, the mask of `sdpa_mask`; None if it made none.
        dropout, scaling, sliding_window, softcap, s_aux (sinks): See `ScoreOptions`.
        documents: The documents in the rows, and whether attention is causal.
        sequence_group: The ranks that share the tokens of a row. The states then hold this rank's
            tokens, and `documents` describes the whole row. None: a rank has whole rows.
        kwargs: Other arguments of transformers. Those in UNSUPPORTED raise `UserError`, the others
            are ignored.

    Returns:
        [rows, tokens, heads, head size], and None for the attention weights.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} needs {name}; set attn_implementation: eager for this "
                "model"
            )
    has_full_attention = sliding_window is None
    if has_full_attention and shows_images_in_windows(getattr(module, "config", None)):
        documents = replace(documents, images=None)
    options = ScoreOptions(scaling, sliding_window, softcap, dropout, s_aux, _find_chunk(module))
    is_generation = attention_mask is None or attention_mask.numel() > 0
    if is_generation:
        return attend_with_mask(module, query, key, value, attention_mask, options), None
    # Under autocast the rotated query and key are fp32 and the value is bf16, but the kernels need
    # one dtype.
    dtype = product_dtype(value)
    device = query.device.type
    if device == "cpu":
        compute_dtype = torch.promote_types(dtype, torch.float32)
    else:
        compute_dtype = dtype
    query, key, value = (states.to(compute_dtype) for states in (query, key, value))
    with torch.autocast(device, enabled=False):
        if sequence_group is None:
            out = attend_documents(query, key, value, documents, options).to(dtype)
        else:  # the output is traded in `dtype`
            out = _attend_across_ranks(query, key, value, documents, options, dtype, sequence_group)
    return out, None


def shows_images_in_windows(config: Any) -> bool:
    """Returns whether the tokens of an image see each other, but only in layers with a window.

    So it is in Gemma 4's large models.

    config: The language model's.
    """
    return getattr(config, "use_bidirectional_attention", None) == "vision"


def _find_chunk(attention: Any) -> int | None:
    """Returns the tokens of a chunk, if the layer attends inside chunks of a document (Llama 4).

    None: the layer attends to whole documents.
    """
    config = getattr(attention, "config", None)
    types = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in types and types[attention.layer_idx] == "chunked_attention":
        return attention.config.attention_chunk_size  # type: ignore[no-any-return]
    return None


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

    The ranks trade tokens for heads: each computes some of the heads, over the whole row. If the
    heads cannot be divided evenly, each rank gathers the row's keys and values instead, and attends
    from its own tokens.

    Returns:
        [rows, tokens of this rank, heads, head size], in `dtype`.
    """
    if not divides_heads(query.shape[1], group.size()):
        first_token = group.rank() * query.shape[2]
        key = gather_keys(key, group)
        value = gather_keys(value, group)
        return attend_from(query, key, value, first_token, documents, options).to(dtype)
    query, key, value = trade_tokens_for_heads(query, key, value, group)
    if options.sinks is not None:
        options = options._replace(sinks=take_heads(options.sinks, group))
    return trade_heads_for_tokens(
        attend_documents(query, key, value, documents, options).to(dtype), group
    )
