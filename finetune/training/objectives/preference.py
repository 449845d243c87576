"""Training on preferences: DPO, ORPO, SimPO and KTO as objectives over the documents'
log-probabilities.

The functions at the end (`make_measured`, `sum_and_count`) serve other objectives too.
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
    """A value for each chosen and each rejected answer of several pairs, such as its reward."""

    chosen: Tensor  # [pairs]
    rejected: Tensor  # [pairs]

    @classmethod
    def of(cls, values: Tensor) -> "Pairs":
        """Splits the documents' values, [documents]: the chosen and the rejected answer of the
        first pair, those of the second pair, and so on.
        """
        return cls(values[::2], values[1::2])

    @property
    def margin(self) -> Tensor:
        """The chosen answer's value minus the rejected answer's, [pairs]."""
        return self.chosen - self.rejected

    def __sub__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.chosen - other.chosen, self.rejected - other.rejected)

    def __truediv__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.chosen / other.chosen, self.rejected / other.rejected)


def dpo_losses(log_ratios: Pairs, tokens: Pairs, keys: Method, label_smoothing: float) -> Tensor:
    """Computes the losses of direct preference optimization, [pairs].

    The cross entropy of `rpo_alpha` is not among them.

    Args:
        log_ratios: Log-probabilities summed over each answer's tokens, minus the reference's.
        tokens: The number of each answer's tokens. Only IPO reads it: it averages over tokens, as
            in TRL, and as its authors confirmed.
        keys: With loss_type and beta.
        label_smoothing: The assumed share of pairs in the wrong order (Mitchell 2023, "A note on
            DPO with noisy preferences"). Only loss_type sigmoid reads it.

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
    kept = -F.logsigmoid(margin) * (1 - label_smoothing)
    flipped = -F.logsigmoid(-margin) * label_smoothing
    return kept + flipped


def orpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, Metrics]:
    """Computes one of the two terms of odds ratio preference optimization: that of the odds ratio.

    The other term is the cross entropy of the chosen answers. Source: Hong et al. 2024,
    arXiv:2403.07691, eq. 6 and 7.

    Args:
        averages: Each answer's log-probability, averaged over its tokens.
        keys: With beta, the paper's lambda.

    Returns:
        (the losses, [pairs]; the log odds ratio as a metric).
    """
    log_odds_ratio = averages.margin - (_log1mexp(averages.chosen) - _log1mexp(averages.rejected))
    losses = -keys.beta * F.logsigmoid(log_odds_ratio)
    return losses, {"log_odds_chosen": sum_and_count(log_odds_ratio)}


def simpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, Metrics]:
    """Computes the losses of simple preference optimization.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Args:
        averages: Each answer's log-probability, averaged over its tokens.
        keys: With beta and simpo_gamma.

    Returns:
        (the losses, [pairs]; no metrics).
    """
    return -F.logsigmoid(keys.beta * averages.margin - keys.simpo_gamma), {}


# (the function that computes losses and metrics from averages per token; the weight of the chosen
# answers' cross entropy that is added to the losses)
PairedLoss = tuple[Callable[[Pairs, Method], tuple[Tensor, Metrics]], float]
# method -> its losses; `PreferenceObjective.measure` calls them
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
        kl: 0-dim, the estimated KL divergence of the model from the reference; without a gradient,
            at least 0.
        keys: With beta and the weights of both ratings.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    gain = torch.where(desirable, log_ratios - kl, kl - log_ratios)
    weights = torch.where(desirable, keys.desirable_weight, keys.undesirable_weight)
    return weights * (1 - torch.sigmoid(keys.beta * gain))


def _log1mexp(x: Tensor) -> Tensor:
    """Computes log(1 - exp(x)) for x <= 0, without cancellation (Maechler 2012).

    A probability exp(x) closer to 1 than fp32's epsilon counts as 1 - epsilon, so that odds are
    finite. It has no gradient then.
    """
    x = x.clamp(max=-torch.finfo(torch.float32).eps)
    minus_log_2 = -0.693  # where the paper changes from one formula to the other
    return torch.where(x > minus_log_2, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


@dataclass(frozen=True, slots=True)
class PreferenceObjective(GroupObjective):
    """The mean over pairs of a method's loss, plus the weighted cross entropy of the chosen answers
    if the method has that term.

    The cross entropy is averaged over the chosen answers' tokens of the whole step, not of one
    micro-batch.
    """

    keys: Method
    reference: Reference | None  # None: the method needs none
    label_smoothing: float = 0.0
    # How many trained tokens a chosen answer has on average; None: the average of the step. It is
    # set for held-out data, whose loss is one average over all batches.
    chosen_tokens_per_pair: float | None = None
    # the ranks that divide the documents' tokens between them
    sequence_group: ProcessGroup | None = None

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the losses of the micro-batch's pairs, with the metrics that TRL has."""
        keys = self.keys
        # The reference runs first: the last forward must be the trained one.
        reference = None
        if self.reference is not None:
            reference = Pairs.of(self.reference(model, micro_batch))
        sums, token_counts = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        policy = Pairs.of(sums)
        tokens = Pairs.of(token_counts)
        metrics: Metrics = {}
        if reference is not None:
            compute_with_reference = WITH_REFERENCE[keys.method]
            log_ratios = policy - reference
            losses = compute_with_reference(log_ratios, tokens, keys, self.label_smoothing)
            nll_weight = keys.rpo_alpha or 0.0
            metrics |= _describe_pairs(policy, log_ratios, keys.beta)
        else:
            compute, nll_weight = WITHOUT_REFERENCE[keys.method]
            averages = policy / tokens
            losses, metrics = compute(averages, keys)
            metrics |= _describe_pairs(averages, averages, keys.beta)
        loss = losses.sum()
        if nll_weight:
            # The step divides the loss by its pairs: together that is a division by chosen tokens.
            average_of_step = batch.chosen_tokens / max(1, batch.groups)
            tokens_per_pair = self.chosen_tokens_per_pair or average_of_step
            loss = loss - nll_weight * policy.chosen.sum() / tokens_per_pair
            metrics["nll_loss"] = torch.stack([-policy.chosen.sum(), tokens.chosen.sum()])
        return make_measured(loss, metrics, self.sequence_group)


def _describe_pairs(log_probabilities: Pairs, log_ratios: Pairs, beta: float) -> Metrics:
    """Makes the metrics of pairs that TRL has. An answer's reward is `beta` times its log ratio.

    Without a reference, both `log_probabilities` and `log_ratios` are averages per token.
    """
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

    Each loss depends on the KL divergence of the model from its reference. `prepare` estimates it
    from the mismatched answers (prompts with the answers of other prompts) of a whole step or
    evaluation on all ranks.
    """

    keys: Method
    reference: Reference
    kl: Tensor | None = None  # the estimated divergence, 0-dim fp64; None before `prepare`
    # the ranks that divide the documents' tokens between them
    sequence_group: ProcessGroup | None = None

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "RatingObjective":
        """Estimates the KL divergence of the model in training from its reference, without dropout.

        Returns:
            The objective with `kl`.
        """
        # the sum of the log ratios, and the number of answers
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
        """Sums the losses of the micro-batch's answers, with the metrics that TRL has.

        Their names call the answers that are rated good "chosen", and the others "rejected".
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
        """Adds the margin between the average rewards of good and bad answers.

        It is no mean over pairs, since answers have no partners.
        """
        if not {"rewards/chosen", "rewards/rejected"} <= means.keys():
            return means  # all answers have the same rating
        return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


def make_measured(
    loss: Tensor, metrics: Mapping[str, Tensor], sequence_group: ProcessGroup | None
) -> Measured:
    """Makes the `Measured` of a loss that every rank of `sequence_group` computes, in fp32.

    The loss is divided by the number of these ranks, since all ranks' losses are added up. Metrics
    are not: they are quotients of two sums, in which the number cancels out.
    """
    detached = {name: pair.detach().float() for name, pair in metrics.items()}
    ranks = 1 if sequence_group is None else sequence_group.size()
    return Measured(loss.float() / ranks, detached)


def sum_and_count(values: Tensor, where: Tensor | None = None) -> Tensor:
    """Computes a metric that is a mean of `values`: their sum and their number, fp64[2].

    `where`: which values count, bool in the shape of `values`; None: all of them.
    """
    if where is None:
        weights = torch.ones_like(values)
    else:
        weights = where.to(values.dtype)
    return torch.stack(
        [(values * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64)]
    )
