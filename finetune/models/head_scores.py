"""A head of scores in place of the vocabulary's: of reward models and classifiers, as transformers'
classes have it.

The model is the family's class for sequence classification. Its head reads the last token of a
document alone, which is the one with a label; so packing, the layouts and the forward are those of
a language model.
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

# the beginnings of its names in files of a language model
VOCABULARY_HEAD = ("lm_head.", "model.lm_head.")
WEIGHT = f"{SCORES}.weight"
DEFAULT_DEVIATION = 0.02  # of a new head's weights, where the config has no initializer_range


def head_scores(
    head: LossHead, hidden: Tensor, _labels: Tensor, trained_positions: Tensor | None
) -> Tensor:
    """A `HeadFunction`: `model(..., head_function=head_scores)` returns fp32[trained positions,
    scores].
    """
    if trained_positions is None:
        read = hidden
    else:
        read = hidden[trained_positions]
    return F.linear(read, head.weight.to(read.dtype), head.bias).float()


def find_new_head(model: Any, stored: Collection[str]) -> Names:
    """The names of the head's parameters, where `model` has a head of scores and the files have
    none.
    """
    if has_scores(model) and WEIGHT not in stored:
        return (WEIGHT,)
    return ()


def is_left_out(model: Any, name: str) -> bool:
    """Whether a tensor in the files is the vocabulary's head of a model that has a head of scores
    in its place.
    """
    return has_scores(model) and name.startswith(VOCABULARY_HEAD)


def draw_head(model: Any, name: str, seed: int, slices: Slices) -> Tensor:
    """`slices` of a new head's weight, fp32[scores, hidden]: normal, as transformers initializes
    it, from `seed`.
    """
    deviation = getattr(model.config, "initializer_range", None) or DEFAULT_DEVIATION
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    shape: Shape = tuple(model.score.weight.shape)
    return torch.normal(0.0, deviation, shape, generator=generator)[slices]


def add_new_head(
    model: Any, stored: Mapping[str, Any], adapter: Mapping[str, Any]
) -> dict[str, Any]:
    """The tensors of a base for `model`: without the vocabulary's head, and with the adapter's head
    of scores.
    """
    kept = {name: tensor for name, tensor in stored.items() if not is_left_out(model, name)}
    return kept | {name: adapter[name] for name in find_new_head(model, kept) if name in adapter}
