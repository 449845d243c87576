"""Attention by torch's flex_attention: for layers that cap their scores (Gemma 2), have sinks (gpt-oss), or whose heads are wider
than flash attention takes.

Which tokens a token sees is said by a mask of blocks of tokens. It is made once a forward for each kind of layer, on the device and
without waiting for it, and all layers of the kind share it.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from finetune.compiler import configure_compiler
from finetune.config.facts import has_compiler
from finetune.constants import BLOCK_TOKENS, LARGEST_FLASH_HEAD
from finetune.models.attention_inputs import ScoreOptions

SMALLEST_HEAD = 16  # numbers, that flex_attention's kernels multiply
LARGEST_HEAD = 1024  # bytes: 512 numbers in half precision
# One kernel for all lengths: flex_attention has another one for short queries.
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
# Its own tiles for wide heads need 256 KiB of shared memory, more than any GPU has; these need 96.
WIDE_KERNEL: Any = {**KERNEL, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}


def find_windows(model: nn.Module) -> frozenset[int | None]:
    """The sliding windows (None: full attention) of the layers that need a mask of blocks; none where no layer does."""
    return frozenset(getattr(module, "sliding_window", None) for module in model.modules() if _needs_blocks(module))


def _needs_blocks(attention: nn.Module) -> bool:
    """Whether `attention`, as transformers' families name these things, is not for the varlen kernel."""
    caps_scores = getattr(attention, "attn_logit_softcapping", None) is not None
    is_wide = getattr(attention, "head_dim", 0) > LARGEST_FLASH_HEAD
    return caps_scores or is_wide or getattr(attention, "sinks", None) is not None


def has_kernel(device: torch.device) -> bool:
    """Whether flex_attention trains there: it has to be compiled, and on a CPU it has no backward."""
    return device.type == "cuda" and has_compiler()


def make_masks(
    windows: frozenset[int | None], cu_seq_lens: Tensor | None, tokens: int, device: torch.device
) -> dict[int | None, BlockMask]:
    """A mask for each of `windows`: causal, within documents of the one row, or of whole rows where `cu_seq_lens` is None.

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
        window: make_block_mask(starts if window is None else torch.maximum(starts, places - (window - 1)))
        for window in windows
    }


def make_block_mask(first: Tensor) -> BlockMask:
    """The mask under which each token sees those from `first` (int32[tokens], never falling) up to itself.

    What torch's create_block_mask finds from all pairs of tokens follows here from the ends of each block.
    """
    tokens = len(first)
    blocks = max(
        2, -(-tokens // BLOCK_TOKENS)
    )  # one block would be a graph of its own: dynamo takes sizes of 1 for constants
    starts = torch.arange(blocks, device=first.device) * BLOCK_TOKENS
    ends = starts + BLOCK_TOKENS - 1  # the last token in each
    first_of_start, first_of_end = (first[each.clamp(max=tokens - 1)][:, None] for each in (starts, ends))
    is_before = starts < starts[:, None]
    is_seen = ((is_before & (first_of_start <= ends)) | (starts == starts[:, None])) & (starts < tokens)[:, None]
    is_full = is_before & (first_of_end <= starts) & (ends < tokens)[:, None]

    def is_visible(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[query] <= key) & (key <= query)

    partial, full = _list_blocks(is_seen & ~is_full), _list_blocks(is_full)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=is_visible, seq_lengths=(tokens, tokens)
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks chosen in each row of bool[blocks, blocks], and all blocks, the chosen ones first."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def can_attend_in_blocks(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    """Whether flex_attention computes this: without dropout, which works on the weights, after the softmax."""
    largest = LARGEST_HEAD // query.itemsize
    return options.dropout == 0.0 and all(SMALLEST_HEAD <= each.shape[-1] <= largest for each in (query, value))


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, options: ScoreOptions) -> Tensor:
    """Attention under `mask`. query: [rows, heads, tokens, head size] -> [rows, tokens, heads, head size]."""
    attend = _attend if torch.compiler.is_compiling() else _compile_attention()
    attended: Tensor = attend(query, key, value, mask, options)
    return attended


@cache
def _compile_attention(backend: str = "inductor") -> Callable[..., Tensor]:
    """flex_attention is a kernel only where it is compiled: within a compiled layer, or by itself."""
    configure_compiler()
    # Where the check before the first step runs eagerly, over a few tokens.
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return torch.compile(_attend, dynamic=True, backend=backend)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, options: ScoreOptions) -> Tensor:
    softcap = options.softcap

    def cap(score: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out, found = flex_attention(
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
        # One more term of the softmax's sum, exp(sink), with no value: the output shrinks by exp(lse) / (exp(lse) + exp(sink)).
        assert found.lse is not None
        share = torch.sigmoid(found.lse - options.sinks[:, None])[..., None]
        out = (out * share).to(out.dtype)
    return out.transpose(1, 2)
