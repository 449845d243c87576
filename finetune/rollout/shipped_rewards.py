"""The reward functions that ship: each returns a score for every completion.

They take the arguments that TRL's reward functions take. Imports no torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from finetune.config.judge import text_of
from finetune.config.reward_names import REWARD_PACKAGES

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|"
    r"</?answer>).)*</answer>\s*",
    re.S,
)

THINKING = re.compile(r"<think>(?!.*<think>).*?</think>", re.S)


def _with_reasoning(completion: Any) -> str:
    """Returns a completion as text, a message's separate reasoning in front in its tags."""
    text = text_of(completion)
    if isinstance(completion, str):
        return text
    reasoning = completion[-1].get("reasoning_content")
    return f"<think>{reasoning}</think>{text}" if reasoning else text


def is_exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Returns 1 where the completion is the answer, else 0; None without an answer.

    >>> is_exact([" 4\\n", "five"], [4, "5"])
    [1.0, 0.0]
    """
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        if right is None:
            scores.append(None)
        else:
            scores.append(float(text_of(completion).strip() == str(right).strip()))
    return scores


def has_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Returns 1 where completion and answer have the same last number, else 0; None without answer.

    An answer of GSM8K ends with its number.

    >>> has_number(["so it is 1,200.0"], ["5 x 240 = 1200\\n#### 1200"])
    [1.0]
    """
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        number = _last_number(text_of(completion))
        if right is None:
            scores.append(None)
        else:
            scores.append(float(number is not None and number == _last_number(str(right))))
    return scores


def is_equal(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Returns 1 where math-verify finds completion and answer equal, else 0.

    None where it cannot read the answer.
    """
    from math_verify import parse, verify

    scores: list[float | None] = []
    # Without math-verify's time limits: they use the same signal as that of the rewards.
    for completion, right in zip(completions, answer, strict=True):
        expected = None if right is None else parse(str(right), parsing_timeout=None)
        if not expected:
            scores.append(None)
            continue
        given = parse(text_of(completion), parsing_timeout=None)
        scores.append(float(verify(expected, given, timeout_seconds=None)))
    return scores


def has_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """Returns 1 where the completion is reasoning and then an answer, each once in its tags.

    >>> has_format(["<think>2+2</think><answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    """
    return [float(FORMAT.fullmatch(_with_reasoning(each)) is not None) for each in completions]


def thinks_first(completions: Sequence[Any], **_: Any) -> list[float]:
    """Returns 1 where the completion begins with its only reasoning, as TRL's think_format_reward.

    >>> thinks_first(["<think>2+2</think>4", "4", "<think><think></think>"])
    [1.0, 0.0, 0.0]
    """
    return [float(THINKING.match(_with_reasoning(each)) is not None) for each in completions]


def leaves_room(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """Returns the share of max_completion_length that each completion leaves unused."""
    return [1 - len(ids) / trainer_state.max_completion_length for ids in completion_ids]


def punishes_overlong(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """Returns DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    >>> from types import SimpleNamespace
    >>> state = SimpleNamespace(max_completion_length=100, soft_punish_cache=20)
    >>> punishes_overlong([[1] * 80, [1] * 90, [1] * 100], state)
    [0.0, -0.5, -1.0]
    """
    cache = trainer_state.soft_punish_cache
    soft = trainer_state.max_completion_length - cache
    return [max(-1.0, min(0.0, (soft - len(ids)) / cache)) for ids in completion_ids]


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


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
    """Returns the shipped function `name`.

    Imports its package now, so that the time limit of a step does not include the import.
    """
    if name in REWARD_PACKAGES:
        import_module(REWARD_PACKAGES[name])
    return FUNCTIONS[name]
