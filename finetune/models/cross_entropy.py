"""The loss: cross entropy of a linear head in chunks of tokens; logits [tokens, vocabulary] are
never whole.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from finetune.constants import IGNORE_INDEX
from finetune.distributed.model_parts import head_of, trunk_of
from finetune.distributed.tensor_parallel import find_local_head
from finetune.errors import UserError
from finetune.models.head_factors import measure_head_factors
from finetune.models.loss_chunks import (
    PLAIN,
    ChunkFunction,
    ChunkOptions,
    Gradients,
    HeadLoss,
    LogitTransform,
    TokenWeights,
    compute_in_chunks,
    find_needed_gradients,
)
from finetune.models.vision import forward_images

HeadFunction = Callable[["CrossEntropyHead", Tensor, Tensor, Tensor | None], Tensor]
"""(head, hidden [tokens, hidden], labels int64[tokens], trained_positions) -> what the model
returns in place of the loss.
"""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: ChunkOptions = PLAIN,
    *,
    bias: Tensor | None = None,
    trained_positions: Tensor | None = None,
) -> Tensor:
    """Sum over the trained tokens of -log softmax(hidden @ weight.T + bias)[label].

    Args:
        hidden: [tokens, hidden].
        weight: [vocabulary, hidden]; its gradient is accumulated in fp32, and not computed where it
            is frozen.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        bias: [vocabulary] or None.
        trained_positions: int64[trained tokens], where `labels` is not IGNORE_INDEX, and perhaps
            others, which add nothing; only these are multiplied by the head. By default they are
            looked up on a CPU, and all positions are multiplied on a GPU, where the look-up would
            synchronize.
    Returns:
        fp32 scalar. Under autocast the products run in its type, the softmax always in fp32.
    """
    if trained_positions is None and labels.device.type == "cpu":
        trained_positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    needs_grad = find_needed_gradients(hidden, weight, bias)
    if trained_positions is None:
        ids = labels
    else:
        ids = labels[trained_positions]

    def compute(trained: Tensor, weight: Tensor) -> tuple[Tensor, Gradients]:
        computed = compute_in_chunks(trained, weight, bias, ids, chunks, needs_grad)
        return computed.loss, computed.gradients

    loss: Tensor = HeadLoss.apply(hidden, weight, bias, trained_positions, needs_grad, compute)  # type: ignore[no-untyped-call]
    return loss


def weigh_losses(weights: Tensor) -> HeadFunction:
    """A `HeadFunction` whose loss multiplies that of each token by `weights`, fp32[tokens].

    `model(..., head_function=weigh_losses(weights))` returns fp32[2]: the loss with its gradients,
    and the sum without weights for the log.
    """

    def compute_loss(
        head: CrossEntropyHead, hidden: Tensor, labels: Tensor, positions: Tensor | None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(len(labels), device=labels.device)
        weight, bias, shard = find_local_head(head.weight, head.bias)
        needs_grad = find_needed_gradients(hidden, weight, bias)
        chunks = head.chunk_options()._replace(shard=shard)
        ids = labels[positions]
        by_token = weights[positions]

        def compute(trained: Tensor, weight: Tensor) -> tuple[Tensor, Gradients]:
            computed = compute_in_chunks(trained, weight, bias, ids, chunks, needs_grad, by_token)
            weighted = -(computed.log_probabilities * by_token).sum()
            return torch.stack([weighted, computed.loss]), computed.gradients

        sums: Tensor = HeadLoss.apply(hidden, weight, bias, positions, needs_grad, compute)  # type: ignore[no-untyped-call]
        return sums

    return compute_loss


class CrossEntropyHead(nn.Linear):
    """A model's own output head that, given labels, returns the summed loss instead of logits.

    The loss is computed inside this module's forward, so that FSDP gathers the weight for it, once.
    """

    before: float  # by which its class multiplies what it reads
    logits: LogitTransform
    label_smoothing: float  # while training
    token_weights: TokenWeights | None = None  # while training
    chunk_function: ChunkFunction | None = None  # compiled, where the recipe compiles

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        trained_positions: Tensor | None = None,
        head_function: HeadFunction | None = None,
    ) -> Tensor:
        """hidden [..., hidden] -> logits [..., vocabulary]; with labels [...], the summed loss
        (fp32 scalar), or whatever `head_function` returns for the same inputs.
        """
        if labels is None:
            return self._compute_logits(hidden)
        if head_function is not None:
            return head_function(self, hidden.flatten(0, -2), labels.flatten(), trained_positions)
        weight, bias, shard = find_local_head(self.weight, self.bias)
        given = (
            hidden.flatten(0, -2),
            weight,
            labels.flatten(),
            self.chunk_options()._replace(shard=shard),
        )
        return linear_cross_entropy(*given, bias=bias, trained_positions=trained_positions)

    def scale(self, hidden: Tensor) -> Tensor:
        """Returns the trunk's output times the factor before the head."""
        return hidden if self.before == 1.0 else hidden * self.before

    def chunk_options(self) -> ChunkOptions:
        """How its loss is computed: smoothing and weights of tokens belong to training alone."""
        smoothing, weigh = (
            (self.label_smoothing, self.token_weights) if self.training else (0.0, None)
        )
        return ChunkOptions(
            self.logits, label_smoothing=smoothing, weigh=weigh, function=self.chunk_function
        )

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Where ranks divide the vocabulary between them, those of all of it."""
        if not isinstance(self.weight, DTensor):
            return super().forward(hidden)
        replicated = DTensor.from_local(
            hidden, self.weight.device_mesh, [Replicate()], run_check=False
        )
        logits: Any = super().forward(replicated)
        return logits.full_tensor()  # type: ignore[no-any-return]


def install_loss(
    model: Any, label_smoothing: float = 0.0, token_weights: TokenWeights | None = None
) -> None:
    """Makes `model(..., labels=labels)` return the summed loss over the trained tokens, an fp32
    scalar.

    Labels are shifted already: labels[i] is the id to predict at position i. With them may come
    `trained_positions` (int64[trained tokens], into the flattened labels), `images` with
    `image_counts` (as a `MicroBatch` has them), `token_mask` and
    `replayed_experts`, which the routing of experts reads, and `head_function`, which computes
    something else than the loss inside the head's forward, where the weight is whole. Without
    labels the model returns logits as before. Call it before sharding. Raises `UserError` where
    the output head is not a plain linear layer.
    """
    head = head_of(model)
    if type(head) is not nn.Linear:
        raise UserError(
            f"{type(model).__name__}: its output head is a {type(head).__name__}, not a plain "
            "linear layer, and cannot be trained here; name another model"
        )
    factors = measure_head_factors(model)
    head.__class__ = CrossEntropyHead
    head.before, head.logits = factors  # type: ignore[assignment]
    head.label_smoothing = label_smoothing  # type: ignore[assignment]
    head.token_weights = token_weights  # type: ignore[assignment]
    plain = type(model).forward

    @functools.wraps(plain)  # generation reads the signature
    def forward(
        self: Any,
        *args: Any,
        labels: Tensor | None = None,
        trained_positions: Tensor | None = None,
        token_mask: Tensor | None = None,
        replayed_experts: Tensor | None = None,
        head_function: HeadFunction | None = None,
        images: Mapping[str, Tensor] | None = None,
        image_counts: Sequence[int] = (),
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return plain(self, *args, **kwargs)
        if images is None:
            hidden = trunk_of(self)(*args, **kwargs | {"use_cache": False}).last_hidden_state
        else:
            hidden = forward_images(self, images, image_counts, **kwargs)
        head = head_of(self)
        return head(head.scale(hidden), labels, trained_positions, head_function)

    # On the instance, not the class: FSDP's hooks run around this forward, and would be skipped by
    # calling the trunk.
    model.forward = MethodType(forward, model)
