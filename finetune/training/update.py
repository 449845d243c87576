"""The update of a step: gradients are clipped and checked, then the parameters updated, at its end or in the backward.

A loss or gradient that is not finite never reaches the parameters. On a CPU the host looks before each update; on a GPU
the optimizer itself leaves the parameters alone, so that the host need not wait.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Optimization, Recipe
from finetune.data.batches import StepBatch
from finetune.distributed.gradients import (
    clip_gradients,
    combine_norms,
    is_scaled,
    measure_norm,
    unscale,
    update,
    whole_norm,
)
from finetune.distributed.model_parts import local_part
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.optim.optimizers import seed_rounding
from finetune.training.objectives.objective import Measured

SHOWN_IDS = 16  # ids of examples named for each rank


@dataclass(frozen=True, slots=True)
class StepCheck:
    """What is checked of a step before its update, on this rank."""

    step: int  # 0-based
    example_ids: tuple[int, ...]
    loss_sum: torch.Tensor  # of this rank, 0-dim
    grad_norm: torch.Tensor  # of all ranks' gradients, 0-dim

    @classmethod
    def of(cls, batch: StepBatch, loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> "StepCheck":
        """The check of `batch`'s step."""
        ids = tuple(example_id for micro_batch in batch.micro_batches for example_id in micro_batch.example_ids)
        return cls(batch.step, ids, loss_sum, grad_norm)


class HostGuard:
    """Reads every step's loss and gradient norm before its update: on a CPU nothing has to be waited for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scaled = is_scaled(world)  # then a gradient may overflow: the scaler skips that step's update

    def must_skip(self, check: StepCheck) -> bool:
        """Whether any rank's loss, or the gradient, is not finite. All ranks call it and return the same."""
        values = check.loss_sum if self._scaled else check.loss_sum + check.grad_norm
        return self._world.any(not bool(torch.isfinite(values)))

    def raise_if_bad(self, policy: Optimization) -> None:
        """Every step has been checked already."""


class DeviceGuard:
    """Finds steps that are not finite without making the host wait for the GPU.

    From the first bad step on, the optimizer itself leaves the parameters alone, by the flag that torch's fused
    optimizers read for loss scaling (`found_inf`); the host reads the flag when it waits anyway. Only under
    on_nonfinite: stop, since to count skipped steps the host must know of each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._world = world
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=world.device)  # the first bad step
        self._flag = torch.zeros((), device=world.device)
        self._unread: dict[int, tuple[int, ...]] = {}  # steps that the host has not read yet -> their examples
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def must_skip(self, check: StepCheck) -> bool:
        """Marks the step on the device where any rank's loss, or the gradient, is not finite. The host knows later."""
        self._unread[check.step] = check.example_ids
        total = self._world.sum(check.loss_sum.clone())
        is_bad = ~(torch.isfinite(total) & torch.isfinite(check.grad_norm))
        self._first_bad.copy_(torch.where(is_bad & (self._first_bad < 0), check.step, self._first_bad))
        self._flag.copy_(torch.maximum(self._flag, is_bad))
        return False

    def raise_if_bad(self, policy: Optimization) -> None:
        """Waits for the device. Raises `UserError` where a step since the last call was not finite."""
        first = int(self._first_bad.item())
        if first >= 0:
            unknown = torch.full((), float("nan"))
            handle_nonfinite(policy, StepCheck(first, self._unread[first], unknown, unknown), 0, self._world)
        self._unread.clear()


def make_guard(optimizer: torch.optim.Optimizer, policy: Optimization, world: World) -> HostGuard | DeviceGuard:
    """The guard of a run. The device's needs an optimizer that reads the flag, which a loss scaler would set itself.

    Under CPU offload the update runs on the host, which would read the device's flag before its copy has arrived. Where
    the state is in files, the host waits for every update anyway.
    """
    updates_on_gpu = world.device.type == "cuda" and not world.sharding.cpu_offload and policy.optim_offload == "none"
    on_device = updates_on_gpu and policy.on_nonfinite == "stop" and not is_scaled(world)
    reads_flag = OPTIMIZERS[policy.optim].reads_found_inf
    return DeviceGuard(optimizer, world) if on_device and reads_flag else HostGuard(world)


def handle_nonfinite(policy: Optimization, check: StepCheck, skipped: int, world: World) -> str:
    """The message about a step that was skipped. All ranks call it, once one has seen a value that is not finite.

    Raises `UserError` where `on_nonfinite` is stop, or `max_skipped_steps` have been skipped already.
    """
    ids, more = check.example_ids[:SHOWN_IDS], max(0, len(check.example_ids) - SHOWN_IDS)
    reports = world.gather({"loss": _describe(check.loss_sum), "ids": ids, "more": more})
    bad = {rank: r for rank, r in enumerate(reports) if r["loss"] in ("nan", "inf")} or dict(enumerate(reports))
    places = "; ".join(
        f"rank {rank}: loss {r['loss']}, examples {', '.join(map(str, r['ids']))}"
        + (f" and {r['more']} more" if r["more"] else "")
        for rank, r in bad.items()
    )
    what = (
        f"step {check.step + 1}: the loss or gradient is not finite "
        f"(gradient norm {_describe(check.grad_norm)}; {places})"
    )
    if policy.on_nonfinite == "stop":
        kept = (
            "by optim_in_backward some parameters were updated with their finite gradients before; nothing "
            "of this step is saved"
            if policy.optim_in_backward
            else "the parameters were not updated"
        )
        raise UserError(
            f"{what}; {kept}. Look at these examples with `finetune inspect --examples ID,ID`, or lower learning_rate"
            + ("" if policy.optim_in_backward else ", or set on_nonfinite: skip")
        )
    if skipped >= policy.max_skipped_steps:
        raise UserError(f"{what}; {skipped} steps were skipped before it, as many as max_skipped_steps allows")
    return f"{what}; its update is skipped"


def _describe(value: torch.Tensor) -> str:
    magnitude = abs(float(value))
    return f"{magnitude:g}" if math.isfinite(magnitude) else "nan" if math.isnan(magnitude) else "inf"


class UpdateInBackward:
    """While entered, every backward updates each parameter of `optimizer` as soon as its gradient is known.

    One step is one backward.

    A gradient that is not finite never reaches its parameter, and nothing is updated after it: by the flag that the
    optimizer reads on the device, else by the host, which then waits for every gradient's norm. The guard of the step
    reports it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World) -> None:
        self._optimizer, self._seed, self._world = optimizer, recipe.run.seed, world
        self._reads_flag = OPTIMIZERS[recipe.optimization.optim].reads_found_inf
        # Where the guard of the run has set a flag on the optimizer already, it is the same one.
        flag: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        # With the parameters: under CPU offload the host updates, and would read a GPU's flag before it has arrived.
        where = torch.device("cpu") if world.sharding.cpu_offload else world.device
        self._flag = torch.zeros((), device=where) if flag is None else flag
        if self._reads_flag and flag is None:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._step = 0
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks = ExitStack()
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}  # its index, and its group

    def __enter__(self) -> "UpdateInBackward":
        # The optimizer's parameters are the shards, also while the model's own are gathered.
        pairs = [(parameter, group) for group in self._optimizer.param_groups for parameter in group["params"]]
        self._places = {parameter: (index, group) for index, (parameter, group) in enumerate(pairs)}
        for parameter in self._places:
            hook = parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def start_step(self, step: int) -> None:
        """Begins step `step` (0-based), after which one backward follows."""
        self._step = step
        self._norms.clear()

    def check_loss(self, loss_sum: torch.Tensor) -> None:
        """Keeps the parameters from this step's backward if any rank's loss is not finite. All ranks call it."""
        self._mark_unless(torch.isfinite(self._world.sum(loss_sum.detach().clone())))

    def norm(self, model: nn.Module) -> torch.Tensor:
        """The 2-norm of all gradients of the step over every shard (0-dim fp32, on the device). All ranks call it."""
        return whole_norm(combine_norms([self._norms[p] for p in model.parameters() if p in self._norms])).float()

    def _update(self, parameter: Any) -> None:
        gradient: torch.Tensor = parameter.grad
        norm = self._norms[parameter] = measure_norm(gradient)
        self._mark_unless(torch.isfinite(local_part(norm)))
        if self._reads_flag or not bool(self._flag):
            index, group = self._places[parameter]
            seed_rounding(self._seed, self._step, self._world.shard_rank, index)
            with self._only(parameter, group):
                self._optimizer.step()
        if gradient.is_cuda:  # hybrid sharding reduces on one stream and calls this on another
            local_part(gradient).record_stream(torch.cuda.current_stream())
        parameter.grad = None

    def _mark_unless(self, is_finite: torch.Tensor) -> None:
        self._flag.copy_(torch.maximum(self._flag, ~is_finite))

    @contextmanager
    def _only(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[None]:
        """Within it the optimizer has this parameter alone, so that its step does not look through all of them."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": [parameter]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. The tensors are 0-dim, on the device: to read one is to wait for it."""

    measured: Measured  # on this rank
    grad_norm: torch.Tensor  # 2-norm of all ranks' gradients before clipping
    failed_check: StepCheck | None  # where the loss or gradient was not finite, and nothing was updated


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of the next update, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_and_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    measured: Measured,
    recipe: Recipe,
    world: World,
    guard: HostGuard | DeviceGuard,
    before_update: Callable[[], None] = lambda: None,
    in_backward: UpdateInBackward | None = None,
) -> StepResult:
    """Clips the gradients, and updates the parameters where `guard` finds loss and gradient finite. All ranks call it.

    batch, measured: what the gradients are of.
    """
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
