"""What attention reads beside queries, keys and values: which documents lie in the rows, and what is done to the scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, eq=False)
class RowDocuments:
    """The documents in the rows of one forward. All layers share it.

    No tuple: FSDP would look through it for tensors to move, and dynamo would compile the layers again for other lengths.
    """

    boundaries: Tensor | None = None  # int32[documents + 1] of the one row; None: each row is one document
    longest: int | None = None  # tokens
    lengths: tuple[int, ...] | None = (
        None  # tokens of each, as the host knows them; None: they are read from `boundaries`
    )
    masks: Mapping[int | None, BlockMask] = field(
        default_factory=dict
    )  # by sliding window, for the layers that read one


class ScoreOptions(NamedTuple):
    """What attention does with the products of queries and keys."""

    scale: float | None = None  # None: 1 / sqrt(head size)
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # softcap * tanh(scores / softcap)
    dropout: float = 0.0  # of the weights
    sinks: Tensor | None = None  # [heads]: a score that takes its part of the softmax and gives no value (gpt-oss)

    @property
    def is_fusible(self) -> bool:
        """Whether torch's kernels of scaled dot products compute such scores."""
        return self.softcap is None and self.sinks is None
