"""The loss of an output head and its gradients, computed in chunks of tokens.

A chunk's scores [tokens, vocabulary] are computed by `compute_chunk`, or by `compute_fused_chunk`
under torch.compile. The first writes and reads fp32 scores at every operation. The second reads the
scores two or three times and writes only their gradient. It has the same equations, but updates
nothing in place and finds the label by comparison: adding to one position would keep the compiler
from fusing the operations around it.
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


class LogitTransform(NamedTuple):
    """What turns a head's scores into logits, before the softmax.

    logits = softcap * tanh(scale * scores / softcap) / temperature; without a softcap, scale *
    scores / temperature.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes the logits of `scores` [..., vocabulary], in fp32 or wider.

        If nothing is changed, the logits are `scores` itself in its own dtype.

        Returns:
            (logits, the tanh that `backward` needs, or None without a softcap).
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
        """Turns the gradient to the logits into the gradient to the scores, in place.

        Args:
            capped: The second value that `forward` returned; overwritten.
        """
        if self.temperature != 1.0:
            grad /= self.temperature
        if capped is not None:
            grad *= capped.square_().neg_().add_(1)  # 1 - capped^2, the derivative of tanh
        if self.scale != 1.0:
            grad *= self.scale
        return grad


UNCHANGED = LogitTransform()

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The gradients to (hidden, weight, bias, an adapter's B); None for one that is not needed.

That to hidden has the dtype of hidden, the others are in fp32 or wider.
"""


class HeadProduct(NamedTuple):
    """The tensors that an output head multiplies, as this rank has them.

    The scores are states @ weight.T + bias. A LoRA adapter adds inner @ adapter_b.T to them, where
    inner = states @ A.T. So no product B A is ever added to a copy of the weight.
    """

    hidden: Tensor  # [tokens, hidden]: the states; with an adapter [tokens, hidden + rank]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor | None = None  # [vocabulary]
    adapter_b: Tensor | None = None  # [vocabulary, rank], B times the adapter's scale
    # The rows of the vocabulary that weight, bias and B are. All ranks of its group compute the
    # loss together. None: this rank has all rows.
    shard: VocabularyShard | None = None

    def at(self, positions: Tensor | slice) -> "HeadProduct":
        """The product at these tokens alone."""
        return self._replace(hidden=self.hidden[positions])

    def to(self, dtype: torch.dtype) -> "HeadProduct":
        """The product with its tensors in `dtype`."""
        bias = None if self.bias is None else self.bias.to(dtype)
        adapter_b = None if self.adapter_b is None else self.adapter_b.to(dtype)
        return HeadProduct(
            self.hidden.to(dtype), self.weight.to(dtype), bias, adapter_b, self.shard
        )

    def needs_grad(self) -> tuple[bool, ...]:
        """Which of the `Gradients` are needed now; none where torch records no gradients."""
        return tuple(
            torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
            for tensor in self[:4]
        )

    def scores(self) -> Tensor:
        """Computes the scores [tokens, vocabulary]. The tensors must be of one dtype."""
        if self.adapter_b is None:
            return F.linear(self.hidden, self.weight, self.bias)
        width = self.weight.shape[1]
        states = self.hidden[:, :width]
        inner = self.hidden[:, width:]
        scores = F.linear(states, self.weight, self.bias)
        out = None if torch.is_grad_enabled() else scores  # autograd refuses `out`
        return torch.addmm(scores, inner, self.adapter_b.t(), out=out)


ChunkFunction = Callable[
    [Tensor, Tensor, Tensor | None, LogitTransform, float, torch.dtype | None],
    tuple[Tensor, Tensor | None],
]
"""`compute_chunk` without its last argument, or a function that computes the same."""

# EAFT's weight is the entropy of this many largest logits, divided by about its maximum, ln 20.
EAFT_LOGITS = 20
EAFT_DIVISOR = 3.0


class TokenWeights(NamedTuple):
    """How a token's loss is weighted by the model's own confidence. No gradient goes through it.

    "dft": by the label's probability (Wu et al. 2025, arXiv:2508.05629). "eaft": by the entropy of
    the largest logits.
    """

    kind: Literal["dft", "eaft"]
    alpha: float = 1.0  # exponent of the entropy, for "eaft"

    def find_entropy_factors(self, scores: Tensor, transform: LogitTransform) -> Tensor | None:
        """EAFT: computes the factors [tokens] from `scores` [tokens, vocabulary]. DFT: None.

        `transform` turns the scores into logits.
        """
        if self.kind == "dft":
            return None
        # The largest scores become the largest logits, so only these are transformed.
        largest_scores = scores.topk(min(EAFT_LOGITS, scores.shape[1])).values
        largest_logits, _ = transform.forward(largest_scores)
        log_probs = torch.log_softmax(largest_logits, -1, dtype=widen(scores.dtype))
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return (entropy / EAFT_DIVISOR) ** self.alpha

    def choose_factors(self, entropy_factors: Tensor | None, label_log_probs: Tensor) -> Tensor:
        """The factors [tokens]: `entropy_factors` if they are given, else label probabilities."""
        if entropy_factors is not None:
            return entropy_factors
        return label_log_probs.exp()


class ChunkOptions(NamedTuple):
    """How a loss of a head's scores is computed chunk by chunk."""

    logits: LogitTransform = UNCHANGED
    tokens: int | None = None  # in a chunk, at most; None: by the number of the head's rows
    # Whether the run trains the head. It is the same in a pass without gradients, so that chunks
    # have the same size there.
    trains_head: bool = True
    # The weight of the mean over the vocabulary, as torch's (Szegedy et al. 2016, section 7).
    label_smoothing: float = 0.0
    weigh: TokenWeights | None = None  # weights the loss and gradients of each token; None: by 1
    # Computes a chunk of an unsharded head, compiled; None: `compute_chunk` does.
    function: ChunkFunction | None = None

    def choose_tokens(self, product: HeadProduct) -> int:
        """Chooses the most tokens in a chunk.

        If the head is sharded, all ranks choose alike, by the largest number of rows on any rank:
        they communicate in every chunk.
        """
        if self.tokens is not None:
            return self.tokens
        shard = product.shard
        if shard is None:
            rows = len(product.weight)
        else:
            rows = ceil_div(shard.rows, shard.group.size())
        device_type = product.hidden.device.type
        return loss_chunk_tokens(rows, device_type, trains_head=self.trains_head)


PLAIN = ChunkOptions()


class Computed(NamedTuple):
    """The results of `compute_in_chunks`."""

    loss: Tensor  # fp32 scalar: minus the sum of the labels' log-probabilities, times any `weigh`
    # fp32[tokens], of the labels, smoothed by `label_smoothing`; 0 where the label is IGNORE_INDEX
    log_probabilities: Tensor
    gradients: Gradients  # of the loss; with `token_weights`, of the loss weighted by these


def compute_in_chunks(
    product: HeadProduct,
    labels: Tensor,
    chunks: ChunkOptions,
    needs_grad: tuple[bool, ...],
    token_weights: Tensor | None = None,
) -> Computed:
    """Computes the log-probabilities of `labels`, the loss, and the gradients that are needed.

    All ranks of a shard's group call it together.

    Args:
        product: In the dtype in which the products run.
        labels: int64[tokens], or IGNORE_INDEX.
        chunks: How the loss is computed.
        needs_grad: Which of the `Gradients` are computed.
        token_weights: fp32[tokens]: each token's gradient, but not its loss, is multiplied by its
            weight. None: by 1.
    """
    hidden = product.hidden
    wide = widen(hidden.dtype)
    shard = product.shard
    function = chunks.function
    # The bias's gradient sums the scores' gradients over tokens, so these must not be rounded.
    _, _, bias_needs_grad, _ = needs_grad
    grad_dtype = None
    if any(needs_grad):
        grad_dtype = wide if bias_needs_grad else hidden.dtype
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    log_probabilities = torch.empty(len(hidden), dtype=wide, device=hidden.device)

    def add_chunk(scores: Tensor, chunk: slice) -> Tensor | None:
        """Adds a chunk to the results, and returns the gradient to its scores.

        The labels' log-probabilities are smoothed already, so the loss is minus their sum.
        """
        nonlocal loss
        entropy_factors = None
        if chunks.weigh is not None:  # before the scores are overwritten
            entropy_factors = chunks.weigh.find_entropy_factors(scores, chunks.logits)
        arguments = (
            scores,
            labels[chunk],
            None if token_weights is None else token_weights[chunk],
            chunks.logits,
            chunks.label_smoothing,
            grad_dtype,
        )
        # The compiler would make another graph for a chunk of one token, as the last one may be.
        if function is None or shard is not None or len(scores) == 1:
            label_log_probs, grad_scores = compute_chunk(*arguments, shard)
        else:
            label_log_probs, grad_scores = function(*arguments)
        log_probabilities[chunk] = label_log_probs
        weighted_log_probs = label_log_probs
        if chunks.weigh is not None:
            factors = chunks.weigh.choose_factors(entropy_factors, label_log_probs)
            weighted_log_probs = label_log_probs * factors
            if grad_scores is not None:
                grad_scores *= factors.unsqueeze(1)
        loss -= weighted_log_probs.sum()
        return grad_scores

    gradients = backward_in_chunks(product, add_chunk, chunks.choose_tokens(product), needs_grad)
    grad_hidden, *_ = gradients
    if shard is not None and grad_hidden is not None:
        # Each rank has only what its own rows of the head add to this gradient.
        dist.all_reduce(grad_hidden, group=shard.group)
    return Computed(loss, log_probabilities, gradients)


def backward_in_chunks(
    product: HeadProduct,
    compute_chunk: Callable[[Tensor, slice], Tensor | None],
    chunk_tokens: int,
    needs_grad: tuple[bool, ...],
) -> Gradients:
    """Runs the head's forward and backward chunk by chunk, and returns the gradients.

    Args:
        product: In the dtype in which the products run.
        compute_chunk: Takes a chunk's scores [tokens of the chunk, vocabulary] and its slice of the
            tokens, and returns the gradient to these scores, or None. The gradient is in fp32 or
            wider if the bias needs one.
        chunk_tokens: The most tokens in a chunk.
        needs_grad: Which of the `Gradients` are computed.
    """
    hidden, weight, bias, adapter_b, _shard = product
    hidden_needs_grad, weight_needs_grad, bias_needs_grad, b_needs_grad = needs_grad
    wide = widen(weight.dtype)
    width = weight.shape[1]  # the columns of `hidden` behind it are multiplied by the adapter's B
    grad_hidden = torch.empty_like(hidden) if hidden_needs_grad else None
    grad_weight = None
    if weight_needs_grad:
        grad_weight = torch.zeros_like(weight, dtype=wide)
    grad_bias = None
    if bias_needs_grad and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=wide)
    grad_b = None
    if b_needs_grad and adapter_b is not None:
        grad_b = torch.zeros_like(adapter_b, dtype=wide)
    chunk_tokens = _balance_chunks(len(hidden), chunk_tokens)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        scores = product.at(chunk).scores()
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
        del scores, grad_scores  # else they would live until those of the next chunk exist
    return grad_hidden, grad_weight, grad_bias, grad_b


class HeadLoss(torch.autograd.Function):
    """A loss of the head's scores whose gradients are computed in the forward.

    So no logits are kept for the backward, which only scales the gradients (as Liger does: Hsu et
    al. 2024, arXiv:2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter_b: Tensor | None,
        shard: VocabularyShard | None,
        positions: Tensor | None,
        compute: Callable[[HeadProduct], tuple[Tensor, Gradients]],
    ) -> Tensor:
        """Computes the loss, and its gradients for the backward.

        Args:
            hidden, weight, bias, adapter_b, shard: Those of a `HeadProduct`.
            positions: int64[trained positions], the tokens that have a loss; None: all tokens.
            compute: Takes the product at `positions` in the dtype in which products run. Returns
                (the loss, its gradients); in place of the loss it may return several sums,
                the loss first.
        """
        dtype = product_dtype(weight)
        inputs = hidden, weight, bias, adapter_b
        product = HeadProduct(*inputs, shard)
        with torch.autocast(hidden.device.type, enabled=False):
            if positions is not None:
                product = product.at(positions)
            product = product.to(dtype)  # frees the copy in the wider dtype
            sums, (grad_hidden, *other_gradients) = compute(product)
        if positions is not None and grad_hidden is not None:
            grad_hidden = scatter_rows(grad_hidden, positions, hidden.shape)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.gradients = [grad_hidden, *other_gradients]
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs
        if upstream.dim() != 0:  # of several sums only the first, the loss, has gradients
            upstream = upstream[0]
        gradients = ctx.gradients
        ctx.gradients = None  # frees them now: the graph may live until the next forward
        # `upstream` holds the factor 1 / trained tokens. Rounded to bf16 it would be wrong by up to
        # 0.4%, and all gradients with it, so the product runs in fp32.
        scaled = (
            None if gradient is None else gradient.to(upstream.dtype).mul_(upstream).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None)


def widen(dtype: torch.dtype) -> torch.dtype:
    """fp32, or `dtype` if it is wider: the dtype of a softmax and of a loss's sums."""
    return torch.promote_types(dtype, torch.float32)


def scatter_rows(rows: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """Makes a tensor of `shape` with `rows` at `positions` (dimension 0), and zeros elsewhere."""
    return torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_copy_(0, positions, rows)


def _balance_chunks(tokens: int, chunk_tokens: int) -> int:
    """Lowers `chunk_tokens` so that the last chunk is not much smaller than the others.

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
    """Computes a chunk's smoothed log-probabilities of labels, and the gradient of minus their sum.

    May overwrite `scores`. All ranks of a shard's group call it together.

    Args:
        scores: [tokens, rows of the head on this rank].
        labels: int64[tokens], or IGNORE_INDEX.
        token_weights: fp32[tokens]: each token's gradient is multiplied by its weight. None: by 1.
        grad_dtype: The dtype of the gradient, which is computed in fp32 or wider. None: no gradient
            is computed.

    Returns:
        (log-probabilities [tokens], fp32 or wider, 0 without a label; the gradient to `scores`).
    """
    transformed, capped = logits.forward(scores)
    if shard is None:
        log_probabilities = torch.log_softmax(transformed, -1, dtype=widen(scores.dtype))
        label_log_probs = label_log_probabilities(log_probabilities, labels, label_smoothing)
    else:
        wide = transformed.to(widen(scores.dtype))
        log_probabilities, label_log_probs = shard.log_softmax(wide, labels, label_smoothing)
    del transformed  # may be as large as the gradient that is made now
    trained = labels != IGNORE_INDEX
    label_log_probs = torch.where(trained, label_log_probs, 0.0)
    if grad_dtype is None:
        return label_log_probs, None
    if shard is None:
        compute_gradient = cross_entropy_gradient
    else:
        compute_gradient = shard.gradient
    grad = logits.backward(compute_gradient(log_probabilities, labels, label_smoothing), capped)
    grad.masked_fill_(~trained.unsqueeze(1), 0.0)
    if token_weights is not None:
        grad *= token_weights.unsqueeze(1)
    return label_log_probs, grad.to(grad_dtype)


def label_log_probabilities(
    log_probabilities: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """Picks the log-probability of each label, [tokens], smoothed by `label_smoothing`.

    A token without a label (IGNORE_INDEX) gets an arbitrary value.

    Args:
        log_probabilities: [tokens, vocabulary].
    """
    # IGNORE_INDEX, which is negative, becomes id 0.
    label_log_probs = log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    if label_smoothing:
        return label_log_probs.lerp(log_probabilities.mean(1), label_smoothing)
    return label_log_probs


def cross_entropy_gradient(
    log_probabilities: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """Computes the gradient of minus `label_log_probabilities` to the logits [tokens, vocabulary].

    Overwrites `log_probabilities`. A token without a label gets an arbitrary gradient.
    """
    grad = log_probabilities.exp_()
    ids = labels.clamp(min=0).unsqueeze(1)
    grad.scatter_add_(1, ids, torch.full_like(ids, label_smoothing - 1, dtype=grad.dtype))
    if label_smoothing:
        grad -= label_smoothing / grad.shape[1]
    return grad


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which is fp32 or wider, also if the factors are narrower."""
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
    """Whether torch's CUDA addmm adds a product of bf16 matrices to an fp32 matrix.

    Older versions of torch refuse.
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
    """Computes the same as `compute_chunk` in a form that torch.compile fuses into one kernel."""
    transformed, capped = logits.forward(scores)
    transformed = transformed.to(widen(scores.dtype))
    normalizer = torch.logsumexp(transformed, -1)
    trained = (labels != IGNORE_INDEX).unsqueeze(1)
    ids = labels.clamp(min=0).unsqueeze(1)
    label_log_probs = transformed.gather(1, ids).squeeze(1) - normalizer
    if label_smoothing:
        label_log_probs = label_log_probs.lerp(transformed.mean(1) - normalizer, label_smoothing)
    label_log_probs = torch.where(trained.squeeze(1), label_log_probs, 0.0)
    if grad_dtype is None:
        return label_log_probs, None
    is_label = torch.arange(scores.shape[1], device=scores.device) == ids
    probabilities = (transformed - normalizer.unsqueeze(1)).exp()
    grad = probabilities - (1 - label_smoothing) * is_label.to(probabilities.dtype)
    if label_smoothing:
        grad = grad - label_smoothing / scores.shape[1]
    grad = torch.where(trained, logits.backward(grad, capped), 0.0)
    if token_weights is not None:
        grad = grad * token_weights.unsqueeze(1)
    return label_log_probs, grad.to(grad_dtype)
