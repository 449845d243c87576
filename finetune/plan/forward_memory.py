"""The points of forwards that save nothing for a backward: evaluation, a teacher, a rollout."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.constants import FP32, PROMPTS_AT_ONCE, ceil_div
from finetune.plan.activations import evaluation_bytes, mask_bytes
from finetune.plan.loss_memory import chunk_bytes, compared_bytes, vector_bytes
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import split_into_units
from finetune.plan.temporary_memory import (
    FP64,
    Snapshot,
    dequantized_at_once,
    expert_factor_bytes,
    fp8_bytes,
    plan_layout_memory,
    rounded_bytes,
)

# per logit while a token is drawn (`draw_tokens`): logit, log-probability and probability in fp32;
# in fp64 the probability and the cumulative sum
DRAWING_BYTES = 3 * FP32 + 2 * FP64
INT16 = 2  # bytes of an expert's index


def rollout_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """The points of a rollout, with all parameters gathered; none where nothing is sampled, or a
    server samples.
    """
    if not spec.recipe.samples_itself:
        return
    architecture = spec.computed
    computation = spec.computation
    rollout = spec.recipe.rollout
    rows = min(
        rollout.per_device_generation_batch_size, ceil_div(spec.rows_per_step, spec.data_ranks)
    )
    if rollout.takes_turns:  # each turn of a row reads the conversation so far as its own prompt
        prompts = rows
        prompt_tokens = spec.recipe.data.max_length
    else:
        prompts = ceil_div(rows, rollout.num_generations)
        prompt_tokens = spec.recipe.data.max_length - rollout.max_completion_length
    row_tokens = prompt_tokens + rollout.max_completion_length
    prompts_at_once = min(prompts, PROMPTS_AT_ONCE)
    forward = plan_forward(spec, at_rest, "completions sampled", prompts_at_once * prompt_tokens)
    if spec.sharding.is_fsdp:
        numbers = sum(tensor.numel // tensor.divided for tensor in spec.part_tensors)
        point = replace(forward, gathered=computation.itemsize * numbers)
    else:
        point = forward
    # prompts are read, into caches of their own
    if spec.recipe.model.attn_implementation == "auto":
        masks = 0  # prompts are packed
    else:  # which tokens see each other, as bools, and as numbers that are added
        masks = prompts_at_once * prompt_tokens**2 * (1 + computation.itemsize)
    prompt_caches = kv_cache_bytes(spec, prompts * prompt_tokens)
    yield replace(
        point,
        activations=prompt_caches + forward.activations + masks,
        loss=prompts_at_once * architecture.vocabulary * FP32,
    )
    # Prompts move into the rows' cache, layer after layer. At the last one the cache is complete.
    cache = kv_cache_bytes(spec, rows * row_tokens)
    if rollout.routing_replay and architecture.mixture is not None:
        experts_of_token = architecture.layers * architecture.mixture.chosen
        cache += rows * row_tokens * experts_of_token * INT16
    # that layer's prompts, as they were read and once for each row
    last_layer = kv_cache_bytes(spec, (prompts + rows) * prompt_tokens) // architecture.layers
    logits = rows * architecture.vocabulary
    yield replace(point, activations=cache + last_layer, loss=logits * FP32)
    # a token of each row is drawn
    yield replace(point, activations=cache, loss=logits * DRAWING_BYTES)
    # the next one is computed
    attention_scores = 2 * FP32 * rows * architecture.heads * row_tokens
    computed = cache + rows * evaluation_bytes(architecture, computation) + attention_scores
    yield replace(point, activations=computed, loss=logits * FP32)


def scoring_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """The points at which each reward model scores as many completions as fill the rows of a
    micro-batch.
    """
    computation = replace(
        spec.computation, sequence_ranks=1, expert_ranks=1, divides_vocabulary=False
    )
    tokens = spec.rows * spec.recipe.data.max_length
    for architecture in spec.reward_models:
        activations = tokens * evaluation_bytes(architecture, computation) + mask_bytes(
            architecture, computation, tokens
        )
        yield replace(at_rest, name="completions scored", activations=activations)


def kv_cache_bytes(spec: RunSpec, tokens: int) -> int:
    """The keys and values, which may differ in size, of `tokens` tokens in all layers, as if each
    attended to all of its document.
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


def vector_points(
    spec: RunSpec, before: Snapshot, forward: Snapshot, queries: int
) -> Iterator[Snapshot]:
    """The forwards of so many `queries` with their documents without gradients, and the loss of
    their vectors; none unless the method embeds.

    Args:
        spec: The run.
        before: What is there beside them.
        forward: One of the forwards, which leaves its vectors.
        queries: Their number.
    """
    if not spec.recipe.method_facts.embeds:
        return
    vectors = vector_bytes(spec, queries)
    yield replace(forward, activations=forward.activations + vectors)
    yield replace(before, name="vectors compared", loss=compared_bytes(spec, queries))


def teacher_points(spec: RunSpec, before: Snapshot, tokens: int) -> Iterator[Snapshot]:
    """The forward of the teacher, which saves nothing for a backward; none without a teacher."""
    if spec.teacher is None:
        return
    architecture = spec.teacher.architecture
    computation = replace(spec.computation, autocast=False, lora=None, checkpoint_every=None)
    rotary = 2 * architecture.rotated_size * computation.itemsize
    activations = tokens * (evaluation_bytes(architecture, computation) + rotary)
    dequantized = 0
    if spec.teacher.quantization.bits is not None:
        dequantized = computation.itemsize * dequantized_at_once(architecture)
    layer, tail = _teacher_units(spec)
    yield replace(
        before,
        name="forward of the teacher",
        activations=activations + mask_bytes(architecture, computation, tokens),
        gathered=max(layer, tail),
        temporaries=dequantized,
    )


def teacher_tail_bytes(spec: RunSpec) -> int:
    """Bytes of the teacher's tail as FSDP gathers it for the divergence; 0 without a teacher."""
    return _teacher_units(spec)[1]


def _teacher_units(spec: RunSpec) -> tuple[int, int]:
    """Bytes of what FSDP gathers of the teacher: (in a layer, in the tail).

    A tied tail has the embedding, and stays gathered in every layer.
    """
    if spec.teacher is None or not spec.sharding.is_fsdp:
        return 0, 0
    architecture = spec.teacher.architecture
    units = split_into_units(architecture, spec.teacher_tensors, spec.sharding)
    itemsize = spec.computation.itemsize
    has_buffers = spec.shards > 1  # on one rank FSDP casts the unit alone
    # the unit, and the buffers of its all-gather and, for a layer, of the next one's
    layer = itemsize * units.layer.numel * (3 if has_buffers else 1)
    tail = itemsize * units.tail.numel
    if architecture.tied:
        layer += tail
    return layer, tail * (2 if has_buffers else 1)


def dequantized_bytes(spec: RunSpec, *, recomputes_layer: bool = False) -> int:
    """Bytes of the weights of a quantized base that are dequantized at once, in the compute dtype:
    the largest, or all experts of a layer.

    `recomputes_layer`: under activation checkpointing, whose recomputed forward keeps all weights
    of a layer for its backward.
    """
    if spec.recipe.quantization.bits is None:
        return 0
    architecture = spec.architecture
    expert_ranks = spec.sharding.expert_parallel_size
    if not recomputes_layer:
        return spec.computation.itemsize * dequantized_at_once(architecture, expert_ranks)
    experts = {weight.name for weight in architecture.experts(architecture.widest_layer)}
    elements = 0
    for weight in architecture.quantizable(architecture.widest_layer):
        if weight.name in experts:
            elements += weight.numel // expert_ranks
        else:
            elements += weight.numel
    return spec.computation.itemsize * elements


def plan_forward(spec: RunSpec, before: Snapshot, name: str, tokens: int) -> Snapshot:
    """A forward of `tokens` that saves nothing for a backward, beside what was there `before`."""
    architecture = spec.computed
    computation = spec.computation
    rotary = 2 * architecture.rotated_size * computation.residual_itemsize
    factors = expert_factor_bytes(architecture, computation).layer
    return replace(
        before,
        name=name,
        activations=tokens * (evaluation_bytes(architecture, computation) + rotary)
        + mask_bytes(architecture, computation, tokens),
        loss=chunk_bytes(spec, tokens),
        temporaries=dequantized_bytes(spec)
        + fp8_bytes(spec, tokens)
        + rounded_bytes(spec, tokens)
        + factors,
        gathered=_gathered_in_forward(spec),
        communication=plan_layout_memory(spec).buckets,
    )


def _gathered_in_forward(spec: RunSpec) -> int:
    """A layer with the buffers of its all-gather and of the next one's, or the tail with its own;
    where layers stay until the loss, all of them. And an embedding that stays.
    """
    layout = plan_layout_memory(spec)
    if layout.all_layers_until_loss:
        layer = 0  # among them
    else:
        layer = layout.layer.gathered + 2 * layout.layer.arriving
    if layout.tail_has_embedding:  # gathered for the embedding, it is there in every layer
        layer += layout.tail.gathered
    tail = layout.tail.gathered + layout.tail.arriving + teacher_tail_bytes(spec)
    return max(layer, tail) + layout.all_layers_until_loss + layout.staying_embedding
