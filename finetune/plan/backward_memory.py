"""The points of a backward at which memory could be highest, by the units of a layout.

A backward runs from the head to the first layer. `done` counts the decoder layers whose backward
has ended. What is *staying* remains gathered for units that follow. The *tail* is final norm and
head; if it has the embedding's weights, its gradient is *waiting* for the embedding's backward.
*Factors* are copies of experts' adapters (`ExpertFactors`), and a *moment* is a point within a
layer's backward. A *traced* model is one whose layer torch ran on the meta device to see what it
keeps. The other words of a unit's memory are in `UnitMemory`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune.plan.activations import (
    final_norm_bytes,
    gate_gradient_bytes,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    prefetched_bytes,
    recomputed_bytes,
    working_bytes,
)
from finetune.plan.loss_memory import vector_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import StateTensor
from finetune.plan.temporary_memory import (
    LayoutMemory,
    Snapshot,
    UnitMemory,
    UpdateMemory,
    expert_factor_bytes,
    plan_updates_in_backward,
)


def kept_for_backward(spec: RunSpec) -> int:
    """Bytes of activations when the backward of a micro-batch begins: those that its forward left
    and, where the method embeds, the gradients of the vectors of the whole step.
    """
    architecture = spec.computed
    computation = spec.computation
    masks = mask_bytes(architecture, computation, spec.tokens)
    kept = _kept_per_token(spec)
    if spec.recipe.quantization.bits is not None:
        factors = 0  # the backward makes them again, see `recompute_dequantized`
    else:
        factors = expert_factor_bytes(architecture, computation).kept
    # from `ContrastiveObjective.prepare`
    vector_gradients = vector_bytes(spec, spec.rows_per_step)
    return spec.tokens * sum(kept.values()) + factors + masks + vector_gradients


def _kept_per_token(spec: RunSpec) -> dict[str, int]:
    """Bytes per token that the forward leaves, by part (see `kept_bytes`).

    Only the last stage has a final norm; each early exit that is scored adds one.
    """
    kept = kept_bytes(spec.computed, spec.computation)
    if not spec.is_last_stage:
        return kept | {"final norm": 0}
    norms_of_exits = (spec.scored_outputs - 1) * final_norm_bytes(spec.computed, spec.computation)
    return kept | {"final norm": kept["final norm"] + norms_of_exits}


@dataclass(slots=True)
class ShardedBackward:
    """A backward under FSDP, whose units are reduced one after another.

    A unit's gradients are whole until its backward ends; then a reduce-scatter leaves this rank's
    shard. Under `optim_in_backward` that shard is used and freed at once. Bytes of this rank.
    """

    spec: RunSpec
    memory: LayoutMemory
    before: Snapshot  # the backward's beginning, with the gradients of earlier micro-batches
    layer_temporaries: int  # temporaries of a layer's backward
    gradients: int  # shards that wait for the update
    reducing_before: int = 0  # input of the previous unit's reduce-scatter, not freed yet
    # the tail's, whole, until the embedding's backward (`tail_has_embedding`)
    waiting_gradient: int = 0

    def update_temporaries(self, part: str) -> int:
        """Temporaries of the update of "head", "layer" or "embedding" once it is reduced; 0 where
        no update is in the backward.
        """
        if not self.spec.recipe.optimization.optim_in_backward:
            return 0
        return plan_updates_in_backward(self.spec)[part].temporaries

    @property
    def keeps_shards(self) -> bool:
        """Whether the shard of each unit adds to `gradients`.

        Under `optim_in_backward` it is freed, with CPU offload it moves to the host, and with
        several micro-batches there is room for it since the first.
        """
        in_backward = self.spec.recipe.optimization.optim_in_backward
        return (
            not in_backward and not self.spec.sharding.cpu_offload and self.spec.accumulation == 1
        )

    def end_unit(self, unit: UnitMemory) -> None:
        """Counts a unit as reduced."""
        if self.keeps_shards:
            self.gradients += unit.shard
        self.reducing_before = unit.reducing


def sharded_points(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, layer_temporaries: int
) -> Iterator[Snapshot]:
    """The points of a backward under FSDP, by its units: the head, the layers from the last, the
    embedding.

    Args:
        spec: The run.
        memory: What a unit takes in its layout.
        before: The backward's beginning, with the gradients of earlier micro-batches.
        layer_temporaries: Bytes of temporaries of a layer's backward.
    """
    backward = ShardedBackward(spec, memory, before, layer_temporaries, gradients=before.gradients)
    if memory.tail_has_embedding:
        backward.waiting_gradient = memory.tail.unreduced
    else:
        yield from _reduction_points(
            backward,
            "the head",
            memory.tail,
            activations=kept_for_backward(spec),  # at most: the final norm's are freed
            gathered=_gathered_beside(memory, memory.layers),
            update_temporaries=backward.update_temporaries("head"),
        )
        backward.end_unit(memory.tail)
    for done in range(memory.layers):
        name = _name_layer(done, memory.layers)
        if name:  # between the named layers, memory changes evenly
            yield from _sharded_layer(backward, done, name)
        backward.end_unit(memory.layer)
    yield from _sharded_embedding(backward)


def _sharded_layer(backward: ShardedBackward, done: int, name: str) -> Iterator[Snapshot]:
    """The backward of the layer `name`, after `done` others, and then its reduction."""
    spec = backward.spec
    memory = backward.memory
    is_first_layer = done + 1 == memory.layers
    others = _gathered_beside(memory, memory.layers - done - 1)
    point = replace(
        backward.before,
        name=f"backward of {name}",
        gradients=backward.gradients,
        gathered=others + memory.layer.gathered,
        temporaries=backward.layer_temporaries,
    )
    for moment in _moments_of_layer(spec, done):
        unreduced = spec.computation.itemsize * moment.gradient_elements
        communication = backward.reducing_before + backward.waiting_gradient + unreduced
        yield replace(point, communication=communication, activations=moment.activations)
    # where all layers are one unit, the backward of all of them has ended with it
    layers_done = spec.part.layers if is_first_layer else done + 1
    yield from _reduction_points(
        backward,
        name,
        memory.layer,
        activations=_activations_after_layers(spec, layers_done),
        gathered=others,
        update_temporaries=backward.update_temporaries("layer"),
    )


def _gathered_beside(memory: LayoutMemory, layers: int) -> int:
    """Bytes gathered beside a unit in its backward, which `layers` layers and the embedding follow:
    what stays, and the next unit, which arrives unless it stays.
    """
    gathered = layers * memory.each_layer_until_backward + memory.staying_embedding
    if memory.tail_has_embedding:
        gathered += memory.tail.gathered
    if layers:
        next_stays = memory.each_layer_until_backward > 0
        next_unit = memory.layer
    else:
        next_stays = memory.staying_embedding > 0
        next_unit = memory.embedding
    return gathered if next_stays else gathered + next_unit.arriving


def _sharded_embedding(backward: ShardedBackward) -> Iterator[Snapshot]:
    """The backward of the embedding and its reduction.

    Where head and embedding are one unit (`tail_has_embedding`), its reduction waited until here.
    """
    spec = backward.spec
    memory = backward.memory
    unit = memory.tail if memory.tail_has_embedding else memory.embedding
    activations = _activations_after_layers(spec, spec.part.layers)
    backward.waiting_gradient = 0  # from here on it is in `unit.unreduced`
    yield replace(
        backward.before,
        name="backward of the embedding",
        gradients=backward.gradients,
        activations=activations,
        gathered=unit.gathered,
        communication=backward.reducing_before + unit.unreduced,
    )
    yield from _reduction_points(
        backward,
        "the embedding",
        unit,
        activations=activations,
        gathered=0,
        update_temporaries=backward.update_temporaries("embedding"),
    )


def _reduction_points(
    backward: ShardedBackward,
    name: str,
    unit: UnitMemory,
    *,
    activations: int,
    gathered: int,
    update_temporaries: int,
) -> Iterator[Snapshot]:
    """Two points of a unit's reduce-scatter: its whole gradients beside the input that is made of
    them, and that input beside the shard that comes out.

    That shard takes memory for a moment even where `keeps_shards` is false.

    Args:
        backward: How far it is.
        name: Of the unit.
        unit: Its memory.
        activations: Bytes.
        gathered: Bytes of the weights that are gathered meanwhile.
        update_temporaries: Bytes, while the shard updates its parameters.
    """
    waiting = backward.waiting_gradient
    point = replace(
        backward.before,
        name=f"reduction of {name}",
        gradients=backward.gradients,
        activations=activations,
        gathered=gathered,
    )
    yield replace(point, communication=waiting + unit.unreduced + unit.reducing)
    yield replace(
        point,
        gradients=backward.gradients + unit.shard,
        temporaries=update_temporaries,
        communication=waiting + unit.reducing,
    )


def unsharded_points(
    spec: RunSpec,
    memory: LayoutMemory,
    before: Snapshot,
    all_gradients: int,
    layer_temporaries: int,
) -> Iterator[Snapshot]:
    """The points of a backward on one rank or under DDP, where gradients are not sharded.

    They stay until the step; under `optim_in_backward` each is freed once it has updated its
    parameter, a tied head's once it has updated the embedding.

    Args:
        spec: The run.
        memory: What a unit takes in its layout.
        before: The backward's beginning, with the gradients of earlier micro-batches.
        all_gradients: Bytes of the gradients of all parameters.
        layer_temporaries: Bytes of temporaries of a layer's backward.
    """
    updates_in_backward = spec.recipe.optimization.optim_in_backward
    updates = plan_updates_in_backward(spec) if updates_in_backward else {}
    if updates_in_backward:
        yield from _updated_head(spec, memory, before, updates["head"])
    for done in range(memory.layers):
        name = _name_layer(done, memory.layers)
        if not name:
            continue
        staying = (memory.layers - done - 1) * memory.each_layer_until_backward
        point = replace(
            before,
            name=f"backward of {name}",
            gathered=memory.layer.gathered + staying,
            communication=memory.buckets,
            temporaries=layer_temporaries,
        )
        if updates_in_backward:
            yield from _updated_layer(spec, done, point, updates["layer"])
        else:
            yield from _unsharded_layer(spec, memory, done, point)
    at_embedding = replace(
        before,
        name="backward of the embedding",
        gradients=all_gradients + memory.tied_head_gradient,
        activations=_activations_after_layers(spec, spec.part.layers),
        communication=memory.buckets,
    )
    if updates_in_backward:
        at_embedding = replace(
            at_embedding,
            gradients=updates["embedding"].gradients,
            temporaries=updates["embedding"].temporaries,
        )
    yield at_embedding


def _updated_head(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, update: UpdateMemory
) -> Iterator[Snapshot]:
    """The update of the head, where it is not tied to the embedding."""
    if update.gradients:
        yield replace(
            before,
            name="update of the head",
            activations=kept_for_backward(spec),
            gathered=memory.layers * memory.each_layer_until_backward,
            gradients=update.gradients,
            temporaries=update.temporaries,
            communication=memory.buckets,
        )


def _unsharded_layer(
    spec: RunSpec, memory: LayoutMemory, done: int, point: Snapshot
) -> Iterator[Snapshot]:
    """The backward of the layer after `done` others, whose gradients stay."""
    # all trained parameters have one dtype, and a run trains some
    itemsize = next(tensor.itemsize for tensor in spec.part_tensors if tensor.trainable)
    # nothing is sharded: a unit's shard is all of its gradients
    earlier = memory.tail.shard + done * memory.layer.shard + memory.tied_head_gradient
    for moment in _moments_of_layer(spec, done):
        own = earlier + itemsize * moment.gradient_elements
        # a micro-batch before this one has left room for all of them
        gradients = max(point.gradients, own)
        yield replace(point, gradients=gradients, activations=moment.activations)


def _updated_layer(
    spec: RunSpec, done: int, point: Snapshot, update: UpdateMemory
) -> Iterator[Snapshot]:
    """The backward of the layer after `done` others, at its two highest points: at its first
    update, that of down_proj, which is counted as the largest; and after it, when activations have
    the gradients of gate's and up's outputs, and none of the layer's weights has one.
    """
    if spec.computed.trace(spec.computation) is None:
        # `_activations_at_layer` has the gradients of gate's and up's outputs, the update has not
        missing = spec.tokens * gate_gradient_bytes(spec.computed, spec.computation)
    else:  # a trace does not say what is of the MLP
        missing = 0
    activations = _activations_at_layer(spec, done)
    yield replace(
        point,
        gradients=update.gradients,
        activations=activations - missing,
        temporaries=point.temporaries + update.temporaries,
    )
    yield replace(point, gradients=update.waiting, activations=activations)


def _name_layer(done: int, layers: int) -> str:
    """The decoder layer that follows `done` others in the backward; empty for those in between.

    >>> [_name_layer(done, 5) for done in range(5)]
    ['the last layer', 'the last layer but one', '', 'the second layer', 'the first layer']
    """
    named = {  # in a model of fewer than four layers, the later of two entries holds
        1: "the last layer but one",
        layers - 2: "the second layer",
        0: "the last layer",
        layers - 1: "the first layer",
    }
    return named.get(done, "")


def _activations_after_layers(spec: RunSpec, done: int) -> int:
    """Bytes of activations after the backward of the head and of `done` layers: what they have not
    freed, and a gradient for each scored output.

    One gradient is handed to the next layer. Those of early exits wait for their layers; all are
    counted until the end.
    """
    architecture = spec.computed
    computation = spec.computation
    kept = _kept_per_token(spec)
    if computation.offloads:  # all layers together keep on the device what one of them does
        freed_by_layer = 0.0
    else:
        freed_by_layer = (kept["layers"] + kept["checkpoints"]) / architecture.layers
    gradients = spec.scored_outputs * architecture.hidden * computation.residual_itemsize
    freed = kept["final norm"] + done * freed_by_layer
    return kept_for_backward(spec) + int(spec.tokens * (gradients - freed))


@dataclass(frozen=True, slots=True)
class LayerMoment:
    """A moment of a layer's backward."""

    activations: int  # bytes
    gradient_elements: int  # of the layer's weights, not yet reduced


def _moments_of_layer(spec: RunSpec, done: int) -> list[LayerMoment]:
    """The backward of a layer's MLP, after `done` layers: at its beginning and at its end.

    One moment for a traced model, whose trace does not say what is of the MLP.
    """
    architecture = spec.computed
    computation = spec.computation
    activations = _activations_at_layer(spec, done)
    layer = f"layer {architecture.widest_layer}"
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable and tensor.unit == layer]
    if architecture.trace(computation) is not None:
        return [LayerMoment(activations, _count_elements(trained))]
    mlp = [tensor for tensor in trained if ".mlp." in tensor.name]
    down = [tensor for tensor in mlp if "down_proj" in tensor.name]
    # all but the gradient of gate's or of up's output, which the last product reads
    freed = spec.tokens * (
        layer_bytes(architecture, computation)["mlp"]
        + gate_gradient_bytes(architecture, computation)
        - architecture.mlp_width * computation.itemsize
    )
    return [
        LayerMoment(activations, _count_elements(down)),
        LayerMoment(activations - freed, _count_elements(mlp)),
    ]


def _activations_at_layer(spec: RunSpec, done: int) -> int:
    """Bytes of activations where the backward of the layer after `done` others begins, with what it
    computes again.
    """
    architecture = spec.computed
    computation = spec.computation
    computes_again = (
        computation.checkpoint_every is not None or spec.recipe.quantization.bits is not None
    )
    if computes_again:  # the layer, or of a quantized base its experts
        factors = expert_factor_bytes(architecture, computation).layer
    else:
        factors = 0
    per_token = (
        recomputed_bytes(architecture, computation)
        + working_bytes(architecture, computation)
        + prefetched_bytes(architecture, computation)
    )
    # `working_bytes` and `_activations_after_layers` both count the gradient handed to this layer
    counted_twice = architecture.hidden * computation.residual_itemsize
    return (
        _activations_after_layers(spec, done) + factors + spec.tokens * (per_token - counted_twice)
    )


def _count_elements(tensors: Iterable[StateTensor]) -> int:
    """The elements of `tensors` on this rank, before FSDP shards them."""
    return sum(tensor.numel // tensor.divided for tensor in tensors)
