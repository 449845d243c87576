"""Attention inside each document of a packed row, by the kernel that the device has for it.

It is causal, or in both directions if a forward passes `visible_tokens`.

On CUDA one kernel computes all documents: torch's varlen flash attention, or flex_attention
(`attend_in_blocks`) for scores that varlen cannot compute. Elsewhere SDPA or a plain implementation
computes one document after another. The same happens on CUDA if no kernel can compute the case: in
fp32, for the widest heads, with dropout.
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
from finetune.constants import BLOCK_TOKENS, FP32, LARGEST_FLASH_HEAD, ceil_div
from finetune.models.decoder_layers import configure_compiler


@dataclass(frozen=True, slots=True, eq=False)
class RowDocuments:
    """The documents in the rows of one forward, shared by all layers.

    It is not a tuple: FSDP would search a tuple for tensors, and dynamo would compile the layers
    again for other lengths.
    """

    # int32[documents + 1], where the documents of the one packed row begin, and the row's length;
    # None: each row is one document
    boundaries: Tensor | None = None
    longest: int | None = None  # tokens of the longest document; None: the row's
    # tokens of each document, known to the host; None: the differences of `boundaries`
    lengths: tuple[int, ...] | None = None
    # sliding window (None: full attention) -> mask, for layers that attend in blocks
    masks: Mapping[int | None, BlockMask] = field(default_factory=dict)
    # int64[rows, tokens]: the number of the token's image, -1 for text. None: an image's tokens
    # are masked as text is.
    images: Tensor | None = None
    # which documents continue others; requires `lengths`. None: none of them
    continued: "Continued | None" = None
    # bool[rows, tokens]: attention goes in both directions, to the tokens that are True; None:
    # attention is causal
    visible: Tensor | None = None

    def list_lengths(self) -> list[int]:
        """Lists the tokens of each document of the one packed row."""
        assert self.boundaries is not None
        return list(self.lengths or self.boundaries.diff().tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """Which documents of a row continue others, as completions continue a prompt.

    A document that continues another sees all tokens of the other, and then its own.
    """

    # for each document, the index of the document that it continues; None: it continues none
    places: tuple[int | None, ...]
    lengths: tuple[int, ...]  # tokens of each document and of the document that it continues
    boundaries: Tensor  # int32[documents + 1]: the cumulative sums of `lengths`, from 0
    longest: int  # the largest of `lengths`

    @classmethod
    def find(
        cls, places: tuple[int | None, ...], own_lengths: tuple[int, ...], device: torch.device
    ) -> Self:
        """Computes lengths and boundaries from `places` and the tokens of each document alone."""
        lengths = []
        for place, own_length in zip(places, own_lengths, strict=True):
            lengths.append(own_length if place is None else own_lengths[place] + own_length)
        boundaries = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
        return cls(places, tuple(lengths), boundaries.to(device, non_blocking=True), max(lengths))


class ScoreOptions(NamedTuple):
    """How attention computes weights from the products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(head size)
    # how many tokens a query sees, its own included; None: all tokens before it
    window: int | None = None
    # scores become softcap * tanh(scores / softcap); None: they stay
    softcap: float | None = None
    dropout: float = 0.0  # the probability that a weight is dropped
    # [heads]: one more score in a head's softmax, which has no value (gpt-oss)
    sinks: Tensor | None = None
    chunk: int | None = None  # tokens of a chunk; chunks do not see one another (Llama 4)

    @property
    def is_fusible(self) -> bool:
        """Whether SDPA and varlen flash attention can compute the scores: no caps, no sinks."""
        return self.softcap is None and self.sinks is None


# the head sizes that flex_attention takes here
SMALLEST_HEAD = 16  # elements
LARGEST_HEAD_BYTES = 1024  # 512 elements in half precision
# One kernel for all lengths: by default flex_attention takes a different one for short queries.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
# flex_attention's own tiles for wide heads need 256 KiB of shared memory, more than any GPU has;
# these need 96 KiB.
WIDE_KERNEL: Any = {**KERNEL, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}


def find_windows(model: nn.Module) -> frozenset[int | None]:
    """Returns the sliding windows of the layers that need a mask of blocks.

    None in the set stands for full attention. The set is empty if no layer needs such a mask.
    """
    return frozenset(
        getattr(module, "sliding_window", None)
        for module in model.modules()
        if _needs_blocks(module)
    )


def _needs_blocks(attention: nn.Module) -> bool:
    """Returns whether `attention` is an attention module that the varlen kernel cannot compute.

    The attributes are read by the names that the model families in transformers give them.
    """
    caps_scores = getattr(attention, "attn_logit_softcapping", None) is not None
    is_wide = getattr(attention, "head_dim", 0) > LARGEST_FLASH_HEAD
    return caps_scores or is_wide or getattr(attention, "sinks", None) is not None


def has_kernel(device: torch.device) -> bool:
    """Returns whether flex_attention can train on `device`.

    It needs a compiler, and has no backward on CPUs.
    """
    return device.type == "cuda" and has_compiler()


def make_masks(
    windows: frozenset[int | None], cu_seq_lens: Tensor | None, tokens: int, device: torch.device
) -> dict[int | None, BlockMask]:
    """Makes a mask of blocks for each of `windows`: causal, and inside each document.

    Nothing is read from the device, and no tensor is as large as [tokens, tokens].

    Args:
        windows: Sliding windows; None stands for full attention.
        cu_seq_lens: The documents' boundaries; None: a row is one document.
        tokens: Tokens of the whole row.
        device: Where attention runs.

    Returns:
        {} if flex_attention cannot train on the device.
    """
    if not windows or not has_kernel(device):
        return {}
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    if cu_seq_lens is None:
        starts = torch.zeros_like(places)
    else:
        starts = cu_seq_lens[torch.searchsorted(cu_seq_lens, places, right=True) - 1]
    masks = {}
    for window in windows:
        if window is None:
            first_visible = starts
        else:
            first_visible = torch.maximum(starts, places - (window - 1))
        masks[window] = make_block_mask(first_visible)
    return masks


def make_block_mask(first: Tensor) -> BlockMask:
    """Makes the mask under which each token sees the tokens from `first` up to itself.

    torch's create_block_mask looks at all pairs of tokens. Here the first and the last token of
    each block suffice, because `first` never decreases.

    first: int32[tokens], the first token that each token sees.
    """
    tokens = len(first)
    # At least 2: dynamo makes another graph for a size of 1.
    blocks = max(2, ceil_div(tokens, BLOCK_TOKENS))
    starts = torch.arange(blocks, device=first.device) * BLOCK_TOKENS
    ends = starts + BLOCK_TOKENS - 1  # the last token of each block
    first_of_start = first[starts.clamp(max=tokens - 1)][:, None]
    first_of_end = first[ends.clamp(max=tokens - 1)][:, None]
    # From here on: bool[blocks of queries, blocks of keys].
    is_before = starts < starts[:, None]
    is_diagonal = starts == starts[:, None]
    has_queries = (starts < tokens)[:, None]
    has_all_queries = (ends < tokens)[:, None]
    # some query sees some key
    is_seen = ((is_before & (first_of_start <= ends)) | is_diagonal) & has_queries
    # every query sees every key, so that the kernel need not ask `is_visible`
    is_full = is_before & (first_of_end <= starts) & has_all_queries

    def is_visible(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[query] <= key) & (key <= query)

    partial = _list_blocks(is_seen & ~is_full)
    full = _list_blocks(is_full)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=is_visible, seq_lengths=(tokens, tokens)
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the chosen blocks of keys for each block of queries, as `BlockMask` takes them.

    chosen: bool[blocks, blocks], queries by keys.

    Returns:
        (the number of chosen blocks, int32[1, 1, blocks]; the indexes of all blocks, the chosen
        ones first, int32[1, 1, blocks, blocks]).
    """
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def can_attend_in_blocks(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Returns whether flex_attention can compute this: it has no dropout and bounds head sizes."""
    largest = LARGEST_HEAD_BYTES // query.itemsize
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
        attend = _attend_by_flex
    else:
        attend = _compile_attention()
    return attend(query, key, value, mask, options)


@cache
def _compile_attention(backend: str = "inductor") -> Callable[..., Tensor]:
    """Compiles `_attend_by_flex`: uncompiled, flex_attention does not run as a kernel."""
    configure_compiler()
    # The check before the first step runs it uncompiled over a few tokens.
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return torch.compile(_attend_by_flex, dynamic=True, backend=backend)


def _attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, options: ScoreOptions
) -> Tensor:
    """Does `attend_in_blocks`, compiled or not."""
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
        # A sink adds exp(sink) to the softmax's denominator but no value, so the output shrinks by
        # exp(lse) / (exp(lse) + exp(sink)).
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
    """Computes attention inside each document, causal unless `documents.visible` is given.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        documents: The documents in the rows.
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
            chunks = zip(
                *(torch.split(states, chunk, dim=2) for states in (query, key, value)), strict=True
            )
            return torch.cat(
                [attend_documents(q, k, v, documents, options) for q, k, v in chunks], dim=1
            )
    key_boundaries = None
    continued = documents.continued
    if continued is not None:
        key = repeat_continued(key, documents)
        value = repeat_continued(value, documents)
        key_boundaries = continued.boundaries, continued.longest
    if documents.images is None and _can_use_varlen(query, value, options):
        return _attend_varlen(
            query, key, value, documents.boundaries, documents.longest, options, key_boundaries
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
    """Does `attend_documents` in both directions: a token sees its whole document.

    Only padded rows need `visible`: the padding of a packed row is a document of its own.
    """
    assert documents.visible is not None
    if documents.boundaries is None:
        visible = documents.visible[:, None, None].expand(-1, -1, query.shape[2], -1)
        return _attend_all(query, key, value, options, visible).transpose(1, 2)
    if _can_use_varlen(query, value, options):
        boundaries = documents.boundaries, documents.longest
        return _attend_varlen(query, key, value, *boundaries, options, is_causal=False)
    out: Tensor = _attend_each_document(query, key, value, documents, options)
    return out


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    documents: RowDocuments,
    options: ScoreOptions,
) -> Tensor:
    """Computes causal attention from a part of a row's tokens to the keys of the whole row.

    Args:
        query: [rows, heads, tokens, head size], of adjacent tokens of the row.
        key: [rows, key-value heads, tokens of the row, head size].
        value: As `key`.
        first: The place of the first query in the row.
        documents: The documents of the whole row.
        options: How scores become weights.

    Returns:
        [rows, tokens, heads, head size].
    """
    if len(query) > 1:  # each row is one document
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([attend_from(*row, first, documents, options) for row in rows])
    chunk = options.chunk
    options = options._replace(chunk=None)
    tokens = key.shape[2]
    end = first + query.shape[2]
    boundaries = documents.boundaries
    if boundaries is None:  # one document, from 0 to `tokens`
        boundaries = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=query.device)
        documents = RowDocuments(boundaries, tokens, (tokens,))
    if chunk is not None:
        documents = cut_documents(documents, chunk)
    lengths = documents.list_lengths()
    spans = [
        (stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)
    ]
    queried = [index for index, (start, stop) in enumerate(spans) if start < end and stop > first]
    first_queried = queried[0]
    last_queried = queried[-1]
    # No query sees a key after itself, so the last of these documents ends at the last query.
    spans = [(start, min(stop, end)) for start, stop in spans[first_queried : last_queried + 1]]
    query_counts = [stop - max(start, first) for start, stop in spans]
    key_counts = [stop - start for start, stop in spans]
    first_key, _ = spans[0]
    key, value = (states[:, :, first_key:end] for states in (key, value))
    if _can_use_varlen(query, value, options):
        assert documents.boundaries is not None
        # Computed on the device, so that no layer makes the host wait for it.
        ends = documents.boundaries[first_queried : last_queried + 2].clamp(max=end)
        query_boundaries = ends.clamp(min=first) - first
        key_boundaries = ends - ends[0], max(key_counts)
        return _attend_varlen(
            query, key, value, query_boundaries, max(query_counts), options, key_boundaries
        )
    return _attend_each(query, key, value, query_counts, key_counts, options)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def repeat_continued(states: Tensor, documents: RowDocuments) -> Tensor:
    """Puts the keys or values of a continued document before those of each that continues it.

    It splits and joins instead of indexing: the gradient of an index is a sum, which a GPU adds up
    in a different order each time.

    states: [1, heads, tokens, head size].
    """
    assert documents.lengths is not None and documents.continued is not None
    parts = states.split(documents.lengths, 2)  # type: ignore[no-untyped-call]
    joined = []
    for place, own_states in zip(documents.continued.places, parts, strict=True):
        if place is not None:
            joined.append(parts[place])
        joined.append(own_states)
    return torch.cat(joined, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def cut_documents(documents: RowDocuments, chunk: int) -> RowDocuments:
    """Cuts each document of a packed row into documents of at most `chunk` tokens."""
    assert documents.boundaries is not None
    pieces = tuple(
        min(chunk, length - start)
        for length in documents.list_lengths()
        for start in range(0, length, chunk)
    )
    boundaries = (
        torch.tensor((0, *pieces), device=documents.boundaries.device).cumsum(0).to(torch.int32)
    )
    return RowDocuments(boundaries, chunk, pieces)


def _can_use_varlen(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Returns whether torch's varlen flash attention can compute this."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    fits = value.shape[-1] <= query.shape[-1] <= LARGEST_FLASH_HEAD
    return query.is_cuda and is_half and fits and options.is_fusible and options.dropout == 0.0


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor | None,
    longest: int | None,
    options: ScoreOptions,
    key_boundaries: tuple[Tensor, int] | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Computes attention inside all documents at once, by torch's varlen flash kernel.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, tokens, head size].
        value: As `key`.
        cu_seq_lens: The documents' boundaries; None: each row is a document.
        longest: The tokens of the longest document; None: each row is a document.
        options: How scores become weights.
        key_boundaries: (`cu_seq_lens`, `longest`) of the keys, if documents have more keys than
            queries; a document's queries are then its last tokens. None: as of the queries.
        is_causal: Whether a token sees only the tokens before it and itself.

    Returns:
        [rows, tokens, heads, value's head size].
    """
    rows, heads, tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:  # DeepSeek's heads; the kernel takes one size for all three
        value = F.pad(value, (0, size - value_size))
    if cu_seq_lens is None or longest is None:
        cu_seq_lens = torch.arange(
            0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device
        )
        longest = tokens
    if key.shape[1] != heads and NEEDS_ENABLE_GQA:
        gqa: dict[str, Any] = {"enable_gqa": True}
    else:
        gqa = {}
    # [rows x tokens, heads, head size]
    query, key, value = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    padding = -size % FLASH_HEAD_MULTIPLE
    if padding:  # zeros do not change the scores; the zeros of the output are cut off below
        query, key, value = [F.pad(states, (0, padding)) for states in (query, key, value)]
    scale = size**-0.5 if options.scale is None else options.scale
    # How many tokens before and after itself a query sees; -1: all of them.
    if not is_causal:
        window = (-1, -1)
    elif options.window is None:
        window = (-1, 0)
    else:  # transformers counts the query's own token too
        window = (options.window - 1, 0)
    cu_keys, longest_key = key_boundaries or (cu_seq_lens, longest)
    boundaries = (cu_seq_lens, cu_keys, longest, longest_key)
    out = varlen_attn(query, key, value, *boundaries, scale=scale, window_size=window, **gqa)
    assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp is requested
    return out[..., :value_size].reshape(rows, tokens, heads, value_size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def _attend_each_document(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Does `attend_documents` for one packed row, one document after another."""
    lengths = documents.list_lengths()
    if documents.visible is not None:
        states = [torch.split(tensor, lengths, 2) for tensor in (query, key, value)]
        attended = [_attend_all(q, k, v, options) for q, k, v in zip(*states, strict=True)]
        return torch.cat([output.transpose(1, 2) for output in attended], dim=1)
    if documents.continued is None:
        key_counts = lengths
    else:
        key_counts = list(documents.continued.lengths)
    return _attend_each(query, key, value, lengths, key_counts, options, documents.images)


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_counts: list[int],
    key_counts: list[int],
    options: ScoreOptions,
    images: Tensor | None = None,
) -> Tensor:
    """Computes causal attention for one document after another.

    A document may have more keys than queries; the queries are then its last tokens.

    Args:
        query: [1, heads, queries, head size].
        key: [1, key heads, keys, head size].
        value: As `key`.
        query_counts: The number of queries of each document.
        key_counts: The number of keys of each document.
        options: How scores become weights.
        images: As in `RowDocuments`.
    """
    states = [
        torch.split(tensor, sizes, 2)
        for tensor, sizes in ((query, query_counts), (key, key_counts), (value, key_counts))
    ]
    by_document = (
        [None] * len(query_counts) if images is None else torch.split(images, query_counts, 1)
    )
    attended = [
        _attend_causally(q, k, v, options, document_images)
        for q, k, v, document_images in zip(*states, by_document, strict=True)
    ]
    return torch.cat([output.transpose(1, 2) for output in attended], dim=1)


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, images: Tensor | None = None
) -> Tensor:
    """Computes causal attention over rows that are one document each.

    Args:
        query: [rows, heads, tokens, head size], of the last `tokens` tokens of a row.
        key: [rows, key heads, keys, head size], of all tokens of a row.
        value: As `key`.
        options: How scores become weights.
        images: int64[rows, keys], as in `RowDocuments`: the tokens of an image see each other too.
            Requires as many queries as keys.

    Returns:
        [rows, heads, tokens, head size].
    """
    tokens = query.shape[2]
    keys = key.shape[2]
    is_windowed = options.window is not None and options.window < keys
    if options.is_fusible and not is_windowed and images is None and tokens == keys:
        return _attend_by_sdpa(query, key, value, options, is_causal=True)
    before = keys - tokens  # the first query's place in the row
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(before)
    if images is not None:
        query_images = images[:, None, :, None]
        key_images = images[:, None, None]
        visible = visible | ((query_images == key_images) & (key_images >= 0))
    if options.window is not None:
        visible = visible.triu(before + 1 - options.window)
    return _attend_all(query, key, value, options, visible)


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions, visible: Tensor | None = None
) -> Tensor:
    """Computes attention over whole rows, from every token to the visible keys.

    Args:
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, keys, head size].
        value: As `key`.
        options: How scores become weights.
        visible: bool, broadcast to [rows, heads, tokens, keys]: the keys that a token sees; None:
            all of them.

    Returns:
        [rows, heads, tokens, head size].
    """
    if not options.is_fusible:
        if visible is None:
            shape = query.shape[2], key.shape[2]
            visible = torch.ones(shape, dtype=torch.bool, device=query.device)
        return _attend_unfused(query, key, value, visible, options)
    return _attend_by_sdpa(query, key, value, options, visible)


def _attend_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ScoreOptions,
    visible: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Computes attention by SDPA, by a kernel that keeps no scores if the device has one.

    On CUDA, torch's flash attention takes grouped heads, but neither fp32 nor a mask. The
    memory-efficient kernel takes both, but up to torch 2.13 no grouped heads. Keys and values are
    therefore repeated for it; otherwise torch would make a tensor of all scores of all heads.

    Takes and returns what `_attend_all` does.

    is_causal: Whether a token sees only the tokens before it and itself; requires no `visible`.
    """
    repeats = query.shape[1] // key.shape[1]
    is_flash = visible is None and query.itemsize < FP32 and query.shape[-1] <= LARGEST_FLASH_HEAD
    if query.is_cuda and repeats > 1 and not is_flash:
        key, value = [states.repeat_interleave(repeats, dim=1) for states in (key, value)]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=options.dropout,
        is_causal=is_causal,
        scale=options.scale,
        enable_gqa=True,
    )


def _attend_unfused(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: ScoreOptions
) -> Tensor:
    """Computes attention by plain products, since SDPA has no caps (Gemma 2) and sinks (gpt-oss).

    Takes and returns what `_attend_all` does.
    """
    heads = query.shape[1]
    key, value = [
        states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value)
    ]
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = query @ key.transpose(2, 3) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # With -inf a padding token that sees no key would become nan, and so would whatever reads it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = weights[..., : key.shape[2]]  # without those of the sinks, which have no value
    return F.dropout(weights, options.dropout) @ value


def _attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Computes attention from one token to a cache, on a CPU.

    torch's SDPA on a CPU computes blocks of queries, and copies keys and values for each head of a
    group.

    Args:
        query: [rows, heads, 1, head size].
        key: [rows, key heads, keys, head size].
        value: As `key`.
        mask: bool (True: visible) or added to the scores, [rows, 1, 1, keys]; None: no mask.
        scale: As in `ScoreOptions`.

    Returns:
        [rows, 1, heads, head size].
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped * (size**-0.5 if scale is None else scale)) @ key.transpose(2, 3)
    if mask is not None:
        # The mask is smaller than the scores, and adding it is faster than filling the scores.
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
    """Does `_attend_one_token` by SDPA, with the heads of a group in place of queries.

    So the cache is not copied for each head, which transformers does if there is a mask.
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
    """Computes attention under a mask or over a cache, by SDPA if it can compute the scores.

    Args:
        module: The attention layer.
        query: [rows, heads, tokens, head size].
        key: [rows, key heads, keys, head size], of the cache and of the tokens.
        value: As `key`.
        mask: bool, broadcast to [rows, heads, tokens, keys]: the keys that a token sees; None: all
            up to its own.
        options: How scores become weights.

    Returns:
        [rows, tokens, heads, head size].
    """
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
