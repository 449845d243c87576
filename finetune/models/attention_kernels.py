"""Attention inside each document of a packed row, by the kernel that the device has for it.

It is causal, or in both directions where a forward asks for that.

On CUDA one kernel handles all documents: torch's own varlen flash attention, or flex_attention
(`attend_in_blocks`) for what that cannot. Elsewhere, and with dropout of capped scores, in fp32 or
for the widest heads, each document runs through causal SDPA or a plain implementation; the host
knows the lengths.
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
    lengths: tuple[int, ...] | None = (
        None  # tokens of each, as the host knows them; None: they are read from `boundaries`
    )
    # by sliding window, for layers that read one
    masks: Mapping[int | None, BlockMask] = field(default_factory=dict)
    # int64[rows, tokens]: the number of the image that a token is of, or -1; where an image's
    # tokens see each other.
    images: Tensor | None = None
    continued: "Continued | None" = None  # where some continue others; `lengths` are known then
    # bool[rows, tokens]: which tokens every token of their document sees, also those before it.
    # None: attention is causal.
    visible: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """Documents that continue others of the row, as completions do a prompt, and see its tokens
    before their own.
    """

    places: tuple[int | None, ...]  # of the document that each continues; None: of none
    lengths: tuple[int, ...]  # tokens that the last token of each sees
    boundaries: Tensor  # int32[documents + 1]: the sums of `lengths`, from 0
    longest: int  # of `lengths`

    @classmethod
    def find(
        cls, places: tuple[int | None, ...], own: tuple[int, ...], device: torch.device
    ) -> Self:
        """Finds the lengths and boundaries from the places, and the tokens of each document in the
        row.
        """
        lengths = tuple(
            length + (0 if at is None else own[at]) for at, length in zip(places, own, strict=True)
        )
        boundaries = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
        return cls(places, lengths, boundaries.to(device, non_blocking=True), max(lengths))


class ScoreOptions(NamedTuple):
    """The changes that attention makes to the products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(head size)
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # softcap * tanh(scores / softcap)
    dropout: float = 0.0  # of the weights
    # [heads]: a score that takes its part of the softmax and gives no value (gpt-oss)
    sinks: Tensor | None = None
    # tokens into which a document is cut, none of which sees those of another (Llama 4)
    chunk: int | None = None

    @property
    def is_fusible(self) -> bool:
        """Whether torch's kernels of scaled dot products compute such scores."""
        return self.softcap is None and self.sinks is None


SMALLEST_HEAD = 16  # numbers, that flex_attention's kernels multiply
LARGEST_HEAD = 1024  # bytes: 512 numbers in half precision
# One kernel for all lengths: flex_attention has another one for short queries.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
# Its own tiles for wide heads need 256 KiB of shared memory, more than any GPU has; these need 96.
WIDE_KERNEL: Any = {**KERNEL, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}


def find_windows(model: nn.Module) -> frozenset[int | None]:
    """The sliding windows (None: full attention) of the layers that need a mask of blocks; none
    where no layer does.
    """
    return frozenset(
        getattr(module, "sliding_window", None)
        for module in model.modules()
        if _needs_blocks(module)
    )


def _needs_blocks(attention: nn.Module) -> bool:
    """Whether `attention`, as transformers' families name these things, is not for the varlen
    kernel.
    """
    caps_scores = getattr(attention, "attn_logit_softcapping", None) is not None
    is_wide = getattr(attention, "head_dim", 0) > LARGEST_FLASH_HEAD
    return caps_scores or is_wide or getattr(attention, "sinks", None) is not None


def has_kernel(device: torch.device) -> bool:
    """Whether flex_attention trains there: it has to be compiled, and on a CPU it has no
    backward.
    """
    return device.type == "cuda" and has_compiler()


def make_masks(
    windows: frozenset[int | None], cu_seq_lens: Tensor | None, tokens: int, device: torch.device
) -> dict[int | None, BlockMask]:
    """A mask for each of `windows`: causal, within documents of the row, or of whole rows without
    `cu_seq_lens`.

    Nothing is read from the device, and nothing as large as [tokens, tokens] is made.
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
    """The mask under which each token sees those from `first` (int32[tokens], never falling) up to
    itself.

    What torch's create_block_mask finds from all pairs of tokens follows here from the ends of each
    block.
    """
    tokens = len(first)
    # dynamo takes a size of 1 for a constant: a graph of its own
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
    """The number of blocks chosen in each row of bool[blocks, blocks], and all blocks, the chosen
    ones first.
    """
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def can_attend_in_blocks(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Whether flex_attention computes this: without dropout, which works on the weights, after the
    softmax.
    """
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
        mask: Which keys each query sees.
        options: How scores are computed.

    Returns:
        [rows, tokens, heads, head size].
    """
    if torch.compiler.is_compiling():
        attend = _attend
    else:
        attend = _compile_attention()
    attended: Tensor = attend(query, key, value, mask, options)
    return attended


@cache
def _compile_attention(backend: str = "inductor") -> Callable[..., Tensor]:
    """Compiles `_attend`: flex_attention is a kernel only where it is compiled, within a compiled
    layer or by itself.
    """
    configure_compiler()
    # Where the check before the first step runs eagerly, over a few tokens.
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
        # One more term of the softmax's sum, exp(sink), without a value: the output shrinks
        # accordingly.
        assert auxiliary.lse is not None
        share = torch.sigmoid(auxiliary.lse - options.sinks[:, None])[..., None]
        out = (out * share).to(out.dtype)
    return out.transpose(1, 2)


# torch 2.12 and later reject fewer key-value heads than heads without it; 2.11 has no such
# argument.
NEEDS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
FLASH_HEAD_MULTIPLE = 8  # the kernel refuses other head sizes and leaves the padding to its caller


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Causal attention in each document: query [rows, heads, tokens, size] -> [rows, tokens, heads,
    size]; in both directions where the documents say so.
    """
    if documents.visible is not None:
        return _attend_both_ways(query, key, value, documents, options)
    chunk = options.chunk
    if chunk is not None:  # dynamo of torch 2.11 hands an empty tuple on for a replaced one
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
    """Attends from each token to its whole document, in both directions.

    Query is [rows, heads, tokens, size], the result [rows, tokens, heads, size].
    """
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
    """Does `_attend_both_ways` for one row, one document after another."""
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
    """Causal attention from the tokens `first`, first + 1, ... of a row to those of all of it, in
    each document.

    Args:
        query: [rows, heads, tokens, head size].
        key, value: [rows, key-value heads, tokens of the row, head size].
        first: Place of the first query's token in the row.
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
        # on the device, which no layer waits for
        ends = documents.boundaries[seen[0] : seen[-1] + 2].clamp(max=end)
        of_keys = ends - ends[0], max(keys)
        return _attend_varlen(
            query, key, value, ends.clamp(min=first) - first, max(queries), options, of_keys
        )
    return _attend_each(query, key, value, queries, keys, options)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of documents is no part of a compiled layer
def repeat_continued(states: Tensor, documents: RowDocuments) -> Tensor:
    """Keys or values [1, heads, tokens, size], before each document those of the one that it
    continues.

    Not by an index, whose gradient a GPU adds up in another order each time.
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
    """Whether torch's flash attention computes this: on CUDA, in half precision, without other
    options.
    """
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
        cu_seq_lens: Where each document begins and the last one ends; None: a document is a row.
        longest: Tokens of the longest document; None: those of a row.
        options: How scores are computed.
        of_keys: `cu_seq_lens` and `longest` of the keys, where queries are the last tokens of their
            documents only.
        is_causal: Whether a token sees only those before it.
    """
    rows, heads, tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:  # DeepSeek's heads; the kernel wants one size
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
    # zeros add nothing to the scores, and zeros to the output
    padding = -size % FLASH_HEAD_MULTIPLE
    query, key, value = (
        [F.pad(each, (0, padding)) for each in (query, key, value)]
        if padding
        else (query, key, value)
    )
    # the padded size is not the head's
    scale = size**-0.5 if options.scale is None else options.scale
    # Flash attention counts the tokens BEFORE a query, transformers counts the query itself too.
    window = (-1 if options.window is None else options.window - 1, 0)
    if not is_causal:
        window = (-1, -1)
    cu_keys, longest_key = of_keys or (cu_seq_lens, longest)
    boundaries = (cu_seq_lens, cu_keys, longest, longest_key)
    out = varlen_attn(query, key, value, *boundaries, scale=scale, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # and not with the log-sum-exp, which is not asked for
    return out[..., :value_size].reshape(rows, tokens, heads, value_size)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _attend_each_document(
    query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, options: ScoreOptions
) -> Tensor:
    """Causal attention document by document: query [1, heads, tokens, size] -> [1, tokens, heads,
    size].
    """
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
    """Does `_attend_each_document` for documents whose queries may be their last tokens alone.

    `queries`, `keys`: how many of them each document has.
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
        query: [rows, heads, tokens, head size], of the last tokens for which there are keys.
        key: [rows, key heads, keys, head size].
        value: As `key`.
        options: How scores are computed.
        images: int64[rows, keys], the number of each token's image, below 0 for text; None: no
            image.
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
        visible = visible | (
            (images[:, None, :, None] == images[:, None, None]) & (images[:, None, None] >= 0)
        )
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
        options: How scores are computed.
        visible: bool, broadcast to [rows, heads, tokens, keys]: which keys a token sees; None: all.
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
    """Attention written out, for capped scores (Gemma 2) and sinks (gpt-oss), which torch's SDPA
    lacks.
    """
    key, value = (
        each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value)
    )
    scores = (
        query
        @ key.transpose(2, 3)
        * (query.shape[-1] ** -0.5 if options.scale is None else options.scale)
    )
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # Not -inf: a padding token that sees nothing would become NaN, and so would what reads it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(weights, options.dropout) @ value


def _attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """A token's attention to a cache on a CPU: torch's SDPA there has blocks of queries, and copies
    grouped heads.
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped * (size**-0.5 if scale is None else scale)) @ key.transpose(2, 3)
    if mask is not None:
        # as numbers: it is smaller than the scores, and adding faster than filling
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
    """A token's attention to a cache, by SDPA with the heads of a group as its queries: the cache
    is not copied for each head, as transformers does where there is a mask.
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
    """Attention under a mask or a cache: transformers' SDPA, or written out where SDPA cannot."""
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
