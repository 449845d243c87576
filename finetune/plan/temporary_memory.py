"""What a layout itself holds during a step: units that are gathered, or on their way, and gradients until they are reduced.

The order of events is torch's own (torch/distributed/fsdp/_fully_shard): the backward of a unit begins with the all-gather of the one
before it; at its end it is freed, its gradients are copied into the input of a reduce-scatter, and that input is held until the next
unit's. Units are the embedding, every decoder layer, and the tail (final norm and head), which stays gathered from forward to
backward (Accelerate's fsdp2_prepare_model).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.constants import ITEMSIZE
from finetune.plan.fsdp_units import Unit, split_into_units
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import FP32, count_state


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes of one unit on one rank."""

    gathered: int = 0  # in the compute dtype
    arriving: int = 0  # what its all-gather fills before the unit is copied out of it
    unreduced: int = 0  # gradients as the backward leaves them, of the whole unit
    reducing: int = 0  # the same as the input of the reduce-scatter
    shard: int = 0  # this rank's part of the gradients


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """The units of a model, one of its decoder layers among them. A tied head, and FSDP1's, has the embedding in its unit, which
    waits for the backward of the embedding."""

    embedding: UnitMemory
    layer: UnitMemory
    tail: UnitMemory
    layers: int  # units of them
    layer_staying: int = 0  # bytes of a gathered layer that is kept until its own backward
    kept_in_forward: int = 0  # bytes of all layers that are still there when the loss is computed
    tail_waits: bool = False
    buckets: int = 0  # of DDP, beside every gradient
    waiting_gradient: int = 0  # of a tied head where nothing is sharded


def plan_layout_memory(spec: RunSpec) -> LayoutMemory:
    """What the layout of `spec` holds of each unit."""
    return _plan_units(spec) if spec.sharding.is_fsdp else _plan_whole(spec)


def _plan_units(spec: RunSpec) -> LayoutMemory:
    u = split_into_units(spec.part, spec.part_tensors, spec.sharding, spec.fp8_gathered, spec.shards)
    size, reduced, is_split = spec.computation.itemsize, ITEMSIZE[spec.reduced_dtype], spec.shards > 1

    def unit(of: Unit, names: Sequence[str], unshared: int = 0) -> UnitMemory:
        whole, tensors = of.gathered(size), [tensor for tensor in spec.part_tensors if tensor.unit in names]
        return UnitMemory(
            gathered=whole,
            arriving=whole - size * unshared if is_split else 0,
            unreduced=size * of.trained,
            reducing=reduced * of.trained,
            shard=count_state(tensors, spec.sharding, spec.shards, "sgd").gradients,
        )

    tail_waits, layers = u.embedding.numel == 0, spec.architecture.layers
    units = 1 if u.layer == u.layers else layers  # where they are not wrapped, all layers are one
    named = [f"layer {spec.architecture.widest_layer}"] if units == layers else [f"layer {i}" for i in range(layers)]
    layer = unit(u.layer, named, u.unshared)
    return LayoutMemory(
        embedding=UnitMemory() if tail_waits else unit(u.embedding, ["embedding"]),
        layer=layer,
        tail=unit(u.tail, ["tail", "embedding"] if tail_waits else ["tail"]),
        layers=units,
        layer_staying=layer.gathered if u.stay_gathered else 0,
        kept_in_forward=u.layers.gathered(size) if u.stay_gathered else 0,
        tail_waits=tail_waits,
    )


def _plan_whole(spec: RunSpec) -> LayoutMemory:
    """DDP and single shard nothing; autocast caches a cast copy of every weight until the forward ends, or until its
    backward has used it; DDP has a bucket beside every gradient (torch.nn.parallel.distributed)."""
    run, a = spec.computation, spec.architecture
    multiplied = sum(tensor.numel for tensor in (*a.linears(a.widest_layer), *a.experts(a.widest_layer)))
    cast = run.itemsize * multiplied if run.autocast and run.lora is None else 0

    def unit(name: str, gathered: int = 0) -> UnitMemory:
        return UnitMemory(
            gathered, shard=sum(t.numel * t.itemsize for t in spec.part_tensors if t.unit == name and t.trainable)
        )

    embedding = unit("embedding")
    return LayoutMemory(
        embedding=embedding,
        layer=unit(f"layer {a.widest_layer}", cast),
        tail=unit("tail"),
        layers=a.layers,
        layer_staying=cast if run.checkpoint_every is None else 0,
        kept_in_forward=cast * a.layers,
        buckets=FP32 * spec.trained_numel if spec.sharding.layout == "ddp" else 0,
        waiting_gradient=embedding.shard if a.tied else 0,
    )
