"""The lowest held-out loss of a run, and what hangs on it: when to stop early, which checkpoint is the best."""

from dataclasses import replace

from finetune.progress import Progress
from finetune.recipe.schema import Checkpoint, Run


def judged(progress: Progress, loss: float | None) -> Progress:
    """The progress after an evaluation that found `loss` (None: there are no held-out rows).

    A nan is never the lowest, nor is what was found before the first step: no checkpoint holds that model.

    >>> progress = judged(judged(Progress(step=5), 2.0), 3.0)
    >>> progress.best_eval_loss, progress.best_step, progress.evaluations_since_best
    (2.0, 5, 1)
    """
    if loss is None or progress.step == 0:
        return progress
    if loss < (float("inf") if progress.best_eval_loss is None else progress.best_eval_loss):
        return replace(progress, best_eval_loss=loss, best_step=progress.step, evaluations_since_best=0)
    return replace(progress, evaluations_since_best=progress.evaluations_since_best + 1)


def is_new_best(progress: Progress, checkpoint: Checkpoint) -> bool:
    """Whether `keep_best_checkpoint` wants this step saved."""
    return checkpoint.keep_best_checkpoint and progress.best_step == progress.step


def is_out_of_patience(progress: Progress, run: Run) -> bool:
    """Whether the held-out loss has not fallen for `early_stopping_patience` evaluations; never where that is left out."""
    patience = run.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience
