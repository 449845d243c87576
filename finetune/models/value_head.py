"""A critic: the value of each token's state, by one vector beside the vocabulary's head.

It reads what that head reads, and is a parameter of the head's module: a layout that gathers the
one has gathered the other. Its products are of fp32, and it starts at zero, so that the first
values are 0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from finetune.constants import VALUE_WEIGHT
from finetune.distributed.model_parts import Slices, Values, head_of
from finetune.models.cross_entropy import LossHead
from finetune.models.log_probabilities import head_log_probabilities


def add_value_head(model: Any, base: Values) -> Values:
    """Adds the critic to a model on meta; returns the values of `base` with its own."""
    head = head_of(model)
    width = head.weight.shape[1]
    head.register_parameter(
        VALUE_WEIGHT, nn.Parameter(torch.empty(width, dtype=head.weight.dtype, device="meta"))
    )

    def values(name: str, slices: Slices) -> Tensor:
        if name.endswith(VALUE_WEIGHT):
            return torch.zeros(width)[slices]
        return base(name, slices)

    return values


def train_value_head(model: Any, dtype: torch.dtype) -> None:
    """Makes the critic trainable, in `dtype`, whatever else of the model is frozen."""
    weight: nn.Parameter = getattr(head_of(model), VALUE_WEIGHT)
    weight.requires_grad_(True)
    weight.data = weight.data.to(dtype)


def head_log_probabilities_and_values(
    head: LossHead,
    hidden: Tensor,
    labels: Tensor,
    trained_positions: Tensor | None,
    temperature: float = 1.0,
) -> Tensor:
    """A `HeadFunction`: fp32[2, trained positions], the labels' log-probabilities, and the values
    of the states in which they are predicted.
    """
    log_probabilities = head_log_probabilities(head, hidden, labels, trained_positions, temperature)
    read = hidden if trained_positions is None else hidden[trained_positions]
    weight: Tensor = getattr(head, VALUE_WEIGHT)
    with torch.autocast(hidden.device.type, enabled=False):
        values = read.float() @ weight.float()
    return torch.stack((log_probabilities, values))
