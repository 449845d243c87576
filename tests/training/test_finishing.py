"""The end of a run: stopped in its last evaluation, then in its export, each time finished by the same command."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from finetune.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from tests.ranks import ROOT, environment, run_python
from tests.warm_processes import WarmProcess

SECONDS = 240.0
STEPS = 6
# run.py, sent SIGTERM while it evaluates for the second time: once before training, once after.
STOPPED_IN_EVALUATION = """
import os, signal, sys, time
from finetune import run
from finetune.errors import end_process, exit_code
from finetune.training import evaluate

def evaluate_and_signal(*arguments, measure_held_out=evaluate.measure_held_out, calls=[]):
    calls.append(arguments)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    return measure_held_out(*arguments)

evaluate.measure_held_out = evaluate_and_signal
end_process(exit_code(run.main))
"""


def test_a_run_without_a_whole_held_out_answer_says_that_it_answers_nothing(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    held_out = {"prompt": "How much?", "completion": "one two three " * 90}
    (tmp_path / "long.jsonl").write_text(json.dumps(held_out) + "\n")
    recipe = tiny_recipe(
        max_steps=1,
        eval_datasets=[{"path": str(tmp_path / "long.jsonl")}],
        exact_match_samples=2,
        export_at_end=False,
    )
    ended = run_python(
        ["-m", "finetune", "launch", "--num-processes", "1", "--recipe", str(recipe)],
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    assert "exact_match_samples: nothing is answered" in ended.stderr
    assert _evaluated(tmp_path / "run") == {"eval_loss": [0, 1], "exact_match": []}


def test_a_run_that_is_stopped_at_its_end_is_finished_by_the_same_command(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """The learning rate makes the run diverge, which its last screen and its model card say."""
    run = tmp_path / "run"
    recipe = tiny_recipe(
        learning_rate=5.0,
        lr_scheduler_type="constant",
        max_grad_norm=None,
        max_steps=STEPS,
        eval_split_size=4,
        exact_match_samples=2,
        sample_prompts=["How much is 1 plus 1?"],
    )
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED_IN_EVALUATION)
    stopped = run_python([str(script), "--recipe", str(recipe)], timeout=SECONDS)
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    assert "SIGTERM: saving, then stopping" in stopped.stderr
    assert stopped.stderr.endswith(
        f"stopped by a signal during the last evaluation; all {STEPS} steps are saved; the same command resumes from there\n"
    )
    assert _evaluated(run) == {"eval_loss": [0], "exact_match": [0]}

    command = ["-m", "finetune", "launch", "--num-processes", "1", "--recipe", str(recipe)]
    printed = _interrupt_export(command, run, tmp_path / "printed")
    assert (
        f"stopped by SIGINT during the export; all {STEPS} steps are saved; the same command resumes from there"
        in printed
    )
    assert "Traceback" not in printed and "KeyboardInterrupt" not in printed
    assert not (run / "export").exists() and not (run / ".export.exporting").exists()
    assert _evaluated(run) == {"eval_loss": [0, STEPS], "exact_match": [0, STEPS]}
    metrics, samples = _metrics(run), (run / "samples.jsonl").read_text()

    same = ["finetune/run.py", "--recipe", str(recipe)]
    again = run_python(same, timeout=SECONDS)
    assert again.returncode == 0, again.stderr
    diverged = re.search(
        r"warning (the loss is \S+ at step 6, far above the \S+ of step 1): this run has diverged",
        again.stderr,
    )
    assert diverged is not None, again.stderr
    assert re.search(
        r"^memory  \d+\.\d\d GiB seen on the first rank, \d+\.\d\d GiB planned$", again.stderr, re.M
    )
    assert f"**This run diverged**: {diverged[1]}." in (run / "export" / "README.md").read_text()
    assert _metrics(run) == metrics, "no line is repeated"
    assert re.search(
        r"^time    \S+( s)? of training; the longest phase beside it: ", again.stderr, re.M
    ), again.stderr
    assert (run / "samples.jsonl").read_text() == samples
    assert json.loads((run / "export" / "config.json").read_text())["use_cache"] is True, (
        "training's own switch"
    )
    assert "local_files_only" not in (run / "export" / "tokenizer_config.json").read_text()

    before = {
        path: path.stat().st_mtime_ns
        for path in [run / "metrics.jsonl", *(run / "export").iterdir()]
    }
    done = run_python(same, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        f"{run}: this run is done, there is nothing left to do",
        f"made    {run / 'export'}  {run / 'checkpoints'}  {run / 'metrics.jsonl'}",
    ]
    assert "LlamaForCausalLM" not in done.stderr, "no model is loaded"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((run / "finished.json").read_text())["step"] == STEPS

    written = (run / "recipe.yaml").read_bytes()
    other = run_python([*same, "learning_rate=0.5"], timeout=SECONDS)
    assert other.returncode == EXIT_USER_ERROR, other.stderr
    assert other.stderr == (
        f"{run}: this run is finished, nothing is left to train, and its recipe has changed since:\n"
        "  learning_rate: 5.0 -> 0.5\nset another output_dir to train with it, or set it back\n"
    )
    assert (run / "recipe.yaml").read_bytes() == written

    weights = next((run / "checkpoints").glob(f"step-{STEPS:08d}/model/*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = run_python(same, timeout=SECONDS)
    assert damaged.returncode == EXIT_USER_ERROR, damaged.stdout
    assert (
        "does not match its checksum" in damaged.stderr and "this run is done" not in damaged.stdout
    )


def _interrupt_export(command: list[str], run: Path, log: Path) -> str:
    """Starts the command, sends it SIGINT once its export writes, and returns what it printed."""
    launcher = WarmProcess(command, environment(), log, log, cwd=ROOT)
    deadline = time.monotonic() + SECONDS
    while not (run / ".export.exporting" / "config.json").exists():
        assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(SECONDS) == EXIT_PREEMPTED, log.read_text()
    return log.read_text()


def _metrics(run: Path) -> list[str]:
    """The lines of metrics.jsonl, without the seconds of phases, which every start writes."""
    return [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"phase"' not in line
    ]


def _evaluated(run: Path) -> dict[str, list[int]]:
    """The steps of the lines of metrics.jsonl that evaluations wrote."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        key: [line["step"] for line in lines if key in line] for key in ("eval_loss", "exact_match")
    }
