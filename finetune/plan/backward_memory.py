"""The points of a step's backward at which memory could be highest, from the head's gradients to those of the embedding.

From one decoder layer to the next what is held changes by the same amount, so that the two that the backward comes to first and the
two that it comes to last stand for all. Within a layer activations are freed as gradients come.
"""

from collections.abc import Iterator
from dataclasses import replace

from finetune.plan.activations import kept_bytes, layer_bytes, prefetched_bytes, recomputed_bytes, working_bytes
from finetune.plan.attention_memory import mask_bytes
from finetune.plan.memory_snapshot import Snapshot
from finetune.plan.merged_experts import merged_expert_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.temporary_memory import LayoutMemory, UnitMemory
from finetune.plan.update_memory import plan_updates_in_backward


def kept_for_backward(spec: RunSpec) -> int:
    """Bytes of activations that the forward of a micro-batch leaves."""
    a, run = spec.computed, spec.computation
    masks = mask_bytes(a, run, spec.tokens)
    return spec.tokens * sum(kept_bytes(a, run).values()) + merged_expert_bytes(a, run).kept + masks


def sharded_points(spec: RunSpec, memory: LayoutMemory, before: Snapshot, at_layer: int) -> Iterator[Snapshot]:
    """Under FSDP: the gradients of a unit are whole until its backward ends; then they are reduced to this rank's shard, which under
    `optim_in_backward` is freed once it has been used. `before`: with the gradients of earlier micro-batches; `at_layer`: temporaries
    of a layer's backward."""
    in_backward = spec.recipe.optimization.optim_in_backward
    updates = plan_updates_in_backward(spec) if in_backward else {}
    adds_up = not in_backward and not spec.sharding.cpu_offload and spec.accumulation == 1
    waiting, waiting_gradient = (memory.tail.gathered, memory.tail.unreduced) if memory.tail_waits else (0, 0)
    held, previous = before.gradients, 0

    def reduce(name: str, part: str, unit: UnitMemory, activations: int, gathered: int) -> Iterator[Snapshot]:
        """The input of the reduce-scatter beside the gradients that it is made of, then beside what comes out of it."""
        point = replace(before, name=f"reduction of {name}", gradients=held, activations=activations, gathered=gathered)
        yield replace(point, communication=waiting_gradient + unit.unreduced + unit.reducing)
        temporaries = updates[part].temporaries if updates else 0
        point = replace(point, gradients=held + unit.shard, temporaries=temporaries)
        yield replace(point, communication=waiting_gradient + unit.reducing)

    if not memory.tail_waits:
        yield from reduce("the head", "head", memory.tail, kept_for_backward(spec), memory.layer.arriving)
        held, previous = held + adds_up * memory.tail.shard, memory.tail.reducing
    for done in range(memory.layers):
        is_last, name = done + 1 == memory.layers, _name_layer(done, memory.layers)
        following = waiting + (memory.embedding if is_last else memory.layer).arriving
        gathered = memory.layer.gathered + (memory.layers - done - 1) * memory.layer_staying
        for activations, numel in _within_layer(spec, done) if name else ():
            unreduced = spec.computation.itemsize * numel
            communication = previous + waiting_gradient + unreduced
            point = replace(before, name=f"backward of {name}", gradients=held, communication=communication)
            yield replace(point, gathered=following + gathered, activations=activations, temporaries=at_layer)
        if name:
            staying = following + (memory.layers - done - 1) * memory.layer_staying
            through = spec.architecture.layers if is_last else done + 1
            yield from reduce(name, "layer", memory.layer, _after_layers(spec, through), staying)
        held, previous = held + adds_up * memory.layer.shard, memory.layer.reducing
    ends = memory.tail if memory.tail_waits else memory.embedding
    after = _after_layers(spec, spec.architecture.layers)
    point = replace(before, name="backward of the embedding", gradients=held, activations=after, gathered=ends.gathered)
    yield replace(point, communication=previous + ends.unreduced)
    waiting_gradient = 0
    yield from reduce("the embedding", "embedding", ends, after, 0)


def whole_points(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, full: Snapshot, at_layer: int
) -> Iterator[Snapshot]:
    """Where nothing is sharded: each gradient is whole on this rank, and under `optim_in_backward` freed once it has been used.
    `full`: with the gradients of the whole step."""
    updates = plan_updates_in_backward(spec) if spec.recipe.optimization.optim_in_backward else {}
    if updates and updates["head"].gradients:
        head = updates["head"]
        point = replace(before, name="update of the head", activations=kept_for_backward(spec))
        yield replace(
            point,
            gathered=memory.layers * memory.layer_staying,
            gradients=head.gradients,
            temporaries=head.temporaries,
            communication=memory.buckets,
        )
    trained, width = next(t.itemsize for t in spec.part_tensors if t.trainable), spec.computed.mlp_width
    for done in (done for done in range(memory.layers) if _name_layer(done, memory.layers)):
        earlier = memory.tail.shard + done * memory.layer.shard + memory.waiting_gradient
        gathered = memory.layer.gathered + (memory.layers - done - 1) * memory.layer_staying
        name = f"backward of {_name_layer(done, memory.layers)}"
        point = replace(before, name=name, gathered=gathered, communication=memory.buckets, temporaries=at_layer)
        for activations, numel in _within_layer(spec, done):
            gradients = 0 if updates else max(before.gradients, earlier + trained * numel)
            yield replace(point, gradients=gradients, activations=activations)
            if updates:  # before gate and up have gradients
                layer, freed = updates["layer"], 2 * spec.tokens * width * spec.computation.itemsize
                temporaries = at_layer + layer.temporaries
                activations -= freed
                yield replace(point, gradients=layer.gradients, activations=activations, temporaries=temporaries)
    gradients, temporaries = full.gradients + memory.waiting_gradient, 0
    if updates:
        gradients, temporaries = updates["embedding"].gradients, updates["embedding"].temporaries
    point = replace(before, name="backward of the embedding", gradients=gradients, temporaries=temporaries)
    yield replace(point, activations=_after_layers(spec, memory.layers), communication=memory.buckets)


def _name_layer(done: int, layers: int) -> str:
    """The decoder layer that follows in the backward where so many are done; empty for those in between.

    >>> [_name_layer(done, 5) for done in range(5)]
    ['the last layer', 'the last layer but one', '', 'the second layer', 'the first layer']
    """
    named = {
        1: "the last layer but one",
        layers - 2: "the second layer",
        0: "the last layer",
        layers - 1: "the first layer",
    }
    return named.get(done, "")


def _after_layers(spec: RunSpec, done: int) -> int:
    """Bytes of activations where the backward has come through the head and so many layers, with the gradient that it hands on."""
    a, run, kept = spec.computed, spec.computation, kept_bytes(spec.computed, spec.computation)
    # Offloaded, all layers together keep what one of them does.
    of_one = 0 if run.offloads else (kept["layers"] + kept["checkpoints"]) / a.layers
    handed_on = a.hidden * run.residual_itemsize - kept["final norm"] - done * of_one
    return kept_for_backward(spec) + int(spec.tokens * handed_on)


def _within_layer(spec: RunSpec, done: int) -> Iterator[tuple[int, int]]:
    """(bytes of activations, numbers of the gradients that are there) in the backward of the layer before which so many are done:
    where its MLP has begun, and where that is through."""
    a, run = spec.computed, spec.computation
    merged = merged_expert_bytes(a, run).layer if run.checkpoint_every is not None else 0
    activations = _after_layers(spec, done) - spec.tokens * a.hidden * run.residual_itemsize + merged
    activations += spec.tokens * (recomputed_bytes(a, run) + working_bytes(a, run) + prefetched_bytes(a, run))
    mlp = [
        tensor
        for tensor in spec.part_tensors
        if tensor.trainable and tensor.unit == f"layer {a.widest_layer}" and ".mlp." in tensor.name
    ]
    down = sum(tensor.numel // tensor.divided for tensor in mlp if "down_proj" in tensor.name)
    yield activations, down
    freed = spec.tokens * (layer_bytes(a, run)["mlp"] + a.mlp_width * run.itemsize)
    yield activations - freed, sum(tensor.numel // tensor.divided for tensor in mlp)
