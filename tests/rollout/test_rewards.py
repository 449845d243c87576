"""Rewards in their own process: what functions get and may return, and what is said of one that raises, hangs or lies."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.methods import RolloutKeys
from finetune.config.reward_names import SHIPPED_REWARDS
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.rollout.collect import Sampler
from finetune.rollout.engine import Ended, Sampled
from finetune.rollout.rewards import Rewards, Scores
from finetune.rollout.shipped_rewards import FUNCTIONS
from tests.ranks import ROOT

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

def dies_of_one(completions, **_):
    if "b" in completions:
        os._exit(3)
    return [1.0 for _ in completions]

class Unusual(BaseException):
    pass

def unusual(completions, **_):
    if "b" in completions:
        raise Unusual("not an Exception")
    return [1.0 for _ in completions]

def interrupts(completions, **_):
    if "b" in completions:
        raise KeyboardInterrupt
    return [1.0 for _ in completions]

def swallows(completions, **_):
    end = time.monotonic() + 2 * ("b" in completions)
    while time.monotonic() < end:
        try:
            time.sleep(9)
        except BaseException:
            pass
    return [1.0 for _ in completions]

def mapping(completions, **_):
    return {str(number): 1.0 for number, _ in enumerate(completions)}

def text(completions, **_):
    return "1" * len(completions)

def texts(completions, **_):
    return ["1.0" if each == "b" else 1.0 for each in completions]

def too_large(completions, **_):
    return [10 ** 400 if each == "b" else 1.0 for each in completions]

def beyond_fp32(completions, **_):
    return [1e39 if each == "b" else 1.0 for each in completions]

def of_one_kind(completions, **_):
    return [1.0] if len(completions) > 1 else [2.0]

def arrays(completions, **_):
    import numpy
    return numpy.array([1.0 for _ in completions], numpy.float16)

def booleans(completions, **_):
    return (each != "b" for each in completions)

def changes(completions, level, **_):
    completions.reverse()
    level.clear()
    return [1.0, 1.0, 1.0]

def reads_rare(completions, rare):
    return [float(len(each)) if of is None else 0.0 for each, of in zip(completions, rare, strict=True)]

def forges(completions, **_):
    import json
    for file in os.listdir("/proc/self/fd"):
        try:
            os.write(int(file), json.dumps({"scores": [9.0] * len(completions), "failed": [False] * len(completions)}).encode() + b"\\n")
        except OSError:
            pass
    return [1.0 for _ in completions]

def forks(completions, **_):
    if os.fork() == 0:
        forges(completions)
        os._exit(0)
    os.wait()
    return [1.0 for _ in completions]

def starts(completions, **_):
    import pathlib, subprocess
    started = [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (False, True)]
    pathlib.Path(__file__).with_name("started").write_text(" ".join(map(str, [os.getpid(), *started])))
    return [1.0 for _ in completions]
"""


def line_of(text: str) -> int:
    """The line of the file with these words."""
    return next(number for number, line in enumerate(FILE.splitlines(), 1) if text in line)


COMPLETIONS = ["a", "b", "ccc"]


def ask(tmp_path: Path, *names: str, **keys: Any) -> Scores:
    (tmp_path / "my_rewards.py").write_text(FILE)
    located = tuple(
        name if name in FUNCTIONS else f"{tmp_path / 'my_rewards.py'}:{name}" for name in names
    )
    rewards = Rewards(RolloutKeys(rewards=located, **keys))
    try:
        ids = [[1] * len(each) for each in COMPLETIONS]
        columns = {
            "level": [1, 2, 3],
            "answer": ["a", "x", "ccc"],
            "completions": ["a column's"] * 3,
        }
        state = {"global_step": 10, "max_steps": 20, "max_completion_length": 4}
        return rewards.score(["p"] * 3, COMPLETIONS, ids, columns, state)
    finally:
        rewards.close()


def test_functions_get_what_trl_gives_and_only_what_they_take(tmp_path: Path) -> None:
    found = ask(tmp_path, "by_column", "without_columns", "awaited", "exact_answer", "length")
    assert found.by_reward == [
        [11, 12, 19],
        [1, 1, 3],
        [0.5, None, 0.5],
        [1, 0, 1],
        [0.75, 0.75, 0.25],
    ]
    assert not found.failed


def test_a_function_that_changes_its_arguments_changes_them_for_itself_alone(
    tmp_path: Path,
) -> None:
    scores = ask(tmp_path, "changes", "without_columns", "by_column").by_reward
    assert scores == [[1.0, 1.0, 1.0], [1, 1, 3], [11, 12, 19]]


def test_a_column_that_no_row_of_a_step_has_is_none(tmp_path: Path) -> None:
    """As if one of them had it: a step is not another one for the prompts beside."""
    assert ask(tmp_path, "reads_rare").by_reward == [[1.0, 1.0, 3.0]]


def test_a_row_without_an_answer_has_no_score_and_reasoning_apart_is_seen_by_formats() -> None:
    thought = [{"role": "assistant", "reasoning_content": "2+2", "content": "<answer>4</answer>"}]
    assert (
        FUNCTIONS["format"]([thought, "4"])
        == [1.0, 0.0]
        == FUNCTIONS["think_format"]([thought, "4"])
    )
    for name in ("exact_answer", "number"):
        assert FUNCTIONS[name](["4", "4", "5"], answer=["4", None, "4"]) == [1.0, None, 0.0]


def test_math_verify_compares_numbers_and_formulas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time limits, by the same signal as ours, are off: a function after it is still stopped."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr(
        "tests.rollout.test_rewards.COMPLETIONS",
        ["so \\boxed{\\frac{1}{2}}", "b", "$1+x^2$", "no idea"],
    )
    keys = RolloutKeys(rewards=("math_verify",))
    rewards = Rewards(keys)
    answers = ["0.5", "#### 3", "$x^2+1$", "none"]
    try:
        found = rewards.score(
            ["p"] * 4, COMPLETIONS, [[1]] * 4, {"answer": answers}, {"global_step": 0}
        )
    finally:
        rewards.close()
    assert found.by_reward == [[1.0, 0.0, 1.0, None]]
    with pytest.raises(
        UserError, match="hangs, a reward: TimeLimit: took more than reward_timeout_seconds"
    ):
        monkeypatch.setattr("tests.rollout.test_rewards.COMPLETIONS", ["b", "b", "ccc"])
        ask(tmp_path, "math_verify", "hangs", reward_timeout_seconds=4.0)


@pytest.mark.slow  # TRL's own function
def test_overlong_completions_are_punished_as_by_trl() -> None:
    other_rewards = pytest.importorskip("trl.rewards")
    theirs = other_rewards.get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=7)
    state = SimpleNamespace(max_completion_length=30, soft_punish_cache=7)
    ids = [[1] * n for n in range(1, 31)]
    assert FUNCTIONS["soft_overlong_punishment"](ids, trainer_state=state) == pytest.approx(
        theirs(completion_ids=ids)
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "raises",
            f"my_rewards.py:{line_of('1 / (each')}: raises, a reward: ZeroDivisionError: division by zero (on_bad_reward: zero",
        ),
        (
            "not_finite",
            f'my_rewards.py:{line_of("def not_finite")}: not_finite: returned inf for the completion "b"',
        ),
        (
            "beyond_fp32",
            f'my_rewards.py:{line_of("def beyond_fp32")}: beyond_fp32: returned 1e+39 (beyond 1e+18) for the completion "b"',
        ),
        (
            "too_few",
            f"my_rewards.py:{line_of('def too_few')}: too_few: returned 1 rewards for 3 completions",
        ),
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


OF_ONE = (
    "raises",
    "not_finite",
    "hangs",
    "dies_of_one",
    "unusual",
    "interrupts",
    "swallows",
    "texts",
    "too_large",
    "beyond_fp32",
)
OF_ALL = ("dies", "mapping", "text", "too_few", "of_one_kind", "forges")


@pytest.mark.parametrize("name", [*OF_ONE, *OF_ALL])
def test_a_failure_ends_the_run_or_is_a_zero_that_is_counted(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"my_rewards\.py") as error:
        ask(tmp_path, name, reward_timeout_seconds=0.3)
    assert "\n" not in str(error.value)
    found = ask(tmp_path, name, "without_columns", on_bad_reward="zero", reward_timeout_seconds=0.3)
    expected, failures = ([1.0, 0.0, 1.0], 1) if name in OF_ONE else ([0.0, 0.0, 0.0], 3)
    assert found.by_reward == [expected, [1, 1, 3]] and len(found.failed) == failures


@pytest.mark.parametrize(
    ("name", "expected"), [("arrays", [1, 1, 1]), ("booleans", [1, 0, 1]), ("forks", [1, 1, 1])]
)
def test_whatever_holds_a_number_for_each_completion_is_a_reward(
    name: str, expected: list[float], tmp_path: Path
) -> None:
    """A child of a function holds no end of the pipes."""
    assert ask(tmp_path, name).by_reward == [expected]


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_rewards_that_were_interrupted_are_not_those_of_the_next_step(
    seconds: float, tmp_path: Path
) -> None:
    """Ctrl-C in a notebook, caught: the next scores are those of the next completions, whenever it came."""
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completions, **_):\n    time.sleep(0.2)\n    return [len(each) for each in completions]\n"
    )
    rewards = Rewards(RolloutKeys(rewards=(f"{tmp_path / 'slow.py'}:slow",)))
    asked = {"columns": {}, "state": {"global_step": 0}}

    def score(text: str) -> list[list[float | None]]:
        return rewards.score(["p"], [text], [[1]], **asked).by_reward

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert score("a") == [[1.0]]
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
        with suppress(KeyboardInterrupt):
            score("bb")
            time.sleep(1)
        for text in ("ccc", "dddd", "e"):
            assert score(text) == [[len(text)]]
    finally:
        signal.signal(signal.SIGALRM, before)
        rewards.close()


SCRIPT = """
import sys, time
from finetune.config.methods import RolloutKeys
from finetune.rollout.rewards import Rewards
rewards = Rewards(RolloutKeys(rewards=(sys.argv[1],)))
rewards.score(["p"], ["a"], [[1]], {}, {"global_step": 0})
print("scored", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_what_asks_it(tmp_path: Path) -> None:
    """A notebook may open many sessions, and closes none of their rewards."""
    (tmp_path / "my_rewards.py").write_text(FILE)
    rewards = Rewards(RolloutKeys(rewards=(f"{tmp_path / 'my_rewards.py'}:starts",)))
    rewards.score(["p"], ["a"], [[1]], {}, {"global_step": 0})
    del rewards
    gc.collect()
    assert all_have_ended(tmp_path)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_function_has_started_ends_with_the_run(is_killed: bool, tmp_path: Path) -> None:
    """In a group of its own or not; where the run closes it, and where the run is killed."""
    if is_killed:
        (tmp_path / "my_rewards.py").write_text(FILE)
        command = [sys.executable, "-c", SCRIPT, f"{tmp_path / 'my_rewards.py'}:starts"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
        ) as run:
            assert run.stdout is not None and run.stdout.readline() == b"scored\n"
            run.kill()
    else:
        ask(tmp_path, "starts")
    assert all_have_ended(tmp_path)


def all_have_ended(folder: Path) -> bool:
    """Whether the process of `starts` and its two children end within ten seconds."""
    processes = [*map(int, (folder / "started").read_text().split())]
    assert len(processes) == 3
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, processes))


def is_running(process: int) -> bool:
    """Whether there is such a process, and it is not one that only waits to be asked how it ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_code_that_python_cannot_interrupt_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.rollout.rewards.SECONDS_TO_STOP", 0.5)
    (tmp_path / "deaf.py").write_text(
        "import signal, time\n\ndef deaf(**_):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n    time.sleep(60)\n"
    )
    rewards = Rewards(
        RolloutKeys(rewards=(f"{tmp_path / 'deaf.py'}:deaf",), reward_timeout_seconds=0.3)
    )
    with pytest.raises(
        UserError, match=r"deaf\.py: no answer in 0\.8 s, in code that Python cannot interrupt"
    ):
        rewards.score(["p"], ["a"], [[1]], {}, {"global_step": 0})
    assert rewards._process is None, "killed, and waited for"


def test_files_that_load_slowly_have_the_time_of_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.rollout.rewards.SECONDS_TO_START", 0.1)
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ntime.sleep(1)\n\ndef slow(**_):\n    return [1.0]\n")

    def score(seconds: float) -> Scores:
        rewards = Rewards(RolloutKeys(rewards=(f"{file}:slow",), reward_timeout_seconds=seconds))
        try:
            return rewards.score(["p"], ["a"], [[1]], {}, {"global_step": 0})
        finally:
            rewards.close()

    assert score(60.0) == Scores([[1.0]], [])
    with pytest.raises(UserError, match=r"slow\.py: not loaded in 0\.5 s; raise reward_timeout_s"):
        score(0.5)


def test_every_reward_that_ships_has_a_function_and_a_line() -> None:
    assert FUNCTIONS.keys() == SHIPPED_REWARDS.keys()


def test_a_completion_that_fails_twice_is_counted_once() -> None:
    """A function fails on the second of three, a reward model on the second and the third."""
    accelerator: Any = SimpleNamespace(scaler=None)
    sampler: Any = SimpleNamespace(
        world=World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), accelerator),
        score=lambda *_: Scores([[1.0, 0.0, None]], [1]),
        rewards=SimpleNamespace(names=["function"]),
        environment_rewards=[],
        reward_models=[SimpleNamespace(name="model")],
        reward_names=["model", "function"],
        _score_by_model=lambda *_: ([0.5, 0.0, 0.0], [1, 2]),
    )
    batch: Any = SimpleNamespace(rows=[], messages=[], episodes=None)
    scores, failures = Sampler._score_all(
        sampler, batch, [Sampled([1], [0.0], 0.0, Ended.CUT)] * 3, 0
    )
    assert failures == 2
    assert np.array_equal(scores, [[0.5, 1.0], [0.0, 0.0], [0.0, np.nan]], equal_nan=True)
