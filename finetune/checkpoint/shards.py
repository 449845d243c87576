"""The tensors of a training run as pieces: the part of each that this rank holds, under the layout-free name of the whole.

The pieces of all ranks cover every tensor exactly once, whatever the layout, so that a checkpoint written by any number
of ranks in any layout is read by any other. The files are those of `torch.distributed.checkpoint`'s
HuggingFaceStorageWriter(save_distributed=True); its reader opens them too.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.checkpoint.quantized_moments import dequantized, host_memory, is_quantized, quantize_into
from finetune.errors import UserError
from finetune.safetensors_io.header import header_bytes
from finetune.safetensors_io.tensors import read_folder, read_slice

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_TRAINABLE = StateDictOptions(ignore_frozen_params=True)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, held by this rank."""

    part: str  # model or optimizer
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the piece's first element in the whole
    tensor: torch.Tensor
    is_first_copy: bool  # False where a rank before this one holds the same piece


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The trained parameters by transformers' names, each where it lives; a tied tensor under one name only."""
    state: dict[str, Any] = get_model_state_dict(model, options=_TRAINABLE)
    for name in _tied(model):
        state.pop(name, None)
    return state


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, flat: `state.<parameter>.exp_avg` and so on; and `param_groups.…`, which are no tensors."""
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return state


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The entries of a flat state that are tensors."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor | ShardedTensor)}


def pieces_of(state: Mapping[str, torch.Tensor], part: str) -> list[Piece]:
    """This rank's pieces of all tensors, in order of name. The tensors are those of `state`, not copies.

    Tensors that every rank holds whole (DDP, scalars) are dealt out over the ranks by size, so that all write alike.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = sorted(
        (n for n, t in state.items() if not isinstance(t, DTensor | ShardedTensor)), key=lambda n: (-state[n].nbytes, n)
    )
    writers, loads = {}, [0] * size
    for name in whole:
        writers[name] = loads.index(min(loads))
        loads[writers[name]] += state[name].nbytes + 1  # + 1 deals out scalars too
    found = []
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, DTensor):
            found += _pieces_of_dtensor(part, name, tensor)
        elif isinstance(tensor, ShardedTensor):
            found += _pieces_of_sharded_tensor(part, name, tensor)
        else:
            shape = tuple(tensor.shape)
            found.append(Piece(part, name, shape, (0,) * len(shape), tensor.detach(), writers[name] == rank))
    return found


def _pieces_of_dtensor(part: str, name: str, tensor: DTensor) -> list[Piece]:
    local = tensor.to_local().detach()
    if local.numel() == 0 and tensor.numel() > 0:
        return []
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    first = all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    return [Piece(part, name, tuple(tensor.shape), tuple(offsets), local, first)]


def _pieces_of_sharded_tensor(part: str, name: str, tensor: Any) -> list[Piece]:
    first = 0 in dist.get_process_group_ranks(
        tensor._process_group
    )  # hybrid sharding: each group of ranks holds it all
    return [
        Piece(part, name, tuple(tensor.size()), tuple(shard.metadata.shard_offsets), shard.tensor.detach(), first)
        for shard in tensor.local_shards()
        if shard.tensor.numel()
    ]


def moment(device: torch.device) -> Any:
    """The point in a GPU's queue at which all that was asked for until now is done; None on the CPU, where it is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def copied_to_host(pieces: list[Piece], copies: dict[str, torch.Tensor], now: Any, device: torch.device) -> list[Piece]:
    """The pieces with their tensors, as they are at the moment `now`, copied into `copies`.

    Those are made at the first call and reused by the next. On a GPU the copies have a queue of their own.
    """
    # A new thread's device is the first, whatever the loop's is.
    stream = None if now is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copied = []
    with torch.cuda.stream(stream):
        if stream is not None:
            stream.wait_event(now)
        for piece in pieces:
            name, tensor = f"{piece.part}/{piece.name}", piece.tensor
            copy = copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = copies[name] = host_memory(tensor)
            copy.copy_(tensor, non_blocking=True)
            copied.append(replace(piece, tensor=copy))
    if stream is not None:
        stream.synchronize()
    return copied


def file_chunks(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """A safetensors file of these pieces, a tensor at a time: copied from its device, or made fp32 of 8 bits, when its turn comes."""
    offsets = json.dumps({piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces})
    yield header_bytes(
        ((piece.name, piece.tensor.dtype, tuple(piece.tensor.shape)) for piece in pieces),
        {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"},
    )
    for piece in pieces:
        if piece.tensor.numel():
            plain = dequantized(piece.tensor) if is_quantized(piece.tensor) else piece.tensor
            yield plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_into(state: Mapping[str, torch.Tensor], part: str, checkpoint: Path) -> None:
    """Fills this rank's pieces of `state` from the checkpoint's `part`, whose tensors must be the same by name and shape.

    Raises `UserError`, before anything is read, where they are not.
    """
    pieces, stored = pieces_of(state, part), read_folder(checkpoint / part)
    missing, left = sorted(state.keys() - stored.keys()), sorted(stored.keys() - state.keys())
    if missing or left:
        named = f"has no {missing[0]}" if missing else f"has {left[0]}, which this model has not"
        raise UserError(f"{checkpoint}: is of another model: it {named} ({len(missing)} missing, {len(left)} too many)")
    for piece in pieces:
        if stored[piece.name].shape != piece.shape:
            raise UserError(
                f"{checkpoint}: is of another model: {piece.name} has shape {stored[piece.name].shape}, here {piece.shape}"
            )
    for piece in pieces:
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        values = read_slice(stored[piece.name], box)
        if is_quantized(piece.tensor):
            quantize_into(piece.tensor, values)
        else:
            piece.tensor.copy_(values)


def set_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Puts `state` (of `model_state`, filled in) into the model."""
    tied = {name: state[source] for name, source in _tied(model).items() if source in state}
    # The frozen ones too: FSDP1 warns of every parameter that it is not given.
    set_model_state_dict(model, get_model_state_dict(model) | state | tied)


def set_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Puts `state` (of `optimizer_state`, filled in) into the optimizer."""
    set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def count_parameters(model: torch.nn.Module) -> int:
    """The whole model's parameters over all ranks, tied ones once."""
    state: dict[str, Any] = get_model_state_dict(model)
    return sum(math.prod(tensor.size()) for name, tensor in state.items() if name not in _tied(model))


def plain_model(model: torch.nn.Module) -> Any:
    """The transformers model inside DDP's and FSDP1's wrappers."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one, and whose."""
    return dict(getattr(plain_model(model), "all_tied_weights_keys", None) or {})
