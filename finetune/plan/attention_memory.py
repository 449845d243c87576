"""Which way attention takes, as far as its memory depends on it, and the masks of those layers that flex_attention computes.

See models/attention/kernels.py and models/block_attention.py.
"""

from typing import TYPE_CHECKING

from finetune.constants import BLOCK_TOKENS, LARGEST_FLASH_HEAD
from finetune.plan.architecture import Architecture

if TYPE_CHECKING:
    from finetune.plan.activations import Computation

INT32 = 4
KINDS = 2  # of layers that need masks: with a sliding window, and without


def attends_by_document(run: "Computation") -> bool:
    """Whether each document is attended to by itself, and their outputs are concatenated: no kernel has dropout."""
    return run.cpu or run.drops_attention


def materializes_scores(a: Architecture, run: "Computation") -> bool:
    """Whether attention of capped scores or with sinks is written out."""
    return attends_by_document(run) and (a.family.caps_scores or a.family.sinks)


def needs_masks(a: Architecture, run: "Computation") -> bool:
    """Whether masks of blocks are made: while training with dropout too, which evaluation has not."""
    return not run.cpu and (a.family.caps_scores or a.family.sinks or a.head_size > LARGEST_FLASH_HEAD)


def attends_in_blocks(a: Architecture, run: "Computation") -> bool:
    """Whether flex_attention computes it, which keeps what flash attention does."""
    return needs_masks(a, run) and not run.drops_attention


def mask_bytes(a: Architecture, run: "Computation", tokens: int) -> int:
    """Bytes of the masks for rows of which a rank has `tokens`: how many blocks each block of queries sees, and which, and the same for
    keys, of blocks seen whole and in part; and the first token that each token sees."""
    if not needs_masks(a, run):
        return 0
    tokens *= run.sequence_ranks
    blocks = max(2, -(-tokens // BLOCK_TOKENS))
    return KINDS * INT32 * (4 * blocks * (blocks + 1) + tokens)
