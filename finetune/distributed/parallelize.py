"""Sharding or replicating a finished model over the ranks, and what training then does differently
for each layout.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from finetune.config.layout import Sharding
from finetune.config.module_names import base_name
from finetune.distributed.join import set_timeouts
from finetune.distributed.model_parts import (
    Values,
    decoder_layers,
    find_local_slices,
    has_trained,
    head_of,
    local_part,
    other_parts,
    place_like,
    tied_names,
    unwrap,
)
from finetune.distributed.pipeline import keep_own_layers
from finetune.distributed.tensor_parallel import divide_matrices
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.units import counted

NOTHING: Mapping[str, torch.Tensor] = {}


def shard_as_fsdp1(
    model: nn.Module, values: Values, world: World, classes: tuple[str, ...]
) -> Fsdp1:
    """Wraps `model`, which is on meta, with FSDP1 and fills its parameters from `values`.

    FSDP1 flattens a unit after materializing it whole, so the units are filled one after another,
    and no rank holds more than one of them beside its shards. Raises `UserError` where this layout
    cannot hold the model.
    """

    plugin = world.accelerator.state.fsdp_plugin
    # of tied ones, the first name
    names = {parameter: name for name, parameter in model.named_parameters()}
    every = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    tied: dict[torch.Tensor, nn.Parameter | None] = {
        p: None for p, uses in Counter(every).items() if uses > 1
    }

    def fill(module: nn.Module) -> None:
        for leaf, on_meta in list(module._parameters.items()):
            if on_meta is None:
                continue
            parameter = tied.get(on_meta)
            if parameter is None:
                whole = torch.empty_like(on_meta, device=world.device)
                whole.copy_(values(names[on_meta], tuple(slice(0, size) for size in whole.shape)))
                parameter = nn.Parameter(whole, requires_grad=on_meta.requires_grad)
            # one tensor under two names; any other must not be kept here, or a rank holds them all
            if on_meta in tied:
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
    """A mesh that is given: on CPU torch would take a rank for a node, and HYBRID_SHARD reduce over
    wrong ranks.
    """
    if world.sharding.strategy != "HYBRID_SHARD":
        return init_device_mesh(world.device.type, (world.size,))
    shard = world.local_size
    if shard == world.size or shard == 1:
        raise UserError(
            f"{world.sharding.source}: HYBRID_SHARD shards within a node and replicates over "
            f"nodes, but this is {counted(world.size // shard, 'node')} of "
            f"{counted(shard, 'rank')}; use FULL_SHARD, or FSDP2 with parallelism_config sizes"
        )
    mesh = init_device_mesh(
        world.device.type, (world.size // shard, shard), mesh_dim_names=("replicate", "shard")
    )
    set_timeouts(world.collective_timeout)
    return mesh


def _wrap_policy(model: nn.Module, sharding: Sharding, classes: tuple[str, ...]) -> Any:
    if sharding.wrapping == "NO_WRAP":
        layers: Any = None
    elif sharding.wrapping == "SIZE_BASED_WRAP":
        layers = functools.partial(
            size_based_auto_wrap_policy, min_num_params=sharding.min_num_params
        )
    else:
        layer_classes = {
            type(module) for module in model.modules() if type(module).__name__ in classes
        }
        layers = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layer_classes
        )
    if len({parameter.dtype for parameter in model.parameters()}) == 1:
        return layers

    # A flat parameter has one dtype: fp32 adapters are units of their own inside the layer of their
    # bf16 base.
    def is_adapter_leaf(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        return (
            bool(own)
            and not list(module.children())
            and all(parameter.requires_grad for parameter in own)
        )

    adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter_leaf)
    return functools.partial(
        _or_policy, policies=[policy for policy in (layers, adapters) if policy is not None]
    )


def parallelize(
    model: nn.Module,
    values: Values,
    world: World,
    unfilled: frozenset[str] = frozenset(),
    shared: Mapping[str, torch.Tensor] = NOTHING,
) -> nn.Module:
    """Shards or replicates a model over the ranks and fills every rank's shards.

    Args:
        model: On the meta device.
        values: Reads a named parameter within given slices.
        world: The ranks and their layout.
        unfilled: Names of parameters that get memory but no values (not under FSDP1).
        shared: Of `frozen_parts`: what frozen parameters are, without memory of their own (not
            under FSDP1).

    Returns:
        The model to train: the same object under FSDP2 and single, its wrapper under FSDP1 and DDP.

    Raises:
        UserError: The layout names a class that the model does not have.
    """
    classes = find_wrap_classes(model, world.sharding)
    if world.sharding.layout == "fsdp2":
        return _fsdp2(model, values, world, classes, unfilled, shared)
    if world.sharding.layout == "fsdp1":
        sharded = shard_as_fsdp1(model, values, world, classes)
        with _keep_recipe_dtype(world):
            return world.accelerator.prepare_model(sharded)  # type: ignore[no-any-return]
    _materialize(model, values, world.device, world.device, unfilled, shared)
    if not has_trained(model):
        return model  # each rank has all of it, and DDP refuses a model without gradients to reduce
    # Rotary frequencies are computed alike on every rank: DDP need not send them around in every
    # forward.
    buffers = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)  # type: ignore[no-untyped-call]
    # evaluation_mode leaves DDP out, in which Accelerate wraps the model of a single process too
    # where a launcher started it on a CPU.
    alone = world.sharding.layout == "single"
    prepared: nn.Module = world.accelerator.prepare_model(model, evaluation_mode=alone)
    return prepared


def find_wrap_classes(model: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """The classes that become units of sharding: those that the config names, else the model's own
    decoder layers.

    Raises `UserError` where the config names a class that no module of the model has.
    """
    own = tuple(sorted({type(module).__name__ for module in decoder_layers(model)}))
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in sharding.wrap_classes if name not in present]
    if missing and sharding.is_fsdp and sharding.wrapping == "TRANSFORMER_BASED_WRAP":
        raise UserError(
            f"{sharding.source}: wraps {', '.join(missing)}, but {type(model).__name__} is made of "
            f"{', '.join(own)}; name that class, or remove the key, and the class is found"
        )
    if sharding.wrapping == "SIZE_BASED_WRAP":
        return _classes_of_size(model, sharding.min_num_params)
    # a unit each, which text never gathers
    beside = tuple(type(part).__name__ for part in other_parts(model))
    return (*(sharding.wrap_classes or own), *beside)


def _classes_of_size(model: Any, min_num_params: int) -> tuple[str, ...]:
    """The classes of modules with at least `min_num_params` parameters.

    Leaves out lists of modules, which have no forward, and what holds the embedding, which is a
    unit of its own.
    """
    embedding = model.get_input_embeddings()
    large = {
        type(module).__name__
        for module in model.modules()
        if sum(p.numel() for p in module.parameters()) >= min_num_params
        and not isinstance(module, nn.ModuleList)
        and all(inner is not embedding for inner in module.modules())
    }
    return tuple(sorted(large - {type(head_of(model)).__name__}))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of `module`'s FSDP2 unit, in the compute dtype, for the block.

    All ranks enter it.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def list_groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that one unit of FSDP2 gathers at once; torch before 2.13 has at
    most one.
    """
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Gathers all parameters under FSDP2, in the compute dtype, and keeps them for the block.

    All ranks enter it.

    Forwards within it meet no other rank, so that each rank may run as many as it needs.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [(unit, unit._get_fsdp_state(), list_groups(unit)) for unit in units]
    before = [
        (state._auto_reshard_after_forward, [group.post_forward_mesh_info for group in groups])
        for _, state, groups in states
    ]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for (unit, state, groups), (is_auto, infos) in zip(states, before, strict=True):
            state._auto_reshard_after_forward = is_auto
            for group, info in zip(groups, infos, strict=True):
                group.post_forward_mesh_info = info
            unit.reshard()


def reshard(model: nn.Module) -> None:
    """Reshards each unit of FSDP2: after a forward without a backward the root's parameters are
    still gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def unwrapped_call(model: nn.Module, world: World) -> Iterator[None]:
    """Around calls of `unwrap(model)` itself, such as `generate`, which bypass the wrapper's
    forward.

    Does what FSDP1's forward does: gathers the root's own parameters (embedding, norm, head) and
    casts the inputs.
    """
    if not isinstance(model, Fsdp1):
        yield
        return
    compute_dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[
        world.sharding.mixed_precision
    ]
    with (
        Fsdp1.summon_full_params(model, recurse=False, writeback=False),
        torch.autocast(world.device.type, dtype=compute_dtype, enabled=compute_dtype is not None),
    ):
        yield


def count_wrapped_units(model: nn.Module, world: World) -> dict[str, int]:
    """Counts the units of sharding by their class, for the log."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            name = type(module).__name__.removeprefix("FSDP")
        elif isinstance(module, Fsdp1):
            name = type(module.module).__name__
        else:
            continue
        counts[name] = counts.get(name, 0) + 1
    return counts


@contextmanager
def _keep_recipe_dtype(world: World) -> Iterator[None]:
    """Keeps Accelerate from converting trained parameters to fp32 under FSDP's mixed precision.

    The recipe's `dtype` decides here, as it does under DDP. The compute dtype is in the plugin's
    policy.
    """
    state = world.accelerator.state
    before = state._mixed_precision
    state._mixed_precision = "no"
    try:
        yield
    finally:
        state._mixed_precision = before


def _fsdp2(
    model: nn.Module,
    values: Values,
    world: World,
    classes: tuple[str, ...],
    unfilled: frozenset[str],
    shared: Mapping[str, torch.Tensor],
) -> nn.Module:
    """Wraps each module of `classes` (the decoder layers) and the model by FSDP2, through
    Accelerate, and fills the shards. See `parallelize`.
    """
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    layers = decoder_layers(model)
    divide_matrices(model, world)
    keep_own_layers(model, layers, world)
    plugin: Any = world.accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = list(classes)
    plugin.ignored_modules = find_unmanaged(model, world)
    with _keep_recipe_dtype(world):
        fsdp2_prepare_model(world.accelerator, model)
    if world.sharding.cpu_offload:
        parameters_on = torch.device("cpu")
    else:
        parameters_on = world.device
    _materialize(model, values, parameters_on, world.device, unfilled, shared)
    assert isinstance(model, FSDPModule)
    _overlap_collectives(model, world)
    if not has_trained(model):  # no backward comes to free what stays gathered until then
        model.set_reshard_after_forward(True)
    return model


def find_unmanaged(model: nn.Module, world: World) -> list[nn.Module]:
    """The modules that FSDP2 need not manage in a shard group of one rank: nothing is gathered
    there, but FSDP2 copies each parameter at every forward and backward all the same.

    They are frozen and in the dtype of the computation. In a world of one they may also be trained,
    where all that is trained belongs to modules that cast their parameters themselves
    (`casts_parameters`): no gradient is reduced, and all are plain tensors.
    """
    sharding = world.sharding
    if (
        world.shard_group_size > 1
        or sharding.cpu_offload
        or sharding.fp8 is not None
        or sharding.divides_matrices
    ):
        return []
    policy = world.accelerator.state.fsdp_plugin.mixed_precision_policy
    casting = [module for module in model.modules() if getattr(module, "casts_parameters", False)]
    cast_by_module = {parameter for module in casting for parameter in module.parameters()}
    if world.size > 1 or any(
        p.requires_grad and p not in cast_by_module for p in model.parameters()
    ):
        cast_by_module = set()

    def is_managed(parameter: nn.Parameter) -> bool:
        if parameter in cast_by_module:
            return False
        is_cast = (
            policy is not None
            and parameter.is_floating_point()
            and parameter.dtype != policy.param_dtype
        )
        return parameter.requires_grad or is_cast

    return [module for module in model.modules() if not any(map(is_managed, module.parameters()))]


def _overlap_collectives(model: Any, world: World) -> None:
    """Overlaps communication: reductions get a process group of their own, and gathers begin one
    layer earlier.
    """
    has_own_group = hasattr(model, "set_separate_reduce_scatter_group")  # since torch 2.13
    if has_own_group and world.shard_group_size > 1 and has_trained(model):
        model.set_separate_reduce_scatter_group()
        set_timeouts(world.collective_timeout)
    layers = [module for module in decoder_layers(model) if isinstance(module, FSDPModule)]
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


def _materialize(
    model: nn.Module,
    values: Values,
    parameters_on: torch.device,
    buffers_on: torch.device,
    unfilled: frozenset[str],
    shared: Mapping[str, torch.Tensor] = NOTHING,
) -> None:
    """Gives meta parameters memory and fills each but the `unfilled` from `values`, reading only
    this rank's slices; frozen ones that are `shared` become those.
    """
    # real: rotary frequencies are computed
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tied = tied_names(model)
    kept = _find_kept(model, shared)
    for name in (*kept, *(name for name, first in tied.items() if first in kept)):
        _set_parameter(model, name, kept[tied.get(name, name)])
    have_memory = {id(parameter) for parameter in kept.values()}
    # as `to_empty`, but for these
    apply: Any = model._apply
    apply(
        lambda tensor: (
            tensor.detach()
            if id(tensor) in have_memory
            else torch.empty_like(tensor, device=parameters_on)
        )
    )
    for name, first in tied.items():  # now each name has a tensor of its own
        _set_parameter(model, name, model.get_parameter(first))
    with torch.no_grad():
        for name, buffer in buffers.items():
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = buffer.to(buffers_on)
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            if local.numel() and name not in unfilled and name not in kept:
                local.copy_(values(name, find_local_slices(parameter)))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._parameters[leaf] = parameter


def frozen_parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of each frozen parameter, by its name in the base, for a model of another
    adapter.
    """
    return {
        base_name(name): local_part(parameter).detach()
        for name, parameter in unwrap(model).named_parameters()
        if not parameter.requires_grad
    }


def _find_kept(model: nn.Module, shared: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """The frozen parameters of a model on meta that are `shared`, as they are to be."""
    return {
        name: nn.Parameter(place_like(parameter, shared[base_name(name)]), requires_grad=False)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and base_name(name) in shared
    }


def fill_on_device(model: nn.Module, values: Values, device: torch.device) -> None:
    """Gives a model on meta memory on `device` and all of its `values`, whatever the layout,
    without other ranks.
    """
    _materialize(model, values, device, device, frozenset())


@torch.no_grad()
def take_master_weights(
    model: nn.Module, dtype: torch.dtype, take: Callable[[nn.Parameter], object]
) -> None:
    """Hands every trained parameter of another dtype than `dtype` to `take`, then casts it to
    `dtype`.

    One after another, so that no two copies of the model exist. What FSDP2 gathers is bit for bit
    what it would have cast from the fp32 shard, and a gradient keeps the dtype that it had. Call it
    before the first forward.
    """
    for group in _groups_of(model):
        kept = set()
        for held in group.fsdp_params:
            held.reset_sharded_param()  # weights that are tied were tied again after sharding
            parameter = held.sharded_param
            if not parameter.requires_grad or parameter.dtype == dtype:
                continue
            take(parameter)
            kept.add(parameter.dtype)
            lower = nn.Parameter(parameter.detach().to(dtype))
            lower.grad_dtype = parameter.dtype
            torch.utils.swap_tensors(parameter, lower)  # type: ignore[no-untyped-call]  # the same object, so that ties and names stay
            held.reset_sharded_param()
        if kept:
            _keep_gradient_dtype(group, kept.pop())


def _keep_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    """FSDP2 casts a reduced gradient to its parameter's dtype, which it looks up again at every
    `unshard`.
    """
    look_up = group._init_mp_dtypes

    def look_up_and_keep() -> None:
        look_up()
        group._orig_dtype = dtype

    group._init_mp_dtypes = look_up_and_keep


def _groups_of(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each once: a group may lie over several modules."""
    seen: set[int] = set()
    for module in model.modules():
        for group in list_groups(module) if isinstance(module, FSDPModule) else ():
            if id(group) not in seen:
                seen.add(id(group))
                yield group
