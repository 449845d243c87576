"""A linear head in chunks of tokens: the labels' log-probabilities and their gradients, never the logits of all tokens at once."""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import IGNORE_INDEX


class LogitTransform(NamedTuple):
    """What a model does to its head's output before the softmax: softcap * tanh(scale * logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> "LogitTransform":
        """From a transformers config: Granite divides; HyperCLOVA X, Cohere and Falcon H1 multiply; Gemma 2 and xLSTM cap."""
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
        scaling = getattr(text, "logits_scaling", None) or 1.0  # one key, two meanings
        scale *= scaling if text.model_type.startswith("hyperclovax") else 1 / scaling
        softcap = getattr(text, "final_logit_softcapping", None) or getattr(text, "output_logit_soft_cap", None)
        return cls(scale, softcap)

    def apply(self, scores: Tensor) -> Tensor:
        """The logits that the softmax takes, from the head's output [..., vocabulary] in fp32."""
        scaled = scores * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


UNCHANGED = LogitTransform()


class Computed(NamedTuple):
    """What `compute_in_chunks` returns; the gradients are those of the loss, None where not asked for."""

    loss: Tensor  # fp32 scalar: minus the sum of the log-probabilities
    log_probabilities: Tensor  # fp32[tokens]; 0 where the label is IGNORE_INDEX
    grad_hidden: Tensor | None  # [tokens, hidden], in hidden's type
    grad_weight: Tensor | None  # fp32[vocabulary, hidden]
    grad_bias: Tensor | None  # fp32[vocabulary]


def compute_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    logits: LogitTransform,
    label_smoothing: float,
    chunk_tokens: int,
    needs_grad: tuple[bool, ...],
    token_weights: Tensor | None = None,
) -> Computed:
    """The log-probabilities of `labels`, and the loss with its gradients to hidden, weight and bias, where needed.

    Args:
        hidden: [tokens, hidden], in the type in which the products run, as weight.
        labels: int64[tokens], or IGNORE_INDEX.
        label_smoothing: of the log-probabilities, the share that is the mean over the vocabulary.
        chunk_tokens: tokens in a chunk, at most.
        token_weights: fp32[tokens], by which the gradients (not the loss) weigh each token; None: all alike.
    """
    to_hidden, to_weight, to_bias = needs_grad
    wide = torch.promote_types(weight.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    log_probabilities = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if to_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if to_bias and bias is not None else None
    chunk_tokens = _balance_chunks(len(hidden), chunk_tokens)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        scores = F.linear(hidden[chunk], weight, None if bias is None else bias.to(weight.dtype))
        log_probabilities[chunk], grad_scores = _compute_chunk(
            scores, labels[chunk], logits, label_smoothing, any(needs_grad)
        )
        loss -= log_probabilities[chunk].sum()
        if grad_scores is not None:
            if token_weights is not None:
                grad_scores *= token_weights[chunk, None]
            if grad_bias is not None:
                grad_bias += grad_scores.sum(0)
            grad_scores = grad_scores.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_scores, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_scores.t(), hidden[chunk])
        del scores, grad_scores  # else they live until the next chunk's are there
    return Computed(loss, log_probabilities, grad_hidden, grad_weight, grad_bias)


def product_dtype(weight: Tensor) -> torch.dtype:
    """In which the head's products run: autocast's, where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def find_needed_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the tensors need a gradient now."""
    return tuple(torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors)


def scatter_rows(rows: Tensor, positions: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of `shape` with `rows` at `positions` and zeros elsewhere."""
    return torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_copy_(0, positions, rows)


def _balance_chunks(tokens: int, chunk_tokens: int) -> int:
    """At most `chunk_tokens`, such that the last chunk is not much smaller than the others.

    >>> _balance_chunks(tokens=1000, chunk_tokens=900)
    500
    """
    chunks = max(-(-tokens // chunk_tokens), 1)
    return max(-(-tokens // chunks), 1)


def _compute_chunk(
    scores: Tensor, labels: Tensor, logits: LogitTransform, label_smoothing: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities of one chunk, and the gradient of minus their sum to `scores` [tokens, vocabulary]; both in fp32
    (or wider)."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if logits.scale != 1.0:
        scores = scores.to(wide) * logits.scale
    bend = None
    if logits.softcap is not None:
        bend = torch.tanh(scores.to(wide) / logits.softcap)
        scores = bend * logits.softcap
    log_probabilities = torch.log_softmax(scores, -1, dtype=wide)
    trained = labels != IGNORE_INDEX
    chosen = labels.clamp(min=0).unsqueeze(1)  # any id will do where the position is not trained
    agreement = log_probabilities.gather(1, chosen).squeeze(1)
    if label_smoothing:
        agreement = agreement.lerp(log_probabilities.mean(1), label_smoothing)
    agreement = torch.where(trained, agreement, 0.0)
    if not gradient:
        return agreement, None
    grad = log_probabilities.exp_()
    grad.scatter_add_(1, chosen, torch.full_like(chosen, label_smoothing - 1, dtype=grad.dtype))
    if label_smoothing:
        grad -= label_smoothing / grad.shape[1]
    if bend is not None:
        grad *= 1 - bend.square()
    if logits.scale != 1.0:
        grad *= logits.scale
    return agreement, grad.masked_fill_(~trained.unsqueeze(1), 0.0)


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
    """Whether this torch's CUDA kernel adds a product of bf16 matrices to an fp32 one; older ones refuse."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
    try:
        torch.addmm(one.float(), one, one, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True
