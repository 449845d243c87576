"""Training on preferences: DPO, ORPO, SimPO and KTO as objectives over the log-probabilities of
documents.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.methods import Method
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.world import World
from finetune.training.objectives.objective import GroupObjective, Means, Measured, Metrics
from finetune.training.reference import Reference, evaluating, sum_log_probabilities


class Pairs(NamedTuple):
    """A number of each pair's chosen and rejected answer: log-probabilities, tokens, rewards."""

    chosen: Tensor  # [pairs]
    rejected: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> "Pairs":
        """Splits [documents], which alternate: chosen, rejected, chosen, rejected..."""
        return cls(documents[::2], documents[1::2])

    @property
    def margin(self) -> Tensor:
        """The chosen answers' numbers minus the rejected ones', [pairs]."""
        return self.chosen - self.rejected

    def __sub__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.chosen - other.chosen, self.rejected - other.rejected)

    def __truediv__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.chosen / other.chosen, self.rejected / other.rejected)


def dpo_losses(
    log_ratios: Pairs, tokens: Pairs, keys: Method, label_smoothing: float = 0.0
) -> Tensor:
    """Computes the losses of direct preference optimization, [pairs], without the cross entropy
    that `rpo_alpha` adds.

    Args:
        log_ratios: Log-probabilities summed over each answer's tokens, minus the reference's.
        tokens: The number of each answer's tokens, over which IPO alone averages, as TRL does and
            its authors confirmed.
        keys: With loss_type and beta.
        label_smoothing: The share of pairs whose order is wrong (Mitchell 2023, "A note on DPO with
            noisy preferences").

    Source: sigmoid: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; hinge: Zhao et al. 2023,
    arXiv:2305.10425, eq. 6 (SLiC), on DPO's margin; ipo: Azar et al. 2023, arXiv:2310.12036, eq.
    17, with tau = beta; apo_zero: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 2.
    """
    if keys.loss_type == "ipo":
        return ((log_ratios / tokens).margin - 1 / (2 * keys.beta)) ** 2
    if keys.loss_type == "apo_zero":
        chosen_losses = torch.sigmoid(-keys.beta * log_ratios.chosen)
        return chosen_losses + torch.sigmoid(keys.beta * log_ratios.rejected)
    margin = keys.beta * log_ratios.margin
    if keys.loss_type == "hinge":
        return torch.relu(1 - margin)
    return _smoothed(margin, label_smoothing)


def orpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, Metrics]:
    """Computes the odds ratio's part of odds ratio preference optimization.

    The other part is the cross entropy of the chosen answers. Source: Hong et al. 2024,
    arXiv:2403.07691, eq. 6 and 7.

    Args:
        averages: Log-probabilities per token.
        keys: With beta, the paper's lambda.

    Returns:
        (the losses, [pairs]; the log odds ratio as a metric).
    """
    log_odds_ratio = averages.margin - (_log1mexp(averages.chosen) - _log1mexp(averages.rejected))
    losses = -keys.beta * F.logsigmoid(log_odds_ratio)
    return losses, {"log_odds_chosen": sum_and_count(log_odds_ratio)}


def simpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, Metrics]:
    """Computes the losses of simple preference optimization, [pairs]; it has no metrics of its own.

    `averages`: log-probabilities per token. Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    return -F.logsigmoid(keys.beta * averages.margin - keys.simpo_gamma), {}


# (losses and metrics of averages; the weight of the chosen answers' cross entropy beside them)
PairedLoss = tuple[Callable[[Pairs, Method], tuple[Tensor, Metrics]], float]
WITH_REFERENCE: Mapping[str, Callable[[Pairs, Pairs, Method, float], Tensor]] = {"dpo": dpo_losses}
WITHOUT_REFERENCE: Mapping[str, PairedLoss] = {
    "orpo": (orpo_losses, 1.0),
    "simpo": (simpo_losses, 0.0),
}


def kto_losses(log_ratios: Tensor, desirable: Tensor, kl: Tensor, keys: Method) -> Tensor:
    """Computes the losses of Kahneman-Tversky optimization, [answers].

    Args:
        log_ratios: Log-probabilities summed over each answer's tokens, minus the reference's.
        desirable: bool[answers], whether the answer is rated good.
        kl: 0-dim, how far the model is from the reference; without a gradient, not below 0.
        keys: With beta and the weights of both ratings.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    gain = torch.where(desirable, log_ratios - kl, kl - log_ratios)
    weights = torch.where(desirable, keys.desirable_weight, keys.undesirable_weight)
    return weights * (1 - torch.sigmoid(keys.beta * gain))


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    return -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing


def _log1mexp(x: Tensor) -> Tensor:
    """Computes log(1 - exp(x)) for x <= 0, without cancellation (Maechler 2012).

    Takes a probability exp(x) that rounds to 1 as one fp32 step below it, so that odds are finite;
    they have no gradient there.
    """
    x = x.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


@dataclass(frozen=True, slots=True)
class PreferenceObjective(GroupObjective):
    """The mean of a method's loss over pairs, beside the chosen answers' cross entropy if it has
    one.

    That cross entropy is the mean over the chosen answers' tokens of the whole step, not of a
    micro-batch.
    """

    keys: Method
    reference: Reference | None  # None: the method needs none
    label_smoothing: float = 0.0
    # the mean trained tokens of a chosen answer; None: of the step's. Of held-out data it is that
    # of all batches.
    chosen_tokens_per_pair: float | None = None
    # the ranks that divide the documents' tokens between them
    sequence_group: ProcessGroup | None = None

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        keys = self.keys
        reference = None
        if self.reference is not None:
            reference = Pairs.of(self.reference(model, micro_batch))
        sums, tokens = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        policy = Pairs.of(sums)
        lengths = Pairs.of(tokens)
        metrics: Metrics = {}
        if reference is not None:
            compute_losses = WITH_REFERENCE[keys.method]
            log_ratios = policy - reference
            losses = compute_losses(log_ratios, lengths, keys, self.label_smoothing)
            nll_weight = keys.rpo_alpha or 0.0
            metrics |= _describe_pairs(policy, log_ratios, keys.beta)
        else:
            compute, nll_weight = WITHOUT_REFERENCE[keys.method]
            averages = policy / lengths
            losses, metrics = compute(averages, keys)
            metrics |= _describe_pairs(averages, averages, keys.beta)
        loss = losses.sum()
        if nll_weight:
            mean_tokens = self.chosen_tokens_per_pair or batch.chosen_tokens / max(1, batch.groups)
            loss = loss - nll_weight * policy.chosen.sum() / mean_tokens
            metrics["nll_loss"] = torch.stack([-policy.chosen.sum(), lengths.chosen.sum()])
        return make_measured(loss, metrics, self.sequence_group)


def _describe_pairs(log_probabilities: Pairs, log_ratios: Pairs, beta: float) -> Metrics:
    """TRL's metrics of pairs; the reward of an answer is beta times its log ratio."""
    rewards = Pairs(beta * log_ratios.chosen, beta * log_ratios.rejected)
    margins = beta * log_ratios.margin
    return {
        "rewards/chosen": sum_and_count(rewards.chosen),
        "rewards/rejected": sum_and_count(rewards.rejected),
        "rewards/margins": sum_and_count(margins),
        "rewards/accuracies": sum_and_count((margins > 0).double()),
        "logps/chosen": sum_and_count(log_probabilities.chosen),
        "logps/rejected": sum_and_count(log_probabilities.rejected),
    }


@dataclass(frozen=True, slots=True)
class RatingObjective(GroupObjective):
    """KTO: the mean over rated answers of their loss.

    Every answer's loss depends on how far the model is from its reference. That is estimated from
    the mismatched answers (the prompts with other prompts' answers) of a step or an evaluation, on
    all ranks: in a forward before the first backward.
    """

    keys: Method
    reference: Reference
    kl: Tensor | None = None  # 0-dim fp64; None before `prepare`
    # the ranks that divide the documents' tokens between them
    sequence_group: ProcessGroup | None = None

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "RatingObjective":
        """Returns the objective with the KL divergence of the model in training from its reference,
        which is estimated without dropout.
        """
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for micro_batch in micro_batches():
            assert micro_batch.mismatched is not None, "rated answers come with mismatched ones"
            mismatched = micro_batch.mismatched.to(world.device)
            with evaluating(model):
                log_probabilities, _ = sum_log_probabilities(
                    model, mismatched, mismatched.inputs, self.sequence_group
                )
                total += sum_and_count(log_probabilities - self.reference(model, mismatched))
        world.sum(total)
        log_ratio_sum, answers = total.unbind()
        return replace(self, kl=(log_ratio_sum / answers.clamp(min=1)).clamp(min=0))

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's answers, and TRL's metrics of them, which call those
        rated good chosen.
        """
        desirable = micro_batch.desirable
        kl = self.kl
        assert desirable is not None and kl is not None, (
            "answers are rated, and `prepare` has been called"
        )
        reference = self.reference(model, micro_batch)
        policy, _ = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        log_ratios = policy - reference
        losses = kto_losses(log_ratios, desirable, kl, self.keys)
        rewards = self.keys.beta * log_ratios
        metrics = {
            "rewards/chosen": sum_and_count(rewards, desirable),
            "rewards/rejected": sum_and_count(rewards, ~desirable),
            "logps/chosen": sum_and_count(policy, desirable),
            "logps/rejected": sum_and_count(policy, ~desirable),
            "kl": torch.stack([kl, torch.ones_like(kl)]),
        }
        return make_measured(losses.sum(), metrics, self.sequence_group)

    def complete(self, means: Means) -> Means:
        """Adds the margin between the average rewards, since no answer has a partner."""
        if not {"rewards/chosen", "rewards/rejected"} <= means.keys():
            return means
        return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


def make_measured(
    loss: Tensor, metrics: Mapping[str, Tensor], sequence_group: ProcessGroup | None
) -> Measured:
    """What this rank measured, in fp32, where all ranks of a sequence compute the same loss.

    Each rank has its share of the loss; metrics are means, and need no share.
    """
    detached = {name: pair.detach().float() for name, pair in metrics.items()}
    return Measured(share_of(loss.float(), sequence_group), detached)


def share_of(loss: Tensor, sequence_group: ProcessGroup | None) -> Tensor:
    """A rank's share of a loss that all ranks of a sequence compute."""
    if sequence_group is None:
        return loss
    return loss / sequence_group.size()


def sum_and_count(values: Tensor, where: Tensor | None = None) -> Tensor:
    """Returns a mean as ranks add it up, fp64[2]: the sum of `values`, and their number.

    `where`: bool of the shape of `values`, those that count; None: all do.
    """
    if where is None:
        counted = torch.ones_like(values)
    else:
        counted = where.to(values.dtype)
    return torch.stack(
        [(values * counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)]
    )
