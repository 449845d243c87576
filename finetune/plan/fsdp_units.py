"""The units of sharding: what is gathered and freed together, and how large it is."""

from dataclasses import dataclass

from finetune.plan.run_spec import Job


@dataclass(frozen=True, slots=True)
class Unit:
    """Numbers in one unit, and the trained ones among them."""

    numel: int
    trained: int

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.numel + other.numel, self.trained + other.trained)


@dataclass(frozen=True, slots=True)
class Units:
    """The embedding, one decoder layer, and the tail (final norm and head).

    Where the head is tied (FSDP2) or in FSDP1's root, the embedding belongs to the tail and its own unit is empty.
    Where layers are not units of their own, `layer` is all of them together.
    """

    embedding: Unit
    layer: Unit
    tail: Unit
    layers: Unit  # all decoder layers
    stay_gathered: bool  # layers remain gathered from forward to backward


def layers_are_units(job: Job) -> bool:
    """Whether each decoder layer is gathered and freed by itself."""
    if job.sharding.wrapping == "SIZE_BASED_WRAP":
        return sum(tensor.numel for tensor in job.architecture.layer()) > job.sharding.min_num_params
    return job.sharding.wrapping != "NO_WRAP"


def units(job: Job) -> Units:
    """The units that `job`'s layout makes of its model."""
    embedding, one, tail = (_unit(job, name) for name in ("embedding", "layer 0", "tail"))
    layers = Unit(one.numel * job.architecture.layers, one.trained * job.architecture.layers)
    separate = layers_are_units(job)
    if job.architecture.tied or job.sharding.layout == "fsdp1":
        embedding, tail = Unit(0, 0), tail + embedding
    return Units(
        embedding=embedding,
        layer=one if separate else layers,
        tail=tail,
        layers=layers,
        stay_gathered=job.sharding.strategy in ("SHARD_GRAD_OP", "NO_SHARD") or not separate,
    )


def _unit(job: Job, name: str) -> Unit:
    own = [tensor for tensor in job.tensors if tensor.unit == name]
    return Unit(sum(t.numel for t in own), sum(t.numel for t in own if t.trainable))
