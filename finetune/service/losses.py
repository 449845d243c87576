"""The losses of the Tinker API: each gives a number for every token. Their sum is minimized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# The inputs of the loss by name, in the shape of the log-probabilities: fp32[positions], or
# fp32[positions, targets] where tokens have several targets.
Given = Mapping[str, Tensor]
Options = Mapping[str, float]

# The defaults of Tinker's pages (tutorial 202 of its cookbook). None: there is no default, and a
# client must give the option.
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CAPPED = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
CLIPPED_AS_ASKED = dict.fromkeys(CLIPPED)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of the API."""

    # (log-probabilities fp32[positions], inputs, options, int64[positions]: the index of the
    # datum) -> fp32[positions]
    compute: Callable[[Tensor, Given, Options, Tensor], Tensor]
    inputs: tuple[str, ...]  # the inputs of a datum beside target_tokens
    options: Mapping[str, float | None] = field(default_factory=dict)  # name -> default
    takes_several: bool = False  # a token may have several targets


def _cross_entropy(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    return -new * given["weights"]


def _importance_sampling(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    return -(new - given["logprobs"]).exp() * given["advantages"]


def _ppo(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    """Schulman et al. 2017, eq. 7."""
    return _clip((new - given["logprobs"]).exp(), given["advantages"], options)


def _clip(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    """MiniMax 2025, eq. 4: the clipped ratio weighs each token's gradient, and has none itself."""
    ratio = (new.detach() - given["logprobs"]).exp()
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * given["advantages"] * new


def _dro(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    """Richemond et al. 2024, eq. 5."""
    distance = (new - given["logprobs"]).square()
    return -(new * given["advantages"] - 0.5 * options["beta"] * distance)


def _gspo(new: Tensor, given: Given, options: Options, data: Tensor) -> Tensor:
    """Zheng et al. 2025, eq. 14: the ratio is a datum's geometric mean, the gradient a token's."""
    mask = (given["sequence_ratio_mask"] != 0).to(new.dtype)
    zeros = torch.zeros_like(new, requires_grad=False)  # [datums], padded to [positions]
    log_ratios = zeros.index_add(0, data, (new.detach() - given["logprobs"]) * mask)
    tokens = zeros.index_add(0, data, mask)
    means = log_ratios / tokens.clamp(min=1)
    ratio = (means[data] + new - new.detach()).exp()
    return _clip(ratio, given["advantages"], options)


SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(_cross_entropy, ("weights",), takes_several=True),
    "importance_sampling": TokenLoss(_importance_sampling, SAMPLED),
    "ppo": TokenLoss(_ppo, SAMPLED, CLIPPED),
    "cispo": TokenLoss(_cispo, SAMPLED, CAPPED),
    "dro": TokenLoss(_dro, SAMPLED, {"beta": None}),
    "gspo": TokenLoss(_gspo, (*SAMPLED, "sequence_ratio_mask"), CLIPPED_AS_ASKED),
}
