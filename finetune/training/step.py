"""One optimizer step, whole: forward and backward over the micro-batches, then the update."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from finetune.config.schema import Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.gradients import sum_partial_gradients, without_gradient_sync
from finetune.distributed.model_parts import unwrap
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import World
from finetune.models.embedding import NoisyDocuments
from finetune.models.fake_quantize import round_from_step
from finetune.models.routing import auxiliary_loss_of_step, find_routing
from finetune.optim.optimizers import seed_from
from finetune.training.objectives.objective import SFT, Measured, Objective
from finetune.training.update import (
    DeviceGuard,
    HostGuard,
    StepResult,
    UpdateInBackward,
    clip_and_update,
    set_learning_rate,
)


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seeds dropout by the step alone, so that a resumed run needs no random state."""
    seed_from(f"{seed}/{step}/{rank}")


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
    async save may still be copying them. `in_backward` updates each within the backward, and checks what it updates
    with.
    """
    set_learning_rate(optimizer, learning_rate)
    if in_backward is not None:
        before_update()
        in_backward.start_step(batch.step)
    measured = forward_backward(model, batch, objective, recipe, world, in_backward)
    return clip_and_update(model, optimizer, batch, measured, recipe, world, guard, before_update, in_backward)


def forward_backward(
    model: nn.Module,
    batch: StepBatch,
    objective: Objective,
    recipe: Recipe,
    world: World,
    in_backward: UpdateInBackward | None = None,
) -> Measured:
    """Adds the gradients of `batch`, under the dropout and the noise of its step. All ranks call it."""
    round_from_step(model, recipe.quantization_aware, batch.step)
    seed_dropout(recipe.run.seed, batch.step, world.tensor_group_index)
    seed = None if recipe.optimization.neftune_noise_alpha is None else recipe.run.seed
    return accumulate_gradients(model, batch, world, objective, noise_seed=seed, in_backward=in_backward)


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
    world.tensor_group_count. It is the same number for every split.
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

    each, pipeline = batch.micro_batches, find_pipeline(unwrap(model))
    inputs, is_one = map(inputs_of, each), len(each) == 1 and pipeline is None
    add_auxiliary = auxiliary_loss_of_step(model, routing, inputs, batch.tokens, world, is_one_forward=is_one)

    def measure(micro_batch: MicroBatch) -> torch.Tensor:
        nonlocal total
        on_device = micro_batch.to(world.device)
        measured = objective.measure(model, on_device, inputs_of(on_device), batch)
        if in_backward is not None:
            in_backward.check_loss(measured.loss_sum)
        total += measured.detach()
        return add_auxiliary(measured.loss_sum * (world.tensor_group_count / count))

    if pipeline is not None:
        auxiliary = None if routing is None else lambda: add_auxiliary(torch.zeros((), device=world.device))
        sizes = [(one.input_ids.shape[0], one.input_ids.shape[1]) for one in each]
        pipeline.run(
            sizes, lambda index: measure(each[index]), lambda index: model(**inputs_of(each[index])), auxiliary
        )
        loss, *others = pipeline.share([{"": total.loss_sum}, total.metrics, total.maxima], type(objective).__name__)
        total = Measured(loss[""], *others)
    else:
        for index, micro_batch in enumerate(each):
            with nullcontext() if index == len(each) - 1 else without_gradient_sync(model):
                world.accelerator.backward(measure(micro_batch))
    sum_partial_gradients(model, world)
    if routing is not None:
        routing.end_step()
    return total
