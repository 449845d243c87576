"""Runs whose trainer and vLLM server are killed at random moments, against a real vLLM: no completion is trained on twice, none is
lost without a count, and where a seed decides what is sampled the run is the one that nobody killed."""

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from finetune.errors import EXIT_USER_ERROR
from tests.conftest import make_model
from tests.ranks import Ranks, start_ranks
from tests.rollout.test_vllm import KILLED, lines_of, serving_by_vllm, write_recipe
from tests.training.layouts import steps_of, write_config

STEPS = 12
KILLS = ["trainer", "server", "trainer"]
SHARE_OF_A_RUN = (0.15, 0.33)  # after which a life ends, so that none comes to the end of the run
PATIENCE = 90.0  # seconds in which a run whose server is gone must have ended by itself


class Runs:
    """The same run, started again after each kill, and its server."""

    def __init__(self, folder: Path, staleness: int, model: Path) -> None:
        self.folder = folder
        self.run = folder / f"staleness-{staleness}"
        self._model = model
        self._keys = [f"max_staleness={staleness}", f"max_steps={STEPS}", "save_steps=2"]
        self._keys += ["eval_datasets=[]", "num_generations=6"]
        self._keys += ["max_completion_length=100", "max_length=200"]
        self._server = ExitStack()
        self.url = ""

    def serve(self) -> None:
        self._server.close()
        self.url = self._server.enter_context(serving_by_vllm(self._model, 200, at_once=4))

    def stop_serving(self) -> None:
        self._server.close()

    def start(self, run: Path) -> Ranks:
        recipe = str(self.folder / "grpo.yaml")
        config = str(write_config(self.folder, "single"))
        given = [*self._keys, f"vllm_server_base_url={self.url}", f"output_dir={run}"]
        return start_ranks(KILLED, ["nowhere,1", recipe, config, *given], ranks=1)

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
    write_recipe(tmp_path, model)
    runs = Runs(tmp_path, staleness, model)
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
