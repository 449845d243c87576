"""Training a head of scores: reward models on pairs, and classifiers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.methods import MULTI_LABEL, POINTWISE, STEP_SCORES, RowKind
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.models.head_scores import head_scores
from finetune.training.objectives.calibration import describe_probabilities
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.objectives.preference import Pairs, share_of, sum_and_count
from finetune.training.objectives.ranks import describe_order
from finetune.training.reference import sum_by_document

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class PairScores(Objective):
    """The mean over pairs of how surely the chosen answer has the larger score (Bradley and Terry
    1952).

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the centering: Eisenstein et al. 2023,
    arXiv:2312.09244, section 5, as TRL's RewardTrainer. Where a row has a margin, the score
    shall be larger by it (Touvron et al. 2023, arXiv:2307.09288, eq. 2).
    """

    center_coefficient: float | None
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them

    def count(self, batch: StepBatch) -> int:
        """The pairs of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        micro_batch = micro_batch.with_documents()
        scores = Pairs.of(score_documents(model, micro_batch, inputs, self.sequence_group)[:, 0])
        least = Pairs.of(read_numbers(find_labels(micro_batch, self.sequence_group)))
        losses = -F.logsigmoid(scores.margin - least.chosen)
        if self.center_coefficient is not None:
            losses = losses + self.center_coefficient * (scores.chosen + scores.rejected) ** 2
        metrics = {
            "rewards/chosen": sum_and_count(scores.chosen),
            "rewards/rejected": sum_and_count(scores.rejected),
            "rewards/margins": sum_and_count(scores.margin),
            "rewards/accuracies": sum_and_count((scores.margin > 0).double()),
        }
        return Measured(
            share_of(losses.sum().float(), self.sequence_group),
            {name: pair.detach().float() for name, pair in metrics.items()},
        )


@dataclass(frozen=True, slots=True)
class ClassScores(Objective):
    """The mean over documents of the cross entropy of their class.

    Its metrics are means over the documents of a step or of all held-out data: accuracy, and the F1
    of each class (twice its hits, divided by how often it was given and how often it was right),
    whose mean is `f1_macro`.
    """

    labels: tuple[str, ...]
    weights: tuple[float, ...]  # of the classes
    has_several: bool  # a document may have several classes, of which each is decided alone
    sequence_group: ProcessGroup | None
    is_held_out: bool = False

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ClassScores":
        """The recipe's."""
        labels = recipe.data.labels
        weights = recipe.method.class_weights or (1.0,) * len(labels)
        return cls(labels, weights, recipe.data.problem_type == MULTI_LABEL, sequence_group)

    def for_evaluation(self) -> "ClassScores":
        """The same, with the scores of all documents for `describe_rows`."""
        return replace(self, is_held_out=True)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's documents."""
        micro_batch = micro_batch.with_documents()
        scores = score_documents(model, micro_batch, inputs, self.sequence_group)
        labels = find_labels(micro_batch, self.sequence_group)
        return self.describe(scores, labels, self.sequence_group)

    def describe(
        self, scores: Tensor, labels: Tensor, sequence_group: ProcessGroup | None
    ) -> Measured:
        """Returns the metrics of scores, fp64[documents, classes], against labels,
        int64[documents]; IGNORE_INDEX is no label.

        sequence_group: The ranks that know the same scores.
        """
        is_labeled = labels != IGNORE_INDEX
        are_true = self._read_classes(labels) & is_labeled[:, None]
        losses = self._compare(scores, are_true)
        are_given = self._decide(scores.detach()) & is_labeled[:, None]
        metrics = {"accuracy": sum_and_count((are_given == are_true).all(1).double(), is_labeled)}
        for index, name in enumerate(self.labels):
            hits = (are_given & are_true)[:, index].sum(dtype=torch.float64)
            named = are_given[:, index].sum() + are_true[:, index].sum()
            metrics[f"f1/{name}"] = torch.stack([2 * hits, named.double()])
        rows = torch.cat([scores.detach(), are_true.double()], 1)
        return Measured(
            share_of(losses.sum().float(), sequence_group),
            {name: pair.float() for name, pair in metrics.items()},
            rows=(rows,) if self.is_held_out else (),
        )

    def _read_classes(self, labels: Tensor) -> Tensor:
        """Whether each document has each class, bool[documents, classes]."""
        places = torch.arange(len(self.labels), device=labels.device)
        if self.has_several:
            return (labels[:, None] >> places & 1).bool()
        return labels[:, None] == places

    def _compare(self, scores: Tensor, are_true: Tensor) -> Tensor:
        """The losses, [documents, classes] or [documents], with the weights of the classes."""
        if self.has_several:
            each = F.binary_cross_entropy_with_logits(scores, are_true.double(), reduction="none")
            each = each / len(self.labels)
        else:
            each = -scores.log_softmax(1) * are_true
        # numbers of the host, so that the device is not waited for
        weighed = zip(each.unbind(1), self.weights, strict=True)
        return torch.stack([column * weight for column, weight in weighed], 1)

    def _decide(self, scores: Tensor) -> Tensor:
        """Which classes each document is given, bool[documents, classes]."""
        if self.has_several:
            return scores > 0
        return scores.argmax(1, keepdim=True) == torch.arange(
            len(self.labels), device=scores.device
        )

    def describe_rows(self, rows: Tensor) -> dict[str, float]:
        """Metrics of the scores' order and of their probabilities' calibration."""
        if not len(rows):
            return {}
        classes = len(self.labels)
        return describe_probabilities(rows[:, :classes], rows[:, classes:] > 0, self.has_several)

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """Adds the mean F1 of the classes that occur."""
        each = [value for name, value in means.items() if name.startswith("f1/")]
        if each:
            return means | {"f1_macro": sum(each) / len(each)}
        return means


@dataclass(frozen=True, slots=True)
class StepScores(Objective):
    """The mean over steps of answers of the cross entropy of whether each is right (Lightman et al.
    2023, arXiv:2305.20050, as TRL's PRMTrainer), with the metrics of two classes.
    """

    classes: ClassScores

    @classmethod
    def of(cls, _recipe: Recipe, _sequence_group: ProcessGroup | None) -> "StepScores":
        """The same of any recipe: ranks that divide a document's tokens have steps of their own."""
        return cls(ClassScores(STEP_SCORES, (1.0, 1.0), has_several=False, sequence_group=None))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's steps."""
        of_tokens: Tensor = model(**inputs, head_function=head_scores)
        labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
        return self.classes.describe(of_tokens.double(), labels, None)

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """Adds the mean F1 of both."""
        return self.classes.complete(means)


@dataclass(frozen=True, slots=True)
class RankedScores(Objective):
    """The loss of a reranker: how it orders a query's documents, against their relevance.

    The documents of a query are of one micro-batch.
    """

    loss_type: str
    group_size: int
    sequence_group: ProcessGroup | None

    def count(self, batch: StepBatch) -> int:
        """The queries of the step; its documents, where each is looked at alone."""
        if self.loss_type == POINTWISE:
            return batch.trained_tokens
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's queries, and where their documents stand."""
        micro_batch = micro_batch.with_documents()
        scores = score_documents(model, micro_batch, inputs, self.sequence_group)[:, 0]
        groups = (len(scores) // self.group_size, self.group_size)
        scores = scores.view(groups)
        numbers = read_numbers(find_labels(micro_batch, self.sequence_group)).view(groups)
        losses = RANKING[self.loss_type](scores, numbers)
        metrics = {"scores/mean": sum_and_count(scores.flatten())}
        if self.group_size > 1:
            metrics |= describe_order(scores.detach(), numbers)
        return Measured(
            share_of(losses.sum().float(), self.sequence_group),
            {name: pair.detach().float() for name, pair in metrics.items()},
        )


def _compare_pairs(scores: Tensor, numbers: Tensor) -> Tensor:
    """The mean over a query's pairs of which one answers better, [queries] (Burges et al. 2005,
    RankNet); 0 where there is none.
    """
    is_pair = numbers[:, :, None] > numbers[:, None, :]
    margins = scores[:, :, None] - scores[:, None, :]
    losses = torch.where(is_pair, -F.logsigmoid(margins), 0.0)
    return losses.sum((1, 2)) / is_pair.sum((1, 2)).clamp(min=1)


def _compare_shares(scores: Tensor, shares: Tensor) -> Tensor:
    """The cross entropy of the softmax over a query's documents, [queries]."""
    return -(shares * scores.log_softmax(1)).sum(1)


# By loss_type, what scores[queries, documents] lose against numbers of the same shape.
RANKING: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    POINTWISE: lambda scores, numbers: F.binary_cross_entropy_with_logits(
        scores, numbers.clamp(max=1), reduction="none"
    ),
    "pairwise": _compare_pairs,
    "listwise": lambda scores, numbers: _compare_shares(
        scores, numbers / numbers.sum(1, keepdim=True).clamp(min=TINY)
    ),
    # Cao et al. 2007, with the softmax of the numbers
    "listnet": lambda scores, numbers: _compare_shares(scores, numbers.softmax(1)),
}


SCORING: Mapping[RowKind, Callable[[Recipe, ProcessGroup | None], Objective]] = {
    "scored_pairs": lambda recipe, group: PairScores(
        recipe.method.center_rewards_coefficient, group
    ),
    "classes": ClassScores.of,
    "steps": StepScores.of,
    "ranked": lambda recipe, group: RankedScores(recipe.method.loss_type, recipe.group_size, group),
}


def score_documents(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """The scores of each document of the micro-batch at its labeled token, fp64[documents, scores].

    sequence_group: The ranks that divide the documents' tokens between them; each returns the
    scores of all.
    """
    of_tokens: Tensor = model(**inputs, head_function=head_scores)
    return sum_by_document(of_tokens, micro_batch, sequence_group)


def read_numbers(labels: Tensor) -> Tensor:
    """Returns the numbers that labels of `label_of_number` stand for, fp64 of the shape of
    `labels`.
    """
    return labels.to(torch.int32).view(torch.float32).double()


def find_labels(micro_batch: MicroBatch, sequence_group: ProcessGroup | None) -> Tensor:
    """The label of each document, int64[documents]."""
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    return sum_by_document(labels, micro_batch, sequence_group).long()
