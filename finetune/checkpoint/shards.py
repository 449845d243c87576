"""The state of model and optimizer as shards: this rank's part of each tensor, by its full name.

In every layout the shards of all ranks cover each tensor exactly once. A checkpoint can therefore
be read in any layout and on any number of ranks. The files are those of
`torch.distributed.checkpoint`'s HuggingFaceStorageWriter(save_distributed=True); its reader opens
them, too.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
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
from torch.optim import Optimizer

from finetune.checkpoint.manifest import MODEL
from finetune.config.module_names import is_adapter
from finetune.constants import Shape
from finetune.distributed.model_parts import local_part, text_names, tied_names, unwrap
from finetune.distributed.pipeline import find_pipeline
from finetune.distributed.world import TENSOR, RankGroup, World, gather_json
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, header_bytes, read_folder, read_slice
from finetune.models.quantized_layers import CODES, SCALES, quantized_layers
from finetune.optim.offload import OffloadedOptimizer, OffloadedTensor, allocate_aligned
from finetune.optim.optimizers import complete_state


def is_quantized(tensor: Any) -> bool:
    """Returns whether this is torchao's 8-bit tensor."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def dequantize(tensor: Any) -> Tensor:
    """Returns torchao's 8-bit tensor in fp32.

    Quantized again by torchao, the result has the same codes and scales. For that the lowest signed
    code is decoded to -1, and not to -0.993 as by torchao: it stands for a block's largest
    magnitude, which is the block's scale, and another scale would change every code of the block.
    """
    values = tensor.qmap.clone()
    if tensor.signed:
        values[0] = -1.0
    blocks = values[tensor.codes.int()].view(len(tensor.scale), -1)
    scaled: Tensor = blocks * tensor.scale.view(-1, 1)
    return scaled.view(tensor.shape)


def plain_chunks(tensor: Any) -> Iterator[Tensor]:
    """Yields the elements of a rank's tensor, flat: at once, or in chunks where it is in a file."""
    if isinstance(tensor, OffloadedTensor):
        yield from tensor.chunks()
        return
    if is_quantized(tensor):
        tensor = dequantize(tensor)
    yield tensor.contiguous().reshape(-1)


def allocate_on_host(tensor: Any) -> Any:
    """Allocates host memory for a copy of `tensor`, quantized or not; pinned for one on a GPU."""
    if is_quantized(tensor):
        parts = allocate_on_host(tensor.codes), allocate_on_host(tensor.scale), tensor.qmap.cpu()
        return type(tensor)(*parts, tensor.signed, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    content = allocate_aligned(tensor.nbytes, tensor.device)[: tensor.nbytes]
    return content.view(tensor.dtype).view(tensor.shape)


def record_event(device: torch.device) -> Any:
    """Records a CUDA event after the work queued so far; None on a CPU, which queues none."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).record_event()
    return None


def copy_to_host(
    shards: list["TensorShard"], copies: dict[str, Tensor], event: Any, device: torch.device
) -> list["TensorShard"]:
    """Copies the shards' tensors as they are at `event`; returns the shards with the copies.

    On a GPU the copies run on a separate stream.

    Args:
        shards: The shards to copy.
        copies: Filled by the first call with host memory that the next calls use again.
        event: What `record_event` returned.
        device: The device of the shards.
    """
    # A new thread's current device is the first one, so the device is named.
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


def reserve_on_host(shards: list["TensorShard"], copies: dict[str, Tensor]) -> None:
    """Allocates the `copies` of `copy_to_host`. Removes each shard, which frees its tensor."""
    while shards:
        _find_copy(shards.pop(), copies)


def _find_copy(shard: "TensorShard", copies: dict[str, Tensor]) -> Tensor:
    """Returns the host memory for a shard, which may have to be allocated."""
    name = f"{shard.part}/{shard.name}"
    copy = copies.get(name)
    if copy is None or copy.shape != shard.tensor.shape or copy.dtype != shard.tensor.dtype:
        copy = copies[name] = allocate_on_host(shard.tensor)
    return copy


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_TRAINABLE = StateDictOptions(ignore_frozen_params=True)
# bytes of an element -> the integer type of that size
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED_AT_ONCE = 1 << 20  # elements; bounds the int64 temporaries of a checksum to 24 MiB


@dataclass(frozen=True, slots=True)
class TensorShard:
    """This rank's box of a tensor."""

    part: str  # model or optimizer
    name: str
    shape: Shape  # of the unsharded tensor
    offsets: Shape  # the place of the box's first element in the unsharded tensor
    tensor: Any  # the box: a torch tensor, or an OffloadedTensor in a file
    is_first_copy: bool  # False where another rank writes the same values
    is_divided: bool = False  # the ranks of a tensor-parallel group have different boxes


def get_model_state(model: torch.nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Returns the model's tensors by transformers' names, a tied one under one name only.

    They are not copies. With adapters only trained tensors are returned: the adapters and
    `modules_to_save`. An offloaded optimizer's master weights replace the model's.
    """
    names = {clean_tensor_name(name) for name, _ in unwrap(model).named_parameters()}
    state: dict[str, Any]
    if any(map(is_adapter, names)):
        state = get_model_state_dict(model, options=_TRAINABLE)
        state = {name: value for name, value in state.items() if name in names}  # no buffers
    else:
        state = get_model_state_dict(model)
        for name in tied_names(unwrap(model)):
            state.pop(name, None)
    if isinstance(optimizer, OffloadedOptimizer):
        state |= optimizer.master_weights()
    return state


def get_optimizer_state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state, flat: `state.<parameter>.exp_avg` and `param_groups.…`."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.moments()
    complete_state(optimizer)
    with optimizer_state_without_pickles():
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return state


def select_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a flat state that are tensors."""
    kinds = Tensor | ShardedTensor | OffloadedTensor
    return {name: value for name, value in state.items() if isinstance(value, kinds)}


def list_shards(state: Mapping[str, Any], part: str, stages: int = 1) -> list[TensorShard]:
    """Lists this rank's shards of all tensors of `state`, in order of name; they are not copies.

    Tensors that every rank has (under DDP, or scalars) are dealt to the ranks, so that each writes
    about as many bytes.

    Args:
        state: Name -> tensor.
        part: model or optimizer.
        stages: The number of pipeline stages, whose ranks have different layers.
    """
    rank = 0
    stage_size = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        stage_size = dist.get_world_size() // stages
    rank_in_stage = rank % stage_size
    # The tensors; in place of one in a file its parameter, which is sharded alike.
    layouts = {}
    for name, tensor in state.items():
        layouts[name] = tensor.layout if isinstance(tensor, OffloadedTensor) else tensor
    writers = _choose_writers(layouts, stage_size)
    listed: list[TensorShard] = []
    for name, layout in sorted(layouts.items()):
        if isinstance(layout, DTensor):
            shards = _shards_of_dtensor(part, name, layout, rank - rank_in_stage)
        elif isinstance(layout, ShardedTensor):
            shards = _shards_of_sharded_tensor(part, name, layout)
        else:
            shape = tuple(layout.shape)
            offsets = (0,) * len(shape)
            is_writer = writers[name] == rank_in_stage
            shards = [TensorShard(part, name, shape, offsets, layout.detach(), is_writer)]
        tensor = state[name]
        if isinstance(tensor, OffloadedTensor):
            shards = [replace(shard, tensor=tensor) for shard in shards]
        listed += shards
    return listed


def _choose_writers(tensors: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Chooses the rank that writes each tensor that is not sharded: name -> rank in its stage."""
    replicated = {
        name: tensor.nbytes
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor | ShardedTensor)
    }
    writers = {}
    loads = [0] * ranks  # bytes
    for name in sorted(replicated, key=lambda name: (-replicated[name], name)):
        writers[name] = loads.index(min(loads))
        loads[writers[name]] += replicated[name] + 1  # 1 deals out scalars, too
    return writers


def _shards_of_dtensor(part: str, name: str, tensor: DTensor, first_rank: int) -> list[TensorShard]:
    """Returns this rank's shard of a DTensor, or none where that is empty.

    first_rank: That of the pipeline stage.
    """
    local = local_part(tensor).detach()
    if local.numel() == 0 and tensor.numel() > 0:
        return []
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # A copy is the first if its mesh holds the stage's first rank (a tensor-parallel group may have
    # a mesh of its own), and it has the coordinate 0 in each dimension that replicates.
    coordinate = tensor.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, tensor.placements, strict=True)
    replicas = [index for index, placement in placed if isinstance(placement, Replicate)]
    first = first_rank in tensor.device_mesh.mesh and not any(replicas)
    is_divided = TENSOR in (tensor.device_mesh.mesh_dim_names or ())
    return [TensorShard(part, name, tuple(tensor.shape), tuple(offsets), local, first, is_divided)]


def _shards_of_sharded_tensor(part: str, name: str, tensor: Any) -> list[TensorShard]:
    """Returns this rank's shards of FSDP1's tensor."""
    # Under hybrid sharding each group of ranks has all shards.
    first = 0 in dist.get_process_group_ranks(tensor._process_group)
    shape = tuple(tensor.size())
    shards = []
    for shard in tensor.local_shards():
        offsets = tuple(shard.metadata.shard_offsets)
        if shard.tensor.numel():
            shards.append(TensorShard(part, name, shape, offsets, shard.tensor.detach(), first))
    return shards


def encode_file(shards: list[TensorShard]) -> Iterator[bytes | memoryview]:
    """Yields the content of a safetensors file of these shards, one tensor after another.

    A tensor is copied from its device, or dequantized, just before it is yielded.
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
    """Returns the names of a vision-language model's parameters that text does not use."""
    plain = unwrap(model)
    text_prefixes = tuple(map(clean_tensor_name, text_names(plain)))
    names = (clean_tensor_name(name) for name, _ in plain.named_parameters())
    return frozenset(name for name in names if not name.startswith(text_prefixes))


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
        state: What `get_model_state` returned, or the tensors of `get_optimizer_state`.
        part: model or optimizer.
        checkpoint: Its folder.
        world: This rank's place.
        optional: Parameters whose optimizer state either side may lack, all of it: the checkpoint,
            or this run, which does not train them. Earlier versions trained a vision tower without
            images, for which FSDP1 kept state, and most layouts did not.

    Raises:
        UserError: Names or shapes differ. Then this rank has read nothing.
    """
    stored: Mapping[str, StoredTensor] = {}
    has_files = any((checkpoint / part).glob("*.safetensors"))
    if has_files or part == MODEL:  # an optimizer without state (SGD) has no file
        stored = read_folder(checkpoint / part)
    known = set(state)
    if world.stages > 1:
        known.update(chain.from_iterable(world.gather(sorted(state))))
    missing = _leave_out(optional, known - stored.keys(), others=stored.keys())
    unexpected = _leave_out(optional, stored.keys() - known, others=known)
    if missing or unexpected:
        raise _different_names(missing, unexpected, part, checkpoint)
    listed = list_shards(state, part, world.stages)
    shards = [shard for shard in listed if shard.name in stored]
    for shard in shards:
        if stored[shard.name].shape != shard.shape:
            raise UserError(
                f"{checkpoint}: saved from a different model: {shard.name} has shape "
                f"{stored[shard.name].shape}, here {shard.shape}"
            )
    for shard in shards:
        sizes = zip(shard.offsets, shard.tensor.shape, strict=True)
        box = tuple(slice(offset, offset + size) for offset, size in sizes)
        values = read_slice(stored[shard.name], box)
        if is_quantized(shard.tensor):  # torchao's `copy_` quantizes fp32 on the same device
            values = values.to(shard.tensor.device, torch.float32)
        shard.tensor.copy_(values)


def _different_names(
    missing: Sequence[str], unexpected: Sequence[str], part: str, checkpoint: Path
) -> UserError:
    """Makes the error for names that only the run or only the checkpoint has."""
    example = f"it lacks {missing[0]}" if missing else f"there is no {unexpected[0]} here"
    origin = "from a different model"
    if part != MODEL:
        origin = "with a different optimizer or model"
    return UserError(
        f"{checkpoint}: saved {origin}: {example} ({len(missing)} missing, {len(unexpected)} "
        "unexpected); continue with the model and the optimizer of that run, or set another "
        "output_dir"
    )


def _leave_out(
    optional: Collection[str], names: Collection[str], *, others: Collection[str]
) -> list[str]:
    """Returns `names` of one side's optimizer state, sorted, without those of `optional`
    parameters that the other side has no state of.

    others: The names of the other side.

    >>> (
    ...     _leave_out({"a"}, {"state.a.step", "state.b.step"}, others=set()),
    ...     _leave_out({"a"}, {"state.a.step"}, others={"state.a.exp_avg"}),
    ... )
    (['state.b.step'], ['state.a.step'])
    """
    dropped = set(optional) - {_parameter_of(name) for name in others}
    return sorted(name for name in names if _parameter_of(name) not in dropped)


def _parameter_of(name: str) -> str:
    """Returns the parameter of a name such as `state.<parameter>.exp_avg`."""
    return name.removeprefix("state.").rpartition(".")[0]


def set_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Loads a state, which `get_model_state` returned and `read_shards` filled, into the model.

    Where master weights are in files, `read_shards` has filled the parameters with them.
    """
    state = dict(state)
    for name, source in tied_names(unwrap(model)).items():
        if source in state:
            state[name] = state[source]
    # With the frozen parameters: FSDP1 warns of every parameter that is missing.
    all_tensors = get_model_state_dict(model)
    for name, value in state.items():
        if not isinstance(value, OffloadedTensor):
            all_tensors[name] = value
    set_model_state_dict(model, all_tensors)


def set_optimizer_state(
    model: torch.nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Loads a state, which `get_optimizer_state` returned and `read_shards` filled."""
    if not isinstance(optimizer, OffloadedOptimizer):  # whose state was filled in place
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def count_parameters(model: torch.nn.Module) -> int:
    """Counts the parameters of this pipeline stage, unsharded, tied ones once."""
    pipeline = find_pipeline(unwrap(model))
    skipped = set(tied_names(unwrap(model)))
    if pipeline:
        skipped.update(pipeline.copied)
    count = 0
    for name, layer in quantized_layers(unwrap(model)):
        skipped.update((f"{name}.{CODES}", f"{name}.{SCALES}"))
        count += math.prod(layer.full_shape)
    state: dict[str, Any] = get_model_state_dict(model)
    for name, tensor in state.items():
        if name not in skipped:
            count += math.prod(tensor.size())
    return count


def refuse_different_replicas(shards: list[TensorShard], step: int, ranks: RankGroup) -> None:
    """Raises `UserError` on all ranks if copies of the same part of the state differ.

    Compares replicas, and the tensors that every rank of a tensor-parallel group has. Each rank
    sends one digest for each comparison.

    shards: All of this rank's shards, first copies or not.
    """
    stage_size = ranks.world.stage_size
    shard_group_size = ranks.world.shard_group_size
    tensor_group_size = stage_size // ranks.world.tensor_group_count

    def find_first_copy(rank: int) -> int:
        """Finds the rank of the first replica in the same stage that has the same shards."""
        rank_in_stage = rank % stage_size
        return rank - rank_in_stage + rank_in_stage % shard_group_size

    if stage_size > shard_group_size:  # several replicas
        _refuse_different(shards, step, ranks, find_first_copy)
    if tensor_group_size > 1:
        replicated = [shard for shard in shards if not shard.is_divided]
        _refuse_different(replicated, step, ranks, lambda rank: rank - rank % tensor_group_size)


def _refuse_different(
    shards: list[TensorShard], step: int, ranks: RankGroup, first_of: Callable[[int], int]
) -> None:
    """Raises `UserError` on all ranks where the shards of two ranks differ that must be equal.

    first_of: Rank -> the rank with which it is compared.
    """
    sums = {f"{shard.part}/{shard.name}": int(weighted_sum(shard.tensor)) for shard in shards}
    digests = ranks.on_all(lambda: xxhash.xxh3_64_hexdigest(json.dumps(sums).encode()))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[first_of(rank)]]
    if not different:
        return
    sums_of_ranks = ranks.on_all(lambda: sums)
    rank = different[0]
    first = first_of(rank)
    names = dict.fromkeys([*sums_of_ranks[first], *sums_of_ranks[rank]])
    unequal = [
        name for name in names if sums_of_ranks[first].get(name) != sums_of_ranks[rank].get(name)
    ]
    raise UserError(
        f"step {step} is not saved: ranks {first} and {rank} hold replicas of the model, but "
        f"{len(unequal)} of {len(names)} tensors are not equal, {unequal[0]} the first; "
        "start the run again to resume from an earlier checkpoint, and if it happens again, test "
        "the memory of these ranks, or report a bug"
    )


def weighted_sum(tensor: Any) -> Tensor:
    """Returns a checksum: the sum of each element's bits times 2 * position + 1, modulo 2**64.

    The sum of integers does not depend on their order, so that every device gives the same. One
    changed element always changes it, because the factors are odd.

    Returns:
        0-dim int64, on the tensor's device.
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
    """Makes FSDP1's `get_optimizer_state_dict` exchange names, shapes and scalars as JSON.

    torch's `all_gather_object` sends pickles, and unpickling runs code that another rank sends.
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
    """Replaces `dist.all_gather_object` for the two kinds of value that FSDP1 sends.

    They are a list of keys, or states by parameter name.
    """
    device = _get_pg_default_device(group)
    if isinstance(value, dict):
        plain = {name: _encode_state(info) for name, info in value.items()}
        for index, states in enumerate(gather_json(plain, group, device)):
            gathered[index] = {name: _decode_state(info) for name, info in states.items()}
        return
    for index, keys in enumerate(gather_json(value, group, device)):
        gathered[index] = [_OptimStateKey(tuple(names), is_managed) for names, is_managed in keys]


def _encode_state(info: StateInfo) -> dict[str, Any]:
    """Returns the state's names, shapes, dtypes and scalars as values of JSON."""
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
    """Reads what `_encode_state` returned."""
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
