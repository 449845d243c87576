"""Training a head of scores: reward models, classifiers, process reward models and rerankers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.methods import MULTI_LABEL, POINTWISE, STEP_SCORES, RowKind
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX, Names
from finetune.data.batches import MicroBatch, StepBatch
from finetune.models.head_scores import head_scores
from finetune.training.objectives.calibration import describe_probabilities
from finetune.training.objectives.objective import GroupObjective, Means, Measured, Objective
from finetune.training.objectives.preference import Pairs, make_measured, sum_and_count
from finetune.training.objectives.ranks import describe_order
from finetune.training.reference import sum_by_document

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class PairScores(GroupObjective):
    """The mean over pairs of -log sigmoid(chosen score - rejected score - margin) (Bradley and
    Terry 1952).

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin, 0 in rows without one: Touvron
    et al. 2023, arXiv:2307.09288, eq. 2; the centering: Eisenstein et al. 2023, arXiv:2312.09244,
    section 5, as TRL's RewardTrainer.
    """

    center_coefficient: float | None
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        micro_batch = micro_batch.with_documents()
        scores = Pairs.of(score_documents(model, micro_batch, inputs, self.sequence_group)[:, 0])
        # the chosen answer's label is the margin of the row
        row_margins = Pairs.of(read_numbers(find_labels(micro_batch, self.sequence_group))).chosen
        losses = -F.logsigmoid(scores.margin - row_margins)
        if self.center_coefficient is not None:
            losses = losses + self.center_coefficient * (scores.chosen + scores.rejected) ** 2
        metrics = {
            "rewards/chosen": sum_and_count(scores.chosen),
            "rewards/rejected": sum_and_count(scores.rejected),
            "rewards/margins": sum_and_count(scores.margin),
            "rewards/accuracies": sum_and_count((scores.margin > 0).double()),
        }
        return make_measured(losses.sum(), metrics, self.sequence_group)


@dataclass(frozen=True, slots=True)
class ClassScores(Objective):
    """The mean over documents of the cross entropy of their class.

    Its metrics are means over the documents of a step or of all held-out data: accuracy, and the F1
    of each class, whose mean is `f1_macro`. F1 is twice the documents of a class that are predicted
    to be of it, divided by the sum of those that are predicted to be and those that are.
    """

    labels: Names
    weights: tuple[float, ...]  # of the classes
    has_several: bool  # a document may have several classes, of which each is decided alone
    sequence_group: ProcessGroup | None
    is_held_out: bool = False

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ClassScores":
        """Makes the recipe's objective."""
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
        """Computes the loss and the metrics of documents from their scores.

        Args:
            scores: fp64[documents, classes].
            labels: int64[documents]; IGNORE_INDEX is no label.
            sequence_group: The ranks that know the same scores.
        """
        is_labeled = labels != IGNORE_INDEX
        are_true = self._read_classes(labels) & is_labeled[:, None]
        losses = self._compute_losses(scores, are_true)
        are_predicted = self._predict(scores.detach()) & is_labeled[:, None]
        is_right = (are_predicted == are_true).all(1)
        metrics = {"accuracy": sum_and_count(is_right.double(), is_labeled)}
        for index, name in enumerate(self.labels):
            hits = (are_predicted & are_true)[:, index].sum(dtype=torch.float64)
            named = are_predicted[:, index].sum() + are_true[:, index].sum()
            metrics[f"f1/{name}"] = torch.stack([2 * hits, named.double()])
        measured = make_measured(losses.sum(), metrics, sequence_group)
        if not self.is_held_out:
            return measured
        rows = torch.cat([scores.detach(), are_true.double()], 1)
        return replace(measured, rows=(rows,))

    def _read_classes(self, labels: Tensor) -> Tensor:
        """Reads from labels whether each document has each class, bool[documents, classes].

        A label is the index of a class; if there may be several classes, bit i stands for class i.
        """
        classes = torch.arange(len(self.labels), device=labels.device)
        if self.has_several:
            return (labels[:, None] >> classes & 1).bool()
        return labels[:, None] == classes

    def _compute_losses(self, scores: Tensor, are_true: Tensor) -> Tensor:
        """The losses by the classes' weights, [documents, classes]; one without label has none.

        A document's loss is their sum.
        """
        if self.has_several:
            losses = F.binary_cross_entropy_with_logits(scores, are_true.double(), reduction="none")
            losses = losses / len(self.labels)
        else:
            losses = -scores.log_softmax(1) * are_true
        # weights are numbers of the host: a tensor of them would have to be copied to the device
        weighed = zip(losses.unbind(1), self.weights, strict=True)
        return torch.stack([column * weight for column, weight in weighed], 1)

    def _predict(self, scores: Tensor) -> Tensor:
        """Predicts which classes each document has, bool[documents, classes]."""
        if self.has_several:
            return scores > 0
        classes = torch.arange(len(self.labels), device=scores.device)
        return scores.argmax(1, keepdim=True) == classes

    def describe_rows(self, rows: Tensor) -> Means:
        """Metrics of how the scores order documents, and how true their probabilities are.

        `rows`: fp64[documents, 2 x classes]: scores, then whether a document has each class.
        """
        if not len(rows):
            return {}
        classes = len(self.labels)
        return describe_probabilities(rows[:, :classes], rows[:, classes:] > 0, self.has_several)

    def complete(self, means: Means) -> Means:
        """Adds the mean F1 of the classes that occur."""
        scores = [value for name, value in means.items() if name.startswith("f1/")]
        if scores:
            return means | {"f1_macro": sum(scores) / len(scores)}
        return means


@dataclass(frozen=True, slots=True)
class StepScores(Objective):
    """The mean cross entropy of whether a step of an answer is right (Lightman et al. 2023,
    arXiv:2305.20050, as TRL's PRMTrainer), with the metrics of two classes.
    """

    classes: ClassScores

    @classmethod
    def of(cls, _recipe: Recipe, _sequence_group: ProcessGroup | None) -> "StepScores":
        """Makes the objective, on which no recipe has an influence.

        It needs no sequence group: of a document's steps, a rank has those among its own tokens.
        """
        return cls(ClassScores(STEP_SCORES, (1.0, 1.0), has_several=False, sequence_group=None))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's steps."""
        scores: Tensor = model(**inputs, head_function=head_scores)
        labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
        return self.classes.describe(scores.double(), labels, None)

    def complete(self, means: Means) -> Means:
        """Adds the mean F1 of both classes."""
        return self.classes.complete(means)


@dataclass(frozen=True, slots=True)
class RankedScores(Objective):
    """The loss of a reranker: of the scores of a query's documents, against their relevance.

    The documents of a query are in one micro-batch.
    """

    loss_type: str
    group_size: int
    sequence_group: ProcessGroup | None

    def count(self, batch: StepBatch) -> int:
        """The queries of the step; its documents if the loss looks at each alone."""
        if self.loss_type == POINTWISE:
            return batch.trained_tokens
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's queries, and metrics of their documents' order."""
        micro_batch = micro_batch.with_documents()
        scores = score_documents(model, micro_batch, inputs, self.sequence_group)[:, 0]
        shape = (len(scores) // self.group_size, self.group_size)  # [queries, documents]
        scores = scores.view(shape)
        relevance = read_numbers(find_labels(micro_batch, self.sequence_group)).view(shape)
        losses = RANKING[self.loss_type](scores, relevance)
        metrics = {"scores/mean": sum_and_count(scores.flatten())}
        if self.group_size > 1:
            metrics |= describe_order(scores.detach(), relevance)
        return make_measured(losses.sum(), metrics, self.sequence_group)


def _compare_pairs(scores: Tensor, relevance: Tensor) -> Tensor:
    """The mean of -log sigmoid(score difference) over a query's pairs of a more and a less relevant
    document, [queries] (RankNet: Burges et al. 2005); 0 without such pairs.
    """
    is_pair = relevance[:, :, None] > relevance[:, None, :]
    margins = scores[:, :, None] - scores[:, None, :]
    losses = torch.where(is_pair, -F.logsigmoid(margins), 0.0)
    return losses.sum((1, 2)) / is_pair.sum((1, 2)).clamp(min=1)


def _compare_shares(scores: Tensor, shares: Tensor) -> Tensor:
    """The cross entropy of the softmax over a query's documents against `shares`, which add up to
    1; [queries].
    """
    return -(shares * scores.log_softmax(1)).sum(1)


# loss_type -> the losses, [queries] or [queries, documents], of scores against relevance, both
# [queries, documents]
RANKING: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    POINTWISE: lambda scores, relevance: F.binary_cross_entropy_with_logits(
        scores, relevance.clamp(max=1), reduction="none"
    ),
    "pairwise": _compare_pairs,
    "listwise": lambda scores, relevance: _compare_shares(
        scores, relevance / relevance.sum(1, keepdim=True).clamp(min=TINY)
    ),
    # Cao et al. 2007
    "listnet": lambda scores, relevance: _compare_shares(scores, relevance.softmax(1)),
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
    """Computes the scores of each document of the micro-batch at its one labeled token,
    fp64[documents, scores].

    `sequence_group`: the ranks that divide the documents' tokens between them; each returns the
    scores of all.
    """
    scores_of_tokens: Tensor = model(**inputs, head_function=head_scores)
    return sum_by_document(scores_of_tokens, micro_batch, sequence_group)


def read_numbers(labels: Tensor) -> Tensor:
    """Reads the numbers whose bits `label_of_number` made the labels of; fp64 of their shape."""
    return labels.to(torch.int32).view(torch.float32).double()


def find_labels(micro_batch: MicroBatch, sequence_group: ProcessGroup | None) -> Tensor:
    """Finds the label of each document, int64[documents]."""
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    return sum_by_document(labels, micro_batch, sequence_group).long()
