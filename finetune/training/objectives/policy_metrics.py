"""Metrics of sampled completions: lengths, rewards, and how far training is from sampling."""

from collections.abc import Mapping

import torch
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.training.objectives.policy_losses import Completions
from finetune.training.objectives.preference import sum_and_count

# the mean square of ratios, from which the effective sample size is computed
SQUARE = "ratio/square"


def describe_completions(
    rollout: Mapping[str, Tensor], *, has_groups: bool = True
) -> dict[str, Tensor]:
    """Metrics of a micro-batch's completions, each [2] as `sum_and_count` makes it.

    Args:
        rollout: The columns that `completion_rows` makes, [completions] each. Among them are the
            reward, nan where no function gave a score; the deviation of the rewards in its group;
            and whether the limit of tokens ended it (is_cut). Two are the same for all completions:
            the shares of flat groups and of failed scores among all that the step sampled, with
            what was dropped.
        has_groups: Whether rewards are compared within groups; a critic compares none.
    """
    rewards = rollout["rewards"]
    of_groups = {
        "reward_std": sum_and_count(rollout["deviations"]),
        "frac_reward_zero_std": sum_and_count(rollout["flat"]),
    }
    return {
        "reward": sum_and_count(rewards.nan_to_num(), ~rewards.isnan()),
        **(of_groups if has_groups else {}),
        "reward_failures": sum_and_count(rollout["failed"]),
        "completions/mean_length": sum_and_count(rollout["tokens"]),
        "completions/clipped_ratio": sum_and_count(rollout["is_cut"]),
        # over tokens
        "entropy": torch.stack(
            [rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]
        ),
    }


def describe_ratios(log_ratios: Tensor, completions: Completions) -> dict[str, Tensor]:
    """Metrics of how far the model in training is from the one that sampled.

    `log_ratios`: fp64[positions]; "log_ratio/mean" is the mean of their absolute values.
    """
    is_trained = completions.is_trained
    distances = torch.where(is_trained, log_ratios, 0.0).abs()
    return {
        "log_ratio/mean": sum_and_count(distances, is_trained),
        "log_ratio/mean_square": sum_and_count(distances.square(), is_trained),
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
    # In whole generations: the steps of one are trained on in turn, so that the last of them is
    # behind by the updates of its own generation even where nothing was sampled ahead.
    ages = (staleness / keys.updates_per_generation).floor().clamp(max=keys.max_staleness)
    for age in range(keys.max_staleness + 1):
        is_own = is_trained & (ages == age)
        metrics[f"staleness/{age}/share"] = sum_and_count(is_own.double(), is_trained)
        for name, pair in _describe_spread(log_ratios, is_own).items():
            metrics[f"staleness/{age}/{name}"] = pair
    steps_behind = torch.where(is_trained, staleness, 0.0)
    if len(steps_behind):
        oldest = steps_behind.max()
    else:
        oldest = steps_behind.new_zeros(())
    return metrics, oldest.float()
