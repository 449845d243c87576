"""One optimizer step: forward and backward over the micro-batches, then clip and check the
gradients, then update the parameters.

A loss or gradient that is not finite never reaches the parameters. Either the host checks each step
before its update (`HostGuard`); or the optimizer itself skips the update by a flag on the device,
so that the host need not wait for a GPU (`DeviceGuard`).
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
    skip_update,
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

SHOWN_IDS = 16  # how many ids of examples a message names for each rank


@dataclass(frozen=True, slots=True)
class StepCheck:
    """What a guard checks of a step before its update, and what a message about it names."""

    step: int  # 0-based
    example_ids: tuple[int, ...]  # of this rank
    loss_sum: Tensor  # of this rank, 0-dim
    grad_norm: Tensor  # of all ranks' gradients, 0-dim

    @classmethod
    def of(cls, batch: StepBatch, loss_sum: Tensor, grad_norm: Tensor) -> "StepCheck":
        """Makes the check of the step that trains on `batch`."""
        ids: list[int] = []
        for micro_batch in batch.micro_batches:
            ids += micro_batch.example_ids
        return cls(batch.step, tuple(ids), loss_sum, grad_norm)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step. Its tensors are on the device: reading one waits for it."""

    measured: Measured  # on this rank
    grad_norm: Tensor  # 2-norm of all ranks' gradients before clipping, 0-dim
    # set if the guard reports that the loss or gradient was not finite
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
    """Runs one optimizer step: forward, backward, clip, check, update. All ranks call it.

    The parameters are updated only if `guard` finds loss and gradient finite.

    Args:
        model: The model that is trained.
        optimizer: Of the model's parameters.
        batch: The rows of the step.
        objective: The loss.
        recipe: Of the run.
        world: The ranks of the run.
        guard: Checks loss and gradient; `make_guard` makes it.
        learning_rate: Of this step.
        before_update: Is called before parameters change: an async save may still be copying them.
        in_backward: Updates each parameter within the backward, and checks its gradient there;
            None: all parameters are updated after it.
    """
    set_learning_rate(optimizer, learning_rate)
    if in_backward is not None:
        before_update()  # since the backward changes parameters
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
    """Adds the gradients of `batch` to the gradients that the parameters have.

    Dropout and noise on embeddings are the batch's own (`StepBatch.draws`), and rounding in
    quantization-aware training is that of its step. All ranks call it.

    Returns:
        The sums that the objective measured on this rank.
    """
    round_from_step(model, recipe.quantization_aware, batch.step)
    stage = world.rank // world.stage_size
    group = stage * world.tensor_group_count + world.tensor_group_index  # among those of all stages
    seed_dropout(recipe.run.seed, batch.draws, group)
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
    """Runs forward and backward over this rank's micro-batches. All ranks call it.

    The step's loss is the same number however its rows are split:

        loss = (sum of loss_sum over all ranks and micro-batches) / objective.count(batch)

    FSDP and DDP average gradients over `world.tensor_group_count` groups of ranks, so each loss is
    multiplied by that number before its backward. A mixture of experts may add the auxiliary loss
    of its routers, which is also a loss of the whole step.

    Args:
        model: The model that is trained.
        batch: The rows of the step.
        world: The ranks of the run.
        objective: The loss.
        noise_seed: Seeds the noise on embeddings (NEFTune); None: no noise is added.
        in_backward: Updates the parameters within the backward; None: only gradients are computed.

    Returns:
        The sums that the objective measured in this rank's micro-batches.
    """
    pipeline = find_pipeline(unwrap(model))
    forwards = _Forwards(model, batch, world, objective, noise_seed, in_backward)
    if pipeline is not None:
        forwards.run_pipeline(pipeline)
    else:
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            # Replicas all-reduce their gradients only in the last backward.
            context = nullcontext() if index == last else without_gradient_sync(model)
            with context:
                backward(forwards.measure(micro_batch), world)
        refuse_missing_gradients(model)
    forwards.end_step()
    return forwards.total


class _Forwards:
    """The forwards of a step on this rank, and the sums that the objective measured in them."""

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
        # The factor of each micro-batch's loss; `accumulate_gradients` explains it.
        self._loss_factor = world.tensor_group_count / max(1, objective.count(batch))
        self._objective = objective.prepare(model, lambda: batch.micro_batches, world)
        self._routing = find_routing(unwrap(model))
        has_pipeline = find_pipeline(unwrap(model)) is not None
        # Adds the routers' auxiliary loss of the latest forward to a loss. That depends on the
        # experts that the whole step selects. So with several micro-batches this call runs all of
        # them without gradients first, to count the selections.
        self._add_auxiliary = auxiliary_loss_of_step(
            model,
            self._routing,
            map(self._make_inputs, batch.micro_batches),
            world,
            is_one_forward=len(batch.micro_batches) == 1 and not has_pipeline,
        )

    def measure(self, micro_batch: MicroBatch) -> Tensor:
        """Runs the forward of a micro-batch, and adds its sums to `total`.

        Returns its part of the step's loss, 0-dim, with a graph.
        """
        on_device = micro_batch.to(self._world.device)
        inputs = self._make_inputs(on_device)
        measured = self._objective.measure(self._model, on_device, inputs, self._batch)
        if self._in_backward is not None:
            self._in_backward.check_loss(measured.loss_sum)
        self.total += measured.detach()
        return self._add_auxiliary(measured.loss_sum * self._loss_factor)

    def run_pipeline(self, pipeline: Pipeline) -> None:
        """Runs all forwards and backwards by the pipeline's schedule.

        Only the last rank of the pipeline has the head, and measures. Afterwards it shares `total`
        with the pipeline's other ranks.
        """
        micro_batches = self._batch.micro_batches
        auxiliary = None
        if self._routing is not None:
            zero = torch.zeros((), device=self._world.device)
            auxiliary = partial(self._add_auxiliary, zero)  # the auxiliary loss alone
        sizes = []
        for micro_batch in micro_batches:
            rows, tokens = micro_batch.input_ids.shape
            sizes.append((rows, tokens))
        pipeline.run(
            sizes,
            measure=lambda index: self.measure(micro_batches[index]),
            forward=lambda index: self._model(**self._make_inputs(micro_batches[index])),
            auxiliary=auxiliary,
        )
        # `share` takes values by name; the loss needs none.
        loss_by_name = {"": self.total.loss_sum}
        sums = [loss_by_name, self.total.metrics, self.total.maxima]
        # By this key names and shapes are exchanged only once: an objective's are always the same.
        key = type(self._objective).__name__
        shared_loss, metrics, maxima = pipeline.share(sums, key)
        self.total = Measured(shared_loss[""], metrics, maxima)

    def end_step(self) -> None:
        """Lets the routers, if there are any, count the step for the mean of their loss."""
        if self._routing is not None:
            self._routing.end_step()

    def _make_inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Makes the model's keyword arguments for a micro-batch, on the device.

        The micro-batch may be on the host or on the device.
        """
        inputs = micro_batch.to(self._world.device).inputs
        if self._noise_seed is not None:
            inputs["noisy_documents"] = NoisyDocuments(
                self._noise_seed,
                self._batch.draws,
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

    All ranks call it. With `in_backward` the backward has updated the parameters already, except
    where a value was not finite. Then nothing is clipped, and `guard` only decides what is
    reported.

    Args:
        model: The model, with gradients.
        optimizer: Of the model's parameters.
        batch: The rows that the gradients were computed from.
        measured: The sums that `forward_backward` returned for them.
        recipe: Of the run.
        world: The ranks of the run.
        guard: Checks loss and gradient.
        before_update: Is called before parameters change.
        in_backward: Has updated the parameters; None: they are updated here.
    """
    # Here, since a script may call forward_backward several times before an update: summed in each
    # call, the gradients of earlier calls would be summed again.
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
    if is_skipped:
        skip_update(world)
    elif in_backward is None:
        before_update()
        seed_rounding(recipe.run.seed, batch.step, world.shard_rank)
        update(optimizer, world)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(measured, grad_norm, check if is_skipped else None)


def seed_dropout(seed: int, draws: str, tensor_group: int) -> None:
    """Seeds dropout by the batch's `draws` and the index of the tensor-parallel group, counted over
    all pipeline stages.

    So a resumed run needs no saved random state, the ranks of a group drop the same activations,
    and the layers of each stage have masks of their own.
    """
    seed_from(f"{seed}/{draws}/{tensor_group}")


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of the next update for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class HostGuard:
    """Reads the loss and the gradient norm of each step on the host, before its update.

    On a GPU the host waits for them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_scaled = is_scaled(world)

    def must_skip(self, check: StepCheck) -> bool:
        """Returns whether any rank's loss, or the gradient, is not finite.

        All ranks call it, and all get the same answer.
        """
        if self._is_scaled:
            # Scaled gradients may overflow; the loss scaler skips such an update itself.
            checked = check.loss_sum
        else:
            checked = check.loss_sum + check.grad_norm  # finite only if both are
        return self._world.any(not bool(torch.isfinite(checked)))

    def raise_if_bad(self, keys: Optimization) -> None:
        """Does nothing: `must_skip` has reported each bad step already."""


class DeviceGuard:
    """Finds steps that are not finite without making the host wait for the GPU.

    From the first bad step on, the optimizer itself skips all updates: torch's fused optimizers
    read a flag on the device for that (`found_inf`, made for loss scaling). The host reads the
    number of the bad step only when it waits for the device anyway. This serves on_nonfinite: stop
    alone; to skip and count bad steps, the host would have to know of each at once.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._world = world
        # the first bad step; -1: there is none yet
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=world.device)
        self._flag = torch.zeros((), device=world.device)  # 1 from the first bad step on
        # the steps since the last `raise_if_bad` -> the ids of their examples
        self._unread: dict[int, tuple[int, ...]] = {}
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def must_skip(self, check: StepCheck) -> bool:
        """Marks the step on the device if any rank's loss, or the gradient, is not finite.

        Always returns False, since the host does not know: the optimizer skips the update by the
        flag. All ranks call it.
        """
        self._unread[check.step] = check.example_ids
        total = self._world.sum(check.loss_sum.clone())
        is_bad = ~(torch.isfinite(total) & torch.isfinite(check.grad_norm))
        is_first_bad = is_bad & (self._first_bad < 0)
        self._first_bad.copy_(torch.where(is_first_bad, check.step, self._first_bad))
        self._flag.copy_(torch.maximum(self._flag, is_bad))
        return False

    def raise_if_bad(self, keys: Optimization) -> None:
        """Raises `UserError` if a step since the last call was not finite. Waits for the device."""
        first = int(self._first_bad.item())
        if first >= 0:
            unknown = torch.full((), float("nan"))  # the step's loss and norm were not kept
            check = StepCheck(first, self._unread[first], loss_sum=unknown, grad_norm=unknown)
            handle_nonfinite(keys, check, skipped=0, world=self._world)
        self._unread.clear()


def make_guard(optimizer: Optimizer, keys: Optimization, world: World) -> "HostGuard | DeviceGuard":
    """Makes a `DeviceGuard` if it works in this run, else a `HostGuard`.

    A `DeviceGuard` needs `on_nonfinite: stop`, and an optimizer that reads `found_inf`. It cannot
    be combined with a loss scaler, which sets `found_inf` itself. Nor with CPU offload: the update
    runs on the host, which would read the flag before its copy has arrived. Nor with an optimizer
    whose state is in files (`optim_offload`): there the host waits for every update anyway.
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
    """Makes the message about a step that was not finite and is skipped.

    All ranks call it if a value is not finite on any of them.

    Args:
        keys: With `on_nonfinite` and `max_skipped_steps`.
        check: Of the step.
        skipped: How many steps of the run were skipped before this one.
        world: The ranks of the run.

    Raises:
        UserError: If `on_nonfinite` is stop, or `max_skipped_steps` steps are skipped already.
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
    """Describes, for a message, the loss and the examples of each rank whose loss is not finite.

    It describes all ranks if all losses are finite, and only the gradient is not. All ranks call
    it.
    """
    ids = check.example_ids[:SHOWN_IDS]
    more = max(0, len(check.example_ids) - SHOWN_IDS)
    reports = world.gather({"loss": _show_magnitude(check.loss_sum), "ids": ids, "more": more})
    by_rank = dict(enumerate(reports))
    bad = {rank: report for rank, report in by_rank.items() if report["loss"] in ("nan", "inf")}
    texts = []
    for rank, report in (bad or by_rank).items():
        more_ids = f" and {report['more']} more" if report["more"] else ""
        texts.append(
            f"rank {rank}: loss {report['loss']}, examples "
            f"{', '.join(map(str, report['ids']))}{more_ids}"
        )
    return "; ".join(texts)


def _show_magnitude(value: Tensor) -> str:
    """Formats the value without its sign, so that both infinities are "inf"."""
    return f"{abs(float(value)):g}"
