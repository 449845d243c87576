"""The peak memory of one rank in every phase of a run, from snapshots at the points where memory could be highest.

The snapshots of a training step follow torch's own order of events. FSDP2 (torch/distributed/fsdp/_fully_shard): in the
forward a unit's all-gather buffer lives until the next unit has been copied out; in the backward the previous unit is
prefetched; a unit's gradients are copied into an fp32 buffer and reduce-scattered, and that buffer is held until the
next unit's. Units are the embedding, every decoder layer, and the tail (final norm and head), which stays gathered
from forward to backward (Accelerate's fsdp2_prepare_model).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from finetune.plan.activations import (
    evaluation_bytes,
    kept_bytes,
    layer_bytes,
    prefetched_bytes,
    recomputed_bytes,
    working_bytes,
)
from finetune.plan.fp8_memory import fp8_bytes
from finetune.plan.fsdp_units import split_into_units
from finetune.plan.loss_memory import log_probability_backward_bytes, loss_chunk_bytes
from finetune.plan.merged_experts import merged_expert_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import FP32, HEAD, State
from finetune.plan.teacher_memory import meeting_bytes, teacher_forward, teachers_tail
from finetune.plan.update_memory import plan_updates_in_backward, points_of_updates, update_temporaries

SLACK = 0.06  # of what is allocated and freed in a step: blocks that the caching allocator holds but cannot use
CUDA_CONTEXT = 600 << 20  # bytes outside the allocator: the context, kernels, cuBLAS workspaces
NCCL_BUFFERS = 400 << 20  # bytes outside the allocator, once there is more than one rank


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes that one rank holds at one point of a run."""

    name: str
    parameters: int = 0  # trained and frozen, as sharded
    teacher: int = 0  # its parameters, as sharded
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # FSDP units gathered for the computation, or weights cast by autocast
    activations: int = 0
    loss: int = 0  # the chunk of logits, and the gradients that the loss computes in its forward
    communication: int = 0  # unsharded gradients that are being reduced
    temporaries: int = 0  # of the optimizer; of a quantized base, what is dequantized; of FP8, what is cast
    slack: int = 0
    context: int = 0

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated counts."""
        return (
            self.parameters
            + self.teacher
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.loss
            + self.communication
            + self.temporaries
        )

    @property
    def total(self) -> int:
        """What the device needs to have."""
        return self.allocated + self.slack + self.context


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run, and the snapshot in it with the most memory."""

    name: str
    peak: Snapshot


def plan_phases(spec: RunSpec) -> tuple[Phase, ...]:
    """Every phase of the run with its peak, on the rank that holds the most."""
    state = spec.state()
    on_device = State(0, 0, 0, 0) if spec.sharding.cpu_offload else state
    teacher = 0 if spec.sharding.cpu_offload else spec.teacher_bytes
    in_files = spec.files() is not None
    weights = Snapshot("weights in place", parameters=on_device.trained + on_device.frozen, teacher=teacher)
    at_rest = replace(weights, name="between steps", optimizer=on_device.optimizer)
    if in_files:  # buffers are there from the start
        weights = replace(at_rest, name=weights.name)
    read = spec.loaded_state()
    loaded = replace(weights, parameters=0 if spec.sharding.cpu_offload else read.trained + read.frozen)
    step = list(_step(spec, replace(at_rest, gradients=on_device.gradients)))
    kept = points_of_updates(spec) if not in_files else [point.name for point in step]
    first = [point if point.name in kept else replace(point, optimizer=0) for point in step]
    largest_shard = max(tensor.numel * FP32 for tensor in spec.part_tensors if tensor.trainable) // spec.shards
    before = [_forward(spec, weights, "a batch", spec.tokens)] if spec.reference == "stored" else []
    by_name = {
        "load": [loaded],
        **({"reference": before} if before else {}),
        "first step": first,
        "steady step": step,
        "evaluation": [*_teacher_first(spec, at_rest, _evaluated_tokens(spec)), _evaluation(spec, at_rest)],
        "save": [at_rest],
        "resume": [replace(at_rest, name="optimizer state read", temporaries=largest_shard)],
        "export": [at_rest],
    }
    return tuple(
        Phase(name, max((_with_overhead(spec, point) for point in points), key=lambda point: point.total))
        for name, points in by_name.items()
    )


def find_peak(spec: RunSpec) -> Snapshot:
    """The snapshot of the whole run with the most memory."""
    return max((phase.peak for phase in plan_phases(spec)), key=lambda point: point.total)


def _step(spec: RunSpec, full: Snapshot) -> Iterator[Snapshot]:
    """The points of an optimizer step that could be its peak. `full` has the whole state, gradients included."""
    run, tokens, a = spec.computation, spec.tokens, spec.computed
    kept = kept_bytes(a, run)
    merged = merged_expert_bytes(a, run)
    all_kept = tokens * sum(kept.values()) + merged.kept
    ends = tokens * (kept["ends"] + a.hidden * run.residual_itemsize)
    at_work = tokens * (recomputed_bytes(a, run) + working_bytes(a, run) + prefetched_bytes(a, run))
    at_work += merged.layer if run.checkpoint_every is not None else 0
    one_layer = tokens * (sum(layer_bytes(a, run).values()) + working_bytes(a, run)) + merged.layer
    held, tail_share = held_by_layout(spec), _tail_share(spec)
    before = full if spec.accumulation > 1 else replace(full, gradients=0)  # of earlier micro-batches
    if spec.reference == "adapters off":
        yield _forward(spec, before, "forward of the reference", tokens)
    yield from _teacher_first(spec, before, tokens)
    yield replace(before, name="loss", activations=all_kept, loss=loss_bytes(spec), **held["loss"])
    yield replace(
        before, name="backward of the head", activations=all_kept, loss=loss_backward_bytes(spec), **held["head"]
    )
    updates = plan_updates_in_backward(spec) if spec.recipe.optimization.optim_in_backward else None
    # The gradient of the merged experts, and the part of it that is being added (an expert's, in the shape of all).
    at_layer = 2 * merged.largest + dequantized_bytes(spec, recomputes_layer=run.checkpoint_every is not None)
    at_layer += fp8_bytes(spec, tokens)
    if updates is None:
        last = replace(before, gradients=max(before.gradients, int(full.gradients * tail_share)), temporaries=at_layer)
        first, embedding = replace(full, temporaries=at_layer), full
    else:
        head, layer = (replace(before, **asdict(updates[part])) for part in ("head", "layer"))
        if head.gradients:
            yield replace(head, name="update of the head", activations=all_kept, **held["update of the head"])
        last = first = replace(layer, temporaries=layer.temporaries + at_layer)
        embedding = replace(before, **asdict(updates["embedding"]))
    yield replace(last, name="backward of the last layer", activations=all_kept + at_work, **held["last layer"])
    yield replace(first, name="backward of the first layer", activations=ends + one_layer, **held["first layer"])
    yield replace(embedding, name="backward of the embedding", activations=ends, **held["embedding"])
    if updates is None:
        yield replace(full, name="optimizer step", temporaries=update_temporaries(spec), **held["optimizer"])


def held_by_layout(spec: RunSpec) -> dict[str, dict[str, int]]:
    """Bytes that the layout itself holds at each point: `gathered` units, and gradients in `communication`."""
    if not spec.sharding.is_fsdp:
        return _held_whole(spec)
    u = split_into_units(spec.part, spec.part_tensors, spec.sharding, spec.fp8_gathered, spec.shards)
    size = spec.computation.itemsize
    buffers = 2 if spec.shards > 1 else 1  # the unit in use, and an all-gather buffer: its own, or the next unit's
    layers = u.layers.gathered(size) if u.stay_gathered else 0
    layer = 0 if u.stay_gathered else u.layer.gathered(size) * buffers - size * u.unshared * (buffers - 1)
    tail, embedding = u.tail.gathered(size), u.embedding.gathered(size)
    # The unit of a tied head stays gathered, and its gradient unreduced, until the backward of the embedding.
    waits = u.embedding.numel == 0
    tail_waits, tail_gradient_waits = (tail, size * u.tail.trained) if waits else (0, 0)
    reduced = (size + FP32) * (u.tail if waits else u.embedding).trained
    layer_gradients, previous = size * u.layer.trained + tail_gradient_waits, FP32 * u.layer.trained
    head_reduced = 0 if waits else FP32 * u.tail.trained
    other_tail = teachers_tail(spec)
    return {
        "loss": {"gathered": tail * buffers + layers + other_tail, "communication": 0},
        "head": {"gathered": tail + layers, "communication": 0},
        "update of the head": {"gathered": tail + layers, "communication": head_reduced},
        "last layer": {"gathered": tail_waits + layers + layer, "communication": head_reduced + layer_gradients},
        "first layer": {"gathered": tail_waits + layer, "communication": previous + layer_gradients},
        "embedding": {"gathered": tail_waits + embedding, "communication": reduced},
        "optimizer": {"gathered": 0, "communication": 0},
        "evaluation": {
            "gathered": max(layer, tail * buffers + other_tail) + tail_waits + layers,
            "communication": 0,
        },
    }


def _held_whole(spec: RunSpec) -> dict[str, dict[str, int]]:
    """DDP and single shard nothing; autocast caches a cast copy of every weight until the forward ends, or until its
    backward has used it; DDP has a bucket beside every gradient (torch.nn.parallel.distributed)."""
    run = spec.computation
    a, widest = spec.architecture, spec.architecture.widest_layer
    multiplied = sum(tensor.numel for tensor in (*a.linears(widest), *a.experts(widest)))
    linears = multiplied if run.autocast and run.lora is None else 0
    all_cast, one_cast = run.itemsize * linears * spec.architecture.layers, run.itemsize * linears
    behind = all_cast if run.checkpoint_every is None else one_cast
    buckets = FP32 * spec.trained_numel if spec.sharding.layout == "ddp" else 0
    gathered = {
        "loss": all_cast,
        "head": behind,
        "update of the head": behind,
        "last layer": behind,
        "first layer": one_cast,
        "evaluation": all_cast,
    }
    points = ("loss", "head", "update of the head", "last layer", "first layer", "embedding", "optimizer", "evaluation")
    return {name: {"gathered": gathered.get(name, 0), "communication": buckets} for name in points}


def loss_bytes(spec: RunSpec) -> int:
    """One chunk of logits, and the gradients that the loss computes in its forward: the head's in fp32, the hidden states'."""
    a, run = spec.computed, spec.computation
    cast_head = run.itemsize * a.vocabulary * a.hidden if run.autocast else 0
    head_gradient = 0 if spec.weighs_documents else _head_gradient(spec)  # else it is computed in the backward
    hidden = 2 * run.itemsize * a.hidden * spec.tokens  # a copy of the trained positions, and its gradient
    return head_gradient + cast_head + hidden + _chunk_bytes(spec, spec.tokens)


def _chunk_bytes(spec: RunSpec, tokens: int) -> int:
    if spec.teacher is not None:
        return meeting_bytes(spec, tokens)
    return loss_chunk_bytes(spec.part.vocabulary, tokens, spec.computation)


def _teacher_first(spec: RunSpec, before: Snapshot, tokens: int) -> Iterator[Snapshot]:
    forward = teacher_forward(spec, tokens)
    if forward is not None:
        yield replace(before, name="forward of the teacher", **forward)


def loss_backward_bytes(spec: RunSpec) -> int:
    """Both gradients, and a copy of each in its tensor's dtype; the hidden states' is fp32 in between."""
    a, run = spec.computed, spec.computation
    if spec.weighs_documents:
        return log_probability_backward_bytes(a, spec.tokens, run, _head_gradient(spec))
    cast_back = run.itemsize if run.itemsize < FP32 and not run.autocast else 0
    hidden = a.hidden * spec.tokens * (run.itemsize + FP32 + run.residual_itemsize)
    return _head_gradient(spec) + _head_gradient(spec) // FP32 * cast_back + hidden


def _head_gradient(spec: RunSpec) -> int:
    head = spec.architecture.embedding.name if spec.architecture.tied else HEAD
    is_trained = any(tensor.trainable for tensor in spec.tensors if tensor.name == head)
    return FP32 * spec.part.vocabulary * spec.part.hidden if is_trained else 0


def _tail_share(spec: RunSpec) -> float:
    """The share of the gradients that exists once the head's backward is done."""
    return sum(t.numel for t in spec.tensors if t.trainable and t.unit == "tail") / spec.trained_numel


def dequantized_bytes(spec: RunSpec, *, recomputes_layer: bool = False) -> int:
    """What is dequantized at once of a quantized base, in the compute dtype: the largest weight. `recomputes_layer`: those of a
    layer, which under activation checkpointing its recomputed forward keeps for its backward."""
    if spec.recipe.quantization.bits is None:
        return 0
    sizes = [linear.numel for linear in spec.architecture.linears()]
    return spec.computation.itemsize * (sum(sizes) if recomputes_layer else max(sizes))


def _evaluation(spec: RunSpec, at_rest: Snapshot) -> Snapshot:
    return _forward(spec, at_rest, "a held-out batch", _evaluated_tokens(spec))


def _forward(spec: RunSpec, at_rest: Snapshot, name: str, tokens: int) -> Snapshot:
    """A forward of `tokens` that saves nothing for a backward."""
    a, run = spec.computed, spec.computation
    rotary, merged = 2 * a.rotated_size * run.residual_itemsize, merged_expert_bytes(a, run)
    return replace(
        at_rest,
        name=name,
        activations=tokens * (evaluation_bytes(a, run) + rotary),
        loss=_chunk_bytes(spec, tokens),
        temporaries=dequantized_bytes(spec) + fp8_bytes(spec, tokens) + merged.layer + merged.largest,
        **held_by_layout(spec)["evaluation"],
    )


def _evaluated_tokens(spec: RunSpec) -> int:
    """Tokens in a held-out micro-batch on one rank."""
    return spec.share_tokens(spec.recipe.batch.per_device_eval_batch_size or spec.rows)


def _with_overhead(spec: RunSpec, point: Snapshot) -> Snapshot:
    """The snapshot with what the device needs beside the tensors."""
    if spec.device == "cpu":
        return point
    moving = point.allocated - point.parameters - point.teacher - point.optimizer
    context = CUDA_CONTEXT + (NCCL_BUFFERS if spec.ranks > 1 else 0)
    return replace(point, slack=int(SLACK * moving), context=context)
