"""Training on preferences: DPO, ORPO and SimPO as objectives over the log-probabilities of documents that come in pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batches import StepBatch
from finetune.data.collate import MicroBatch
from finetune.recipe.method_schema import Method
from finetune.training.objective import Measured
from finetune.training.preference_losses import Pairs, dpo_losses, orpo_losses, simpo_losses
from finetune.training.reference import Reference, sum_log_probabilities


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """The mean over pairs of a method's loss, beside it the cross entropy of the chosen answers where the method has it.

    That cross entropy is the mean over the chosen answers' tokens of the whole step, not of a micro-batch.
    """

    keys: Method
    reference: Reference | None  # None: the method needs none
    label_smoothing: float = 0.0
    # Trained tokens of chosen answers for each pair; None: those of the step. Held out, all batches are one.
    chosen_tokens_per_pair: float | None = None

    def count(self, batch: StepBatch) -> int:
        """The pairs of the step."""
        return batch.groups

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The losses of the micro-batch's pairs, and TRL's metrics of them."""
        reference = None if self.reference is None else Pairs.of(self.reference(model, micro_batch))
        documents, tokens = sum_log_probabilities(model, micro_batch, inputs)
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
            "rewards/accuracies": mean(margins > 0),
            "logps/chosen": mean(shown.chosen),
            "logps/rejected": mean(shown.rejected),
        }
        return Measured(loss.float(), {name: pair.detach().float() for name, pair in metrics.items()})


def mean(values: Tensor) -> Tensor:
    """A metric that is the mean of `values` [pairs]: their sum, and their number."""
    total = values.sum(dtype=torch.float64)
    return torch.stack([total, torch.full_like(total, len(values))])
