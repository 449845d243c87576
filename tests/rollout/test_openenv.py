"""OpenEnv's servers as environments (slow): `FINETUNE_ENVIRONMENTS` names a folder with the package openenv (`pip install --target`)."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.config.methods import RolloutKeys
from finetune.data.environments import describe_environments
from finetune.errors import UserError
from finetune.rollout.rewards import Rewards
from tests.rollout.openenv_servers import load_echo, make_multiply
from tests.rollout.test_environments import ask, call, finish
from tests.training.conftest import folder
from tests.training.layouts import train_all, write_config
from tests.training.test_online import lines_of
from tests.training.test_online_environments import recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "FINETUNE_ENVIRONMENTS" not in os.environ,
        reason="FINETUNE_ENVIRONMENTS names no folder with openenv",
    ),
]

__all__ = ["folder", "recipe"]  # the fixtures


@pytest.fixture(autouse=True, scope="module")
def packages() -> None:
    folders = os.environ["FINETUNE_ENVIRONMENTS"].split(os.pathsep)
    sys.path += [each for each in folders if each not in sys.path]  # behind our own


@contextmanager
def serving(name: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("openenv_servers.py")
    path = os.pathsep.join(sys.path[1:])
    process = subprocess.Popen(
        [sys.executable, str(script), name, str(port)], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"openenv:http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_the_template_of_the_package_pays_as_its_own_code_does() -> None:
    with serving("echo") as (name, _):
        facts = describe_environments({"": name}, ())[""]
        [tool] = facts.tools
        assert tool["function"]["name"] == "step" and facts.reward == "OpenEnv"
        assert list(tool["function"]["parameters"]["properties"]) == ["message"]
        rewards = Rewards(RolloutKeys(environment=name, environment_processes=2))
        try:
            said = ask(rewards, {"prompt": []}, {}, {}, name=name)
            assert "Echo environment ready!" in said[0]["said"]
            words = [["hi", "there"], ["hello, world"], []]
            steps = [
                (i, "step", {"message": word}) for i, each in enumerate(words) for word in each
            ]
            results = call(rewards, *steps)
            assert (
                next(text for text, _ in results) == '{"echoed_message": "hi", "message_length": 2}'
            )
            [(text, failed)] = call(rewards, (0, "step", {"massage": "x"}))
            assert failed and "VALIDATION_ERROR" in text
            paid = [each["reward"] for each in finish(rewards, 3)]
        finally:
            rewards.close()
    world, action, _ = load_echo()
    for each, reward in zip(words, paid, strict=True):
        own = world()
        last = own.reset()
        for word in each:
            last = own.step(action(message=word))
        assert reward == last.reward


def test_tools_of_the_model_context_protocol_are_the_models() -> None:
    with serving("multiply") as (name, _):
        facts = describe_environments({"": name}, ())[""]
        [tool] = facts.tools
        assert tool["function"]["description"] == "Multiplies two whole numbers."
        rewards = Rewards(RolloutKeys(environment=name, environment_processes=2))
        try:
            said = [each["said"] for each in ask(rewards, {}, {}, {}, name=name, seed="3")]
            assert len(set(said)) == 1 and re.fullmatch(r"What is \d+ times \d+\?", said[0])
            again = [each["said"] for each in ask(rewards, {}, name=name, seed="3")]
            assert again == said[:1], "a seed of the step's"
            other = [each["said"] for each in ask(rewards, {}, name=name, seed="4")]
            assert other != again
            five = ("multiply", {"a": 5, "b": 2})
            assert call(rewards, (0, *five), (0, "multiply", {"a": "x", "b": 1}))[0] == (
                "10",
                False,
            )
            [(text, failed)] = call(rewards, (0, *five))
            assert failed and "The episode has ended." in text
            assert [each["reward"] for each in finish(rewards, 1)] == [1.0]
        finally:
            rewards.close()


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"openenv:http://127.0.0.1:9.*: .*onnect"):
        describe_environments({"": "openenv:http://127.0.0.1:9"}, ())


def test_a_server_that_is_killed_is_counted() -> None:
    with serving("multiply") as (name, process):
        keys = RolloutKeys(
            environment=name,
            environment_processes=2,
            on_bad_reward="zero",
            reward_timeout_seconds=5,
        )
        rewards = Rewards(keys)
        try:
            ask(rewards, {}, {}, name=name)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for text, failed in call(rewards, (0, "multiply", {"a": 1, "b": 1})):
                assert failed and "error" in text
            assert all("problem" in each for each in ask(rewards, {}, {}, name=name))
        finally:
            rewards.close()


def test_a_run_is_paid_by_its_server(tmp_path: Path, recipe: Path, folder: Path) -> None:
    """Rewards recomputed by the environment's own code from what the run has written."""
    with serving("multiply") as (name, _):
        keys = [
            f"output_dir={tmp_path / 'run'}",
            f"environment={name}",
            "rewards=[]",
            "reward_weights=null",
            "eval_datasets=[]",
            f"datasets=[{{path: {tmp_path / 'rows.jsonl'}}}]",
        ]
        rows = '{"prompt": [{"role": "user", "content": ""}], "n": %d}\n'
        (tmp_path / "rows.jsonl").write_text("".join(rows % n for n in range(12)))
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
    world, action, _ = make_multiply()
    called = 0
    for line in lines_of(tmp_path / "run"):
        own = world()
        own.reset(seed=1)
        reward = None
        parts = line.get("parts", [])
        for turn, result in zip(parts[:-1:2], parts[1::2], strict=True):
            found = re.search(r'"arguments": (\{.*?\})', turn)
            assert found is not None
            given: dict[str, Any] = json.loads(found[1])
            observation = own.step(action(tool_name="multiply", arguments=given))
            if observation.error is None:
                assert f"<|tool|>{observation.result.data}<|end_of_turn|>" in result
            reward = observation.reward
            called += 1
        assert line["rewards"]["OpenEnv"] == reward, line
    assert called > 3
