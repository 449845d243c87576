"""Metrics of sampled completions: lengths, rewards, and how far training is from sampling."""

from collections.abc import Mapping

import torch
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.training.objectives.policy_losses import Completions, is_outside
from finetune.training.objectives.preference import sum_and_count

SQUARE = "ratio/square"  # their mean square, which the effective sample size is computed from


def describe_completions(
    rollout: Mapping[str, Tensor], *, compares: bool = True
) -> dict[str, Tensor]:
    """Metrics of a micro-batch's completions, each [2] as `sum_and_count` makes it.

    `rollout`: the columns that `completion_rows` makes, [completions] each. `compares`: whether
    rewards are compared within groups.
    """
    rewards = rollout["rewards"]
    of_groups = {
        "reward_std": sum_and_count(rollout["deviations"]),
        "frac_reward_zero_std": sum_and_count(rollout["flat"]),
    }
    return {
        "reward": sum_and_count(rewards.nan_to_num(), ~rewards.isnan()),
        **(of_groups if compares else {}),
        "reward_failures": sum_and_count(rollout["failed"]),
        "completions/mean_length": sum_and_count(rollout["tokens"]),
        "completions/clipped_ratio": sum_and_count(rollout["is_cut"]),
        "entropy": torch.stack(
            [rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]
        ),
    }


def describe_ratios(
    log_ratios: Tensor, completions: Completions, bounds: tuple[float, float]
) -> dict[str, Tensor]:
    """Metrics of how far the model in training is from the one that sampled; `log_ratios`:
    fp64[positions].
    """
    is_trained = completions.is_trained
    distances = torch.where(is_trained, log_ratios, 0.0).abs()
    ratios = log_ratios.exp()
    return {
        "log_ratio/mean": sum_and_count(distances, is_trained),
        "log_ratio/mean_square": sum_and_count(distances.square(), is_trained),
        "ratio/outside": sum_and_count(is_outside(ratios, bounds).double(), is_trained),
        **_describe_spread(log_ratios, is_trained),
    }


def _describe_spread(log_ratios: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Mean, mean square and histogram of the ratios that count; `counts`: bool[positions]."""
    ratios = log_ratios.exp()
    metrics = {
        "ratio/mean": sum_and_count(ratios, counts),
        SQUARE: sum_and_count((2 * log_ratios).exp(), counts),
    }
    borders_below = torch.stack([ratios > border for border in RATIO_BORDERS]).sum(0)
    for place, name in enumerate(RATIO_SHARES):
        metrics[name] = sum_and_count((borders_below == place).double(), counts)
    return metrics


def describe_staleness(
    log_ratios: Tensor, staleness: Tensor, completions: Completions, recipe: Recipe
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns (metrics of staleness, and of the ratios by staleness; the largest staleness, 0-dim).

    Args:
        log_ratios: fp64[positions].
        staleness: fp64[positions]: the steps from the weights that sampled to those of the step.
        completions: Of the positions.
        recipe: With `max_staleness`.
    """
    keys = recipe.rollout
    is_trained = completions.is_trained
    metrics = {"staleness/mean": sum_and_count(staleness, is_trained)}
    # steps of a generation are trained on in turn, the last one after updates of its own
    generations = (staleness / keys.updates_per_generation).floor().clamp(max=keys.max_staleness)
    for age in range(keys.max_staleness + 1):
        is_own = is_trained & (generations == age)
        metrics[f"staleness/{age}/share"] = sum_and_count(is_own.double(), is_trained)
        for name, pair in _describe_spread(log_ratios, is_own).items():
            metrics[f"staleness/{age}/{name}"] = pair
    ages = torch.where(is_trained, staleness, 0.0)
    return metrics, (ages.max() if len(ages) else ages.new_zeros(())).float()
