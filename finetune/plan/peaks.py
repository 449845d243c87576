"""The peak memory of one rank in every phase of a run.

A phase is a list of points at which memory could be highest, each a `Snapshot`; the highest of them
is its peak. The points of a step follow torch's order of events, which `temporary_memory.py`
describes. The points of a backward are in `backward_memory.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune.config.layout import UNTRAINED_STAGE
from finetune.constants import FP32
from finetune.errors import UserError
from finetune.plan.backward_memory import kept_for_backward, sharded_points, unsharded_points
from finetune.plan.forward_memory import (
    answer_points,
    dequantized_bytes,
    held_out_rollout_points,
    plan_forward,
    rollout_points,
    scoring_points,
    teacher_points,
    teacher_tail_bytes,
    vector_points,
)
from finetune.plan.loss_memory import (
    count_held_out,
    loss_backward_bytes,
    loss_bytes,
    teacher_divergence_bytes,
)
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import State
from finetune.plan.temporary_memory import (
    LayoutMemory,
    Snapshot,
    dora_base_bytes,
    dora_bytes,
    fp8_bytes,
    optimizer_step_temporaries,
    plan_layout_memory,
    rounded_bytes,
    state_making_bytes,
)

# The share of what a step allocates and frees again that the caching allocator holds besides, in
# blocks that it cannot use.
SLACK = 0.06
CUDA_CONTEXT = 600 << 20  # bytes outside the allocator: the context, kernels, cuBLAS workspaces
NCCL_BUFFERS = 400 << 20  # bytes outside the allocator, once there is more than one rank

HEAD_BACKWARD = "backward of the head"  # a point's name, by which `_first_step` finds it
NORM_GRADIENTS = 5  # fp32 tensors of the hidden states' size at once in the backward of an RMSNorm


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run, and the point in it with the most memory."""

    name: str
    peak: Snapshot


def plan_phases(spec: RunSpec) -> tuple[Phase, ...]:
    """Plans every phase of the run, in order. Under a pipeline, each phase is that of the stage
    with the highest peak in it.
    """
    if spec.teacher is not None and spec.recipe.method.distill_top_k is not None:
        # the teacher reads the data before training, in a phase of its own, and is then freed
        loading, *training = plan_phases(replace(spec, teacher=None))
        return (loading, _plan_teacher(spec), *training)
    by_stage = [_plan_stage(replace(spec, stage=stage)) for stage in range(spec.stages)]
    return tuple(
        max(phases, key=lambda phase: phase.peak.total) for phases in zip(*by_stage, strict=True)
    )


def _plan_stage(spec: RunSpec) -> tuple[Phase, ...]:
    """Plans the phases of `spec.stage`; without a pipeline that is the whole model.

    Raises `UserError` if the stage trains nothing.
    """
    if not any(tensor.trainable for tensor in spec.part_tensors):
        raise UserError(UNTRAINED_STAGE.format(spec.stages))
    state = State(0, 0, 0, 0) if spec.sharding.cpu_offload else spec.state()
    # If the optimizer's state is in files, `state.optimizer` is the buffers, which are there from
    # the start. Else the first update allocates the state.
    keeps_state_in_files = spec.optimizer_file() is not None
    before_training = replace(
        _snapshot_weights(spec),
        rewards=spec.reward_bytes,
        optimizer=state.optimizer if keeps_state_in_files else 0,
    )
    at_rest = replace(before_training, name="between steps", optimizer=state.optimizer)
    # `pipeline_bytes` is added to every point, also to the update, where no micro-batch is in
    # flight: an upper bound.
    step = [
        replace(point, activations=point.activations + pipeline_bytes(spec))
        for point in _step_points(spec, replace(at_rest, gradients=state.gradients))
    ]
    points_of = {"load": [_loading_point(spec, before_training)]}  # by phase, in their order
    if spec.reference == "stored":
        points_of["reference"] = [plan_forward(spec, before_training, "a batch", spec.tokens)]
    if rollout := [*rollout_points(spec, at_rest), *scoring_points(spec, at_rest)]:
        points_of["rollout"] = rollout
    points_of["first step"] = step if keeps_state_in_files else _first_step(spec, step)
    points_of["steady step"] = step
    points_of["evaluation"] = _list_evaluation_points(spec, at_rest)
    points_of["save"] = [at_rest, _state_point(spec, at_rest)]
    points_of["resume"] = [*_resume_points(spec, at_rest), _state_point(spec, at_rest)]
    points_of["export"] = [at_rest]
    return tuple(Phase(name, _find_highest(spec, points)) for name, points in points_of.items())


def _snapshot_weights(spec: RunSpec) -> Snapshot:
    """The weights of the model and of its teacher on the device, and DDP's buckets, which exist
    from then on. With CPU offload there are no weights: the host holds them.
    """
    weights = Snapshot("weights in place", communication=plan_layout_memory(spec).buckets)
    if spec.sharding.cpu_offload:
        return weights
    state = spec.state()
    return replace(weights, parameters=state.trained + state.frozen, teacher=spec.teacher_bytes)


def _find_highest(spec: RunSpec, points: Iterable[Snapshot]) -> Snapshot:
    """Finds the point with the most memory, including the device's own overhead."""
    with_overhead = (_with_overhead(spec, point) for point in points)
    return max(with_overhead, key=lambda point: point.total)


def _loading_point(spec: RunSpec, before_training: Snapshot) -> Snapshot:
    """The point at which the weights have been read, in the dtype of training.

    An optimizer with its state in files leaves them in the compute dtype later, which is smaller.
    """
    if spec.sharding.cpu_offload:
        return replace(before_training, parameters=0)
    state = spec.loaded_state()
    return replace(before_training, parameters=state.trained + state.frozen)


def _state_point(spec: RunSpec, at_rest: Snapshot) -> Snapshot:
    """The point at which the trial save, or a run that resumes, makes the optimizer's state.

    `at_rest` if the state is in files. FSDP1 copies its parameters first, even if the optimizer
    keeps no state, and then the state if it is sharded.
    """
    if spec.optimizer_file() is not None:
        return at_rest
    making = state_making_bytes(spec) if at_rest.optimizer else 0
    copied = _copied_bytes(spec, at_rest)
    temporaries = making + copied if spec.shards == 1 else max(making, copied)
    return replace(at_rest, name="optimizer state made", temporaries=temporaries)


def _copied_bytes(spec: RunSpec, at_rest: Snapshot) -> int:
    """Bytes of the copies of its state that FSDP1 hands out to be saved or filled; 0 in any other
    layout.

    They are the parameters and, if it is sharded, the optimizer's state. On the way there a whole
    parameter is copied, or a unit's optimizer state is gathered, next to this rank's shard of it.
    """
    if spec.sharding.layout != "fsdp1":
        return 0
    if spec.shards == 1:
        return at_rest.parameters
    layout = plan_layout_memory(spec)
    unit = max(layout.layer.shard, layout.tail.shard) / spec.state().gradients
    gathered = int(unit * (spec.shards + 1) * at_rest.optimizer)
    largest = max(tensor.numel * tensor.itemsize for tensor in spec.part_tensors)
    return at_rest.parameters + max(largest, at_rest.optimizer + gathered)


def _resume_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """Yields the points at which a checkpoint is read, tensor by tensor.

    An 8-bit optimizer's values are on the device in fp32 until they are quantized; for any other
    optimizer that is an upper bound. FSDP1 also copies parameters and optimizer state, and then
    loads the parameters.
    """
    largest = max(tensor.numel for tensor in spec.part_tensors if tensor.trainable)
    temporaries = largest * FP32 // spec.shards + _copied_bytes(spec, at_rest)
    yield replace(at_rest, name="optimizer state read", temporaries=temporaries)
    if spec.sharding.layout == "fsdp1" and spec.shards > 1:
        copied = at_rest.parameters + at_rest.optimizer
        temporaries = copied + _count_loaded_bytes(spec)
        yield replace(at_rest, name="parameters loaded", temporaries=temporaries)


def _count_loaded_bytes(spec: RunSpec) -> int:
    """Bytes that FSDP1 gathers while it loads parameters: the root unit and, inside it, a layer.

    Each is there twice, as a flat parameter and as tensors. torch's
    `_sharded_pre_load_state_dict_hook` gathers frozen tensors too.
    """
    by_unit: dict[str, int] = {}
    for tensor in spec.part_tensors:
        unit = tensor.unit if tensor.unit.startswith("layer") else "root"
        by_unit[unit] = by_unit.get(unit, 0) + tensor.numel * tensor.itemsize
    root = by_unit.pop("root")
    if plan_layout_memory(spec).layers == len(by_unit):
        layer = max(by_unit.values())
    else:  # layers are no units of their own
        layer = sum(by_unit.values())
    return 2 * (root + layer)


def _list_evaluation_points(spec: RunSpec, at_rest: Snapshot) -> list[Snapshot]:
    """Lists the points of an evaluation.

    A method that samples measures the rewards of held-out prompts. Any other computes the loss of a
    held-out batch, after the teacher's forward if there is a teacher; an embedding method then
    compares its vectors. Prompts are answered last.
    """
    if spec.recipe.method_facts.samples:
        sampling = held_out_rollout_points(spec, at_rest)
        return [at_rest, *sampling, *scoring_points(spec, at_rest)]
    rows = spec.recipe.batch.per_device_eval_batch_size or spec.rows
    tokens = spec.share_tokens(rows)
    teacher = teacher_points(spec, at_rest, tokens)
    held_out = plan_forward(spec, at_rest, "a held-out batch", tokens)
    # A number of queries that is not known counts as 0, which the plan's notes say.
    vectors = vector_points(spec, at_rest, held_out, count_held_out(spec) or 0)
    return [*teacher, held_out, *vectors, *answer_points(spec, at_rest)]


def _plan_teacher(spec: RunSpec) -> Phase:
    """Plans the phase before training in which the teacher computes its likeliest tokens of the
    data (`distill_top_k`). The model's weights are there too.
    """
    weights = _snapshot_weights(spec)
    likeliest = replace(
        weights,
        name="its likeliest tokens",
        # an upper bound: a chunk of the divergence, of which only the logits exist here
        loss=teacher_divergence_bytes(spec, spec.tokens),
        gathered=teacher_tail_bytes(spec),
    )
    points = [*teacher_points(spec, weights, spec.tokens), likeliest]
    return Phase("teacher", _find_highest(spec, points))


def find_peak(spec: RunSpec) -> Snapshot:
    """Finds the point with the most memory in the whole run."""
    return max((phase.peak for phase in plan_phases(spec)), key=lambda point: point.total)


def pipeline_bytes(spec: RunSpec) -> int:
    """Bytes that a pipeline rank holds besides the micro-batch that it computes; 0 without a
    pipeline.

    They are the saved activations of the other micro-batches in flight, and messages: buffers for
    the hidden states that the rank receives and for the gradients of those that it has sent, and
    the hidden states that it has sent, which are kept until their backward.
    """
    if spec.stages == 1:
        return 0
    message = spec.tokens * spec.computed.hidden * spec.computation.itemsize
    chunks = spec.sharding.pipeline_chunks // spec.stages  # groups of layers on this rank
    # With several chunks this may be a fraction: each holds a share of a micro-batch's activations.
    in_flight = spec.micro_batches_in_flight
    # Of the whole model, the first chunk receives no hidden states and the last one sends none.
    receiving_chunks = chunks - (spec.stage == 0)
    sending_chunks = chunks - spec.is_last_stage
    if spec.pipeline_order == "1f1b":
        # an input buffer for each micro-batch in flight, and one gradient buffer for all of them
        buffers = in_flight * receiving_chunks + sending_chunks
    else:  # for each micro-batch an input buffer and a gradient buffer
        buffers = spec.accumulation * (receiving_chunks + sending_chunks)
    sent_states = in_flight * sending_chunks
    return int((in_flight - 1) * kept_for_backward(spec) + (buffers + sent_states) * message)


def _first_step(spec: RunSpec, step: list[Snapshot]) -> list[Snapshot]:
    """The points of `step` without the optimizer's state before the first update, which allocates
    it.
    """
    if spec.recipe.optimization.optim_in_backward:
        # The first update comes after the backward of the head, or later if the head is tied.
        names = [point.name for point in step]
        points_before_update = names.index(HEAD_BACKWARD) + 1
    else:
        points_before_update = len(step) - 1  # the last point is the optimizer step
    before_update = [replace(point, optimizer=0) for point in step[:points_before_update]]
    return before_update + step[points_before_update:]


def _step_points(spec: RunSpec, full: Snapshot) -> Iterator[Snapshot]:
    """Yields the points of an optimizer step that could be its peak, in order.

    `full`: the parameters, the optimizer's state and the gradients, without activations.
    """
    layout = plan_layout_memory(spec)
    # With several micro-batches, the gradients of earlier ones are there before a forward.
    before = full if spec.accumulation > 1 else replace(full, gradients=0)
    if spec.reference == "adapters off":
        yield plan_forward(spec, before, "forward of the reference", spec.tokens)
    yield from teacher_points(spec, before, spec.tokens)
    # An embedding method computes the vectors of the whole step before the first backward, one
    # micro-batch at a time.
    whole_step = plan_forward(spec, before, "forward of the whole step", spec.tokens)
    yield from vector_points(spec, before, whole_step, spec.rows_per_step)
    yield from _head_points(spec, layout, before)
    layer_temporaries = dequantized_bytes(
        spec, recomputes_layer=spec.computation.checkpoint_every is not None
    )
    layer_temporaries += fp8_bytes(spec, spec.tokens) + rounded_bytes(spec, spec.tokens)
    layer_temporaries += dora_bytes(spec) + dora_base_bytes(spec)
    if spec.sharding.is_fsdp:
        yield from sharded_points(spec, layout, before, layer_temporaries)
    else:
        yield from unsharded_points(spec, layout, before, full.gradients, layer_temporaries)
    if not spec.recipe.optimization.optim_in_backward:
        temporaries = optimizer_step_temporaries(spec)
        yield replace(full, name="optimizer step", temporaries=temporaries)


def _head_points(spec: RunSpec, layout: LayoutMemory, before: Snapshot) -> Iterator[Snapshot]:
    """Yields the loss and the backward of the head and of the final norm, when the activations of
    all layers are there.

    Layers that stay gathered are there at all points (`all_layers_until_loss`,
    `bytes_until_backward`). If they do not stay, the backward of the head prefetches the last
    layer; without sharding its buffer is 0 bytes.
    """
    head = replace(before, activations=kept_for_backward(spec))
    gathered_at_both = layout.tail.gathered + layout.staying_embedding
    yield replace(
        head,
        name="loss",
        loss=loss_bytes(spec) if spec.is_last_stage else 0,
        gathered=gathered_at_both
        + layout.tail.arriving
        + layout.all_layers_until_loss
        + teacher_tail_bytes(spec),
    )
    if layout.each_layer_until_backward:
        layers = layout.bytes_until_backward(layout.layers)
    else:
        layers = layout.layer.arriving
    head_backward = replace(
        head,
        name=HEAD_BACKWARD,
        loss=loss_backward_bytes(spec) if spec.is_last_stage else 0,
        gathered=gathered_at_both + layers,
    )
    yield head_backward
    if spec.is_last_stage and not spec.computation.compiled:
        norm_gradients = NORM_GRADIENTS * FP32 * spec.computed.hidden * spec.tokens
        yield replace(
            head_backward,
            name="backward of the final norm",
            activations=head.activations + norm_gradients,
            loss=0,
        )


def _with_overhead(spec: RunSpec, point: Snapshot) -> Snapshot:
    """Adds a GPU's overhead to a point: allocator slack, CUDA context and NCCL buffers.

    On a CPU the point is returned as it is.
    """
    if spec.device == "cpu":
        return point
    allocated_once = point.parameters + point.teacher + point.rewards + point.optimizer
    reallocated = point.allocated - allocated_once
    context = CUDA_CONTEXT + (NCCL_BUFFERS if spec.ranks > 1 else 0)
    return replace(point, slack=int(SLACK * reallocated), context=context)
