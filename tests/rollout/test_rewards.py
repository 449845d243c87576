"""Rewards in their own process: what functions get and may return, and what is said of one that raises, hangs or lies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.methods import SHIPPED_REWARDS, Rollout
from finetune.errors import UserError
from finetune.rollout.rewards import Rewards, Scores
from finetune.rollout.shipped_rewards import FUNCTIONS

FILE = """
import os
import time

def by_column(prompts, completions, completion_ids, level, trainer_state, log_extra, log_metric, **columns):
    log_metric("seen", 1.0), log_extra("column", level)
    print("no answer")
    return [n * len(text) + trainer_state.global_step for n, text in zip(level, completions)]

def without_columns(completions):
    return [len(each) for each in completions]

async def awaited(completions, **_):
    return [None if each == "b" else 0.5 for each in completions]

def raises(completions, **_):
    return [1 / (each != "b") for each in completions]

def not_finite(completions, **_):
    return [float("inf") if each == "b" else 1.0 for each in completions]

def too_few(completions, **_):
    return [1.0]

def hangs(completions, **_):
    time.sleep(9 * ("b" in completions))
    return [1.0 for _ in completions]

def dies(completions, **_):
    os._exit(3)
"""


def line_of(text: str) -> int:
    """The line of the file with these words."""
    return next(number for number, line in enumerate(FILE.splitlines(), 1) if text in line)


COMPLETIONS = ["a", "b", "ccc"]


def ask(tmp_path: Path, *names: str, **keys: Any) -> Scores:
    (tmp_path / "my_rewards.py").write_text(FILE)
    located = tuple(name if name in FUNCTIONS else f"{tmp_path / 'my_rewards.py'}:{name}" for name in names)
    rewards = Rewards(Rollout(rewards=located, **keys))
    try:
        ids = [[1] * len(each) for each in COMPLETIONS]
        columns = {"level": [1, 2, 3], "answer": ["a", "x", "ccc"], "completions": ["a column's"] * 3}
        state = {"global_step": 10, "max_steps": 20, "max_completion_length": 4}
        return rewards.score(["p"] * 3, COMPLETIONS, ids, columns, state)
    finally:
        rewards.close()


def test_functions_get_what_trl_gives_and_only_what_they_take(tmp_path: Path) -> None:
    found = ask(tmp_path, "by_column", "without_columns", "awaited", "exact_answer", "length")
    assert found.by_function == [[11, 12, 19], [1, 1, 3], [0.5, None, 0.5], [1, 0, 1], [0.75, 0.75, 0.25]]
    assert found.failures == 0


def test_a_row_without_an_answer_has_no_score_and_reasoning_apart_is_seen_by_formats() -> None:
    thought = [{"role": "assistant", "reasoning_content": "2+2", "content": "<answer>4</answer>"}]
    assert FUNCTIONS["format"]([thought, "4"]) == [1.0, 0.0] == FUNCTIONS["think_format"]([thought, "4"])
    for name in ("exact_answer", "number"):
        assert FUNCTIONS[name](["4", "4", "5"], answer=["4", None, "4"]) == [1.0, None, 0.0]


def test_math_verify_compares_numbers_and_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time limits, by the same signal as ours, are off: a function after it is still stopped."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr(
        "tests.rollout.test_rewards.COMPLETIONS", ["so \\boxed{\\frac{1}{2}}", "b", "$1+x^2$", "no idea"]
    )
    keys = Rollout(rewards=("math_verify",))
    rewards = Rewards(keys)
    answers = ["0.5", "#### 3", "$x^2+1$", "none"]
    try:
        found = rewards.score(["p"] * 4, COMPLETIONS, [[1]] * 4, {"answer": answers}, {"global_step": 0})
    finally:
        rewards.close()
    assert found.by_function == [[1.0, 0.0, 1.0, None]]
    with pytest.raises(UserError, match="hangs, a reward: TimeLimit: took more than reward_timeout_seconds"):
        monkeypatch.setattr("tests.rollout.test_rewards.COMPLETIONS", ["b", "b", "ccc"])
        ask(tmp_path, "math_verify", "hangs", reward_timeout_seconds=4.0)


@pytest.mark.slow  # TRL's own function
def test_overlong_completions_are_punished_as_by_trl() -> None:
    other_rewards = pytest.importorskip("trl.rewards")
    theirs = other_rewards.get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=7)
    state = SimpleNamespace(max_completion_length=30, soft_punish_cache=7)
    ids = [[1] * n for n in range(1, 31)]
    assert FUNCTIONS["soft_overlong_punishment"](ids, trainer_state=state) == pytest.approx(theirs(completion_ids=ids))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "raises",
            f"my_rewards.py:{line_of('1 / (each')}: raises, a reward: ZeroDivisionError: division by zero (on_bad_reward: zero",
        ),
        ("not_finite", f'my_rewards.py:{line_of("def not_finite")}: not_finite: returned inf for the completion "b"'),
        ("too_few", f"my_rewards.py:{line_of('def too_few')}: too_few: returned 1 rewards for 3 completions"),
        (
            "hangs",
            f"my_rewards.py:{line_of('time.sleep')}: hangs, a reward: TimeLimit: took more than reward_timeout_s",
        ),
        ("dies", "my_rewards.py: their process ended with 3; its last words are above"),
    ],
)
def test_a_failing_function_is_named_with_its_line(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        ask(tmp_path, name, reward_timeout_seconds=0.3)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["raises", "not_finite", "hangs"])
def test_a_failure_can_be_a_zero_that_is_counted(name: str, tmp_path: Path) -> None:
    found = ask(tmp_path, name, on_bad_reward="zero", reward_timeout_seconds=0.3)
    assert found.by_function == [[1.0, 0.0, 1.0]] and found.failures == 1


def test_code_that_python_cannot_interrupt_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.rollout.rewards.SECONDS_TO_STOP", 0.5)
    (tmp_path / "deaf.py").write_text(
        "import signal, time\n\ndef deaf(**_):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n    time.sleep(60)\n"
    )
    rewards = Rewards(Rollout(rewards=(f"{tmp_path / 'deaf.py'}:deaf",), reward_timeout_seconds=0.3))
    with pytest.raises(UserError, match=r"deaf\.py: no answer in 0\.8 s, in code that Python cannot interrupt"):
        rewards.score(["p"], ["a"], [[1]], {}, {"global_step": 0})
    assert rewards._process is None, "killed, and waited for"


def test_every_reward_that_ships_has_a_function_and_a_line() -> None:
    assert FUNCTIONS.keys() == SHIPPED_REWARDS.keys()
