"""One optimizer step, whole: forward and backward over the micro-batches; then gradients are
clipped, checked, applied.

A loss or gradient that is not finite never reaches the parameters. On a CPU the host looks before
each update; on a GPU the optimizer itself leaves the parameters alone, so that the host need not
wait.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Optimization, Recipe
from finetune.data.batches import MicroBatch, StepBatch
from finetune.distributed.gradients import (
    backward,
    clip_gradients,
    is_scaled,
    refuse_missing_gradients,
    unscale,
    update,
    without_gradient_sync,
)
from finetune.distributed.model_parts import unwrap
from finetune.distributed.pipeline import Pipeline, find_pipeline
from finetune.distributed.tensor_parallel import sum_partial_gradients
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.embedding import NoisyDocuments
from finetune.models.fake_quantize import round_from_step
from finetune.models.routing import auxiliary_loss_of_step, find_routing
from finetune.optim.optimizers import seed_from, seed_rounding
from finetune.training.objectives.objective import SFT, Measured, Objective
from finetune.training.update_in_backward import UpdateInBackward

SHOWN_IDS = 16  # ids of examples named for each rank


@dataclass(frozen=True, slots=True)
class StepCheck:
    """The numbers of a step that are checked before its update, on this rank."""

    step: int  # 0-based
    example_ids: tuple[int, ...]
    loss_sum: Tensor  # of this rank, 0-dim
    grad_norm: Tensor  # of all ranks' gradients, 0-dim

    @classmethod
    def of(cls, batch: StepBatch, loss_sum: Tensor, grad_norm: Tensor) -> "StepCheck":
        """The check of `batch`'s step."""
        ids: list[int] = []
        for micro_batch in batch.micro_batches:
            ids += micro_batch.example_ids
        return cls(batch.step, tuple(ids), loss_sum, grad_norm)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step.

    The tensors are 0-dim, on the device: to read one is to wait for it.
    """

    measured: Measured  # on this rank
    grad_norm: Tensor  # 2-norm of all ranks' gradients before clipping
    # if the loss or gradient was not finite, so that nothing was updated; else None
    failed_check: StepCheck | None


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: StepBatch,
    *,
    objective: Objective,
    recipe: Recipe,
    world: World,
    guard: "HostGuard | DeviceGuard",
    learning_rate: float,
    before_update: Callable[[], None] = lambda: None,
    in_backward: UpdateInBackward | None = None,
) -> StepResult:
    """One optimizer step on every rank: forward, backward, clip, check, update.

    Updates the parameters only if `guard` finds loss and gradient finite. Calls `before_update`
    first, since an async save may still be copying them. `in_backward` updates each parameter
    within the backward, and checks its gradient there.
    """
    set_learning_rate(optimizer, learning_rate)
    if in_backward is not None:
        before_update()
        in_backward.start_step(batch.step)
    measured = forward_backward(model, batch, objective, recipe, world, in_backward)
    return clip_and_update(
        model, optimizer, batch, measured, recipe, world, guard, before_update, in_backward
    )


def forward_backward(
    model: nn.Module,
    batch: StepBatch,
    objective: Objective,
    recipe: Recipe,
    world: World,
    in_backward: UpdateInBackward | None = None,
) -> Measured:
    """Adds the gradients of `batch` to those of the parameters, under the dropout, the noise and
    the rounding (quantization-aware training) of its step; returns what the objective measured on
    this rank.

    All ranks call it.
    """
    round_from_step(model, recipe.quantization_aware, batch.step)
    seed_dropout(recipe.run.seed, batch.step, world.tensor_group_index)
    has_noise = recipe.optimization.neftune_noise_alpha is not None
    noise_seed = recipe.run.seed if has_noise else None
    return accumulate_gradients(
        model, batch, world, objective, noise_seed=noise_seed, in_backward=in_backward
    )


def accumulate_gradients(
    model: nn.Module,
    batch: StepBatch,
    world: World,
    objective: Objective = SFT,
    *,
    noise_seed: int | None = None,
    in_backward: UpdateInBackward | None = None,
) -> Measured:
    """Forward and backward over this rank's micro-batches; returns what the objective has measured
    in them.

    The step's loss is the sum of the objective's over all ranks, divided by what it counts there
    (sft: trained tokens). It is the same number however the batch is split:

        loss = sum over ranks and micro-batches of loss_sum / count

    FSDP and DDP average gradients over the tensor parallel groups, hence the factor
    world.tensor_group_count. A mixture of experts may add its routers' auxiliary loss, which is one
    of the whole step as well.

    `noise_seed`: seeds the noise on embeddings (NEFTune); None adds none.
    """
    pipeline = find_pipeline(unwrap(model))
    forwards = _Forwards(model, batch, world, objective, noise_seed, in_backward)
    if pipeline is not None:
        forwards.run_pipeline(pipeline)
    else:
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            sync = nullcontext() if index == last else without_gradient_sync(model)
            with sync:
                backward(forwards.measure(micro_batch), world)
        refuse_missing_gradients(model)
    forwards.end_step()
    return forwards.total


class _Forwards:
    """The forwards of a step on this rank, and the sums of what was measured in them."""

    def __init__(
        self,
        model: nn.Module,
        batch: StepBatch,
        world: World,
        objective: Objective,
        noise_seed: int | None,
        in_backward: UpdateInBackward | None,
    ) -> None:
        self.total = Measured(torch.zeros((), device=world.device))
        self._model = model
        self._batch = batch
        self._world = world
        self._noise_seed = noise_seed
        self._in_backward = in_backward
        # of the loss, see `accumulate_gradients`
        self._loss_factor = world.tensor_group_count / max(1, objective.count(batch))
        self._objective = objective.prepare(model, lambda: batch.micro_batches, world)
        self._routing = find_routing(unwrap(model))
        has_pipeline = find_pipeline(unwrap(model)) is not None
        # Adds the routers' auxiliary loss of the latest forward to a loss. It is made of what the
        # whole step selects, so with several micro-batches a forward of each runs here before.
        self._add_auxiliary = auxiliary_loss_of_step(
            model,
            self._routing,
            map(self._make_inputs, batch.micro_batches),
            batch.tokens,
            world,
            is_one_forward=len(batch.micro_batches) == 1 and not has_pipeline,
        )

    def measure(self, micro_batch: MicroBatch) -> Tensor:
        """Runs a forward; returns its part of the step's loss, 0-dim."""
        on_device = micro_batch.to(self._world.device)
        inputs = self._make_inputs(on_device)
        measured = self._objective.measure(self._model, on_device, inputs, self._batch)
        if self._in_backward is not None:
            self._in_backward.check_loss(measured.loss_sum)
        self.total += measured.detach()
        return self._add_auxiliary(measured.loss_sum * self._loss_factor)

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Runs all forwards and backwards by the pipeline's schedule; then all its ranks know what
        the last one has measured.
        """
        micro_batches = self._batch.micro_batches
        auxiliary = None
        if self._routing is not None:
            nothing = torch.zeros((), device=self._world.device)
            auxiliary = partial(self._add_auxiliary, nothing)
        pipeline.run(
            [(batch.input_ids.shape[0], batch.input_ids.shape[1]) for batch in micro_batches],
            measure=lambda index: self.measure(micro_batches[index]),
            forward=lambda index: self._model(**self._make_inputs(micro_batches[index])),
            auxiliary=auxiliary,
        )
        sums = [{"": self.total.loss_sum}, self.total.metrics, self.total.maxima]
        loss, metrics, maxima = pipeline.share(sums, type(self._objective).__name__)
        self.total = Measured(loss[""], metrics, maxima)

    def end_step(self) -> None:
        """Counts the step for the routers, if there are any."""
        if self._routing is not None:
            self._routing.end_step()

    def _make_inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The model's keyword arguments for a micro-batch, which may be on the device already."""
        inputs = micro_batch.to(self._world.device).inputs
        if self._noise_seed is not None:
            inputs["noisy_documents"] = NoisyDocuments(
                self._noise_seed,
                self._batch.step,
                micro_batch.example_ids,
                micro_batch.document_lengths,
                micro_batch.first_token,
            )
        return inputs


def clip_and_update(
    model: nn.Module,
    optimizer: Optimizer,
    batch: StepBatch,
    measured: Measured,
    recipe: Recipe,
    world: World,
    guard: "HostGuard | DeviceGuard",
    before_update: Callable[[], None],
    in_backward: UpdateInBackward | None = None,
) -> StepResult:
    """Clips the gradients, and updates the parameters if `guard` finds loss and gradient finite.

    With `in_backward` the backward has updated them, where they were finite: nothing is clipped,
    and `guard` only reports the step.

    All ranks call it.

    `batch`: what the gradients were computed from; `measured`: its losses.
    """
    # Not in each forward_backward, several of which a script may call before an update: what is
    # summed already would be summed again.
    sum_partial_gradients(model, world)
    if pipeline := find_pipeline(unwrap(model)):
        pipeline.sum_copied_gradients()
    unscale(optimizer, world)
    if in_backward:
        grad_norm = in_backward.norm(model)
    else:
        grad_norm = clip_gradients(model, recipe.optimization.max_grad_norm)
    check = StepCheck.of(batch, measured.loss_sum, grad_norm)
    is_skipped = guard.must_skip(check)
    if not is_skipped and in_backward is None:
        before_update()
        seed_rounding(recipe.run.seed, batch.step, world.shard_rank)
        update(optimizer, world)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(measured, grad_norm, check if is_skipped else None)


def seed_dropout(seed: int, step: int, tensor_group: int) -> None:
    """Seeds dropout by the step (0-based) and the tensor-parallel group, whose ranks drop the same,
    so that a resumed run needs no random state.
    """
    seed_from(f"{seed}/{step}/{tensor_group}")


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Sets the rate of the next update, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class HostGuard:
    """Reads every step's loss and gradient norm before its update: on a CPU nothing has to be
    waited for.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_scaled = is_scaled(world)

    def must_skip(self, check: StepCheck) -> bool:
        """Whether any rank's loss, or the gradient, is not finite.

        All ranks call it and return the same.
        """
        if self._is_scaled:  # a gradient may overflow then: the scaler skips that update itself
            value = check.loss_sum
        else:
            value = check.loss_sum + check.grad_norm
        return self._world.any(not bool(torch.isfinite(value)))

    def raise_if_bad(self, keys: Optimization) -> None:
        """Does nothing: every step has been checked already."""


class DeviceGuard:
    """Finds steps that are not finite without making the host wait for the GPU.

    From the first bad step on, the optimizer itself leaves the parameters alone, by the flag that
    torch's fused optimizers read for loss scaling (`found_inf`); the host reads the flag when it
    waits anyway. Only under on_nonfinite: stop, since to count skipped steps the host must know of
    each.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._world = world
        # the first bad step; -1: none yet
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=world.device)
        self._flag = torch.zeros((), device=world.device)
        # steps that the host has not read yet -> their examples
        self._unread: dict[int, tuple[int, ...]] = {}
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def must_skip(self, check: StepCheck) -> bool:
        """Marks the step on the device if any rank's loss, or the gradient, is not finite.

        Always returns False: the host knows only once it has read the mark.
        """
        self._unread[check.step] = check.example_ids
        total = self._world.sum(check.loss_sum.clone())
        is_bad = ~(torch.isfinite(total) & torch.isfinite(check.grad_norm))
        self._first_bad.copy_(
            torch.where(is_bad & (self._first_bad < 0), check.step, self._first_bad)
        )
        self._flag.copy_(torch.maximum(self._flag, is_bad))
        return False

    def raise_if_bad(self, keys: Optimization) -> None:
        """Waits for the device. Raises `UserError` if a step since the last call was not finite."""
        first = int(self._first_bad.item())
        if first >= 0:
            unknown = torch.full((), float("nan"))  # the loss and norm of that step
            handle_nonfinite(
                keys, StepCheck(first, self._unread[first], unknown, unknown), 0, self._world
            )
        self._unread.clear()


def make_guard(optimizer: Optimizer, keys: Optimization, world: World) -> "HostGuard | DeviceGuard":
    """Makes a `DeviceGuard` where it works, else a `HostGuard`.

    A `DeviceGuard` needs an optimizer that reads `found_inf`, and no loss scaler, which would set
    `found_inf` itself. Under CPU offload the update runs on the host, which would read the flag
    before its copy has arrived. Where the optimizer's state is in files, the host waits for every
    update anyway.
    """
    updates_on_gpu = (
        world.device.type == "cuda"
        and not world.sharding.cpu_offload
        and keys.optim_offload == "none"
    )
    reads_flag = OPTIMIZERS[keys.optim].reads_found_inf and not is_scaled(world)
    if updates_on_gpu and reads_flag and keys.on_nonfinite == "stop":
        return DeviceGuard(optimizer, world)
    return HostGuard(world)


def handle_nonfinite(keys: Optimization, check: StepCheck, skipped: int, world: World) -> str:
    """Returns the message about a step that was not finite and is skipped.

    All ranks call it, once one has seen a value that is not finite.

    Raises `UserError` if `on_nonfinite` is stop, or `skipped` steps before are as many as
    `max_skipped_steps`.
    """
    what = (
        f"step {check.step + 1}: the loss or gradient is not finite "
        f"(gradient norm {_show_magnitude(check.grad_norm)}; {_describe_ranks(check, world)})"
    )
    if keys.on_nonfinite == "stop":
        advice = (
            "Look at these examples with `finetune inspect --examples ID,ID`, or lower "
            "learning_rate"
        )
        if keys.optim_in_backward:
            raise UserError(
                f"{what}; by optim_in_backward some parameters were updated with their finite "
                f"gradients before; nothing of this step is saved. {advice}"
            )
        raise UserError(
            f"{what}; the parameters were not updated. {advice}, or set on_nonfinite: skip"
        )
    if skipped >= keys.max_skipped_steps:
        raise UserError(
            f"{what}; {skipped} steps were skipped before it, as many as max_skipped_steps allows"
        )
    return f"{what}; its update is skipped"


def _describe_ranks(check: StepCheck, world: World) -> str:
    """The loss and the examples of each rank whose loss is not finite; of all ranks if the gradient
    alone is not.
    """
    ids = check.example_ids[:SHOWN_IDS]
    more = max(0, len(check.example_ids) - SHOWN_IDS)
    reports = world.gather({"loss": _show_magnitude(check.loss_sum), "ids": ids, "more": more})
    by_rank = dict(enumerate(reports))
    bad = {rank: report for rank, report in by_rank.items() if report["loss"] in ("nan", "inf")}
    places = []
    for rank, report in (bad or by_rank).items():
        more_ids = f" and {report['more']} more" if report["more"] else ""
        places.append(
            f"rank {rank}: loss {report['loss']}, examples "
            f"{', '.join(map(str, report['ids']))}{more_ids}"
        )
    return "; ".join(places)


def _show_magnitude(value: Tensor) -> str:
    """The value without its sign, so that both infinities are inf."""
    return f"{abs(float(value)):g}"
