"""A loss or gradient that is not finite never reaches the parameters."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from finetune.data.batches import StepBatch
from finetune.distributed.grad_scaler import is_scaled
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.recipe.schema import Optimization

SHOWN = 16  # ids of examples named for each rank


@dataclass(frozen=True, slots=True)
class Suspect:
    """A step (0-based) as this rank sees it: the ids of its examples, its summed loss, and the norm of all gradients."""

    step: int
    ids: tuple[int, ...]
    loss_sum: torch.Tensor
    norm: torch.Tensor


def suspect(batch: StepBatch, loss_sum: torch.Tensor, norm: torch.Tensor) -> Suspect:
    """What is looked at of a step before its update."""
    ids = tuple(id_ for micro_batch in batch.micro_batches for id_ in micro_batch.example_ids)
    return Suspect(batch.step, ids, loss_sum, norm)


class HostGuard:
    """Looks at every step before its update: on a CPU nothing has to be waited for."""

    def __init__(self, world: World) -> None:
        self._scaled = is_scaled(world)  # then a gradient may overflow: the scaler leaves that step out

    def is_bad(self, step: Suspect) -> bool:
        """Whether this rank's loss or the gradient of all ranks is not finite."""
        values = step.loss_sum if self._scaled else step.loss_sum + step.norm
        return not bool(torch.isfinite(values))

    def check(self, policy: Optimization) -> None:
        """Nothing is left to look at."""


READS_NO_FLAG = ("adamw_torch", "adamw_8bit")  # optimizers that do not know found_inf


class DeviceGuard:
    """Finds steps that are not finite without making the host wait for the GPU.

    The optimizer itself is told to leave the parameters alone, by the flag that torch's fused optimizers read for loss
    scaling (`found_inf`), from the first bad step on; the host looks at the flag when it waits anyway. Only under
    on_nonfinite: stop, since to count skipped steps the host must know of each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._world = world
        self._first = torch.full((), -1, dtype=torch.int64, device=world.device)  # the first bad step
        self._flag = torch.zeros((), device=world.device)
        self._unseen: dict[int, tuple[int, ...]] = {}  # steps that the host has not looked at -> their examples
        optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def is_bad(self, step: Suspect) -> bool:
        """Marks the step on the device where any rank's loss, or the gradient, is not finite. Not known here yet."""
        self._unseen[step.step] = step.ids
        total = self._world.sum(step.loss_sum.clone())
        bad = ~(torch.isfinite(total) & torch.isfinite(step.norm))
        self._first.copy_(torch.where(bad & (self._first < 0), step.step, self._first))
        self._flag.copy_(torch.maximum(self._flag, bad))
        return False

    def check(self, policy: Optimization) -> None:
        """Waits for the device. Raises `UserError` where a step since the last look was not finite."""
        first = int(self._first.item())
        if first >= 0:
            unknown = torch.full((), float("nan"))
            refuse_or_skip(policy, Suspect(first, self._unseen[first], unknown, unknown), 0, self._world)
        self._unseen.clear()


def guard_of(optimizer: torch.optim.Optimizer, policy: Optimization, world: World) -> HostGuard | DeviceGuard:
    """The guard of a run. The device's needs an optimizer that reads the flag, which a loss scaler would set itself.

    Under CPU offload the update runs on the host, which would read the device's flag before its copy has arrived.
    """
    updates_on_gpu = world.device.type == "cuda" and not world.sharding.cpu_offload
    on_device = updates_on_gpu and policy.on_nonfinite == "stop" and not is_scaled(world)
    return DeviceGuard(optimizer, world) if on_device and policy.optim not in READS_NO_FLAG else HostGuard(world)


def refuse_or_skip(policy: Optimization, step: Suspect, skipped: int, world: World) -> str:
    """What is told of a step that is left out. All ranks call it, once one has seen a value that is not finite.

    Raises `UserError` where `on_nonfinite` is stop, or `max_skipped_steps` have been left out already.
    """
    ids, more = step.ids[:SHOWN], max(0, len(step.ids) - SHOWN)
    reports = world.gather({"loss": _value(step.loss_sum), "ids": ids, "more": more})
    culprits = {rank: r for rank, r in enumerate(reports) if r["loss"] in ("nan", "inf")} or dict(enumerate(reports))
    places = "; ".join(
        f"rank {rank}: loss {r['loss']}, examples {_named(r['ids'])}" + (f" and {r['more']} more" if r["more"] else "")
        for rank, r in culprits.items()
    )
    what = f"step {step.step + 1}: the loss or gradient is not finite (gradient norm {_value(step.norm)}; {places})"
    if policy.on_nonfinite == "stop":
        raise UserError(
            f"{what}; the parameters were not updated. Look at these examples with "
            "`finetune inspect --examples ID,ID`, lower learning_rate, or set on_nonfinite: skip"
        )
    if skipped >= policy.max_skipped_steps:
        raise UserError(f"{what}; {skipped} steps were skipped before it, as many as max_skipped_steps allows")
    return f"{what}; its update is skipped"


def _value(tensor: torch.Tensor) -> str:
    value = abs(float(tensor))
    return f"{value:g}" if math.isfinite(value) else "nan" if math.isnan(value) else "inf"


def _named(ids: Iterable[int]) -> str:
    return ", ".join(str(id_) for id_ in ids)
