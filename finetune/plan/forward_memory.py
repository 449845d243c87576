"""The points of forwards that save nothing for a backward: evaluation, a teacher, a rollout."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.constants import FP32, PROMPTS_AT_ONCE
from finetune.plan.activations import evaluation_bytes, mask_bytes
from finetune.plan.loss_memory import chunk_bytes, compared_bytes, vector_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.temporary_memory import (
    Snapshot,
    dequantized_at_once,
    expert_factor_bytes,
    fp8_bytes,
    plan_layout_memory,
    rounded_bytes,
    teacher_forward,
    teachers_tail,
)

# of a logit that is sampled from: it, log-probability and probability in fp32, two sums in fp64
SAMPLED_BYTES = 28
INT16 = 2  # bytes of an expert's index


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
    forward = plan_forward(spec, at_rest, "completions sampled", some * tokens)
    # Which tokens see each other, and as numbers that are added; none where prompts are packed.
    if spec.recipe.model.attn_implementation == "auto":
        masks = 0
    else:
        masks = some * tokens**2 * (1 + run.itemsize)
    scores = 2 * FP32 * rows * architecture.heads * length
    cache = kv_cache_bytes(spec, rows * length)
    if keys.routing_replay and architecture.mixture is not None:
        of_token = architecture.layers * architecture.mixture.chosen
        cache += rows * length * of_token * INT16
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


def score_completions(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
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


def compare_vectors(
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


def teacher_first(spec: RunSpec, before: Snapshot, tokens: int) -> Iterator[Snapshot]:
    forward = teacher_forward(spec, tokens)
    if forward is not None:
        yield replace(before, name="forward of the teacher", **forward)


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


def plan_forward(spec: RunSpec, at_rest: Snapshot, name: str, tokens: int) -> Snapshot:
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
        loss=chunk_bytes(spec, tokens),
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
