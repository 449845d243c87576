"""The reward functions that ship with the package: each returns a score for every completion.

They take the arguments that TRL passes to reward functions, and ignore those that they do not need.
Imports no torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from finetune.config.judge import text_of
from finetune.config.reward_names import REWARD_PACKAGES

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# The whole completion: a block of reasoning, then an answer, without any of these tags inside.
FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|"
    r"</?answer>).)*</answer>\s*",
    re.S,
)
# The beginning of a completion: a block of reasoning, after whose tag no other <think> follows.
THINKING = re.compile(r"<think>(?!.*<think>).*?</think>", re.S)


def _with_reasoning(completion: Any) -> str:
    """Returns a completion as text, with its reasoning in <think> tags.

    A message may hold the reasoning separately; then it is put in front of the content.
    """
    text = text_of(completion)
    if isinstance(completion, str):
        return text
    reasoning = completion[-1].get("reasoning_content")
    return f"<think>{reasoning}</think>{text}" if reasoning else text


def _grade(
    completions: Sequence[Any], answers: Sequence[Any], is_right: Callable[[str, str], bool | None]
) -> list[float | None]:
    """Scores 1 where `is_right` finds a completion's text right by the row's answer, else 0.

    The score is None if the row has no answer, or `is_right` returns None.
    """
    scores: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        right = None if answer is None else is_right(text_of(completion), str(answer))
        scores.append(None if right is None else float(right))
    return scores


def is_exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Scores 1 if the completion is the row's answer up to spaces around it, else 0.

    The score is None if the row has no answer.

    >>> is_exact([" 4\\n", "five"], [4, "5"])
    [1.0, 0.0]
    """
    return _grade(completions, answer, lambda text, expected: text.strip() == expected.strip())


def has_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Scores 1 if the completion's last number is the last number of the row's answer, else 0.

    The score is None if the row has no answer. Answers of GSM8K end with the number that counts.

    >>> has_number(["so it is 1,200.0"], ["5 x 240 = 1200\\n#### 1200"])
    [1.0]
    """

    def is_right(text: str, expected: str) -> bool:
        number = _find_last_number(text)
        return number is not None and number == _find_last_number(expected)

    return _grade(completions, answer, is_right)


def is_equal(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Scores 1 if math-verify finds the completion equal to the row's answer, else 0.

    The score is None if the row has no answer, or math-verify cannot read it.
    """
    from math_verify import parse, verify

    # Without math-verify's time limits, because they use the same signal as `time_limit`.
    def is_right(text: str, expected: str) -> bool | None:
        parsed_answer = parse(expected, parsing_timeout=None)
        if not parsed_answer:
            return None
        return bool(verify(parsed_answer, parse(text, parsing_timeout=None), timeout_seconds=None))

    return _grade(completions, answer, is_right)


def has_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """Scores 1 if the completion is <think>...</think><answer>...</answer>, else 0.

    Each tag may come only once.

    >>> has_format(["<think>2+2</think><answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    """
    return [float(FORMAT.fullmatch(_with_reasoning(each)) is not None) for each in completions]


def thinks_first(completions: Sequence[Any], **_: Any) -> list[float]:
    """Scores 1 if the completion begins with <think>...</think> and has no other <think>, else 0.

    It scores as TRL's think_format_reward.

    >>> thinks_first(["<think>2+2</think>4", "4", "<think><think></think>"])
    [1.0, 0.0, 0.0]
    """
    return [float(THINKING.match(_with_reasoning(each)) is not None) for each in completions]


def leaves_room(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """Scores the share of max_completion_length that the completion leaves unused, from 0 to 1."""
    return [1 - len(ids) / trainer_state.max_completion_length for ids in completion_ids]


def punishes_overlong(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """Scores DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    It falls from 0 to -1 over the last `soft_punish_cache` tokens of max_completion_length.

    >>> from types import SimpleNamespace
    >>> state = SimpleNamespace(max_completion_length=100, soft_punish_cache=20)
    >>> punishes_overlong([[1] * 80, [1] * 90, [1] * 100], state)
    [0.0, -0.5, -1.0]
    """
    cache = trainer_state.soft_punish_cache
    unpunished_length = trainer_state.max_completion_length - cache
    return [max(-1.0, min(0.0, (unpunished_length - len(ids)) / cache)) for ids in completion_ids]


def _find_last_number(text: str) -> float | None:
    """Returns the last number in `text`, in which commas group digits; None without a number."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


# By the name in a recipe's `rewards`.
FUNCTIONS: Mapping[str, Callable[..., Sequence[float | None]]] = {
    "exact_answer": is_exact,
    "number": has_number,
    "math_verify": is_equal,
    "format": has_format,
    "think_format": thinks_first,
    "length": leaves_room,
    "soft_overlong_punishment": punishes_overlong,
}


def load_shipped(name: str) -> Callable[..., Any]:
    """Returns the shipped function that a recipe calls `name`.

    If it needs a package, this is imported here, so that the time limit of a step does not include
    the import.
    """
    if name in REWARD_PACKAGES:
        import_module(REWARD_PACKAGES[name])
    return FUNCTIONS[name]
