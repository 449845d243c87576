"""Log-probabilities of labels and divergences from a teacher, token by token, of a linear head in
chunks.

The gradient to a token's hidden state is that of its log-probability times one number, which the
backward brings: it is prepared in the forward, as by `models/cross_entropy.py`. The weight's is a
sum over tokens with those numbers; where the head is trained, the backward computes the chunks a
second time for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finetune.constants import IGNORE_INDEX, divergence_chunk_tokens
from finetune.distributed.model_parts import product_dtype
from finetune.models.cross_entropy import HeadFunction, LossHead
from finetune.models.loss_chunks import (
    PLAIN,
    UNCHANGED,
    ChunkOptions,
    Gradients,
    HeadLoss,
    HeadProduct,
    LogitTransform,
    backward_in_chunks,
    choose_chunk_tokens,
    compute_in_chunks,
    cross_entropy_gradient,
    label_log_probabilities,
    multiply_by_head,
    scatter_rows,
    widen,
)


def head_log_probabilities(
    head: LossHead,
    hidden: Tensor,
    labels: Tensor,
    trained_positions: Tensor | None,
    temperature: float = 1.0,
) -> Tensor:
    """A `HeadFunction`: `model(..., head_function=head_log_probabilities)` returns fp32[trained
    positions].

    `temperature`: what the logits are divided by.
    """
    if trained_positions is None:
        trained_positions = torch.arange(len(labels), device=labels.device)
    product = head.prepare(hidden)
    chunks = ChunkOptions(
        head.logits._replace(temperature=temperature),
        trains_head=head.is_trained,
        shard=product.shard,
        function=head.chunk_function,
    )
    return linear_log_probabilities(product, labels, trained_positions, chunks)


def linear_log_probabilities(
    product: HeadProduct, labels: Tensor, trained_positions: Tensor, chunks: ChunkOptions = PLAIN
) -> Tensor:
    """log softmax(hidden @ weight.T + bias)[label] at each trained position.

    Args:
        product: of [tokens, hidden]. The weight's gradient is accumulated in fp32, and not computed
            where it is frozen.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        trained_positions: int64[positions], which no index comes in twice; one without a label gets
            0 and no gradient.
        chunks: without label smoothing.
    Returns:
        fp32[positions]. Under autocast the products run in its type, the softmax always in fp32.
    """
    given = labels, trained_positions, chunks, product.needs_grad()
    log_probabilities: Tensor = _LinearLogProbabilities.apply(*product[:4], *given)  # type: ignore[no-untyped-call]
    return log_probabilities


class _LinearLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter_b: Tensor | None,
        labels: Tensor,
        positions: Tensor,
        chunks: ChunkOptions,
        needs_grad: tuple[bool, ...],
    ) -> Tensor:
        dtype = product_dtype(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = hidden[positions].to(dtype)
            ids = labels[positions]
            given = (
                trained,
                weight.to(dtype),
                bias,
                ids,
                chunks,
                (needs_grad[0], False, False, False),
            )
            own_b = None if adapter_b is None else adapter_b.to(dtype)
            computed = compute_in_chunks(*given, adapter_b=own_b)
        # Parameters are saved by autograd itself, so that FSDP has gathered them again when the
        # backward reads them.
        recomputes = any(needs_grad[1:])
        recomputed_from = (weight, bias, adapter_b, trained) if recomputes else (None,) * 4
        ctx.save_for_backward(*recomputed_from, ids, positions)
        ctx.grad_hidden = computed.gradients[0]
        ctx.options = (dtype, hidden.shape, hidden.dtype, chunks, needs_grad)
        return computed.log_probabilities

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs  # fp32[positions]
        weight, bias, adapter_b, trained, ids, positions = ctx.saved_tensors
        dtype, shape, hidden_dtype, chunks, needs_grad = ctx.options
        prepared = ctx.grad_hidden
        ctx.grad_hidden = None
        grad_hidden = None
        others: list[Tensor | None] = [None, None, None]
        if prepared is not None:  # of minus the log-probability, per token; scaled in fp32
            scaled = (prepared.to(upstream.dtype) * -upstream[:, None]).to(hidden_dtype)
            grad_hidden = scatter_rows(scaled, positions, shape)
        if trained is not None:
            with torch.autocast(upstream.device.type, enabled=False):
                needed = (False, *needs_grad[1:])
                given = trained, weight.to(dtype), bias, ids, chunks, needed, -upstream
                own_b = None if adapter_b is None else adapter_b.to(dtype)
                computed = compute_in_chunks(*given, own_b)
            others = [
                None if gradient is None else gradient.to(parameter.dtype)
                for gradient, parameter in zip(
                    computed.gradients[1:], (weight, bias, adapter_b), strict=True
                )
            ]
        return grad_hidden, *others, None, None, None, None


def choose_label_head(targets: Tensor | None) -> HeadFunction:
    """`head_log_probabilities`, or that of several targets for each position.

    targets: Of a micro-batch: int64[trained positions, targets], or IGNORE_INDEX; None: its labels.
    """
    if targets is None:
        return head_log_probabilities
    ids = targets

    def score(head: LossHead, hidden: Tensor, _labels: Tensor, positions: Tensor | None) -> Tensor:
        product = head.prepare(hidden)
        assert product.shard is None and positions is not None
        at_positions = product._replace(hidden=product.hidden[positions])
        return target_log_probabilities(at_positions, ids, ChunkOptions(head.logits))

    return score


def target_log_probabilities(
    product: HeadProduct, targets: Tensor, chunks: ChunkOptions = PLAIN
) -> Tensor:
    """log softmax(hidden @ weight.T + bias) of several ids at each position.

    The backward computes each chunk's logits a second time: its gradient is one of all targets, and
    cannot be prepared in the forward.

    Args:
        product: of [positions, hidden].
        targets: int64[positions, targets]; IGNORE_INDEX gets 0 and no gradient.
        chunks: without label smoothing, of a whole vocabulary.
    Returns:
        fp32[positions, targets]. Under autocast the products run in its type.
    """
    device = product.hidden.device.type
    dtype = product_dtype(product.weight)
    hidden, weight, bias, adapter_b = product.to(dtype)

    def score(states: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            scores = multiply_by_head(states, weight, bias, adapter_b)
            transformed, _ = chunks.logits.forward(scores)
            every = _log_softmax(transformed, 1.0)
        return every.gather(1, ids.clamp(min=0)).masked_fill(ids == IGNORE_INDEX, 0.0)

    trains_head = product.weight.requires_grad
    size = chunks.tokens or choose_chunk_tokens(
        product.weight, None, device, trains_head=trains_head
    )
    pairs = zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    parts = [
        checkpoint(score, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
    ]
    return torch.cat(parts)


def head_top(k: int) -> HeadFunction:
    """A head function: fp32[trained positions, k, 2], each position's likeliest ids beside their
    log-probabilities, the likeliest first. In fp32 an id below 2**24 is exact.
    """

    def find(head: LossHead, hidden: Tensor, _labels: Tensor, positions: Tensor | None) -> Tensor:
        product = head.prepare(hidden)
        assert product.shard is None and positions is not None
        at_positions = product._replace(hidden=product.hidden[positions])
        states, weight, bias, adapter_b = at_positions.to(product_dtype(product.weight))
        scores = TeacherScores(states, weight, bias, head.logits, adapter_b)
        ids, values = find_top(scores, len(weight), k, 1.0)
        return torch.stack((ids.float(), values[:, :-1]), -1)

    return find


class DivergenceOptions(NamedTuple):
    """The recipe's keys for what a student learns: alpha D + (1 - alpha) cross entropy."""

    beta: float
    temperature: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The head of a teacher, and the head's inputs, from which its scores are computed."""

    hidden: Tensor  # [trained tokens, the teacher's hidden]
    weight: Tensor  # [rows of the teacher's vocabulary, its hidden], in hidden's type
    bias: Tensor | None = None
    logits: LogitTransform = UNCHANGED
    adapter_b: Tensor | None = None

    @property
    def rows(self) -> int:
        """The rows of the vocabulary."""
        return len(self.weight)

    def beside(self, student: Tensor, chunk: slice, temperature: float) -> Tensor:
        """The teacher's log-probabilities of the chunk, over as many ids as those [tokens, ids] of
        the student.
        """
        return self.log_probabilities(chunk, student.shape[1], temperature)

    def log_probabilities(self, chunk: slice, rows: int, temperature: float) -> Tensor:
        """[tokens of the chunk, rows], fp32 or wider: over the first `rows` of the vocabulary."""
        parts = (self.weight, self.bias, self.adapter_b)
        own = (None if part is None else part[:rows] for part in parts)
        scores = multiply_by_head(self.hidden[chunk], *own)  # type: ignore[arg-type]
        logits, _ = self.logits.forward(scores)
        return _log_softmax(logits, temperature)


@dataclass(frozen=True, slots=True)
class TopScores:
    """A teacher's log-probabilities of its likeliest tokens, and of all others together."""

    ids: Tensor  # int64[trained tokens, k]
    scores: Tensor  # fp32[trained tokens, k + 1]: theirs, then the others'
    rows: int  # of the vocabulary over which they were computed

    def beside(self, student: Tensor, chunk: slice, temperature: float) -> Tensor:
        """[tokens of the chunk, rows]: the others share their probability as the student shares it
        among them.

        So the divergence is that of k + 1 outcomes, gradient included. It is at most the whole
        divergence, and equals it where k is the size of the vocabulary.
        """
        ids = self.ids[chunk]
        others = student.scatter(1, ids, -torch.inf).logsumexp(1)
        teacher = student + (self.scores[chunk, -1] - others)[:, None]
        return teacher.scatter_(1, ids, self.scores[chunk, :-1])


def find_top(scores: TeacherScores, rows: int, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """`ids` and `scores` of `TopScores`, chunk by chunk."""
    size = divergence_chunk_tokens(scores.rows, scores.hidden.device.type)
    chunks = []
    for start in range(0, max(1, len(scores.hidden)), size):
        each = scores.log_probabilities(slice(start, start + size), rows, temperature)
        top, ids = each.topk(min(k, rows), 1)
        others = each.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        chunks.append((ids, torch.cat((top, others), 1).float()))
    return torch.cat([ids for ids, _ in chunks]), torch.cat([values for _, values in chunks])


def head_divergence(teacher: TeacherScores | TopScores, options: DivergenceOptions) -> HeadFunction:
    """A head function of a student: the three sums of `linear_divergence`."""

    def diverge(head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        product = head.prepare(hidden)
        return linear_divergence(
            product,
            labels,
            teacher,
            options,
            head.chunk_options(product),
            trained_positions=positions,
        )

    return diverge


def linear_divergence(
    product: HeadProduct,
    labels: Tensor,
    teacher: TeacherScores | TopScores,
    options: DivergenceOptions,
    chunks: ChunkOptions = PLAIN,
    *,
    trained_positions: Tensor | None = None,
) -> Tensor:
    """The sums over trained tokens of mixed loss, divergence and cross entropy; see
    `linear_cross_entropy`.

    The divergence is over the ids that both vocabularies have rows for: some models have more rows
    than tokens.

    Args:
        product: of the student's [tokens, hidden].
        teacher: its `hidden` is at `trained_positions`, or at all tokens where those are None.
    Returns:
        fp32[3]. The first has gradients to hidden, weight and bias, the others are for the log.
    """
    vocabulary = len(product.weight)
    rows = min(vocabulary, teacher.rows)
    tokens = chunks.tokens or divergence_chunk_tokens(
        max(vocabulary, teacher.rows), product.hidden.device.type
    )
    needs_grad = product.needs_grad()
    if trained_positions is None:
        ids = labels
    else:
        ids = labels[trained_positions]

    def compute(
        trained: Tensor, weight: Tensor, adapter_b: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        sums = torch.zeros(3, dtype=widen(weight.dtype), device=weight.device)

        def compute_chunk(scores: Tensor, chunk: slice) -> Tensor | None:
            of_teacher = partial(teacher.beside, chunk=chunk, temperature=options.temperature)
            transformed, capped = chunks.logits.forward(scores)
            chunk_sums, grad = _compute_chunk(
                transformed, of_teacher, rows, ids[chunk], options, chunks, any(needs_grad)
            )
            sums.add_(chunk_sums)
            if grad is None:
                return None
            return chunks.logits.backward(grad, capped)

        tensors = trained, weight, product.bias, adapter_b
        return sums, backward_in_chunks(*tensors, compute_chunk, tokens, needs_grad)

    sums: Tensor = HeadLoss.apply(*product[:4], trained_positions, needs_grad, compute)  # type: ignore[no-untyped-call]
    return sums


def _compute_chunk(
    logits: Tensor,
    of_teacher: Callable[[Tensor], Tensor],
    rows: int,
    labels: Tensor,
    options: DivergenceOptions,
    chunks: ChunkOptions,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns (the three sums, the gradient of the loss to the student's logits [tokens,
    vocabulary]) of one chunk.

    of_teacher: its log-probabilities [tokens, rows] beside the student's, over the `rows` that both
    have.
    """
    beta, temperature, alpha = options
    trained = labels != IGNORE_INDEX
    plain = torch.log_softmax(logits, -1, dtype=widen(logits.dtype))
    is_plain = temperature == 1.0 and rows == logits.shape[1]
    if is_plain:
        student = plain
    else:
        student = _log_softmax(logits[:, :rows], temperature)
    divergence, grad_divergence = measure_divergence(student, of_teacher(student), beta, gradient)
    cross_entropy = -label_log_probabilities(plain, labels, chunks.label_smoothing)
    by_token = torch.ones_like(cross_entropy)
    if chunks.weigh is not None:
        by_token = chunks.weigh.choose(chunks.weigh.of_logits(logits), -cross_entropy)
    by_token_sums = torch.stack([divergence, cross_entropy * by_token])
    divergence_sum, cross_entropy_sum = torch.where(trained, by_token_sums, 0.0).sum(1)
    loss = alpha * divergence_sum + (1 - alpha) * cross_entropy_sum
    sums = torch.stack([loss, divergence_sum, cross_entropy_sum])
    if grad_divergence is None:
        return sums, None
    grad_divergence *= alpha / temperature
    if alpha < 1:
        grad = cross_entropy_gradient(plain, labels, chunks.label_smoothing)
        grad *= ((1 - alpha) * by_token).unsqueeze(1)
        grad[:, :rows] += grad_divergence
    elif rows == logits.shape[1]:
        grad = grad_divergence
    else:
        grad = F.pad(grad_divergence, (0, logits.shape[1] - rows))
    return sums, grad.masked_fill_(~trained.unsqueeze(1), 0.0)


def measure_divergence(
    student: Tensor, teacher: Tensor, beta: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The divergence of each token, and its gradient to the student's logits.

    Args:
        student, teacher: log-probabilities [tokens, vocabulary].
        beta: 0 for the forward KL, 1 for the reverse, between them for the generalized
            Jensen-Shannon divergence.
    Returns:
        ([tokens], [tokens, vocabulary] or None).
    """
    # In place where it can be: the chunk's logits are the largest tensors of a step.
    if beta == 0:
        probabilities = teacher.exp()
        divergence = (teacher - student).mul_(probabilities).sum(1)
        return divergence, student.exp().sub_(probabilities) if gradient else None
    share = 1.0
    divergence = torch.zeros_like(student[:, 0])
    if beta == 1:
        excess = student - teacher
    else:
        share = 1 - beta
        mixed = student + math.log1p(-beta)
        torch.logaddexp(mixed, teacher + math.log(beta), out=mixed)
        divergence = beta * (teacher - mixed).mul_(teacher.exp()).sum(1)
        excess = mixed.neg_().add_(student)
    probabilities = student.exp()
    of_student = (probabilities * excess).sum(1, keepdim=True)
    divergence = divergence + share * of_student.squeeze(1)
    return divergence, excess.sub_(of_student).mul_(probabilities).mul_(share) if gradient else None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Computes the log-probabilities in fp32 or wider."""
    wide = widen(logits.dtype)
    return torch.log_softmax(
        logits if temperature == 1.0 else logits.to(wide) / temperature, -1, dtype=wide
    )
