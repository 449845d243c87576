"""What is due after an optimizer step: a line of metrics, an evaluation, a checkpoint, the end of the run."""

from dataclasses import dataclass, replace

from finetune.config.schema import Recipe, Run
from finetune.constants import count_steps
from finetune.progress import Progress
from finetune.training.watch import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is due after one step. The same on every rank."""

    log: bool
    evaluate: bool
    save: bool
    end: bool  # this was the last step, or early stopping ends the run
    stop: bool  # a signal asks to save and stop

    @property
    def reads_device(self) -> bool:
        """Whether the host waits for the device at this step anyway."""
        return self.log or self.evaluate or self.save


def find_due(before: Progress, now: Progress, last_step: int, recipe: Recipe, requests: Requests) -> Due:
    """What is due once the step between the two progresses is done, by the recipe and by what the ranks ask for.

    There is no evaluation at the last step: the run evaluates once more after training. An epoch ends with the first step
    after which all rows have been read once more.

    >>> from finetune.config.schema import Checkpoint, Run, Recipe
    >>> run = Run(logging_steps=0.3, eval_steps=3)
    >>> recipe = Recipe(path="r", run=run, checkpoint=Checkpoint(save_strategy="epoch"))
    >>> steps = [Progress(step=step, epoch=step / 4) for step in range(7)]
    >>> dues = [find_due(steps[i], steps[i + 1], 6, recipe, Requests()) for i in range(6)]
    >>> [due.log for due in dues], [due.evaluate for due in dues], [due.save for due in dues]
    ([False, True, False, True, False, True], [False, False, True, False, False, False], [False, False, False, True, False, True])
    """
    is_last, ends_epoch = now.step == last_step, int(now.epoch) > int(before.epoch)

    def is_due(strategy: str, interval: float | None) -> bool:
        every = count_steps(interval, last_step)
        return ends_epoch if strategy == "epoch" else every is not None and now.step % every == 0

    run, checkpoint = recipe.run, recipe.checkpoint
    return Due(
        log=is_last or is_due("steps", run.logging_steps),
        evaluate=not is_last and is_due(run.eval_strategy, run.eval_steps),
        save=is_last or requests.stop or requests.save or is_due(checkpoint.save_strategy, checkpoint.save_steps),
        end=is_last,
        stop=requests.stop,
    )


def find_due_after_evaluation(due: Due, progress: Progress, recipe: Recipe) -> Due:
    """An evaluation may show that this step is the best one, which is saved, or that the run ends here."""
    ends = due.end or is_out_of_patience(progress, recipe.run)
    is_best = recipe.checkpoint.keep_best_checkpoint and progress.best_step == progress.step
    return replace(due, save=due.save or ends or is_best, end=ends)


def is_out_of_patience(progress: Progress, run: Run) -> bool:
    """Whether the held-out loss has not fallen for `early_stopping_patience` evaluations (never where that is null)."""
    patience = run.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience
