"""One optimizer step, whole, and the loop round it.

The files of a step, in order: data/batches.py gives the micro-batches; `train_step` below runs them; training/objectives/sft.py says
what is minimized; models/attention/documents.py and models/head/cross_entropy.py are its forward; distributed/gradients.py synchronizes and clips the
gradients, and updates; training/nonfinite.py checks them; optim/build.py has made the optimizer. training/schedule.py says
what is due next. An optimizer with its state in files (optim/nvme.py) goes through them once, in the update: all that needs
the gradients of the whole model comes before it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.schema import Recipe
from finetune.data.batches import StepBatch
from finetune.data.collate import MicroBatch
from finetune.distributed.gradients import clip_gradients, sum_partial_gradients, unscale, update, without_gradient_sync
from finetune.distributed.parallelize import unwrap
from finetune.distributed.world import World
from finetune.models.embedding_noise import NoisyDocuments
from finetune.models.moe.experts import Routing, find_routing
from finetune.optim.learning_rate import compute_learning_rate, set_learning_rate
from finetune.progress import Progress
from finetune.training.compilation import Compilation
from finetune.training.evaluate import evaluate
from finetune.training.nonfinite import DeviceGuard, HostGuard, StepCheck, handle_nonfinite, make_guard
from finetune.training.objectives.sft import SFT, Measured, Objective
from finetune.training.profile import collect_garbage, garbage_collected_between_lines
from finetune.training.random_state import seed_dropout, seed_rounding
from finetune.training.schedule import find_due, find_due_after_evaluation, is_out_of_patience
from finetune.training.throughput import Window
from finetune.training.training_run import TrainingRun
from finetune.training.update_in_backward import UpdateInBackward
from finetune.training.watch import SignalListener


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. The tensors are 0-dim, on the device: to read one is to wait for it."""

    measured: Measured  # on this rank
    grad_norm: torch.Tensor  # 2-norm of all ranks' gradients before clipping
    failed_check: StepCheck | None  # where the loss or gradient was not finite, and nothing was updated


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    objective: Objective,
    recipe: Recipe,
    world: World,
    guard: HostGuard | DeviceGuard,
    learning_rate: float,
    before_update: Callable[[], None] = lambda: None,
    in_backward: UpdateInBackward | None = None,
) -> StepResult:
    """One optimizer step on every rank: forward, backward, clip, check, update.

    Only where `guard` finds loss and gradient finite are the parameters updated, after `before_update` has returned: an
    async save may still be copying them. `in_backward` updates each within the backward, and checks what it updates with.
    """
    set_learning_rate(optimizer, learning_rate)
    seed_dropout(recipe.run.seed, batch.step, world.tensor_group)
    seed = None if recipe.optimization.neftune_noise_alpha is None else recipe.run.seed
    if in_backward is not None:
        before_update()
        in_backward.start_step(batch.step)
    measured = accumulate_gradients(model, batch, world, objective, noise_seed=seed, in_backward=in_backward)
    unscale(optimizer, world)
    grad_norm = in_backward.norm(model) if in_backward else clip_gradients(model, recipe.optimization.max_grad_norm)
    check = StepCheck.of(batch, measured.loss_sum, grad_norm)
    is_skipped = guard.must_skip(check)
    if not is_skipped and in_backward is None:
        before_update()
        seed_rounding(recipe.run.seed, batch.step, world.shard_rank)
        update(optimizer, world)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(measured, grad_norm, check if is_skipped else None)


def train(run: TrainingRun, progress: Progress, signals: SignalListener) -> Progress:
    """Trains from `progress` to the schedule's last step. The same numbers on every layout and number of ranks.

    Raises `Preempted` after saving where a signal asks to stop, and `UserError` where a checkpoint cannot be written or
    a step's loss is not finite.
    """
    recipe, world, saver, last_step = run.recipe, run.world, run.saver, run.schedule.steps
    if is_out_of_patience(progress, recipe.run):  # stopped early before, and started again
        return progress
    guard = make_guard(run.optimizer, recipe.optimization, world)
    in_backward = UpdateInBackward(run.optimizer, recipe, world) if recipe.optimization.optim_in_backward else None
    step = partial(
        train_step, run.model, run.optimizer, recipe=recipe, world=world, guard=guard, in_backward=in_backward
    )
    objective, compilation = run.objectives.training, Compilation(recipe.model.torch_compile)
    with run.watchdog, saver, in_backward or nullcontext(), garbage_collected_between_lines():
        saver.check_save(last_step, run.data.train.steps_per_epoch)
        run.model.train()
        window = Window(world.device)
        for batch, waited in _timed(run.read_batches(progress.step)):
            run.watchdog.beat(f"training step {batch.step + 1}")
            rate = compute_learning_rate(batch.step, run.schedule)
            result = step(batch, objective=objective, learning_rate=rate, before_update=saver.before_update)
            if result.failed_check is None:
                window.add(result.measured, objective.count(batch), batch, waited)
            else:
                run.log.say(handle_nonfinite(recipe.optimization, result.failed_check, progress.skipped_steps, world))
            before, progress = progress, progress.after_step(batch, is_skipped=result.failed_check is not None)

            requests = signals.agree(world, saver.has_failed)
            if requests.failed_save:
                saver.finish()  # raises what happened
            due = find_due(before, progress, last_step, recipe, requests)
            if due.reads_device:
                guard.raise_if_bad(recipe.optimization)
            if due.log:
                run.log.step(window.metrics(run, progress, rate, result.grad_norm, compilation.seconds()))
                if news := compilation.news():
                    run.log.say(news)
                window = Window(world.device)
                collect_garbage()
            if due.evaluate:
                with window.paused():
                    progress = evaluate(run, progress)
                    run.model.train()
                due = find_due_after_evaluation(due, progress, recipe)
            if due.save:
                with window.paused():
                    saver.save(progress)
                signals.save = False
            if due.end:
                break
            if due.stop:
                saver.finish()
                raise run.preempted(f"after step {progress.step} of {last_step}, which is saved")
    if progress.step < last_step:
        run.log.say(f"step {progress.step}: stopped early; the held-out loss was lowest at step {progress.best_step}")
    return progress


def accumulate_gradients(
    model: nn.Module,
    batch: StepBatch,
    world: World,
    objective: Objective = SFT,
    *,
    noise_seed: int | None = None,
    in_backward: UpdateInBackward | None = None,
) -> Measured:
    """Forward and backward over this rank's micro-batches; returns what the objective has measured in them.

    The step's loss is the sum of the objective's over all ranks, divided by what it counts there (sft: trained tokens):

        loss = sum over ranks and micro-batches of loss_sum / count

    FSDP and DDP average gradients over ranks (not over those of a tensor parallel group), hence the factor
    world.tensor_groups. It is the same number for every split.
    `noise_seed`: seeds the noise on embeddings; None: there is none.
    A mixture of experts may add its routers' auxiliary loss, which is one of the whole step as well.
    """
    total, routing = Measured(torch.zeros((), device=world.device)), find_routing(unwrap(model))
    count = max(1, objective.count(batch))
    objective = objective.prepare(model, lambda: batch.micro_batches, world)

    def inputs_of(micro_batch: MicroBatch) -> dict[str, Any]:
        inputs = micro_batch.to(world.device).inputs
        if noise_seed is not None:
            ids, lengths, first = micro_batch.example_ids, micro_batch.document_lengths, micro_batch.first_token
            inputs["noisy_documents"] = NoisyDocuments(noise_seed, batch.step, ids, lengths, first)
        return inputs

    add_auxiliary = auxiliary_loss_of_step(model, routing, batch, inputs_of, world)
    for index, micro_batch in enumerate(batch.micro_batches):
        is_last = index == len(batch.micro_batches) - 1
        with nullcontext() if is_last else without_gradient_sync(model):
            on_device = micro_batch.to(world.device)
            measured = objective.measure(model, on_device, inputs_of(on_device), batch)
            if in_backward is not None:
                in_backward.check_loss(measured.loss_sum)
            loss = measured.loss_sum * (world.tensor_groups / count)
            world.accelerator.backward(add_auxiliary(loss))
        total += measured.detach()
    sum_partial_gradients(model, world)
    if routing is not None:
        routing.end_step()
    return total


def auxiliary_loss_of_step(
    model: nn.Module,
    routing: Routing | None,
    batch: StepBatch,
    inputs_of: Callable[[MicroBatch], dict[str, Any]],
    world: World,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that adds the auxiliary loss of the latest forward to its loss; the loss itself where there is none.

    The auxiliary loss multiplies what the whole step selects with the probabilities of each token. With several
    micro-batches the first backward needs the selection of the last, hence a forward of each without gradients.
    """
    if routing is None or not routing.coefficient:
        return lambda loss: loss
    used: Routing = routing
    of_step: torch.Tensor | None = None
    if len(batch.micro_batches) > 1:
        of_step = world.sum(used.count_selected(model, map(inputs_of, batch.micro_batches), world.device))

    def add(loss: torch.Tensor) -> torch.Tensor:
        selected = world.sum(used.selected()) if of_step is None else of_step
        return loss + world.size * used.coefficient * used.auxiliary_loss(selected, batch.tokens)

    return add


def _timed(batches: Iterator[StepBatch]) -> Iterator[tuple[StepBatch, float]]:
    """Each batch with the seconds that the loop waited for it."""
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started
