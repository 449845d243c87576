"""What happens to gradients across ranks, in this order: synchronize, unscale, clip, update.

The order is fixed: an optimizer whose state is in files updates one part of the model after
another, so all gradients must be final before its step begins.

Only fp16 has a loss scale (Micikevicius et al. 2018, section 3.2). If a step's gradients
overflow, its scaler skips the step and lowers the scale. This is how it finds the right scale, and
not an error.
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

# A gradient that overflows at this scale, which changes no number, does not fit in fp16 at all.
LOWEST_SCALE = 1.0


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Skips the all-reduce of gradients between replicas in this block; a backward accumulates.

    Used for all micro-batches of a step but the last, and for all of a training service's, which
    adds up gradients itself. FSDP still reduce-scatters in every micro-batch, because unsharded
    gradients would take the memory that it saves; hybrid FSDP2 thus reduces within a replica only.
    Nothing is skipped with one process or FSDP1.
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
    """Returns whether losses are scaled before backward, so that small gradients survive fp16."""
    return world.accelerator.scaler is not None


def unscale(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Divides the gradients by the loss scale, in place; does nothing without a loss scale.

    Called before the gradients are clipped.
    """
    if world.accelerator.scaler is not None:
        world.accelerator.scaler.unscale_(optimizer)


# for example, only parts that read images are trained, and no row has an image
UNREAD = (
    "the rows reach no weight that is trained, as rows without images where only parts that read "
    "images are: train other parts too, or use other rows"
)


def backward(loss: torch.Tensor, world: World) -> None:
    """Adds the gradients of a micro-batch's loss to those of the parameters.

    Raises `UserError` if the loss depends on no trained parameter.
    """
    if not loss.requires_grad:
        raise UserError(UNREAD)
    world.accelerator.backward(loss)


def refuse_missing_gradients(model: nn.Module) -> None:
    """Raises `UserError` if a trained weight got no gradient under DDP.

    DDP averages a bucket of gradients only once all of them are there, so a missing gradient leaves
    the others of its bucket unaveraged. Nothing is checked in other layouts, nor if DDP itself
    looks for weights without gradients (`find_unused_parameters`).
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.find_unused_parameters:
        return
    missing = [n for n, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise UserError(
            f"DDP waits for the gradient of each trained weight, and {len(missing)} got none in "
            f"this step, {missing[0]} the first; choose fsdp_full_shard_auto.yaml, or freeze them "
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

    Raises `UserError` if no parameter has a gradient; FSDP1 and pipelines do not check this.
    """
    bound = float("inf") if max_norm is None else max_norm
    if isinstance(model, Fsdp1):
        return model.clip_grad_norm_(bound)
    groups = group_by_mesh(p for p in model.parameters() if p.grad is not None)
    gradients: list[Any] = [p.grad for p in chain.from_iterable(groups)]
    pipeline = find_pipeline(model)
    if pipeline is None and not gradients:
        raise UserError(UNREAD)
    if pipeline is not None:
        copied = {id(model.get_parameter(name).grad) for name in pipeline.copied}
        norm = _norm_over_meshes(gradients, copied, pipeline.size)
    elif len(groups) == 1:
        norm = gather_whole(_total_norm(gradients))
    else:
        norm = _norm_over_meshes(gradients)
    for parameters in groups:
        nn.utils.clip_grads_with_norm_(parameters, bound, norm)
    return norm.float()


def _norm_over_meshes(
    gradients: list[torch.Tensor], copied: Collection[int] = (), stages: int = 1
) -> torch.Tensor:
    """Computes the 2-norm of gradients that are sharded over different meshes. All ranks call it.

    Sums the squared norms of all ranks' shards. A shard that several ranks hold counts once.

    Args:
        gradients: This rank's gradients, all DTensors.
        copied: The `id` of each gradient that another stage counts.
        stages: The number of pipeline stages, whose ranks hold different layers.
    """
    # number of ranks that hold the same shard -> this rank's shards
    shards_by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        if id(gradient) in copied:
            continue
        assert isinstance(gradient, DTensor)
        shard_count = 1
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            if not isinstance(placement, Replicate):
                shard_count *= size
        copies = dist.get_world_size() // stages // shard_count
        shards_by_copies.setdefault(copies, []).append(gradient.to_local())
    # zero, in the dtype and on the device of norms
    squared_norm = torch.zeros_like(local_part(measure_norm(gradients[0])))
    for copies, shards in shards_by_copies.items():
        squared_norm = squared_norm + _total_norm(shards).square() / copies
    dist.all_reduce(squared_norm)
    return squared_norm.sqrt()


def group_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters by the mesh over which they are sharded; those of no mesh are one group.

    A foreach operation, which updates many tensors at once, accepts DTensors of one mesh only.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Computes the 2-norm of all gradients of one mesh (0-dim; a DTensor if they are sharded)."""
    if not gradients or gradients[0].device.type != "cpu":
        return nn.utils.get_total_norm(gradients)
    return combine_norms([measure_norm(gradient) for gradient in gradients])


def measure_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Computes the 2-norm of one gradient (0-dim; a DTensor if the gradient is sharded).

    The norm is fp64 on a CPU, else fp32. On a CPU, torch's fp32 sum of millions of numbers is up to
    1e-4 too low, and the error depends on the sharding.
    """
    if gradient.device.type == "cpu":
        dtype = torch.float64
    else:
        dtype = torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm


def combine_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    """Computes the 2-norm of all gradients together from the 2-norm of each (0-dim)."""
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def skip_update(world: World) -> None:
    """Forgets that the gradients of this step were unscaled; does nothing without a loss scale.

    The loss scale stays: whether the loss is finite does not depend on it.
    """
    scaler = world.accelerator.scaler
    if scaler is not None:
        scaler.update(new_scale=scaler.get_scale())


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
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    has_overflowed = scaler.get_scale() < scale  # the scaler lowers its scale for no other reason
    if has_overflowed and scale <= LOWEST_SCALE:
        raise UserError(
            f"mixed_precision: fp16: the gradients are not finite at a loss scale of {scale:g} "
            "either, so no update can be made; set mixed_precision: bf16, or lower learning_rate"
        )
