"""The end of a run: the export, some answers, and where everything is."""

from pathlib import Path
from signal import Signals
from typing import Any

from finetune.checkpoint.retention import step_folder
from finetune.distributed.world import leave
from finetune.divergence import find_divergence, losses_of
from finetune.errors import Preempted
from finetune.json_lines import read_json_lines
from finetune.metrics import DIVERGED_ADVICE
from finetune.progress import Progress
from finetune.training.evaluate import SAMPLES
from finetune.training.finished import results, write_finished
from finetune.training.summary import TrainingRun

SHOWN = 5  # held-out questions in the last screen


def conclude(run: TrainingRun, progress: Progress) -> None:
    """Takes leave of the other ranks and exports on rank 0, which needs none of them: nobody waits in a collective."""
    run.log.close_tracker()
    leave(run.world)
    if not run.world.is_main:
        return
    for line in answers_before_and_after(run.folder / SAMPLES, progress.step):
        run.log.say(line)
    if run.recipe.checkpoint.export_at_end:
        export(run, progress)
    if diverged := find_divergence(losses_of(read_json_lines(run.folder / "metrics.jsonl"), progress.step)):
        run.log.say(f"warning {diverged}: this run has diverged; {DIVERGED_ADVICE}")
    write_finished(run.folder, run.recipe, run.inputs, progress.step)
    run.log.say(results(run.folder))
    run.log.close()


def export(run: TrainingRun, progress: Progress) -> None:
    """Exports the run's last checkpoint, or its best. Raises `Preempted` where a signal stops it."""
    from finetune.export.cli import exit_on_signals
    from finetune.export.export import export_run

    best = progress.best_step if run.recipe.checkpoint.keep_best_checkpoint else None
    if best is not None:
        run.log.say(f"best    step {best}, held-out loss {progress.best_eval_loss:.4f}")
    checkpoint = None if best is None else step_folder(run.folder, best)
    try:
        with exit_on_signals():
            export_run(run.folder, checkpoint=checkpoint, log=run.log.say)
    except SystemExit as stop:
        auto = "" if run.recipe.checkpoint.resume_from_checkpoint != "none" else " with resume_from_checkpoint=auto"
        raise Preempted(
            f"{run.folder}: stopped by {Signals(int(str(stop.code)) - 128).name} during the export; all {progress.step} "
            f"steps are saved, and the same command{auto} exports them"
        ) from None


def answers_before_and_after(path: Path, last_step: int) -> list[str]:
    """Some held-out questions with the first and the last answer, of the samples that can be read."""
    samples = [sample for sample in read_json_lines(path) if sample is not None and _is_sample(sample)]
    first = {s["prompt"]: s["answer"] for s in reversed(samples)}
    last = [s for s in samples if s["step"] == last_step and s["expected"]][:SHOWN]
    return [
        f"  {_short(s['prompt'])}  before: {_short(first[s['prompt']])!r}  after: {_short(s['answer'])!r}  "
        f"{'right' if s['answer'].strip() == s['expected'].strip() else 'wrong, expected ' + repr(_short(s['expected']))}"
        for s in last
    ]


def _is_sample(line: dict[str, Any]) -> bool:
    return isinstance(line.get("step"), int) and all(
        isinstance(line.get(key), str) for key in ("prompt", "answer", "expected")
    )


def _short(text: str, most: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
