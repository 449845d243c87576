"""Sharding or replicating a built model over the ranks, and what depends on the layout afterwards.

A unit is a group of parameters that FSDP gathers at once. `values` reads a parameter's slices from
the files of weights.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
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
from finetune.constants import Names
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

NOTHING: Mapping[str, Tensor] = {}


def shard_as_fsdp1(model: nn.Module, values: Values, world: World, classes: Names) -> Fsdp1:
    """Wraps `model`, which is on meta, with FSDP1 and fills its parameters from `values`.

    FSDP1 flattens a unit after materializing it whole, so the units are filled one after another,
    and no rank holds more than one of them beside its shards. Raises `UserError` if this layout
    cannot hold the model.
    """

    plugin = world.accelerator.state.fsdp_plugin
    # the first name of those that are tied
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    # Parameters on meta with two names -> the filled one. Others must not be kept here, or a rank
    # would hold them all.
    tied: dict[Tensor, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        for leaf, on_meta in list(module._parameters.items()):
            if on_meta is None:
                continue
            parameter = tied.get(on_meta)
            if parameter is None:
                whole = torch.empty_like(on_meta, device=world.device)
                whole.copy_(values(names[on_meta], tuple(slice(0, size) for size in whole.shape)))
                parameter = nn.Parameter(whole, requires_grad=on_meta.requires_grad)
            if uses[on_meta] > 1:
                tied[on_meta] = parameter
            module._parameters[leaf] = parameter
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[leaf] = buffer.to(world.device)

    with torch.no_grad():
        return Fsdp1(
            model,
            device_mesh=_make_mesh(world),
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


def _make_mesh(world: World) -> Any:
    """Makes the mesh of FSDP1. Without one, torch on a CPU would take each rank for a node, and
    HYBRID_SHARD would reduce over the wrong ranks.
    """
    if world.sharding.strategy != "HYBRID_SHARD":
        return init_device_mesh(world.device.type, (world.size,))
    node_size = world.local_size
    nodes = world.size // node_size
    if nodes == 1 or node_size == 1:
        raise UserError(
            f"{world.sharding.source}: HYBRID_SHARD shards within a node and replicates over "
            f"nodes, but this is {counted(nodes, 'node')} of {counted(node_size, 'rank')}; "
            "use FULL_SHARD, or FSDP2 with parallelism_config sizes"
        )
    mesh = init_device_mesh(
        world.device.type, (nodes, node_size), mesh_dim_names=("replicate", "shard")
    )
    set_timeouts(world.collective_timeout)
    return mesh


def _wrap_policy(model: nn.Module, sharding: Sharding, classes: Names) -> Any:
    """The policy by which FSDP1 makes a module a unit; None makes the model the only one."""
    if sharding.wrapping == "NO_WRAP":
        by_layer: Any = None
    elif sharding.wrapping == "SIZE_BASED_WRAP":
        by_layer = functools.partial(
            size_based_auto_wrap_policy, min_num_params=sharding.min_num_params
        )
    else:
        layer_classes = {
            type(module) for module in model.modules() if type(module).__name__ in classes
        }
        by_layer = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layer_classes
        )
    if len({parameter.dtype for parameter in model.parameters()}) == 1:
        return by_layer

    # A flat parameter has one dtype: fp32 adapters are units of their own inside the layer of their
    # bf16 base.
    def is_adapter_leaf(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        if not own or list(module.children()):
            return False
        return all(parameter.requires_grad for parameter in own)

    policies: list[Any] = [functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter_leaf)]
    if by_layer is not None:
        policies.insert(0, by_layer)
    return functools.partial(_or_policy, policies=policies)


def parallelize(
    model: nn.Module,
    values: Values,
    world: World,
    unfilled: frozenset[str] = frozenset(),
    shared: Mapping[str, Tensor] = NOTHING,
    *,
    misses_gradients: bool = False,
) -> nn.Module:
    """Shards or replicates a model over the ranks and fills every rank's shards.

    Args:
        model: On the meta device.
        values: Reads a named parameter within given slices.
        world: The ranks and their layout.
        unfilled: Names of parameters that get memory but no values (not under FSDP1).
        shared: Of `frozen_parts`: frozen parameters take this memory in place of their own (not
            under FSDP1).
        misses_gradients: Whether a trained parameter may get no gradient in a step. DDP then looks
            for such in every step; else it would wait for them, and reduce no gradient that
            stands in one bucket with theirs.

    Returns:
        The model to train: the same object under FSDP2 and single, its wrapper under FSDP1 and DDP.

    Raises:
        UserError: If the layout names a class that the model does not have.
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
        return model  # DDP refuses a model without gradients to reduce
    # Every rank computes the same rotary frequencies: DDP need not send them in every forward.
    buffers = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)  # type: ignore[no-untyped-call]
    # Accelerate would wrap the model of a single process in DDP too, if a launcher started it on a
    # CPU; evaluation_mode keeps it from that.
    is_single = world.sharding.layout == "single"
    world.accelerator.ddp_handler = DistributedDataParallelKwargs(
        find_unused_parameters=misses_gradients
    )
    prepared: nn.Module = world.accelerator.prepare_model(model, evaluation_mode=is_single)
    return prepared


def find_wrap_classes(model: nn.Module, sharding: Sharding) -> Names:
    """Finds the classes that become units: those that the config names, else the model's decoder
    layers, without layers that have a parameter in common; and the parts beside the language model.

    Raises `UserError` if the config names a class that no module of the model has.
    """
    layers = decoder_layers(model)
    layer_classes = tuple(sorted({type(module).__name__ for module in layers}))
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in sharding.wrap_classes if name not in present]
    if missing and sharding.is_fsdp and sharding.wrapping == "TRANSFORMER_BASED_WRAP":
        raise UserError(
            f"{sharding.source}: wraps {', '.join(missing)}, but {type(model).__name__} is made of "
            f"{', '.join(layer_classes)}; name that class, or remove the key, and the class is "
            "found"
        )
    if sharding.wrapping == "SIZE_BASED_WRAP":
        return _find_large_classes(model, sharding.min_num_params)
    # a unit each, since a forward of text alone does not gather them
    parts = other_parts(model)
    of_parts = {module for part in parts for module in part.modules()}
    elsewhere = {type(module).__name__ for module in set(model.modules()) - of_parts}
    # a projector may be a plain linear layer, as others are within the language model
    beside = tuple(type(part).__name__ for part in parts if type(part).__name__ not in elsewhere)
    wrapped = sharding.wrap_classes or layer_classes
    tied = _find_tied_classes(layers)
    return tuple(name for name in wrapped if name not in tied) + beside


def _find_tied_classes(layers: Sequence[nn.Module]) -> set[str]:
    """Finds the classes of layers that have a parameter in common, as Zamba's. Two units would each
    keep and train one of their own.
    """
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    return {
        type(layer).__name__
        for layer in layers
        if any(owners[parameter] > 1 for parameter in layer.parameters())
    }


def _find_large_classes(model: Any, min_num_params: int) -> Names:
    """Finds the classes of modules with at least `min_num_params` parameters.

    Leaves out lists of modules, which have no forward, and modules that hold the embedding, which
    is a unit of its own.
    """
    embedding = model.get_input_embeddings()
    large = set()
    for module in model.modules():
        is_large = sum(p.numel() for p in module.parameters()) >= min_num_params
        holds_embedding = any(inner is embedding for inner in module.modules())
        if is_large and not holds_embedding and not isinstance(module, nn.ModuleList):
            large.add(type(module).__name__)
    return tuple(sorted(large - {type(head_of(model)).__name__}))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """In this block the parameters of the unit `module` are gathered, in the compute dtype.

    All ranks enter it. Only FSDP2 shards them.
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
    """Lists the groups of parameters of a unit of FSDP2; torch before 2.13 has at most one."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """In this block all parameters under FSDP2 stay gathered, in the compute dtype.

    All ranks enter it. A forward within it meets no other rank, so that each rank may run as many
    as it needs.
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
    """Reshards each unit of FSDP2: a forward without a backward leaves the root's parameters
    gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def unwrapped_call(model: nn.Module, world: World) -> Iterator[None]:
    """In this block the model inside its wrapper may be called, such as by `generate`.

    Such a call bypasses FSDP1's forward, so the block does what that does: it gathers the root's
    own parameters (embedding, norm, head) and casts the inputs.
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


def count_wrapped_units(model: nn.Module) -> dict[str, int]:
    """Counts the units by their class, for the first screen."""
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
    """In this block Accelerate does not convert trained parameters to fp32 for mixed precision.

    The recipe's `dtype` decides, as it does under DDP. The compute dtype is in the plugin's policy.
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
    classes: Names,
    unfilled: frozenset[str],
    shared: Mapping[str, Tensor],
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
    """Finds the modules that FSDP2 need not manage in a shard group of one rank: nothing is
    gathered there, but FSDP2 copies each parameter at every forward and backward all the same.

    They are frozen and in the compute dtype. In a world of one they may also be trained, if all
    trained parameters belong to modules that cast them themselves (`casts_parameters`): no gradient
    is reduced, and all are plain tensors.
    """
    sharding = world.sharding
    needs_fsdp = sharding.cpu_offload or sharding.fp8 is not None or sharding.divides_matrices
    if world.shard_group_size > 1 or needs_fsdp:
        return []
    policy = world.accelerator.state.fsdp_plugin.mixed_precision_policy
    cast_by_module: set[nn.Parameter] = set()
    for module in model.modules():
        if getattr(module, "casts_parameters", False):
            cast_by_module.update(module.parameters())
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if world.size > 1 or not trained <= cast_by_module:
        cast_by_module.clear()

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
    """Overlaps communication with computation: reductions get a process group of their own, and
    each layer gathers the next one's parameters.
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
    shared: Mapping[str, Tensor] = NOTHING,
) -> None:
    """Gives meta parameters memory and fills them from `values`, reading only this rank's slices.

    Frozen ones that are `shared` take that memory; the `unfilled` keep no values.
    """
    # they have values already: rotary frequencies are computed
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tied = tied_names(model)
    shared_parameters = _find_shared(model, shared)
    for name, parameter in shared_parameters.items():
        _set_parameter(model, name, parameter)
    for name, first in tied.items():
        if first in shared_parameters:
            _set_parameter(model, name, shared_parameters[first])
    have_memory = {id(parameter) for parameter in shared_parameters.values()}

    def give_memory(tensor: Tensor) -> Tensor:
        if id(tensor) in have_memory:
            return tensor.detach()
        return torch.empty_like(tensor, device=parameters_on)

    apply: Any = model._apply
    apply(give_memory)
    for name, first in tied.items():  # `_apply` has given each name a tensor of its own
        _set_parameter(model, name, model.get_parameter(first))
    with torch.no_grad():
        for name, buffer in buffers.items():
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = buffer.to(buffers_on)
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            if local.numel() and name not in unfilled and name not in shared_parameters:
                local.copy_(values(name, find_local_slices(parameter)))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._parameters[leaf] = parameter


def frozen_parts(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's part of each frozen parameter, by its name in the base: a model with
    another adapter can share them.
    """
    return {
        base_name(name): local_part(parameter).detach()
        for name, parameter in unwrap(model).named_parameters()
        if not parameter.requires_grad
    }


def _find_shared(model: nn.Module, shared: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Makes those frozen parameters of a model on meta that are `shared`, in that memory."""
    parameters = {}
    for name, on_meta in model.named_parameters():
        local = shared.get(base_name(name))
        if not on_meta.requires_grad and local is not None:
            parameters[name] = nn.Parameter(place_like(on_meta, local), requires_grad=False)
    return parameters


def fill_on_device(model: nn.Module, values: Values, device: torch.device) -> None:
    """Gives a model on meta memory on `device` and all of its `values`, without other ranks."""
    _materialize(model, values, device, device, frozenset())


@torch.no_grad()
def take_master_weights(
    model: nn.Module, dtype: torch.dtype, take: Callable[[nn.Parameter], object]
) -> None:
    """Hands every trained parameter of another dtype than `dtype` to `take`, then casts it to
    `dtype`. Call it before the first forward.

    One after another, so that no two copies of the model exist. FSDP2 gathers the same bits as if
    it had cast the fp32 shard, and a gradient keeps the dtype that it had.
    """
    for group in _list_all_groups(model):
        gradient_dtypes = set()
        for held in group.fsdp_params:
            held.reset_sharded_param()  # weights that are tied were tied again after sharding
            parameter = held.sharded_param
            if not parameter.requires_grad or parameter.dtype == dtype:
                continue
            take(parameter)
            gradient_dtypes.add(parameter.dtype)
            lower = nn.Parameter(parameter.detach().to(dtype))
            lower.grad_dtype = parameter.dtype
            torch.utils.swap_tensors(parameter, lower)  # type: ignore[no-untyped-call]  # the same object, so that ties and names stay
            held.reset_sharded_param()
        if gradient_dtypes:
            _set_gradient_dtype(group, gradient_dtypes.pop())


def _set_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    """Makes FSDP2 cast the reduced gradients of `group` to `dtype`, in place of the parameters'
    dtype, which it looks up again at every `unshard`.
    """
    look_up = group._init_mp_dtypes

    def look_up_others() -> None:
        look_up()
        group._orig_dtype = dtype

    group._init_mp_dtypes = look_up_others


def _list_all_groups(model: nn.Module) -> list[Any]:
    """Lists FSDP2's groups of parameters, each once: a group may belong to several modules."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in list_groups(module):
                groups.setdefault(id(group), group)
    return list(groups.values())
