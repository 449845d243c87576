"""The loss: cross entropy of a linear head, computed in chunks of tokens.

So the logits [tokens, vocabulary] of a micro-batch are never in memory all at once.
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

HeadFunction = Callable[["LossHead", Tensor, Tensor, Tensor], Tensor]
"""Computes what the model returns in place of the loss, inside the head's forward.

Arguments: the head, hidden [tokens, hidden], labels int64[tokens], and trained_positions
int64[trained tokens].
"""


def linear_cross_entropy(
    product: HeadProduct,
    labels: Tensor,
    chunks: ChunkOptions = PLAIN,
    *,
    trained_positions: Tensor | None = None,
) -> Tensor:
    """Sums -log softmax(hidden @ weight.T + bias)[label] over the trained tokens.

    Args:
        product: What the head multiplies, for all tokens. The weight's gradient is accumulated in
            fp32; a frozen weight has none.
        labels: int64[tokens], the id to predict AT that position, or IGNORE_INDEX.
        chunks: How the loss is computed chunk by chunk.
        trained_positions: int64[trained tokens], the only positions that the head multiplies: all
            where `labels` is not IGNORE_INDEX, and perhaps some where it is, which add nothing.
            None: on a CPU they are looked up. On a GPU all positions are multiplied, since the
            look-up would make the host wait.

    Returns:
        fp32 scalar. Under autocast the products run in autocast's dtype, and the softmax in fp32.
    """
    if trained_positions is None and labels.device.type == "cpu":
        trained_positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
    needs_grad = product.needs_grad()
    if trained_positions is None:
        ids = labels
    else:
        ids = labels[trained_positions]

    def compute(trained: HeadProduct) -> tuple[Tensor, Gradients]:
        computed = compute_in_chunks(trained, ids, chunks, needs_grad)
        return computed.loss, computed.gradients

    loss: Tensor = HeadLoss.apply(*product, trained_positions, compute)  # type: ignore[no-untyped-call]
    return loss


def sum_weighted_losses(
    head: "LossHead",
    hidden: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    weights: Tensor,
    parts: int = 1,
) -> Tensor:
    """Sums the losses of tokens, each multiplied by its weight; a `HeadFunction` for some weights.

    Args:
        head: The output head.
        hidden: [tokens, hidden].
        labels: int64[tokens].
        positions: int64[trained tokens], into the tokens; None: all tokens.
        weights: fp32[tokens].
        parts: How many equal parts the trained tokens consist of, for the log.

    Returns:
        fp32[1 + parts]: the weighted loss, which alone has gradients, and the sum of the losses of
        each part without weights.
    """
    product = head.prepare(hidden)
    needs_grad = product.needs_grad()
    chunks = head.chunk_options()
    if positions is not None:
        labels = labels[positions]
        weights = weights[positions]

    def compute(trained: HeadProduct) -> tuple[Tensor, Gradients]:
        computed = compute_in_chunks(trained, labels, chunks, needs_grad, weights)
        losses = -computed.log_probabilities
        weighted_loss = (losses * weights).sum(0, keepdim=True)
        part_losses = losses.view(parts, -1).sum(1)
        return torch.cat([weighted_loss, part_losses]), computed.gradients

    sums: Tensor = HeadLoss.apply(*product, positions, compute)  # type: ignore[no-untyped-call]
    return sums


class LossHead(nn.Module):
    """A model's output head that, given labels, returns the summed loss instead of logits.

    A subclass says how it multiplies: `prepare` returns the operands of this rank, and
    `compute_logits` returns all logits.

    The loss is computed inside this module's forward, so that FSDP gathers the weight once for it.
    """

    weight: Any  # [vocabulary, hidden]
    bias: Any  # [vocabulary] or None
    input_scale: float  # what the model's class multiplies `hidden` by before the head
    logits: LogitTransform  # what it does to the head's output before the softmax
    label_smoothing: float  # only while training
    token_weights: TokenWeights | None = None  # only while training; None: all tokens weigh 1
    # Set before the model is sharded: in a unit of FSDP1 with trained parameters, a frozen weight
    # requires a gradient too.
    is_frozen: bool = False
    chunk_function: ChunkFunction | None = None  # compiled if the recipe says so; None: eager

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        trained_positions: Tensor | None = None,
        head_function: HeadFunction | None = None,
    ) -> Tensor:
        """Returns the logits, or with labels the summed loss or what `head_function` returns.

        Args:
            hidden: [..., hidden].
            labels: int64[...]; None: the logits are returned, [..., vocabulary].
            trained_positions: As in `linear_cross_entropy`; for `head_function`, None: all tokens.
            head_function: Computes what is returned; None: the loss is, an fp32 scalar.
        """
        if labels is None:
            return self.compute_logits(hidden)
        hidden = hidden.flatten(0, -2)
        labels = labels.flatten()
        if head_function is not None:
            if trained_positions is None:
                trained_positions = torch.arange(len(labels), device=labels.device)
            return head_function(self, hidden, labels, trained_positions)
        product = self.prepare(hidden)
        return linear_cross_entropy(
            product, labels, self.chunk_options(), trained_positions=trained_positions
        )

    def prepare(self, hidden: Tensor) -> HeadProduct:
        """Returns what this rank multiplies to apply the head to `hidden` [tokens, hidden]."""
        weight, bias, shard = find_local_head(self.weight, self.bias)
        return HeadProduct(hidden, self.detach_if_frozen(weight), bias, shard=shard)

    @property
    def is_trained(self) -> bool:
        """Whether the weight is trained.

        It is read from the parameter: under no_grad a rank's local part never requires a gradient.
        """
        return not self.is_frozen and bool(self.weight.requires_grad)

    def detach_if_frozen(self, weight: Tensor) -> Tensor:
        """Detaches `weight` from the graph if the head is frozen."""
        return weight.detach() if self.is_frozen and weight.requires_grad else weight

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits [..., vocabulary] of hidden [..., hidden], all of them on every rank.

        Shards of the head are gathered.
        """
        raise NotImplementedError

    def scale(self, hidden: Tensor) -> Tensor:
        """Multiplies the trunk's output by `input_scale`."""
        return hidden if self.input_scale == 1.0 else hidden * self.input_scale

    def chunk_options(self) -> ChunkOptions:
        """Returns how the loss is computed; outside of training without smoothing and weights."""
        options = ChunkOptions(
            self.logits, trains_head=self.is_trained, function=self.chunk_function
        )
        if not self.training:
            return options
        return options._replace(label_smoothing=self.label_smoothing, weigh=self.token_weights)


class CrossEntropyHead(LossHead, nn.Linear):
    """A plain linear layer as a `LossHead`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return gather_whole(F.linear(replicate(hidden, self.weight), self.weight, self.bias))


def replicate(states: Tensor, weight: Tensor) -> Tensor:
    """Makes `states`, which every rank has, a replicated DTensor if `weight` is a DTensor.

    A product needs both operands on one mesh.
    """
    if not isinstance(weight, DTensor):
        return states
    return DTensor.from_local(states, weight.device_mesh, [Replicate()], run_check=False)


def install_loss(
    model: Any, label_smoothing: float = 0.0, token_weights: TokenWeights | None = None
) -> None:
    """Makes `model(..., labels=labels)` return the loss, an fp32 scalar summed over trained tokens.

    Without labels the model returns logits as before. Labels are shifted already: labels[i] is the
    id to predict at position i. With labels the model takes more arguments:

    - `trained_positions`: int64[trained tokens], indexes into the flattened labels.
    - `images` with `image_counts`: as in `MicroBatch`.
    - `token_mask`, `replayed_experts`: for the hooks of expert routing, which read them.
    - `head_function`: computes another result inside the head's forward, where FSDP has gathered
      the weight.

    Call it before sharding.

    Args:
        model: An `XForCausalLM`, or a vision-language model.
        label_smoothing: While training; see `ChunkOptions`.
        token_weights: While training; None: all tokens weigh 1.

    Raises:
        UserError: The output head is not a plain linear layer.
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
    plain_forward = type(model).forward

    @functools.wraps(plain_forward)  # generation reads the signature
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
            return plain_forward(self, *args, **kwargs)
        if images is None:
            hidden = trunk_of(self)(*args, **kwargs | {"use_cache": False}).last_hidden_state
        else:
            hidden = forward_with_images(self, images, image_counts, **kwargs)
        head = head_of(self)
        return head(head.scale(hidden), labels, trained_positions, head_function)

    # The forward of the model is replaced, since FSDP's hooks run around it: a caller that called
    # the trunk and the head would skip the hooks of the root.
    model.forward = MethodType(forward, model)
