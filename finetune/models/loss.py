"""The loss: cross entropy of a linear head in chunks of tokens, so that the logits [tokens, vocabulary] are never whole.

Per chunk the forward computes the loss and, where needed, its gradients at once (as Liger does: Hsu et al.
2024, arXiv:2410.10989), so that the backward keeps no logits and multiplies nothing again.
"""

import functools
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.constants import IGNORE_INDEX, loss_chunk_tokens
from finetune.errors import UserError


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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logits: LogitTransform = UNCHANGED,
    trained_positions: Tensor | None = None,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum over the trained tokens of -log softmax(hidden @ weight.T + bias)[label].

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden]; its gradient is accumulated in fp32, and not computed where it is frozen.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        bias: [vocabulary] or None.
        trained_positions: int64[trained tokens], where `labels` is not IGNORE_INDEX, and perhaps others, which add nothing;
            only these are multiplied by the head. By default they are
            looked up on a CPU, and all positions are multiplied on a GPU, where the look-up would synchronize.
        chunk_tokens: tokens in a chunk; by default those of `constants.loss_chunk_tokens`.
        label_smoothing: the weight of the mean over the vocabulary beside the label's own, as in torch's cross_entropy
            (Szegedy et al. 2016, section 7).
    Returns:
        fp32 scalar. Under autocast the products run in its type, the softmax always in fp32.
    """
    if trained_positions is None and labels.device.type == "cpu":
        trained_positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    if chunk_tokens is None:
        chunk_tokens = loss_chunk_tokens(weight.shape[0], hidden.device.type)
    gradients = torch.is_grad_enabled()
    needs_grad = tuple(gradients and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    arguments = (hidden, weight, bias, labels, trained_positions, logits, label_smoothing, chunk_tokens, needs_grad)
    loss: Tensor = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        positions: Tensor | None,
        logits: LogitTransform,
        label_smoothing: float,
        chunk_tokens: int,
        needs_grad: tuple[bool, bool, bool],
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            trained, ids = (hidden, labels) if positions is None else (hidden[positions], labels[positions])
            loss, *gradients = _compute_in_chunks(
                trained.to(dtype),
                weight.to(dtype),
                bias,
                ids,
                logits,
                label_smoothing,
                _balance_chunks(len(ids), chunk_tokens),
                needs_grad,
            )
        if positions is not None and gradients[0] is not None:
            whole = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            gradients[0] = whole.index_copy_(0, positions, gradients[0])
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs
        gradients, ctx.gradients = ctx.gradients, None  # the graph may live on until the next forward; these need not
        # In fp32: 1 / trained tokens, rounded to bf16, would be wrong by up to 0.4%, the same way everywhere.
        scaled = (
            None if g is None else g.to(upstream.dtype).mul_(upstream).to(t)
            for g, t in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None, None)


def _balance_chunks(tokens: int, chunk_tokens: int) -> int:
    """At most `chunk_tokens`, such that the last chunk is not much smaller than the others.

    >>> _balance_chunks(tokens=1000, chunk_tokens=900)
    500
    """
    chunks = max(-(-tokens // chunk_tokens), 1)
    return max(-(-tokens // chunks), 1)


def _compute_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    logits: LogitTransform,
    label_smoothing: float,
    chunk_tokens: int,
    needs_grad: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The summed loss and its gradients to hidden (in hidden's type), weight and bias (in fp32), where needed."""
    to_hidden, to_weight, to_bias = needs_grad
    wide = torch.promote_types(weight.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if to_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if to_bias and bias is not None else None
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        scores = F.linear(hidden[chunk], weight, None if bias is None else bias.to(weight.dtype))
        chunk_loss, grad_scores = _compute_chunk(scores, labels[chunk], logits, label_smoothing, any(needs_grad))
        loss += chunk_loss
        if grad_scores is not None:
            if grad_bias is not None:
                grad_bias += grad_scores.sum(0)
            grad_scores = grad_scores.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_scores, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_scores.t(), hidden[chunk])
        del scores, grad_scores  # else they live until the next chunk's are there
    return loss, grad_hidden, grad_weight, grad_bias


def _compute_chunk(
    scores: Tensor, labels: Tensor, logits: LogitTransform, label_smoothing: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed cross entropy of one chunk, and its gradient to `scores` [tokens, vocabulary], both in fp32 (or wider)."""
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
    loss = -torch.where(trained, agreement, 0.0).sum()
    if not gradient:
        return loss, None
    grad = log_probabilities.exp_()
    grad.scatter_add_(1, chosen, torch.full_like(chosen, label_smoothing - 1, dtype=grad.dtype))
    if label_smoothing:
        grad -= label_smoothing / grad.shape[1]
    if bend is not None:
        grad *= 1 - bend.square()
    if logits.scale != 1.0:
        grad *= logits.scale
    return loss, grad.masked_fill_(~trained.unsqueeze(1), 0.0)


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


class CrossEntropyHead(nn.Linear):
    """A model's own output head that, given labels, returns the summed loss instead of logits.

    The loss is computed inside this module's forward, so that FSDP gathers the weight for it, once.
    """

    logits: LogitTransform
    label_smoothing: float  # while training

    def forward(self, hidden: Tensor, labels: Tensor | None = None, trained_positions: Tensor | None = None) -> Tensor:
        """hidden [..., hidden] -> logits [..., vocabulary]; with labels [...], the summed loss (fp32 scalar)."""
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            self.weight,
            labels.flatten(),
            bias=self.bias,
            logits=self.logits,
            trained_positions=trained_positions,
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )


def install_loss(model: Any, label_smoothing: float = 0.0) -> None:
    """Makes `model(..., labels=labels)` return the summed loss over the trained tokens, an fp32 scalar.

    Labels are shifted already: labels[i] is the id to predict at position i. `trained_positions` (int64[trained tokens],
    into the flattened labels) may come with them, and `token_mask`, which the routing of experts reads. Without labels the model returns logits as before. Call it before sharding.
    Raises `UserError` where the output head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"{type(model).__name__}: its output head is a {type(head).__name__}, not a plain linear layer, and cannot be "
            "trained here; name another model"
        )
    head.__class__ = CrossEntropyHead
    head.logits = LogitTransform.from_config(model.config)  # type: ignore[assignment]
    head.label_smoothing = label_smoothing  # type: ignore[assignment]
    plain = type(model).forward

    @functools.wraps(plain)  # generation reads the signature
    def forward(
        self: Any,
        *args: Any,
        labels: Tensor | None = None,
        trained_positions: Tensor | None = None,
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return plain(self, *args, **kwargs)
        trunk = getattr(self, self.base_model_prefix)
        hidden = trunk(*args, **kwargs | {"use_cache": False}).last_hidden_state
        return self.get_output_embeddings()(hidden, labels, trained_positions)

    # On the instance, not the class: FSDP's hooks run around this forward, and would be skipped by calling the trunk.
    model.forward = MethodType(forward, model)
