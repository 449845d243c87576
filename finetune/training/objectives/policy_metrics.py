"""Metrics of sampled completions: lengths, rewards, and how far training is from sampling.

In a metric's name, "ratio" and "log_ratio" mean the drift that `policy_losses.py` defines.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from finetune.config.schema import Recipe
from finetune.constants import RATIO_BORDERS, RATIO_SHARES
from finetune.training.objectives.objective import Metrics
from finetune.training.objectives.policy_losses import Completions
from finetune.training.objectives.preference import sum_and_count

# how the name of a metric ends that is a mean square of ratios; `PolicyObjective.complete` computes
# the effective sample size from it
SQUARE = "ratio/square"


def describe_completions(rollout: Mapping[str, Tensor], *, has_groups: bool) -> Metrics:
    """Makes the metrics of a micro-batch's completions, each as `sum_and_count` does.

    Args:
        rollout: The columns that `make_step_batch` attaches, [completions] each. It reads: rewards,
            nan if no function gave a score; deviations, the standard deviation of the rewards in
            the completion's group; tokens, the number of sampled tokens, without those of tools;
            entropies, summed over these tokens; is_cut, whether the limit of tokens ended the
            completion. Two columns have the same value for all completions: flat, the share of
            groups with equal rewards; and failed, the share of completions with a failed score.
            Both are shares of all that the step sampled, groups that it dropped included.
        has_groups: Whether rewards are compared within groups. With a critic they are not.
    """
    rewards = rollout["rewards"]
    metrics_of_groups: Metrics = {}
    if has_groups:
        metrics_of_groups = {
            "reward_std": sum_and_count(rollout["deviations"]),
            "frac_reward_zero_std": sum_and_count(rollout["flat"]),
        }
    return {
        "reward": sum_and_count(rewards.nan_to_num(), ~rewards.isnan()),
        **metrics_of_groups,
        "reward_failures": sum_and_count(rollout["failed"]),
        "completions/mean_length": sum_and_count(rollout["tokens"]),
        "completions/clipped_ratio": sum_and_count(rollout["is_cut"]),
        # the mean over tokens, not over completions
        "entropy": torch.stack(
            [rollout["entropies"].double().sum(), rollout["tokens"].double().sum()]
        ),
    }


def describe_ratios(log_drifts: Tensor, completions: Completions) -> Metrics:
    """Makes the metrics of how far the model in training is from the model that sampled.

    "log_ratio/mean" is the mean of the absolute values of `log_drifts`, fp64[positions].
    """
    is_trained = completions.is_trained
    distances = torch.where(is_trained, log_drifts, 0.0).abs()
    return {
        "log_ratio/mean": sum_and_count(distances, is_trained),
        "log_ratio/mean_square": sum_and_count(distances.square(), is_trained),
        **_describe_spread(log_drifts, is_trained),
    }


def _describe_spread(log_drifts: Tensor, is_counted: Tensor) -> Metrics:
    """Makes the metrics of how the drifts spread: their mean, mean square and histogram.

    Args:
        log_drifts: fp64[positions]; 0 at positions without a label.
        is_counted: bool[positions], the positions whose drifts are counted.
    """
    drifts = log_drifts.exp()
    metrics = {
        "ratio/mean": sum_and_count(drifts, is_counted),
        SQUARE: sum_and_count(drifts.square(), is_counted),
    }
    # [positions]: a drift's bin is the number of borders that lie below the drift
    bins = torch.stack([drifts > border for border in RATIO_BORDERS]).sum(0)
    for index, name in enumerate(RATIO_SHARES):
        metrics[name] = sum_and_count((bins == index).double(), is_counted)
    return metrics


def describe_staleness(
    log_drifts: Tensor, staleness: Tensor, completions: Completions, recipe: Recipe
) -> Metrics:
    """Makes the metrics of staleness: its mean in steps, and how the drifts spread at each age.

    A token's age is its staleness in whole generations. The updates of one generation are made one
    after another, so the later ones train on stale tokens even if nothing was sampled ahead; the
    age of these tokens is 0.

    Args:
        log_drifts: fp64[positions].
        staleness: fp64[positions]: how many steps after the weights that sampled the token it is
            trained on.
        completions: Which positions are trained.
        recipe: With `max_staleness`, the largest age; older tokens count as this old.
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
