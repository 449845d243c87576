"""What is due after an optimizer step: a line of metrics, an evaluation, a checkpoint, the end of the run."""

from dataclasses import dataclass, replace

from finetune.progress import Progress
from finetune.recipe.schema import Recipe, Run
from finetune.training.signals import Requests


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


def find_due(step: int, last_step: int, recipe: Recipe, requests: Requests) -> Due:
    """What is due once `step` (1-based) is done, by the recipe and by what the ranks ask for.

    There is no evaluation at the last step: the run evaluates once more after training.

    >>> from finetune.recipe.schema import Checkpoint, Run, Recipe
    >>> recipe = Recipe(path="r", given=frozenset(), run=Run(logging_steps=2, eval_steps=3), checkpoint=Checkpoint(save_steps=4))
    >>> [find_due(step, 6, recipe, Requests()).log for step in range(1, 7)]
    [False, True, False, True, False, True]
    >>> [find_due(step, 6, recipe, Requests()).evaluate for step in range(1, 7)]
    [False, False, True, False, False, False]
    >>> [find_due(step, 6, recipe, Requests()).save for step in range(1, 7)]
    [False, False, False, True, False, True]
    """
    is_last = step == last_step
    return Due(
        log=is_last or _is_multiple(step, recipe.run.logging_steps),
        evaluate=not is_last and _is_multiple(step, recipe.run.eval_steps),
        save=is_last or requests.stop or requests.save or _is_multiple(step, recipe.checkpoint.save_steps),
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


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
