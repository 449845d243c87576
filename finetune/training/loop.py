"""The loop, on one page."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from finetune.checkpoint.save import Saver
from finetune.data.batches import StepBatch
from finetune.distributed.grad_scaler import unscale, update
from finetune.distributed.parallelize import clip_gradients, without_gradient_sync
from finetune.distributed.world import World
from finetune.errors import Preempted
from finetune.metrics import Window, peak_memory_bytes
from finetune.optim.build import compute_learning_rate, set_learning_rate
from finetune.progress import Progress
from finetune.training.early_stopping import is_new_best, is_out_of_patience
from finetune.training.evaluate import evaluate
from finetune.training.nonfinite import guard_of, refuse_or_skip, suspect
from finetune.training.profiler import collect, garbage_collected_between_lines, profiled
from finetune.training.signals import Interruption, agreed
from finetune.training.summary import TrainingRun, stream_reporter


def train(run: TrainingRun, progress: Progress) -> Progress:
    """Trains from `progress` to the schedule's last step. The same numbers on every layout and number of ranks.

    Raises `Preempted` after saving where a signal asks to stop, and `UserError` where a checkpoint cannot be written or
    a step's loss is not finite.
    """
    recipe, world, steps = run.recipe, run.world, run.schedule.steps
    if is_out_of_patience(progress, recipe.run):  # stopped early before, and started again
        return progress
    guard = guard_of(run.optimizer, recipe.optimization, world)
    saver = Saver(run.folder, run.model, run.optimizer, world, recipe, run.tokenizer, run.inputs)
    with run.log, run.watchdog, Interruption() as signals, saver, garbage_collected_between_lines():
        saver.check_save(steps)
        run.model.train()
        window = Window(world.device)
        for batch, waited in _timed(_batches(run, progress)):
            run.watchdog.beat(f"training step {batch.step + 1}")
            rate = compute_learning_rate(batch.step, run.schedule)
            set_learning_rate(run.optimizer, rate)
            seed_dropout(recipe.run.seed, batch.step, world.rank)
            loss_sum = accumulate_gradients(run.model, batch, world)
            unscale(run.optimizer, world)
            norm = clip_gradients(run.model, recipe.optimization.max_grad_norm)

            looked_at = suspect(batch, loss_sum, norm)
            stop, save_now, save_failed, skip = agreed(
                world, signals.stop, signals.save, saver.has_failed, guard.is_bad(looked_at)
            )
            if save_failed:
                saver.finish()  # raises what happened
            if skip:
                run.log.say(refuse_or_skip(recipe.optimization, looked_at, progress.skipped_steps, world))
            else:
                saver.before_update()  # an async save may still be copying the parameters
                seed_rounding(recipe.run.seed, batch.step, world.shard_rank)
                update(run.optimizer, world)
                window.add(loss_sum, batch.tokens, batch.trained_tokens, waited)
            run.optimizer.zero_grad(set_to_none=True)

            progress = advanced(progress, batch, skip)
            last = progress.step == steps
            log_due = last or _due(progress.step, recipe.run.logging_steps)
            eval_due = not last and _due(progress.step, recipe.run.eval_steps)  # after the last step, run.py evaluates
            save_due = last or stop or save_now or _due(progress.step, recipe.checkpoint.save_steps)
            if log_due or eval_due or save_due:
                guard.check(recipe.optimization)
            if log_due:
                run.log.step(_line(run, window, progress, rate, norm))
                window = Window(world.device)
                collect()
            if eval_due:
                with window.paused():
                    progress = evaluate(run, progress)
                    run.model.train()
                last = stopped_early(run, progress)
            if save_due or last or is_new_best(progress, recipe.checkpoint):
                with window.paused():
                    saver.save(progress)
                signals.save = False
            if last:
                break
            if stop:
                saver.finish()
                raise Preempted(stopped(run, progress))
    return progress


def accumulate_gradients(model: nn.Module, batch: StepBatch, world: World) -> torch.Tensor:
    """Forward and backward over this rank's micro-batches; returns their summed loss (0-dim fp32, on the device).

    The step's loss is its sum over every trained token of every rank, over their number:

        loss = sum over ranks and micro-batches of loss_sum / trained_tokens

    FSDP and DDP average gradients over ranks, hence the factor world.size. It is the same number for every split.
    """
    total = torch.zeros((), device=world.device)
    for index, micro_batch in enumerate(batch.micro_batches):
        last = index == len(batch.micro_batches) - 1
        with nullcontext() if last else without_gradient_sync(model):
            loss_sum = model(**micro_batch.to(world.device).inputs)
            world.accelerator.backward(loss_sum * (world.size / max(1, batch.trained_tokens)))
        total += loss_sum.detach()
    return total


def advanced(progress: Progress, batch: StepBatch, skipped: bool = False) -> Progress:
    """The progress after `batch`'s step."""
    return replace(
        progress,
        step=batch.step + 1,
        epoch=batch.epoch,
        tokens=progress.tokens + batch.tokens,
        trained_tokens=progress.trained_tokens + batch.trained_tokens,
        skipped_steps=progress.skipped_steps + skipped,
    )


def stopped(run: TrainingRun, progress: Progress) -> str:
    """What a preempted run says last."""
    auto = "" if run.recipe.checkpoint.resume_from_checkpoint != "none" else " with resume_from_checkpoint=auto"
    return (
        f"{run.folder}: stopped by a signal after step {progress.step} of {run.schedule.steps}, which is saved; "
        f"the same command{auto} goes on from there"
    )


def stopped_early(run: TrainingRun, progress: Progress) -> bool:
    """Whether the run ends here, since its held-out loss no longer falls; says so."""
    if not is_out_of_patience(progress, run.recipe.run):
        return False
    run.log.say(f"step {progress.step}: stopped early; the held-out loss was lowest at step {progress.best_step}")
    return True


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Dropout's randomness as a pure function of the step, so that a resumed run needs no state of it."""
    _seed_from(f"{seed}/{step}/{rank}")


def seed_rounding(seed: int, step: int, shard_rank: int) -> None:
    """The randomness of stochastic rounding: ranks that hold the same shard must round alike, or their replicas drift."""
    _seed_from(f"{seed}/{step}/rounding/{shard_rank}")


def _seed_from(text: str) -> None:
    digest = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _line(run: TrainingRun, window: Window, progress: Progress, rate: float, norm: torch.Tensor) -> dict[str, Any]:
    """A line of metrics. The one place of a step where the host waits for the device."""
    loss = run.world.sum(window.loss_sum).item() / max(1, window.trained_tokens)
    tokens_per_second = window.tokens_per_second()
    peak = run.peak_flops
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": float(norm),
        "tokens": progress.tokens,
        "trained_tokens": progress.trained_tokens,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * run.flop_per_token / (peak * run.world.size) if peak else None,
        "peak_memory_bytes": peak_memory_bytes(run.world.device),
        "data_wait_seconds": window.data_wait_seconds,
    }


def _batches(run: TrainingRun, progress: Progress) -> Iterator[StepBatch]:
    """The steps that are left, those of `profile_steps` under the profiler."""
    batches = run.data.train.batches(progress.step, stream_reporter(run))
    return profiled(batches, run.recipe.run.profile_steps, run.folder, run.world.rank)


def _timed(batches: Iterator[StepBatch]) -> Iterator[tuple[StepBatch, float]]:
    """Each batch with the seconds that the loop waited for it."""
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
