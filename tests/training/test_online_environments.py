"""Environments through the whole command: what reset says, tools with a state, and what they pay, in every layout and after a kill."""

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from finetune.checkpoint.folders import list_checkpoints
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from tests.ranks import launch_ranks
from tests.rollout.stand_in_vllm import serving
from tests.training.calling import (
    EVERY,
    GENERATIONS,
    PROMPTS,
    QUICK,
    STEPS,
    train_layouts,
    write_short_run,
)
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config
from tests.training.test_online import KILLED, lines_of

WORLDS = '''
import random


class Product:
    """Asks for a product of a factor that it draws, and multiplies."""

    def reset(self, a, **row):
        assert row["prompt"] == [{"role": "user", "content": "What is "}]
        self.asked = a, random.randint(2, 99)
        self.calls = []
        return f"{a} times {self.asked[1]}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two whole numbers.

        Args:
            a: A factor.
            b: A factor.
        """
        self.calls.append((a, b))
        if random.random() < 0.3:
            raise ValueError("tired")
        return a * b

    def get_reward(self):
        return float(any(a % 2 == self.asked[1] % 2 for a, _ in self.calls))


def calls(environments, completions, **columns):
    """How often each has called, as its completion says too."""
    for each, said in zip(environments, completions, strict=True):
        assert sum("tool_calls" in message for message in said) >= len(each.calls)
        assert type(each).__name__ == "Product"
    return [float(len(each.calls)) for each in environments]
'''
AGAIN = ["num_iterations=2", "importance_sampling_correction=token_truncate", "max_steps=4"]


@pytest.fixture(scope="module")
def recipe(folder: Path, caller: Path) -> Path:
    (folder / "my_worlds.py").write_text(WORLDS)
    rows = [{"prompt": [{"role": "user", "content": "What is "}], "a": a} for a in range(20, 47)]
    for name, some in (("train", rows[:20]), ("heldout", rows[20:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    return write_short_run(
        folder / "worlds.yaml",
        caller,
        datasets=[{"path": "train.jsonl"}],
        eval_datasets=[{"path": "heldout.jsonl"}],
        environment="my_worlds.py:Product",
        environment_processes=3,
        rewards=["my_worlds.py:calls"],
        reward_weights=[0.5],
        max_length=110,
    )


@pytest.fixture(scope="module")
def runs(folder: Path, recipe: Path, slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout) -> the run's folder."""
    return train_layouts(folder, recipe, EVERY if slow_too else QUICK[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), EVERY)
def test_every_layout_meets_the_same_worlds(
    ranks: int, layout: str, runs: Callable[..., Path]
) -> None:
    one, run = runs(1, "single"), runs(ranks, layout)
    mine, alone = lines_of(run), lines_of(one)
    assert len(mine) == STEPS * PROMPTS * GENERATIONS
    for name in ("prompt", "token_ids", "tool_mask", "parts", "rewards", "ended"):
        assert [line.get(name) for line in mine] == [line.get(name) for line in alone], name
    for line, truth in zip(steps_of(run), steps_of(one), strict=True):
        for name in ("grad_norm", "reward", "rewards/Product", "tools/call_frequency"):
            assert line[name] == pytest.approx(truth[name], rel=1e-5), (line["step"], name)
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
        assert 0 < line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5


def read_argument(call: str, name: str) -> int | None:
    given = json.loads(call.removeprefix("<tool_call>").partition("</tool_call>")[0])
    return given["arguments"].get(name)


def assert_rewards_are_those_of_what_was_said(run: Path) -> None:
    """From what completions.jsonl says alone: questions, calls, results, rewards."""
    lines = lines_of(run)
    seen = set()
    for number, line in enumerate(lines):
        asked = re.search(r"What is (\d+) times (\d+)\?", line["prompt"])
        assert asked is not None, line["prompt"]
        factor = int(asked[2])
        group = lines[number - number % GENERATIONS]
        assert line["prompt"] == group["prompt"], "completions of a prompt begin alike"
        parts = line.get("parts", [])
        pairs = []
        for call, result in zip(parts[:-1:2], parts[1::2], strict=True):
            said = result.removeprefix("<|tool|>").partition("<|end_of_turn|>")[0]
            a, b = (read_argument(call, name) for name in "ab")
            if a is None or b is None:
                assert "error" in said
                continue
            pairs.append((a, b))
            assert said in (str(a * b), str({"error": "tired"}))
            seen.add(said.isdigit())
        is_paid = any(a % 2 == factor % 2 for a, _ in pairs)
        assert line["rewards"]["Product"] == float(is_paid)
        assert line["rewards"]["calls"] == len(pairs)
        seen.add(("paid", line["rewards"]["Product"]))
    assert seen == {True, False, ("paid", 1.0), ("paid", 0.0)}
    first = [line["rewards"] for line in lines[: PROMPTS * GENERATIONS]]
    mean = sum(each["Product"] + 0.5 * each["calls"] for each in first) / len(first)
    assert steps_of(run)[0]["reward"] == pytest.approx(mean)


def test_rewards_are_those_of_what_was_said(runs: Callable[..., Path]) -> None:
    assert_rewards_are_those_of_what_was_said(runs(1, "single"))


DEATHS = {("once", "tools"): 3, ("again", "tools"): 2, ("again", "step"): 2}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place"), DEATHS)
def test_a_run_that_is_killed_in_a_world_ends_as_if_nobody_had(
    case: str, place: str, recipe: Path, folder: Path
) -> None:
    keys = [
        "save_steps=1",
        "save_total_limit=9",
        "eval_datasets=[]",
        *(AGAIN if case == "again" else []),
    ]
    whole = folder / f"unkilled-{case}"
    run = folder / f"killed-{case}-{place}"
    config = write_config(folder, "single")

    def live(where: str, output: Path) -> int:
        arguments = [
            f"{where},{DEATHS.get((case, where))}",
            str(recipe),
            str(config),
            *keys,
            f"output_dir={output}",
        ]
        finished = launch_ranks(KILLED, arguments, ranks=1)
        assert finished.returncodes[0] in (0, -signal.SIGKILL), finished.outputs[0][-3000:]
        return finished.returncodes[0]

    if not whole.exists():
        assert live("nowhere", whole) == 0
    assert live(place, run) == -signal.SIGKILL
    assert live("nowhere", run) == 0
    assert_bit_equal(run, whole, STEPS if case == "once" else 4)
    assert lines_of(run) == lines_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_samples_in_the_same_worlds(
    staleness: int, recipe: Path, folder: Path, caller: Path
) -> None:
    model = caller / "sft" / "export"
    run = folder / f"server-{staleness}"
    with serving(model) as server:
        keys = [
            f"vllm_server_base_url={server.url}",
            f"output_dir={run}",
            f"max_steps={staleness + 1}",
            f"max_staleness={staleness}",
            "eval_datasets=[]",
        ]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        asked = [body["prompt"] for body, _ in server.asked]
    line, *ahead = steps_of(run)
    assert [each["staleness/max"] for each in ahead] == [staleness] * staleness
    assert line["log_ratio/mean"] < 5e-6 and line["log_ratio/max"] < 5e-5
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    lines = lines_of(run)
    assert any("parts" in each for each in lines)
    for each in lines:
        prompt = tokenizer(each["prompt"], add_special_tokens=False).input_ids
        assert prompt in asked
        for end in [i for i, by in enumerate(each.get("tool_mask", [])) if not by][-1:]:
            assert prompt + each["token_ids"][: end + 1] in asked


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), QUICK)
def test_worlds_are_met_while_the_model_trains(
    ranks: int, layout: str, recipe: Path, folder: Path, caller: Path
) -> None:
    """A step ahead is what the same weights say in the same worlds where nothing trains between; a run killed while a tool
    answers beside training has the numbers of one that was not, up to the first conversation that the kill has cut."""
    whole, run, frozen = (folder / f"{name}-{layout}" for name in ("ahead", "cut", "frozen"))
    config = write_config(folder, layout)
    common = ["eval_datasets=[]", "save_steps=1", "max_steps=4"]

    def live(where: str, output: Path, url: str, *keys: str) -> int:
        given = [*common, f"vllm_server_base_url={url}", f"output_dir={output}", *keys]
        arguments = [where, str(recipe), str(config), *given]
        return launch_ranks(KILLED, arguments, ranks=ranks).returncodes[0]

    with serving(caller / "sft" / "export") as server:
        assert live("nowhere,1", whole, server.url, "max_staleness=1") == 0
        assert live("tools,3", run, server.url, "max_staleness=1") == -signal.SIGKILL
        assert any((saved / "in_flight.jsonl").read_text() for _, saved in list_checkpoints(run))
        assert live("nowhere,1", run, server.url, "max_staleness=1") == 0
        assert live("nowhere,1", frozen, server.url, "learning_rate=1e-30", "max_steps=2") == 0
    assert_rewards_are_those_of_what_was_said(whole)
    steps = steps_of(whole)
    assert [line["staleness/max"] for line in steps] == [0, 1, 1, 1]
    assert steps[0]["log_ratio/mean"] < 5e-6 < steps[2]["log_ratio/mean"]
    two = 2 * PROMPTS * GENERATIONS
    for name in ("prompt", "token_ids", "tool_mask", "rewards"):
        ahead = [line.get(name) for line in lines_of(whole)[:two]]
        assert ahead == [line.get(name) for line in lines_of(frozen)], name
    assert len(lines_of(run)) == len(lines_of(whole)) and len(steps_of(run)) == len(steps)
    uncut = list(takewhile(lambda line: not line["in_flight/cuts"], steps_of(run)))
    assert len(uncut) >= 2
    for line, truth in zip(uncut, steps, strict=False):
        for name in ("loss", "grad_norm", "reward", "tools/call_frequency", "log_ratio/mean"):
            assert line[name] == truth[name], (line["step"], name)
    assert lines_of(run)[:two] == lines_of(whole)[:two]


@pytest.mark.slow
def test_a_world_without_tools_begins_and_pays_while_the_model_trains(
    recipe: Path, folder: Path, caller: Path
) -> None:
    (folder / "my_silent.py").write_text(
        "class Silent:\n    def reset(self, a, **row):\n        self.a = a\n"
        "        return f'{a}, silently?'\n\n    def get_reward(self):\n        return self.a / 10\n"
    )
    run = folder / "silent"
    with serving(caller / "sft" / "export") as server:
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={run}", "eval_datasets=[]"]
        keys += ["environment=my_silent.py:Silent", "rewards=[]", "reward_weights=null"]
        keys += ["max_staleness=1", "max_steps=3"]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
    assert [line["staleness/max"] for line in steps_of(run)] == [0, 1, 1]
    for line in lines_of(run):
        asked = re.search(r"What is (\d+), silently\?", line["prompt"])
        assert asked is not None
        assert line["rewards"] == {"Silent": int(asked[1]) / 10}


@pytest.mark.slow
def test_a_change_of_weights_cuts_a_conversation_and_each_token_has_its_version(
    recipe: Path, folder: Path, caller: Path
) -> None:
    run = folder / "cut-ahead"
    with serving(caller / "sft" / "export") as server:
        server.seconds_a_token = 0.02
        keys = [f"vllm_server_base_url={server.url}", f"output_dir={run}", "eval_datasets=[]"]
        keys += ["max_staleness=2", "max_steps=5", "in_flight=keep"]
        train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
        cuts = sum(choice["finish_reason"] == "abort" for _, choice in server.asked)
    steps = steps_of(run)
    assert cuts > 0
    completions = Counter(line["step"] for line in lines_of(run))
    counted = sum(line["in_flight/cuts"] * completions[line["step"]] for line in steps)
    assert counted == pytest.approx(cuts)
    assert all(0 <= line["staleness/mean"] <= line["staleness/max"] <= 2 for line in steps)
    assert any(line["staleness/mean"] != line["staleness/max"] for line in steps)
    assert_rewards_are_those_of_what_was_said(run)


def test_a_dry_run_begins_an_environment(recipe: Path, folder: Path, capfd: Any) -> None:
    (folder / "my_broken.py").write_text(
        "class Broken:\n    def reset(self, **row):\n        return 1 / 0\n"
        "    def get_reward(self):\n        return 1.0\n"
    )
    sharding = read_sharding(str(write_config(folder, "single")), None, {"WORLD_SIZE": "1"})

    def try_out(*keys: str) -> str:
        overrides = [f"output_dir={folder / 'dry'}", *keys]
        fine_tune(read_recipe(str(recipe), overrides), sharding, dry_run=True)
        return str(capfd.readouterr().out)

    assert "dry run" in try_out()
    with pytest.raises(Exception, match=r"my_broken.py:3: .*Broken, an environment: ZeroDivision"):
        try_out(
            f"environment={folder / 'my_broken.py'}:Broken", "rewards=[]", "reward_weights=null"
        )


def read_page() -> dict[str, str]:
    """The files that docs/environments.md shows for a game, by name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    return dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, re.DOTALL))


@pytest.mark.slow
def test_the_game_of_the_page_is_played(caller: Path, folder: Path, tmp_path: Path) -> None:
    """With nothing but the page."""
    files = read_page()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    keys = [
        f"model_name_or_path={caller / 'sft' / 'export'}",
        f"output_dir={tmp_path / 'run'}",
        f"dataset_cache_dir={tmp_path / 'cache'}",
        "max_steps=2",
        "global_batch_size=2",
        "max_completion_length=40",
        "max_length=110",
        "per_device_train_batch_size=2",
        "save_strategy=no",
        "export_at_end=false",
    ]
    train_all(
        folder, [(tmp_path / "my_recipe.yaml", write_config(folder, "single"), keys)], ranks=1
    )
    lines = lines_of(tmp_path / "run")
    assert all(
        "I think of a number between 1 and 100. Find it." in each["prompt"] for each in lines
    )
    assert {name for each in lines for name in each["rewards"]} == {"Guess"}


def test_the_game_of_the_page_can_be_won() -> None:
    """In 30 lines."""
    files = read_page()
    assert sum(bool(line.strip()) for line in "".join(files.values()).splitlines()) <= 30
    game: Any = {}
    exec(files["my_game.py"], game)
    world = game["Guess"]()
    world.reset(prompt=[])
    low, high, said = 1, 100, ""
    while said != "Right.":
        said = world.guess((low + high) // 2)
        if said == "Higher.":
            low = (low + high) // 2 + 1
        else:
            high = (low + high) // 2 - (said == "Lower.")
    assert 1 / 7 <= world.get_reward() <= 1


SEVERAL = '''
import random


class Increment:
    """As in TRL's documentation: it asks itself."""

    def reset(self, **row):
        assert "environment" not in row
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self):
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increments the internal counter.

        Args:
            step: Value to add to the counter.
        """
        self.counter += step
        return self.counter


class Quiet:
    def reset(self, target, **row):
        self.target = target

    def shout(self, text: str) -> str:
        """Shouts the given text.

        Args:
            text: Text to shout.
        """
        return text.upper()


def reads(environments, **columns):
    return [each.target / 10 if type(each).__name__ == "Quiet" else None for each in environments]
'''


def test_rows_choose_their_worlds(recipe: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_several.py").write_text(SEVERAL)
    rows: list[dict[str, Any]] = [{"environment": "count", "n": n} for n in range(6)]
    said = [{"role": "user", "content": "Be quiet."}]
    rows += [{"environment": "quiet", "prompt": said, "target": n} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "my_several.py"
    keys = [
        f"output_dir={tmp_path / 'run'}",
        f"environment={{count: {file}:Increment, quiet: {file}:Quiet}}",
        f"rewards=[{file}:reads]",
        f"datasets=[{{path: {tmp_path / 'rows.jsonl'}}}]",
        "eval_datasets=[]",
        "max_length=120",
        "max_completion_length=50",
        "max_steps=2",
    ]
    train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
    seen = set()
    for line in lines_of(tmp_path / "run"):
        is_quiet = "Be quiet." in line["prompt"]
        assert ("shout: " in line["prompt"]) == is_quiet
        assert ("increment: " in line["prompt"]) != is_quiet
        assert ("Increment the counter by " in line["prompt"]) != is_quiet
        assert (line["rewards"]["Increment"] is None) == is_quiet
        assert (line["rewards"]["reads"] is None) != is_quiet
        seen.add(is_quiet)
    assert seen == {True, False}


FRAGILE = '''
import os
import random


class Fragile:
    """Begins otherwise for each completion; some cannot begin, some end their process, one says too much."""

    def reset(self, a, **row):
        if a % 3 == 0:
            raise RuntimeError("no world")
        self.calls = 0
        said = f"{a} times {random.SystemRandom().randint(2, 99)}?"
        return said * 40 if a == 20 else said

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two whole numbers.

        Args:
            a: A factor.
            b: A factor.
        """
        if a % 2:
            os._exit(3)
        self.calls += 1
        return a * b

    def get_reward(self):
        return 1.0


def counts(environments, **columns):
    return [-1.0 if each is None else each.calls for each in environments]
'''


def test_what_is_lost_is_counted_and_the_run_continues(
    recipe: Path, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "my_fragile.py"
    file.write_text(FRAGILE)
    keys = [
        f"output_dir={tmp_path / 'run'}",
        f"environment={file}:Fragile",
        f"rewards=[{file}:counts]",
        "environment_processes=30",
        "max_steps=2",
        "on_bad_reward=zero",
        "eval_datasets=[]",
    ]
    train_all(folder, [(recipe, write_config(folder, "single"), keys)], ranks=1)
    lines = lines_of(tmp_path / "run")
    kinds = set()
    for line in lines:
        asked = re.search(r"What is (\d+) times", line["prompt"])
        parts = line.get("parts", [])
        ended = any("its process ended with 3" in said for said in parts[1::2])
        is_lost = line["rewards"]["counts"] == -1.0
        assert line["rewards"]["Fragile"] == (0.0 if is_lost else 1.0)
        # the last call of a completion that is cut may end its world unseen
        assert is_lost or not (asked is None or ended)
        kinds.add((asked is None, ended))
    assert kinds >= {(True, False), (False, False), (False, True)}
    for number, step in enumerate(steps_of(tmp_path / "run")):
        own = lines[number * PROMPTS * GENERATIONS :][: PROMPTS * GENERATIONS]
        lost = sum(line["rewards"]["Fragile"] == 0.0 for line in own)
        assert step["reward_failures"] == pytest.approx(lost / len(own))
        # completions of a prompt that begin otherwise share none
        assert step["log_ratio/mean"] < 5e-6 and step["log_ratio/max"] < 5e-5
    begun = [line["prompt"] for line in lines if "times" in line["prompt"]]
    assert len(set(begun)) > len(begun) / 2
