"""Masked diffusion language models (LLaDA: Nie et al. 2025, arXiv:2502.09992).

Tokens are masked at random, and the model predicts each of them from all other tokens of its
document, before and after it. As in a causal model, and as in Dream (Ye et al. 2025,
arXiv:2508.15487), the state at the position before a token predicts it. So the labels are those of
supervised fine-tuning, and training can start from a causal model's weights. The first token of a
document is never masked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch, copy_to
from finetune.data.examples import make_generator
from finetune.models.cross_entropy import sum_weighted_losses
from finetune.training.objectives.objective import Measured, Objective

HELD_OUT = "held out"  # seeds the noise of held-out data, where training has the batch's `draws`


@dataclass(frozen=True, slots=True)
class MaskedDiffusion(Objective):
    """The cross entropy of each masked token divided by its probability of being masked, summed,
    and then divided by the number of trained tokens (eq. 3; eq. 5 if only answers are trained).

    All tokens of a document have the same probability: mask_eps + (1 - mask_eps) * t, with t
    uniform in [0, 1).
    """

    mask_id: int  # the token that replaces a masked one
    mask_eps: float
    seed: int
    is_held_out: bool = False

    def for_evaluation(self) -> "MaskedDiffusion":
        """Returns the objective of held-out data, which has the same noise at every evaluation."""
        return replace(self, is_held_out=True)

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """Sums the weighted loss of the masked tokens.

        The metrics are the share of trained tokens that are masked, and their mean cross entropy
        without weights.
        """
        noise = HELD_OUT if self.is_held_out else batch.draws
        is_label_drawn, weights = self.draw(micro_batch, noise)
        device = micro_batch.labels.device
        is_trained = micro_batch.labels != IGNORE_INDEX
        has_masked_label = copy_to(is_label_drawn, device) & is_trained
        # A label is the token at the next position. No row ends with a label, so nothing wraps.
        is_masked_input = has_masked_label.roll(1, 1)
        visible_tokens = micro_batch.token_mask
        if not micro_batch.example_ids:
            # Attention needs a visible token, and a filler's mask hides all.
            visible_tokens = torch.ones_like(is_masked_input)
        noisy = {
            "input_ids": micro_batch.input_ids.masked_fill(is_masked_input, self.mask_id),
            "labels": micro_batch.labels.masked_fill(~has_masked_label, IGNORE_INDEX),
            "visible_tokens": visible_tokens,
        }
        head_function = partial(sum_weighted_losses, weights=copy_to(weights, device).flatten())
        weighted_loss, plain_loss = model(**{**inputs, **noisy}, head_function=head_function)
        masked_tokens = has_masked_label.sum().float()
        metrics = {
            "mask_ratio": torch.stack([masked_tokens, is_trained.sum().float()]),
            "masked_loss": torch.stack([plain_loss.detach().float(), masked_tokens]),
        }
        return Measured(weighted_loss, metrics)

    def draw(self, micro_batch: MicroBatch, noise: str) -> tuple[Tensor, Tensor]:
        """Draws which tokens of each document are masked, whether they are trained or not.

        The draw is a pure function of the seed, `noise` and the example.

        Returns:
            (whether the token that is the label at a position is masked, bool[rows, tokens];
            1 / the probability of that, fp32[rows, tokens]), both on the host.
        """
        is_label_drawn = np.zeros(micro_batch.labels.shape, bool)
        weights = np.ones(micro_batch.labels.shape, np.float32)
        for example_id, row, tokens in micro_batch.locate_documents():
            random = make_generator(self.seed, f"mask {noise}", example_id)
            probability = self.mask_eps + (1 - self.mask_eps) * random.random()
            # The last position has no label (`Examples.omits_next`), and the first token is none.
            labeled = row, slice(tokens.start, tokens.stop - 1)
            is_token_drawn = random.random(tokens.stop - tokens.start) < probability
            is_label_drawn[labeled] = is_token_drawn[1:]
            weights[labeled] = 1 / probability
        return torch.from_numpy(is_label_drawn), torch.from_numpy(weights)
