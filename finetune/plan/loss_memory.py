"""The memory of a loss and of its backward: chunks of logits, gradients, compared vectors."""

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

# Of all vectors while `contrast` compares them: given, detached, normalized, and two gradients.
VECTOR_COPIES = 5


def vector_bytes(spec: RunSpec, queries: int) -> int:
    """Bytes of the vectors of so many `queries` and their documents, in fp64, or of their
    gradients; 0 where the method compares none.
    """
    if not spec.recipe.method_facts.embeds:
        return 0
    return FP64 * queries * spec.recipe.group_size * spec.computed.hidden


def count_held_out_queries(spec: RunSpec) -> int | None:
    """The number of held-out queries, which are all compared at once; None where the recipe alone
    does not say it.
    """
    data = spec.recipe.data
    if data.eval_datasets:
        counts = [source.max_samples for source in data.eval_datasets]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
    size = data.eval_split_size or 0
    if 0 < size < 1:  # a share of the data
        return None
    return int(size)


def compared_bytes(spec: RunSpec, queries: int) -> int:
    """Bytes of the vectors of so many `queries` and their documents while they are compared, and of
    the cosines.
    """
    at_once = min(queries, CONTRASTED_QUERIES)  # each with the documents of all queries
    documents = queries * (spec.recipe.group_size - 1)
    # the cosines, their log-softmax and its gradient
    cosines = 3 * FP64 * at_once * documents
    return VECTOR_COPIES * vector_bytes(spec, queries) + cosines


def loss_bytes(spec: RunSpec) -> int:
    """Bytes of one chunk of logits, and of the gradients that the loss computes in its forward:
    those of the head and of the hidden states. Every token counts as trained.
    """
    architecture = spec.computed
    computation = spec.computation
    if spec.recipe.method_facts.embeds:
        return _pooled_bytes(spec)
    if spec.weighs_documents:  # it is computed in the backward
        head_gradient = 0
    else:
        head_gradient = _head_gradient(spec)
    scored = spec.scored_outputs * spec.tokens
    # a copy of the trained positions, and its gradient
    hidden = 2 * computation.itemsize * architecture.hidden * scored
    # the hidden states of early exits before they are joined
    exits = computation.residual_itemsize * architecture.hidden * (scored - spec.tokens)
    chunk = chunk_bytes(spec, scored)
    if head_gradient:  # computed here
        product = weight_product_bytes(
            architecture.head_rows, architecture.hidden, scored, computation
        )
        chunk = max(chunk, product)
    return (
        head_gradient
        + _cast_head_bytes(architecture, computation)
        + hidden
        + exits
        + critic_bytes(spec)
        + head_adapter_bytes(spec)
        + chunk
    )


def _cast_head_bytes(architecture: Architecture, computation: Computation) -> int:
    """The head's copy in the compute dtype, which autocast makes."""
    if not computation.autocast:
        return 0
    return computation.itemsize * architecture.head_rows * architecture.hidden


def _cast_gradient_bytes(head_gradient: int, computation: Computation) -> int:
    """The copy of the head's fp32 gradient in the head's own dtype, where that is smaller."""
    if computation.itemsize == FP32 or computation.autocast:
        return 0
    return head_gradient // FP32 * computation.itemsize


def _pooled_bytes(spec: RunSpec) -> int:
    """The states that an embedding is pooled of, their fp64 cast, and their gradient."""
    return (2 * spec.computation.itemsize + FP64) * spec.computed.hidden * spec.tokens


def head_adapter_bytes(spec: RunSpec) -> int:
    """Counts the bytes that a LoRA adapter on the output head adds: the hidden states joined with
    the products of A, and the scaled B with its gradient.
    """
    lora_rank = _head_rank(spec)
    if not lora_rank:
        return 0
    computation = spec.computation
    # A's products four times: by themselves, joined to the hidden states, and in the copy of the
    # trained positions and its gradient; the hidden states of those two `loss_bytes` counts
    features = 4 * lora_rank + spec.computed.hidden
    joined = computation.itemsize * spec.tokens * features
    # of B: the scaled copy, which under autocast is fp32 and cast; and the fp32 gradient
    scaled = (FP32 if computation.autocast else 0) + computation.itemsize
    return joined + (scaled + FP32) * lora_rank * spec.computed.head_rows


def _head_rank(spec: RunSpec) -> int:
    """The rank of the output head's adapter; 0 without one."""
    head = spec.architecture.head_name.removesuffix(".weight")
    name = f"{head}.lora_A.default.weight"
    return next((tensor.shape[0] for tensor in spec.tensors if tensor.name == name), 0)


def critic_bytes(spec: RunSpec) -> int:
    """The trained positions that a critic reads and their fp32 cast, both kept for its gradient."""
    if not spec.recipe.method_facts.has_critic:
        return 0
    cast = FP32 if spec.computation.itemsize < FP32 else 0
    return (spec.computation.itemsize + cast) * spec.computed.hidden * spec.tokens


def chunk_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of one chunk of logits of the run's loss over `tokens` tokens."""
    method = spec.recipe.method
    if spec.teacher is not None:
        return teacher_divergence_bytes(spec, tokens)
    if method.distill_top_k is not None:
        vocabulary = spec.architecture.vocabulary  # whole: rules refuse tp_size with a teacher
        return divergence_chunk_bytes(
            vocabulary, tokens, spec.computation, method.distill_beta, method.temperature
        )
    return loss_chunk_bytes(
        spec.computed.head_rows, tokens, spec.computation, trains_head=_head_gradient(spec) > 0
    )


def loss_backward_bytes(spec: RunSpec) -> int:
    """Bytes of the backward of the loss: the gradients of head and hidden states, and a copy of
    each in its tensor's dtype. The hidden states' gradient is fp32 in between.
    """
    architecture = spec.computed
    computation = spec.computation
    if spec.recipe.method_facts.embeds:
        return _pooled_bytes(spec)
    if spec.weighs_documents:
        return log_probability_backward_bytes(
            architecture, spec.tokens, computation, _head_gradient(spec)
        )
    scored = spec.scored_outputs * spec.tokens
    hidden = (
        architecture.hidden * scored * (computation.itemsize + FP32 + computation.residual_itemsize)
    )
    head_gradient = _head_gradient(spec)
    return head_gradient + _cast_gradient_bytes(head_gradient, computation) + hidden


def _head_gradient(spec: RunSpec) -> int:
    """Bytes of the fp32 gradient of the head's weight; 0 where it is frozen."""
    architecture = spec.architecture
    head = architecture.embedding.name if architecture.tied else architecture.head_name
    is_trained = any(tensor.trainable for tensor in spec.tensors if tensor.name == head)
    if is_trained:
        return FP32 * spec.computed.head_rows * spec.computed.hidden
    return 0


def loss_chunk_bytes(
    vocabulary: int, tokens: int, computation: Computation, *, trains_head: bool
) -> int:
    """Bytes of the chunk of logits that the loss works on: scores, fp32 log-probabilities and,
    below fp32, a cast of one of them; compiled, the scores and their gradient.
    """
    most = loss_chunk_tokens(vocabulary, computation.device, trains_head=trains_head)
    chunk = _balanced_chunk(tokens, most)
    if computation.compiled:
        return chunk * vocabulary * 2 * computation.itemsize
    if computation.itemsize == FP32:
        cast = 0
    elif computation.cpu or computation.divides_vocabulary:
        cast = FP32  # of the scores, before their softmax
    else:
        cast = computation.itemsize  # of the gradient, which replaces the log-probabilities
    return chunk * vocabulary * (computation.itemsize + FP32 + cast)


def weight_product_bytes(
    vocabulary: int, hidden: int, tokens: int, computation: Computation
) -> int:
    """In a dtype below fp32, the bytes with which a CPU adds a chunk to the head's gradient: the
    chunk's scores with their gradient, its product, and the fp32 copy of that.

    0 elsewhere: a GPU's kernel adds the product itself, and so does a CPU's in fp32.
    """
    if not computation.cpu or computation.itemsize == FP32:
        return 0
    chunk = _balanced_chunk(tokens, loss_chunk_tokens(vocabulary, "cpu"))
    return vocabulary * (2 * chunk * computation.itemsize + hidden * (computation.itemsize + FP32))


def divergence_chunk_bytes(
    vocabulary: int, tokens: int, computation: Computation, beta: float, temperature: float
) -> int:
    """Bytes of the chunk of logits that a distillation loss works on: its scores and, in fp32, both
    models' log-probabilities and what the divergence needs.

    Args:
        vocabulary: Scores of a token; of two models that are both there, the larger number.
        tokens: Of a micro-batch.
        computation: Its dtype and device.
        beta: 0 is the forward KL, 1 the reverse one; between them a mixture is compared.
        temperature: Any but 1 needs a scaled copy.
    """
    tensors = 2  # the log-probabilities
    tensors += 2 if beta == 0 else 3  # divergence and gradient
    if temperature != 1.0:
        tensors += 1
    chunk = _balanced_chunk(tokens, divergence_chunk_tokens(vocabulary, computation.device))
    return chunk * vocabulary * (computation.itemsize + tensors * FP32)


def _balanced_chunk(tokens: int, chunk_tokens: int) -> int:
    """Tokens of a chunk where `tokens` are split evenly into as few chunks as possible, each of at
    most `chunk_tokens`.
    """
    return ceil_div(tokens, max(ceil_div(tokens, chunk_tokens), 1))


def log_probability_backward_bytes(
    architecture: Architecture, tokens: int, computation: Computation, head_gradient: int
) -> int:
    """Bytes that the backward of per-token log-probabilities holds (models/log_probabilities.py).

    First the hidden states' gradient is scaled in fp32. Then, where the head is trained, the chunks
    are computed again for the gradient of its weight.

    Args:
        architecture: The part of the model that the rank computes.
        tokens: Tokens of a micro-batch on the rank.
        computation: The settings of the forward.
        head_gradient: Bytes of the fp32 gradient of the head's weight; 0 where it is frozen.
    """
    hidden = architecture.hidden * tokens
    held = computation.itemsize * hidden  # the hidden states' gradient, from the forward
    in_fp32 = 0 if computation.itemsize == FP32 else FP32 * hidden  # its copy, if it is not fp32
    product = FP32 * hidden  # with the scale
    cast_product = computation.residual_itemsize * hidden  # to the residual stream's dtype
    steps = [
        in_fp32 + product,
        product + cast_product,
        2 * cast_product,  # it is scattered to all positions
    ]
    if head_gradient:
        held += computation.itemsize * hidden  # the hidden states at the trained positions
        chunk = max(
            loss_chunk_bytes(architecture.head_rows, tokens, computation, trains_head=True),
            weight_product_bytes(architecture.head_rows, architecture.hidden, tokens, computation),
        )
        chunk += _cast_head_bytes(architecture, computation)
        cast_gradient = _cast_gradient_bytes(head_gradient, computation)
        steps.append(2 * cast_product + head_gradient + max(chunk, cast_gradient))
    return held + max(steps)


def teacher_divergence_bytes(spec: RunSpec, tokens: int) -> int:
    """Bytes of the inputs of the teacher's head, and of a chunk of the divergence from it."""
    assert spec.teacher is not None
    teacher = spec.teacher.architecture
    computation = spec.computation
    method = spec.recipe.method
    widest = max(spec.architecture.vocabulary, teacher.vocabulary)
    chunk = divergence_chunk_bytes(
        widest, tokens, computation, method.distill_beta, method.temperature
    )
    return computation.itemsize * teacher.hidden * tokens + chunk
