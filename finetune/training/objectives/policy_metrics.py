"""Metrics of sampled completions: lengths, rewards, and how far training is from sampling.

"ratio" and "log_ratio" in a metric's name are drifts, see `policy_losses.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.training.objectives.objective import Metrics
from finetune.training.objectives.policy_losses import Completions
from finetune.training.objectives.preference import sum_and_count

# the mean square of ratios, from which the effective sample size is computed
SQUARE = "ratio/square"


def describe_completions(rollout: Mapping[str, Tensor], *, has_groups: bool) -> Metrics:
    """Metrics of a micro-batch's completions, each [2] as `sum_and_count` makes it.

    Args:
        rollout: The columns that `completion_rows` makes, [completions] each. Among them are the
            reward, nan where no function gave a score; the deviation of the rewards in its group;
            its sampled tokens, without those of tools, and their entropy, summed; and whether the
            limit of tokens ended it (is_cut). Two are the same for all completions: the share of
            flat groups (flat), and that of completions with a failed score (failed), among all that
            the step sampled, groups included that it dropped.
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
        # the mean over tokens
        "entropy": torch.stack(
            [rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]
        ),
    }


def describe_ratios(log_drifts: Tensor, completions: Completions) -> Metrics:
    """Metrics of how far the model in training is from the one that sampled.

    `log_drifts`: fp64[positions]; "log_ratio/mean" is the mean of their absolute values.
    """
    is_trained = completions.is_trained
    distances = torch.where(is_trained, log_drifts, 0.0).abs()
    return {
        "log_ratio/mean": sum_and_count(distances, is_trained),
        "log_ratio/mean_square": sum_and_count(distances.square(), is_trained),
        **_describe_spread(log_drifts, is_trained),
    }


def _describe_spread(log_drifts: Tensor, is_counted: Tensor) -> Metrics:
    """Mean, mean square and histogram of the drifts where `is_counted`, bool[positions]."""
    drifts = log_drifts.exp()
    metrics = {
        "ratio/mean": sum_and_count(drifts, is_counted),
        SQUARE: sum_and_count(drifts.square(), is_counted),
    }
    # [positions]: a drift is in the bin of the number of borders that are below it
    bins = torch.stack([drifts > border for border in RATIO_BORDERS]).sum(0)
    for number, name in enumerate(RATIO_SHARES):
        metrics[name] = sum_and_count((bins == number).double(), is_counted)
    return metrics


def describe_staleness(
    log_drifts: Tensor, staleness: Tensor, completions: Completions, recipe: Recipe
) -> Metrics:
    """Metrics of staleness: its mean in steps, and the drifts by age, in whole generations.

    The steps of a generation are trained on in turn. So its later ones are stale by the updates
    before them even where nothing was sampled ahead; their age is 0 all the same.

    Args:
        log_drifts: fp64[positions].
        staleness: fp64[positions]: the steps from the weights that sampled to those of the step.
        completions: Of the positions.
        recipe: With `max_staleness`, the largest age; what is older counts there.
    """
    keys = recipe.rollout
    is_trained = completions.is_trained
    metrics = {"staleness/mean": sum_and_count(staleness, is_trained)}
    ages = (staleness / keys.updates_per_generation).floor().clamp(max=keys.max_staleness)
    for age in range(keys.max_staleness + 1):
        is_of_age = is_trained & (ages == age)
        metrics[f"staleness/{age}/share"] = sum_and_count(is_of_age.double(), is_trained)
        for name, sum_and_divisor in _describe_spread(log_drifts, is_of_age).items():
            metrics[f"staleness/{age}/{name}"] = sum_and_divisor
    return metrics
