"""The points of forwards that save nothing for a backward.

They are those of an evaluation, a teacher, a reference, a reward model, a rollout, and the
gradient-free forwards of embedding methods.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from finetune.config.facts import attends_by_mask
from finetune.constants import ANSWERED_TOKENS, ANSWERS_AT_ONCE, FP32, PROMPTS_AT_ONCE, ceil_div
from finetune.plan.activations import MASK_KINDS, TOKEN_ID, evaluation_bytes, mask_bytes
from finetune.plan.architecture import Architecture
from finetune.plan.loss_memory import (
    cast_head_bytes,
    chunk_bytes,
    compared_bytes,
    count_held_out,
    vector_bytes,
)
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import split_into_units
from finetune.plan.temporary_memory import (
    FP64,
    Snapshot,
    dora_bytes,
    expert_factor_bytes,
    fp8_bytes,
    most_dequantized_elements,
    plan_layout_memory,
    rounded_bytes,
)

# Bytes per logit while a token is drawn (`draw_tokens`): the logit, its log-probability and its
# probability in fp32; the probability and the cumulative sum in fp64.
DRAWING_BYTES = 3 * FP32 + 2 * FP64
INT16 = 2  # bytes of an expert's index in a recorded routing (`routing_replay`)


def rollout_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """Yields the points at which the model in training samples a step's completions, in order.

    Yields nothing if the method samples no completions, or a server samples them.
    """
    if spec.recipe.samples_itself:
        completions = ceil_div(spec.rows_per_step, spec.data_ranks)
        yield from _sampling_points(
            spec, at_rest, completions, of_a_prompt=spec.recipe.rollout.num_generations
        )


def held_out_rollout_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """Yields the points at which an evaluation samples a completion of each held-out prompt.

    Yields nothing if nothing is held out, or a server samples.
    """
    held_out = count_held_out(spec)
    if not spec.recipe.samples_itself or held_out == 0:
        return
    if held_out is None:  # as many as are sampled at once
        completions = spec.recipe.rollout.per_device_generation_batch_size
    else:
        completions = ceil_div(held_out, spec.data_ranks)
    yield from _sampling_points(spec, at_rest, completions, of_a_prompt=1)


def answer_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """Yields the point at which prompts are answered (`exact_match_samples`, `sample_prompts`).

    The lengths of prompts and answers are not known: with its answer of up to twice the expected
    one's length, a prompt has at most twice the tokens of an example.
    """
    run = spec.recipe.run
    prompts = max(run.exact_match_samples, len(run.sample_prompts))
    if prompts == 0:
        return
    groups = spec.ranks // (spec.stages * spec.tensor_ranks)
    own = ceil_div(prompts, groups)
    if spec.images is not None:  # prompts with images and those without are dealt separately
        own += 1
    rows = min(own, ANSWERS_AT_ONCE)
    longest = spec.recipe.data.max_length
    read = min(rows * longest, max(ANSWERED_TOKENS, longest))
    row_tokens = 2 * longest + 2
    cached = min(rows * row_tokens, max(ANSWERED_TOKENS, row_tokens))
    forward = plan_forward(spec, at_rest, "prompts answered", read, counts_scores=False)
    masks = read * longest * _pair_bytes(spec)
    cache = kv_cache_bytes(spec, cached)
    # a layer's cache is copied into a longer one for each token
    growing = 2 * cache // spec.computed.layers
    yield replace(
        forward,
        activations=forward.activations + masks + cache + growing,
        # the logits, their copy in fp32, and what choosing a token makes of them
        loss=4 * rows * spec.computed.vocabulary * FP32,
    )


def _sampling_points(
    spec: RunSpec, at_rest: Snapshot, completions: int, of_a_prompt: int
) -> Iterator[Snapshot]:
    """Yields the points at which the model in training samples completions, in order.

    All its parameters are gathered meanwhile.

    Args:
        spec: The run.
        at_rest: The memory between steps.
        completions: How many this rank samples, per_device_generation_batch_size at once.
        of_a_prompt: How many consecutive completions share a prompt.
    """
    architecture = spec.computed
    computation = spec.computation
    rollout = spec.recipe.rollout
    # A row is one completion with its prompt.
    rows = min(rollout.per_device_generation_batch_size, completions)
    if rollout.takes_turns:  # in each turn a row reads its conversation so far as a prompt
        prompts = rows
        prompt_tokens = spec.recipe.data.max_length
    else:
        prompts = _most_prompts(spec, rows, completions, of_a_prompt)
        prompt_tokens = spec.recipe.data.max_length - rollout.max_completion_length
    row_tokens = prompt_tokens + rollout.max_completion_length
    reads_all = _reads_prompts_together(architecture)
    prompts_at_once = prompts if reads_all else min(prompts, PROMPTS_AT_ONCE)
    is_packed = _packs_prompts(spec)
    forward = plan_forward(
        spec,
        at_rest,
        "completions sampled",
        prompts_at_once * prompt_tokens,
        counts_scores=is_packed,
    )
    if spec.sharding.is_fsdp:
        elements = sum(tensor.numel // tensor.expert_ranks for tensor in spec.part_tensors)
        point = replace(forward, gathered=computation.itemsize * elements)
    else:
        point = forward
    # 1. The prompts are read into caches of their own.
    if is_packed:
        masks = 0
    else:
        masks = prompts_at_once * prompt_tokens**2 * _pair_bytes(spec)
    prompt_caches = kv_cache_bytes(spec, prompts * prompt_tokens)
    yield replace(
        point,
        activations=prompt_caches + forward.activations + masks,
        loss=prompts_at_once * architecture.vocabulary * FP32,
    )
    # 2. The prompts' caches are moved into the cache of the rows, layer by layer. At the last layer
    # the rows' cache is complete.
    cache = kv_cache_bytes(spec, rows * row_tokens)
    if rollout.routing_replay and architecture.mixture is not None:
        experts_of_token = architecture.layers * architecture.mixture.chosen
        cache += rows * row_tokens * experts_of_token * INT16
    # the last layer's prompts: as they were read, and a copy for each row
    last_layer = kv_cache_bytes(spec, (prompts + rows) * prompt_tokens) // architecture.layers
    logits = rows * architecture.vocabulary
    yield replace(point, activations=cache + last_layer, loss=logits * FP32)
    # 3. A token of each row is drawn from the logits.
    yield replace(point, activations=cache, loss=logits * DRAWING_BYTES)
    # 4. The logits of each row's next token are computed.
    attention_scores = 2 * FP32 * rows * architecture.heads * row_tokens
    if not _has_kernel(spec):  # keys and values are repeated for each query head
        repeated_width = 2 * architecture.query_width
        attention_scores += rows * row_tokens * repeated_width * computation.itemsize
    of_token = evaluation_bytes(architecture, computation, counts_scores=False)
    activations = cache + rows * of_token + attention_scores
    yield replace(point, activations=activations, loss=logits * FP32)


def _reads_prompts_together(architecture: Architecture) -> bool:
    """Whether all prompts of completions sampled at once are read in one forward.

    That is so if a layer's cache is not one of every token's keys and values (`_read_prompts`).
    """
    return (
        architecture.facts.window is not None
        or architecture.family.recurrence is not None
        or not architecture.facts.layer_types <= {"full_attention"}
    )


def _packs_prompts(spec: RunSpec) -> bool:
    """Whether prompts are read in one packed row, without a mask of pairs of tokens."""
    facts = spec.computed.facts
    return (
        spec.recipe.model.attn_implementation == "auto"
        and spec.images is None
        and not attends_by_mask(facts.model_type, facts.layer_types)
        and not _reads_prompts_together(spec.computed)
    )


def _pair_bytes(spec: RunSpec) -> int:
    """Bytes of a pair of tokens of a prompt that is read under a mask.

    They are its entries in the masks as bools, in the mask as numbers added to the scores, and, if
    no kernel computes with the scores, in these.
    """
    itemsize = spec.computation.itemsize
    masks = 1 if spec.computed.facts.window is None else MASK_KINDS
    if _has_kernel(spec):
        return masks + itemsize
    # the scores before and after they are capped or masked, and their softmax
    return masks + itemsize + spec.computed.heads * (2 * itemsize + FP32)


def _has_kernel(spec: RunSpec) -> bool:
    """Whether a kernel computes attention under a mask; none takes caps of scores or sinks."""
    family = spec.computed.family
    is_eager = spec.recipe.model.attn_implementation == "eager"
    return not (family.caps_scores or family.sinks or is_eager)


def _most_prompts(spec: RunSpec, rows: int, completions: int, of_a_prompt: int) -> int:
    """Counts the most prompts to which `rows` completions sampled at once may belong.

    They may begin within a prompt's completions: a rank's share of all completions begins at a
    multiple of its size, and in the share every `rows` completions are sampled at once.

    Args:
        spec: The run.
        rows: How many completions are sampled at once.
        completions: How many this rank samples.
        of_a_prompt: How many consecutive completions share a prompt.
    """
    # A share begins at a multiple of `share_step`, and rows a multiple of `rows_step` after that.
    if spec.data_ranks == 1:
        share_step = 0  # the only share begins at the first completion
    elif spec.rows_per_step % spec.data_ranks or spec.recipe.rollout.max_num_gen_batches > 1:
        share_step = 1  # shares have any size, so they begin anywhere
    else:
        share_step = completions
    rows_step = rows if completions > rows else 0  # 0: the whole share is sampled at once
    # So rows begin at a multiple of `step` within the completions of a prompt.
    step = gcd(of_a_prompt, share_step, rows_step)
    latest_begin = of_a_prompt - step
    return ceil_div(latest_begin + rows, of_a_prompt)


def scoring_points(spec: RunSpec, at_rest: Snapshot) -> Iterator[Snapshot]:
    """Yields a point for each reward model: its forward over a micro-batch of full rows."""
    # every rank holds and computes whole reward models
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
    """Bytes of a cache with the keys and values of `tokens` tokens in all attending layers.

    Layers with a sliding window are counted as if they kept every token.
    """
    architecture = spec.computed
    return int(  # the mean size of a head's key and value may be a half
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
    """Yields the two points at which an embedding method collects vectors and compares them.

    First, gradient-free forwards compute the vectors of all queries and their documents, and the
    point is the last forward. Then the contrastive loss compares all vectors. Yields nothing for
    any other method.

    Args:
        spec: The run.
        before: The memory without a forward and without vectors.
        forward: The memory of one of the forwards, without vectors.
        queries: The number of queries whose vectors are compared.
    """
    if not spec.recipe.method_facts.embeds:
        return
    vectors = vector_bytes(spec, queries)
    yield replace(forward, activations=forward.activations + vectors)
    yield replace(before, name="vectors compared", loss=compared_bytes(spec, queries))


def teacher_points(spec: RunSpec, before: Snapshot, tokens: int) -> Iterator[Snapshot]:
    """Yields the teacher's forward over `tokens` tokens; nothing if the run has no teacher.

    `before`: the memory without that forward.
    """
    if spec.teacher is None:
        return
    architecture = spec.teacher.architecture
    computation = replace(
        spec.computation,
        autocast=False,
        lora=None,
        checkpoint_every=None,
        document_length=spec.count_attended(tokens),
    )
    rotary = 2 * architecture.rotated_size * computation.itemsize
    activations = tokens * (evaluation_bytes(architecture, computation) + rotary)
    dequantized = 0
    if spec.teacher.quantization.bits is not None:
        dequantized = computation.itemsize * most_dequantized_elements(architecture)
    layer, tail = _teacher_units(spec)
    yield replace(
        before,
        name="forward of the teacher",
        activations=activations + mask_bytes(architecture, computation, tokens),
        gathered=max(layer, tail),
        temporaries=dequantized,
    )


def teacher_tail_bytes(spec: RunSpec) -> int:
    """Bytes of the teacher's final norm and head while FSDP gathers them for the divergence.

    0 without a teacher or without FSDP.
    """
    _, tail = _teacher_units(spec)
    return tail


def _teacher_units(spec: RunSpec) -> tuple[int, int]:
    """Bytes of the teacher's weights that FSDP has gathered: (during a layer, during the tail).

    A tied tail includes the embedding, so it stays gathered during every layer. Both are 0 without
    a teacher or without FSDP.
    """
    if spec.teacher is None or not spec.sharding.is_fsdp:
        return 0, 0
    architecture = spec.teacher.architecture
    units = split_into_units(architecture, spec.teacher_tensors, spec.sharding)
    itemsize = spec.computation.itemsize
    layer = itemsize * units.layer.numel
    tail = itemsize * units.tail.numel
    has_buffers = spec.shards > 1  # on one rank FSDP only casts the unit
    # copies: the unit, the buffer of its all-gather, and for a layer that of the next layer
    during_layer = layer * (3 if has_buffers else 1)
    if architecture.tied:
        during_layer += tail
    return during_layer, tail * (2 if has_buffers else 1)


def dequantized_bytes(spec: RunSpec, *, recomputes_layer: bool = False) -> int:
    """Bytes of dequantized weights, in the compute dtype, that exist at the same time.

    Weights are dequantized one at a time, the experts of a layer together; the largest of these is
    counted. 0 if the base is not quantized.

    `recomputes_layer`: counts all weights of a layer instead. Activation checkpointing runs a
    layer's forward again and keeps its dequantized weights for the backward that follows.
    """
    if spec.recipe.quantization.bits is None:
        return 0
    architecture = spec.architecture
    expert_ranks = spec.sharding.expert_parallel_size
    if not recomputes_layer:
        return spec.computation.itemsize * most_dequantized_elements(architecture, expert_ranks)
    by_layer = []
    for layer in architecture.largest_layers:
        experts = {weight.name for weight in architecture.experts(layer)}
        elements = 0
        for weight in architecture.quantizable(layer):
            if weight.name in experts:
                elements += weight.numel // expert_ranks
            else:
                elements += weight.numel
        by_layer.append(elements)
    return spec.computation.itemsize * max(by_layer)


def plan_forward(
    spec: RunSpec, before: Snapshot, name: str, tokens: int, *, counts_scores: bool = True
) -> Snapshot:
    """Plans the point `name`: a forward of `tokens` tokens that saves nothing for a backward.

    Args:
        spec: The run.
        before: The memory without that forward.
        name: The point's name.
        tokens: How many this rank reads at once.
        counts_scores: See `evaluation_bytes`.
    """
    architecture = spec.computed
    computation = replace(spec.computation, document_length=spec.count_attended(tokens))
    rotary = TOKEN_ID + 2 * architecture.rotated_size * computation.residual_itemsize
    factors = expert_factor_bytes(architecture, computation).layer
    of_token = evaluation_bytes(architecture, computation, counts_scores=counts_scores)
    activations = tokens * (of_token + rotary)
    activations += mask_bytes(architecture, computation, tokens)
    # The layers' tensors are freed before the head: what it takes more than a layer is its loss.
    states = 4 * architecture.hidden * computation.residual_itemsize
    at_head = tokens * (states + rotary) + cast_head_bytes(spec) + chunk_bytes(spec, tokens)
    return replace(
        before,
        name=name,
        activations=activations,
        loss=max(0, at_head - activations),
        temporaries=dequantized_bytes(spec)
        + fp8_bytes(spec, tokens)
        + rounded_bytes(spec, tokens)
        + dora_bytes(spec)
        + factors,
        gathered=_gathered_in_forward(spec),
    )


def _gathered_in_forward(spec: RunSpec) -> int:
    """The most bytes of weights that are gathered at once in a forward, during a layer or the tail.

    A unit needs the buffer of its all-gather too, and a layer the buffer of the next layer's.
    """
    layout = plan_layout_memory(spec)
    if layout.all_layers_until_loss:
        during_layer = 0  # `all_layers_until_loss` includes the layer
    else:
        during_layer = layout.layer.gathered + 2 * layout.layer.arriving
    if layout.tail_has_embedding:  # gathered for the embedding, the tail is there in every layer
        during_layer += layout.tail.gathered
    during_tail = layout.tail.gathered + layout.tail.arriving + teacher_tail_bytes(spec)
    staying = layout.all_layers_until_loss + layout.staying_embedding
    return max(during_layer, during_tail) + staying
