"""The units of FSDP, which are gathered and freed together: what a layout makes of a model."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from finetune.config.layout import Sharding
from finetune.plan.architecture import Architecture
from finetune.plan.state import StateTensor


@dataclass(frozen=True, slots=True)
class Unit:
    """Numbers in one FSDP unit, which is gathered and freed together, the trained ones among them, and those gathered in 8 bits."""

    numel: int
    trained: int
    fp8: int = 0

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.numel + other.numel, self.trained + other.trained, self.fp8 + other.fp8)

    def gathered(self, itemsize: int) -> int:
        """Bytes of the gathered unit, whose other numbers have `itemsize` each."""
        return itemsize * (self.numel - self.fp8) + self.fp8


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """The units of FSDP: the embedding, one decoder layer, and the tail (final norm and head).

    Where the head is tied (FSDP2) or in FSDP1's root, the embedding belongs to the tail and its own unit is empty.
    Where layers are not units of their own, `layer` is all of them together.
    """

    embedding: Unit
    layer: Unit
    tail: Unit
    layers: Unit  # all decoder layers
    stay_gathered: bool  # layers remain gathered from forward to backward
    unshared: int = 0  # numbers of the layer's experts that no other rank has, so that no all-gather is needed


def split_into_units(
    architecture: Architecture,
    tensors: Sequence[StateTensor],
    sharding: Sharding,
    fp8: Container[str] = (),
    shards: int = 0,
) -> FsdpUnits:
    """The FSDP units that a layout makes of a model, as large as one rank gathers them; `fp8`: the names of what is gathered in
    8 bits; `shards`: the ranks that hold one replica."""
    widest, layers = architecture.widest_layer, Unit(0, 0)
    embedding, one, tail = (_unit(tensors, name, fp8) for name in ("embedding", f"layer {widest}", "tail"))
    if architecture.mixture is None:
        count = architecture.layers
        layers = Unit(one.numel * count, one.trained * count, one.fp8 * count)
    else:  # some layers may be dense
        for index in range(architecture.layers):
            layers += _unit(tensors, f"layer {index}", fp8)
    if sharding.wrapping == "SIZE_BASED_WRAP":
        separate = sum(tensor.numel for tensor in architecture.layer(widest)) > sharding.min_num_params
    else:
        separate = sharding.wrapping != "NO_WRAP"
    if architecture.tied or sharding.layout == "fsdp1":
        embedding, tail = Unit(0, 0), tail + embedding
    return FsdpUnits(
        embedding=embedding,
        layer=one if separate else layers,
        tail=tail,
        layers=layers,
        stay_gathered=sharding.strategy in ("SHARD_GRAD_OP", "NO_SHARD") or not separate,
        unshared=sum(t.numel // t.divided for t in tensors if t.unit == f"layer {widest}" and t.divided == shards > 1),
    )


def _unit(tensors: Sequence[StateTensor], name: str, fp8: Container[str]) -> Unit:
    own = [tensor for tensor in tensors if tensor.unit == name]
    trained, in_fp8 = (t.numel // t.divided for t in own if t.trainable), (t.numel for t in own if t.name in fp8)
    return Unit(sum(t.numel // t.divided for t in own), sum(trained), sum(in_fp8))
