"""A critic: one vector in the output head, whose product with a token's hidden state is the value
of that state.

The vector is a parameter of the head's module and reads the same inputs, so that a layout that
gathers the head's weight gathers the vector with it. The products are in fp32. The vector starts at
zero, so that the first values are 0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from finetune.constants import VALUE_WEIGHT
from finetune.distributed.model_parts import Slices, Values, head_of
from finetune.models.cross_entropy import LossHead
from finetune.models.log_probabilities import head_log_probabilities


def add_value_head(model: Any, base: Values) -> Values:
    """Adds the critic to `model`, which is on meta.

    Returns the values of `base`, extended by those of the critic: zeros.
    """
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
    """Makes the critic trainable, with its weight in `dtype`, also where the model is frozen."""
    weight: nn.Parameter = getattr(head_of(model), VALUE_WEIGHT)
    weight.requires_grad_(True)
    weight.data = weight.data.to(dtype)


def head_log_probabilities_and_values(
    head: LossHead,
    hidden: Tensor,
    labels: Tensor,
    trained_positions: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """A `HeadFunction` that returns fp32[2, trained positions]: the labels' log-probabilities, and
    the values of the states that predict them.

    Args:
        head: The output head, with the critic.
        hidden: [tokens, hidden].
        labels: int64[tokens].
        trained_positions: int64[trained positions], into the tokens.
        temperature: Divides the logits, not the values.
    """
    log_probabilities = head_log_probabilities(head, hidden, labels, trained_positions, temperature)
    weight: Tensor = getattr(head, VALUE_WEIGHT)
    with torch.autocast(hidden.device.type, enabled=False):
        values = hidden[trained_positions].float() @ weight.float()
    return torch.stack((log_probabilities, values))
