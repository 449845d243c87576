"""Runs whose trainer, vLLM server and worlds are killed at random moments, against a real vLLM: no completion is trained on twice,
none is lost without a count, and where a seed decides what is sampled the run is the one that nobody killed."""

import json
import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml

from finetune.config.reader import RECIPES
from finetune.errors import EXIT_USER_ERROR
from tests.conftest import make_model
from tests.ranks import Ranks, start_ranks
from tests.rollout.test_vllm import KILLED, lines_of, serving_by_vllm, write_recipe
from tests.training.calling import write_short_run
from tests.training.layouts import steps_of, train_all, write_config

STEPS = 12
KILLS = ["trainer", "server", "trainer"]
SHARE_OF_A_RUN = (0.15, 0.33)  # after which a life ends, so that none comes to the end of the run
PATIENCE = 90.0  # seconds in which a run whose server is gone must have ended by itself


class Runs:
    """The same run, started again after each kill, and its server."""

    def __init__(
        self, recipe: Path, staleness: int, model: Path, *keys: str, room: int = 200
    ) -> None:
        self.folder = recipe.parent
        self.run = self.folder / f"staleness-{staleness}"
        self._recipe = str(recipe)
        self._model = model
        self._room = room  # tokens
        self._keys = [f"max_staleness={staleness}", f"max_steps={STEPS}", "save_steps=2"]
        self._keys += ["eval_datasets=[]", *keys]
        self._server = ExitStack()
        self.url = ""

    def serve(self) -> None:
        self._server.close()
        self.url = self._server.enter_context(serving_by_vllm(self._model, self._room, at_once=4))

    def stop_serving(self) -> None:
        self._server.close()

    def start(self, run: Path) -> Ranks:
        config = str(write_config(self.folder, "single"))
        given = [*self._keys, f"vllm_server_base_url={self.url}", f"output_dir={run}"]
        return start_ranks(KILLED, ["nowhere,1", self._recipe, config, *given], ranks=1)

    def finish(self, run: Path) -> None:
        running = self.start(run)
        try:
            finished = running.wait(300)
        finally:
            running.kill()
        assert finished.returncodes == (0,), finished


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_is_killed_at_random_moments(staleness: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", head_dim=32, initializer_range=0.3)
    longer = ("num_generations=6", "max_completion_length=100", "max_length=200")
    runs = Runs(write_recipe(tmp_path, model), staleness, model, *longer)
    chance = random.Random(staleness)
    runs.serve()
    try:
        truth = tmp_path / "undisturbed"
        began = time.monotonic()
        runs.finish(truth)
        seconds = time.monotonic() - began
        for victim in KILLS:
            _live_until_killed(runs, victim, chance.uniform(*SHARE_OF_A_RUN) * seconds)
        runs.finish(runs.run)
    finally:
        runs.stop_serving()
    steps = steps_of(runs.run)
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    trained = lines_of(runs.run)
    undisturbed = lines_of(truth)
    assert [line["step"] for line in trained] == [line["step"] for line in undisturbed]
    assert [line["prompt"] for line in trained] == [line["prompt"] for line in undisturbed]
    dropped = sum(line.get("in_flight/dropped_tokens", 0) for line in steps)
    assert dropped == 0, "in_flight: keep"
    # What was not answered at a checkpoint is sampled again by its weights, and counted; above a staleness of one the moment of
    # a change of weights depends on time. Up to there the runs are one.
    counted = [line["step"] for line in steps if line.get("in_flight/cuts", 0)]
    last_equal = min(counted, default=STEPS + 1) - 1
    if staleness == 2:
        last_equal = min(last_equal, 1)
    assert staleness or last_equal == STEPS
    for line, true in zip(trained, undisturbed, strict=True):
        assert line["token_ids"] == true["token_ids"] or line["step"] > last_equal, last_equal
    for line, true in zip(steps[:last_equal], steps_of(truth), strict=False):
        assert line["loss"] == pytest.approx(true["loss"], rel=1e-4, abs=1e-6)


def _live_until_killed(runs: Runs, victim: str, seconds: float) -> None:
    """Starts the run, and kills it or its server after some seconds."""
    running = runs.start(runs.run)
    try:
        time.sleep(seconds)
        if victim == "trainer":
            return
        runs.stop_serving()
        finished = running.wait(PATIENCE)
    finally:
        running.kill()
    if finished.returncodes != (0,):
        assert finished.returncodes == (EXIT_USER_ERROR,), finished
        assert "Traceback" not in finished.outputs[0]
        assert runs.url in finished.outputs[0]
    runs.serve()


WORLD = """
class Double:
    '''Wants a number doubled, and thinks for a while.'''

    def reset(self, a, **row):
        self.calls = 0

    def multiply(self, a: int, b: int) -> int:
        '''Multiplies two whole numbers.

        Args:
            a: A factor.
            b: A factor.
        '''
        import time
        time.sleep(0.2)
        self.calls += 1
        return a * b

    def get_reward(self):
        return 1.0 + self.calls
"""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_worlds_are_killed_at_random_moments_too(staleness: int, tmp_path: Path) -> None:
    """What a world that is gone would have paid is a counted 0; trainer and server are killed as above."""
    sft = yaml.safe_load((RECIPES / "quickstart_tools_sft.yaml").read_text())
    sft["model_config"]["head_dim"] = 32  # vLLM has kernels for it
    sft["tokenizer_name_or_path"] = str(RECIPES / sft["tokenizer_name_or_path"])
    sft["datasets"] = [each | {"path": str(RECIPES / each["path"])} for each in sft["datasets"]]
    sft |= {"max_steps": 150, "output_dir": str(tmp_path / "sft")}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft))
    train_all(tmp_path, [(tmp_path / "sft.yaml", write_config(tmp_path, "single"), [])], ranks=1)
    (tmp_path / "my_world.py").write_text(WORLD)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} times 37?"}], "a": a}
        for a in range(20, 99)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = write_short_run(
        tmp_path / "worlds.yaml",
        tmp_path,
        datasets=[{"path": "rows.jsonl"}],
        environment="my_world.py:Double",
        environment_processes=2,
        on_bad_reward="zero",
        max_length=110,
    )
    runs = Runs(recipe, staleness, tmp_path / "sft" / "export", room=128)
    chance = random.Random(staleness)
    runs.serve()
    killed = 0
    try:
        began = time.monotonic()
        runs.finish(tmp_path / "undisturbed")
        seconds = time.monotonic() - began
        for victim in ("trainer", "world", "server", "world"):
            moment = chance.uniform(*SHARE_OF_A_RUN) * seconds
            if victim == "world":
                killed += _kill_a_world(runs, moment)
            else:
                _live_until_killed(runs, victim, moment)
        runs.finish(runs.run)
    finally:
        runs.stop_serving()
    assert killed
    steps = steps_of(runs.run)
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    trained = lines_of(runs.run)
    undisturbed = lines_of(tmp_path / "undisturbed")
    assert [line["step"] for line in trained] == [line["step"] for line in undisturbed]
    assert [line["prompt"] for line in trained] == [line["prompt"] for line in undisturbed]
    completions = Counter(line["step"] for line in trained)
    counted = sum(line["reward_failures"] * completions[line["step"]] for line in steps)
    lost = [line for line in trained if line["rewards"]["Double"] == 0]
    assert counted == pytest.approx(len(lost))
    for line in trained:
        answered = [part for part in line.get("parts", [])[1::2] if "error" not in part]
        assert line in lost or line["rewards"]["Double"] == 1 + len(answered)


def _kill_a_world(runs: Runs, seconds: float) -> int:
    """Starts the run, and after some seconds kills a process of environments; the run lives for some more. Returns how many were
    killed."""
    running = runs.start(runs.run)
    try:
        time.sleep(seconds)
        worlds = [
            child
            for process in psutil.process_iter(["cmdline"])
            if "finetune.rollout.reward_process" in (process.info["cmdline"] or [])
            for child in process.children()
        ]
        for world in worlds[:1]:
            world.kill()
        time.sleep(seconds)
    finally:
        running.kill()
    assert "Traceback" not in running.output(0)
    return len(worlds[:1])
