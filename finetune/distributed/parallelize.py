"""Shards or replicates a model over the ranks, and gathers, reshards and calls it afterwards.

A unit is a group of parameters that FSDP gathers at once. The argument `values` of many functions
reads a named parameter within given slices, from the files of weights or from a seed.
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
    transformer_auto_wrap_policy,
)

from finetune.config.layout import Sharding
from finetune.config.module_names import base_name
from finetune.constants import COMPUTE_DTYPE, Names
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
    set_tensor,
    tied_names,
    unwrap,
)
from finetune.distributed.pipeline import keep_own_layers
from finetune.distributed.tensor_parallel import divide_matrices
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.units import counted

NOTHING: Mapping[str, Tensor] = {}  # no shared parameters


def shard_as_fsdp1(model: nn.Module, values: Values, world: World, classes: Names) -> Fsdp1:
    """Wraps `model`, which is on meta, with FSDP1 and fills its parameters from `values`.

    Modules of `classes` become units. FSDP1 materializes a unit whole and then flattens and shards
    it. The units are filled one after another, so a rank holds at most one whole unit beside its
    shards. Raises `UserError` if HYBRID_SHARD does not fit the number of nodes and ranks.
    """

    plugin = world.accelerator.state.fsdp_plugin
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    # Tied parameters on meta -> the filled parameter. Only tied ones may be kept here: a rank would
    # else hold the whole model.
    filled_tied: dict[Tensor, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        """Fills the parameters of `module` itself; FSDP1 calls it for each module of a unit."""
        for leaf, on_meta in list(module._parameters.items()):
            if on_meta is None:
                continue
            parameter = filled_tied.get(on_meta)
            if parameter is None:
                memory = torch.empty_like(on_meta, device=world.device)
                everything = tuple(slice(0, size) for size in memory.shape)
                memory.copy_(values(first_names[on_meta], everything))
                parameter = nn.Parameter(memory, requires_grad=on_meta.requires_grad)
            if uses[on_meta] > 1:
                filled_tied[on_meta] = parameter
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
            forward_prefetch=plugin.forward_prefetch,
            use_orig_params=True,
            param_init_fn=fill,
            device_id=world.device,
        )


def _make_mesh(world: World) -> Any:
    """Makes the mesh of FSDP1: all ranks, or under HYBRID_SHARD nodes x the ranks of a node.

    Without a mesh, torch on a CPU would take each rank for a node, and HYBRID_SHARD would reduce
    over the wrong ranks. Raises `UserError` for HYBRID_SHARD on one node, or on nodes of one rank.
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
    """Makes the policy by which FSDP1 decides whether a module is a unit.

    None makes the whole model the only unit.
    """
    if sharding.wrapping == "NO_WRAP":
        by_layer: Any = None
    else:
        layer_classes = {
            type(module) for module in model.modules() if type(module).__name__ in classes
        }
        by_layer = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layer_classes
        )
    if len({parameter.dtype for parameter in model.parameters()}) == 1:
        return by_layer

    # FSDP1 flattens a unit into one parameter, which has one dtype. So an fp32 adapter in a layer
    # with a bf16 base is a unit of its own.
    def is_adapter_leaf(module: nn.Module) -> bool:
        parameters = list(module.parameters(recurse=False))
        if not parameters or list(module.children()):
            return False
        return all(parameter.requires_grad for parameter in parameters)

    by_adapter = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter_leaf)
    policies: list[Any] = [by_adapter]
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
        unfilled: Names of parameters that get memory but no values. Not used under FSDP1.
        shared: What `frozen_parts` returned for another model: frozen parameters use this memory
            and get none of their own. Not used under FSDP1.
        misses_gradients: Whether a trained parameter may get no gradient in a step. DDP then looks
            for such parameters in every step. It would otherwise wait for them, and leave the other
            gradients of their bucket unreduced.

    Returns:
        The model to train: `model` itself under FSDP2 and single, its wrapper under FSDP1 and DDP.

    Raises:
        UserError: If the layout names a class that the model does not have, or does not fit the
            number of nodes and ranks.
    """
    classes = find_wrap_classes(model, world.sharding)
    if world.sharding.layout == "fsdp2":
        return _shard_as_fsdp2(model, values, world, classes, unfilled, shared)
    if world.sharding.layout == "fsdp1":
        sharded = shard_as_fsdp1(model, values, world, classes)
        with _keep_recipe_dtype(world):
            return world.accelerator.prepare_model(sharded)  # type: ignore[no-any-return]
    _materialize(model, values, world.device, world.device, unfilled, shared)
    if not has_trained(model):
        return model  # DDP refuses a model without trained parameters
    # Buffers are rotary frequencies, which every rank computes alike: DDP need not broadcast them
    # in every forward.
    buffers = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)  # type: ignore[no-untyped-call]
    # Accelerate would wrap even a single process's model in DDP, if a launcher started the process
    # on a CPU. `evaluation_mode` prevents this.
    is_single = world.sharding.layout == "single"
    world.accelerator.ddp_handler = DistributedDataParallelKwargs(
        find_unused_parameters=misses_gradients
    )
    prepared: nn.Module = world.accelerator.prepare_model(model, evaluation_mode=is_single)
    return prepared


def find_wrap_classes(model: nn.Module, sharding: Sharding) -> Names:
    """Returns the names of the classes whose modules become units.

    Under SIZE_BASED_WRAP they are the classes of large modules. Otherwise they are the classes that
    the Accelerate file names, or by default those of the decoder layers; layers that share a
    parameter are left out. The parts beside the language model are added.

    Raises `UserError` if the file names a class that no module of the model has, or that may be no
    unit.
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
    if sharding.is_fsdp and sharding.wrapping == "TRANSFORMER_BASED_WRAP":
        _refuse_units_of_ends(model, sharding, layer_classes)
    # Each part beside the language model is a unit, which a forward of text alone does not gather.
    parts = other_parts(model)
    in_parts = {module for part in parts for module in part.modules()}
    elsewhere = {type(module).__name__ for module in set(model.modules()) - in_parts}
    # A part whose class also occurs elsewhere is left out: a projector may be a plain linear layer,
    # and every linear layer of the language model would become a unit.
    part_classes = tuple(
        type(part).__name__ for part in parts if type(part).__name__ not in elsewhere
    )
    wrapped = sharding.wrap_classes or layer_classes
    tied = _find_tied_classes(layers)
    return tuple(name for name in wrapped if name not in tied) + part_classes


def _refuse_units_of_ends(model: Any, sharding: Sharding, layer_classes: Names) -> None:
    """Raises `UserError` if a named class holds the embedding or the head where it may not.

    A tied weight is in one unit with both modules that compute with it: the whole model's. And
    FSDP2 makes a unit of the embedding itself, which no other unit but the whole model's may hold.
    """
    embedding = model.get_input_embeddings()
    head = head_of(model)
    is_tied = head is not None and bool(set(embedding.parameters()) & set(head.parameters()))
    for module in model.modules():
        # FSDP wraps the instances of a subclass too.
        names = {kind.__name__ for kind in type(module).__mro__} & set(sharding.wrap_classes)
        holds_end = bool({embedding, head} & set(module.modules()))
        is_end = module in (embedding, head)
        if names and holds_end and (is_tied or (sharding.layout == "fsdp2" and not is_end)):
            reason = "whose weights are tied" if is_tied else "and the embedding is a unit itself"
            raise UserError(
                f"{sharding.source}: wraps {min(names)}: one of them holds the embedding or the "
                f"output head, {reason}; name {', '.join(layer_classes)} alone, or remove "
                "fsdp_transformer_layer_cls_to_wrap, and the class is found"
            )


def _find_tied_classes(layers: Sequence[nn.Module]) -> set[str]:
    """Returns the names of the classes of layers that share a parameter, as in Zamba.

    If such layers were units, each would keep and train a copy of the parameter.
    """
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    return {
        type(layer).__name__
        for layer in layers
        if any(owners[parameter] > 1 for parameter in layer.parameters())
    }


def _find_large_classes(model: Any, min_num_params: int) -> Names:
    """Returns the names of the classes of modules with at least `min_num_params` parameters.

    Lists of modules are left out, since they have no forward. So are the output head's class,
    modules that hold the embedding, which is a unit of its own, and linear layers: FSDP would wrap
    the head too, which is one, and kernels of adapters read their weights without calling them.
    """
    embedding = model.get_input_embeddings()
    large = set()
    for module in model.modules():
        is_large = sum(p.numel() for p in module.parameters()) >= min_num_params
        holds_embedding = any(inner is embedding for inner in module.modules())
        is_linear = isinstance(module, nn.Linear) or hasattr(module, "base_layer")
        if is_large and not (holds_embedding or is_linear or isinstance(module, nn.ModuleList)):
            large.add(type(module).__name__)
    return tuple(sorted(large - {type(head_of(model)).__name__}))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of the FSDP2 unit `module` for this block, in the compute dtype.

    All ranks enter the block. Does nothing for a module that is no unit of FSDP2.
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
    """Lists the parameter groups of an FSDP2 unit; before torch 2.13 a unit has at most one."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Gathers all parameters under FSDP2 for this block, in the compute dtype.

    All ranks enter the block. A forward in it needs no collective, so each rank may run as many
    forwards as it likes. At the end, the units reshard after a forward as they did before.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [(unit, unit._get_fsdp_state(), list_groups(unit)) for unit in units]
    # the two settings that `set_reshard_after_forward` changes
    settings = [
        (state._auto_reshard_after_forward, [group.post_forward_mesh_info for group in groups])
        for _, state, groups in states
    ]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for (unit, state, groups), (is_auto, mesh_infos) in zip(states, settings, strict=True):
            state._auto_reshard_after_forward = is_auto
            for group, mesh_info in zip(groups, mesh_infos, strict=True):
                group.post_forward_mesh_info = mesh_info
            unit.reshard()


def reshard(model: nn.Module) -> None:
    """Reshards each FSDP2 unit of `model`.

    Needed after a forward without a backward, which leaves the root's parameters gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def unwrapped_call(model: nn.Module, world: World) -> Iterator[None]:
    """Allows calls of the model inside its wrapper in this block, such as by `generate`.

    Such a call bypasses the forward of FSDP1's root, so the block does that forward's work: it
    gathers the root's own parameters (embedding, norm, head) and casts to the compute dtype. Other
    layouts need nothing.
    """
    if not isinstance(model, Fsdp1):
        yield
        return
    precision = world.sharding.mixed_precision
    compute_dtype = getattr(torch, COMPUTE_DTYPE[precision])
    with (
        Fsdp1.summon_full_params(model, recurse=False, writeback=False),
        torch.autocast(world.device.type, dtype=compute_dtype, enabled=precision != "no"),
    ):
        yield


def count_wrapped_units(model: nn.Module) -> dict[str, int]:
    """Counts FSDP's units by the name of their class, for the run's first screen."""
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
    """Stops Accelerate from casting trained parameters to fp32 for mixed precision, in this block.

    The recipe's `dtype` decides, as it does under DDP. FSDP still computes in mixed precision: the
    compute dtype is in the plugin's policy.
    """
    state = world.accelerator.state
    before = state._mixed_precision
    state._mixed_precision = "no"
    try:
        yield
    finally:
        state._mixed_precision = before


def _shard_as_fsdp2(
    model: nn.Module,
    values: Values,
    world: World,
    classes: Names,
    unfilled: frozenset[str],
    shared: Mapping[str, Tensor],
) -> nn.Module:
    """Makes FSDP2 units of the modules of `classes` and of the model, and fills the shards.

    Tensor and pipeline parallelism come first. The other arguments are those of `parallelize`.
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
        parameter_device = torch.device("cpu")
    else:
        parameter_device = world.device
    _materialize(model, values, parameter_device, world.device, unfilled, shared)
    assert isinstance(model, FSDPModule)
    _overlap_collectives(model, world)
    if not has_trained(model):  # no backward will come to reshard what a forward has gathered
        model.set_reshard_after_forward(True)
    return model


def find_unmanaged(model: nn.Module, world: World) -> list[nn.Module]:
    """Lists the modules that FSDP2 can ignore because each shard group is a single rank.

    Such a rank gathers nothing, but FSDP2 would still copy each parameter at every forward and
    backward. A module can be ignored if all its parameters are frozen and in the compute dtype.

    In a world of one, no gradient is reduced. Modules that cast their parameters themselves
    (`casts_parameters`) can then be ignored too, but only if all trained parameters are in such
    modules, so that all trained parameters are plain tensors.

    Empty with larger shard groups, CPU offload, fp8 or tensor parallelism.
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

    def needs_management(parameter: nn.Parameter) -> bool:
        if parameter in cast_by_module:
            return False
        needs_cast = (
            policy is not None
            and parameter.is_floating_point()
            and parameter.dtype != policy.param_dtype
        )
        return parameter.requires_grad or needs_cast

    return [
        module for module in model.modules() if not any(map(needs_management, module.parameters()))
    ]


def _overlap_collectives(model: Any, world: World) -> None:
    """Overlaps communication with computation.

    Reduce-scatters get a process group of their own (from torch 2.13), and each layer starts the
    gathering of the next layer's parameters in the forward.
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
    parameter_device: torch.device,
    buffer_device: torch.device,
    unfilled: frozenset[str],
    shared: Mapping[str, Tensor] = NOTHING,
) -> None:
    """Gives parameters on meta memory and fills them from `values`: this rank's slices only.

    Frozen parameters in `shared` use that memory, with the values in it. Those in `unfilled` get
    memory without values. Buffers keep the values that they have.
    """
    # Buffers are not on meta: they are rotary frequencies, which were computed. `_apply` would
    # replace them by empty ones.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tied = tied_names(model)
    shared_parameters = _find_shared(model, shared)
    for name, parameter in shared_parameters.items():
        set_tensor(model, name, parameter)
    for name, first in tied.items():
        if first in shared_parameters:
            set_tensor(model, name, shared_parameters[first])
    have_memory = {id(parameter) for parameter in shared_parameters.values()}

    def give_memory(tensor: Tensor) -> Tensor:
        if id(tensor) in have_memory:
            return tensor.detach()
        return torch.empty_like(tensor, device=parameter_device)

    apply: Any = model._apply
    apply(give_memory)
    for name, first in tied.items():  # `_apply` has given each name a tensor of its own: tie again
        set_tensor(model, name, model.get_parameter(first))
    with torch.no_grad():
        for name, buffer in buffers.items():
            set_tensor(model, name, buffer.to(buffer_device))
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            if local.numel() and name not in unfilled and name not in shared_parameters:
                local.copy_(values(name, find_local_slices(parameter)))


def frozen_parts(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's part of each frozen parameter, by the parameter's name in the base model.

    A model with another adapter can share their memory.
    """
    return {
        base_name(name): local_part(parameter).detach()
        for name, parameter in unwrap(model).named_parameters()
        if not parameter.requires_grad
    }


def _find_shared(model: nn.Module, shared: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Returns name -> parameter for each frozen parameter of `model` that is in `shared`.

    The new parameter uses the shared memory. `model` is on meta and stays as it is.
    """
    parameters = {}
    for name, on_meta in model.named_parameters():
        local = shared.get(base_name(name))
        if not on_meta.requires_grad and local is not None:
            parameters[name] = nn.Parameter(place_like(on_meta, local), requires_grad=False)
    return parameters


def fill_on_device(model: nn.Module, values: Values, device: torch.device) -> None:
    """Gives a model on meta memory on `device` and fills it whole, without other ranks."""
    _materialize(model, values, device, device, frozenset())


@torch.no_grad()
def take_master_weights(
    model: nn.Module, dtype: torch.dtype, take: Callable[[nn.Parameter], object]
) -> None:
    """Hands each trained FSDP2 parameter in another dtype to `take`, then casts it to `dtype`.

    Call it before the first forward. `take` sees the parameter before the cast, as master weight.
    Parameters are cast one after another, so that no two copies of the model exist. FSDP2 gathers
    the same bits as if it had cast the shard itself, and gradients keep the dtype that they had.
    """
    for group in _list_all_groups(model):
        gradient_dtypes = set()
        for fsdp_param in group.fsdp_params:
            # Tied weights were tied again after sharding: FSDP2 must look at the new object.
            fsdp_param.reset_sharded_param()
            parameter = fsdp_param.sharded_param
            if not parameter.requires_grad or parameter.dtype == dtype:
                continue
            take(parameter)
            gradient_dtypes.add(parameter.dtype)
            lower = nn.Parameter(parameter.detach().to(dtype))
            lower.grad_dtype = parameter.dtype
            # The parameter stays the same object, so that ties and names stay.
            torch.utils.swap_tensors(parameter, lower)  # type: ignore[no-untyped-call]
            fsdp_param.reset_sharded_param()
        if gradient_dtypes:
            _set_gradient_dtype(group, gradient_dtypes.pop())


def _set_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    """Makes FSDP2 cast the reduced gradients of `group` to `dtype`.

    FSDP2 would cast them to the parameters' dtype. It looks that up at every `unshard`, so its
    look-up is replaced.
    """
    look_up_dtypes = group._init_mp_dtypes

    def look_up_with_own_gradient_dtype() -> None:
        look_up_dtypes()
        group._orig_dtype = dtype

    group._init_mp_dtypes = look_up_with_own_gradient_dtype


def _list_all_groups(model: nn.Module) -> list[Any]:
    """Lists FSDP2's parameter groups, each once; a group may belong to several modules."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in list_groups(module):
                groups.setdefault(id(group), group)
    return list(groups.values())
