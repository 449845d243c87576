"""The softmax over a vocabulary that the ranks of a tensor parallel group divide between them (Shoeybi et al. 2019, section 3).

Each rank has the logits of its own rows of the head. What crosses is a few numbers a token: the largest logit, the sum of
exponentials, and the label's logit, which one rank knows.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.constants import loss_chunk_tokens
from finetune.distributed.parallelize import find_local_slices


class VocabularyShard(NamedTuple):
    """The rows of a head that this rank has."""

    first: int
    rows: int  # of the whole vocabulary
    group: Any  # the ranks that have the others

    def log_softmax(self, logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        """The log-probabilities [tokens, rows of this shard] of `logits`, in their place, and those of `labels` [tokens] as by
        `head_chunks.label_log_probabilities`; the same on every rank of the group, which all call it."""
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        own = (
            (logits - largest.unsqueeze(1)).exp_().sum(1)
        )  # torch's logsumexp takes another tensor of the logits' size
        is_here, rows = self._find(labels, logits)
        of_labels = torch.where(is_here, logits.gather(1, rows.unsqueeze(1)).squeeze(1), 0.0)
        sums = torch.stack([own, of_labels, *([logits.sum(1)] if label_smoothing else [])])
        dist.all_reduce(sums, group=self.group)
        normalizer = largest + sums[0].log()
        of_labels = sums[1] - normalizer
        if label_smoothing:
            of_labels = of_labels.lerp(sums[2] / self.rows - normalizer, label_smoothing)
        return logits.sub_(normalizer.unsqueeze(1)), of_labels

    def gradient(self, log_probabilities: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """This shard's columns of `head_chunks.cross_entropy_gradient`, in place of `log_probabilities`."""
        is_here, rows = self._find(labels, log_probabilities)
        grad = log_probabilities.exp_()
        grad.scatter_add_(1, rows.unsqueeze(1), (is_here * (label_smoothing - 1)).to(grad.dtype).unsqueeze(1))
        if label_smoothing:
            grad -= label_smoothing / self.rows
        return grad

    def _find(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each label is in this shard, and its row there (any row, where it is not)."""
        rows = labels - self.first
        return (rows >= 0) & (rows < logits.shape[1]), rows.clamp(0, logits.shape[1] - 1)


def find_local_head(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """(weight, bias) of a head as this rank has them, and where they are in the vocabulary; None where all of it is here."""
    if not isinstance(weight, DTensor):
        return weight, bias, None
    (rows, _), mesh = find_local_slices(weight), weight.device_mesh
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), local_bias, VocabularyShard(rows.start, weight.shape[0], mesh.get_group())


def choose_chunk_tokens(weight: Tensor, shard: VocabularyShard | None, device_type: str) -> int:
    """Tokens in a chunk of the loss, by the rows of the head that are here. Of a vocabulary that is divided unevenly, by the most that
    a rank has: the ranks of the group meet in every chunk."""
    rows = weight.shape[0] if shard is None else -(-shard.rows // shard.group.size())
    return loss_chunk_tokens(rows, device_type)
