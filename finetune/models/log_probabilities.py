"""The log-probability of each label, and the divergence of each token from a teacher, by a linear
head in chunks of tokens.

The backward brings one number for each token. The gradient to the token's hidden state is this
number times the gradient of its log-probability, which the forward has prepared, as in
`models/cross_entropy.py`. The weight's gradient is a sum over tokens that needs all these numbers:
if the head is trained, the backward computes the chunks a second time for it.
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
from finetune.distributed.tensor_parallel import VocabularyShard
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
    compute_in_chunks,
    cross_entropy_gradient,
    label_log_probabilities,
    scatter_rows,
    widen,
)


def head_log_probabilities(
    head: LossHead,
    hidden: Tensor,
    labels: Tensor,
    trained_positions: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Computes the labels' log-probabilities at the trained positions.

    It is a `HeadFunction`, for `model(..., head_function=head_log_probabilities)`.

    Args:
        temperature: What the logits are divided by.

    Returns:
        fp32[trained positions].
    """
    product = head.prepare(hidden)
    chunks = ChunkOptions(
        head.logits._replace(temperature=temperature),
        trains_head=head.is_trained,
        function=head.chunk_function,
    )
    return linear_log_probabilities(product, labels, trained_positions, chunks)


def linear_log_probabilities(
    product: HeadProduct, labels: Tensor, trained_positions: Tensor, chunks: ChunkOptions = PLAIN
) -> Tensor:
    """Computes log softmax(hidden @ weight.T + bias)[label] at each trained position.

    Args:
        product: Of the head with [tokens, hidden]. The weight's gradient is accumulated in fp32; it
            is not computed for a frozen weight.
        labels: int64[tokens]: the id to predict at each position, not shifted; or IGNORE_INDEX.
        trained_positions: int64[positions], each index at most once. A position without a label
            gets 0 and no gradient.
        chunks: Without label smoothing.

    Returns:
        fp32[positions]. The products run in the dtype of autocast if it is on, the softmax always
        in fp32 or wider.
    """
    settings = labels, trained_positions, chunks, product.needs_grad()
    log_probabilities: Tensor = _LinearLogProbabilities.apply(*product, *settings)  # type: ignore[no-untyped-call]
    return log_probabilities


class _LinearLogProbabilities(torch.autograd.Function):
    """The operation of `linear_log_probabilities`.

    The forward computes the gradient to hidden; the backward computes the other gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter_b: Tensor | None,
        shard: VocabularyShard | None,
        labels: Tensor,
        positions: Tensor,
        chunks: ChunkOptions,
        needs_grad: tuple[bool, ...],
    ) -> Tensor:
        dtype = product_dtype(weight)
        hidden_needs_grad, *parameters_need_grad = needs_grad
        product = HeadProduct(hidden, weight, bias, adapter_b, shard)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = product.at(positions).to(dtype)
            ids = labels[positions]
            computed = compute_in_chunks(
                trained, ids, chunks, needs_grad=(hidden_needs_grad, False, False, False)
            )
        # The parameters are saved uncast by autograd, so that FSDP has gathered them again when the
        # backward reads them.
        if any(parameters_need_grad):
            ctx.save_for_backward(weight, bias, adapter_b, trained.hidden, ids, positions)
        else:
            ctx.save_for_backward(None, None, None, None, ids, positions)
        ctx.grad_hidden, *_ = computed.gradients
        ctx.options = (shard, dtype, hidden.shape, hidden.dtype, chunks, needs_grad)
        return computed.log_probabilities

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grad_outputs  # fp32[positions]
        weight, bias, adapter_b, trained_hidden, ids, positions = ctx.saved_tensors
        shard, dtype, shape, hidden_dtype, chunks, needs_grad = ctx.options
        prepared = ctx.grad_hidden
        ctx.grad_hidden = None
        grad_hidden = None
        parameter_gradients: list[Tensor | None] = [None, None, None]
        if prepared is not None:
            # It is the gradient of minus the log-probability, hence `-upstream`. Scaled in fp32.
            scaled = (prepared.to(upstream.dtype) * -upstream[:, None]).to(hidden_dtype)
            grad_hidden = scatter_rows(scaled, positions, shape)
        if trained_hidden is not None:
            _, *parameters_need_grad = needs_grad
            product = HeadProduct(trained_hidden, weight, bias, adapter_b, shard)
            with torch.autocast(upstream.device.type, enabled=False):
                computed = compute_in_chunks(
                    product.to(dtype),
                    ids,
                    chunks,
                    needs_grad=(False, *parameters_need_grad),
                    token_weights=-upstream,
                )
            _, *gradients = computed.gradients
            parameter_gradients = [
                None if gradient is None else gradient.to(parameter.dtype)
                for gradient, parameter in zip(gradients, (weight, bias, adapter_b), strict=True)
            ]
        return grad_hidden, *parameter_gradients, None, None, None, None, None


def choose_label_head(targets: Tensor | None) -> HeadFunction:
    """Makes a head function that computes log-probabilities of labels or of several targets.

    It returns fp32[trained positions], or fp32[trained positions, targets] with targets.

    Args:
        targets: A micro-batch's int64[trained positions, targets], with IGNORE_INDEX for none; None
            for its labels.
    """
    if targets is None:
        return head_log_probabilities
    ids = targets

    def score(head: LossHead, hidden: Tensor, _labels: Tensor, positions: Tensor) -> Tensor:
        product = head.prepare(hidden)
        assert product.shard is None
        return target_log_probabilities(product.at(positions), ids, ChunkOptions(head.logits))

    return score


def target_log_probabilities(
    product: HeadProduct, targets: Tensor, chunks: ChunkOptions = PLAIN
) -> Tensor:
    """Computes log softmax(hidden @ weight.T + bias) of several ids at each position.

    The backward computes each chunk's logits a second time. The gradient to a hidden state depends
    on the upstream gradient of every target, so the forward cannot prepare it.

    Args:
        product: Of the head with [positions, hidden]; not sharded.
        targets: int64[positions, targets]; IGNORE_INDEX gets 0 and no gradient.
        chunks: Without label smoothing.

    Returns:
        fp32[positions, targets]. The products run in the dtype of autocast if it is on.
    """
    device = product.hidden.device.type
    dtype = product_dtype(product.weight)
    cast = product.to(dtype)

    def score(states: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            scores = cast._replace(hidden=states).scores()
            transformed, _ = chunks.logits.forward(scores)
            log_probs = _log_softmax(transformed, temperature=1.0)
        return log_probs.gather(1, ids.clamp(min=0)).masked_fill(ids == IGNORE_INDEX, 0.0)

    chunk_tokens = chunks._replace(trains_head=product.weight.requires_grad).choose_tokens(product)
    pairs = zip(
        torch.split(cast.hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True
    )
    scored_chunks = [
        checkpoint(score, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
    ]
    return torch.cat(scored_chunks)


def head_top(k: int) -> HeadFunction:
    """Makes a head function that finds the k likeliest ids at each trained position.

    It returns fp32[trained positions, k, 2]: pairs of an id and its log-probability, the likeliest
    first. An id below 2**24 is exact in fp32.
    """

    def find(head: LossHead, hidden: Tensor, _labels: Tensor, positions: Tensor) -> Tensor:
        product = head.prepare(hidden)
        assert product.shard is None
        states, weight, bias, adapter_b, _ = product.at(positions).to(product_dtype(product.weight))
        scores = TeacherScores(states, weight, bias, head.logits, adapter_b)
        ids, log_probs = find_top(scores, len(weight), k, temperature=1.0)
        log_probs_of_ids = log_probs[:, :-1]  # the last column is that of all other ids together
        return torch.stack((ids.float(), log_probs_of_ids), -1)

    return find


class DivergenceOptions(NamedTuple):
    """The recipe's keys for a student's loss: alpha * divergence + (1 - alpha) * cross entropy."""

    beta: float  # which divergence; see `measure_divergence`
    temperature: float  # divides the logits of both models for the divergence
    alpha: float


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's head and the head's inputs, from which log-probabilities are computed in chunks.

    The tensors are as `HeadProduct` has them.
    """

    hidden: Tensor  # [trained tokens, the teacher's hidden]
    weight: Tensor  # [rows of the teacher's vocabulary, the teacher's hidden], in hidden's dtype
    bias: Tensor | None = None
    logits: LogitTransform = UNCHANGED
    adapter_b: Tensor | None = None

    @property
    def rows(self) -> int:
        """The rows of the teacher's vocabulary."""
        return len(self.weight)

    def beside(self, student: Tensor, chunk: slice, temperature: float) -> Tensor:
        """The teacher's log-probabilities of a chunk, to compare with those of the student.

        Args:
            student: The student's log-probabilities, [tokens of the chunk, ids].

        Returns:
            The same shape, fp32 or wider: over the first ids of the teacher's vocabulary.
        """
        return self.log_probabilities(chunk, student.shape[1], temperature)

    def log_probabilities(self, chunk: slice, rows: int, temperature: float) -> Tensor:
        """Computes log-probabilities over the first `rows` of the vocabulary.

        Returns [tokens of the chunk, rows], fp32 or wider.
        """
        parameters = (self.weight, self.bias, self.adapter_b)
        first_rows = (None if tensor is None else tensor[:rows] for tensor in parameters)
        scores = HeadProduct(self.hidden[chunk], *first_rows).scores()  # type: ignore[arg-type]
        logits, _ = self.logits.forward(scores)
        return _log_softmax(logits, temperature)


@dataclass(frozen=True, slots=True)
class TopScores:
    """A teacher's log-probabilities of its k likeliest ids, and of all other ids together."""

    ids: Tensor  # int64[trained tokens, k]
    scores: Tensor  # fp32[trained tokens, k + 1]: of `ids`, then of all other ids together
    rows: int  # of the vocabulary over which they were computed

    def beside(self, student: Tensor, chunk: slice, temperature: float) -> Tensor:
        """The teacher's log-probabilities of a chunk, to compare with those of the student.

        Only the total of the other ids is known. It is shared among them in the student's own
        proportions, so the divergence and its gradient are those of k + 1 outcomes. This divergence
        is at most the whole one, and equals it if k is the size of the vocabulary.

        Args:
            student: The student's log-probabilities, [tokens of the chunk, rows].
            temperature: Not used: the scores have been computed at one.

        Returns:
            [tokens of the chunk, rows].
        """
        ids = self.ids[chunk]
        student_rest = student.scatter(1, ids, -torch.inf).logsumexp(1)
        teacher_rest = self.scores[chunk, -1]
        teacher = student + (teacher_rest - student_rest)[:, None]
        return teacher.scatter_(1, ids, self.scores[chunk, :-1])


def find_top(scores: TeacherScores, rows: int, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Finds the k likeliest ids at each position, over the first `rows` of the vocabulary.

    Returns `ids` and `scores` of `TopScores`.
    """
    chunk_tokens = divergence_chunk_tokens(scores.rows, scores.hidden.device.type)
    chunks = []
    # At least one chunk: without positions the results are empty tensors of the right shapes.
    for start in range(0, max(1, len(scores.hidden)), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        log_probs = scores.log_probabilities(chunk, rows, temperature)
        top, ids = log_probs.topk(min(k, rows), 1)
        rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        chunks.append((ids, torch.cat((top, rest), 1).float()))
    return torch.cat([ids for ids, _ in chunks]), torch.cat([values for _, values in chunks])


def head_divergence(teacher: TeacherScores | TopScores, options: DivergenceOptions) -> HeadFunction:
    """Makes a head function of a student that returns the three sums of `linear_divergence`."""

    def diverge(head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        product = head.prepare(hidden)
        return linear_divergence(
            product, labels, teacher, options, head.chunk_options(), trained_positions=positions
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
    """Sums the mixed loss, the divergence and the cross entropy over the trained tokens.

    The mixed loss is that of `DivergenceOptions`. The divergence is over the ids that both
    vocabularies have rows for: some models have more rows than tokens.

    Args:
        product: Of the student's head with [tokens, hidden].
        labels: int64[tokens], as `linear_cross_entropy` takes them.
        teacher: At the `trained_positions`, or at all tokens if those are None.
        trained_positions: int64[trained tokens]; None: all tokens are computed.

    Returns:
        fp32[3]: (mixed loss, divergence, cross entropy). Only the mixed loss has gradients; the
        others are for the log.
    """
    vocabulary = len(product.weight)
    common_rows = min(vocabulary, teacher.rows)
    chunk_tokens = chunks.tokens or divergence_chunk_tokens(
        max(vocabulary, teacher.rows), product.hidden.device.type
    )
    needs_grad = product.needs_grad()
    if trained_positions is None:
        ids = labels
    else:
        ids = labels[trained_positions]

    def compute(trained: HeadProduct) -> tuple[Tensor, Gradients]:
        weight = trained.weight
        sums = torch.zeros(3, dtype=widen(weight.dtype), device=weight.device)

        def compute_chunk(scores: Tensor, chunk: slice) -> Tensor | None:
            score_teacher = partial(teacher.beside, chunk=chunk, temperature=options.temperature)
            transformed, capped = chunks.logits.forward(scores)
            chunk_sums, grad = _compute_chunk(
                transformed,
                score_teacher,
                common_rows,
                ids[chunk],
                options,
                chunks,
                gradient=any(needs_grad),
            )
            sums.add_(chunk_sums)
            if grad is None:
                return None
            return chunks.logits.backward(grad, capped)

        return sums, backward_in_chunks(trained, compute_chunk, chunk_tokens, needs_grad)

    sums: Tensor = HeadLoss.apply(*product, trained_positions, compute)  # type: ignore[no-untyped-call]
    return sums


def _compute_chunk(
    logits: Tensor,
    score_teacher: Callable[[Tensor], Tensor],
    common_rows: int,
    labels: Tensor,
    options: DivergenceOptions,
    chunks: ChunkOptions,
    *,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes the sums of `linear_divergence` over one chunk, and the gradient of the mixed loss.

    Args:
        logits: The student's, [tokens, vocabulary].
        score_teacher: Takes the student's log-probabilities [tokens, common rows] and returns the
            teacher's of the same shape.
        common_rows: The number of rows that both vocabularies have.
        labels: int64[tokens], or IGNORE_INDEX.
        gradient: Whether the gradient is needed.

    Returns:
        (fp32[3], the gradient to `logits` or None).
    """
    beta, temperature, alpha = options
    trained = labels != IGNORE_INDEX
    log_probs = torch.log_softmax(logits, -1, dtype=widen(logits.dtype))
    is_same_softmax = temperature == 1.0 and common_rows == logits.shape[1]
    if is_same_softmax:
        student = log_probs
    else:
        student = _log_softmax(logits[:, :common_rows], temperature)
    divergence, grad_divergence = measure_divergence(
        student, score_teacher(student), beta, gradient
    )
    cross_entropy = -label_log_probabilities(log_probs, labels, chunks.label_smoothing)
    factors = torch.ones_like(cross_entropy)
    if chunks.weigh is not None:
        entropy_factors = chunks.weigh.find_entropy_factors(logits, UNCHANGED)
        factors = chunks.weigh.choose_factors(entropy_factors, -cross_entropy)
    token_losses = torch.stack([divergence, cross_entropy * factors])
    divergence_sum, cross_entropy_sum = torch.where(trained, token_losses, 0.0).sum(1)
    loss = alpha * divergence_sum + (1 - alpha) * cross_entropy_sum
    sums = torch.stack([loss, divergence_sum, cross_entropy_sum])
    if grad_divergence is None:
        return sums, None
    grad_divergence *= alpha / temperature
    if alpha < 1:
        grad = cross_entropy_gradient(log_probs, labels, chunks.label_smoothing)
        grad *= ((1 - alpha) * factors).unsqueeze(1)
        grad[:, :common_rows] += grad_divergence
    elif common_rows == logits.shape[1]:
        grad = grad_divergence
    else:
        grad = F.pad(grad_divergence, (0, logits.shape[1] - common_rows))
    return sums, grad.masked_fill_(~trained.unsqueeze(1), 0.0)


def measure_divergence(
    student: Tensor, teacher: Tensor, beta: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes the divergence of each token, and its gradient to the student's logits.

    Args:
        student, teacher: Log-probabilities [tokens, vocabulary].
        beta: 0 for the forward KL divergence KL(teacher, student), 1 for the reverse
            KL(student, teacher), a number between them for the generalized Jensen-Shannon
            divergence, with (1 - beta) student + beta teacher as the mixture.
        gradient: Whether the gradient is needed.

    Returns:
        (the divergence [tokens], the gradient [tokens, vocabulary] or None).
    """
    # In place where possible: a chunk's logits are the largest tensors of a step.
    if beta == 0:
        probabilities = teacher.exp()
        divergence = (teacher - student).mul_(probabilities).sum(1)
        return divergence, student.exp().sub_(probabilities) if gradient else None
    student_share = 1.0
    divergence = torch.zeros_like(student[:, 0])
    if beta == 1:
        excess = student - teacher
    else:
        student_share = 1 - beta
        mixture = student + math.log1p(-beta)
        torch.logaddexp(mixture, teacher + math.log(beta), out=mixture)
        divergence = beta * (teacher - mixture).mul_(teacher.exp()).sum(1)
        excess = mixture.neg_().add_(student)  # log of student / mixture
    probabilities = student.exp()
    student_divergence = (probabilities * excess).sum(1, keepdim=True)
    divergence = divergence + student_share * student_divergence.squeeze(1)
    if not gradient:
        return divergence, None
    return divergence, excess.sub_(student_divergence).mul_(probabilities).mul_(student_share)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Computes log softmax(logits / temperature) over the last dimension, in fp32 or wider."""
    wide = widen(logits.dtype)
    if temperature != 1.0:
        logits = logits.to(wide) / temperature
    return torch.log_softmax(logits, -1, dtype=wide)
