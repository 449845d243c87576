"""The head of scores that reward models and classifiers have in place of the vocabulary's head.

The model is transformers' class for sequence classification of the family, or for token
classification if steps are scored. The head reads only the tokens that have a label, such as the
last token of a document. So packing, the layouts and the trunk's forward are those of a language
model.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import SCORES, Names, Shape
from finetune.distributed.model_parts import Slices, has_scores
from finetune.models.cross_entropy import LossHead
from finetune.models.lora import seed_of

# Prefixes of the vocabulary head's tensors in the files of a language model.
VOCABULARY_HEAD = ("lm_head.", "model.lm_head.")
WEIGHT = f"{SCORES}.weight"
# Standard deviation of a new head's weights if the config has no initializer_range.
DEFAULT_DEVIATION = 0.02


def head_scores(
    head: LossHead, hidden: Tensor, _labels: Tensor, trained_positions: Tensor
) -> Tensor:
    """Computes the scores at the trained positions.

    It is a `HeadFunction`, for `model(..., head_function=head_scores)`.

    Args:
        hidden: [tokens, hidden].

    Returns:
        fp32[trained positions, scores].
    """
    states = hidden[trained_positions]
    return F.linear(states, head.weight.to(states.dtype), head.bias).float()


def find_new_head(model: Any, stored: Collection[str]) -> Names:
    """The names of the head's parameters if `model` has a head of scores that the files lack.

    Else empty.

    Args:
        stored: The names of the tensors in the files.
    """
    if has_scores(model) and WEIGHT not in stored:
        return (WEIGHT,)
    return ()


def is_left_out(model: Any, name: str) -> bool:
    """Whether the file's tensor `name` is a vocabulary head that `model` replaces by scores."""
    return has_scores(model) and name.startswith(VOCABULARY_HEAD)


def draw_head(model: Any, name: str, seed: int, slices: Slices) -> Tensor:
    """Draws a new head's weight, fp32[scores, hidden], and returns the part within `slices`.

    The numbers are normal with transformers' deviation. They depend on `seed` and `name` only, so
    every rank draws the same weight.
    """
    deviation = getattr(model.config, "initializer_range", None) or DEFAULT_DEVIATION
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    shape: Shape = tuple(model.score.weight.shape)
    return torch.normal(0.0, deviation, shape, generator=generator)[slices]


def add_new_head(
    model: Any, stored: Mapping[str, Any], adapter: Mapping[str, Any]
) -> dict[str, Any]:
    """Adapts a base's tensors to the head of `model`, and returns them by name.

    If `model` has a head of scores, the vocabulary's head is left out. If the base has no head of
    scores, the adapter's is added.

    Args:
        stored: Name -> tensor of the base.
        adapter: Name -> tensor of the adapter's files.
    """
    tensors = {name: tensor for name, tensor in stored.items() if not is_left_out(model, name)}
    new_head = {name: adapter[name] for name in find_new_head(model, tensors) if name in adapter}
    return tensors | new_head
