"""Training on preferences: DPO, ORPO, SimPO and KTO as objectives over the log-probabilities of documents."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from finetune.config.methods import Method
from finetune.data.batches import StepBatch
from finetune.data.collate import MicroBatch
from finetune.distributed.world import World
from finetune.training.objectives.sft import Measured, Objective
from finetune.training.preference_losses import Pairs, dpo_losses, kto_losses, orpo_losses, simpo_losses
from finetune.training.reference import Reference, evaluating, sum_log_probabilities


@dataclass(frozen=True, slots=True)
class PreferenceObjective(Objective):
    """The mean over pairs of a method's loss, beside it the cross entropy of the chosen answers where the method has it.

    That cross entropy is the mean over the chosen answers' tokens of the whole step, not of a micro-batch.
    """

    keys: Method
    reference: Reference | None  # None: the method needs none
    label_smoothing: float = 0.0
    # Trained tokens of chosen answers for each pair; None: those of the step. Held out, all batches are one.
    chosen_tokens_per_pair: float | None = None
    sequence_group: ProcessGroup | None = None  # the ranks that divide the documents' tokens between them

    def count(self, batch: StepBatch) -> int:
        """The pairs of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        reference = None if self.reference is None else Pairs.of(self.reference(model, micro_batch))
        documents, tokens = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        policy, lengths = Pairs.of(documents), Pairs.of(tokens)
        per_token = self.chosen_tokens_per_pair or batch.chosen_tokens / max(1, batch.groups)
        weight, metrics = 0.0, {}
        if reference is not None:
            ratios = Pairs(policy.chosen - reference.chosen, policy.rejected - reference.rejected)
            losses = dpo_losses(ratios, lengths, self.keys, self.label_smoothing)
            rewards, shown, weight = ratios, policy, self.keys.rpo_alpha or 0.0
        else:
            rewards = shown = policy.divide_by(lengths)
            if self.keys.method == "orpo":
                losses, log_odds_ratio = orpo_losses(shown, self.keys)
                metrics["log_odds_chosen"] = mean(log_odds_ratio)
                weight = 1.0
            else:
                losses = simpo_losses(shown, self.keys)
        loss = losses.sum()
        if weight:
            loss = loss - weight * policy.chosen.sum() / per_token
            metrics["nll_loss"] = torch.stack([-policy.chosen.sum(), lengths.chosen.sum()])
        margins = self.keys.beta * rewards.margin
        metrics |= {
            "rewards/chosen": mean(self.keys.beta * rewards.chosen),
            "rewards/rejected": mean(self.keys.beta * rewards.rejected),
            "rewards/margins": mean(margins),
            "rewards/accuracies": mean((margins > 0).double()),
            "logps/chosen": mean(shown.chosen),
            "logps/rejected": mean(shown.rejected),
        }
        return Measured(
            share_of(loss.float(), self.sequence_group), {name: pair.detach().float() for name, pair in metrics.items()}
        )


@dataclass(frozen=True, slots=True)
class RatingObjective(Objective):
    """KTO: the mean over rated answers of their loss.

    How far the model is from its reference is estimated from mismatched answers, over all of a step's (or of an evaluation's)
    on all ranks: in a forward before the first backward, since every answer's loss depends on it.
    """

    keys: Method
    reference: Reference
    kl: Tensor | None = None  # 0-dim fp64; None before `prepare`
    sequence_group: ProcessGroup | None = None  # the ranks that divide the documents' tokens between them

    def prepare(
        self, model: nn.Module, micro_batches: Callable[[], Iterable[MicroBatch]], world: World
    ) -> "RatingObjective":
        """With the KL divergence of the model in training from its reference, estimated without dropout."""
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for each in micro_batches():
            assert each.mismatched is not None, "rated answers come with mismatched ones"
            other = each.mismatched.to(world.device)
            with evaluating(model):
                found, _ = sum_log_probabilities(model, other, other.inputs, self.sequence_group)
                total += mean(found - self.reference(model, other))
        world.sum(total)
        return replace(self, kl=(total[0] / total[1].clamp(min=1)).clamp(min=0))

    def count(self, batch: StepBatch) -> int:
        """The rated answers of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's answers, and TRL's metrics of them: chosen are those that are rated good."""
        desirable, kl = micro_batch.desirable, self.kl
        assert desirable is not None and kl is not None, "answers are rated, and `prepare` has been called"
        reference = self.reference(model, micro_batch)
        policy, _ = sum_log_probabilities(model, micro_batch, inputs, self.sequence_group)
        losses = kto_losses(policy - reference, desirable, kl, self.keys)
        rewards = self.keys.beta * (policy - reference)
        metrics = {
            "rewards/chosen": mean(rewards, desirable),
            "rewards/rejected": mean(rewards, ~desirable),
            "logps/chosen": mean(policy, desirable),
            "logps/rejected": mean(policy, ~desirable),
            "kl": torch.stack([kl, torch.ones_like(kl)]),
        }
        return Measured(
            share_of(losses.sum().float(), self.sequence_group),
            {name: pair.detach().float() for name, pair in metrics.items()},
        )

    def complete(self, means: dict[str, float]) -> dict[str, float]:
        """With the margin between the average rewards: no answer has a partner of its own."""
        if not {"rewards/chosen", "rewards/rejected"} <= means.keys():
            return means
        return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


def share_of(loss: Tensor, sequence_group: ProcessGroup | None) -> Tensor:
    """A rank's share of a loss that all ranks of a sequence compute. Metrics need none: they are means."""
    return loss if sequence_group is None else loss / sequence_group.size()


def mean(values: Tensor, where: Tensor | None = None) -> Tensor:
    """A metric that is the mean of `values` (of those `where`): their sum, and their number."""
    counted = torch.ones_like(values) if where is None else where.to(values.dtype)
    return torch.stack([(values * counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])
