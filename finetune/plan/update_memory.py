"""The memory of the update: what it allocates, and without sharding what of the gradients exists at once where each is freed in the
backward (`optim_in_backward`): one tensor's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.plan.fsdp_units import split_into_units
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import FP32, StateTensor

UPDATE_COPIES = {"adafactor": 3, "sgd": 1}  # of the largest tensor's shard, while it is updated
FP64 = 8  # bytes; on a CPU the norm of a gradient is that of a copy in fp64


@dataclass(frozen=True, slots=True)
class UpdateInBackward:
    """Bytes on one rank at a point of the backward."""

    gradients: int  # where nothing is sharded
    temporaries: int


def update_temporaries(spec: RunSpec) -> int:
    """What norm and update of all gradients allocate at once."""
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable]
    at_once = 0 if spec.sharding.cpu_offload else spec.state().gradients
    if (
        spec.files() is not None
    ):  # one tensor after another: the root of its second moment, and that over the correction
        at_once = 2 * FP32 * -(-max(tensor.numel for tensor in trained) // spec.shards)
    return _temporaries(spec, trained, at_once)


def plan_updates_in_backward(spec: RunSpec) -> Mapping[str, UpdateInBackward]:
    """The updates of the head (with the final norm), of a layer and of the embedding, on the rank that holds the most; a tied
    head is updated with the embedding."""
    layers, embedding, tail = (_trained(spec, unit) for unit in ("layer", "embedding", "tail"))
    if spec.architecture.tied:
        embedding, tail = [*embedding, *tail], []
    layer, waiting = layers, 0
    if spec.sharding.is_fsdp:
        units = split_into_units(spec.architecture, spec.part_tensors, spec.sharding)
        if units.layer != units.layers:
            layer = [tensor for tensor in layers if tensor.unit == f"layer {spec.architecture.widest_layer}"]
    elif spec.architecture.tied:  # the head's gradient waits for the embedding's, whole, as the loss computes it
        waiting = FP32 * sum(tensor.numel for tensor in embedding if tensor.unit == "embedding")
    found = {}
    for part, tensors in (("head", tail), ("layer", layer), ("embedding", embedding)):
        largest = max((tensor.numel * tensor.itemsize for tensor in tensors), default=0)
        temporaries = _temporaries(spec, tensors, -(-largest // spec.shards))
        found[part] = UpdateInBackward(largest + (0 if part == "head" else waiting), temporaries)
    return found


def _temporaries(spec: RunSpec, tensors: Sequence[StateTensor], at_once: int) -> int:
    """The foreach AdamW allocates the root of every second moment that it updates together (`at_once` bytes), the fused one
    nothing; Adafactor and SGD work on one tensor after another, the first with its square, its update and the moved weights."""
    optim = spec.recipe.optimization.optim
    largest = -(-max((tensor.numel for tensor in tensors), default=0) // spec.shards)
    norm = FP64 * largest if spec.device == "cpu" else 0
    if optim in UPDATE_COPIES:
        return max(norm, UPDATE_COPIES[optim] * FP32 * largest)
    return max(norm, at_once if optim == "adamw_torch" else 0)


def _trained(spec: RunSpec, unit: str) -> list[StateTensor]:
    return [tensor for tensor in spec.part_tensors if tensor.trainable and tensor.unit.startswith(unit)]
