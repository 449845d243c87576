"""Tokens per second are those of the steps: evaluations and saves between two lines of metrics are left out."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.save import Saver
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from finetune.training import loop
from tests.training.layouts import steps_of

PAUSE_SECONDS = 1000.0


def test_evaluations_and_saves_do_not_slow_the_steps_that_are_logged(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, save, clock = loop.evaluate, Saver.save, time.perf_counter
    paused = 0.0

    # Between the lines of steps 2 and 4: two evaluations, the first right after a line, and two saves.
    def pause(progress: Progress) -> None:
        nonlocal paused
        if progress.step in (2, 3):
            paused += PAUSE_SECONDS

    def slow_evaluate(run: Any, progress: Progress, *rest: Any) -> Any:
        pause(progress)
        return evaluate(run, progress, *rest)

    def slow_save(saver: Saver, progress: Progress) -> None:
        pause(progress)
        save(saver, progress)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + paused)
    monkeypatch.setattr(loop, "evaluate", slow_evaluate)
    monkeypatch.setattr(Saver, "save", slow_save)
    keys = {
        "logging_steps": 2,
        "eval_steps": 1,
        "save_steps": 1,
        "eval_split_size": 0.2,
        "export_at_end": False,
    }
    fine_tune(read_recipe(str(tiny_recipe(**keys))), read_sharding("single", None, os.environ))
    first, second = steps_of(tmp_path / "run")
    seconds = (second["tokens"] - first["tokens"]) / second["tokens_per_second"]
    assert 0 < seconds < PAUSE_SECONDS
