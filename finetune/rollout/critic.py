"""What a critic's values make of rewards: the advantage and the return of each sampled token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Recipe
from finetune.rollout.engine import Rollout, find_advantages

Matrix = NDArray[np.float64]
SMALLEST_VARIANCE = 1e-8  # added to a variance that is divided by, as in TRL


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """The targets of a rollout's trained tokens: [completions][trained tokens]."""

    advantages: list[list[float]]  # of all tokens together, the mean is 0 and the variance 1
    returns: list[list[float]]  # what their values should have been
    explained_variance: float  # of the returns by the values; nan where the returns do not differ

    def mean_advantages(self) -> NDArray[np.float64]:
        """Averages the advantages of each completion's tokens: fp64[completions]."""
        return np.array([np.mean(own) if own else 0.0 for own in self.advantages])


def compute_gae(rewards: Matrix, values: Matrix, gamma: float, lam: float) -> Matrix:
    """Generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    Args:
        rewards: [completions, tokens]. Each completion ends in the last column, after which there
            is neither reward nor value; what stands before its first token is not read.
        values: [completions, tokens], of the states in which the tokens were sampled.
        gamma: By what later rewards are multiplied.
        lam: By what later temporal differences are multiplied.

    Returns:
        [completions, tokens].
    """
    advantages = np.zeros_like(values)
    following = np.zeros(len(values))
    next_values = np.zeros(len(values))
    for token in reversed(range(values.shape[1])):
        differences = rewards[:, token] + gamma * next_values - values[:, token]
        following = differences + gamma * lam * following
        advantages[:, token] = following
        next_values = values[:, token]
    return advantages


def find_targets(rollout: Rollout, recipe: Recipe) -> TokenTargets:
    """The targets of a rollout, whose tokens have values.

    A token's reward is -beta times its log-ratio to the reference; the last one has the
    completion's reward beside it. A completion without a reward teaches nothing.
    """
    keys = recipe.method
    lengths = [len(own) for own in rollout.values]
    longest = max(lengths)
    is_token = np.arange(longest) >= longest - np.array(lengths)[:, None]
    values = _pad(rollout.values, is_token)
    rewards = np.zeros_like(values)
    if rollout.reference:
        rewards -= keys.beta * (_pad(rollout.old, is_token) - _pad(rollout.reference, is_token))
    if longest:
        rewards[:, -1] += rollout.rewards
    estimates = compute_gae(rewards, values, keys.gamma, keys.lam)
    is_learned = is_token & ~np.isnan(rollout.rewards)[:, None]
    advantages = np.where(is_learned, _whiten(estimates, is_learned), 0.0)
    returns = values + np.where(is_learned, estimates, 0.0)
    return TokenTargets(
        _unpad(advantages, lengths),
        _unpad(returns, lengths),
        _explain(returns[is_learned], values[is_learned]),
    )


def describe_advantages(rollout: Rollout, recipe: Recipe) -> NDArray[np.float64]:
    """[completions]: the advantages of the recipe's loss; under a critic, means over tokens."""
    if recipe.method_facts.has_critic:
        return find_targets(rollout, recipe).mean_advantages()
    return find_advantages(rollout, recipe)


def _pad(of_tokens: list[list[float]], is_token: NDArray[np.bool_]) -> Matrix:
    """[completions, tokens]: each completion ends in the last column, and 0 stands before it."""
    padded = np.zeros(is_token.shape)
    padded[is_token] = [value for own in of_tokens for value in own]
    return padded


def _unpad(padded: Matrix, lengths: list[int]) -> list[list[float]]:
    columns = padded.shape[1]
    return [row[columns - length :].tolist() for row, length in zip(padded, lengths, strict=True)]


def _whiten(values: Matrix, counts: NDArray[np.bool_]) -> Matrix:
    """`values` less their mean, over their deviation, of those that count."""
    own = values[counts]
    if len(own) < 2:
        return np.zeros_like(values)
    whitened: Matrix = (values - own.mean()) / np.sqrt(own.var(ddof=1) + SMALLEST_VARIANCE)
    return whitened


def _explain(returns: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    variance = returns.var() if len(returns) else 0.0
    if not variance:
        return float("nan")
    return float(1 - (returns - values).var() / variance)
