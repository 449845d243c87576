"""A loss or gradient that is not finite never reaches the parameters."""

import math
from dataclasses import dataclass

import torch

from finetune.config.schema import Optimization
from finetune.constants import OPTIMIZERS
from finetune.data.batches import StepBatch
from finetune.distributed.gradients import is_scaled
from finetune.distributed.world import World
from finetune.errors import UserError

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

    Under CPU offload the update runs on the host, which would read the device's flag before its copy has arrived. Where the state
    is in files, the host waits for every update anyway.
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
            "by optim_in_backward some parameters were updated with their finite gradients before; nothing of this step is saved"
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
