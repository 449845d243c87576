"""The seconds of a run's phases, from the real command to metrics.jsonl, the last screen and the report."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint.folders import step_folder
from finetune.files.phases import OVERLAPPING, PHASES, Phases, seconds_by_phase
from finetune.report.page import render_page
from finetune.report.run_data import read_run
from finetune.training.screens import last_screen
from tests.ranks import run_command, run_python

BEFORE = ["imports", "data", "weights"]


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "phase" in line]


def _train(recipe: Path, config: str, ranks: int, *, is_cold: bool = False) -> tuple[str, float]:
    """What the run has said, and its seconds. A start is warm, without imports, or cold, as users start it."""
    started = time.perf_counter()
    command = ["-m", "finetune", "launch", "--recipe", str(recipe), "--config", config]
    command += ["--num-processes", str(ranks)]
    if is_cold:
        ended = run_command(["python", *command], timeout=300)
    else:
        ended = run_python(command, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr, time.perf_counter() - started


@pytest.mark.parametrize("is_cold", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_start_writes_the_seconds_of_its_phases_on_every_layout(
    is_cold: bool, tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """Two ranks train; then one resumes from the middle, and keeps what the first start wrote up to there."""
    run = tmp_path / "run"
    recipe = tiny_recipe(
        save_steps=2, eval_split_size=4, eval_steps=2, eval_strategy="steps", async_save=True
    )
    said, wall = _train(recipe, "fsdp_full_shard", 2)
    first = _lines(run)
    # nothing is imported by a warm start, which may take a moment for that
    begun = [line["phase"] for line in first[:3] if line["phase"] != "imports"]
    assert begun[:2] == BEFORE[1:]
    assert {line["phase"] for line in first} | {"imports"} == set(PHASES) - {"compile"}
    assert [line["phase"] for line in first if line["phase"] in ("training", "check", "export")] == ["training", "check", "export"]  # fmt: skip
    assert {line["start"] for line in first} == {1}
    assert {line["step"] for line in first if line["phase"] in BEFORE} == {0}
    assert {line["step"] for line in first if line["phase"] == "publication"} == {2, 4}
    assert {line["step"] for line in first if line["phase"] == "save"} >= {2, 4}
    assert {line["step"] for line in first if line["phase"] == "evaluation"} == {0, 2, 4}
    assert {line["step"] for line in first if line["phase"] in ("training", "export", "check")} == {
        4
    }
    assert all(line["seconds"] > 0 for line in first)
    assert sum(line["seconds"] for line in first if line["phase"] not in OVERLAPPING) <= wall
    (shown,) = [line for line in said.splitlines() if line.startswith("time    ")]
    others = {phase: sum(of.values()) for phase, of in seconds_by_phase(first)[1].items()}
    del others["training"], others["publication"]
    assert (
        f"; the longest phase beside it: {PHASES[max(others, key=lambda phase: others[phase])]}, "
        in shown
    )

    shutil.rmtree(step_folder(run, 4))
    (run / "finished.json").unlink()
    said, _ = _train(recipe, "single", 1, is_cold=is_cold)
    assert "resumed at step 2" in said
    both = _lines(run)
    kept = [line for line in first if line["step"] <= 2]
    assert both[: len(kept)] == kept
    second = both[len(kept) :]
    assert {line["start"] for line in second} == {2}
    expected = BEFORE if is_cold else BEFORE[1:]
    begun = [line["phase"] for line in second if line["phase"] in expected]
    assert begun[: len(expected)] == expected
    timed = {line["phase"] for line in both}
    assert timed | {"imports"} == set(PHASES) - {"compile"}
    assert {line["step"] for line in second if line["phase"] in BEFORE} == {2}
    assert second[-1]["phase"] == "export" and second[-1]["step"] == 4

    record = read_run(run)
    assert record.last("step") == 4 and not any("phase" in line for line in record.lines)
    page = render_page([record], [None])
    table = page[page.index("<h3>Time ") :].partition("</table>")[0]
    assert "<th>Start 1</th><th>Start 2</th>" in table
    assert [name for name in PHASES.values() if f"<th>{name}</th>" in table] == [
        said for phase, said in PHASES.items() if phase in timed
    ]


def test_what_is_compiled_is_a_part_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a counter in place of torch's, which takes a compiler."""
    from finetune.training import loop
    from finetune.training.metrics import Compilation

    compilation = Compilation(is_on=True)
    seconds = iter((2.0, 5.0))
    monkeypatch.setattr(compilation.__class__, "seconds", lambda self: next(seconds))
    written: list[dict[str, Any]] = []
    phases = Phases()
    phases.write_to(written.append, 3)
    with loop._training_timed(phases, compilation):
        phases.step = 4
        time.sleep(0.002)
    assert [(line["phase"], line["step"]) for line in written] == [("training", 4), ("compile", 4)]
    assert written[1]["seconds"] == 3.0


def test_a_phase_within_another_is_taken_off_it_also_where_it_raises() -> None:
    phases = Phases()
    started = time.perf_counter()
    with pytest.raises(ZeroDivisionError), phases.timed("export"):
        time.sleep(0.01)
        with phases.timed("check"):
            time.sleep(0.02)
            raise ZeroDivisionError
    wall = time.perf_counter() - started
    written: list[dict[str, Any]] = []
    phases.write_to(written.append, 7)
    assert [(line["phase"], line["step"]) for line in written] == [("export", 7), ("check", 7)]
    assert written[1]["seconds"] >= 0.02 and sum(line["seconds"] for line in written) <= wall


@pytest.mark.parametrize(
    "line",
    [
        {"phase": "another", "start": 1, "step": 1, "seconds": 1.0},
        {"phase": ["save"], "start": 1, "step": 1, "seconds": 1.0},
        {"phase": "save", "start": None, "step": 1, "seconds": 1.0},
        {"phase": "save", "start": 1, "step": 1, "seconds": "long"},
        {"phase": "save"},
    ],
)
def test_a_line_that_was_edited_is_passed_over(line: dict[str, Any]) -> None:
    sound = {"phase": "save", "start": 1, "step": 1, "seconds": 1.0}
    assert seconds_by_phase([sound, None, line]) == {1: {"save": {1: 1.0}}}


def test_what_overlaps_training_is_no_phase_beside_it(tmp_path: Path) -> None:
    seconds = {"training": 9.0, "compile": 7.0, "publication": 6.0, "save": 1.0}
    lines = [
        {"phase": phase, "seconds": taken, "start": 1, "step": 4}
        for phase, taken in seconds.items()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (shown,) = [line for line in last_screen(tmp_path, 4) if line.startswith("time ")]
    assert shown == "time    9.0 s of training; the longest phase beside it: wait for saves, 1.0 s"
