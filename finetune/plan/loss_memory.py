"""Bytes that the loss holds while it works on its chunks of logits, and in its backward."""

from finetune.constants import divergence_chunk_tokens, loss_chunk_tokens
from finetune.plan.activations import Computation
from finetune.plan.architecture import Architecture
from finetune.plan.state import FP32


def loss_chunk_bytes(vocabulary: int, tokens: int, run: Computation) -> int:
    """Bytes of the chunk of logits that the loss works on: scores, fp32 log-probabilities, their gradient cast back; compiled, the
    scores and their gradient."""
    if run.compiled:
        chunk = _balanced_chunk(tokens, loss_chunk_tokens(vocabulary, "cpu" if run.cpu else "cuda"))
        return chunk * vocabulary * 2 * run.itemsize
    # A CPU's softmax casts its input first, and so does one that is normalized over ranks.
    casts = 0 if run.itemsize == FP32 else FP32 if run.cpu or run.divides_vocabulary else run.itemsize
    chunk = _balanced_chunk(tokens, loss_chunk_tokens(vocabulary, "cpu" if run.cpu else "cuda"))
    return chunk * vocabulary * (run.itemsize + FP32 + casts)


def weight_product_bytes(vocabulary: int, hidden: int, tokens: int, run: Computation) -> int:
    """Bytes of a chunk's scores with their gradient, of its product for the head's gradient, and on a CPU of the fp32 copy that torch
    adds up; a GPU's kernel adds the product itself, and so does a CPU's in fp32."""
    if not run.cpu or run.itemsize == FP32:
        return 0
    chunk = _balanced_chunk(tokens, loss_chunk_tokens(vocabulary, "cpu"))
    return vocabulary * (2 * chunk * run.itemsize + hidden * (run.itemsize + FP32))


def divergence_chunk_bytes(vocabulary: int, tokens: int, run: Computation, beta: float, temperature: float) -> int:
    """The same where a teacher's logits meet the student's: scores, both models' log-probabilities, and three more tensors of
    their size for the divergence and its gradient, two for the forward KL; one more where a temperature makes the student's
    log-probabilities others than those of the labels."""
    tensors = 2 + (2 if beta == 0 else 3) + (temperature != 1.0)
    chunk = _balanced_chunk(tokens, divergence_chunk_tokens(vocabulary, "cpu" if run.cpu else "cuda"))
    return chunk * vocabulary * (run.itemsize + tensors * FP32)


def _balanced_chunk(tokens: int, chunk_tokens: int) -> int:
    """Tokens in each of as many chunks as are needed."""
    return -(-tokens // max(-(-tokens // chunk_tokens), 1))


def log_probability_backward_bytes(a: Architecture, tokens: int, run: Computation, head_gradient: int) -> int:
    """Bytes that the backward of per-token log-probabilities holds (models/head/log_probabilities.py): first the hidden states'
    gradient is scaled in fp32; then, where the head is trained, the chunks are computed again for the weight's in fp32.

    head_gradient: bytes of the latter; 0 where the head is frozen.
    """
    hidden = a.hidden * tokens
    prepared = run.itemsize * hidden  # the hidden states' gradient, from the forward
    scaled = run.residual_itemsize * hidden
    product = FP32 * hidden * (1 if run.itemsize == FP32 else 2)
    if not head_gradient:
        return prepared + max(product, FP32 * hidden + scaled, 2 * scaled)
    trained = run.itemsize * hidden  # the hidden states at the trained positions
    cast_head = run.itemsize * a.vocabulary * a.hidden if run.autocast else 0
    cast_back = run.itemsize if run.itemsize < FP32 and not run.autocast else 0
    chunk = loss_chunk_bytes(a.vocabulary, tokens, run) + cast_head
    again = 2 * scaled + head_gradient + max(chunk, head_gradient // FP32 * cast_back)
    return prepared + trained + max(product, FP32 * hidden + scaled, again)
