"""The end of a run: the export, the last screen, and finished.json, by which a second start sees that it is done."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from finetune.checkpoint.manifest import Progress, find_problems, hash_recipe, read_state
from finetune.checkpoint.resume import list_changes, read_progress
from finetune.checkpoint.retention import list_checkpoints, step_folder
from finetune.config.reader import to_dict
from finetune.config.schema import Recipe, recipe_keys
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World, leave
from finetune.errors import UserError
from finetune.files.durable import replace_file
from finetune.files.run_json import read_json_object
from finetune.training.evaluate import SAMPLES
from finetune.training.loop import is_out_of_patience
from finetune.training.screens import answers_before_and_after, last_screen, results_line
from finetune.training.training_run import TrainingRun
from finetune.training.watch import SignalListener

FINISHED = "finished.json"


def leave_ranks(run: TrainingRun, signals: SignalListener) -> None:
    """Ends the tracker and the process group. Raises `Preempted` where a signal has asked to stop meanwhile."""
    run.log.close_tracker()
    leave(run.world)
    if signals.stop:
        raise run.preempted("before the export; all steps are saved")


def finish(run: TrainingRun, progress: Progress) -> None:
    """Exports on rank 0, which needs no other rank: nobody waits in a collective. Prints the last screen."""
    if not run.world.is_main:
        return
    for line in answers_before_and_after(run.folder / SAMPLES, progress.step):
        run.log.say(line)
    if run.recipe.checkpoint.export_at_end:
        export(run, progress)
    record = _record(run.recipe, run.inputs, progress.step)
    replace_file(run.folder / FINISHED, json.dumps(record, indent=1) + "\n")  # all of it is done, and exported
    for line in last_screen(run.folder, progress.step):
        run.log.say(line)
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
        number = Signals(int(str(stop.code)) - 128).name
        raise run.preempted(f"during the export; all {progress.step} steps are saved", by=number) from None


def is_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int, world: World) -> bool:
    """Whether this very run is done: same recipe, same inputs, its exports there, and its last checkpoint verifies.

    All ranks call it; rank 0 looks, and prints where the results are. `steps`: the schedule's.

    Raises `UserError` where nothing is left to train, but the recipe trains otherwise than the run did: it would be
    described and exported as if it had been trained so.
    """
    is_done: bool = RankGroup(world).on_main(lambda: _is_finished(folder, recipe, inputs, steps))
    if is_done and world.is_main:
        print(f"{folder}: this run is done, there is nothing left to do")
        print(results_line(folder))
    return is_done


def _is_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int) -> bool:
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return False
    last, newest = checkpoints[-1]
    exports = ["export", *(["adapter"] if recipe.lora.use_peft else [])] if recipe.checkpoint.export_at_end else []
    if read_json_object(folder / FINISHED) == _record(recipe, inputs, last):
        return all((folder / name).is_dir() for name in exports) and not find_problems(newest)
    try:
        is_over = last >= steps or is_out_of_patience(read_progress(newest), recipe.run)
    except ValueError:  # damaged, and passed over when the run resumes
        is_over = False
    if is_over and not find_problems(newest):  # the checkpoint of a run that continues is read once, by `find_start`
        _refuse_other_training(folder, recipe, inputs, newest)
    return False


def _refuse_other_training(folder: Path, recipe: Recipe, inputs: Mapping[str, str], newest: Path) -> None:
    """Raises `UserError` where `recipe` trains otherwise than the run whose last checkpoint is `newest`."""
    deciding, other = list_changes(read_state(newest), recipe, inputs)
    changed = [change for change in other if recipe_keys()[re.split(r"\W", change)[0]].section == "optimization"]
    if changed and not deciding:  # those are refused, or taken, by `find_start`
        raise UserError.of(
            [
                f"{folder}: this run is finished, nothing is left to train, and its recipe has changed since:",
                *(f"  {change}" for change in changed),
                "set another output_dir to train with it, or set it back",
            ]
        )


def _record(recipe: Recipe, inputs: Mapping[str, str], step: int) -> dict[str, Any]:
    return {"step": step, "recipe_sha256": hash_recipe(to_dict(recipe)), "inputs": dict(inputs)}
