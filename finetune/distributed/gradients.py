"""What happens to gradients across ranks, in order: synchronize, unscale, clip, update.

The order is fixed. An optimizer with its state in files updates one part of the model after
another, so all gradients must be final before its step begins.

Only fp16 has a loss scale (Micikevicius et al. 2018, section 3.2). Its scaler skips a step whose
gradients overflow and lowers the scale: that is how it finds the right scale, not an error.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor, Replicate

from finetune.distributed.model_parts import gather_whole, local_part
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import World
from finetune.errors import UserError

LOWEST_SCALE = 1.0  # a gradient that overflows fp16 without any scaling does not fit in fp16 at all


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """In this block a backward accumulates gradients without an all-reduce between replicas. For
    all micro-batches of a step but the last.

    DDP skips the reduction. FSDP still reduce-scatters in every micro-batch, because unsharded
    gradients would take the memory that it saves. Hybrid FSDP2 reduces within a replica only.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)
    else:
        yield


def is_scaled(world: World) -> bool:
    """Whether losses are scaled before backward, so that small gradients survive fp16."""
    return world.accelerator.scaler is not None


def unscale(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Divides the gradients by the scale, in place, before they are clipped."""
    if world.accelerator.scaler is not None:
        world.accelerator.scaler.unscale_(optimizer)


# as where parts that read images alone are trained, and no row has one
UNREAD = (
    "the rows reach no weight that is trained, as rows without images where only parts that read "
    "images are: train other parts too, or use other rows"
)


def backward(loss: torch.Tensor, world: World) -> None:
    """Adds the gradients of a micro-batch's loss.

    Raises `UserError` where it depends on nothing that is trained.
    """
    if not loss.requires_grad:
        raise UserError(UNREAD)
    world.accelerator.backward(loss)


def refuse_missing_gradients(model: nn.Module) -> None:
    """Raises `UserError` where a trained weight got no gradient under DDP, which then averages none
    that stands in one bucket with it. No effect in other layouts, or where DDP looks for such.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.find_unused_parameters:
        return
    missing = [n for n, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise UserError(
            f"DDP waits for the gradient of each trained weight, and {len(missing)} got none in "
            f"this step, {missing[0]} the first; choose fsdp_full_shard.yaml, or freeze them "
            "(frozen_modules)"
        )


def clip_gradients(model: nn.Module, max_norm: float | None) -> torch.Tensor:
    """Clips gradients to a global 2-norm of `max_norm` and returns the norm before clipping.

    The norm is global: it includes every shard on every rank (Pascanu et al. 2013, algorithm 1).

    Args:
        model: The model as it trains, wrapped or sharded.
        max_norm: Upper bound of the 2-norm; None measures without clipping.

    Returns:
        0-dim fp32 tensor on the device. Reading it synchronizes with the device.

    Raises `UserError` where nothing has a gradient.
    """
    bound = float("inf") if max_norm is None else max_norm
    if isinstance(model, Fsdp1):
        return model.clip_grad_norm_(bound)
    by_mesh = group_by_mesh(p for p in model.parameters() if p.grad is not None)
    gradients: list[Any] = [p.grad for p in chain.from_iterable(by_mesh)]
    pipeline = find_pipeline(model)
    if pipeline is None and not gradients:
        raise UserError(UNREAD)
    if pipeline is not None:
        copied = {id(model.get_parameter(name).grad) for name in pipeline.copied}
        norm = _norm_over_meshes(gradients, copied, pipeline.size)
    elif len(by_mesh) == 1:
        norm = gather_whole(_total_norm(gradients))
    else:
        norm = _norm_over_meshes(gradients)
    for parameters in by_mesh:
        nn.utils.clip_grads_with_norm_(parameters, bound, norm)
    return norm.float()


def _norm_over_meshes(
    gradients: list[torch.Tensor], copied: Collection[int] = (), stages: int = 1
) -> torch.Tensor:
    """Computes the 2-norm of gradients that are sharded over different meshes.

    All-reduces the squares of each rank's shards. A shard that several ranks hold counts once.

    Args:
        gradients: DTensors.
        copied: `id` of each gradient that another stage counts.
        stages: Groups of ranks that hold different layers.
    """
    shards_by_copies: dict[int, list[torch.Tensor]] = {}  # ranks that hold the shard -> shards
    for gradient in gradients:
        if id(gradient) in copied:
            continue
        assert isinstance(gradient, DTensor)
        shards = 1
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            if not isinstance(placement, Replicate):
                shards *= size
        copies = dist.get_world_size() // stages // shards
        shards_by_copies.setdefault(copies, []).append(gradient.to_local())
    squares = torch.zeros_like(local_part(measure_norm(gradients[0])))
    for copies, own in shards_by_copies.items():
        squares = squares + _total_norm(own).square() / copies
    dist.all_reduce(squares)
    return squares.sqrt()


def group_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters by the mesh that they are sharded over, since a foreach operation accepts
    one mesh only.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Computes the 2-norm of gradients of one mesh: a DTensor if they are sharded."""
    if not gradients or gradients[0].device.type != "cpu":
        return nn.utils.get_total_norm(gradients)
    return combine_norms([measure_norm(gradient) for gradient in gradients])


def measure_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Computes the 2-norm of one gradient (0-dim); for a sharded gradient a DTensor of the shards'
    norms.

    On a CPU it is computed in fp64: torch's fp32 sum of millions of numbers is up to 1e-4 too low,
    and by how much depends on the sharding.
    """
    if gradient.device.type == "cpu":
        dtype = torch.float64
    else:
        dtype = torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm


def combine_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    """Computes the 2-norm of all gradients from that of each."""
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def update(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Steps the optimizer.

    Under fp16 it skips the step if a gradient overflowed, and adjusts the loss scale.

    Raises:
        UserError: On all ranks, if a gradient overflows at `LOWEST_SCALE`: the scale would be
            halved forever.
    """
    scaler = world.accelerator.scaler
    if scaler is None:
        optimizer.step()
        return
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if before > scaler.get_scale() and before <= LOWEST_SCALE:
        raise UserError(
            f"mixed_precision: fp16: the gradients are not finite at a loss scale of {before:g} "
            "either, so no update can be made; set mixed_precision: bf16, or lower learning_rate"
        )
