"""Masked diffusion language models (LLaDA: Nie et al. 2025, arXiv:2502.09992).

Tokens are masked at random, and the model predicts them from all others of their document, before
and after them. It keeps the head of a causal model: the state before a token predicts it, as in
Dream (Ye et al. 2025, arXiv:2508.15487), so that the labels are those of fine-tuning and a causal
model's weights are a start. The first token of a document is never masked.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from finetune.constants import IGNORE_INDEX, Fields
from finetune.data.batches import MicroBatch, StepBatch, copy_to
from finetune.data.examples import make_generator
from finetune.models.cross_entropy import weigh_losses
from finetune.training.objectives.objective import Measured, Objective

HELD_OUT = "held out"  # names the noise of held-out data, as a step's number that of a step


@dataclass(frozen=True, slots=True)
class MaskedDiffusion(Objective):
    """The sum over masked tokens of their cross entropy divided by the probability of being masked,
    over the number of trained tokens (eq. 3; of answers eq. 5).

    A document has one probability: mask_eps + (1 - mask_eps) t, with t uniform in [0, 1).
    """

    mask_id: int
    mask_eps: float
    seed: int
    is_held_out: bool = False

    def for_evaluation(self) -> "MaskedDiffusion":
        """The same, under noise that no step changes."""
        return replace(self, is_held_out=True)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Fields, batch: StepBatch
    ) -> Measured:
        """The loss of the masked tokens; how many were masked, and their plain cross entropy."""
        noise = HELD_OUT if self.is_held_out else str(batch.step)
        drawn, weights = self.draw(micro_batch, noise)
        device = micro_batch.labels.device
        is_trained = micro_batch.labels != IGNORE_INDEX
        has_masked_label = copy_to(drawn, device) & is_trained
        # A label is the token at the next position. No row ends with a label, so nothing wraps.
        is_masked = has_masked_label.roll(1, 1)
        visible = micro_batch.token_mask
        # the mask of a filler hides every token, and attention needs one
        if visible is None or not micro_batch.example_ids:
            visible = torch.ones_like(is_masked)
        noisy = {
            "input_ids": micro_batch.input_ids.masked_fill(is_masked, self.mask_id),
            "labels": micro_batch.labels.masked_fill(~has_masked_label, IGNORE_INDEX),
            "visible_tokens": visible,
        }
        by_token = copy_to(weights, device).flatten()
        sums = model(**{**inputs, **noisy}, head_function=weigh_losses(by_token))
        masked = has_masked_label.sum().float()
        metrics = {
            "mask_ratio": torch.stack([masked, is_trained.sum().float()]),
            "masked_loss": torch.stack([sums[1].detach().float(), masked]),
        }
        return Measured(sums[0], metrics)

    def draw(self, micro_batch: MicroBatch, noise: str) -> tuple[Tensor, Tensor]:
        """Draws the noise of each document: a pure function of the seed, `noise` and the example.

        Returns:
            (bool[rows, tokens], whether the token that is each position's label is masked;
            fp32[rows, tokens], 1 over the probability of that), on the host.
        """
        is_drawn = np.zeros(micro_batch.labels.shape, bool)
        weights = np.ones(micro_batch.labels.shape, np.float32)
        for example_id, row, tokens in micro_batch.locate_documents():
            random = make_generator(self.seed, f"mask {noise}", example_id)
            probability = self.mask_eps + (1 - self.mask_eps) * random.random()
            own = row, slice(tokens.start, tokens.stop - 1)  # whose labels are in the document
            is_drawn[own] = random.random(tokens.stop - tokens.start)[1:] < probability
            weights[own] = 1 / probability
        return torch.from_numpy(is_drawn), torch.from_numpy(weights)
