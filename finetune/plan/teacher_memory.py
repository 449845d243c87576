"""What a teacher takes beside its weights: its forward, which comes first, and its head where its logits meet the student's."""

from collections.abc import Mapping
from dataclasses import replace

from finetune.plan.activations import evaluation_bytes
from finetune.plan.attention_memory import mask_bytes
from finetune.plan.fsdp_units import split_into_units
from finetune.plan.loss_memory import divergence_chunk_bytes
from finetune.plan.run_spec import RunSpec


def teacher_forward(spec: RunSpec, tokens: int) -> Mapping[str, int] | None:
    """The bytes of its forward, by the names of a snapshot's parts; None without a teacher. Nothing of it is kept but what
    enters its head."""
    if spec.teacher is None:
        return None
    a, run = spec.teacher.architecture, replace(spec.computation, autocast=False, lora=None, checkpoint_every=None)
    inside = evaluation_bytes(a, run) + 2 * a.rotated_size * run.itemsize
    linears = [linear.numel for linear in a.linears()]
    dequantized = run.itemsize * max(linears) if spec.teacher.quantization.bits is not None else 0
    return {
        "activations": tokens * inside + mask_bytes(a, run, tokens),
        "gathered": _gathered(spec)[0],
        "temporaries": dequantized,
    }


def teachers_tail(spec: RunSpec) -> int:
    """Bytes of its tail as FSDP gathers it where the logits meet."""
    return _gathered(spec)[1]


def meeting_bytes(spec: RunSpec, tokens: int) -> int:
    """What enters its head, and the chunk in which the logits meet."""
    assert spec.teacher is not None
    teacher, run, method = spec.teacher.architecture, spec.computation, spec.recipe.method
    widest = max(spec.architecture.vocabulary, teacher.vocabulary)
    chunk = divergence_chunk_bytes(widest, tokens, run, method.distill_beta, method.temperature)
    return run.itemsize * teacher.hidden * tokens + chunk


def _gathered(spec: RunSpec) -> tuple[int, int]:
    """What FSDP gathers of it: in its forward, and of its tail. A tied tail holds the embedding too, and stays gathered through
    the forward."""
    if spec.teacher is None or not spec.sharding.is_fsdp:
        return 0, 0
    a, size = spec.teacher.architecture, spec.computation.itemsize
    u, buffers = split_into_units(a, spec.teacher_tensors, spec.sharding), 2 if spec.shards > 1 else 1
    tail = size * u.tail.numel
    return max(size * u.layer.numel * buffers + (tail if a.tied else 0), tail * buffers), tail * buffers
