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
from finetune.training.objectives.objective import Measured, Objective
from finetune.training.reference import Reference, evaluating, sum_log_probabilities


class Pairs(NamedTuple):
    """A number of each pair's chosen and rejected answer: log-probabilities, tokens, rewards."""

    chosen: Tensor  # [pairs]
    rejected: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> "Pairs":
        """Takes them apart from [documents]: chosen, rejected, chosen, rejected..."""
        return cls(documents[::2], documents[1::2])

    @property
    def margin(self) -> Tensor:
        """The chosen side's numbers less the rejected side's."""
        return self.chosen - self.rejected

    def divide_by(self, other: "Pairs") -> "Pairs":
        """Element by element."""
        return Pairs(self.chosen / other.chosen, self.rejected / other.rejected)


def dpo_losses(
    log_ratios: Pairs, tokens: Pairs, keys: Method, label_smoothing: float = 0.0
) -> Tensor:
    """Direct preference optimization, [pairs], without the term of `rpo_alpha`.

    Args:
        log_ratios: log-probabilities summed over each answer's tokens, minus the reference's.
        tokens: of each answer; IPO's alone are averaged over them, as TRL's, which its authors
            confirmed.
        label_smoothing: the share of pairs whose order is wrong (Mitchell 2023, "A note on DPO with
            noisy preferences").

    Source: sigmoid: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; hinge: Zhao et al. 2023,
    arXiv:2305.10425, eq. 6 (SLiC), on DPO's margin; ipo: Azar et al. 2023, arXiv:2310.12036, eq.
    17, with tau = beta; apo_zero: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 2.
    """
    if keys.loss_type == "ipo":
        return (log_ratios.divide_by(tokens).margin - 1 / (2 * keys.beta)) ** 2
    if keys.loss_type == "apo_zero":
        return torch.sigmoid(-keys.beta * log_ratios.chosen) + torch.sigmoid(
            keys.beta * log_ratios.rejected
        )
    margin = keys.beta * log_ratios.margin
    if keys.loss_type == "hinge":
        return torch.relu(1 - margin)
    return _smoothed(margin, label_smoothing)


def orpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, dict[str, Tensor]]:
    """The odds ratio's part of odds ratio preference optimization, [pairs], and the log odds ratio
    as a metric.

    averages: log-probabilities per token. The other part is the cross entropy of the chosen
    answers. Source: Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; beta is its lambda.
    """
    log_odds_ratio = averages.margin - (_log1mexp(averages.chosen) - _log1mexp(averages.rejected))
    return -keys.beta * F.logsigmoid(log_odds_ratio), {
        "log_odds_chosen": sum_and_count(log_odds_ratio)
    }


def simpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, dict[str, Tensor]]:
    """Simple preference optimization, [pairs], without metrics of its own. averages:
    log-probabilities per token.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    return -F.logsigmoid(keys.beta * averages.margin - keys.simpo_gamma), {}


# A loss with metrics of its own, and the weight of the chosen answers' cross entropy beside it.
PairedLoss = tuple[Callable[[Pairs, Method], tuple[Tensor, dict[str, Tensor]]], float]
WITH_REFERENCE: Mapping[str, Callable[[Pairs, Pairs, Method, float], Tensor]] = {"dpo": dpo_losses}
WITHOUT_REFERENCE: Mapping[str, PairedLoss] = {
    "orpo": (orpo_losses, 1.0),
    "simpo": (simpo_losses, 0.0),
}


def kto_losses(log_ratios: Tensor, desirable: Tensor, kl: Tensor, keys: Method) -> Tensor:
    """Kahneman-Tversky optimization, [answers].

    Args:
        log_ratios: log-probabilities summed over each answer's tokens, minus the reference's.
        desirable: bool[answers], whether the answer is rated good.
        kl: 0-dim, how far the model is from the reference; without a gradient, not below 0.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    gain = torch.where(desirable, log_ratios - kl, kl - log_ratios)
    weights = torch.where(desirable, keys.desirable_weight, keys.undesirable_weight)
    return weights * (1 - torch.sigmoid(keys.beta * gain))


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    return -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, without cancellation (Maechler 2012).

    Where the probability rounds to 1, one step below 1 is taken: the odds are finite, and have no
    gradient.
    """
    x = x.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


@dataclass(frozen=True, slots=True)
class PreferenceObjective(Objective):
    """The mean of a method's loss over pairs, beside the chosen answers' cross entropy if it has
    one.

    That cross entropy is the mean over the chosen answers' tokens of the whole step, not of a
    micro-batch.
    """

    keys: Method
    reference: Reference | None  # None: the method needs none
    label_smoothing: float = 0.0
    # Trained tokens of chosen answers for each pair; None: those of the step. Held out, all batches
    # are one.
    chosen_tokens_per_pair: float | None = None
    # the ranks that divide the documents' tokens between them
    sequence_group: ProcessGroup | None = None

    def count(self, batch: StepBatch) -> int:
        """The pairs of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        if self.reference is None:
            reference = None
        else:
            reference = Pairs.of(self.reference(model, micro_batch))
        documents, tokens = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        policy = Pairs.of(documents)
        lengths = Pairs.of(tokens)
        per_token = self.chosen_tokens_per_pair or batch.chosen_tokens / max(1, batch.groups)
        metrics: dict[str, Tensor] = {}
        if reference is not None:
            ratios = Pairs(policy.chosen - reference.chosen, policy.rejected - reference.rejected)
            losses = WITH_REFERENCE[self.keys.method](
                ratios, lengths, self.keys, self.label_smoothing
            )
            rewards = ratios
            shown = policy
            weight = self.keys.rpo_alpha or 0.0
        else:
            rewards = shown = policy.divide_by(lengths)
            compute, weight = WITHOUT_REFERENCE[self.keys.method]
            losses, metrics = compute(shown, self.keys)
        loss = losses.sum()
        if weight:
            loss = loss - weight * policy.chosen.sum() / per_token
            metrics["nll_loss"] = torch.stack([-policy.chosen.sum(), lengths.chosen.sum()])
        margins = self.keys.beta * rewards.margin
        metrics |= {
            "rewards/chosen": sum_and_count(self.keys.beta * rewards.chosen),
            "rewards/rejected": sum_and_count(self.keys.beta * rewards.rejected),
            "rewards/margins": sum_and_count(margins),
            "rewards/accuracies": sum_and_count((margins > 0).double()),
            "logps/chosen": sum_and_count(shown.chosen),
            "logps/rejected": sum_and_count(shown.rejected),
        }
        return Measured(
            share_of(loss.float(), self.sequence_group),
            {name: pair.detach().float() for name, pair in metrics.items()},
        )


@dataclass(frozen=True, slots=True)
class RatingObjective(Objective):
    """KTO: the mean over rated answers of their loss.

    How far the model is from its reference is estimated from mismatched answers, over all of a
    step's (or of an evaluation's) on all ranks: in a forward before the first backward, since every
    answer's loss depends on it.
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
        which it estimates without dropout.
        """
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for each in micro_batches():
            assert each.mismatched is not None, "rated answers come with mismatched ones"
            other = each.mismatched.to(world.device)
            with evaluating(model):
                log_probabilities, _ = sum_log_probabilities(
                    model, other, other.inputs, self.sequence_group
                )
                total += sum_and_count(log_probabilities - self.reference(model, other))
        world.sum(total)
        return replace(self, kl=(total[0] / total[1].clamp(min=1)).clamp(min=0))

    def count(self, batch: StepBatch) -> int:
        """The rated answers of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's answers, and TRL's metrics of them: chosen are those that
        are rated good.
        """
        desirable = micro_batch.desirable
        kl = self.kl
        assert desirable is not None and kl is not None, (
            "answers are rated, and `prepare` has been called"
        )
        reference = self.reference(model, micro_batch)
        policy, _ = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        losses = kto_losses(policy - reference, desirable, kl, self.keys)
        rewards = self.keys.beta * (policy - reference)
        metrics = {
            "rewards/chosen": sum_and_count(rewards, desirable),
            "rewards/rejected": sum_and_count(rewards, ~desirable),
            "logps/chosen": sum_and_count(policy, desirable),
            "logps/rejected": sum_and_count(policy, ~desirable),
            "kl": torch.stack([kl, torch.ones_like(kl)]),
        }
        return Measured(
            share_of(losses.sum().float(), self.sequence_group),
            {name: pair.detach().float() for name, pair in metrics.items()},
        )

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """Adds the margin between the average rewards: no answer has a partner of its own."""
        if not {"rewards/chosen", "rewards/rejected"} <= means.keys():
            return means
        return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


def share_of(loss: Tensor, sequence_group: ProcessGroup | None) -> Tensor:
    """A rank's share of a loss that all ranks of a sequence compute.

    Metrics need none: they are means.
    """
    if sequence_group is None:
        return loss
    return loss / sequence_group.size()


def sum_and_count(values: Tensor, where: Tensor | None = None) -> Tensor:
    """A metric that is a mean, as ranks add it up: fp64[2], the sum of `values` (of those `where`)
    and their number.
    """
    if where is None:
        counted = torch.ones_like(values)
    else:
        counted = where.to(values.dtype)
    return torch.stack(
        [(values * counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)]
    )
