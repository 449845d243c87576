"""The targets of training with a critic: the advantage and the return of each sampled token."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Recipe
from finetune.rollout.engine import Floats, Rollout, find_advantages

SMALLEST_VARIANCE = 1e-8  # added to a variance before its root is divided by, as in TRL


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """The targets of a rollout's trained tokens; both lists are [completions][trained tokens]."""

    advantages: list[list[float]]  # mean 0 and variance 1 over the tokens of all completions
    returns: list[list[float]]  # the targets of the critic's values
    # The share of the returns' variance that the values explain; nan if all returns are equal.
    explained_variance: float


def compute_gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """Computes generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    Completions are padded on the left, so that each ends in the last column. The padding does not
    change the estimates of a completion's tokens. After the last token, reward and value are 0.

    Args:
        rewards: [completions, tokens].
        values: [completions, tokens]: the critic's value of the state in which each token was
            sampled.
        gamma: The discount of later rewards.
        lam: The discount of later temporal differences.

    Returns:
        [completions, tokens].
    """
    advantages = np.zeros_like(values)
    next_advantages = np.zeros(len(values))
    next_values = np.zeros(len(values))
    for token in reversed(range(values.shape[1])):
        differences = rewards[:, token] + gamma * next_values - values[:, token]
        advantages[:, token] = differences + gamma * lam * next_advantages
        next_advantages = advantages[:, token]
        next_values = values[:, token]
    return advantages


def find_targets(rollout: Rollout, recipe: Recipe) -> TokenTargets:
    """Computes the targets of a rollout from its rewards and the critic's values.

    A token's reward is -beta times its log-ratio to the reference, or 0 without a reference. The
    last token also gets the completion's reward. In a completion without a reward, advantages are 0
    and the returns are the critic's values.
    """
    keys = recipe.method
    lengths = [len(values) for values in rollout.values]
    longest = max(lengths)
    # [completions, longest]: where tokens are; completions are padded on the left
    is_token = np.arange(longest) >= longest - np.array(lengths)[:, None]
    values = _pad(rollout.values, is_token)
    rewards = np.zeros_like(values)
    if rollout.reference:
        log_ratios = _pad(rollout.old, is_token) - _pad(rollout.reference, is_token)
        rewards -= keys.beta * log_ratios
    if longest > 0:
        rewards[:, -1] += rollout.rewards
    estimates = compute_gae(rewards, values, keys.gamma, keys.lam)
    is_learned = is_token & ~np.isnan(rollout.rewards)[:, None]
    advantages = np.where(is_learned, _whiten(estimates, is_learned), 0.0)
    returns = values + np.where(is_learned, estimates, 0.0)
    return TokenTargets(
        _unpad(advantages, lengths),
        _unpad(returns, lengths),
        _explain_variance(returns[is_learned], values[is_learned]),
    )


def describe_advantages(rollout: Rollout, recipe: Recipe) -> NDArray[np.float64]:
    """Computes the advantage of each completion: fp64[completions].

    With a critic it is the mean of the tokens' advantages, or 0 without trained tokens.
    """
    if recipe.method_facts.has_critic:
        by_token = find_targets(rollout, recipe).advantages
        return np.array([np.mean(tokens) if tokens else 0.0 for tokens in by_token])
    return find_advantages(rollout, recipe)


def _pad(rows: list[list[float]], is_token: NDArray[np.bool_]) -> Floats:
    """Pads each row with 0 on the left, to the shape of `is_token`: [completions, tokens]."""
    padded = np.zeros(is_token.shape)
    padded[is_token] = list(chain.from_iterable(rows))
    return padded


def _unpad(padded: Floats, lengths: list[int]) -> list[list[float]]:
    """Keeps the last `lengths[i]` values of each row i."""
    columns = padded.shape[1]
    return [row[columns - length :].tolist() for row, length in zip(padded, lengths, strict=True)]


def _whiten(values: Floats, is_learned: NDArray[np.bool_]) -> Floats:
    """Subtracts the mean of the learned values, and divides by their standard deviation.

    Returns zeros for fewer than two learned values.
    """
    learned = values[is_learned]
    if len(learned) < 2:
        return np.zeros_like(values)
    deviation = np.sqrt(learned.var(ddof=1) + SMALLEST_VARIANCE)
    whitened: Floats = (values - learned.mean()) / deviation
    return whitened


def _explain_variance(returns: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Computes the share of the returns' variance that `values` explain; nan if it is 0.

    Both are fp64[trained tokens].
    """
    variance = returns.var() if len(returns) else 0.0
    if not variance:
        return float("nan")
    return float(1 - (returns - values).var() / variance)
