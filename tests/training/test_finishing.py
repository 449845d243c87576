"""The end of a run, by `finetune launch`: its export is interrupted, the same command exports, and then nothing is left to do."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from finetune.errors import EXIT_PREEMPTED
from tests.ranks import ROOT, environment, run_command

SECONDS = 240.0


def test_an_interrupted_export_is_made_by_the_same_command_and_a_run_that_is_done_ends_at_once(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """The learning rate makes the run diverge, which its last screen and its model card say."""
    run, printed = tmp_path / "run", tmp_path / "printed"
    recipe = tiny_recipe(learning_rate=5.0, lr_scheduler_type="constant", max_grad_norm=None, max_steps=6)
    command = ["-m", "finetune", "launch", "--num-processes", "1", "--recipe", str(recipe)]
    with printed.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, *command],
            env=environment(),
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )
    deadline = time.monotonic() + SECONDS
    while not (run / ".export.exporting" / "config.json").exists():
        assert launcher.poll() is None and time.monotonic() < deadline, printed.read_text()
        time.sleep(0.01)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(SECONDS) == EXIT_PREEMPTED, printed.read_text()
    assert (
        "stopped by SIGINT during the export; all 6 steps are saved, and the same command exports them"
        in printed.read_text()
    )
    assert "Traceback" not in printed.read_text() and "KeyboardInterrupt" not in printed.read_text()
    assert not (run / "export").exists() and not (run / ".export.exporting").exists()

    again = run_command(["python", *command], timeout=SECONDS)
    assert again.returncode == 0, again.stderr
    diverged = re.search(
        r"warning (the loss is \S+ at step 6, far above the \S+ of step 1): this run has diverged", again.stderr
    )
    assert diverged is not None, again.stderr
    assert f"**This run diverged**: {diverged[1]}." in (run / "export" / "README.md").read_text()

    before = {path: path.stat().st_mtime_ns for path in [run / "metrics.jsonl", *(run / "export").iterdir()]}
    done = run_command(["python", *command], timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        f"{run}: this run is done, there is nothing left to do",
        f"made    {run / 'export'}  {run / 'checkpoints'}  {run / 'metrics.jsonl'}",
    ]
    assert "LlamaForCausalLM" not in done.stderr, "no model is loaded"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((run / "finished.json").read_text())["step"] == 6
