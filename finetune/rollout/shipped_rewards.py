"""The rewards that ship, with the arguments of TRL's: a score for each completion.

Imports no torch.
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
    """A completion as text, with the reasoning that is read apart from the answer where there are
    tools.
    """
    if isinstance(completion, str):
        reasoning = None
    else:
        reasoning = completion[-1].get("reasoning_content")
    return (f"<think>{reasoning}</think>" if reasoning else "") + text_of(completion)


def is_exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion is the answer, which may be a number.

    >>> is_exact([" 4\\n", "five"], [4, "5"])
    [1.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [
        None if right is None else float(text_of(each).strip() == str(right).strip())
        for each, right in pairs
    ]


def has_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the last number of the completion is the last of the answer, which for GSM8K stands
    after ####.

    >>> has_number(["so it is 1,200.0"], ["5 x 240 = 1200\\n#### 1200"])
    [1.0]
    """
    numbers = [_last_number(text_of(each)) for each in completions]
    pairs = zip(numbers, answer, strict=True)
    return [
        None if right is None else float(n is not None and n == _last_number(str(right)))
        for n, right in pairs
    ]


def is_equal(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where math-verify finds the completion equal to the answer; nothing where it cannot read
    the answer.
    """
    from math_verify import parse, verify

    # Their time limits would end that of the rewards, which is the same signal's.
    answers = ["" if right is None else str(right) for right in answer]
    read = [parse(text, parsing_timeout=None) for text in (*answers, *map(text_of, completions))]
    pairs = zip(read[: len(answer)], read[len(answer) :], strict=True)
    return [
        float(verify(right, each, timeout_seconds=None)) if right else None for right, each in pairs
    ]


def has_format(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion is reasoning and then an answer, each once in its tags.

    >>> has_format(["<think>2+2</think><answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    """
    return [float(FORMAT.fullmatch(_with_reasoning(each)) is not None) for each in completions]


def thinks_first(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion begins with reasoning in its tags, once; TRL's think_format_reward.

    >>> thinks_first(["<think>2+2</think>4", "4", "<think><think></think>"])
    [1.0, 0.0, 0.0]
    """
    return [float(THINKING.match(_with_reasoning(each)) is not None) for each in completions]


def leaves_room(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """The share of max_completion_length that each completion leaves unused."""
    return [1 - len(ids) / trainer_state.max_completion_length for ids in completion_ids]


def punishes_overlong(
    completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any
) -> list[float]:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

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
    """The function of the row `name`; its package is imported here, whose seconds count for no
    completion.
    """
    if name in REWARD_PACKAGES:
        import_module(REWARD_PACKAGES[name])
    return FUNCTIONS[name]
