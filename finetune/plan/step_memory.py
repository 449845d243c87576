"""The peak memory of one rank in every phase of a run, from snapshots at the points where memory
could be highest.

The points of a step follow torch's order of events; the backward's are in `temporary_memory.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune.constants import CONTRASTED_QUERIES, FP32, PROMPTS_AT_ONCE
from finetune.plan.activations import (
    evaluation_bytes,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    prefetched_bytes,
    recomputed_bytes,
    working_bytes,
)
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import State, StateTensor
from finetune.plan.temporary_memory import (
    FP64,
    InBackwardMemory,
    LayoutMemory,
    Snapshot,
    UnitMemory,
    dequantized_at_once,
    divergence_chunk_bytes,
    expert_factor_bytes,
    fp8_bytes,
    log_probability_backward_bytes,
    loss_chunk_bytes,
    meeting_bytes,
    plan_layout_memory,
    plan_updates_in_backward,
    rounded_bytes,
    teacher_forward,
    teachers_tail,
    update_temporaries,
    weight_product_bytes,
)


def kept_for_backward(spec: RunSpec) -> int:
    """Bytes of activations that the forward of a micro-batch leaves."""
    architecture = spec.computed
    run = spec.computation
    masks = mask_bytes(architecture, run, spec.tokens)
    kept = _kept_per_token(spec)
    # then made again
    if spec.recipe.quantization.bits is not None:
        factors = 0
    else:
        factors = expert_factor_bytes(architecture, run).kept
    vectors = vector_bytes(spec, spec.rows_per_step)
    return spec.tokens * sum(kept.values()) + factors + masks + vectors


def _kept_per_token(spec: RunSpec) -> dict[str, int]:
    """Bytes per token that the forward leaves, by what they are of."""
    kept = kept_bytes(spec.computed, spec.computation)
    return kept if spec.is_last_stage else kept | {"final norm": 0}


@dataclass(slots=True)
class ShardedBackward:
    """How far a backward under FSDP is.

    The gradients of a unit are whole until its backward ends. Then they are reduced to this rank's
    shard, which under `optim_in_backward` is freed once it has been used. Amounts are bytes of this
    rank.
    """

    spec: RunSpec
    memory: LayoutMemory
    before: Snapshot  # the backward's beginning, with the gradients of earlier micro-batches
    layer_temporaries: int  # temporaries of a layer's backward
    gradients: int  # shards that wait for the update
    # the reduce-scatter of the unit before, which the next backward runs beside
    reducing_before: int = 0
    waiting_gradient: int = 0  # the tail's, whole, where the embedding's is added to it (tied)

    @property
    def adds_up(self) -> bool:
        """Whether each unit adds a shard to `gradients`; else there is room for it already, or it
        is freed.
        """
        in_backward = self.spec.recipe.optimization.optim_in_backward
        return (
            not in_backward and not self.spec.sharding.cpu_offload and self.spec.accumulation == 1
        )

    def end_unit(self, unit: UnitMemory) -> None:
        """Counts a unit as reduced."""
        if self.adds_up:
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
    if memory.tail_waits:
        backward.waiting_gradient = memory.tail.unreduced
    else:
        yield from _reduction_points(
            backward,
            "head",
            "the head",
            memory.tail,
            kept_for_backward(spec),
            memory.layer.arriving,
        )
        backward.end_unit(memory.tail)
    for done in range(memory.layers):
        if _name_layer(done, memory.layers):
            yield from _sharded_layer(backward, done)
        backward.end_unit(memory.layer)
    yield from _sharded_embedding(backward)


def _sharded_layer(backward: ShardedBackward, done: int) -> Iterator[Snapshot]:
    """The backward of the layer before which `done` are done, then its reduction."""
    spec = backward.spec
    memory = backward.memory
    name = _name_layer(done, memory.layers)
    is_last = done + 1 == memory.layers
    next_unit = memory.embedding if is_last else memory.layer
    staying = next_unit.arriving + (memory.layers - done - 1) * memory.layer_staying
    if memory.tail_waits:
        staying += memory.tail.gathered
    point = replace(
        backward.before,
        name=f"backward of {name}",
        gradients=backward.gradients,
        gathered=staying + memory.layer.gathered,
        temporaries=backward.layer_temporaries,
    )
    for moment in _within_layer(spec, done):
        unreduced = spec.computation.itemsize * moment.gradient_elements
        communication = backward.reducing_before + backward.waiting_gradient + unreduced
        yield replace(point, communication=communication, activations=moment.activations)
    passed = spec.part.layers if is_last else done + 1
    yield from _reduction_points(
        backward, "layer", name, memory.layer, _after_layers(spec, passed), staying
    )


def _sharded_embedding(backward: ShardedBackward) -> Iterator[Snapshot]:
    """The backward of the embedding, and its reduction, with the tail's gradient where that has
    waited for it.
    """
    spec = backward.spec
    memory = backward.memory
    unit = memory.tail if memory.tail_waits else memory.embedding
    activations = _after_layers(spec, spec.part.layers)
    yield replace(
        backward.before,
        name="backward of the embedding",
        gradients=backward.gradients,
        activations=activations,
        gathered=unit.gathered,
        communication=backward.reducing_before + unit.unreduced,
    )
    backward.waiting_gradient = 0
    yield from _reduction_points(backward, "embedding", "the embedding", unit, activations, 0)


def _reduction_points(
    backward: ShardedBackward,
    part: str,
    name: str,
    unit: UnitMemory,
    activations: int,
    gathered: int,
) -> Iterator[Snapshot]:
    """Two points of a unit's reduce-scatter: its whole gradients beside the input that is made of
    them, and that input beside the shard that comes out.

    Args:
        backward: How far it is.
        part: The unit's key in `plan_updates_in_backward`.
        name: What the points are called after.
        unit: Bytes of the unit.
        activations: Bytes.
        gathered: Bytes of the weights that are gathered meanwhile.
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
    temporaries = 0
    if backward.spec.recipe.optimization.optim_in_backward:
        temporaries = plan_updates_in_backward(backward.spec)[part].temporaries
    yield replace(
        point,
        gradients=backward.gradients + unit.shard,
        temporaries=temporaries,
        communication=waiting + unit.reducing,
    )


def whole_points(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, full: Snapshot, layer_temporaries: int
) -> Iterator[Snapshot]:
    """The points of a backward on one rank or under DDP, where gradients are whole.

    They stay until the step, or are freed once used under `optim_in_backward`.

    Args:
        spec: The run.
        memory: What a unit takes in its layout.
        before: The backward's beginning, with the gradients of earlier micro-batches.
        full: With the gradients of the whole step.
        layer_temporaries: Bytes of temporaries of a layer's backward.
    """
    is_updated = spec.recipe.optimization.optim_in_backward
    updates = plan_updates_in_backward(spec) if is_updated else {}
    at_embedding = replace(
        before,
        name="backward of the embedding",
        gradients=full.gradients + memory.waiting_gradient,
        activations=_after_layers(spec, memory.layers),
        communication=memory.buckets,
    )
    if is_updated:
        yield from _updated_head(spec, memory, before, updates["head"])
        at_embedding = replace(
            at_embedding,
            gradients=updates["embedding"].gradients,
            temporaries=updates["embedding"].temporaries,
        )
    for done in range(memory.layers):
        name = _name_layer(done, memory.layers)
        if not name:
            continue
        point = replace(
            before,
            name=f"backward of {name}",
            gathered=memory.layer.gathered + (memory.layers - done - 1) * memory.layer_staying,
            communication=memory.buckets,
            temporaries=layer_temporaries,
        )
        if is_updated:
            yield from _updated_layer(spec, done, point, updates["layer"])
        else:
            yield from _whole_layer(spec, memory, done, point)
    yield at_embedding


def _updated_head(
    spec: RunSpec, memory: LayoutMemory, before: Snapshot, update: InBackwardMemory
) -> Iterator[Snapshot]:
    """The update of the head, where it is not tied to the embedding."""
    if update.gradients:
        yield replace(
            before,
            name="update of the head",
            activations=kept_for_backward(spec),
            gathered=memory.layers * memory.layer_staying,
            gradients=update.gradients,
            temporaries=update.temporaries,
            communication=memory.buckets,
        )


def _whole_layer(
    spec: RunSpec, memory: LayoutMemory, done: int, point: Snapshot
) -> Iterator[Snapshot]:
    """The backward of the layer after `done` others, whose gradients stay."""
    itemsize = next(tensor.itemsize for tensor in spec.part_tensors if tensor.trainable)
    earlier = memory.tail.shard + done * memory.layer.shard + memory.waiting_gradient
    for moment in _within_layer(spec, done):
        own = earlier + itemsize * moment.gradient_elements
        # a micro-batch before this one has left room for all of them
        gradients = max(point.gradients, own)
        yield replace(point, gradients=gradients, activations=moment.activations)


def _updated_layer(
    spec: RunSpec, done: int, point: Snapshot, update: InBackwardMemory
) -> Iterator[Snapshot]:
    """The backward of the layer after `done` others, whose weights it updates."""
    # the gradients of what gate and up have made, which are not there yet at the update
    missing = 2 * spec.tokens * spec.computed.mlp_width * spec.computation.itemsize
    for moment in _within_layer(spec, done):
        yield replace(point, gradients=0, activations=moment.activations)
        yield replace(
            point,
            gradients=update.gradients,
            activations=moment.activations - missing,
            temporaries=point.temporaries + update.temporaries,
        )


def _name_layer(done: int, layers: int) -> str:
    """The decoder layer that follows in the backward where so many are done; empty for those in
    between.

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
    """Bytes of activations once the backward has passed the head and so many layers, with its
    gradient.
    """
    architecture = spec.computed
    run = spec.computation
    kept = _kept_per_token(spec)
    # Offloaded, all layers together keep what one of them does.
    of_one = 0 if run.offloads else (kept["layers"] + kept["checkpoints"]) / architecture.layers
    handed_on = architecture.hidden * run.residual_itemsize - kept["final norm"] - done * of_one
    return kept_for_backward(spec) + int(spec.tokens * handed_on)


@dataclass(frozen=True, slots=True)
class LayerMoment:
    """A moment of a layer's backward."""

    activations: int  # bytes
    gradient_elements: int  # of the layer's weights, not yet reduced


def _within_layer(spec: RunSpec, done: int) -> list[LayerMoment]:
    """The beginning of the backward of a layer's MLP, and its end; `done` layers are done before
    it.
    """
    architecture = spec.computed
    run = spec.computation
    activations = _at_layer(spec, done)
    unit = f"layer {architecture.widest_layer}"
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable and tensor.unit == unit]
    if architecture.trace(run) is not None:  # where its MLP is, is not known
        return [LayerMoment(activations, _count_elements(trained))]
    mlp = [tensor for tensor in trained if ".mlp." in tensor.name]
    down = [tensor for tensor in mlp if "down_proj" in tensor.name]
    freed = spec.tokens * (
        layer_bytes(architecture, run)["mlp"] + architecture.mlp_width * run.itemsize
    )
    return [
        LayerMoment(activations, _count_elements(down)),
        LayerMoment(activations - freed, _count_elements(mlp)),
    ]


def _at_layer(spec: RunSpec, done: int) -> int:
    """Bytes of activations where the backward of the layer after `done` others begins, with what it
    computes again.
    """
    architecture = spec.computed
    run = spec.computation
    computes_again = run.checkpoint_every is not None or spec.recipe.quantization.bits is not None
    if computes_again:
        factors = expert_factor_bytes(architecture, run).layer
    else:
        factors = 0
    per_token = (
        recomputed_bytes(architecture, run)
        + working_bytes(architecture, run)
        + prefetched_bytes(architecture, run)
    )
    handed_on = architecture.hidden * run.residual_itemsize
    return _after_layers(spec, done) + factors + spec.tokens * (per_token - handed_on)


def _count_elements(tensors: Iterable[StateTensor]) -> int:
    """The elements that this rank has of `tensors`."""
    return sum(tensor.numel // tensor.divided for tensor in tensors)


# of what is allocated and freed in a step: blocks that the caching allocator holds but cannot use
SLACK = 0.06
CUDA_CONTEXT = 600 << 20  # bytes outside the allocator: the context, kernels, cuBLAS workspaces
NCCL_BUFFERS = 400 << 20  # bytes outside the allocator, once there is more than one rank


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run, and the snapshot in it with the most memory."""

    name: str
    peak: Snapshot


def plan_phases(spec: RunSpec) -> tuple[Phase, ...]:
    """Every phase of the run with its peak, on the rank that holds the most."""
    if spec.teacher is not None and spec.recipe.method.distill_top_k is not None:
        loading, *training = plan_phases(replace(spec, teacher=None))
        return (loading, _plan_asking(spec), *training)
    by_stage = [_plan_stage(replace(spec, stage=stage)) for stage in range(spec.stages)]
    return tuple(
        max(phases, key=lambda phase: phase.peak.total) for phases in zip(*by_stage, strict=True)
    )


def _plan_stage(spec: RunSpec) -> tuple[Phase, ...]:
    """The phases of a pipeline stage, or of a run without one, each at its highest point."""
    state = spec.state()
    on_cpu = spec.sharding.cpu_offload
    on_device = State(0, 0, 0, 0) if on_cpu else state
    keeps_state_in_files = spec.files() is not None
    weights = Snapshot(
        "weights in place",
        parameters=on_device.trained + on_device.frozen,
        teacher=0 if on_cpu else spec.teacher_bytes,
        rewards=spec.reward_bytes,
    )
    at_rest = replace(weights, name="between steps", optimizer=on_device.optimizer)
    if keeps_state_in_files:  # the buffers of the optimizer's files are there from the start
        weights = replace(at_rest, name=weights.name)
    step = [
        replace(point, activations=point.activations + pipeline_bytes(spec))
        for point in _step(spec, replace(at_rest, gradients=on_device.gradients))
    ]
    points = {"load": [_load(spec, weights)]}
    if spec.reference == "stored":
        points["reference"] = [_forward(spec, weights, "a batch", spec.tokens)]
    rollout = plan_rollout(spec, at_rest)
    sampling = [] if rollout is None else [rollout]
    sampling += _score_completions(spec, at_rest)
    if sampling:
        points["rollout"] = sampling
    points["first step"] = step if keeps_state_in_files else _first_step(spec, step)
    points["steady step"] = step
    points["evaluation"] = _evaluate(spec, at_rest, rollout)
    points["save"] = [at_rest]
    points["resume"] = [_read_optimizer(spec, at_rest)]
    points["export"] = [at_rest]
    return tuple(Phase(name, _find_highest(spec, points[name])) for name in points)


def _find_highest(spec: RunSpec, points: Iterable[Snapshot]) -> Snapshot:
    with_overhead = (_with_overhead(spec, point) for point in points)
    return max(with_overhead, key=lambda point: point.total)


def _load(spec: RunSpec, weights: Snapshot) -> Snapshot:
    state = spec.loaded_state()
    on_cpu = spec.sharding.cpu_offload
    return replace(weights, parameters=0 if on_cpu else state.trained + state.frozen)


def _read_optimizer(spec: RunSpec, at_rest: Snapshot) -> Snapshot:
    """Reads the optimizer's state of a checkpoint: beside it, the largest shard in fp32."""
    largest = max(tensor.numel for tensor in spec.part_tensors if tensor.trainable)
    temporaries = largest * FP32 // spec.shards
    return replace(at_rest, name="optimizer state read", temporaries=temporaries)


def _evaluate(spec: RunSpec, at_rest: Snapshot, rollout: Snapshot | None) -> list[Snapshot]:
    """An evaluation; of a method that samples, it is a rollout of held-out prompts."""
    rows = spec.recipe.batch.per_device_eval_batch_size or spec.rows
    tokens = spec.share_tokens(rows)
    held_out = rollout or _forward(spec, at_rest, "a held-out batch", tokens)
    return [
        *_teacher_first(spec, at_rest, tokens),
        held_out,
        *_compare_vectors(spec, at_rest, held_out, held_out_groups(spec) or 0),
    ]


def _plan_asking(spec: RunSpec) -> Phase:
    """The teacher, asked before training: beside the model, and freed before the first step."""
    if spec.sharding.cpu_offload:
        state = State(0, 0, 0, 0)
    else:
        state = spec.state()
    teacher = 0 if spec.sharding.cpu_offload else spec.teacher_bytes
    weights = Snapshot("", parameters=state.trained + state.frozen, teacher=teacher)
    scores = replace(
        weights,
        name="its likeliest tokens",
        loss=meeting_bytes(spec, spec.tokens),
        gathered=teachers_tail(spec),
    )
    points = [*_teacher_first(spec, weights, spec.tokens), scores]
    return Phase("teacher", _find_highest(spec, points))


# of a logit that is sampled from: it, log-probability and probability in fp32, two sums in fp64
SAMPLED_BYTES = 28


def plan_rollout(spec: RunSpec, at_rest: Snapshot) -> Snapshot | None:
    """While completions are sampled, with all parameters gathered; None where none are, or a server
    samples them.

    Of its moments the largest: a token is drawn, or computed, prompts move into the last layer's
    cache, or are read.
    """
    if not spec.recipe.samples_itself:
        return None
    architecture = spec.computed
    run = spec.computation
    keys = spec.recipe.rollout
    length = spec.recipe.data.max_length
    rows = min(keys.per_device_generation_batch_size, -(-spec.rows_per_step // spec.data_ranks))
    prompts = -(-rows // keys.num_generations)
    tokens = length - keys.max_completion_length
    # a turn reads all before it as a prompt of its own, of any length beside that of the others
    if keys.takes_turns:
        prompts = rows
        tokens = length
        length = length + keys.max_completion_length
    some = min(prompts, PROMPTS_AT_ONCE)
    forward = _forward(spec, at_rest, "completions sampled", some * tokens)
    # Which tokens see each other, and as numbers that are added; none where prompts are packed.
    if spec.recipe.model.attn_implementation == "auto":
        masks = 0
    else:
        masks = some * tokens**2 * (1 + run.itemsize)
    scores = 2 * FP32 * rows * architecture.heads * length
    cache = kv_cache_bytes(spec, rows * length)
    logits = rows * architecture.vocabulary * FP32
    moments = (
        (cache, rows * architecture.vocabulary * SAMPLED_BYTES),
        (cache + rows * evaluation_bytes(architecture, run) + scores, logits),
        (cache + kv_cache_bytes(spec, (prompts + rows) * tokens) // architecture.layers, logits),
        (
            kv_cache_bytes(spec, prompts * tokens) + forward.activations + masks,
            some * architecture.vocabulary * FP32,
        ),
    )
    activations, loss = max(moments, key=sum)
    gathered = sum(t.numel // t.divided * min(t.itemsize, run.itemsize) for t in spec.part_tensors)
    gathered = gathered if spec.sharding.is_fsdp else forward.gathered
    return replace(forward, gathered=gathered, activations=activations, loss=loss)


def _score_completions(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """While a reward model scores as many completions as fill the rows of a micro-batch."""
    run = replace(spec.computation, sequence_ranks=1, expert_ranks=1, divides_vocabulary=False)
    tokens = spec.rows * spec.recipe.data.max_length
    for architecture in spec.reward_models:
        activations = tokens * evaluation_bytes(architecture, run) + mask_bytes(
            architecture, run, tokens
        )
        yield replace(at_rest, name="completions scored", activations=activations)


def kv_cache_bytes(spec: RunSpec, tokens: int) -> int:
    """The keys and values of `tokens` tokens in all layers, as if each attended to all of its
    document.
    """
    architecture = spec.computed
    return int(
        2
        * tokens
        * architecture.attending_layers
        * architecture.key_value_heads
        * architecture.mean_head_size
        * spec.computation.itemsize
    )


def find_peak(spec: RunSpec) -> Snapshot:
    """The snapshot of the whole run with the most memory."""
    return max((phase.peak for phase in plan_phases(spec)), key=lambda point: point.total)


def pipeline_bytes(spec: RunSpec) -> int:
    """What a rank of a pipeline keeps of the micro-batches before the one that it computes, and the
    buffers of what it gets from its neighbors in a step: the states that enter each of its groups
    of layers, and their gradients.
    """
    if spec.stages == 1:
        return 0
    state = spec.tokens * spec.computed.hidden * spec.computation.itemsize
    groups = spec.sharding.pipeline_chunks // spec.stages
    in_flight = spec.micro_batches_in_flight
    received = groups - (spec.stage == 0)
    sent = groups - spec.is_last_stage
    buffers = spec.accumulation * (received + sent)
    if groups == 1 and spec.accumulation >= spec.stages:
        buffers = int(in_flight) * received + sent
    return int((in_flight - 1) * kept_for_backward(spec) + (buffers + in_flight * sent) * state)


def _first_step(spec: RunSpec, step: list[Snapshot]) -> list[Snapshot]:
    """The points of a step before which there is no optimizer's state: it is made by the first
    update.
    """
    last = "backward of the head"
    if spec.recipe.optimization.optim_in_backward:
        made = [point.name for point in step].index(last)
    else:
        made = len(step) - 2
    return [replace(point, optimizer=0) for point in step[: made + 1]] + step[made + 1 :]


def _step(spec: RunSpec, full: Snapshot) -> Iterator[Snapshot]:
    """The points of an optimizer step that could be its peak.

    `full` has the whole state, gradients included.
    """
    layout = plan_layout_memory(spec)
    all_kept = kept_for_backward(spec)
    # of earlier micro-batches
    if spec.accumulation > 1:
        before = full
    else:
        before = replace(full, gradients=0)
    if spec.reference == "adapters off":
        yield _forward(spec, before, "forward of the reference", spec.tokens)
    yield from _teacher_first(spec, before, spec.tokens)
    whole_step = _forward(spec, before, "forward of the whole step", spec.tokens)
    yield from _compare_vectors(spec, before, whole_step, spec.rows_per_step)
    head = replace(before, activations=all_kept, communication=layout.buckets)
    tail = layout.tail.gathered
    layers = layout.kept_in_forward
    at_loss = tail + layout.tail.arriving + layers + teachers_tail(spec)
    of_loss, of_backward = (
        (loss_bytes(spec), loss_backward_bytes(spec)) if spec.is_last_stage else (0, 0)
    )
    yield replace(head, name="loss", loss=of_loss, gathered=at_loss)
    if not layout.layer_staying:
        following = layout.layer.arriving
    else:
        following = 0
    at_backward = tail + layout.layers * layout.layer_staying + following
    yield replace(head, name="backward of the head", loss=of_backward, gathered=at_backward)
    layer_temporaries = dequantized_bytes(
        spec, recomputes_layer=spec.computation.checkpoint_every is not None
    )
    layer_temporaries += fp8_bytes(spec, spec.tokens) + rounded_bytes(spec, spec.tokens)
    if spec.sharding.is_fsdp:
        yield from sharded_points(spec, layout, before, layer_temporaries)
    else:
        yield from whole_points(spec, layout, before, full, layer_temporaries)
    if not spec.recipe.optimization.optim_in_backward:
        update = replace(full, name="optimizer step", communication=layout.buckets)
        yield replace(update, temporaries=update_temporaries(spec))


VECTOR_COPIES = 5  # of all vectors while they are compared: normalized, and the gradients of both


def vector_bytes(spec: RunSpec, groups: int) -> int:
    """The vectors of all documents of `groups` queries, in fp64, or their gradients; 0 where none
    are compared.
    """
    if not spec.recipe.method_facts.embeds:
        return 0
    return FP64 * groups * spec.recipe.group_size * spec.computed.hidden


def held_out_groups(spec: RunSpec) -> int | None:
    """The held-out queries, all of which are compared at once; None where the recipe alone does not
    say how many they are.
    """
    data = spec.recipe.data
    if data.eval_datasets:
        most = [source.max_samples for source in data.eval_datasets]
        known = [count for count in most if count is not None]
        return sum(known) if len(known) == len(most) else None
    size = data.eval_split_size or 0
    return int(size) if size == 0 or size >= 1 else None


def _compare_vectors(
    spec: RunSpec, before: Snapshot, forward: Snapshot, groups: int
) -> Iterator[Snapshot]:
    """The forwards of `groups` queries with their documents without gradients, and the loss of
    their vectors.
    """
    if not spec.recipe.method_facts.embeds:
        return
    vectors = vector_bytes(spec, groups)
    yield replace(forward, activations=forward.activations + vectors)
    yield replace(before, name="vectors compared", loss=compared_bytes(spec, groups))


def compared_bytes(spec: RunSpec, groups: int) -> int:
    """The vectors of `groups` queries with their documents while they are compared, and their
    cosines.
    """
    queries = min(groups, CONTRASTED_QUERIES)
    cosines = 3 * FP64 * queries * groups * (spec.recipe.group_size - 1)
    return VECTOR_COPIES * vector_bytes(spec, groups) + cosines


def loss_bytes(spec: RunSpec) -> int:
    """One chunk of logits, and the gradients that the loss computes in its forward: of head and
    hidden states.
    """
    architecture = spec.computed
    run = spec.computation
    if spec.recipe.method_facts.embeds:
        # states that are pooled, cast, their gradient
        return (2 * run.itemsize + FP64) * architecture.hidden * spec.tokens
    if run.autocast:
        cast_head = run.itemsize * architecture.head_rows * architecture.hidden
    else:
        cast_head = 0
    # else it is computed in the backward
    if spec.weighs_documents:
        head_gradient = 0
    else:
        head_gradient = _head_gradient(spec)
    # a copy of the trained positions, and its gradient
    hidden = 2 * run.itemsize * architecture.hidden * spec.tokens
    if head_gradient:
        product = weight_product_bytes(spec.part.head_rows, architecture.hidden, spec.tokens, run)
    else:
        product = 0
    return head_gradient + cast_head + hidden + max(_chunk_bytes(spec, spec.tokens), product)


def _chunk_bytes(spec: RunSpec, tokens: int) -> int:
    method = spec.recipe.method
    if spec.teacher is not None:
        return meeting_bytes(spec, tokens)
    if method.distill_top_k is not None:
        vocabulary = spec.architecture.vocabulary
        return divergence_chunk_bytes(
            vocabulary, tokens, spec.computation, method.distill_beta, method.temperature
        )
    return loss_chunk_bytes(spec.part.head_rows, tokens, spec.computation)


def _teacher_first(spec: RunSpec, before: Snapshot, tokens: int) -> Iterator[Snapshot]:
    forward = teacher_forward(spec, tokens)
    if forward is not None:
        yield replace(before, name="forward of the teacher", **forward)


def loss_backward_bytes(spec: RunSpec) -> int:
    """Both gradients, and a copy of each in its tensor's dtype; the hidden states' is fp32 in
    between.
    """
    architecture = spec.computed
    run = spec.computation
    if spec.recipe.method_facts.embeds:
        return (2 * run.itemsize + FP64) * architecture.hidden * spec.tokens
    if spec.weighs_documents:
        return log_probability_backward_bytes(architecture, spec.tokens, run, _head_gradient(spec))
    if run.itemsize < FP32 and not run.autocast:
        cast_back = run.itemsize
    else:
        cast_back = 0
    hidden = architecture.hidden * spec.tokens * (run.itemsize + FP32 + run.residual_itemsize)
    return _head_gradient(spec) + _head_gradient(spec) // FP32 * cast_back + hidden


def _head_gradient(spec: RunSpec) -> int:
    architecture = spec.architecture
    head = architecture.embedding.name if architecture.tied else architecture.head_name
    is_trained = any(tensor.trainable for tensor in spec.tensors if tensor.name == head)
    if is_trained:
        return FP32 * spec.part.head_rows * spec.part.hidden
    return 0


def dequantized_bytes(spec: RunSpec, *, recomputes_layer: bool = False) -> int:
    """Bytes of the weights of a quantized base that are dequantized at once, in the compute dtype:
    the largest, or all experts of a layer.

    `recomputes_layer`: under activation checkpointing, whose recomputed forward keeps all weights
    of a layer for its backward.
    """
    if spec.recipe.quantization.bits is None:
        return 0
    architecture = spec.architecture
    ranks = spec.sharding.expert_parallel_size
    if not recomputes_layer:
        return spec.computation.itemsize * dequantized_at_once(architecture, ranks)
    experts = {weight.name for weight in architecture.experts(architecture.widest_layer)}
    elements = 0
    for weight in architecture.quantizable(architecture.widest_layer):
        if weight.name in experts:
            elements += weight.numel // ranks
        else:
            elements += weight.numel
    return spec.computation.itemsize * elements


def _forward(spec: RunSpec, at_rest: Snapshot, name: str, tokens: int) -> Snapshot:
    """A forward of `tokens` that saves nothing for a backward."""
    architecture = spec.computed
    run = spec.computation
    rotary = 2 * architecture.rotated_size * run.residual_itemsize
    factors = expert_factor_bytes(architecture, run).layer
    return replace(
        at_rest,
        name=name,
        activations=tokens * (evaluation_bytes(architecture, run) + rotary)
        + mask_bytes(architecture, run, tokens),
        loss=_chunk_bytes(spec, tokens),
        temporaries=dequantized_bytes(spec)
        + fp8_bytes(spec, tokens)
        + rounded_bytes(spec, tokens)
        + factors,
        gathered=_gathered_in_forward(spec),
        communication=plan_layout_memory(spec).buckets,
    )


def _gathered_in_forward(spec: RunSpec) -> int:
    """A layer with the buffers of its all-gather and of the next one's, or the tail with its
    own.
    """
    layout = plan_layout_memory(spec)
    if layout.layer_staying:
        layer = 0
    else:
        layer = layout.layer.gathered + 2 * layout.layer.arriving
    waiting = layout.tail.gathered if layout.tail_waits else 0
    tail = layout.tail.gathered + layout.tail.arriving + teachers_tail(spec)
    return max(layer, tail) + waiting + layout.kept_in_forward


def _with_overhead(spec: RunSpec, point: Snapshot) -> Snapshot:
    """The snapshot with what the device needs beside the tensors."""
    if spec.device == "cpu":
        return point
    resting = point.parameters + point.teacher + point.rewards + point.optimizer
    moving = point.allocated - resting
    context = CUDA_CONTEXT + (NCCL_BUFFERS if spec.ranks > 1 else 0)
    return replace(point, slack=int(SLACK * moving), context=context)
