"""What layouts.py counts in a step: the collectives with their bytes, and what is kept for the backward."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.batches import StepBatch
from finetune.distributed.world import World

FP32 = 4  # bytes


def communication(step: Callable[[], Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of `step` on this rank by kind: calls, and bytes of the larger of what goes in and what comes out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
    with _AllReduced() as reduced:  # apart, since the profiler would see each call twice
        step()
    kinds = {"allgather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce"}
    kinds |= {"alltoall": "all-to-all"}
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for event in profile.events() or ():
        for part, kind in kinds.items():
            if event.name.startswith("c10d::") and part in event.name:
                calls[kind] += 1
                moved[kind] += max(FP32 * numel for numel in _numels(event.input_shapes))
    if calls["all-reduce"]:
        moved["all-reduce"] = reduced.total
    return {kind: count for kind, count in calls.items() if count}, dict(moved)


class _AllReduced(TorchDispatchMode):
    """Counts the bytes of the tensors that are all-reduced inside this context: the profiler does not see their shapes."""

    total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations come here in turn
        if (
            operator.namespace in ("c10d", "_c10d_functional")
            and "reduce" in operator.__name__
            and "all" in operator.__name__
        ):
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.total += sum(tensor.nbytes for tensor in tensors)
        return operator(*args, **(kwargs or {}))


def _numels(shapes: list[Any]) -> Iterator[int]:
    """The numbers in each tensor of a call; a list of tensors is one."""
    for shape in shapes:
        is_list = bool(shape) and isinstance(shape[0], list)
        yield sum(prod(each) for each in shape) if is_list else prod(shape) if shape else 0


def kept_bytes(model: nn.Module, batch: StepBatch, world: World) -> int:
    """What autograd keeps of the first micro-batch from its forward to its backward, parameters aside."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        held = {_storage(parameter).data_ptr() for parameter in model.parameters()}  # as gathered at this moment
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch.micro_batches[0].to(world.device).inputs)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(kept.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
