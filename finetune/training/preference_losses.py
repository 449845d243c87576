"""The losses of preference training, as functions of the log-probabilities of a batch's documents: one number for each pair.

They know no model, no ranks and no reduction. `chosen` and `rejected` are the log-probabilities of the answers given their
prompts, [pairs]; whether summed over an answer's tokens or averaged, each function says.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.config.methods import Method


class Pairs(NamedTuple):
    """A number of each pair's chosen and rejected answer: log-probabilities, tokens, rewards."""

    chosen: Tensor  # [pairs]
    rejected: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> "Pairs":
        """From [documents]: chosen, rejected, chosen, rejected..."""
        return cls(documents[::2], documents[1::2])

    @property
    def margin(self) -> Tensor:
        """By how much the chosen is larger."""
        return self.chosen - self.rejected

    def divide_by(self, other: "Pairs") -> "Pairs":
        """Element by element."""
        return Pairs(self.chosen / other.chosen, self.rejected / other.rejected)


def dpo_losses(log_ratios: Pairs, tokens: Pairs, keys: Method, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimization, [pairs], without the term of `rpo_alpha`.

    Args:
        log_ratios: log-probabilities summed over each answer's tokens, minus the reference's.
        tokens: of each answer; IPO's alone are averaged over them, as TRL's, which its authors confirmed.
        label_smoothing: the share of pairs whose order is wrong (Mitchell 2023, "A note on DPO with noisy preferences").

    Source: sigmoid: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; hinge: Zhao et al. 2023, arXiv:2305.10425, eq. 6 (SLiC), on DPO's
    margin; ipo: Azar et al. 2023, arXiv:2310.12036, eq. 17, with tau = beta.
    """
    if keys.loss_type == "ipo":
        return (log_ratios.divide_by(tokens).margin - 1 / (2 * keys.beta)) ** 2
    margin = keys.beta * log_ratios.margin
    if keys.loss_type == "hinge":
        return torch.relu(1 - margin)
    return _smoothed(margin, label_smoothing)


def orpo_losses(averages: Pairs, keys: Method) -> tuple[Tensor, Tensor]:
    """The odds ratio's part of odds ratio preference optimization, [pairs], and the log odds ratio, [pairs].

    averages: log-probabilities per token. The other part is the cross entropy of the chosen answers.
    Source: Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; beta is its lambda.
    """
    log_odds_ratio = averages.margin - (_log1mexp(averages.chosen) - _log1mexp(averages.rejected))
    return -keys.beta * F.logsigmoid(log_odds_ratio), log_odds_ratio


def simpo_losses(averages: Pairs, keys: Method) -> Tensor:
    """Simple preference optimization, [pairs]. averages: log-probabilities per token.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    return -F.logsigmoid(keys.beta * averages.margin - keys.simpo_gamma)


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

    Where the probability rounds to 1, one step below 1 is taken: the odds are finite, and have no gradient.
    """
    x = x.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
