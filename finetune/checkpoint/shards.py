"""The state of model and optimizer as shards: this rank's part of each tensor, under the name of
the whole.

The shards of all ranks cover every tensor exactly once, whatever the layout, so that a checkpoint
written by any number of ranks in any layout is read by any other. The files are those of
`torch.distributed.checkpoint`'s HuggingFaceStorageWriter(save_distributed=True); its reader opens
them too.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.distributed_c10d import _get_pg_default_device
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._optim_utils import StateInfo, _OptimStateKey, _PosDimTensorInfo
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.checkpoint.manifest import MODEL
from finetune.config.module_names import is_adapter
from finetune.distributed.model_parts import local_part, text_names, tied_names, unwrap
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import TENSOR, RankGroup, World, gather_json
from finetune.errors import UserError
from finetune.files.tensors import header_bytes, read_folder, read_slice
from finetune.models.quantized_layers import CODES, SCALES, quantized_layers
from finetune.optim.offload import OffloadedOptimizer, OffloadedTensor, allocate_aligned
from finetune.optim.optimizers import complete_state


def is_quantized(tensor: Any) -> bool:
    """Whether this is torchao's 8-bit tensor, of which torch sees only the wrapper."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def dequantize(tensor: Any) -> torch.Tensor:
    """The tensor in fp32, such that torchao quantizes it to the same codes and scales again.

    Its lowest signed code stands for -0.993, but is what it makes of a block's largest magnitude,
    -1, from which it takes the scale. Written as -0.993 the scale, and with it every code of that
    block, would be another; so it is written as -1.
    """
    values = tensor.qmap.clone()
    if tensor.signed:
        values[0] = -1.0
    blocks: torch.Tensor = values[tensor.codes.int()].view(
        len(tensor.scale), -1
    ) * tensor.scale.view(-1, 1)
    return blocks.view(tensor.shape)


def plain_chunks(tensor: Any) -> Iterator[torch.Tensor]:
    """The numbers of a rank's tensor, flat, in its order: at once, or in chunks where it lies in a
    file (optim_offload: nvme).
    """
    if isinstance(tensor, OffloadedTensor):
        yield from tensor.chunks()
    else:
        yield (dequantize(tensor) if is_quantized(tensor) else tensor).contiguous().reshape(-1)


def allocate_on_host(tensor: Any) -> Any:
    """Memory on the host for a copy of `tensor`, quantized or not: whole pages, pinned where it is
    on a GPU.
    """
    if is_quantized(tensor):
        parts = allocate_on_host(tensor.codes), allocate_on_host(tensor.scale), tensor.qmap.cpu()
        return type(tensor)(*parts, tensor.signed, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return (
        allocate_aligned(tensor.nbytes, tensor.device)[: tensor.nbytes]
        .view(tensor.dtype)
        .view(tensor.shape)
    )


def record_event(device: torch.device) -> Any:
    """A CUDA event after all work queued so far; None on a CPU, where that work is done."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).record_event()
    return None


def copy_to_host(
    shards: list["TensorShard"], copies: dict[str, torch.Tensor], event: Any, device: torch.device
) -> list["TensorShard"]:
    """The shards with their tensors, as they are at `event` (of `record_event`), copied into
    `copies`.

    `copies` is filled by the first call and reused by the next. On a GPU the copies run on a stream
    of their own.
    """
    # A new thread's device is the first, whatever the loop's is.
    stream = None if event is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied = []
    with torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_event(event)
        for shard in shards:
            copy = _find_copy(shard, copies)
            copy.copy_(shard.tensor, non_blocking=True)
            copied.append(replace(shard, tensor=copy))
    if stream is not None:
        stream.synchronize()
    return copied


def reserve_on_host(shards: list["TensorShard"], copies: dict[str, torch.Tensor]) -> None:
    """Allocates what `copy_to_host` will copy into, and lets go of one tensor after another."""
    while shards:
        _find_copy(shards.pop(), copies)


def _find_copy(shard: "TensorShard", copies: dict[str, torch.Tensor]) -> torch.Tensor:
    name = f"{shard.part}/{shard.name}"
    copy = copies.get(name)
    if copy is None or copy.shape != shard.tensor.shape or copy.dtype != shard.tensor.dtype:
        copy = copies[name] = allocate_on_host(shard.tensor)
    return copy


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_TRAINABLE = StateDictOptions(ignore_frozen_params=True)
# by bytes of an element
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED_AT_ONCE = 1 << 20  # elements: bounds the int64 temporaries of a checksum to 24 MiB


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor, held by this rank."""

    part: str  # model or optimizer
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the shard's first element in the whole
    tensor: Any  # torch's, or an OffloadedTensor: the rank's part of the state in its file
    is_first_copy: bool  # False where a rank before this one holds the same values
    is_divided: bool = False  # whether the ranks of a tensor parallel group hold different parts


def get_model_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """The whole model by transformers' names, each tensor where it lives; a tied one under one name
    only.

    Where adapters are trained, only what is trained: they, and `modules_to_save`. The rest is the
    base model's.
    """
    parameters = {
        clean_tensor_name(name): parameter for name, parameter in unwrap(model).named_parameters()
    }
    state: dict[str, Any]
    if any(is_adapter(name) for name in parameters):
        state = get_model_state_dict(model, options=_TRAINABLE)
        # and no buffers
        state = {name: value for name, value in state.items() if name in parameters}
    else:
        state = get_model_state_dict(model)
        for name in tied_names(unwrap(model)):
            state.pop(name, None)
    return state | (optimizer.master_weights() if isinstance(optimizer, OffloadedOptimizer) else {})


def get_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state of all that is trained, flat: `state.<parameter>.exp_avg` and
    `param_groups.…`.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.moments()
    complete_state(optimizer)
    with optimizer_state_without_pickles():
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return state


def select_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a flat state that are tensors."""
    kinds = torch.Tensor | ShardedTensor | OffloadedTensor
    return {name: value for name, value in state.items() if isinstance(value, kinds)}


def list_shards(state: Mapping[str, Any], part: str, stages: int = 1) -> list[TensorShard]:
    """This rank's shards of all tensors, in order of name.

    The tensors are those of `state`, not copies.

    Tensors that every rank holds whole (DDP, scalars) are dealt out over the ranks by size, so that
    all write alike.

    stages: Groups of ranks that hold different layers.
    """
    rank, size = (
        (dist.get_rank(), dist.get_world_size() // stages) if dist.is_initialized() else (0, 1)
    )
    first = rank - rank % size
    rank = rank % size
    layouts = {
        name: tensor.layout if isinstance(tensor, OffloadedTensor) else tensor
        for name, tensor in state.items()
    }
    replicated = [
        name for name, layout in layouts.items() if not isinstance(layout, DTensor | ShardedTensor)
    ]
    writers = {}
    loads = [0] * size
    for name in sorted(replicated, key=lambda name: (-layouts[name].nbytes, name)):
        writers[name] = loads.index(min(loads))
        loads[writers[name]] += layouts[name].nbytes + 1  # + 1 deals out scalars too
    listed: list[TensorShard] = []
    for name, layout in sorted(layouts.items()):
        if isinstance(layout, DTensor):
            shards = _shards_of_dtensor(part, name, layout, first)
        elif isinstance(layout, ShardedTensor):
            shards = _shards_of_sharded_tensor(part, name, layout)
        else:
            shape = tuple(layout.shape)
            shards = [
                TensorShard(
                    part, name, shape, (0,) * len(shape), layout.detach(), writers[name] == rank
                )
            ]
        tensor = state[name]
        if isinstance(tensor, OffloadedTensor):
            shards = [replace(shard, tensor=tensor) for shard in shards]
        listed += shards
    return listed


def _shards_of_dtensor(part: str, name: str, tensor: DTensor, first_rank: int) -> list[TensorShard]:
    local = local_part(tensor).detach()
    if local.numel() == 0 and tensor.numel() > 0:
        return []
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    coordinate = tensor.device_mesh.get_coordinate() or ()
    # Of a tensor that is whole in a dimension of all ranks, each mesh of the others holds a copy.
    placed = zip(coordinate, tensor.placements, strict=True)
    replicas = [index for index, placement in placed if isinstance(placement, Replicate)]
    first = first_rank in tensor.device_mesh.mesh and not any(replicas)
    is_divided = TENSOR in (tensor.device_mesh.mesh_dim_names or ())
    return [TensorShard(part, name, tuple(tensor.shape), tuple(offsets), local, first, is_divided)]


def _shards_of_sharded_tensor(part: str, name: str, tensor: Any) -> list[TensorShard]:
    # Under hybrid sharding each group of ranks holds the whole tensor.
    first = 0 in dist.get_process_group_ranks(tensor._process_group)
    return [
        TensorShard(
            part,
            name,
            tuple(tensor.size()),
            tuple(shard.metadata.shard_offsets),
            shard.tensor.detach(),
            first,
        )
        for shard in tensor.local_shards()
        if shard.tensor.numel()
    ]


def encode_file(shards: list[TensorShard]) -> Iterator[bytes | memoryview]:
    """A safetensors file of these shards, a tensor at a time: copied from its device, or converted
    from 8 bits to fp32, when its turn comes.
    """
    offsets = json.dumps({shard.name: {"saved_offsets": list(shard.offsets)} for shard in shards})
    yield header_bytes(
        ((shard.name, shard.tensor.dtype, tuple(shard.tensor.shape)) for shard in shards),
        {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"},
    )
    for shard in shards:
        if shard.tensor.numel():
            for chunk in plain_chunks(shard.tensor):
                yield chunk.cpu().view(torch.uint8).numpy().data


def names_beside_text(model: torch.nn.Module) -> frozenset[str]:
    """The parameters of a vision-language model that no text reaches."""
    plain = unwrap(model)
    text = tuple(map(clean_tensor_name, text_names(plain)))
    names = (clean_tensor_name(name) for name, _ in plain.named_parameters())
    return frozenset(name for name in names if not name.startswith(text))


def read_shards(
    state: Mapping[str, Any],
    part: str,
    checkpoint: Path,
    world: World,
    optional: Collection[str] = (),
) -> None:
    """Fills this rank's shards of `state` from the checkpoint's `part`, by name and shape.

    All ranks call it.

    Args:
        state: Of `get_model_state`, or the tensors of `get_optimizer_state`.
        optional: Parameters whose optimizer state the checkpoint may lack, or have while they are
            not trained here. Earlier versions trained what no image reaches: most layouts kept no
            state for it, FSDP1 did.

    Raises:
        UserError: Names or shapes are others. Nothing has been read then.
    """
    # an optimizer without state (SGD) leaves none
    has_files = any((checkpoint / part).glob("*.safetensors"))
    if has_files or part == MODEL:
        stored = read_folder(checkpoint / part)
    else:
        stored = {}
    stages = world.stages
    shards = list_shards(state, part, stages)
    known = (
        state.keys()
        if stages == 1
        else {name for names in world.gather(sorted(state)) for name in names}
    )
    missing = _without(optional, known - stored.keys(), stored.keys())
    unexpected = _without(optional, stored.keys() - known, known)
    if missing or unexpected:
        if missing:
            example = f"it lacks {missing[0]}"
        else:
            example = f"there is no {unexpected[0]} here"
        if part == MODEL:
            origin = "from a different model"
        else:
            origin = "with a different optimizer or model"
        raise UserError(
            f"{checkpoint}: saved {origin}: {example} ({len(missing)} missing, {len(unexpected)} "
            "unexpected); continue with the model and the optimizer of that run, or set another "
            "output_dir"
        )
    shards = [shard for shard in shards if shard.name in stored]
    for shard in shards:
        if stored[shard.name].shape != shard.shape:
            raise UserError(
                f"{checkpoint}: saved from a different model: {shard.name} has shape "
                f"{stored[shard.name].shape}, here {shard.shape}"
            )
    for shard in shards:
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        values = read_slice(stored[shard.name], box)
        # torchao quantizes what is copied into its tensors, from fp32 on the same device.
        if is_quantized(shard.tensor):
            values = values.to(shard.tensor.device, torch.float32)
        shard.tensor.copy_(values)


def _without(
    optional: Collection[str], names: Collection[str], others: Collection[str]
) -> list[str]:
    """`names` of an optimizer's state, sorted, but for those of `optional` parameters of which
    `others` has none.

    >>> (
    ...     _without({"a"}, {"state.a.step", "state.b.step"}, set()),
    ...     _without({"a"}, {"state.a.step"}, {"state.a.exp_avg"}),
    ... )
    (['state.b.step'], ['state.a.step'])
    """
    kept = {_parameter_of(name) for name in others}
    return sorted(
        name for name in names if _parameter_of(name) not in optional or _parameter_of(name) in kept
    )


def _parameter_of(name: str) -> str:
    return name.removeprefix("state.").rpartition(".")[0]


def set_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Loads `state` (of `get_model_state`, filled in) into the model."""
    tied = {
        name: state[source] for name, source in tied_names(unwrap(model)).items() if source in state
    }
    # The frozen ones too: FSDP1 warns of every parameter that it is not given.
    in_memory = {
        name: value
        for name, value in (state | tied).items()
        if not isinstance(value, OffloadedTensor)
    }
    set_model_state_dict(model, get_model_state_dict(model) | in_memory)


def set_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Loads `state` (of `get_optimizer_state`, filled in) into the optimizer."""
    if not isinstance(optimizer, OffloadedOptimizer):  # whose state has been filled in place
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def count_parameters(model: torch.nn.Module) -> int:
    """The whole model's parameters over all ranks with these layers, tied ones once."""
    state: dict[str, Any] = get_model_state_dict(model)
    layers = quantized_layers(unwrap(model))
    pipeline = find_pipeline(unwrap(model))
    copied = pipeline.copied if pipeline else ()
    quantized = (f"{name}.{part}" for name, _ in layers for part in (CODES, SCALES))
    skipped = {*copied, *tied_names(unwrap(model)), *quantized}
    plain: int = sum(
        math.prod(tensor.size()) for name, tensor in state.items() if name not in skipped
    )
    return plain + sum(math.prod(layer.full_shape) for _, layer in layers)


def refuse_different_replicas(shards: list[TensorShard], step: int, ranks: RankGroup) -> None:
    """Raises `UserError` on all ranks if two ranks that should hold the same part of the state hold
    different values.

    `shards`: all of this rank's, first copies or not. Each rank sends one digest for each
    comparison: of replicas, and of what the ranks of a tensor-parallel group hold whole.
    """
    group_size = ranks.world.shard_group_size
    tensors = ranks.world.stage_size // ranks.world.tensor_group_count
    stage = ranks.world.stage_size
    if stage > group_size:  # several replicas
        _refuse_different(
            shards, step, ranks, lambda rank: rank - rank % stage + rank % stage % group_size
        )
    if tensors > 1:
        replicated = [shard for shard in shards if not shard.is_divided]
        _refuse_different(replicated, step, ranks, lambda rank: rank - rank % tensors)


def _refuse_different(
    shards: list[TensorShard], step: int, ranks: RankGroup, first_of: Callable[[int], int]
) -> None:
    """Raises `UserError` on all ranks where one's `shards` differ from those of the rank `first_of`
    it.
    """
    sums = {f"{shard.part}/{shard.name}": int(weighted_sum(shard.tensor)) for shard in shards}
    digests = ranks.on_all(lambda: xxhash.xxh3_64_hexdigest(json.dumps(sums).encode()))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[first_of(rank)]]
    if not different:
        return
    by_rank = ranks.on_all(lambda: sums)
    rank = different[0]
    first = first_of(different[0])
    unequal = [name for name, value in by_rank[rank].items() if value != by_rank[first].get(name)]
    raise UserError(
        f"step {step} is not saved: ranks {first} and {rank} hold replicas of the model, but "
        f"{len(unequal)} of {len(by_rank[rank])} tensors are not equal, {unequal[0]} the first; "
        "start the run again to resume from an earlier checkpoint, and if it happens again, test "
        "the memory of these ranks, or report a bug"
    )


def weighted_sum(tensor: Any) -> torch.Tensor:
    """The sum of each element's bits times an odd number by its position, modulo 2**64 (0-dim
    int64, on the device).

    Integers add up to the same in any order, and so on every device. One changed element always
    shows.
    """
    total = torch.zeros((), dtype=torch.int64)
    place = 0
    for chunk in plain_chunks(tensor):
        bits = chunk.view(_INTEGERS[chunk.element_size()])
        total = total.to(bits.device)
        for start in range(0, bits.numel(), _SUMMED_AT_ONCE):
            part = bits[start : start + _SUMMED_AT_ONCE]
            weights = torch.arange(place, place + part.numel(), device=bits.device) * 2 + 1
            total += (part * weights).sum()
            place += part.numel()
    return total


@contextmanager
def optimizer_state_without_pickles() -> Iterator[None]:
    """In this block `get_optimizer_state_dict` of FSDP1 exchanges the states' names, shapes and
    scalars as JSON.

    torch's own `all_gather_object` sends pickles, and unpickling runs what another rank puts into
    them.
    """
    pickled = dist.all_gather_object
    dist.all_gather_object = _all_gather_json  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = pickled


def _all_gather_json(
    gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None
) -> None:
    """`dist.all_gather_object` for the two kinds of value that FSDP1 sends: keys, and states by
    parameter name.
    """
    is_states = isinstance(value, dict)
    if is_states:
        plain = {name: _encode_state(info) for name, info in value.items()}
    else:
        plain = value
    for index, received in enumerate(gather_json(plain, group, _get_pg_default_device(group))):
        if is_states:
            gathered[index] = {name: _decode_state(info) for name, info in received.items()}
        else:
            gathered[index] = [
                _OptimStateKey(tuple(names), is_managed) for names, is_managed in received
            ]


def _encode_state(info: StateInfo) -> dict[str, Any]:
    return {
        "tensors": {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in info.tensors.items()
        },
        "scalars": {
            name: [tensor.item(), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in info.scalar_tensors.items()
        },
        "values": info.non_tensors,
    }


def _decode_state(plain: dict[str, Any]) -> StateInfo:
    return StateInfo(
        {
            name: _PosDimTensorInfo(torch.Size(shape), getattr(torch, dtype))
            for name, (shape, dtype) in plain["tensors"].items()
        },
        {
            name: torch.tensor(number, dtype=getattr(torch, dtype))
            for name, (number, dtype) in plain["scalars"].items()
        },
        plain["values"],
    )
