"""The points of a backward at which memory could be highest, unit by unit of a layout.

A backward runs from the head over the last layer to the first one and ends at the embedding.

Words:
    done: How many decoder layers have finished their backward. Where units are counted, it is how
        many units of layers have: a unit is one layer, unless FSDP makes one unit of all.
    tail: The unit of the final norm and the head. If the unit includes the embedding, the tail's
        gradient is *waiting*: it stays whole until the backward of the embedding.
    staying: Still gathered from the forward, for a backward that has not come yet.
    factors: Copies of the experts' LoRA matrices (`ExpertFactors`).
    moment: A point within the backward of one layer.
    trace: The sizes that torch saved when it ran a model's layers on the meta device. Models whose
        layers no table describes have one.

`UnitMemory` explains the sizes of a unit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune.constants import ceil_div
from finetune.plan.activations import (
    TOKEN_ID,
    final_norm_bytes,
    gate_gradient_bytes,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    prefetched_bytes,
    recomputed_bytes,
    row_mask_bytes,
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
    dora_base_bytes,
    expert_factor_bytes,
    plan_updates_in_backward,
)

# Bytes per token of a micro-batch's own tensors besides the ids, which a layer saves: labels,
# positions, and the trained positions with their labels.
BATCH_BYTES = 4 * TOKEN_ID
# Bytes of the state of a CPU's random generator, which each recomputed layer keeps.
GENERATOR_BYTES = 5056


def kept_for_backward(spec: RunSpec) -> int:
    """Bytes of activations when the backward of a micro-batch begins.

    They are the activations that its forward has saved and, for an embedding method, the gradients
    of all vectors of the step.
    """
    architecture = spec.computed
    computation = spec.computation
    masks = mask_bytes(architecture, computation, spec.tokens)
    masks += spec.tokens * row_mask_bytes(architecture, computation)
    kept = _kept_per_token(spec)
    if spec.recipe.quantization.bits is not None:
        factors = 0  # not saved: the backward computes them again (`recompute_dequantized`)
    else:
        factors = expert_factor_bytes(architecture, computation).kept
    every = computation.checkpoint_every
    recomputed = 0 if every is None else ceil_div(architecture.layers, every)
    generators = recomputed * GENERATOR_BYTES if computation.cpu else 0
    dequantized = (architecture.layers - recomputed) * dora_base_bytes(spec)
    # `ContrastiveObjective.prepare` computes them before the first backward of the step
    vector_gradients = vector_bytes(spec, spec.rows_per_step)
    per_token = sum(kept.values()) + BATCH_BYTES
    beside = generators + factors + masks + dequantized + vector_gradients
    return spec.tokens * per_token + beside


def _kept_per_token(spec: RunSpec) -> dict[str, int]:
    """Bytes per token that the forward of all layers and of the final norm saves, by `kept_bytes`.

    The head and its loss are not among them (`loss_memory`). Only the last pipeline stage has a
    final norm. Each early exit with a loss runs the norm again.
    """
    kept = kept_bytes(spec.computed, spec.computation)
    if not spec.is_last_stage:
        return kept | {"final norm": 0}
    early_exits = spec.scored_outputs - 1  # the other scored output is the last layer's
    norms_of_exits = early_exits * final_norm_bytes(spec.computed, spec.computation)
    return kept | {"final norm": kept["final norm"] + norms_of_exits}


@dataclass(slots=True)
class ShardedBackward:
    """How far a backward under FSDP is, and the bytes that one rank holds at that point.

    Gradients of a unit are whole until the unit's backward ends. Then a reduce-scatter leaves this
    rank's shard of them. `optim_in_backward` updates each weight of the unit with its shard and
    frees that.
    """

    spec: RunSpec
    memory: LayoutMemory
    before: Snapshot  # the start of the backward, with the gradients of earlier micro-batches
    layer_temporaries: int  # bytes of temporaries in a layer's backward
    gradients: int  # bytes of gradient shards that wait for the optimizer step
    # bytes of the input of the previous unit's reduce-scatter, which is not freed yet
    reducing_before: int = 0
    # bytes of the tail's whole gradient, until the embedding's backward (`tail_has_embedding`)
    waiting_gradient: int = 0

    def temporaries_of_update(self, part: str) -> int:
        """Bytes of temporaries while the optimizer updates the largest weight of a part.

        Weights are updated one at a time. `part`: "head", "layer" (of any layer) or "embedding".
        0 unless the update is within the backward.
        """
        if not self.spec.recipe.optimization.optim_in_backward:
            return 0
        return plan_updates_in_backward(self.spec)[part].temporaries

    @property
    def adds_shards(self) -> bool:
        """Whether `gradients` grow by each unit's shard when the unit's backward ends.

        They do not in three cases: `optim_in_backward` frees the shard after the update, CPU
        offload moves it to the host, and a later micro-batch adds it to the shard of the first.
        """
        in_backward = self.spec.recipe.optimization.optim_in_backward
        return (
            not in_backward and not self.spec.sharding.cpu_offload and self.spec.accumulation == 1
        )

    def end_unit(self, unit: UnitMemory) -> None:
        """Adds a unit whose reduce-scatter has run to `gradients` and `reducing_before`."""
        if self.adds_shards:
            self.gradients += unit.shard
        self.reducing_before = unit.reducing


def sharded_points(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, layer_temporaries: int
) -> Iterator[Snapshot]:
    """Yields the points of a backward under FSDP after that of the head: the reduction of the head,
    the layers from last to first, the embedding.

    Args:
        spec: The run.
        memory: The memory of each unit.
        before: The start of the backward, with the gradients of earlier micro-batches.
        layer_temporaries: Bytes of temporaries in a layer's backward.
    """
    backward = ShardedBackward(spec, memory, before, layer_temporaries, gradients=before.gradients)
    if memory.tail_has_embedding:  # reduced with the embedding; until then every point counts this
        backward.waiting_gradient = memory.tail.unreduced
    else:
        yield from _reduction_points(
            backward,
            "the head",
            memory.tail,
            # an upper bound: the final norm's activations are freed by now
            activations=kept_for_backward(spec),
            gathered=_gathered_besides_unit(memory, layers_left=memory.layers),
            part="head",
        )
        backward.end_unit(memory.tail)
    for done in range(memory.layers):
        if memory.layers < spec.part.layers:
            name = "the layers"  # all of them are one unit
        else:
            name = _name_layer(done, memory.layers)
        # The layers in the middle have no name: from each to the next, memory changes by the same
        # amount, so none is a peak.
        if name:
            yield from _sharded_layer(backward, done, name)
        backward.end_unit(memory.layer)
    yield from _sharded_embedding(backward)


def _sharded_layer(backward: ShardedBackward, done: int, name: str) -> Iterator[Snapshot]:
    """Yields the highest points of the backward of a unit of layers, and those of its reduction.

    Within the backward they are the highest moments of its first layer and, if it has several, of
    its last one.

    Args:
        backward: The state of the backward.
        done: How many other units the unit follows.
        name: How the plan calls the unit.
    """
    spec = backward.spec
    memory = backward.memory
    layers_left = memory.layers - done - 1
    gathered_besides = _gathered_besides_unit(memory, layers_left)
    point = replace(
        backward.before,
        name=f"backward of {name}",
        gradients=backward.gradients,
        gathered=gathered_besides + memory.layer.gathered,
        temporaries=backward.layer_temporaries,
    )
    layers_in_unit = spec.part.layers // memory.layers
    for layer in sorted({0, layers_in_unit - 1}):
        unreduced_before = memory.layer.unreduced * layer // layers_in_unit
        for moment in _list_moments(spec, done * layers_in_unit + layer):
            unreduced = unreduced_before + spec.computation.itemsize * moment.gradient_elements
            communication = backward.reducing_before + backward.waiting_gradient + unreduced
            yield replace(point, communication=communication, activations=moment.activations)
    # Units are counted in `done`, and all layers may be one unit: after the last unit of layers,
    # every layer of the model is done.
    layers_done = spec.part.layers if layers_left == 0 else done + 1
    yield from _reduction_points(
        backward,
        name,
        memory.layer,
        activations=_activations_after_layers(spec, layers_done),
        gathered=gathered_besides,
        part="layer",
    )


def _gathered_besides_unit(memory: LayoutMemory, layers_left: int) -> int:
    """Bytes that are gathered during a unit's backward, besides the unit itself.

    They are the units that stay gathered for their own backward, and the all-gather buffer of the
    next unit unless that one has stayed.

    `layers_left`: how many layers' backwards come after it. The embedding's comes after those.
    """
    gathered = memory.bytes_until_backward(layers_left) + memory.staying_embedding
    if memory.tail_has_embedding:
        gathered += memory.tail.gathered
    if layers_left:
        next_stays = memory.each_layer_until_backward > 0
        next_unit = memory.layer
    else:
        next_stays = memory.staying_embedding > 0
        next_unit = memory.embedding
    return gathered if next_stays else gathered + next_unit.arriving


def _sharded_embedding(backward: ShardedBackward) -> Iterator[Snapshot]:
    """Yields the points of the backward and the reduction of the embedding.

    If head and embedding are one unit (`tail_has_embedding`), the whole unit is reduced here. The
    head's gradient of a tied weight waits until the embedding's, which is as large, is added to it.
    """
    spec = backward.spec
    memory = backward.memory
    unit = memory.tail if memory.tail_has_embedding else memory.embedding
    activations = _activations_after_layers(spec, spec.part.layers)
    waiting_beside = backward.waiting_gradient if spec.part.tied else 0
    yield replace(
        backward.before,
        name="backward of the embedding",
        gradients=backward.gradients,
        activations=activations,
        gathered=unit.gathered,
        communication=backward.reducing_before + waiting_beside + unit.unreduced,
    )
    backward.waiting_gradient = 0  # from here on `unit.unreduced` has it
    yield from _reduction_points(
        backward, "the embedding", unit, activations=activations, gathered=0, part="embedding"
    )


def _reduction_points(
    backward: ShardedBackward,
    name: str,
    unit: UnitMemory,
    *,
    activations: int,
    gathered: int,
    part: str,
) -> Iterator[Snapshot]:
    """Yields the two points of a unit's reduce-scatter.

    At the first, the unit's whole gradients are being copied into the input of the reduce-scatter.
    At the second, that input is there with the shard that comes out of it. The shard takes memory
    at that point even if `adds_shards` is false.

    In a unit of the head or the embedding alone, the shard is there at the first point too: torch's
    `foreach_reduce` holds the whole gradient of the unit's last parameter until it returns.

    Args:
        backward: The state of the backward.
        name: How the plan calls the unit.
        unit: The unit's memory.
        activations: Bytes of activations at both points.
        gathered: Bytes of weights that are gathered at both points.
        part: What the unit is: "head", "layer" or "embedding".
    """
    waiting = backward.waiting_gradient
    is_end_alone = part != "layer" and not backward.memory.tail_has_embedding
    shard_beside = unit.shard if is_end_alone and backward.spec.shards > 1 else 0
    point = replace(
        backward.before,
        name=f"reduction of {name}",
        gradients=backward.gradients,
        activations=activations,
        gathered=gathered,
    )
    yield replace(
        point,
        gradients=backward.gradients + shard_beside,
        communication=waiting + unit.unreduced + unit.reducing,
    )
    yield replace(
        point,
        gradients=backward.gradients + unit.shard,
        temporaries=backward.temporaries_of_update(part),
        communication=waiting + unit.reducing,
    )


def unsharded_points(
    spec: RunSpec,
    memory: LayoutMemory,
    before: Snapshot,
    all_gradients: int,
    layer_temporaries: int,
) -> Iterator[Snapshot]:
    """Yields the points of a backward on one rank or under DDP, where gradients are not sharded.

    Gradients stay until the optimizer step. Under `optim_in_backward` each gradient is freed once
    it has updated its parameter; the gradient of a tied head waits for the embedding's.

    Args:
        spec: The run.
        memory: The memory of each unit.
        before: The start of the backward, with the gradients of earlier micro-batches.
        all_gradients: Bytes of the gradients of all parameters.
        layer_temporaries: Bytes of temporaries in a layer's backward.
    """
    updates_in_backward = spec.recipe.optimization.optim_in_backward
    updates = plan_updates_in_backward(spec) if updates_in_backward else {}
    if updates_in_backward:
        yield from _update_points_of_head(spec, memory, before, updates["head"])
    for done in range(memory.layers):
        name = _name_layer(done, memory.layers)
        if not name:
            continue
        staying = memory.bytes_until_backward(memory.layers - done - 1)
        point = replace(
            before,
            name=f"backward of {name}",
            gathered=memory.layer.gathered + staying,
            temporaries=layer_temporaries,
        )
        if updates_in_backward:
            yield from _update_points_of_layer(spec, done, point, updates["layer"])
        else:
            yield from _unsharded_layer(spec, memory, done, point)
    # the embedding's new gradient, beside that of earlier micro-batches
    new_gradient = memory.embedding.shard if before.gradients else 0
    at_embedding = replace(
        before,
        name="backward of the embedding",
        gradients=all_gradients + memory.tied_head_gradient + new_gradient,
        activations=_activations_after_layers(spec, spec.part.layers),
    )
    if updates_in_backward:
        at_embedding = replace(
            at_embedding,
            gradients=updates["embedding"].gradients,
            temporaries=updates["embedding"].temporaries,
        )
    yield at_embedding


def _update_points_of_head(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, update: UpdateMemory
) -> Iterator[Snapshot]:
    """Yields the point at which the head's own update runs.

    Yields nothing for a head that is frozen, or tied: the embedding's update includes it.
    """
    if update.gradients:
        yield replace(
            before,
            name="update of the head",
            activations=kept_for_backward(spec),
            gathered=memory.bytes_until_backward(memory.layers),
            gradients=update.gradients,
            temporaries=update.temporaries,
        )


def _unsharded_layer(
    spec: RunSpec, memory: LayoutMemory, done: int, point: Snapshot
) -> Iterator[Snapshot]:
    """Yields the points of the backward of the layer that follows `done` others.

    The gradients of all units up to this one stay in memory. After an earlier micro-batch those of
    all units are there, and each weight's new gradient stands beside its old one until it is added.
    """
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable]  # in one dtype
    largest_weight = max(
        (_count_elements([tensor]) for tensor in trained if tensor.unit.startswith("layer")),
        default=0,
    )
    for moment in _list_moments(spec, done):
        if point.gradients:
            there_before = point.gradients
            largest = largest_weight + _count_looped_elements(spec)
            new_elements = min(moment.gradient_elements, largest)
        else:  # nothing is sharded: a unit's shard is all of its gradients
            there_before = memory.tail.shard + done * memory.layer.shard
            new_elements = moment.gradient_elements
        gradients = there_before + memory.tied_head_gradient + trained[0].itemsize * new_elements
        yield replace(point, gradients=gradients, activations=moment.activations)


def _update_points_of_layer(
    spec: RunSpec, done: int, point: Snapshot, update: UpdateMemory
) -> Iterator[Snapshot]:
    """Yields the two highest points in the layer that follows `done` others, if each weight is
    updated within the backward.

    The first is the update of down_proj, which is the first one and is counted as the largest. At
    the second, the gradients of gate's and up's outputs are there, and no weight's gradient is.
    """
    if spec.computed.trace(spec.computation) is None:
        # `_activations_at_layer` includes the gradients of gate's and up's outputs, which do not
        # exist yet at the first update
        not_yet_there = spec.tokens * gate_gradient_bytes(spec.computed, spec.computation)
    else:  # a trace does not say which bytes belong to the MLP
        not_yet_there = 0
    activations = _activations_at_layer(spec, done)
    yield replace(
        point,
        gradients=update.gradients,
        activations=activations - not_yet_there,
        temporaries=point.temporaries + update.temporaries,
    )
    yield replace(point, gradients=update.waiting, activations=activations)


def _name_layer(done: int, layers: int) -> str:
    """Names the layer that follows `done` others in the backward of `layers` layers.

    Only the first two layers and the last two have a name; for a layer between them it is "".

    >>> [_name_layer(done, 5) for done in range(5)]
    ['the last layer', 'the last layer but one', '', 'the second layer', 'the first layer']
    """
    names = {  # With fewer than four layers two keys are equal, and the later entry wins.
        1: "the last layer but one",
        layers - 2: "the second layer",
        0: "the last layer",
        layers - 1: "the first layer",
    }
    return names.get(done, "")


def _activations_after_layers(spec: RunSpec, done: int) -> int:
    """Bytes of activations after the backward of the head and of `done` layers.

    They are the saved activations that are not freed yet, and a gradient of the hidden states for
    each scored output. The last layer's gradient is handed from layer to layer. The gradients of
    early exits wait for their layers; all of them are counted until the end.
    """
    architecture = spec.computed
    computation = spec.computation
    kept = _kept_per_token(spec)
    if computation.offloads:  # the device holds one layer's bytes, however many layers are left
        freed_by_layer = 0.0
    else:
        freed_by_layer = (kept["layers"] + kept["checkpoints"]) / architecture.layers
    gradients = spec.scored_outputs * architecture.hidden * computation.residual_itemsize
    freed = kept["final norm"] + done * freed_by_layer
    return kept_for_backward(spec) + int(spec.tokens * (gradients - freed))


@dataclass(frozen=True, slots=True)
class LayerMoment:
    """The memory of one moment in a layer's backward."""

    activations: int  # bytes
    gradient_elements: int  # elements of the layer's weight gradients, which are not reduced yet


def _list_moments(spec: RunSpec, done: int) -> list[LayerMoment]:
    """Lists the highest moments in the backward of the layer that follows `done` others.

    They are two: when the gradient of down_proj and those of gate's and up's outputs are there, and
    the end of the MLP's backward. Experts that are computed one after another have one moment. So
    has a traced model, with all of the layer's gradients, because a trace does not say which bytes
    belong to the MLP.
    """
    architecture = spec.computed
    computation = spec.computation
    activations = _activations_at_layer(spec, done)
    if architecture.trace(computation) is not None:
        return [LayerMoment(activations, _count_largest_part(spec, ""))]
    if looped := _count_looped_elements(spec):
        # the experts' gradients are made while their saved tensors are there
        return [LayerMoment(activations, _count_largest_part(spec, ".mlp.") + looped)]
    # The MLP's backward frees its saved tensors and the gradients of gate's and up's outputs, but
    # for one tensor, which the last matmul still reads. Under `remakes` this is an upper bound: the
    # product that the backward remakes counts as not freed.
    freed = spec.tokens * (
        layer_bytes(architecture, computation)["mlp"]
        + gate_gradient_bytes(architecture, computation)
        - architecture.mlp_width * computation.itemsize
    )
    return [
        LayerMoment(activations, _count_largest_part(spec, "down_proj")),
        LayerMoment(activations - freed, _count_largest_part(spec, ".mlp.")),
    ]


def _count_looped_elements(spec: RunSpec) -> int:
    """Counts the elements beside the gradients of a layer's experts, if these are computed one
    after another: an expert's gradient is made in a tensor of all experts, and added to that of the
    experts before it in another one. 0 if experts are computed together, or are frozen.
    """
    if not spec.computation.loops_experts:
        return 0
    layer = spec.computed.widest_layer
    experts = {weight.name for weight in spec.computed.experts(layer)}
    trained = [each for each in spec.part_tensors if each.trainable and each.name in experts]
    return 2 * max((_count_elements([tensor]) for tensor in trained), default=0)


def _count_largest_part(spec: RunSpec, part: str) -> int:
    """Counts the most trained elements that a rank has in a part of one layer.

    `part`: what the names of the part's tensors have in common.
    """
    return max(
        _count_elements(
            tensor
            for tensor in spec.part_tensors
            if tensor.trainable and tensor.unit == f"layer {layer}" and part in tensor.name
        )
        for layer in spec.computed.largest_layers
    )


def _activations_at_layer(spec: RunSpec, done: int) -> int:
    """Bytes of activations at the highest point of the backward of a layer, after `done` others.

    They include what the layer computes again, and what only its backward needs.
    """
    architecture = spec.computed
    computation = spec.computation
    # Checkpointing recomputes the layer. Quantized experts are recomputed without it too.
    recomputes_experts = (
        computation.checkpoint_every is not None or spec.recipe.quantization.bits is not None
    )
    if recomputes_experts:
        factors = expert_factor_bytes(architecture, computation).layer
    else:  # the forward has kept them: `kept_for_backward` counts them
        factors = 0
    per_token = (
        recomputed_bytes(architecture, computation)
        + working_bytes(architecture, computation)
        + prefetched_bytes(architecture, computation)
    )
    # `working_bytes` and `_activations_after_layers` both count the hidden states' gradient that
    # is handed to this layer
    counted_twice = architecture.hidden * computation.residual_itemsize
    return (
        _activations_after_layers(spec, done) + factors + spec.tokens * (per_token - counted_twice)
    )


def _count_elements(tensors: Iterable[StateTensor]) -> int:
    """Counts the elements of `tensors` on one rank: divided by expert parallelism, not by FSDP."""
    return sum(tensor.numel // tensor.expert_ranks for tensor in tensors)
