"""The memory of one rank, phase by phase: the moments at which it could be highest, and what each holds.

The moments of a training step follow torch's own order of events. FSDP2 (torch/distributed/fsdp/_fully_shard): in the
forward a unit's all-gather buffer lives until the next unit has been copied out; in the backward the unit before is
gathered ahead; a unit's gradients are copied into an fp32 buffer, reduced and scattered, and that buffer is held until
the next unit's. Units are the embedding, every decoder layer, and the tail (final norm and head), which stays gathered
from forward to backward (Accelerate's fsdp2_prepare_model).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from finetune.plan.activations import (
    evaluation_bytes,
    kept_bytes,
    layer_bytes,
    loss_chunk_bytes,
    recomputed_bytes,
    working_bytes,
)
from finetune.plan.fsdp_units import units
from finetune.plan.run_spec import Job
from finetune.plan.state import FP32, State, state_of_rank

SLACK = 0.06  # of what comes and goes in a step: blocks that the caching allocator holds but cannot use
CUDA_CONTEXT = 600 << 20  # bytes outside the allocator: the context, kernels, cuBLAS workspaces
NCCL_BUFFERS = 400 << 20  # bytes outside the allocator, once there is more than one rank


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rank holds at one moment, in bytes."""

    name: str
    parameters: int = 0  # trained and frozen, as sharded
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # units gathered whole for computing, or weights cast by autocast
    activations: int = 0
    loss: int = 0  # the chunk of logits and the gradients that the loss makes with it
    communication: int = 0  # gradients of whole units on their way to the shards
    temporaries: int = 0  # of the optimizer
    slack: int = 0
    context: int = 0

    @property
    def allocated(self) -> int:
        """What the allocator counts as allocated (torch.cuda.max_memory_allocated)."""
        return (
            self.parameters
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
        """What the device must have."""
        return self.allocated + self.slack + self.context


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run and the moment in it that needs most."""

    name: str
    peak: Moment


def phases(job: Job) -> tuple[Phase, ...]:
    """Every phase of the run on the fullest rank, each by its highest moment."""
    state = state_of_rank(job.tensors, job.sharding, job.pieces, job.recipe.optimization)
    on_device = State(0, 0, 0, 0) if job.sharding.cpu_offload else state
    weights = Moment("weights in place", parameters=on_device.trained + on_device.frozen)
    at_rest = replace(weights, name="between steps", optimizer=on_device.optimizer)
    step = list(_step(job, replace(at_rest, gradients=on_device.gradients)))
    before = [replace(moment, optimizer=0) if moment.name != "optimizer step" else moment for moment in step]
    by_name = {
        "load": [weights],
        "first step": before,
        "steady step": step,
        "evaluation": [_evaluation(job, at_rest)],
        "save": [at_rest],
        "resume": [replace(at_rest, name="optimizer state read", temporaries=_largest_shard(job))],
        "export": [at_rest],
    }
    return tuple(
        Phase(name, max((_with_overhead(job, m) for m in moments), key=lambda m: m.total))
        for name, moments in by_name.items()
    )


def peak(job: Job) -> Moment:
    """The highest moment of the whole run."""
    return max((phase.peak for phase in phases(job)), key=lambda moment: moment.total)


def _step(job: Job, full: Moment) -> Iterator[Moment]:
    """The moments of an optimizer step that could be its highest. `full` holds all state, gradients included."""
    run, tokens, a = job.computation, job.tokens, job.architecture
    kept = kept_bytes(a, run)
    all_kept, ends = tokens * sum(kept.values()), tokens * (kept["ends"] + a.hidden * run.residual_itemsize)
    at_work = tokens * (recomputed_bytes(a, run) + working_bytes(a, run))
    one_layer = tokens * (sum(layer_bytes(a, run).values()) + working_bytes(a, run))
    held, tail_share = held_by_layout(job), _tail_share(job)
    before = full if job.accumulation > 1 else replace(full, gradients=0)  # of earlier micro-batches
    yield replace(before, name="loss", activations=all_kept, loss=loss_bytes(job), **held["loss"])
    yield replace(before, name="backward of the head", activations=all_kept, loss=_loss_backward(job), **held["head"])
    last = replace(before, gradients=max(before.gradients, int(full.gradients * tail_share)))
    yield replace(last, name="backward of the last layer", activations=all_kept + at_work, **held["last layer"])
    yield replace(full, name="backward of the first layer", activations=ends + one_layer, **held["first layer"])
    yield replace(full, name="backward of the embedding", activations=ends, **held["embedding"])
    yield replace(full, name="optimizer step", temporaries=_optimizer_temporaries(job, full), **held["optimizer"])


def held_by_layout(job: Job) -> dict[str, dict[str, int]]:
    """Bytes that the layout itself holds at each moment: `gathered` units, and gradients in `communication`."""
    if not job.sharding.is_fsdp:
        return _held_whole(job)
    u, size = units(job), job.computation.itemsize
    ahead = 2 if job.pieces > 1 else 1  # the unit at work, and the all-gather buffer: its own, or the next one's
    layers = size * u.layers.numel if u.stay_gathered else 0
    layer = 0 if u.stay_gathered else size * u.layer.numel * ahead
    tail, embedding = size * u.tail.numel, size * u.embedding.numel
    # The unit of a tied head ends with the embedding: gathered, and its gradient unreduced, until then.
    waits = u.embedding.numel == 0
    tail_waits, tail_gradient_waits = (tail, size * u.tail.trained) if waits else (0, 0)
    reduced = (size + FP32) * (u.tail if waits else u.embedding).trained
    layer_gradients, previous = size * u.layer.trained + tail_gradient_waits, FP32 * u.layer.trained
    head_reduced = 0 if waits else FP32 * u.tail.trained
    return {
        "loss": {"gathered": tail * ahead + layers, "communication": 0},
        "head": {"gathered": tail + layers, "communication": 0},
        "last layer": {"gathered": tail_waits + layers + layer, "communication": head_reduced + layer_gradients},
        "first layer": {"gathered": tail_waits + layer, "communication": previous + layer_gradients},
        "embedding": {"gathered": tail_waits + embedding, "communication": reduced},
        "optimizer": {"gathered": 0, "communication": 0},
        "evaluation": {"gathered": max(layer, tail * ahead) + tail_waits + layers, "communication": 0},
    }


def _held_whole(job: Job) -> dict[str, dict[str, int]]:
    """DDP and single keep everything whole; autocast keeps a cast copy of every product's weight until the forward
    ends, or until its backward has used it; DDP has a bucket beside every gradient (torch.nn.parallel.distributed)."""
    run = job.computation
    linears = sum(tensor.numel for tensor in job.architecture.linears()) if run.autocast and run.lora is None else 0
    all_cast, one_cast = run.itemsize * linears * job.architecture.layers, run.itemsize * linears
    behind = all_cast if run.checkpoint_every is None else one_cast
    buckets = FP32 * sum(t.numel for t in job.tensors if t.trainable) if job.sharding.layout == "ddp" else 0
    gathered = {"loss": all_cast, "head": behind, "last layer": behind, "first layer": one_cast, "evaluation": all_cast}
    moments = ("loss", "head", "last layer", "first layer", "embedding", "optimizer", "evaluation")
    return {name: {"gathered": gathered.get(name, 0), "communication": buckets} for name in moments}


def loss_bytes(job: Job) -> int:
    """The loss makes its gradients with it: of the head's weight in fp32, of the hidden states, beside one chunk."""
    a, run = job.architecture, job.computation
    cast_head = run.itemsize * a.vocabulary * a.hidden if run.autocast else 0
    hidden = 2 * run.itemsize * a.hidden * job.tokens  # the trained positions' own copy, and its gradient
    return _head_gradient(job) + cast_head + hidden + loss_chunk_bytes(a.vocabulary, job.tokens, run)


def _loss_backward(job: Job) -> int:
    """Both gradients once more in the type of what they belong to, the hidden states' in fp32 on the way."""
    a, run = job.architecture, job.computation
    cast_back = run.itemsize if run.itemsize < FP32 and not run.autocast else 0
    hidden = a.hidden * job.tokens * (run.itemsize + FP32 + run.residual_itemsize)
    return _head_gradient(job) + _head_gradient(job) // FP32 * cast_back + hidden


def _head_gradient(job: Job) -> int:
    return 0 if job.computation.lora else FP32 * job.architecture.vocabulary * job.architecture.hidden


def _tail_share(job: Job) -> float:
    """The share of the gradients that exists once the head's backward is done."""
    trained = [tensor for tensor in job.tensors if tensor.trainable]
    return sum(t.numel for t in trained if t.unit == "tail") / sum(t.numel for t in trained)


def _optimizer_temporaries(job: Job, full: Moment) -> int:
    """The foreach AdamW makes a list of new tensors (the root of the second moment); the fused one makes none."""
    return full.gradients if job.recipe.optimization.optim == "adamw_torch" else 0


def _largest_shard(job: Job) -> int:
    return max(tensor.numel * FP32 for tensor in job.tensors if tensor.trainable) // job.pieces


def _evaluation(job: Job, at_rest: Moment) -> Moment:
    a, run = job.architecture, job.computation
    tokens = (job.recipe.batch.per_device_eval_batch_size or job.rows) * job.recipe.data.max_length
    rotary = 2 * a.head_size * run.residual_itemsize
    return replace(
        at_rest,
        name="a held-out batch",
        activations=tokens * (evaluation_bytes(a, run) + rotary),
        loss=loss_chunk_bytes(a.vocabulary, tokens, run),
        **held_by_layout(job)["evaluation"],
    )


def _with_overhead(job: Job, moment: Moment) -> Moment:
    """The moment with what the device takes beside the tensors."""
    if job.device == "cpu":
        return moment
    moving = moment.allocated - moment.parameters - moment.optimizer
    context = CUDA_CONTEXT + (NCCL_BUFFERS if job.ranks > 1 else 0)
    return replace(moment, slack=int(SLACK * moving), context=context)
