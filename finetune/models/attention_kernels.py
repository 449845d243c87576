"""Attention inside each document of a packed row, by the kernel that the device has for it.

It is causal, or in both directions where a forward asks for that.

On CUDA one kernel computes all documents: torch's varlen flash attention, or flex_attention
(`attend_in_blocks`) for scores that the former cannot compute. Elsewhere SDPA or a plain
implementation computes one document after another, whose lengths the host knows. So it is on CUDA
in fp32, for the widest heads, and for capped scores with dropout.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn

from finetune.config.facts import has_compiler
from finetune.constants import BLOCK_TOKENS, LARGEST_FLASH_HEAD, ceil_div
from finetune.models.decoder_layers import configure_compiler


@dataclass(frozen=True, slots=True, eq=False)
class RowDocuments:
    """The documents in the rows of one forward. All layers share it.

    No tuple: FSDP would search it for tensors, and dynamo would compile the layers again for other
    lengths.
    """

    # int32[documents + 1] of the one row; None: each row is one document
    boundaries: Tensor | None = None
    longest: int | None = None  # tokens
    lengths: tuple[int, ...] | None = None  # tokens of each; None: they follow from `boundaries`
    # sliding window -> mask, for layers that attend in blocks
    masks: Mapping[int | None, BlockMask] = field(default_factory=dict)
    # int64[rows, tokens]: the number of the token's image, -1 for text; only where the tokens of an
    # image see each other
    images: Tensor | None = None
    continued: "Continued | None" = None  # where documents continue others; needs `lengths`
    # bool[rows, tokens], for attention in both directions: the tokens that all tokens of their
    # document see; None: attention is causal
    visible: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """Which documents of a row continue others, as completions continue a prompt.

    A document sees the tokens of the document that it continues before its own.
    """

    places: tuple[int | None, ...]  # the place of the document that each continues, or None
    lengths: tuple[int, ...]  # the tokens that the last token of each document sees
    boundaries: Tensor  # int32[documents + 1]: the sums of `lengths`, from 0
    longest: int  # the largest of `lengths`

    @classmethod
    def find(
        cls, places: tuple[int | None, ...], own: tuple[int, ...], device: torch.device
    ) -> Self:
        """Finds lengths and boundaries from `places` and the documents' own tokens."""
        lengths = []
        for place, length in zip(places, own, strict=True):
            lengths.append(length if place is None else own[place] + length)
        boundaries = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
        return cls(places, tuple(lengths), boundaries.to(device, non_blocking=True), max(lengths))


class ScoreOptions(NamedTuple):
    """How attention computes weights from the products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(head size)
    window: int | None = None  # the tokens that a query sees, with its own
    softcap: float | None = None  # softcap * tanh(scores / softcap)
    dropout: float = 0.0  # of the weights
    sinks: Tensor | None = None  # [heads]: a score in the softmax that has no value (gpt-oss)
    chunk: int | None = None  # tokens of a chunk; chunks do not see one another (Llama 4)

    @property
    def is_fusible(self) -> bool:
        """Whether torch's kernels of scaled dot products compute such scores."""
        return self.softcap is None and self.sinks is None


SMALLEST_HEAD = 16  # elements; for flex_attention
LARGEST_HEAD = 1024  # bytes: 512 elements in half precision; for flex_attention
# One kernel for all lengths: by itself flex_attention takes another one for short queries.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
# flex_attention's own tiles for wide heads need 256 KiB of shared memory, more than any GPU has;
# these need 96.
WIDE_KERNEL: Any = {**KERNEL, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}


def find_windows(model: nn.Module) -> frozenset[int | None]:
    """The sliding windows of the layers that need a mask of blocks; None is full attention."""
    return frozenset(
        getattr(module, "sliding_window", None)
        for module in model.modules()
        if _needs_blocks(module)
    )


def _needs_blocks(attention: nn.Module) -> bool:
    """Whether the varlen kernel cannot compute a module of attention.

    The attributes' names are those of transformers' families.
    """
    caps_scores = getattr(attention, "attn_logit_softcapping", None) is not None
    is_wide = getattr(attention, "head_dim", 0) > LARGEST_FLASH_HEAD
    return caps_scores or is_wide or getattr(attention, "sinks", None) is not None


def has_kernel(device: torch.device) -> bool:
    """Whether flex_attention trains here: it needs a compiler, and has no backward on CPUs."""
    return device.type == "cuda" and has_compiler()


def make_masks(
    windows: frozenset[int | None], cu_seq_lens: Tensor | None, tokens: int, device: torch.device
) -> dict[int | None, BlockMask]:
    """Makes a causal mask within documents for each of `windows`.

    Without `cu_seq_lens` a row is one document. Nothing is read from the device, and no tensor is
    as large as [tokens, tokens].
    """
    if not windows or not has_kernel(device):
        return {}
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    if cu_seq_lens is None:
        starts = torch.zeros_like(places)
    else:
        starts = cu_seq_lens[torch.searchsorted(cu_seq_lens, places, right=True) - 1]
    return {
        window: make_block_mask(
            starts if window is None else torch.maximum(starts, places - (window - 1))
        )
        for window in windows
    }


def make_block_mask(first: Tensor) -> BlockMask:
    """Makes the mask under which each token sees the tokens from `first` up to itself.

    torch's create_block_mask looks at all pairs of tokens; here the ends of each block suffice.

    first: int32[tokens], which never falls.
    """
    tokens = len(first)
    # At least 2: dynamo makes another graph for a size of 1.
    blocks = max(2, ceil_div(tokens, BLOCK_TOKENS))
    starts = torch.arange(blocks, device=first.device) * BLOCK_TOKENS
    ends = starts + BLOCK_TOKENS - 1  # the last token in each
    first_of_start = first[starts.clamp(max=tokens - 1)][:, None]
    first_of_end = first[ends.clamp(max=tokens - 1)][:, None]
    is_before = starts < starts[:, None]
    is_own = starts == starts[:, None]
    has_tokens = (starts < tokens)[:, None]
    is_seen = ((is_before & (first_of_start <= ends)) | is_own) & has_tokens
    is_full = is_before & (first_of_end <= starts) & (ends < tokens)[:, None]

    def is_visible(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[query] <= key) & (key <= query)

    partial = _list_blocks(is_seen & ~is_full)
    full = _list_blocks(is_full)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=is_visible, seq_lengths=(tokens, tokens)
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the number of chosen blocks in each row, all blocks with the chosen ones first).

    chosen: bool[blocks, blocks].
    """
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def can_attend_in_blocks(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Whether flex_attention computes this: it has no dropout, and limits the size of heads."""
    largest = LARGEST_HEAD // query.itemsize
    return options.dropout == 0.0 and all(
        SMALLEST_HEAD <= each.shape[-1] <= largest for each in (query, value)
    )


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, options: ScoreOptions
) -> Tensor:
    """Computes attention under `mask` by flex_attention.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        mask: The keys that each query sees.
        options: How scores become weights.

    Returns:
        [rows, tokens, heads, head size].
    """
    if torch.compiler.is_compiling():
        attend = _attend
    else:
        attend = _compile_attention()
    return attend(query, key, value, mask, options)


@cache
def _compile_attention(backend: str = "inductor") -> Callable[..., Tensor]:
    """Compiles `_attend`: uncompiled, flex_attention is no kernel."""
    configure_compiler()
    # The check before the first step runs it uncompiled over a few tokens.
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return torch.compile(_attend, dynamic=True, backend=backend)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, options: ScoreOptions
) -> Tensor:
    softcap = options.softcap

    def cap(score: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out, auxiliary = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=mask,
        scale=options.scale,
        enable_gqa=True,
        kernel_options=WIDE_KERNEL if query.shape[-1] > LARGEST_FLASH_HEAD else KERNEL,
        return_aux=AuxRequest(lse=True),
    )
    if options.sinks is not None:
        # A sink adds exp(sink) to the softmax's sum, and no value: the output shrinks accordingly.
        assert auxiliary.lse is not None
        share = torch.sigmoid(auxiliary.lse - options.sinks[:, None])[..., None]
        out = (out * share).to(out.dtype)
    return out.transpose(1, 2)


# For fewer key-value heads than heads, torch 2.12 needs this argument; 2.11 does not have it.
NEEDS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
FLASH_HEAD_MULTIPLE = 8  # the kernel refuses other head sizes


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Computes attention in each document, causal unless `documents.visible` is given.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        documents: Of the rows.
        options: How scores become weights.

    Returns:
        [rows, tokens, heads, head size].
    """
    if documents.visible is not None:
        return _attend_both_ways(query, key, value, documents, options)
    chunk = options.chunk
    if chunk is not None:  # without this condition dynamo of torch 2.11 loses the options
        options = options._replace(chunk=None)
    if chunk is not None and chunk < (documents.longest or query.shape[2]):
        if documents.boundaries is not None:
            documents = cut_documents(documents, chunk)
        else:
            parts = zip(
                *(torch.split(each, chunk, dim=2) for each in (query, key, value)), strict=True
            )
            return torch.cat(
                [attend_documents(q, k, v, documents, options) for q, k, v in parts], dim=1
            )
    of_keys = None
    continued = documents.continued
    if continued is not None:
        key = repeat_continued(key, documents)
        value = repeat_continued(value, documents)
        of_keys = continued.boundaries, continued.longest
    if documents.images is None and _can_use_varlen(query, value, options):
        return _attend_varlen(
            query, key, value, documents.boundaries, documents.longest, options, of_keys
        )
    mask = documents.masks.get(options.window)
    if (
        documents.images is None
        and mask is not None
        and can_attend_in_blocks(query, value, options)
    ):
        return attend_in_blocks(query, key, value, mask, options)
    if documents.boundaries is None:
        return _attend_causally(query, key, value, options, documents.images).transpose(1, 2)
    out: Tensor = _attend_each_document(query, key, value, documents, options)
    return out


def _attend_both_ways(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Does `attend_documents` in both directions: a token sees its whole document."""
    assert documents.visible is not None
    if documents.boundaries is None:
        visible = documents.visible[:, None, None].expand(-1, -1, query.shape[2], -1)
        return _attend_all(query, key, value, options, visible).transpose(1, 2)
    if _can_use_varlen(query, value, options):
        boundaries = documents.boundaries, documents.longest
        return _attend_varlen(query, key, value, *boundaries, options, is_causal=False)
    out: Tensor = _attend_each_both_ways(query, key, value, documents, options)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _attend_each_both_ways(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Does `_attend_both_ways` for one packed row, one document after another."""
    assert documents.boundaries is not None
    lengths = list(documents.lengths or documents.boundaries.diff().tolist())
    states = [torch.split(each, lengths, 2) for each in (query, key, value)]
    attended = [_attend_all(q, k, v, options) for q, k, v in zip(*states, strict=True)]
    return torch.cat([each.transpose(1, 2) for each in attended], dim=1)


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    documents: RowDocuments,
    options: ScoreOptions,
) -> Tensor:
    """Computes causal attention from a part of a row's tokens to all of its tokens.

    Args:
        query: [rows, heads, tokens, head size], of adjacent tokens of the row.
        key: [rows, key-value heads, tokens of the row, head size].
        value: As `key`.
        first: The place of the first query in the row.
        documents: Of the whole row.
        options: How scores become weights.

    Returns:
        [rows, tokens, heads, head size].
    """
    if len(query) > 1:  # each row is one document
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([attend_from(*row, first, documents, options) for row in rows])
    chunk = options.chunk
    options = options._replace(chunk=None)
    row = key.shape[2]
    end = first + query.shape[2]
    boundaries = documents.boundaries
    if boundaries is None:
        boundaries = torch.arange(0, row + row, row, dtype=torch.int32, device=query.device)
        documents = RowDocuments(boundaries, row, (row,))
    if chunk is not None:
        documents = cut_documents(documents, chunk)
    lengths = documents.lengths or tuple(boundaries.diff().tolist())
    spans = [
        (last - length, last) for length, last in zip(lengths, accumulate(lengths), strict=True)
    ]
    seen = [place for place, (start, last) in enumerate(spans) if start < end and last > first]
    spans = [(start, min(last, end)) for start, last in spans[seen[0] : seen[-1] + 1]]
    queries = [last - max(start, first) for start, last in spans]
    keys = [last - start for start, last in spans]
    key, value = (each[:, :, spans[0][0] : end] for each in (key, value))
    if _can_use_varlen(query, value, options):
        assert documents.boundaries is not None
        # These stay on the device: no layer waits for it.
        ends = documents.boundaries[seen[0] : seen[-1] + 2].clamp(max=end)
        of_keys = ends - ends[0], max(keys)
        return _attend_varlen(
            query, key, value, ends.clamp(min=first) - first, max(queries), options, of_keys
        )
    return _attend_each(query, key, value, queries, keys, options)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def repeat_continued(states: Tensor, documents: RowDocuments) -> Tensor:
    """Puts before each document the keys or values of the document that it continues.

    It does not index: a GPU would sum an index's gradient in another order each time.

    states: [1, heads, tokens, head size].
    """
    assert documents.lengths is not None and documents.continued is not None
    parts = states.split(documents.lengths, 2)  # type: ignore[no-untyped-call]
    joined = []
    for place, own in zip(documents.continued.places, parts, strict=True):
        if place is not None:
            joined.append(parts[place])
        joined.append(own)
    return torch.cat(joined, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as below
def cut_documents(documents: RowDocuments, chunk: int) -> RowDocuments:
    """Cuts each document of a packed row into chunks of `chunk` tokens."""
    assert documents.boundaries is not None
    lengths = documents.lengths or documents.boundaries.diff().tolist()
    pieces = tuple(
        min(chunk, length - start) for length in lengths for start in range(0, length, chunk)
    )
    boundaries = (
        torch.tensor((0, *pieces), device=documents.boundaries.device).cumsum(0).to(torch.int32)
    )
    return RowDocuments(boundaries, chunk, pieces)


def _can_use_varlen(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Whether torch's varlen flash attention computes this."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    sizes = value.shape[-1] <= query.shape[-1] <= LARGEST_FLASH_HEAD
    return query.is_cuda and half and sizes and options.is_fusible and options.dropout == 0.0


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor | None,
    longest: int | None,
    options: ScoreOptions,
    of_keys: tuple[Tensor, int] | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Computes attention within each document by torch's varlen flash kernel, over all documents at
    once.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        cu_seq_lens: The documents' boundaries; None: each row is a document.
        longest: The tokens of the longest document; None: those of a row.
        options: How scores become weights.
        of_keys: (`cu_seq_lens`, `longest`) of the keys, where documents have more keys than
            queries: the queries are then those of their last tokens.
        is_causal: Whether a token sees only the tokens before it and itself.
    """
    rows, heads, tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:  # DeepSeek's heads; the kernel takes one size
        value = F.pad(value, (0, size - value_size))
    if cu_seq_lens is None or longest is None:
        cu_seq_lens = torch.arange(
            0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device
        )
        longest = tokens
    if key.shape[1] != heads and NEEDS_ENABLE_GQA:
        grouped: dict[str, Any] = {"enable_gqa": True}
    else:
        grouped = {}
    query, key, value = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    padding = -size % FLASH_HEAD_MULTIPLE
    if padding:  # zeros do not change the scores; the output's are cut off below
        query, key, value = [F.pad(each, (0, padding)) for each in (query, key, value)]
    scale = size**-0.5 if options.scale is None else options.scale
    # Flash attention counts the tokens before a query, transformers counts the query itself too.
    window = (-1 if options.window is None else options.window - 1, 0)
    if not is_causal:
        window = (-1, -1)
    cu_keys, longest_key = of_keys or (cu_seq_lens, longest)
    boundaries = (cu_seq_lens, cu_keys, longest, longest_key)
    out = varlen_attn(query, key, value, *boundaries, scale=scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
    return out[..., :value_size].reshape(rows, tokens, heads, value_size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _attend_each_document(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Does `attend_documents` for one packed row, one document after another."""
    assert documents.boundaries is not None
    lengths = list(documents.lengths or documents.boundaries.diff().tolist())
    if documents.continued is None:
        keys = lengths
    else:
        keys = list(documents.continued.lengths)
    return _attend_each(query, key, value, lengths, keys, options, documents.images)


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: list[int],
    keys: list[int],
    options: ScoreOptions,
    images: Tensor | None = None,
) -> Tensor:
    """Does `_attend_each_document` where documents may have more keys than queries.

    Args:
        query: [1, heads, tokens, head size]; a document's queries are those of its last tokens.
        key: [1, key heads, tokens, head size].
        value: As `key`.
        queries: The number of queries of each document.
        keys: The number of keys of each document.
        options: How scores become weights.
        images: As in `RowDocuments`.
    """
    states = [
        torch.split(tensor, sizes, 2)
        for tensor, sizes in ((query, queries), (key, keys), (value, keys))
    ]
    by_document = [None] * len(queries) if images is None else torch.split(images, queries, 1)
    attended = [
        _attend_causally(q, k, v, options, document_images)
        for q, k, v, document_images in zip(*states, by_document, strict=True)
    ]
    return torch.cat([output.transpose(1, 2) for output in attended], dim=1)


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, images: Tensor | None = None
) -> Tensor:
    """Computes causal attention over whole rows, where an image's tokens see each other.

    Args:
        query: [rows, heads, tokens, head size], of the last tokens of the keys.
        key: [rows, key heads, keys, head size].
        value: As `key`.
        options: How scores become weights.
        images: int64[rows, keys], as in `RowDocuments`.
    """
    tokens = query.shape[2]
    keys = key.shape[2]
    windowed = options.window is not None and options.window < keys
    if options.is_fusible and not windowed and images is None and tokens == keys:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=options.dropout,
            scale=options.scale,
            enable_gqa=True,
        )
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(keys - tokens)
    if images is not None:
        of_keys = images[:, None, None]
        is_same_image = images[:, None, :, None] == of_keys
        visible = visible | (is_same_image & (of_keys >= 0))
    if options.window is not None:
        visible = visible.triu(keys - tokens + 1 - options.window)
    return _attend_all(query, key, value, options, visible)


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, visible: Tensor | None = None
) -> Tensor:
    """Computes attention over whole rows.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, keys, head size].
        value: As `key`.
        options: How scores become weights.
        visible: bool, broadcast to [rows, heads, tokens, keys]: the keys that a token sees; None:
            all of them.
    """
    if not options.is_fusible:
        if visible is None:
            shape = query.shape[2], key.shape[2]
            visible = torch.ones(shape, dtype=torch.bool, device=query.device)
        return _attend_unfused(query, key, value, visible, options)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=options.dropout,
        scale=options.scale,
        enable_gqa=True,
    )


def _attend_unfused(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: ScoreOptions
) -> Tensor:
    """Computes attention by plain products, for scores that SDPA lacks: capped ones (Gemma 2), and
    sinks (gpt-oss).
    """
    heads = query.shape[1]
    key, value = [each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value)]
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = query @ key.transpose(2, 3) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # With -inf a padding token that sees nothing would become nan, and so would what reads it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(weights, options.dropout) @ value


def _attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Computes one token's attention to a cache on a CPU.

    torch's SDPA there computes blocks of queries, and copies grouped heads.
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped * (size**-0.5 if scale is None else scale)) @ key.transpose(2, 3)
    if mask is not None:
        # A mask of numbers is smaller than the scores, and adding is faster than filling.
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(
                ~mask, torch.finfo(scores.dtype).min
            )
        scores.add_(mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).view(rows, 1, heads, value.shape[3])


def _attend_one_token_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Computes one token's attention to a cache by SDPA, with the heads of a group as its queries.

    Thus the cache is not copied for each head, as transformers does where there is a mask.
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return attended.reshape(rows, 1, heads, value.shape[3])


def attend_with_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Computes attention under a mask or over a cache, by SDPA where it can."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if (
        options.is_fusible
        and query.shape[2] == 1
        and not query.requires_grad
        and options.dropout == 0.0
    ):
        if query.device.type == "cpu":
            attend = _attend_one_token
        else:
            attend = _attend_one_token_on_gpu
        return attend(query, key, value, mask, options.scale)
    if options.is_fusible:
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=options.dropout, scaling=options.scale
        )[0]
        return out
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    return _attend_unfused(query, key, value, mask, options).transpose(1, 2).contiguous()
