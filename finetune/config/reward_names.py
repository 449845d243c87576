"""Names in `rewards` and `environment`: which ones are rewards that ship, models or servers.

Imports no pydantic: the process of rewards imports this module, and pydantic doubles its start.
"""

from collections.abc import Mapping

from finetune.config.judge import is_judge, read_judge
from finetune.constants import EXPORT

# Reward that ships -> the value that it gives. The functions are in rollout/shipped_rewards.py.
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


# How the name of an environment on a server begins; any other name is FILE.py:NAME.
SERVED_ENVIRONMENTS = ("openenv:",)

# Reward that ships -> the package that it imports, if it needs one.
REWARD_PACKAGES: Mapping[str, str] = {"math_verify": "math_verify"}


def is_reward_model(name: str) -> bool:
    """Whether an entry of `rewards` is a reward model: neither a function nor a judge.

    >>> [
    ...     name
    ...     for name in ("number", "my_rewards.py:short", "runs/reward/export")
    ...     if is_reward_model(name)
    ... ]
    ['runs/reward/export']
    """
    return not (name in SHIPPED_REWARDS or is_judge(name) or ".py:" in name)


def name_of_reward(name: str) -> str:
    """Returns the name that an entry of `rewards` has in metrics.

    A function has its own name, a judge its `title`. A model has the name of its folder; an export
    of a run has that of the run's folder.

    >>> [
    ...     name_of_reward(name)
    ...     for name in ("my_rewards.py:short", "runs/helpful/export", "org/Skywork-Reward")
    ... ]
    ['short', 'helpful', 'Skywork-Reward']
    """
    if is_judge(name):
        return read_judge(name).title
    if not is_reward_model(name):
        _, _, function_name = name.rpartition(":")
        return function_name
    *parents, folder = name.rstrip("/").split("/")
    if folder == EXPORT and parents:
        return parents[-1]
    return folder
