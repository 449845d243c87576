"""The loss: cross entropy of a linear head in chunks of tokens; logits [tokens, vocabulary] are
never whole.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from finetune.constants import IGNORE_INDEX
from finetune.distributed.model_parts import gather_whole, head_of, trunk_of
from finetune.distributed.tensor_parallel import find_local_head
from finetune.errors import UserError
from finetune.models.head_factors import measure_head_factors
from finetune.models.loss_chunks import (
    PLAIN,
    ChunkFunction,
    ChunkOptions,
    Gradients,
    HeadLoss,
    HeadProduct,
    LogitTransform,
    TokenWeights,
    compute_in_chunks,
)
from finetune.models.vision import forward_with_images

HeadFunction = Callable[["LossHead", Tensor, Tensor, Tensor | None], Tensor]
"""(head, hidden [tokens, hidden], labels int64[tokens], trained_positions) -> what the model
returns in place of the loss.
"""


def linear_cross_entropy(
    product: HeadProduct,
    labels: Tensor,
    chunks: ChunkOptions = PLAIN,
    *,
    trained_positions: Tensor | None = None,
) -> Tensor:
    """Sum over the trained tokens of -log softmax(hidden @ weight.T + bias)[label].

    Args:
        product: of [tokens, hidden]. The weight's gradient is accumulated in fp32, and not computed
            where it is frozen.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        trained_positions: int64[trained tokens], where `labels` is not IGNORE_INDEX, and perhaps
            others, which add nothing; only these are multiplied by the head. By default they are
            looked up on a CPU, and all positions are multiplied on a GPU, where the look-up would
            synchronize.
    Returns:
        fp32 scalar. Under autocast the products run in its type, the softmax always in fp32.
    """
    if trained_positions is None and labels.device.type == "cpu":
        trained_positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    needs_grad = product.needs_grad()
    if trained_positions is None:
        ids = labels
    else:
        ids = labels[trained_positions]

    def compute(
        trained: Tensor, weight: Tensor, adapter_b: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        given = trained, weight, product.bias, ids, chunks, needs_grad
        computed = compute_in_chunks(*given, adapter_b=adapter_b)
        return computed.loss, computed.gradients

    loss: Tensor = HeadLoss.apply(*product[:4], trained_positions, needs_grad, compute)  # type: ignore[no-untyped-call]
    return loss


def weigh_losses(weights: Tensor, parts: int = 1) -> HeadFunction:
    """A `HeadFunction` whose loss multiplies that of each token by `weights`, fp32[tokens].

    `model(..., head_function=weigh_losses(weights))` returns fp32[1 + parts]: the loss with its
    gradients, and for the log the sum without weights of each of as many equal `parts`.
    """

    def compute_loss(
        head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor | None
    ) -> Tensor:
        product = head.prepare(hidden)
        needs_grad = product.needs_grad()
        chunks = head.chunk_options(product)
        if positions is None:
            ids = labels
            by_token = weights
        else:
            ids = labels[positions]
            by_token = weights[positions]

        def compute(
            trained: Tensor, weight: Tensor, adapter_b: Tensor | None
        ) -> tuple[Tensor, Gradients]:
            given = trained, weight, product.bias, ids, chunks, needs_grad, by_token
            computed = compute_in_chunks(*given, adapter_b)
            losses = -computed.log_probabilities
            weighted = (losses * by_token).sum(0, keepdim=True)
            return torch.cat([weighted, losses.view(parts, -1).sum(1)]), computed.gradients

        sums: Tensor = HeadLoss.apply(*product[:4], positions, needs_grad, compute)  # type: ignore[no-untyped-call]
        return sums

    return compute_loss


class LossHead(nn.Module):
    """A model's output head that, given labels, returns the summed loss instead of logits.

    The protocol of every such head: `prepare` says what it multiplies, `compute_logits` multiplies.

    The loss is computed inside this module's forward, so that FSDP gathers the weight for it, once.
    """

    weight: Any  # [vocabulary, hidden]
    bias: Any  # [vocabulary] or None
    input_scale: float  # by which the model's class multiplies `hidden` before the head
    logits: LogitTransform
    label_smoothing: float  # while training
    token_weights: TokenWeights | None = None  # while training
    # Known before the model is sharded: in a unit of FSDP1 where others are trained, a frozen
    # weight asks for a gradient too.
    is_frozen: bool = False
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
            return self.compute_logits(hidden)
        if head_function is not None:
            return head_function(self, hidden.flatten(0, -2), labels.flatten(), trained_positions)
        product = self.prepare(hidden.flatten(0, -2))
        return linear_cross_entropy(
            product,
            labels.flatten(),
            self.chunk_options(product),
            trained_positions=trained_positions,
        )

    def prepare(self, hidden: Tensor) -> HeadProduct:
        """The product of the head with `hidden` [tokens, hidden], as this rank computes it."""
        weight, bias, shard = find_local_head(self.weight, self.bias)
        return HeadProduct(hidden, self.without_gradient(weight), bias, shard=shard)

    @property
    def is_trained(self) -> bool:
        """Whether its weight is, asked of the parameter: a rank's part of it does not say so where
        there are no gradients.
        """
        return not self.is_frozen and bool(self.weight.requires_grad)

    def without_gradient(self, weight: Tensor) -> Tensor:
        """`weight`, which asks for no gradient where the head `is_frozen`."""
        return weight.detach() if self.is_frozen and weight.requires_grad else weight

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., vocabulary]: all of them, on every rank."""
        raise NotImplementedError

    def scale(self, hidden: Tensor) -> Tensor:
        """Multiplies the trunk's output by `input_scale`."""
        return hidden if self.input_scale == 1.0 else hidden * self.input_scale

    def chunk_options(self, product: HeadProduct) -> ChunkOptions:
        """How its loss is computed: smoothing and weights of tokens belong to training alone."""
        options = ChunkOptions(
            self.logits,
            trains_head=self.is_trained,
            shard=product.shard,
            function=self.chunk_function,
        )
        if not self.training:
            return options
        return options._replace(label_smoothing=self.label_smoothing, weigh=self.token_weights)


class CrossEntropyHead(LossHead, nn.Linear):
    """A plain linear layer as a `LossHead`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return gather_whole(F.linear(replicate(hidden, self.weight), self.weight, self.bias))


def replicate(states: Tensor, weight: Tensor) -> Tensor:
    """`states` for a product with `weight`: on its mesh, where ranks divide that."""
    if not isinstance(weight, DTensor):
        return states
    return DTensor.from_local(states, weight.device_mesh, [Replicate()], run_check=False)


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
    head.input_scale, head.logits = factors  # type: ignore[assignment]
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
            hidden = forward_with_images(self, images, image_counts, **kwargs)
        head = head_of(self)
        return head(head.scale(hidden), labels, trained_positions, head_function)

    # On the instance, not the class: FSDP's hooks run around this forward, and would be skipped by
    # calling the trunk.
    model.forward = MethodType(forward, model)
