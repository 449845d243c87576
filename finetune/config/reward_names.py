"""What entries of `rewards` and `environment` name: rewards that ship, models, judges, servers.

The process of rewards reads this too, and starts in half the time without pydantic.
"""

from collections.abc import Mapping

from finetune.config.judge import is_judge, read_judge
from finetune.constants import EXPORT

# Rewards that ship: name -> what it gives. The functions are in rollout/shipped_rewards.py.
SHIPPED_REWARDS: Mapping[str, str] = {
    "exact_answer": (
        "1 where the completion, without the white space around it, is the row's answer"
    ),
    "number": "1 where the last number of the completion is that of the row's answer",
    "math_verify": (
        "1 where math-verify finds the completion equal to the row's answer, a number or a formula"
    ),
    "format": "1 where the completion is <think>...</think><answer>...</answer>",
    "think_format": "1 where the completion begins with <think>...</think>",
    "length": "the share of max_completion_length that the completion leaves unused",
    "soft_overlong_punishment": (
        "0 up to max_completion_length less soft_punish_cache tokens, then down to -1 (DAPO)"
    ),
}


# how an environment is named that is no file's
SERVED_ENVIRONMENTS = ("openenv:",)

# what a reward that ships imports
REWARD_PACKAGES: Mapping[str, str] = {"math_verify": "math_verify"}


def is_reward_model(name: str) -> bool:
    """Whether an entry of `rewards` is a model, and no function.

    >>> [
    ...     name
    ...     for name in ("number", "my_rewards.py:short", "runs/reward/export")
    ...     if is_reward_model(name)
    ... ]
    ['runs/reward/export']
    """
    return not (name in SHIPPED_REWARDS or is_judge(name) or ".py:" in name)


def name_of_reward(name: str) -> str:
    """Returns the name of an entry of `rewards` in metrics: a function's own, that of a model's
    folder or run, a judge's own or that of its model.

    >>> [
    ...     name_of_reward(name)
    ...     for name in ("my_rewards.py:short", "runs/helpful/export", "org/Skywork-Reward")
    ... ]
    ['short', 'helpful', 'Skywork-Reward']
    """
    if is_judge(name):
        return read_judge(name).title
    if not is_reward_model(name):
        return name.rpartition(":")[2]
    parts = name.rstrip("/").split("/")
    if parts[-1] == EXPORT and len(parts) > 1:
        return parts[-2]
    return parts[-1]
