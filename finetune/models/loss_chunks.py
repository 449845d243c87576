"""The loss and its gradients, computed in chunks of tokens.

For torch.compile a chunk's scores are read twice or three times, and only their gradient is
written; the eager version writes and reads them in fp32 at every operation. The compiled one has
the same equations, without updates in place, and with the label found by comparison: adding to a
position would keep a compiler from fusing what is around it.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import IGNORE_INDEX, ceil_div, loss_chunk_tokens
from finetune.distributed.model_parts import product_dtype
from finetune.distributed.tensor_parallel import VocabularyShard


def choose_chunk_tokens(
    weight: Tensor, shard: VocabularyShard | None, device_type: str, *, trains_head: bool
) -> int:
    """Tokens in a chunk of the loss, by the head's rows here; by the most of a rank, as all meet in
    each chunk.
    """
    if shard is None:
        rows = weight.shape[0]
    else:
        rows = ceil_div(shard.rows, shard.group.size())
    return loss_chunk_tokens(rows, device_type, trains_head=trains_head)


class LogitTransform(NamedTuple):
    """The function of a head's output before the softmax: softcap * tanh(scale * logits / softcap)
    / temperature.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits that the softmax takes, from the head's output [..., vocabulary], and what
        `backward` needs.

        In fp32 or wider, where they are not the scores themselves.
        """
        if self.scale != 1.0:
            scores = scores.to(widen(scores.dtype)) * self.scale
        capped = None
        if self.softcap is not None:
            capped = torch.tanh(scores.to(widen(scores.dtype)) / self.softcap)
            scores = capped * self.softcap
        if self.temperature != 1.0:
            scores = scores.to(widen(scores.dtype)) / self.temperature
        return scores, capped

    def backward(self, grad: Tensor, capped: Tensor | None) -> Tensor:
        """The gradient to the scores, in place of that to the logits. `capped`: from `forward`."""
        if self.temperature != 1.0:
            grad /= self.temperature
        if capped is not None:
            grad *= 1 - capped.square()
        if self.scale != 1.0:
            grad *= self.scale
        return grad


UNCHANGED = LogitTransform()

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""To hidden [tokens, hidden] in its type, weight, bias and an adapter's B in fp32; None where not
needed.
"""


class HeadProduct(NamedTuple):
    """What an output head multiplies, as this rank has it.

    The scores are hidden @ weight.T + bias. With an adapter (LoRA), hidden has in its last columns
    what A makes of the states, and B, times its scale, multiplies those: no weight is added up, nor
    is the frozen one copied.
    """

    hidden: Tensor  # [tokens, hidden], or [tokens, hidden + rank]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor | None = None  # [vocabulary]
    adapter_b: Tensor | None = None  # [vocabulary, rank]
    # to which weight, bias and B belong, whose group calls together; None: all of it
    shard: VocabularyShard | None = None

    def to(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Its tensors in one type."""
        bias = None if self.bias is None else self.bias.to(dtype)
        adapter_b = None if self.adapter_b is None else self.adapter_b.to(dtype)
        return self.hidden.to(dtype), self.weight.to(dtype), bias, adapter_b

    def needs_grad(self) -> tuple[bool, ...]:
        """Which of the `Gradients` are needed now."""
        return find_needed_gradients(*self[:4])


def multiply_by_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, adapter_b: Tensor | None
) -> Tensor:
    """The scores [tokens, vocabulary] of tensors as `HeadProduct` has them, all of one type."""
    if adapter_b is None:
        return F.linear(hidden, weight, bias)
    width = weight.shape[1]
    scores = F.linear(hidden[:, :width], weight, bias)
    out = None if torch.is_grad_enabled() else scores
    return torch.addmm(scores, hidden[:, width:], adapter_b.t(), out=out)


ChunkFunction = Callable[
    [Tensor, Tensor, Tensor | None, LogitTransform, float, torch.dtype | None],
    tuple[Tensor, Tensor | None],
]
"""`compute_chunk`, or a function that computes the same."""


class TokenWeights(NamedTuple):
    """The factors of each token's loss, without a gradient of their own."""

    kind: Literal["dft", "eaft"]
    alpha: float = 1.0

    def of_logits(self, logits: Tensor) -> Tensor | None:
        """[tokens]: the entropy of the 20 largest logits [tokens, vocabulary] over 3, to the power
        of alpha (EAFT); None where logits do not matter (DFT).
        """
        if self.kind == "dft":
            return None
        largest = torch.log_softmax(
            logits.topk(min(20, logits.shape[1])).values, -1, dtype=widen(logits.dtype)
        )
        return (-(largest.exp() * largest).sum(1) / 3.0) ** self.alpha

    def choose(self, of_logits: Tensor | None, log_probabilities: Tensor) -> Tensor:
        """[tokens]: what `of_logits` returned, or the probability of each label (DFT: Wu et al.
        2025, arXiv:2508.05629).
        """
        if of_logits is not None:
            return of_logits
        return log_probabilities.exp()


class ChunkOptions(NamedTuple):
    """How a loss of a head's scores is computed chunk by chunk.

    Label smoothing is torch's (Szegedy et al. 2016, section 7): the weight of the mean over the
    vocabulary.
    """

    logits: LogitTransform = UNCHANGED
    tokens: int | None = None  # of a chunk, at most; None: those of `choose_chunk_tokens`
    trains_head: bool = True  # or is frozen: in every pass alike, with gradients or without
    label_smoothing: float = 0.0
    # to which weight and bias belong, whose group calls together; None: all of it
    shard: VocabularyShard | None = None
    # what loss and gradients weigh each token by; None: all alike
    weigh: TokenWeights | None = None
    # computes a chunk of a whole vocabulary, compiled; None: `compute_chunk`
    function: ChunkFunction | None = None


PLAIN = ChunkOptions()


class Computed(NamedTuple):
    """The results of `compute_in_chunks`."""

    loss: Tensor  # fp32 scalar: minus the sum of the log-probabilities
    log_probabilities: Tensor  # fp32[tokens]; 0 where the label is IGNORE_INDEX
    gradients: Gradients  # of the loss


def compute_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunks: ChunkOptions,
    needs_grad: tuple[bool, ...],
    token_weights: Tensor | None = None,
    adapter_b: Tensor | None = None,
) -> Computed:
    """The log-probabilities of `labels`, and the loss with its gradients to hidden, weight, bias
    and B, where needed.

    Args:
        hidden, weight, bias, adapter_b: As `HeadProduct` has them. All but the bias are in the
            dtype in which the products run.
        labels: int64[tokens], or IGNORE_INDEX.
        chunks: How the loss is computed.
        needs_grad: Which of the `Gradients` are computed.
        token_weights: fp32[tokens], by which the gradients (not the loss) weigh each token; None:
            all alike.
    """
    wide = widen(weight.dtype)
    shard = chunks.shard
    function = chunks.function
    chunk_tokens = chunks.tokens or choose_chunk_tokens(
        weight, shard, hidden.device.type, trains_head=chunks.trains_head
    )
    # The bias's gradient is a sum of the scores' gradients, which is exact of unrounded ones alone.
    grad_dtype = None
    if any(needs_grad):
        grad_dtype = wide if needs_grad[2] else hidden.dtype
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    log_probabilities = torch.empty(len(hidden), dtype=wide, device=hidden.device)

    def add_chunk(scores: Tensor, chunk: slice) -> Tensor | None:
        nonlocal loss
        of_logits = None
        if chunks.weigh is not None:  # before the scores are overwritten
            of_logits = chunks.weigh.of_logits(chunks.logits.forward(scores)[0])
        arguments = (
            scores,
            labels[chunk],
            None if token_weights is None else token_weights[chunk],
            chunks.logits,
            chunks.label_smoothing,
            grad_dtype,
        )
        # A compiler makes another graph for one token, which the last chunk may have.
        if function is None or shard is not None or len(scores) == 1:
            of_labels, grad_scores = compute_chunk(*arguments, shard)
        else:
            of_labels, grad_scores = function(*arguments)
        log_probabilities[chunk] = of_labels
        if chunks.weigh is not None:
            factors = chunks.weigh.choose(of_logits, of_labels)
            of_labels = of_labels * factors
            if grad_scores is not None:
                grad_scores *= factors.unsqueeze(1)
        loss -= of_labels.sum()
        return grad_scores

    tensors = hidden, weight, bias, adapter_b
    gradients = backward_in_chunks(*tensors, add_chunk, chunk_tokens, needs_grad)
    if shard is not None and gradients[0] is not None:
        dist.all_reduce(gradients[0], group=shard.group)  # what every row of the head adds to it
    return Computed(loss, log_probabilities, gradients)


def backward_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter_b: Tensor | None,
    compute_chunk: Callable[[Tensor, slice], Tensor | None],
    chunk_tokens: int,
    needs_grad: tuple[bool, ...],
) -> Gradients:
    """Calls `compute_chunk` with the scores [tokens of the chunk, vocabulary] of each chunk and its
    place among the tokens, and multiplies the gradients to the scores that it returns back through
    the head; where the bias is trained, in fp32 or wider.
    """
    to_hidden, to_weight, to_bias, to_b = needs_grad
    wide = widen(weight.dtype)
    width = weight.shape[1]
    grad_hidden = torch.empty_like(hidden) if to_hidden else None
    grad_weight = None
    if to_weight:
        grad_weight = torch.zeros_like(weight, dtype=wide)
    grad_bias = None
    if to_bias and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=wide)
    grad_b = None
    if to_b and adapter_b is not None:
        grad_b = torch.zeros_like(adapter_b, dtype=wide)
    own_bias = None if bias is None else bias.to(weight.dtype)
    chunk_tokens = _balance_chunks(len(hidden), chunk_tokens)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        scores = multiply_by_head(hidden[chunk], weight, own_bias, adapter_b)
        grad_scores = compute_chunk(scores, chunk)
        if grad_scores is not None:
            if grad_bias is not None:
                grad_bias += grad_scores.sum(0)
            grad_scores = grad_scores.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_scores, weight, out=grad_hidden[chunk, :width])
                if adapter_b is not None:
                    torch.mm(grad_scores, adapter_b, out=grad_hidden[chunk, width:])
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_scores.t(), hidden[chunk, :width])
            if grad_b is not None:
                _accumulate_product(grad_b, grad_scores.t(), hidden[chunk, width:])
        del scores, grad_scores  # else they live until the next chunk's are there
    return grad_hidden, grad_weight, grad_bias, grad_b


class HeadLoss(torch.autograd.Function):
    """A loss of the head's scores whose gradients `compute` finds in the forward, so that the
    backward keeps no logits and multiplies nothing again (as Liger does: Hsu et al. 2024,
    arXiv:2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter_b: Tensor | None,
        positions: Tensor | None,
        needs_grad: tuple[bool, ...],
        compute: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Gradients]],
    ) -> Tensor:
        """Computes the loss and its gradients, which the backward only scales.

        `compute`: from hidden at `positions` (None: all), weight and B, all in the type in which
        products run, to the loss (0-dim), or to sums of which the first is the loss, and the loss's
        gradients.
        """
        dtype = product_dtype(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = hidden if positions is None else hidden[positions]
            own_b = None if adapter_b is None else adapter_b.to(dtype)
            sums, (grad_hidden, *others) = compute(trained.to(dtype), weight.to(dtype), own_b)
        if positions is not None and grad_hidden is not None:
            grad_hidden = scatter_rows(grad_hidden, positions, hidden.shape)
        given = hidden, weight, bias, adapter_b
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.gradients = [grad_hidden, *others]
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs
        upstream = upstream if upstream.dim() == 0 else upstream[0]
        gradients = ctx.gradients
        ctx.gradients = None  # the graph may live on until the next forward; these need not
        # In fp32: 1 / trained tokens, rounded to bf16, would be wrong by up to 0.4%, the same way
        # everywhere.
        scaled = (
            None if g is None else g.to(upstream.dtype).mul_(upstream).to(t)
            for g, t in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None)


def widen(dtype: torch.dtype) -> torch.dtype:
    """fp32, or `dtype` where that is wider: what a softmax and the sums of a loss are computed
    in.
    """
    return torch.promote_types(dtype, torch.float32)


def find_needed_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each of the tensors needs a gradient now."""
    return tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in tensors
    )


def scatter_rows(rows: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of `shape` with `rows` at `positions` and zeros elsewhere."""
    return torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_copy_(0, positions, rows)


def _balance_chunks(tokens: int, chunk_tokens: int) -> int:
    """At most `chunk_tokens`, such that the last chunk is not much smaller than the others.

    >>> _balance_chunks(tokens=1000, chunk_tokens=900)
    500
    """
    chunks = max(ceil_div(tokens, chunk_tokens), 1)
    return max(ceil_div(tokens, chunks), 1)


def compute_chunk(
    scores: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    logits: LogitTransform,
    label_smoothing: float,
    grad_dtype: torch.dtype | None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities of one chunk, in fp32 or wider, and the gradient of minus their sum to
    `scores`.

    Args:
        token_weights: fp32[tokens], by which the gradient weighs each token; None: all alike.
        grad_dtype: of the gradient, which is computed in fp32 or wider; None: none is.
    """
    transformed, capped = logits.forward(scores)
    if shard is None:
        log_probabilities = torch.log_softmax(transformed, -1, dtype=widen(scores.dtype))
        of_labels = label_log_probabilities(log_probabilities, labels, label_smoothing)
    else:
        wide = transformed.to(widen(scores.dtype))
        log_probabilities, of_labels = shard.log_softmax(wide, labels, label_smoothing)
    trained = labels != IGNORE_INDEX
    of_labels = torch.where(trained, of_labels, 0.0)
    if grad_dtype is None:
        return of_labels, None
    if shard is None:
        gradient_of = cross_entropy_gradient
    else:
        gradient_of = shard.gradient
    grad = logits.backward(gradient_of(log_probabilities, labels, label_smoothing), capped)
    grad.masked_fill_(~trained.unsqueeze(1), 0.0)
    if token_weights is not None:
        grad *= token_weights.unsqueeze(1)
    return of_labels, grad.to(grad_dtype)


def label_log_probabilities(
    log_probabilities: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """The log-probability of each label, [tokens], smoothed by `label_smoothing`.

    Undefined without a label.
    """
    # Any id will do where the position is not trained.
    of_labels = log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    if label_smoothing:
        return of_labels.lerp(log_probabilities.mean(1), label_smoothing)
    return of_labels


def cross_entropy_gradient(
    log_probabilities: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """The gradient to the logits [tokens, vocabulary] of minus `label_log_probabilities`, in
    place.
    """
    grad = log_probabilities.exp_()
    chosen = labels.clamp(min=0).unsqueeze(1)
    grad.scatter_add_(1, chosen, torch.full_like(chosen, label_smoothing - 1, dtype=grad.dtype))
    if label_smoothing:
        grad -= label_smoothing / grad.shape[1]
    return grad


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (fp32) += left @ right, the sum kept in fp32 also where the factors are not."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not total.is_cuda:
        total += left @ right
    elif _can_add_to_fp32():
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


@functools.cache
def _can_add_to_fp32() -> bool:
    """Whether this torch's CUDA kernel adds a product of bf16 matrices to an fp32 one; older ones
    refuse.
    """
    one = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
    try:
        torch.addmm(one.float(), one, one, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def compute_fused_chunk(
    scores: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    logits: LogitTransform,
    label_smoothing: float,
    grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the same as `compute_chunk`, by a fused kernel."""
    transformed, capped = logits.forward(scores)
    transformed = transformed.to(widen(scores.dtype))
    total = torch.logsumexp(transformed, -1)
    trained = (labels != IGNORE_INDEX).unsqueeze(1)
    ids = labels.clamp(min=0).unsqueeze(1)
    of_labels = transformed.gather(1, ids).squeeze(1) - total
    if label_smoothing:
        of_labels = of_labels.lerp(transformed.mean(1) - total, label_smoothing)
    of_labels = torch.where(trained.squeeze(1), of_labels, 0.0)
    if grad_dtype is None:
        return of_labels, None
    is_label = torch.arange(scores.shape[1], device=scores.device) == ids
    probabilities = (transformed - total.unsqueeze(1)).exp()
    grad = probabilities - (1 - label_smoothing) * is_label.to(probabilities.dtype)
    if label_smoothing:
        grad = grad - label_smoothing / scores.shape[1]
    grad = torch.where(trained, logits.backward(grad, capped), 0.0)
    if token_weights is not None:
        grad = grad * token_weights.unsqueeze(1)
    return of_labels, grad.to(grad_dtype)
