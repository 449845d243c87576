"""The peak memory of one rank in every phase of a run, from snapshots at the points where memory
could be highest.

The points of a step follow torch's order of events, which `temporary_memory.py` describes; the
backward's are in `backward_memory.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from finetune.config.layout import UNTRAINED_STAGE
from finetune.constants import FP32
from finetune.errors import UserError
from finetune.plan.backward_memory import kept_for_backward, sharded_points, unsharded_points
from finetune.plan.forward_memory import (
    dequantized_bytes,
    plan_forward,
    rollout_points,
    scoring_points,
    teacher_points,
    teacher_tail_bytes,
    vector_points,
)
from finetune.plan.loss_memory import (
    count_held_out_queries,
    loss_backward_bytes,
    loss_bytes,
    teacher_divergence_bytes,
)
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import State
from finetune.plan.temporary_memory import (
    LayoutMemory,
    Snapshot,
    fp8_bytes,
    plan_layout_memory,
    rounded_bytes,
    update_temporaries,
)

# of what is allocated and freed in a step: blocks that the caching allocator holds but cannot use
SLACK = 0.06
CUDA_CONTEXT = 600 << 20  # bytes outside the allocator: the context, kernels, cuBLAS workspaces
NCCL_BUFFERS = 400 << 20  # bytes outside the allocator, once there is more than one rank

HEAD_BACKWARD = "backward of the head"  # the name of a point


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run, and the snapshot in it with the most memory."""

    name: str
    peak: Snapshot


def plan_phases(spec: RunSpec) -> tuple[Phase, ...]:
    """Every phase of the run with its peak, on the pipeline stage that holds the most in that
    phase.
    """
    if spec.teacher is not None and spec.recipe.method.distill_top_k is not None:
        # the teacher reads the data before training, in a phase of its own
        loading, *training = plan_phases(replace(spec, teacher=None))
        return (loading, _plan_teacher(spec), *training)
    by_stage = [_plan_stage(replace(spec, stage=stage)) for stage in range(spec.stages)]
    return tuple(
        max(phases, key=lambda phase: phase.peak.total) for phases in zip(*by_stage, strict=True)
    )


def _plan_stage(spec: RunSpec) -> tuple[Phase, ...]:
    """The phases of a pipeline stage, or of a run without one, each at its highest point.

    Raises `UserError` for a stage that trains nothing.
    """
    if not any(tensor.trainable for tensor in spec.part_tensors):
        raise UserError(UNTRAINED_STAGE.format(spec.stages))
    state = State(0, 0, 0, 0) if spec.sharding.cpu_offload else spec.state()
    # Optimizer state in files needs its buffers from the start; else the first update makes it.
    keeps_state_in_files = spec.files() is not None
    before_training = replace(
        _hold_weights(spec),
        rewards=spec.reward_bytes,
        optimizer=state.optimizer if keeps_state_in_files else 0,
    )
    at_rest = replace(before_training, name="between steps", optimizer=state.optimizer)
    # At the update, too, though no other micro-batch is in flight then: an upper bound.
    step = [
        replace(point, activations=point.activations + pipeline_bytes(spec))
        for point in _step_points(spec, replace(at_rest, gradients=state.gradients))
    ]
    points = {"load": [_load(spec, before_training)]}  # by phase, in the order of a run
    if spec.reference == "stored":
        points["reference"] = [plan_forward(spec, before_training, "a batch", spec.tokens)]
    sampling = list(rollout_points(spec, at_rest))
    if rollout := [*sampling, *scoring_points(spec, at_rest)]:
        points["rollout"] = rollout
    points["first step"] = step if keeps_state_in_files else _first_step(spec, step)
    points["steady step"] = step
    points["evaluation"] = _evaluate(spec, at_rest, sampling)
    points["save"] = [at_rest]
    points["resume"] = [_resume_point(spec, at_rest)]
    points["export"] = [at_rest]
    return tuple(Phase(name, _find_highest(spec, of_phase)) for name, of_phase in points.items())


def _hold_weights(spec: RunSpec) -> Snapshot:
    """The weights of the model and of its teacher on the device; none where the host holds them."""
    weights = Snapshot("weights in place")
    if spec.sharding.cpu_offload:
        return weights
    state = spec.state()
    return replace(weights, parameters=state.trained + state.frozen, teacher=spec.teacher_bytes)


def _find_highest(spec: RunSpec, points: Iterable[Snapshot]) -> Snapshot:
    with_overhead = (_with_overhead(spec, point) for point in points)
    return max(with_overhead, key=lambda point: point.total)


def _load(spec: RunSpec, before_training: Snapshot) -> Snapshot:
    """While weights are read, in the dtype of training: an optimizer with its state in files later
    leaves the weights in the compute dtype.
    """
    if spec.sharding.cpu_offload:
        return replace(before_training, parameters=0)
    state = spec.loaded_state()
    return replace(before_training, parameters=state.trained + state.frozen)


def _resume_point(spec: RunSpec, at_rest: Snapshot) -> Snapshot:
    """While a checkpoint's optimizer state is read: beside it, the largest shard in fp32."""
    largest = max(tensor.numel for tensor in spec.part_tensors if tensor.trainable)
    temporaries = largest * FP32 // spec.shards
    return replace(at_rest, name="optimizer state read", temporaries=temporaries)


def _evaluate(spec: RunSpec, at_rest: Snapshot, sampling: list[Snapshot]) -> list[Snapshot]:
    """The points of an evaluation: the teacher's, then those of `sampling`. Where that is empty, as
    if a server samples, a held-out batch and, where a method embeds, the comparison of its vectors.
    """
    rows = spec.recipe.batch.per_device_eval_batch_size or spec.rows
    tokens = spec.share_tokens(rows)
    teacher = teacher_points(spec, at_rest, tokens)
    if sampling:
        return [*teacher, *sampling]
    held_out = plan_forward(spec, at_rest, "a held-out batch", tokens)
    vectors = vector_points(spec, at_rest, held_out, count_held_out_queries(spec) or 0)
    return [*teacher, held_out, *vectors]


def _plan_teacher(spec: RunSpec) -> Phase:
    """The phase before training in which the teacher computes its likeliest tokens of the data,
    beside the model. Before the first step the teacher is freed.
    """
    weights = _hold_weights(spec)
    likeliest = replace(
        weights,
        name="its likeliest tokens",
        loss=teacher_divergence_bytes(spec, spec.tokens),  # at most: there is no divergence yet
        gathered=teacher_tail_bytes(spec),
    )
    points = [*teacher_points(spec, weights, spec.tokens), likeliest]
    return Phase("teacher", _find_highest(spec, points))


def find_peak(spec: RunSpec) -> Snapshot:
    """The snapshot of the whole run with the most memory."""
    return max((phase.peak for phase in plan_phases(spec)), key=lambda point: point.total)


def pipeline_bytes(spec: RunSpec) -> int:
    """The bytes that a rank of a pipeline holds for other micro-batches than the one it computes.

    These are their activations, and buffers for messages: one for each state that it receives, and
    one for each gradient of a state that it sent.
    """
    if spec.stages == 1:
        return 0
    message = spec.tokens * spec.computed.hidden * spec.computation.itemsize
    chunks = spec.sharding.pipeline_chunks // spec.stages  # groups of layers on this rank
    # a fraction where there are several chunks: each has a share of a micro-batch's activations
    in_flight = spec.micro_batches_in_flight
    receiving = chunks - (spec.stage == 0)  # chunks with a predecessor on another rank
    sending = chunks - spec.is_last_stage
    if spec.pipeline_order == "1f1b":
        # one buffer for the input of each micro-batch in flight, one for the gradients of all
        buffers = in_flight * receiving + sending
    else:  # one for each micro-batch, for what it receives and for the gradient of what it sends
        buffers = spec.accumulation * (receiving + sending)
    outputs = in_flight * sending  # what was sent is kept until its backward
    return int((in_flight - 1) * kept_for_backward(spec) + (buffers + outputs) * message)


def _first_step(spec: RunSpec, step: list[Snapshot]) -> list[Snapshot]:
    """The points of the first step: without the optimizer's state until its first update makes
    it.
    """
    if spec.recipe.optimization.optim_in_backward:
        # the first update comes after this point
        before_update = [point.name for point in step].index(HEAD_BACKWARD) + 1
    else:
        before_update = len(step) - 1  # the last point is the optimizer step
    return [replace(point, optimizer=0) for point in step[:before_update]] + step[before_update:]


def _step_points(spec: RunSpec, full: Snapshot) -> Iterator[Snapshot]:
    """The points of an optimizer step that could be its peak, in their order.

    `full` has the whole state, gradients included.
    """
    layout = plan_layout_memory(spec)
    # Gradients of earlier micro-batches are there before a forward.
    before = full if spec.accumulation > 1 else replace(full, gradients=0)
    if spec.reference == "adapters off":
        yield plan_forward(spec, before, "forward of the reference", spec.tokens)
    yield from teacher_points(spec, before, spec.tokens)
    # of a method that embeds: a micro-batch at a time, before the first backward
    whole_step = plan_forward(spec, before, "forward of the whole step", spec.tokens)
    yield from vector_points(spec, before, whole_step, spec.rows_per_step)
    yield from _head_points(spec, layout, before)
    layer_temporaries = dequantized_bytes(
        spec, recomputes_layer=spec.computation.checkpoint_every is not None
    )
    layer_temporaries += fp8_bytes(spec, spec.tokens) + rounded_bytes(spec, spec.tokens)
    if spec.sharding.is_fsdp:
        yield from sharded_points(spec, layout, before, layer_temporaries)
    else:
        yield from unsharded_points(spec, layout, before, full.gradients, layer_temporaries)
    if not spec.recipe.optimization.optim_in_backward:
        update = replace(full, name="optimizer step", communication=layout.buckets)
        yield replace(update, temporaries=update_temporaries(spec))


def _head_points(spec: RunSpec, layout: LayoutMemory, before: Snapshot) -> Iterator[Snapshot]:
    """The loss and the head's backward, when the activations of all layers are kept.

    When the backward begins, what stays until then is there; else the last layer is being gathered
    again, which takes nothing where nothing is sharded. What stays until the backward has stayed
    until the loss, too.
    """
    head = replace(before, activations=kept_for_backward(spec), communication=layout.buckets)
    gathered = layout.tail.gathered + layout.staying_embedding
    yield replace(
        head,
        name="loss",
        loss=loss_bytes(spec) if spec.is_last_stage else 0,
        gathered=gathered
        + layout.tail.arriving
        + layout.all_layers_until_loss
        + teacher_tail_bytes(spec),
    )
    if layout.each_layer_until_backward:
        gathered += layout.layers * layout.each_layer_until_backward
    else:
        gathered += layout.layer.arriving
    yield replace(
        head,
        name=HEAD_BACKWARD,
        loss=loss_backward_bytes(spec) if spec.is_last_stage else 0,
        gathered=gathered,
    )


def _with_overhead(spec: RunSpec, point: Snapshot) -> Snapshot:
    """The snapshot with what the device needs beside the tensors."""
    if spec.device == "cpu":
        return point
    resting = point.parameters + point.teacher + point.rewards + point.optimizer
    moving = point.allocated - resting
    context = CUDA_CONTEXT + (NCCL_BUFFERS if spec.ranks > 1 else 0)
    return replace(point, slack=int(SLACK * moving), context=context)
