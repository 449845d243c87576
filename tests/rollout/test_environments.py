"""Environments in their processes: TRL's contract, what they draw, and each thing that goes wrong with one of them."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune import load_recipe
from finetune.config.methods import RolloutKeys
from finetune.config.reader import read_recipe
from finetune.data.environments import describe_environments
from finetune.data.messages import BadRow
from finetune.data.render import render
from finetune.data.tokenizer import load_tokenizer, make_renderer_of
from finetune.data.tool_calls import make_tool_turns
from finetune.errors import UserError
from finetune.rollout.engine import Request
from finetune.rollout.episodes import Episodes
from finetune.rollout.rewards import Rewards
from tests.conftest import make_tokenizer, slow_but

FILE = '''
import asyncio
import os
import random
import signal
import threading
import time

import numpy


class Wrapper:
    """Cannot be made again from its parts, as TextArena's wrappers."""

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __reduce__(self):
        return object.__new__, (Wrapper,), {"inner": 1}


class Counter:
    """Counts up to a number that it draws."""

    def __init__(self):
        self.made = threading.Lock()  # which no other process can have
        self.wrapper = Wrapper()

    def reset(self, start=0, **row):
        self.count = start
        self.row = row
        self.target = random.randint(1, 1_000_000)
        self.noise = numpy.random.rand()
        return f" Reach {self.target}." if start >= 0 else None

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: What to add.
        """
        if step < 0:
            raise ValueError("only forwards")
        self.count += step
        return self.count

    async def later(self, step: int) -> str:
        """Adds to the counter, later.

        Args:
            step: What to add.
        """
        if not hasattr(self, "event"):
            self.event = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, self.event.set)
        await self.event.wait()
        self.count += step
        return f"{self.count} now"

    def draw(self) -> str:
        """Draws."""
        return f"{random.random()} {numpy.random.rand()}"

    def _hidden(self):
        return 1

    async def get_reward(self):
        return self.count


class Bad(Counter):
    def reset(self, how="well", **row):
        self.how = how
        if how == "reset raises":
            return {}["nothing"]
        if how == "reset hangs":
            time.sleep(60)
        if how == "reset says numbers":
            return 7
        return super().reset(**row)

    def act(self) -> str:
        """Does what the row says."""
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "hangs in C":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(60)
        if self.how == "leaves":
            os._exit(3)
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "says much":
            return "x" * 100_000_000
        return "well"

    def get_reward(self):
        if self.how == "reward raises":
            raise RuntimeError("no reward")
        return "much" if self.how == "reward is text" else 1.0


def make_counter():
    return Counter()


def reads(environments, completions, **columns):
    return [each.count + each.target % 2 for each in environments]


def counts_locks(environments, **columns):
    return [float(hasattr(each, "made") or hasattr(each, "wrapper")) for each in environments]
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_worlds.py"
    path.write_text(FILE)
    return path


def ask(rewards: Rewards, *resets: dict[str, Any], name: str, seed: str = "0") -> list[Any]:
    items = [
        {"place": place, "environment": name, "row": row, "seed": seed}
        for place, row in enumerate(resets)
    ]
    return rewards.ask_environments("reset", items)


def call(rewards: Rewards, *calls: tuple[int, str, dict[str, Any]]) -> list[tuple[str, bool]]:
    return rewards.call_tools(
        [{"place": place, "name": name, "arguments": given} for place, name, given in calls]
    )


def finish(rewards: Rewards, count: int) -> list[Any]:
    return rewards.ask_environments("finish", [{"place": place} for place in range(count)])


def test_an_environment_keeps_its_state_and_pays_for_it(file: Path) -> None:
    name = f"{file}:Counter"
    rewards = Rewards(RolloutKeys(environment=name, environment_processes=2))
    try:
        said = ask(rewards, {"start": 10}, {"start": 20, "prompt": "?"}, {"start": -5}, name=name)
        assert [each["said"] is None for each in said] == [False, False, True]
        forward, back = ("increment", {"step": 2}), ("increment", {"step": -1})
        assert call(rewards, (0, *forward), (1, *forward), (0, *forward), (2, *back)) == [
            ("12", False), ("22", False), ("14", False), (str({"error": "only forwards"}), True)
        ]  # fmt: skip
        assert call(rewards, (1, "later", {"step": 1}), (1, "later", {"step": 1})) == [
            ("23 now", False), ("24 now", False)
        ]  # fmt: skip
        unknown = call(rewards, (0, "_hidden", {}), (0, "reset", {}), (0, "get_reward", {}))
        assert unknown[0] == (str({"error": "Tool _hidden not found."}), True)
        assert all(failed for _, failed in unknown)
        assert [each["reward"] for each in finish(rewards, 3)] == [14, 24, -5]
        ask(rewards, {"start": 1}, name=name)  # the same objects, as new
        assert [each["reward"] for each in finish(rewards, 1)] == [1]
    finally:
        rewards.close()


def test_what_an_environment_draws_is_its_own(file: Path) -> None:
    """Of the seed alone: not of the others in its process, nor of their number."""
    name = f"{file}:Counter"

    def draw(processes: int, order: list[int]) -> tuple[list[str], dict[int, list[str]]]:
        rewards = Rewards(RolloutKeys(environment=name, environment_processes=processes))
        try:
            said = [*(each["said"] for each in ask(rewards, {}, {}, {}, name=name, seed="7"))]
            drawn: dict[int, list[str]] = {}
            for place in order:
                [(text, _)] = call(rewards, (place, "draw", {}))
                drawn.setdefault(place, []).append(text)
            return said, drawn
        finally:
            rewards.close()

    said, drawn = draw(3, [0, 0, 1, 1, 2, 2])
    assert draw(1, [0, 1, 2, 2, 1, 0]) == (said, drawn)
    assert len(set(said)) == 1, "those of a prompt begin alike"
    assert len(set(drawn[0])) == 2
    rng = random.Random("7")
    assert said[0] == f" Reach {rng.randint(1, 1_000_000)}."


def test_reward_functions_read_environments(file: Path) -> None:
    name = f"{file}:Counter"
    functions = (f"{file}:reads", f"{file}:counts_locks")
    rewards = Rewards(RolloutKeys(rewards=functions, environment=name, environment_processes=2))
    try:
        ask(rewards, {"start": 3}, {"start": 4}, name=name)
        call(rewards, (0, "increment", {"step": 2}))
        states = [each["state"] for each in finish(rewards, 2)]
        columns = {"environments": states}
        scores = rewards.score(["?"] * 2, ["a"] * 2, [[1]] * 2, columns, {}).by_reward
        target = random.Random("0").randint(1, 1_000_000) % 2
        assert scores == [[5 + target, 4 + target], [0, 0]], "a lock cannot go to another process"
        rewards.check_arguments(["environments"])
    finally:
        rewards.close()


BROKEN = {
    "reset raises": r"my_worlds.py:\d+: .*my_worlds.py:Bad, an environment: KeyError: 'nothing'",
    "reset hangs": r"my_worlds.py:\d+: .*Bad, an environment: TimeLimit: took more than",
    "reset says numbers": r"Bad, an environment: TypeError: reset returned int; text or None",
    "hangs": r"my_worlds.py:\d+: act, a tool: TimeLimit: took more than reward_timeout_seconds",
    "hangs in C": r"environment: act: no answer in its time, in code that Python cannot interrupt",
    "leaves": r"environment: act: its process ended with 3",
    "is killed": r"environment: act: its process ended with -9",
    "says much": r"act, a tool: SizeLimit: said 100,000,000 characters; 1,000,000 are read at most",
    "reward raises": r"Bad, an environment: get_reward: RuntimeError: no reward",
    "reward is text": r"Bad, an environment: get_reward: TypeError: returned 'much'",
}
KEEPS = ("hangs", "says much")  # after which the environment still stands
ENDS = ("hangs in C", "leaves", "is killed")  # with the others of its process


@pytest.mark.parametrize("how", BROKEN)
def test_what_goes_wrong_ends_the_run_with_a_sentence(how: str, file: Path) -> None:
    name = f"{file}:Bad"
    keys = RolloutKeys(environment=name, environment_processes=2, reward_timeout_seconds=1)
    rewards = Rewards(keys)
    with pytest.raises(UserError, match=BROKEN[how] + r".*\(on_bad_reward: zero counts such c"):
        try:
            ask(rewards, {}, {"how": how}, name=name)
            call(rewards, (0, "act", {}), (1, "act", {}))
            finish(rewards, 2)
        finally:
            rewards.close()


@pytest.mark.parametrize("how", slow_but(BROKEN.keys() - {"hangs in C"}, BROKEN))
def test_what_goes_wrong_is_counted_and_stays_alone(how: str, file: Path) -> None:
    name = f"{file}:Bad"
    keys = RolloutKeys(environment=name, environment_processes=2, reward_timeout_seconds=1)
    rewards = Rewards(replace(keys, on_bad_reward="zero"))
    try:
        for _ in range(2):  # the next step as well
            ask(rewards, {}, {"how": how}, {}, {}, name=name)
            places = (0, 1, 2, 3)
            results = call(rewards, *((place, "act", {}) for place in places))
            assert results[0] == results[2] == ("well", False)
            assert results[1][1] == (not how.startswith("reward"))
            ends = finish(rewards, 4)
            bad = ["problem" in each for each in ends]
            assert bad == [False, how not in KEEPS, False, how in ENDS]
    finally:
        rewards.close()


def test_an_environment_that_leaves_no_room_is_lost(file: Path, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    keys: dict[str, Any] = {"model_name_or_path": str(tmp_path), "method": "grpo"}
    keys |= {"environment": f"{file}:Counter", "on_bad_reward": "zero", "chat_template": "qwen"}
    keys |= {"max_length": 12, "max_completion_length": 8, "datasets": [{"path": "a/b"}]}
    recipe = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    tokenizer = load_tokenizer(recipe.model, recipe.data, (), recipe.rollout.environments)
    rewards = Rewards(recipe.rollout)
    starts = (0, -1)  # the second says nothing
    prompt = [{"role": "user", "content": "Go."}]
    rows = [{"prompt": prompt, "columns": {"start": start}} for start in starts]
    episodes = Episodes(recipe, tokenizer, rewards, rewards.take_places(2), rows)
    try:
        requests = [Request((7,), (0, 0, 0, number)) for number in range(2)]
        assert episodes.begin(requests) == [[7], [7]]
        step = ("increment", {"step": 5})
        (text, failed), in_room = call(rewards, (0, *step), (1, *step))
        assert failed and "it was lost" in text and in_room == ("4", False)
        ended = episodes.end()
        assert ended.lost == [0] and ended.rewards == {"Counter": [0.0, 4.0]}
    finally:
        rewards.close()


def test_processes_end_with_the_run(file: Path) -> None:
    name = f"{file}:Counter"
    rewards = Rewards(RolloutKeys(environment=name, environment_processes=3))
    ask(rewards, {}, {}, {}, name=name)
    assert rewards._process is not None
    living = psutil.Process(rewards._process.handle.pid).children(recursive=True)
    assert len(living) == 3
    os.kill(rewards._process.handle.pid, signal.SIGKILL)  # not by its own will
    deadline = time.monotonic() + 10
    while any(each.is_running() and each.status() != "zombie" for each in living):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rewards.close()


def test_a_lost_process_of_rewards_is_counted(file: Path) -> None:
    name = f"{file}:Counter"
    rewards = Rewards(RolloutKeys(environment=name, on_bad_reward="zero"))
    try:
        ask(rewards, {}, {}, name=name)
        assert rewards._process is not None
        os.kill(rewards._process.handle.pid, signal.SIGKILL)
        [(text, failed)] = call(rewards, (0, "draw", {}))
        assert failed and "environment" in text
        assert all("problem" in each for each in finish(rewards, 2))
        assert "said" in ask(rewards, {}, name=name)[0]
    finally:
        rewards.close()


def test_facts_are_those_of_trl(file: Path) -> None:
    facts = describe_environments({"": f"{file}:Counter"}, ())[""]
    names = [each["function"]["name"] for each in facts.tools]
    assert names == ["draw", "increment", "later"] and facts.reward == "Counter"
    made = describe_environments({"": f"{file}:make_counter"}, ())[""]
    assert made == facts
    assert facts.tools[1]["function"]["parameters"]["properties"]["step"]["type"] == "integer"


WRONG = {
    "class Game:\n    def move(self) -> int:\n        '''Moves.'''\n": r"Game, an environment: has no method reset",
    "class Game:\n    def reset(self, **row): pass\n    def move(self, to):\n        return to\n": r"my_game.py:3: move, a tool: .*has no docstring",
    "def Game():\n    return 1 / 0\n": r"my_game.py:2: .*Game, an environment: ZeroDivisionError",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_class_that_is_no_environment_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text(text)
    with pytest.raises(UserError, match=WRONG[text]):
        describe_environments({"": f"{tmp_path / 'my_game.py'}:Game"}, ())


def test_rows_choose_the_tools_that_their_prompts_describe(file: Path, tmp_path: Path) -> None:
    from finetune.data.preferences import parse_prompt

    make_tokenizer().save_pretrained(tmp_path)
    keys: dict[str, Any] = {"model_name_or_path": str(tmp_path), "method": "grpo"}
    keys |= {"environment": {"count": f"{file}:Counter", "act": f"{file}:Bad"}}
    keys |= {"datasets": [{"path": "a/b"}], "chat_template": "qwen"}
    keys |= {"added_tokens": ["<|im_end|>"], "eot_tokens": ["<|im_end|>"]}
    recipe = read_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    tokenizer = load_tokenizer(recipe.model, recipe.data, (), recipe.rollout.environments)
    renderer = make_renderer_of(recipe.data, tokenizer)
    source = recipe.data.datasets[0]

    def show(**row: Any) -> str:
        [group] = parse_prompt(
            {"prompt": [{"role": "user", "content": "Go."}], **row}, source
        ).groups
        return render(group.documents[0], renderer).text

    assert '"act"' in show(environment="act") and '"act"' not in show(environment="count")
    assert '"increment"' in show(environment="count")
    own = [{"name": "now", "parameters": {}}]
    for row in ({}, {"environment": "chess"}, {"environment": "chess", "tools": own}):
        with pytest.raises(
            BadRow, match=r"environment: .* is none of the recipe's, which are count"
        ):
            show(**row)
    turns = make_tool_turns(recipe, tokenizer)
    row = {"columns": {"environment": "act"}, "prompt": []}
    message = turns.read(
        tokenizer.encode('<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call><|im_end|>'),
        row,
    )
    assert message["tool_calls"][0]["function"]["name"] == "act"


def test_what_verifiers_plays_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"environment: verifiers:wordle: .* write a class with reset"
    ):
        read_recipe(None, ["environment=verifiers:wordle", "method=grpo", "model_name_or_path=a/b"])


def test_a_world_that_asks_itself_needs_a_length(file: Path) -> None:
    with pytest.raises(UserError, match=r"environment: without datasets .*; set max_steps"):
        load_recipe(method="grpo", model_name_or_path="a/b", environment=f"{file}:Counter")


def test_a_script_gives_a_class_or_several(file: Path) -> None:
    class Local:
        def reset(self, **row: Any) -> None:
            self.count = 1

        def add(self, number: int) -> int:
            """Adds.

            Args:
                number: What to add.
            """
            self.count += number
            return self.count

        def get_reward(self) -> int:
            return self.count

    def load(environment: Any) -> RolloutKeys:
        model = {"method": "grpo", "model_name_or_path": "a/b", "max_steps": 3}
        return load_recipe(**model, environment=environment).rollout

    one = load(Local)
    several = load({"a": Local, "b": f"{file}:Counter"})
    assert several.environments == {"a": one.environment, "b": f"{file}:Counter"}
    name = one.environments[""]
    assert describe_environments({"": name}, ())[""].reward == "Local"
    rewards = Rewards(one)
    try:
        ask(rewards, {}, name=name)
        assert call(rewards, (0, "add", {"number": 3})) == [("4", False)]
        assert finish(rewards, 1)[0]["reward"] == 4
    finally:
        rewards.close()
