"""The losses of the Tinker API. Each computes a number for every token; their sum is minimized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The inputs of a loss by name, in the shape of the log-probabilities: fp32[positions], or
# fp32[positions, targets] if tokens have several targets.
Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]

# The options of losses with the defaults of Tinker's pages (tutorial 202 of its cookbook). None:
# there is no default, and a client must give the option.
PPO_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CISPO_BOUNDS = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
BOUNDS_WITHOUT_DEFAULT = dict.fromkeys(PPO_BOUNDS)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of the API."""

    # (log-probabilities under the model, the inputs, the options, int64[positions]: the index of
    # each position's datum in the micro-batch) -> the loss, in the shape of the log-probabilities
    compute: Callable[[Tensor, Inputs, Options, Tensor], Tensor]
    inputs: tuple[str, ...]  # what a datum has besides target_tokens
    options: Mapping[str, float | None] = field(default_factory=dict)  # name -> default
    takes_several: bool = False  # a token may have several targets


def _cross_entropy(
    new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor
) -> Tensor:
    """The negative log-likelihood of the targets, weighted."""
    return -new_logprobs * inputs["weights"]


def _importance_sampling(
    new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor
) -> Tensor:
    """The policy gradient with importance weights: the ratio times the advantage, unclipped."""
    return -(new_logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def _ppo(new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7)."""
    return _clip((new_logprobs - inputs["logprobs"]).exp(), inputs["advantages"], options)


def _clip(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    """Computes the clipped surrogate of PPO as a loss, from probability ratios."""
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor) -> Tensor:
    """CISPO (MiniMax 2025, eq. 4): the clipped ratio, a constant, weighs the log-probability."""
    ratio = (new_logprobs.detach() - inputs["logprobs"]).exp()
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * inputs["advantages"] * new_logprobs


def _dro(new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor) -> Tensor:
    """DRO (Richemond et al. 2024, eq. 5)."""
    distance = (new_logprobs - inputs["logprobs"]).square()
    return -(new_logprobs * inputs["advantages"] - 0.5 * options["beta"] * distance)


def _gspo(new_logprobs: Tensor, inputs: Inputs, options: Options, documents: Tensor) -> Tensor:
    """GSPO with token-level advantages (Zheng et al. 2025, eq. 14).

    The value of a token's ratio is the geometric mean of the ratios of its datum. The gradient is
    that of the token's own log-probability.
    """
    mask = (inputs["sequence_ratio_mask"] != 0).to(new_logprobs.dtype)
    # has room for a sum of each datum, as there are at least as many positions as datums
    zeros = torch.zeros_like(new_logprobs, requires_grad=False)
    log_ratios = zeros.index_add(0, documents, (new_logprobs.detach() - inputs["logprobs"]) * mask)
    tokens = zeros.index_add(0, documents, mask)
    means = log_ratios / tokens.clamp(min=1)
    ratio = (means[documents] + new_logprobs - new_logprobs.detach()).exp()
    return _clip(ratio, inputs["advantages"], options)


SAMPLED = ("logprobs", "advantages")  # the inputs of losses for sampled tokens
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(_cross_entropy, ("weights",), takes_several=True),
    "importance_sampling": TokenLoss(_importance_sampling, SAMPLED),
    "ppo": TokenLoss(_ppo, SAMPLED, PPO_BOUNDS),
    "cispo": TokenLoss(_cispo, SAMPLED, CISPO_BOUNDS),
    "dro": TokenLoss(_dro, SAMPLED, {"beta": None}),
    "gspo": TokenLoss(_gspo, (*SAMPLED, "sequence_ratio_mask"), BOUNDS_WITHOUT_DEFAULT),
}
