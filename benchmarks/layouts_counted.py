"""What layouts.py counts in a step: the collectives with their bytes, and what is kept for the
backward.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.schema import Batch, Data, Recipe
from finetune.data.batches import StepBatch
from finetune.distributed.world import World
from finetune.plan.architecture import read_architecture
from finetune.plan.run_spec import RunSpec
from finetune.plan.speed import count_communication

KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}


def communication(step: Callable[[], Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of `step` on this rank by kind: calls, and bytes of the larger of what goes
    in and what comes out.
    """
    with _Collectives() as found:
        step()
    return dict(found.calls), dict(found.moved)


class _Collectives(TorchDispatchMode):
    """Counts the collectives inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations come here in turn
        name = operator.__name__.replace("_", "")
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        out = operator(*args, **(kwargs or {}))
        if kind is not None and operator.namespace in ("c10d", "_c10d_functional"):
            self.calls[kind] += 1
            self.moved[kind] += max(_nbytes(each) for each in (*args, out))
        return out


def _nbytes(value: Any) -> int:
    """Of a tensor, or of those in a list."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def planned_communication(
    model_config: Mapping[str, Any], rows: int, length: int, world: World
) -> tuple[dict[str, int], dict[str, int]]:
    """What the plan counts of the same step: calls and bytes by kind, without the sum of the
    gradients' norm.
    """
    batch = Batch(global_batch_size=rows)
    recipe = Recipe(path="layouts.py", data=Data(max_length=length, packing=False), batch=batch)
    spec = RunSpec(
        architecture=read_architecture(model_config, "model"),
        recipe=recipe,
        sharding=world.sharding,
        ranks=world.size,
        ranks_per_node=world.local_size,
        device="cpu" if world.device.type == "cpu" else "cuda",
    )
    calls = Counter[str]()
    moved = Counter[str]()
    for each in count_communication(spec):
        calls[each.kind] += each.calls
        moved[each.kind] += each.bytes
    return dict(calls), dict(moved)


def kept_bytes(model: nn.Module, batch: StepBatch, world: World) -> int:
    """What autograd keeps of the first micro-batch from its forward to its backward, parameters
    aside.
    """
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        # as gathered at this moment
        held = {_storage(parameter).data_ptr() for parameter in model.parameters()}
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
