"""The loop around the optimizer step. docs/design.md lists the files of a step in their order ("The
life of a step").
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from finetune.checkpoint.manifest import Progress
from finetune.config.schedules import compute_learning_rate
from finetune.config.schema import Recipe, Run
from finetune.constants import count_steps
from finetune.data.batches import StepBatch
from finetune.errors import Preempted
from finetune.files.phases import Phases
from finetune.training.evaluate import evaluate
from finetune.training.metrics import Compilation, Window
from finetune.training.step import StepResult, handle_nonfinite, make_guard, train_step
from finetune.training.training_run import TrainingRun
from finetune.training.update_in_backward import UpdateInBackward
from finetune.training.watch import Requests, SignalListener, Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The actions that are due after one step. They are the same on every rank."""

    log: bool
    evaluate: bool
    save: bool
    end: bool  # this was the last step, or early stopping ends the run
    stop: bool  # a signal asks to save and stop

    @property
    def reads_device(self) -> bool:
        """Whether a due action makes the host wait for the device."""
        return self.log or self.evaluate or self.save


def find_due(
    before: Progress, now: Progress, last_step: int, recipe: Recipe, requests: Requests
) -> Due:
    """Returns what the recipe and the ranks' requests ask for after a step.

    There is no evaluation at the last step, since the run evaluates after training anyway. An epoch
    ends with the step at which the whole number of epochs grows. An interval below 1 is a share of
    all steps. With the strategy `no` there is no interval: a rule refuses it.

    Args:
        before: The progress before the step.
        now: The progress after it.
        last_step: How many steps the run has.
        recipe: Of the run.
        requests: What the ranks agreed on after the step.

    >>> from finetune.config.schema import Checkpoint, Run, Recipe
    >>> run = Run(logging_steps=0.3, eval_steps=3)
    >>> recipe = Recipe(path="r", run=run, checkpoint=Checkpoint(save_strategy="epoch"))
    >>> steps = [Progress(step=step, epoch=step / 4) for step in range(7)]
    >>> dues = [find_due(steps[i], steps[i + 1], 6, recipe, Requests()) for i in range(6)]
    >>> [due.log for due in dues]
    [False, True, False, True, False, True]
    >>> [due.evaluate for due in dues], [due.save for due in dues]
    ([False, False, True, False, False, False], [False, False, False, True, False, True])
    """
    is_last = now.step == last_step
    ends_epoch = int(now.epoch) > int(before.epoch)

    def is_due(strategy: str, interval: float | None) -> bool:
        """Whether an action of this strategy is due; without an `interval` it never is by steps."""
        if strategy == "epoch":
            return ends_epoch
        interval_steps = count_steps(interval, last_step)
        return interval_steps is not None and now.step % interval_steps == 0

    run = recipe.run
    checkpoint = recipe.checkpoint
    return Due(
        log=is_last or is_due("steps", run.logging_steps),
        evaluate=not is_last and is_due(run.eval_strategy, run.eval_steps),
        save=is_last
        or requests.stop
        or requests.save
        or is_due(checkpoint.save_strategy, checkpoint.save_steps),
        end=is_last,
        stop=requests.stop,
    )


def find_due_after_evaluation(
    due: Due, progress: Progress, recipe: Recipe, requests: Requests
) -> Due:
    """Returns what is due once the evaluation of a step is done, or stopped by a signal.

    The evaluation may show that this step is the best one, which is saved, or that the run has run
    out of patience and ends.

    Args:
        due: What was due before the evaluation.
        progress: With the result of the evaluation.
        recipe: Of the run.
        requests: What the ranks agreed on after the evaluation.
    """
    ends = due.end or is_out_of_patience(progress, recipe.run)
    is_best = recipe.checkpoint.keep_best_checkpoint and progress.best_step == progress.step
    is_asked_for = requests.stop or requests.save
    return replace(
        due, save=due.save or ends or is_best or is_asked_for, end=ends, stop=requests.stop
    )


def is_out_of_patience(progress: Progress, run: Run) -> bool:
    """Returns whether `early_stopping_patience` evaluations in a row have not been the best.

    Returns False if that key is null.
    """
    patience = run.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def train(run: TrainingRun, progress: Progress, signals: SignalListener) -> Progress:
    """Trains from `progress` to the schedule's last step, or until early stopping ends the run.

    All ranks call it. The losses are the same in every layout and on every number of ranks.

    Returns:
        The progress after the last step that was done.

    Raises:
        Preempted: A signal asked to stop; the step is saved.
        UserError: A save or a callback failed, or a loss or gradient was not finite and the recipe
            does not allow to skip the step.
    """
    recipe = run.recipe
    world = run.world
    saver = run.saver
    last_step = run.schedule.steps
    if is_out_of_patience(progress, recipe.run):  # the run is resumed where it stops early
        _say_early_stop(run, progress)
        return progress
    guard = make_guard(run.optimizer, recipe.optimization, world)
    in_backward = _make_update_in_backward(run)
    compilation = Compilation(recipe.model.torch_compile)
    with (
        _training_timed(run.phases, compilation),
        run.watchdog,
        saver,
        in_backward or nullcontext(),
        garbage_collected_between_lines(),
    ):
        _check_save(run, progress.step, last_step)
        run.model.train()
        window = Window(world.device)
        for batch, wait_seconds in _timed(run.read_batches(progress.step), run.watchdog):
            run.watchdog.beat(f"training step {batch.step + 1}")
            learning_rate = compute_learning_rate(batch.step, run.schedule)
            result = train_step(
                run.model,
                run.optimizer,
                batch,
                objective=run.objectives.training,
                recipe=recipe,
                world=world,
                guard=guard,
                learning_rate=learning_rate,
                before_update=saver.before_update,
                in_backward=in_backward,
            )
            _note_result(run, window, batch, result, wait_seconds, progress.skipped_steps)
            before = progress
            progress = progress.after_step(batch, is_skipped=result.failed_check is not None)
            run.phases.step = progress.step

            requests = signals.agree(world, saver.has_failed)
            if requests.failed_save:
                run.finish_save()  # raises the error of the async save
            due = find_due(before, progress, last_step, recipe, requests)
            # Before a save, so that no step that is not finite is saved.
            if due.reads_device:
                guard.raise_if_bad(recipe.optimization)
            line = None
            if due.log:
                line = run.measure(
                    window, progress, learning_rate, result.grad_norm, compilation.seconds()
                )
                _log(run, line, compilation)
                window = Window(world.device)
            if due.evaluate:
                progress = _evaluate(run, progress, window, signals)
                due = find_due_after_evaluation(due, progress, recipe, signals.agree(world))
            # After the evaluation: if a callback fails, the step is saved and not evaluated again.
            if line is not None:
                run.notify("on_log", progress, line)
            run.notify("on_step", progress)
            if due.save:
                _save(run, progress, window)
                signals.save = False  # the request is fulfilled
            if due.end:
                break
            if due.stop:
                run.finish_save()
                raise run.preempted(f"after step {progress.step} of {last_step}, which is saved")
        run.finish_save()
    if progress.step < last_step:
        _say_early_stop(run, progress)
    return progress


def _say_early_stop(run: TrainingRun, progress: Progress) -> None:
    """Logs that early stopping ends the run, and which step was the best."""
    lowest = f"the held-out loss was lowest at step {progress.best_step}"
    if progress.best_step is None:
        lowest = "no held-out loss was a number"
    run.log.say(f"step {progress.step}: stopped early; {lowest}")


def _make_update_in_backward(run: TrainingRun) -> UpdateInBackward | None:
    """Makes the update in the backward; None if the recipe does not ask for it."""
    if not run.recipe.optimization.optim_in_backward:
        return None
    return UpdateInBackward(run.optimizer, run.recipe, run.world)


def _check_save(run: TrainingRun, step: int, last_step: int) -> None:
    """Saves a checkpoint on trial, as `Saver.check_save` does, unless all steps are done."""
    if step >= last_step:
        return
    run.watchdog.beat("saving a trial checkpoint")
    run.saver.check_save(last_step, run.data.train.steps_per_epoch)


def _note_result(
    run: TrainingRun,
    window: Window,
    batch: StepBatch,
    result: StepResult,
    wait_seconds: float,
    skipped_steps: int,
) -> None:
    """Adds the sums of a step to `window`, or logs that its update was skipped.

    Args:
        run: The run.
        window: The steps since the last line of metrics.
        batch: Of the step.
        result: Of the step.
        wait_seconds: How long the loop waited for the batch.
        skipped_steps: How many steps were skipped before this one.

    Raises:
        UserError: The step was not finite, and the recipe does not allow to skip it.
    """
    if result.failed_check is None:
        window.add(result.measured, run.objectives.training.count(batch), batch, wait_seconds)
    else:
        keys = run.recipe.optimization
        run.log.say(handle_nonfinite(keys, result.failed_check, skipped_steps, run.world))


@contextmanager
def _training_timed(phases: Phases, compilation: Compilation) -> Iterator[None]:
    """Counts the block's seconds for the phase "training", and for the phase "compile" those that
    torch.compile took of them.
    """
    compiled_before = compilation.seconds() or 0.0
    try:
        with phases.timed("training"):
            yield
    finally:
        phases.add("compile", (compilation.seconds() or 0.0) - compiled_before, phases.step)
        phases.write()


def _log(run: TrainingRun, line: dict[str, Any], compilation: Compilation) -> None:
    """Logs a line of metrics, and news of torch.compile."""
    run.log.step(line)
    if news := compilation.describe_new_graphs():
        run.log.say(news)
    # `garbage_collected_between_lines` has switched collection off. The young generations are
    # enough: the garbage of the steps is in them.
    gc.collect(generation=1)


def _evaluate(
    run: TrainingRun, progress: Progress, window: Window, signals: SignalListener
) -> Progress:
    """Evaluates a step as `evaluate` does, without counting the seconds in `window`.

    If a signal asks to stop before the held-out loss is measured, the evaluation ends without it,
    and the progress `owes_evaluation`.
    """
    with window.paused():
        try:
            progress = evaluate(
                run, progress, lambda batches: signals.interrupt(batches, run.world, Preempted())
            )
        except Preempted:
            progress = replace(progress, owes_evaluation=True)
        run.model.train()  # an evaluation switches dropout off
    return progress


def _save(run: TrainingRun, progress: Progress, window: Window) -> None:
    """Saves a checkpoint, without counting its seconds in `window`; notifies the callbacks."""
    run.watchdog.beat(f"saving step {progress.step}")
    with window.paused():
        run.save(progress)
    run.notify("on_save", progress)


def _timed(batches: Iterator[StepBatch], watchdog: Watchdog) -> Iterator[tuple[StepBatch, float]]:
    """Yields each batch with the seconds that the loop waited for it."""
    while True:
        watchdog.beat("making the next batch")  # a method that samples does so here
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started


@contextmanager
def garbage_collected_between_lines() -> Iterator[None]:
    """In this block Python collects no garbage on its own; `_log` does so when it logs metrics.

    A collection at any other time stops one rank, and all others wait for it.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # later collections do not look at the objects that exist now
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
