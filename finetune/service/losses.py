"""The losses of the Tinker API.

Each is a number for every token, whose sum is minimized.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# by the name of an input of the loss: as the log-probabilities, fp32[positions], or where there are
# several targets fp32[positions, targets]
Given = Mapping[str, Tensor]
Options = Mapping[str, float]

# The defaults of Tinker's pages (tutorial 202 of its cookbook); None where they give none, and a
# client has to.
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CAPPED = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
CLIPPED_AS_ASKED = dict.fromkeys(CLIPPED)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss by its name in the API."""

    # (log-probabilities fp32[positions], inputs, options, int64[positions]: which datum) ->
    # fp32[positions]
    compute: Callable[[Tensor, Given, Options, Tensor], Tensor]
    inputs: tuple[str, ...]  # of a datum, beside its target_tokens: a number for each token
    # and what they are where a client gives none; None: it has to
    options: Mapping[str, float | None] = field(default_factory=dict)
    takes_several: bool = False  # targets for each token


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
    """MiniMax 2025, eq. 4: the clipped ratio weighs each token's gradient, and has none."""
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
    zeros = torch.zeros_like(new, requires_grad=False)  # of each datum; there are fewer than tokens
    logs = zeros.index_add(0, data, (new.detach() - given["logprobs"]) * mask)
    tokens = zeros.index_add(0, data, mask)
    means = logs / tokens.clamp(min=1)
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
