"""How a run stops before its end: by a signal, by a step that is not finite, or hanging. Through run.py, on real ranks."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import finetune
from finetune.checkpoint import folders, manifest
from finetune.data.batches import StepBatch
from finetune.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from finetune.files.run_files import losses_of
from finetune.training.watch import ECHO_SECONDS, EXIT_HUNG, SignalListener, Watchdog
from tests.conftest import make_tokenizer
from tests.ranks import ROOT, Ranks, environment, launch_ranks, start_ranks

RUN = ROOT / "finetune" / "run.py"
FOR_EVER = 100_000  # steps
PATIENCE_SECONDS = 120.0


@contextmanager
def running(recipe: Path, step: int = 1) -> Iterator[Ranks]:
    """A run on two ranks that has made `step`."""
    started = start_ranks(RUN, ["--recipe", str(recipe)])
    try:
        wait_for(lambda: has_made(step, started), started)
        yield started
    finally:
        started.kill()


def has_made(step: int, ranks: Ranks) -> bool:
    """Whether the line of `step` stands in the output; its number is padded to the width of the last."""
    return re.search(rf"step +{step}/", ranks.output(0)) is not None


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, ranks.output(0) + ranks.output(1)
        assert ranks.processes[0].poll() is None, ranks.output(0)
        time.sleep(0.02)


def test_signals_are_agreed_on_by_all_ranks(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    """SIGUSR1 to one rank saves and the run continues, SIGTERM to another saves and stops; the same command resumes."""
    recipe = tiny_recipe(max_steps=FOR_EVER, export_at_end=False, async_save=True)
    with running(recipe) as started:
        os.kill(started.processes[1].pid, signal.SIGUSR1)
        wait_for(lambda: bool(folders.list_checkpoints(tmp_path / "run")), started)
        [(saved, _)] = folders.list_checkpoints(tmp_path / "run")
        wait_for(lambda: has_made(saved + 1, started), started)
        os.kill(started.processes[1].pid, signal.SIGTERM)
        ended = started.wait(PATIENCE_SECONDS)
    assert ended.returncodes == (EXIT_PREEMPTED, EXIT_PREEMPTED), ended.outputs
    assert "SIGTERM: saving, then stopping; send it again to stop at once" in ended.outputs[1]
    last, newest = folders.list_checkpoints(tmp_path / "run")[-1]
    assert (
        f"stopped by a signal after step {last} of {FOR_EVER}, which is saved; the same command resumes from there"
        in ended.outputs[0]
    )
    assert manifest.find_damage(newest) == []
    with running(recipe, last + 1) as again:
        assert f"resumed at step {last}" in again.output(0)


def test_a_signal_during_a_compile_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The compile continues: it may take minutes, in which nothing else would be printed."""

    def compile_and_signal(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the line is another thread's
            if signals.stop:
                break
            time.sleep(0.01)
        return graph.forward

    with SignalListener() as signals:
        assert torch.compile(lambda x: x + 1, backend=compile_and_signal)(torch.zeros(1)) == 1
        assert signals.stop
        signals.stop = False
        os.kill(os.getpid(), signal.SIGTERM)
        while not signals.stop:
            time.sleep(0.01)
    first, second = capfd.readouterr().err.splitlines()
    assert (
        first
        == "SIGTERM: saving, then stopping once torch.compile is done; send it again to stop at once"
    )
    assert second == "SIGTERM: saving, then stopping; send it again to stop at once", (
        "what is compiled is no compile"
    )


def test_a_run_that_is_stopped_in_each_evaluation_is_the_run_that_was_never_stopped(
    tmp_path: Path,
    tiny_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It leaves the evaluation and makes no other step, and it stops early after the same step with the same best one."""
    read = list[int]()  # held-out batches in each evaluation of a start

    def watched(_: object, batches: Iterator[StepBatch], doing: str) -> Iterator[StepBatch]:
        """Sends SIGTERM after the first batch of a start's second evaluation, if the start `is_stopped`."""
        read.append(0)
        for batch in batches:
            yield batch
            read[-1] += 1
            if is_stopped and len(read) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # the listener is another thread

    monkeypatch.setattr(Watchdog, "watched", watched)
    found = []
    for name, stopped_after in (("whole", ()), ("stopped", (1, 2, 3))):
        recipe = tiny_recipe(
            output_dir=str(tmp_path / name),
            packing=False,
            max_steps=8,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            eval_split_size=8,
            eval_steps=1,
            early_stopping_patience=2,
            export_at_end=False,
        )
        is_stopped = True
        for step in stopped_after:
            read.clear()
            with pytest.raises(finetune.Preempted, match=f"after step {step} of 8, which is saved"):
                finetune.train(recipe)
            assert read[1:] == [1]
        is_stopped = False
        lines = finetune.train(recipe).metrics
        losses = [
            (line["step"], line.get("loss"), line.get("eval_loss"))
            for line in lines
            if "phase" not in line
        ]
        said = re.findall("step .*: stopped early; .*", capfd.readouterr().err)
        found.append((losses, said))
    assert found[0] == found[1]
    assert found[0][1] == ["step 3: stopped early; the held-out loss was lowest at step 1"]


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_stop(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    recipe = tiny_recipe(max_steps=FOR_EVER, export_at_end=False)
    output = (tmp_path / "output").open("w+")
    command = [
        sys.executable,
        "-m",
        "finetune",
        "launch",
        "--num-processes",
        "2",
        "--recipe",
        str(recipe),
    ]
    launcher = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, cwd=ROOT)
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(r"step +1/", text := (tmp_path / "output").read_text()):
            assert launcher.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
            children = psutil.Process(launcher.pid).children()
            ranks = [each for each in children if "run.py" in " ".join(each.cmdline())]
        launcher.kill()
        launcher.wait()
        assert len(ranks) == 2
        assert psutil.wait_procs(ranks, timeout=30)[1] == [], "no rank trains on alone"
    finally:
        launcher.kill()
        for each in ranks:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    [(_, saved)] = folders.list_checkpoints(tmp_path / "run")
    assert manifest.find_damage(saved) == []
    said = (tmp_path / "output").read_text()
    assert "the launcher has ended: saving, then stopping" in said
    assert "which is saved; the same command resumes from there" in said


def test_a_second_signal_ends_a_run_at_once_even_where_it_hangs(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    """Rank 1 is stopped by the system, so rank 0 waits for it. A hasty echo of the first signal changes nothing."""
    with running(tiny_recipe(max_steps=FOR_EVER)) as started:
        first, second = (process.pid for process in started.processes)
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGINT)
        os.kill(first, signal.SIGTERM)
        time.sleep(ECHO_SECONDS + 0.5)
        assert started.processes[0].poll() is None
        os.kill(first, signal.SIGTERM)
        assert started.processes[0].wait(5) == 128 + signal.SIGTERM
        assert "stopped at once; what was not saved is lost" in started.output(0)


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_and_says_where_every_rank_was(
    tmp_path: Path, tiny_recipe: Callable[..., Path]
) -> None:
    with running(tiny_recipe(max_steps=FOR_EVER, timeout_seconds=4.0)) as started:
        stopped = started.processes[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        assert started.processes[0].wait(30) == EXIT_HUNG, started.output(0)
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.wait(30) != 0
    text = started.output(0)
    assert "rank 0: no progress for 4 s (timeout_seconds) while training step" in text
    assert "finetune/training/loop.py" in text


@pytest.fixture
def poisoned(tmp_path: Path, tiny_llama: Callable[..., Path]) -> dict[str, Any]:
    """A recipe's model and data: the sixth example alone holds a token whose embedding is not a number."""
    model = tiny_llama("poisoned")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][make_tokenizer().convert_tokens_to_ids("~")] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    rows = [
        [
            {"role": "user", "content": f"{i}?"},
            {"role": "assistant", "content": "~" if i == 5 else "."},
        ]
        for i in range(24)
    ]
    (tmp_path / "poisoned.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    )
    return {
        "model_name_or_path": str(model),
        "datasets": [{"path": str(tmp_path / "poisoned.jsonl")}],
        "packing": False,
        "export_at_end": False,
    }


def test_a_step_that_is_not_finite_is_refused_before_the_update(
    tmp_path: Path, tiny_recipe: Callable[..., Path], poisoned: dict[str, Any]
) -> None:
    recipe = tiny_recipe(max_steps=6, save_steps=1, save_total_limit=None, **poisoned)
    ended = launch_ranks(RUN, ["--recipe", str(recipe)], ranks=2)
    assert (
        set(ended.returncodes) <= {EXIT_USER_ERROR, -signal.SIGKILL}
        and ended.returncodes[0] == EXIT_USER_ERROR
    )
    text = ended.outputs[0]
    assert "the loss or gradient is not finite" in text and "on_nonfinite: skip" in text, text
    assert "Traceback" not in text
    named = text.split("loss nan, examples ")[1].split(")")[0]
    assert "5" in named.split(", "), "the id of the example"
    assert "rank 0: loss nan" in text or "rank 1: loss nan" in text
    for _, checkpoint in folders.list_checkpoints(tmp_path / "run"):
        for file in (checkpoint / manifest.MODEL).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                assert "embed_tokens" in name or torch.isfinite(tensor).all(), (
                    "no update was made from it"
                )


def test_steps_that_are_not_finite_are_skipped_so_many_times(
    tiny_recipe: Callable[..., Path], poisoned: dict[str, Any]
) -> None:
    """Once in each epoch of six steps; the third time is one too many."""
    recipe = tiny_recipe(max_steps=24, on_nonfinite="skip", max_skipped_steps=2, **poisoned)
    ended = launch_ranks(RUN, ["--recipe", str(recipe)], ranks=1)
    assert ended.returncodes == (EXIT_USER_ERROR,), ended.outputs[0]
    assert ended.outputs[0].count("its update is skipped") == 2
    assert "2 steps were skipped before it, as many as max_skipped_steps allows" in ended.outputs[0]
    assert "step 12/24" in ended.outputs[0] and "step 18/24" not in ended.outputs[0]


def test_the_line_of_a_skipped_step_has_no_loss(
    tiny_recipe: Callable[..., Path], poisoned: dict[str, Any], tmp_path: Path
) -> None:
    """Not 0, which would look like a model that knows its data, and pull down the smoothed loss."""
    recipe = tiny_recipe(
        max_steps=6,
        logging_steps=1,
        on_nonfinite="skip",
        output_dir=str(tmp_path / "run"),
        **poisoned,
    )
    ended = launch_ranks(RUN, ["--recipe", str(recipe)], ranks=1)
    assert ended.returncodes == (0,), ended.outputs[0]
    losses = [
        loss for _, loss in losses_of(map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()))
    ]
    assert len(losses) == 6 and sum(map(math.isnan, losses)) == 1
    assert min(loss for loss in losses if not math.isnan(loss)) > 1
    assert "loss nan" in ended.outputs[0]
