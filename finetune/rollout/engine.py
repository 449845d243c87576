"""What samples completions: tokens in; tokens, their log-probabilities and the reason of the end out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Ended(Enum):
    """Why a completion ended."""

    STOPPED = "stopped"  # at a token that ends a turn, which is its last
    CUT = "cut"  # at max_completion_length


class Request(NamedTuple):
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    seed: tuple[int, ...]  # of its random numbers, whatever else is sampled beside it

    def draw_uniforms(self, tokens: int) -> NDArray[np.float64]:
        """float64[tokens]: a number in [0, 1) for each token."""
        entropy = np.random.SeedSequence([*self.seed, *b"rollout"])
        return np.random.Generator(np.random.Philox(entropy)).random(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen: from all of the vocabulary, whose distribution is the one trained."""

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion."""

    token_ids: list[int]
    log_probabilities: list[float]  # of each token, under the distribution that it was sampled from
    entropy: float  # nats, of those distributions, summed
    ended: Ended


class Engine(Protocol):
    """Samples completions from the weights that are trained, as they are now."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """A completion of each request, in order. All ranks call it, each with requests of its own."""
