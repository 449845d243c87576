"""The memory of a loss and of its backward: a chunk of logits, gradients, and vectors compared.

In training the head never computes all logits at once. It computes them in chunks of tokens, and
only one chunk of logits exists at a time.
"""

from finetune.constants import (
    CONTRASTED_QUERIES,
    FP32,
    ceil_div,
    divergence_chunk_tokens,
    loss_chunk_tokens,
)
from finetune.plan.activations import Computation
from finetune.plan.architecture import Architecture
from finetune.plan.run_spec import RunSpec
from finetune.plan.temporary_memory import FP64

# Copies of all vectors while `contrast` compares them: as given, detached, normalized, and two
# gradients.
VECTOR_COPIES = 5


def vector_bytes(spec: RunSpec, queries: int) -> int:
    """Bytes of the fp64 vectors of `queries` queries and all their documents. Their gradients take
    as much.

    0 unless the method embeds.
    """
    if not spec.recipe.method_facts.embeds:
        return 0
    return FP64 * queries * spec.recipe.group_size * spec.computed.hidden


def count_held_out(spec: RunSpec) -> int | None:
    """The number of held-out examples, such as prompts or queries; 0 if no data is held out.

    None if the recipe does not say the number: where it holds out a share of the data, or a whole
    dataset.
    """
    data = spec.recipe.data
    if data.eval_datasets:
        limits = [source.max_samples for source in data.eval_datasets]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if len(known) == len(limits) else None
    size = data.eval_split_size or 0
    if 0 < size < 1:  # a share of the data
        return None
    return int(size)


def compared_bytes(spec: RunSpec, queries: int) -> int:
    """Bytes while the vectors of `queries` queries and all their documents are compared: the
    vectors' copies and the cosines.
    """
    # a block of queries is compared at once, each with the documents of all queries
    block = min(queries, CONTRASTED_QUERIES)
    documents = queries * (spec.recipe.group_size - 1)
    # the cosines, their log-softmax, and the gradient
    cosines = 3 * FP64 * block * documents
    return VECTOR_COPIES * vector_bytes(spec, queries) + cosines


def loss_bytes(spec: RunSpec) -> int:
    """Bytes that the head and its loss allocate in the forward.

    They are a chunk of logits, and the gradients of the head, or of its adapter's B, and of the
    hidden states, which are computed in the forward. Every token counts as trained.
    """
    architecture = spec.computed
    computation = spec.computation
    if spec.recipe.method_facts.embeds:
        return _pooled_bytes(spec, spec.tokens)
    # A loss of log-probabilities or scores computes the head's gradient in the backward.
    if spec.weighs_documents:
        head_gradient = 0
    else:
        head_gradient = _head_gradient(spec) + _adapter_gradient(spec)
    positions = spec.scored_outputs * spec.tokens
    # a copy of the hidden states at the trained positions, and its gradient
    hidden = 2 * computation.itemsize * architecture.hidden * positions
    # the hidden states of early exits, before they are joined with the last layer's
    exits = computation.residual_itemsize * architecture.hidden * (positions - spec.tokens)
    chunk = chunk_bytes(spec, positions)
    if head_gradient:
        chunk = max(chunk, _head_product_bytes(spec, positions))
    return (
        head_gradient
        + cast_head_bytes(spec)
        + hidden
        + exits
        + critic_bytes(spec)
        + head_adapter_bytes(spec)
        + chunk
    )


def cast_head_bytes(spec: RunSpec) -> int:
    """Bytes of autocast's copy of the head in the compute dtype, in any forward.

    0 without autocast, or if the method embeds and so has no head.
    """
    if not spec.computation.autocast or spec.recipe.method_facts.embeds:
        return 0
    return spec.computation.itemsize * spec.computed.head_rows * spec.computed.hidden


def _cast_gradient_bytes(head_gradient: int, computation: Computation) -> int:
    """Bytes of the copy of the head's fp32 gradient in the head's own dtype; 0 if that is fp32 too.

    `head_gradient`: bytes of the fp32 gradient.
    """
    if computation.itemsize == FP32 or computation.autocast:
        return 0
    return head_gradient // FP32 * computation.itemsize


def _pooled_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of the hidden states that are pooled into embeddings, their fp64 copy, and their
    gradient.
    """
    return (2 * spec.computation.itemsize + FP64) * spec.computed.hidden * tokens


def head_adapter_bytes(spec: RunSpec) -> int:
    """Bytes that a LoRA adapter on the output head adds to the loss, besides B's gradient; 0
    without one.

    A's outputs, [positions, rank], are joined to the hidden states as more columns, and the head
    reads the joined tensor.
    """
    lora_rank = _head_adapter_rank(spec)
    if not lora_rank:
        return 0
    computation = spec.computation
    positions = spec.scored_outputs * spec.tokens
    outputs = positions * lora_rank  # of A
    joined = positions * (spec.computed.hidden + lora_rank)
    # The joined tensor's copy at the trained positions and the gradient of that copy each have A's
    # outputs as more columns than `loss_bytes` counts.
    more_columns = 2 * outputs
    return (
        computation.residual_itemsize * (outputs + joined)
        + computation.itemsize * more_columns
        + _adapter_kept_bytes(spec)
    )


def _adapter_kept_bytes(spec: RunSpec) -> int:
    """Bytes that a LoRA adapter on the output head keeps for its backward; 0 without one.

    They are the scaled copy of B and, under autocast, two casts: of that copy, which is fp32 there,
    and of the hidden states that A reads.
    """
    computation = spec.computation
    lora_rank = _head_adapter_rank(spec)
    scaled_b = spec.computed.head_rows * lora_rank
    if not lora_rank or not computation.autocast:
        return computation.itemsize * scaled_b
    states = spec.computed.hidden * spec.scored_outputs * spec.tokens
    return (FP32 + computation.itemsize) * scaled_b + computation.itemsize * states


def _head_adapter_rank(spec: RunSpec) -> int:
    """The rank r of the LoRA adapter on the output head; 0 without one."""
    head = spec.architecture.head_name.removesuffix(".weight")
    name = f"{head}.lora_A.default.weight"  # [r, hidden]
    return next((tensor.shape[0] for tensor in spec.tensors if tensor.name == name), 0)


def critic_bytes(spec: RunSpec) -> int:
    """Bytes of the hidden states that a critic reads, and of their fp32 copy; 0 without a critic.

    Both are kept for the critic's gradient. Every token counts as trained.
    """
    if not spec.recipe.method_facts.has_critic:
        return 0
    cast = FP32 if spec.computation.itemsize < FP32 else 0
    return (spec.computation.itemsize + cast) * spec.computed.hidden * spec.tokens


def chunk_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of the run's loss over one chunk of logits, if its head reads `tokens` tokens; of the
    pooled hidden states if the method embeds.
    """
    method = spec.recipe.method
    if spec.recipe.method_facts.embeds:
        return _pooled_bytes(spec, tokens)
    if spec.teacher is not None:
        return teacher_divergence_bytes(spec, tokens)
    if method.distill_top_k is not None:  # the teacher's likeliest tokens come from files
        vocabulary = spec.architecture.vocabulary  # all of it: rules refuse tp_size with a teacher
        return divergence_chunk_bytes(
            vocabulary,
            tokens,
            spec.computation,
            method.distill_beta,
            method.temperature,
            _count_logit_copies(spec.architecture),
        )
    return _loss_chunk_bytes(spec, tokens)


def _loss_chunk_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of the cross entropy or of the log-probabilities over one chunk of logits, if the head
    reads `tokens` tokens.
    """
    divides_logits = spec.recipe.method_facts.samples and spec.recipe.method.temperature != 1.0
    return loss_chunk_bytes(
        spec.computed.head_rows,
        tokens,
        spec.computation,
        trains_head=_head_gradient(spec) > 0,
        logit_copies=_count_logit_copies(spec.architecture, divides_logits=divides_logits),
        weighs_tokens=spec.recipe.optimization.token_loss != "cross_entropy",
    )


def _count_logit_copies(architecture: Architecture, *, divides_logits: bool = False) -> int:
    """The number of fp32 tensors that turn a chunk's scores into logits (`LogitTransform`).

    They are the logits and, with a cap, its tanh, which the gradient needs. 0 if the scores are the
    logits. `divides_logits`: whether a temperature divides them.
    """
    if architecture.caps_logits:
        return 2
    return 1 if architecture.scales_logits or divides_logits else 0


def loss_backward_bytes(spec: RunSpec) -> int:
    """Bytes of the loss's backward: the gradients of head and hidden states, which the forward
    computed, and a copy of each in its tensor's dtype.

    The hidden states' gradient is copied to fp32 in between. fp32 is not copied to fp32.
    """
    architecture = spec.computed
    computation = spec.computation
    if spec.recipe.method_facts.embeds:
        return _pooled_bytes(spec, spec.tokens)
    if spec.weighs_documents:
        return _log_probability_backward_bytes(spec)
    positions = spec.scored_outputs * spec.tokens
    bytes_per_feature = computation.itemsize
    if computation.itemsize < FP32:
        bytes_per_feature += FP32
    if computation.residual_itemsize < FP32:
        bytes_per_feature += computation.residual_itemsize
    lora_rank = _head_adapter_rank(spec)
    features = (architecture.hidden + lora_rank) * positions  # A's outputs are joined to the states
    head_gradient = _head_gradient(spec) + _adapter_gradient(spec)
    gradients = _cast_gradient_bytes(head_gradient, computation) + features * bytes_per_feature
    if lora_rank:  # then the gradients of the joined states and of A's input are added up
        gradients = max(gradients, 3 * computation.residual_itemsize * features)
    return head_gradient + gradients + _adapter_kept_bytes(spec)


def _adapter_gradient(spec: RunSpec) -> int:
    """Bytes of the fp32 gradient of B in the head's LoRA adapter; 0 without one."""
    return FP32 * spec.computed.head_rows * _head_adapter_rank(spec)


def _head_gradient(spec: RunSpec) -> int:
    """Bytes of the fp32 gradient of the head's weight; 0 if the head is frozen."""
    architecture = spec.architecture
    head = architecture.embedding.name if architecture.tied else architecture.head_name
    is_trained = any(tensor.trainable for tensor in spec.tensors if tensor.name == head)
    if is_trained:
        return FP32 * spec.computed.head_rows * spec.computed.hidden
    return 0


def loss_chunk_bytes(
    vocabulary: int,
    tokens: int,
    computation: Computation,
    *,
    trains_head: bool,
    logit_copies: int = 0,
    weighs_tokens: bool = False,
) -> int:
    """Bytes of cross entropy over one chunk of logits.

    They are the head's scores, the fp32 log-probabilities and either the fp32 tensors that turn the
    scores into logits or, in a compute dtype below fp32, a cast copy. Compiled, they are the
    scores, their gradient, and the tanh of a cap.

    `logit_copies`: the number of the tensors that turn scores into logits; 0 if they are the same.
    `weighs_tokens`: whether each token has a weight of its own. A CPU multiplies a gradient below
    fp32 by it in fp32: two copies, beside the scores and their gradient.
    """
    most_tokens = loss_chunk_tokens(vocabulary, computation.device, trains_head=trains_head)
    chunk = _balance_chunk(tokens, most_tokens)
    if computation.compiled:
        tanh = FP32 if logit_copies > 1 else 0
        return chunk * vocabulary * (2 * computation.itemsize + tanh)
    if logit_copies:  # they are fp32, so no cast copy is needed besides
        cast = logit_copies * FP32
    elif computation.itemsize == FP32:
        cast = 0
    elif computation.cpu or computation.divides_vocabulary:
        cast = FP32  # of the logits, before their softmax
    else:
        cast = computation.itemsize  # of the gradient, which takes the log-probabilities' memory
    element = computation.itemsize + FP32 + cast
    if weighs_tokens and computation.cpu and computation.itemsize != FP32:
        element = max(element, 2 * computation.itemsize + 2 * FP32)
    return chunk * vocabulary * element


def _head_product_bytes(spec: RunSpec, positions: int) -> int:
    """Bytes while a CPU adds one chunk to the gradient of the head's weight, or of its adapter's B,
    in a compute dtype below fp32.

    They are the chunk's logits with their gradient, the chunk's gradient of the weight, and the
    fp32 copy of that gradient. 0 on a GPU and in fp32, where the matmul's kernel adds its product
    to the head's gradient directly.
    """
    computation = spec.computation
    if not computation.cpu or computation.itemsize == FP32:
        return 0
    vocabulary = spec.computed.head_rows
    trained_columns = _head_adapter_rank(spec) or spec.computed.hidden
    chunk = _balance_chunk(positions, loss_chunk_tokens(vocabulary, "cpu"))
    logits = 2 * chunk * computation.itemsize
    weight_gradient = trained_columns * (computation.itemsize + FP32)
    return vocabulary * (logits + weight_gradient)


def divergence_chunk_bytes(
    vocabulary: int,
    tokens: int,
    computation: Computation,
    beta: float,
    temperature: float,
    logit_copies: int,
) -> int:
    """Bytes of a distillation loss over one chunk of logits.

    They are the scores in the compute dtype, unless a copy in fp32 replaces them, and, in fp32, the
    tensors that turn them into logits, both models' log-probabilities, and the tensors of the
    divergence.

    Args:
        vocabulary: Logits per token; the larger number if both models are in memory.
        tokens: Tokens of a micro-batch.
        computation: The settings of the forward.
        beta: 0 is the forward KL, 1 the reverse KL; between them a mixture is compared.
        temperature: Any temperature but 1 needs a scaled copy of the logits.
        logit_copies: The tensors that turn both models' scores into logits. All are counted, an
            upper bound.
    """
    fp32_tensors = logit_copies + 2  # the log-probabilities of both models
    fp32_tensors += 2 if beta == 0 else 3  # divergence and gradient
    if temperature != 1.0:
        fp32_tensors += 1
    scores = computation.itemsize
    if logit_copies and scores < FP32:
        scores = 0  # freed when they are copied to fp32
    chunk = _balance_chunk(tokens, divergence_chunk_tokens(vocabulary, computation.device))
    return chunk * vocabulary * (scores + fp32_tensors * FP32)


def _balance_chunk(tokens: int, most_tokens: int) -> int:
    """The tokens of each chunk if `tokens` are split evenly into the fewest chunks of at most
    `most_tokens`.
    """
    chunks = max(ceil_div(tokens, most_tokens), 1)
    return ceil_div(tokens, chunks)


def _log_probability_backward_bytes(spec: RunSpec) -> int:
    """The most bytes in the backward of per-token log-probabilities (models/log_probabilities.py).

    First it scales the hidden states' gradient in fp32. Then, if the head or its adapter is
    trained, it computes the chunks of logits again for the gradient of the head's weight or of the
    adapter's B. A critic's gradient of the hidden states waits meanwhile.
    """
    computation = spec.computation
    lora_rank = _head_adapter_rank(spec)
    hidden = (spec.computed.hidden + lora_rank) * spec.tokens  # A's outputs are joined to them
    always_there = computation.itemsize * hidden  # the hidden states' gradient, from the forward
    if spec.recipe.method_facts.has_critic:
        always_there += computation.residual_itemsize * hidden
    in_fp32 = 0 if computation.itemsize == FP32 else FP32 * hidden  # its copy, if it is not fp32
    scaled = FP32 * hidden
    cast_scaled = computation.residual_itemsize * hidden  # in the residual stream's dtype
    steps = [
        in_fp32 + scaled,
        scaled + cast_scaled,
        2 * cast_scaled,  # the trained positions' gradient is scattered to all positions
    ]
    head_gradient = _head_gradient(spec) + _adapter_gradient(spec)
    if head_gradient:
        always_there += computation.itemsize * hidden  # the hidden states at the trained positions
        always_there += _adapter_kept_bytes(spec)
        cast_gradient = _cast_gradient_bytes(head_gradient, computation)
        recomputed = max(_recomputed_chunk_bytes(spec), cast_gradient)
        steps.append(2 * cast_scaled + head_gradient + recomputed)
    return always_there + max(steps)


def _recomputed_chunk_bytes(spec: RunSpec) -> int:
    """Bytes of a chunk of logits that the backward of log-probabilities computes again, and of
    autocast's copy of the head.
    """
    product = _head_product_bytes(spec, spec.tokens)
    chunk = max(_loss_chunk_bytes(spec, spec.tokens), product)
    return chunk + cast_head_bytes(spec)


def teacher_divergence_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of the hidden states that the teacher's head reads, and of one chunk of the divergence.

    `tokens`: tokens of a micro-batch on this rank.
    """
    assert spec.teacher is not None
    teacher = spec.teacher.architecture
    computation = spec.computation
    method = spec.recipe.method
    larger_vocabulary = max(spec.architecture.vocabulary, teacher.vocabulary)
    chunk = divergence_chunk_bytes(
        larger_vocabulary,
        tokens,
        computation,
        method.distill_beta,
        method.temperature,
        _count_logit_copies(spec.architecture) + _count_logit_copies(teacher),
    )
    return computation.itemsize * teacher.hidden * tokens + chunk
