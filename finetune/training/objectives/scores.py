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

TINY = torch.finfo(torch.float64).tiny  # keeps a division by a sum of zeros finite


@dataclass(frozen=True, slots=True)
class PairScores(GroupObjective):
    """The loss of a reward model: -log sigmoid(chosen score - rejected score - margin), averaged
    over pairs (Bradley and Terry 1952).

    A row without a margin has margin 0. Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; of the
    margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2; of the centering: Eisenstein et al. 2023,
    arXiv:2312.09244, section 5, as in TRL's RewardTrainer.
    """

    # the weight of the squared sum of both scores in the loss; None: that term is left out
    center_coefficient: float | None
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's pairs, with the metrics that TRL has."""
        micro_batch = micro_batch.with_documents()
        document_scores = score_documents(model, micro_batch, inputs, self.sequence_group)
        scores = Pairs.of(document_scores[:, 0])  # the head has one score
        # the label of a chosen answer holds the margin of the row
        numbers = Pairs.of(read_numbers(find_labels(micro_batch, self.sequence_group)))
        row_margins = numbers.chosen
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
    """The loss of a classifier: the cross entropy of a document's class, averaged over documents.

    The metrics are computed over the documents of a step or of all held-out data: accuracy, and the
    F1 of each class, whose mean is `f1_macro`. F1 is 2 x hits / (predicted + true): the documents
    of the class that are predicted to be so, all that are predicted to be so, and all of the class.
    """

    labels: Names  # the names of the classes
    weights: tuple[float, ...]  # of each class, in the loss
    has_several: bool  # whether a document may have several classes; each is then decided alone
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them
    is_held_out: bool = False  # then the scores of all documents are kept for `describe_rows`

    @classmethod
    def of(cls, recipe: Recipe, sequence_group: ProcessGroup | None) -> "ClassScores":
        """Makes the objective of the recipe's keys; classes without weights have the weight 1."""
        labels = recipe.data.labels
        weights = recipe.method.class_weights or (1.0,) * len(labels)
        return cls(labels, weights, recipe.data.problem_type == MULTI_LABEL, sequence_group)

    def for_evaluation(self) -> "ClassScores":
        """Returns the objective of held-out data, which also keeps scores for `describe_rows`."""
        return replace(self, is_held_out=True)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's documents, with their metrics."""
        micro_batch = micro_batch.with_documents()
        scores = score_documents(model, micro_batch, inputs, self.sequence_group)
        labels = find_labels(micro_batch, self.sequence_group)
        return self.describe(scores, labels, self.sequence_group)

    def describe(
        self, scores: Tensor, labels: Tensor, sequence_group: ProcessGroup | None
    ) -> Measured:
        """Computes the loss and the metrics of documents from their scores.

        `StepScores` passes the steps of answers instead of documents.

        Args:
            scores: fp64[documents, classes].
            labels: int64[documents], as `_read_classes` reads them; IGNORE_INDEX: the document has
                no label, and does not count.
            sequence_group: The ranks that call this with the same scores; None: this rank alone.
        """
        is_labeled = labels != IGNORE_INDEX
        are_true = self._read_classes(labels) & is_labeled[:, None]
        losses = self._compute_losses(scores, are_true)
        are_predicted = self._predict(scores.detach()) & is_labeled[:, None]
        is_right = (are_predicted == are_true).all(1)
        metrics = {"accuracy": sum_and_count(is_right.double(), is_labeled)}
        for index, name in enumerate(self.labels):
            hits = (are_predicted & are_true)[:, index].sum(dtype=torch.float64)
            predicted_and_true = are_predicted[:, index].sum() + are_true[:, index].sum()
            metrics[f"f1/{name}"] = torch.stack([2 * hits, predicted_and_true.double()])
        measured = make_measured(losses.sum(), metrics, sequence_group)
        if not self.is_held_out:
            return measured
        rows = torch.cat([scores.detach(), are_true.double()], 1)
        return replace(measured, rows=(rows,))

    def _read_classes(self, labels: Tensor) -> Tensor:
        """Reads from the labels which classes each document has, bool[documents, classes].

        A label is the index of the document's class. With `has_several`, the bits of a label stand
        for the classes: bit i is set if the document has class i.
        """
        classes = torch.arange(len(self.labels), device=labels.device)
        if self.has_several:
            return ((labels[:, None] >> classes) & 1).bool()
        return labels[:, None] == classes

    def _compute_losses(self, scores: Tensor, are_true: Tensor) -> Tensor:
        """Computes the weighted losses of each class, fp64[documents, classes].

        A document's loss is the sum over its row. Each row is the cross entropy of one class; with
        `has_several`, the mean of the binary cross entropies of all classes.
        """
        if self.has_several:
            losses = F.binary_cross_entropy_with_logits(scores, are_true.double(), reduction="none")
            losses = losses / len(self.labels)
        else:
            losses = -scores.log_softmax(1) * are_true
        # Column by column, since a tensor of weights would have to be copied to the device.
        by_class = zip(losses.unbind(1), self.weights, strict=True)
        return torch.stack([class_losses * weight for class_losses, weight in by_class], 1)

    def _predict(self, scores: Tensor) -> Tensor:
        """Predicts which classes each document has, bool[documents, classes]."""
        if self.has_several:
            return scores > 0
        classes = torch.arange(len(self.labels), device=scores.device)
        return scores.argmax(1, keepdim=True) == classes

    def describe_rows(self, rows: Tensor) -> Means:
        """Computes the metrics of the held-out documents' probabilities (`calibration.py`).

        `rows`: fp64[documents, 2 x classes]: the scores, and then whether the document has each
        class (1 or 0). Without rows there are no metrics.
        """
        if not len(rows):
            return {}
        classes = len(self.labels)
        scores = rows[:, :classes]
        are_true = rows[:, classes:] > 0
        return describe_probabilities(scores, are_true, self.has_several)

    def complete(self, means: Means) -> Means:
        """Adds the mean F1 over the classes that occur, predicted or true."""
        f1_scores = [value for name, value in means.items() if name.startswith("f1/")]
        if f1_scores:
            return means | {"f1_macro": sum(f1_scores) / len(f1_scores)}
        return means


@dataclass(frozen=True, slots=True)
class StepScores(Objective):
    """The loss of a process reward model: the cross entropy of whether a step of an answer is
    right, averaged over steps (Lightman et al. 2023, arXiv:2305.20050, as in TRL's PRMTrainer).

    It needs no sequence group: each rank measures only the steps among its own tokens.
    """

    # computes loss and metrics of the two classes, right and wrong
    classes: ClassScores = ClassScores(
        STEP_SCORES, weights=(1.0, 1.0), has_several=False, sequence_group=None
    )

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's steps, with their metrics."""
        scores: Tensor = model(**inputs, head_function=head_scores)
        labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
        return self.classes.describe(scores.double(), labels, sequence_group=None)

    def complete(self, means: Means) -> Means:
        """Adds the mean F1 over both classes."""
        return self.classes.complete(means)


@dataclass(frozen=True, slots=True)
class RankedScores(Objective):
    """The loss of a reranker, which compares the scores of a query's documents with their
    relevance.

    The documents of a query are in one micro-batch.
    """

    loss_type: str  # a key of `RANKING`
    group_size: int  # documents of a query
    sequence_group: ProcessGroup | None  # the ranks that divide the documents' tokens between them

    def count(self, batch: StepBatch) -> int:
        """Returns the divisor of the step's loss: its queries, or its documents if the loss takes
        each document alone.
        """
        if self.loss_type == POINTWISE:
            return batch.trained_tokens  # one in each document
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's queries, with metrics of their documents' order."""
        micro_batch = micro_batch.with_documents()
        document_scores = score_documents(model, micro_batch, inputs, self.sequence_group)
        queries = len(document_scores) // self.group_size
        shape = (queries, self.group_size)  # [queries, documents of each]
        scores = document_scores[:, 0].view(shape)  # the head has one score
        relevance = read_numbers(find_labels(micro_batch, self.sequence_group)).view(shape)
        losses = RANKING[self.loss_type](scores, relevance)
        metrics = {"scores/mean": sum_and_count(scores.flatten())}
        if self.group_size > 1:
            metrics |= describe_order(scores.detach(), relevance)
        return make_measured(losses.sum(), metrics, self.sequence_group)


def _compare_pairs(scores: Tensor, relevance: Tensor) -> Tensor:
    """Computes the losses of RankNet (Burges et al. 2005), [queries].

    A loss is the mean of -log sigmoid(score difference) over the query's pairs of a more and a less
    relevant document; 0 if there are no such pairs. Both arguments are [queries, documents].
    """
    # [queries, documents, documents]: whether the first document is more relevant than the second
    is_pair = relevance[:, :, None] > relevance[:, None, :]
    margins = scores[:, :, None] - scores[:, None, :]
    losses = torch.where(is_pair, -F.logsigmoid(margins), 0.0)
    return losses.sum((1, 2)) / is_pair.sum((1, 2)).clamp(min=1)


def _compare_shares(scores: Tensor, shares: Tensor) -> Tensor:
    """Computes the cross entropy of the softmax over a query's documents, [queries].

    `shares`: [queries, documents], the target probabilities. They add up to 1 for each query; a
    query whose shares are all 0 has loss 0.
    """
    return -(shares * scores.log_softmax(1)).sum(1)


# loss_type -> (scores, relevance), both [queries, documents] -> the losses: [queries], or
# [queries, documents] if the loss takes each document alone
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


# kind of rows -> a function that makes the objective from the recipe and the sequence group
SCORING: Mapping[RowKind, Callable[[Recipe, ProcessGroup | None], Objective]] = {
    "scored_pairs": lambda recipe, group: PairScores(
        recipe.method.center_rewards_coefficient, group
    ),
    "classes": ClassScores.of,
    "steps": lambda _recipe, _group: StepScores(),
    "ranked": lambda recipe, group: RankedScores(recipe.method.loss_type, recipe.group_size, group),
}


def score_documents(
    model: nn.Module,
    micro_batch: MicroBatch,
    inputs: Mapping[str, Any],
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """Computes the scores of each document of the micro-batch, fp64[documents, scores].

    They are the head's output at the document's only labeled token.

    `micro_batch`: with `trained_documents`. `sequence_group`: the ranks that divide the documents'
    tokens between them; each returns the scores of all. None: this rank has all tokens.
    """
    scores_of_tokens: Tensor = model(**inputs, head_function=head_scores)
    # the sum over one token is its score
    return sum_by_document(scores_of_tokens, micro_batch, sequence_group)


def read_numbers(labels: Tensor) -> Tensor:
    """Turns labels that `label_of_number` made back into the numbers, fp64 in the labels' shape.

    Such a label, int64, is the bits of the number in fp32.
    """
    return labels.to(torch.int32).view(torch.float32).double()


def find_labels(micro_batch: MicroBatch, sequence_group: ProcessGroup | None) -> Tensor:
    """Finds the label of each document's only labeled token, int64[documents].

    The arguments are those of `score_documents`.
    """
    labels = micro_batch.labels.flatten()[micro_batch.trained_positions]
    # the sum over one token is its label
    return sum_by_document(labels, micro_batch, sequence_group).long()
