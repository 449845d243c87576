"""FSDP1: its wrapping, its mesh, and its optimizer state gathered without pickles."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_pg_default_device
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._optim_utils import StateInfo, _OptimStateKey, _PosDimTensorInfo
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from finetune.config.layout import Sharding
from finetune.distributed.collective import gather_json
from finetune.distributed.world import World, set_timeouts
from finetune.errors import UserError
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.distributed.parallelize import Values


def shard_as_fsdp1(model: nn.Module, values: "Values", world: World, classes: tuple[str, ...]) -> Fsdp1:
    """Wraps `model`, which is on meta, with FSDP1 and fills its parameters from `values`.

    FSDP1 flattens a unit after materializing it whole, so the units are filled one after another, and no rank holds
    more than one of them beside its shards. Raises `UserError` where this layout cannot hold the model.
    """

    plugin = world.accelerator.state.fsdp_plugin
    names = {parameter: name for name, parameter in model.named_parameters()}  # of tied ones, the first name
    every = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    tied: dict[torch.Tensor, nn.Parameter | None] = {p: None for p, uses in Counter(every).items() if uses > 1}

    def fill(module: nn.Module) -> None:
        for leaf, on_meta in list(module._parameters.items()):
            if on_meta is None:
                continue
            parameter = tied.get(on_meta)
            if parameter is None:
                whole = torch.empty_like(on_meta, device=world.device)
                whole.copy_(values(names[on_meta], tuple(slice(0, size) for size in whole.shape)))
                parameter = nn.Parameter(whole, requires_grad=on_meta.requires_grad)
            if on_meta in tied:  # one tensor under two names; any other must not be kept here, or a rank holds them all
                tied[on_meta] = parameter
            module._parameters[leaf] = parameter
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[leaf] = buffer.to(world.device)

    with torch.no_grad():
        return Fsdp1(
            model,
            device_mesh=_mesh(world),
            sharding_strategy=ShardingStrategy[world.sharding.strategy],
            auto_wrap_policy=_wrap_policy(model, world.sharding, classes),
            mixed_precision=plugin.mixed_precision_policy,
            cpu_offload=plugin.cpu_offload,
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=plugin.forward_prefetch,
            use_orig_params=True,
            param_init_fn=fill,
            device_id=world.device,
        )


def _mesh(world: World) -> Any:
    """A mesh that is given: on CPU torch would take a rank for a node, and HYBRID_SHARD reduce over wrong ranks."""
    if world.sharding.strategy != "HYBRID_SHARD":
        return init_device_mesh(world.device.type, (world.size,))
    shard = world.local_size
    if shard == world.size or shard == 1:
        raise UserError(
            f"{world.sharding.source}: HYBRID_SHARD shards within a node and replicates over nodes, but this is "
            f"{counted(world.size // shard, 'node')} of {counted(shard, 'rank')}; use FULL_SHARD, or FSDP2 "
            "with parallelism_config sizes"
        )
    mesh = init_device_mesh(world.device.type, (world.size // shard, shard), mesh_dim_names=("replicate", "shard"))
    set_timeouts(world.collective_timeout)
    return mesh


def _wrap_policy(model: nn.Module, sharding: Sharding, classes: tuple[str, ...]) -> Any:
    if sharding.wrapping == "NO_WRAP":
        layers: Any = None
    elif sharding.wrapping == "SIZE_BASED_WRAP":
        layers = functools.partial(size_based_auto_wrap_policy, min_num_params=sharding.min_num_params)
    else:
        layer_classes = {type(module) for module in model.modules() if type(module).__name__ in classes}
        layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes)
    if len({parameter.dtype for parameter in model.parameters()}) == 1:
        return layers

    # A flat parameter has one dtype: fp32 adapters are units of their own inside the layer of their bf16 base.
    def is_adapter_leaf(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        return bool(own) and not list(module.children()) and all(parameter.requires_grad for parameter in own)

    adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter_leaf)
    return functools.partial(_or_policy, policies=[policy for policy in (layers, adapters) if policy is not None])


@contextmanager
def optimizer_state_without_pickles() -> Iterator[None]:
    """Within it, `get_optimizer_state_dict` of FSDP1 exchanges the states' names, shapes and scalars as JSON.

    torch's own `all_gather_object` sends pickles, and unpickling runs what another rank puts into them.
    """
    pickled = dist.all_gather_object
    dist.all_gather_object = _all_gather_json  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = pickled


def _all_gather_json(gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    """`dist.all_gather_object` for the two kinds of value that FSDP1 sends: keys, and states by parameter name."""
    is_states = isinstance(value, dict)
    plain = {name: _encode(info) for name, info in value.items()} if is_states else value
    for index, received in enumerate(gather_json(plain, group, _get_pg_default_device(group))):
        if is_states:
            gathered[index] = {name: _decode(info) for name, info in received.items()}
        else:
            gathered[index] = [_OptimStateKey(tuple(names), is_managed) for names, is_managed in received]


def _encode(info: StateInfo) -> dict[str, Any]:
    return {
        "tensors": {
            name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in info.tensors.items()
        },
        "scalars": {
            name: [tensor.item(), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in info.scalar_tensors.items()
        },
        "values": info.non_tensors,
    }


def _decode(plain: dict[str, Any]) -> StateInfo:
    return StateInfo(
        {
            name: _PosDimTensorInfo(torch.Size(shape), getattr(torch, dtype))
            for name, (shape, dtype) in plain["tensors"].items()
        },
        {name: torch.tensor(number, dtype=getattr(torch, dtype)) for name, (number, dtype) in plain["scalars"].items()},
        plain["values"],
    )
