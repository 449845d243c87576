"""The state of model and optimizer as shards: this rank's box of each tensor, under one name.

In every layout, the first copies of all ranks' shards cover each tensor exactly once, and names do
not depend on the layout. A checkpoint can therefore be read in any layout and on any number of
ranks. The files are those of `torch.distributed.checkpoint`'s
HuggingFaceStorageWriter(save_distributed=True); its reader can open them.
"""

import json
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
from finetune.distributed.world import TENSOR, RankGroup, World, gather_json
from finetune.errors import UserError
from finetune.files.tensors import StoredTensor, header_bytes, read_folder, read_slice
from finetune.optim.offload import OffloadedOptimizer, OffloadedTensor, allocate_aligned
from finetune.optim.optimizers import complete_state


def is_quantized(tensor: Any) -> bool:
    """Returns whether `tensor` is an 8-bit tensor of torchao's optimizers."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def dequantize(tensor: Any) -> Tensor:
    """Decodes an 8-bit tensor of torchao to fp32.

    torchao quantizes the result to the same codes and scales again. For this, the lowest signed
    code is decoded to -1, where torchao decodes it to -0.993. The code stands for the largest
    magnitude in a block. That magnitude is the block's scale, and another scale would change every
    code of the block.
    """
    code_values = tensor.qmap.clone()
    if tensor.signed:
        code_values[0] = -1.0
    blocks = code_values[tensor.codes.int()].view(len(tensor.scale), -1)
    scaled: Tensor = blocks * tensor.scale.view(-1, 1)
    return scaled.view(tensor.shape)


def plain_chunks(tensor: Any) -> Iterator[Tensor]:
    """Yields the elements of a plain, quantized or offloaded tensor as flat tensors, in order.

    An offloaded tensor comes in chunks, any other in one piece; a quantized one is decoded to fp32.
    """
    if isinstance(tensor, OffloadedTensor):
        yield from tensor.chunks()
        return
    if is_quantized(tensor):
        tensor = dequantize(tensor)
    yield tensor.contiguous().reshape(-1)


def allocate_on_host(tensor: Any) -> Any:
    """Allocates a tensor like `tensor` in host memory, without values.

    `tensor` may be quantized. The memory is pinned if `tensor` is on a GPU.
    """
    if is_quantized(tensor):
        parts = allocate_on_host(tensor.codes), allocate_on_host(tensor.scale), tensor.qmap.cpu()
        return type(tensor)(*parts, tensor.signed, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = allocate_aligned(tensor.nbytes, tensor.device)  # uint8; may be longer than asked for
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def record_event(device: torch.device) -> Any:
    """Records a CUDA event after all work that is queued; None on a CPU, which queues no work."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).record_event()
    return None


def copy_to_host(
    shards: list["TensorShard"], copies: dict[str, Tensor], event: Any, device: torch.device
) -> list["TensorShard"]:
    """Copies shards to host memory, as they are at `event`; returns the shards with the copies.

    On a GPU the copies run on a stream of their own, and are complete when this returns.

    Args:
        shards: The shards to copy.
        copies: Host memory by shard. The first call adds it, and later calls overwrite it.
        event: What `record_event` returned.
        device: The device of the shards.
    """
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
    """Allocates the `copies` that `copy_to_host` will use.

    Empties the list `shards` one by one, so that a tensor that nothing else holds is freed soon.
    """
    while shards:
        _find_copy(shards.pop(), copies)


def _find_copy(shard: "TensorShard", copies: dict[str, Tensor]) -> Tensor:
    """Returns the host memory for a shard; allocates it if `copies` has none that fits."""
    name = f"{shard.part}/{shard.name}"
    copy = copies.get(name)
    if copy is None or copy.shape != shard.tensor.shape or copy.dtype != shard.tensor.dtype:
        copy = allocate_on_host(shard.tensor)
        copies[name] = copy
    return copy


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_TRAINABLE = StateDictOptions(ignore_frozen_params=True)
# bytes of an element -> the integer type of that size
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED_AT_ONCE = 1 << 20  # elements; limits a checksum's int64 temporaries to 24 MiB


@dataclass(frozen=True, slots=True)
class TensorShard:
    """This rank's box of a tensor: a contiguous range of indices in each dimension."""

    part: str  # model or optimizer
    name: str  # the tensor's name, the same in every layout
    shape: Shape  # the shape of the unsharded tensor
    offsets: Shape  # the index of the box's first element in the unsharded tensor
    tensor: Any  # the box: a torch tensor, or an OffloadedTensor in a file
    is_first_copy: bool  # False if another rank has the same box and writes it
    is_divided: bool = False  # whether ranks of a tensor-parallel group have different boxes


def get_model_state(model: torch.nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Returns the model's tensors by transformers' names; a tied tensor has its first name only.

    They are not copies, except under FSDP1. With adapters, only trained parameters are returned:
    the adapters and `modules_to_save`. An offloaded `optimizer` adds its master weights, which
    replace the model's parameters.
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
    """Returns the optimizer's state in one dict, under flat names.

    Names are such as `state.<parameter>.exp_avg` and `param_groups.…`. Tensors are not copies,
    except under FSDP1. An optimizer that has no state yet gets it here; {} if it keeps none. An
    offloaded optimizer returns its moments only.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.moments()
    complete_state(optimizer)
    if not optimizer.state:  # torch would make the gradients of all parameters to look for a state
        return {}
    with optimizer_state_without_pickles():
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return state


def select_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a flat state that are tensors, sharded and offloaded ones included."""
    tensor_types = Tensor | ShardedTensor | OffloadedTensor
    return {name: value for name, value in state.items() if isinstance(value, tensor_types)}


def list_shards(state: Mapping[str, Any], part: str, stages: int = 1) -> list[TensorShard]:
    """Lists this rank's shards of all tensors of `state`, in order of name. They are not copies.

    A tensor that every rank of a stage has (under DDP, or a scalar) is the first copy on one rank
    only, chosen so that all ranks write about as many bytes.

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
    # How each tensor is sharded. An offloaded tensor is sharded like its parameter, which stands in
    # for it.
    layouts = {}
    for name, tensor in state.items():
        layouts[name] = tensor.layout if isinstance(tensor, OffloadedTensor) else tensor
    writers = _choose_writers(layouts, stage_size)
    all_shards: list[TensorShard] = []
    for name, layout in sorted(layouts.items()):
        if isinstance(layout, DTensor):
            shards = _list_dtensor_shards(part, name, layout, rank - rank_in_stage)
        elif isinstance(layout, ShardedTensor):
            shards = _list_fsdp1_shards(part, name, layout)
        else:
            shape = tuple(layout.shape)
            offsets = (0,) * len(shape)
            is_writer = writers[name] == rank_in_stage
            shards = [TensorShard(part, name, shape, offsets, layout.detach(), is_writer)]
        tensor = state[name]
        if isinstance(tensor, OffloadedTensor):
            shards = [replace(shard, tensor=tensor) for shard in shards]
        all_shards += shards
    return all_shards


def _choose_writers(tensors: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Chooses which rank of a stage writes each tensor that is not sharded.

    Returns name -> index of the rank in its stage. `ranks` is the number of ranks in a stage. The
    largest tensors are dealt out first, each to the rank with the fewest bytes so far.
    """
    replicated_bytes = {
        name: tensor.nbytes
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor | ShardedTensor)
    }
    writers = {}
    loads = [0] * ranks  # bytes
    for name in sorted(replicated_bytes, key=lambda name: (-replicated_bytes[name], name)):
        writer = loads.index(min(loads))
        writers[name] = writer
        loads[writer] += replicated_bytes[name] + 1  # with the 1, empty tensors are dealt out too
    return writers


def _list_dtensor_shards(
    part: str, name: str, tensor: DTensor, first_rank: int
) -> list[TensorShard]:
    """Lists this rank's shard of a DTensor; the list is empty if the shard has no elements.

    A tensor that has no elements itself has a shard. `first_rank`: the first rank of this rank's
    pipeline stage.
    """
    local = local_part(tensor).detach()
    if local.numel() == 0 and tensor.numel() > 0:
        return []
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # A shard is the first copy if the mesh contains the stage's first rank (a tensor-parallel group
    # may have a mesh of its own), and this rank's coordinate is 0 in each replicated dimension.
    mesh = tensor.device_mesh
    coordinates = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    replicas = [index for index, placement in coordinates if isinstance(placement, Replicate)]
    is_first_copy = first_rank in mesh.mesh and not any(replicas)
    return [
        TensorShard(
            part,
            name,
            tuple(tensor.shape),
            tuple(offsets),
            local,
            is_first_copy,
            is_divided=TENSOR in (mesh.mesh_dim_names or ()),
        )
    ]


def _list_fsdp1_shards(part: str, name: str, tensor: Any) -> list[TensorShard]:
    """Lists this rank's shards of an FSDP1 tensor (`ShardedTensor`), except empty ones."""
    # Under hybrid sharding each group of ranks has all shards; the group of rank 0 writes them.
    is_first_copy = 0 in dist.get_process_group_ranks(tensor._process_group)
    shape = tuple(tensor.size())
    shards = []
    for shard in tensor.local_shards():
        offsets = tuple(shard.metadata.shard_offsets)
        if shard.tensor.numel():
            local = shard.tensor.detach()
            shards.append(TensorShard(part, name, shape, offsets, local, is_first_copy))
    return shards


def encode_file(shards: list[TensorShard]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file with these shards: the header, then the tensors.

    A tensor is copied from its device, or decoded, just before it is yielded.
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
    """Returns the names of the parameters beside the language model, such as a vision tower's."""
    transformers_model = unwrap(model)
    text_prefixes = tuple(map(clean_tensor_name, text_names(transformers_model)))
    names = (clean_tensor_name(name) for name, _ in transformers_model.named_parameters())
    return frozenset(name for name in names if not name.startswith(text_prefixes))


def read_shards(
    state: Mapping[str, Any],
    part: str,
    checkpoint: Path,
    world: World,
    optional: Collection[str] = (),
) -> None:
    """Fills this rank's shards of `state` from the checkpoint, in place. All ranks call it.

    Args:
        state: What `get_model_state` returned, or the tensors of `get_optimizer_state`.
        part: model or optimizer.
        checkpoint: The checkpoint's folder.
        world: The ranks.
        optional: Names of parameters whose optimizer state may be missing as a whole, in the
            checkpoint or in this run. Earlier versions trained a vision tower even without images;
            FSDP1 then kept state for it, and most other layouts did not.

    Raises:
        UserError: If names or shapes differ. Then this rank has read nothing.
    """
    stored: Mapping[str, StoredTensor] = {}
    has_files = any((checkpoint / part).glob("*.safetensors"))
    if has_files or part == MODEL:  # an optimizer without state (SGD) has no file
        stored = read_folder(checkpoint / part)
    expected = set(state)
    if world.stages > 1:  # the checkpoint has the tensors of all stages
        expected.update(chain.from_iterable(world.gather(sorted(state))))
    missing = _leave_out(optional, expected - stored.keys(), others=stored.keys())
    unexpected = _leave_out(optional, stored.keys() - expected, others=expected)
    if missing or unexpected:
        raise _make_name_error(missing, unexpected, part, checkpoint)
    all_shards = list_shards(state, part, world.stages)
    shards = [shard for shard in all_shards if shard.name in stored]
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
        if is_quantized(shard.tensor):  # torchao's `copy_` quantizes, but only fp32 on its device
            values = values.to(shard.tensor.device, torch.float32)
        shard.tensor.copy_(values)
        del values  # before the next ones are read


def _make_name_error(
    missing: Sequence[str], unexpected: Sequence[str], part: str, checkpoint: Path
) -> UserError:
    """Makes the error for a checkpoint with other tensors than this run.

    `missing`: names that only the run has. `unexpected`: names that only the checkpoint has.
    """
    example = f"it lacks {missing[0]}" if missing else f"there is no {unexpected[0]} here"
    origin = "from a different model"
    if part != MODEL:
        origin = "with a different optimizer or model, or by another version"
    return UserError(
        f"{checkpoint}: saved {origin}: {example} ({len(missing)} missing, {len(unexpected)} "
        "unexpected); continue with the model, the optimizer and the version of that run, or set "
        "another output_dir"
    )


def _leave_out(
    optional: Collection[str], names: Collection[str], *, others: Collection[str]
) -> list[str]:
    """Returns `names`, sorted, without optimizer state that the other side may lack.

    A name is left out if its parameter is `optional` and the other side has no state of it at all.

    Args:
        optional: Names of parameters.
        names: Names in the state of one side: the checkpoint, or this run.
        others: Names in the state of the other side.

    >>> (
    ...     _leave_out({"a"}, {"state.a.step", "state.b.step"}, others=set()),
    ...     _leave_out({"a"}, {"state.a.step"}, others={"state.a.exp_avg"}),
    ... )
    (['state.b.step'], ['state.a.step'])
    """
    absent = set(optional) - {_parameter_of(name) for name in others}
    return sorted(name for name in names if _parameter_of(name) not in absent)


def _parameter_of(name: str) -> str:
    """Returns the parameter's name in a name such as `state.<parameter>.exp_avg`."""
    parameter, _, _ = name.removeprefix("state.").rpartition(".")
    return parameter


def set_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Loads a state, which `get_model_state` returned and `read_shards` filled, into the model.

    Offloaded master weights are left out: `read_shards` has filled the parameters with them.
    """
    with_tied = dict(state)
    for name, first_name in tied_names(unwrap(model)).items():
        if first_name in with_tied:
            with_tied[name] = with_tied[first_name]
    # FSDP1 warns of every missing parameter, so the dict has those too that the state lacks: frozen
    # ones beside adapters, and offloaded ones. Otherwise FSDP1 need not copy the model for them.
    has_adapters = any(map(is_adapter, state))
    has_offloaded = any(isinstance(value, OffloadedTensor) for value in state.values())
    all_tensors = get_model_state_dict(model) if has_adapters or has_offloaded else {}
    for name, value in with_tied.items():
        if not isinstance(value, OffloadedTensor):
            all_tensors[name] = value
    set_model_state_dict(model, all_tensors)


def set_optimizer_state(
    model: torch.nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Loads a state, which `get_optimizer_state` returned and `read_shards` filled."""
    # An offloaded optimizer's state is in files, which `read_shards` has filled in place.
    if state and not isinstance(optimizer, OffloadedOptimizer):
        set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def refuse_different_replicas(shards: list[TensorShard], step: int, ranks: RankGroup) -> None:
    """Raises `UserError` on all ranks if two ranks have different values for the same shards.

    Compares replicas of the model, and within a tensor-parallel group the tensors that all of its
    ranks have. For each of these comparisons a rank sends only a digest. All ranks call it.

    `shards`: all shards of this rank, first copies or not.
    """
    stage_size = ranks.world.stage_size
    shard_group_size = ranks.world.shard_group_size
    tensor_group_size = stage_size // ranks.world.tensor_group_count

    def find_first_copy(rank: int) -> int:
        """Returns the rank that has the same shards in the first replica of the same stage."""
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
    """Raises `UserError` on all ranks if a rank's shards differ from those of `first_of(rank)`.

    The shards of both ranks must be equal. The error names the first unequal tensor.
    """
    sums = {f"{shard.part}/{shard.name}": int(weighted_sum(shard.tensor)) for shard in shards}
    digests = ranks.on_all(lambda: xxhash.xxh3_64_hexdigest(json.dumps(sums).encode()))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[first_of(rank)]]
    if not different:
        return
    sums_by_rank = ranks.on_all(lambda: sums)  # only now, since they are long
    rank = different[0]
    first = first_of(rank)
    names = dict.fromkeys([*sums_by_rank[first], *sums_by_rank[rank]])
    unequal = [
        name for name in names if sums_by_rank[first].get(name) != sums_by_rank[rank].get(name)
    ]
    raise UserError(
        f"step {step} is not saved: ranks {first} and {rank} hold replicas of the model, but "
        f"{len(unequal)} of {len(names)} tensors are not equal, {unequal[0]} the first; "
        "start the run again to resume from an earlier checkpoint, and if it happens again, test "
        "the memory of these ranks, or report a bug"
    )


def weighted_sum(tensor: Any) -> Tensor:
    """Computes a checksum: the sum of each element's bits times 2 * position + 1, modulo 2**64.

    A sum of integers does not depend on their order, so every device gives the same checksum. If
    one element changes, the checksum always changes, because the factors are odd.

    Returns:
        0-dim int64, on the tensor's device.
    """
    total = torch.zeros((), dtype=torch.int64)
    position = 0
    for chunk in plain_chunks(tensor):
        bits = chunk.view(_INTEGERS[chunk.element_size()])
        total = total.to(bits.device)
        for start in range(0, bits.numel(), _SUMMED_AT_ONCE):
            piece = bits[start : start + _SUMMED_AT_ONCE]
            positions = torch.arange(position, position + piece.numel(), device=bits.device)
            total += (piece * (positions * 2 + 1)).sum()
            position += piece.numel()
    return total


@contextmanager
def optimizer_state_without_pickles() -> Iterator[None]:
    """Makes torch exchange FSDP1's optimizer state without pickles, in this block.

    Names, shapes and scalars are sent as JSON, by a replacement of `dist.all_gather_object`.
    torch's own function sends pickles, and to unpickle is to run code that another rank sent.
    """
    original = dist.all_gather_object
    dist.all_gather_object = _all_gather_json  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = original


def _all_gather_json(
    gathered: list[Any], value: Any, group: dist.ProcessGroup | None = None
) -> None:
    """Replaces `dist.all_gather_object` for the two kinds of values that FSDP1 sends.

    They are a dict of states by parameter name, or a list of keys. Writes the value of each rank
    into `gathered`, in order of rank.
    """
    device = _get_pg_default_device(group)
    if isinstance(value, dict):
        encoded = {name: _encode_state(info) for name, info in value.items()}
        for index, states in enumerate(gather_json(encoded, group, device)):
            gathered[index] = {name: _decode_state(state) for name, state in states.items()}
        return
    for index, keys in enumerate(gather_json(value, group, device)):
        gathered[index] = [_OptimStateKey(tuple(names), is_managed) for names, is_managed in keys]


def _encode_state(info: StateInfo) -> dict[str, Any]:
    """Encodes the names, shapes, dtypes and scalars of a parameter's state as a JSON object."""
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


def _decode_state(encoded: dict[str, Any]) -> StateInfo:
    """Decodes what `_encode_state` returned."""
    return StateInfo(
        {
            name: _PosDimTensorInfo(torch.Size(shape), getattr(torch, dtype))
            for name, (shape, dtype) in encoded["tensors"].items()
        },
        {
            name: torch.tensor(number, dtype=getattr(torch, dtype))
            for name, (number, dtype) in encoded["scalars"].items()
        },
        encoded["values"],
    )
