"""Reward models that score sampled completions. Each rank has a full frozen copy of every reward
model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.config.layout import find_compute_dtype
from finetune.config.pretrained import load_config
from finetune.config.reward_names import name_of_reward
from finetune.config.schema import Model, Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.examples import Example
from finetune.data.packing import pack_documents
from finetune.data.paid_text import RewardText, keys_of_reward, read_reward_texts
from finetune.distributed.parallelize import fill_on_device
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.cross_entropy import install_loss
from finetune.models.documents import can_continue, install_attention
from finetune.models.experts import install_experts
from finetune.models.head_scores import head_scores
from finetune.models.load import (
    DTYPES,
    build_on_meta,
    forget_quantization,
    is_here,
    read_base_values,
)


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A reward model on this rank's device."""

    text: RewardText
    model: nn.Module
    # The most tokens of a forward with several documents; 0: each document has its own forward.
    most_tokens: int

    @property
    def name(self) -> str:
        """The reward model's name in metrics."""
        return name_of_reward(self.text.name)

    @torch.no_grad()
    def score(self, documents: Sequence[Sequence[int]]) -> list[float]:
        """Scores documents of token ids. Each rank calls it for its own documents.

        Returns a score for each document, in order.
        """
        pad_id = self.text.encoder.pad_id
        device = next(self.model.parameters()).device
        scores: list[float] = []
        for batch in self._split_batches(documents):
            micro_batch = pack_documents([_mark_scored(ids, pad_id) for ids in batch]).to(device)
            # [positions, outputs]: one position for each document's label, then padding
            label_scores = self.model(**micro_batch.inputs, head_function=head_scores)
            scores += label_scores[: len(batch), 0].tolist()
        return scores

    def _split_batches(self, documents: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Yields the documents of each forward: as many as fit into `most_tokens`, at least one."""
        batch: list[Sequence[int]] = []
        for ids in documents:
            if batch and sum(map(len, batch)) + len(ids) > self.most_tokens:
                yield batch
                batch = []
            batch.append(ids)
        if batch:
            yield batch


def _mark_scored(ids: Sequence[int], pad_id: int | None) -> Example:
    """Makes an example with one label, at the token where transformers' class reads the score.

    It is the last token that is not padding, or the last one if all are. The label's value does not
    matter.
    """
    input_ids = np.array(ids, np.int32)
    labels = np.full(len(input_ids), IGNORE_INDEX, np.int32)
    text_positions = np.flatnonzero(input_ids != pad_id)
    score_position = text_positions[-1] if len(text_positions) else -1
    labels[score_position] = 0
    return Example(input_ids, labels)


def load_reward_models(recipe: Recipe, world: World) -> list[RewardModel]:
    """Loads the recipe's reward models in the run's compute dtype.

    Raises `UserError` if a model is unreachable, or its files do not match its config.
    """
    dtype = DTYPES[find_compute_dtype(world.sharding, recipe.model, recipe.lora)]
    models = []
    for text in read_reward_texts(recipe):
        keys = keys_of_reward(text.name, recipe)
        model, values = build_reward_model(keys, dtype)
        install_attention(model, keys.attn_implementation)
        install_loss(model)
        install_experts(model, world, dtype, is_compiled=False)
        fill_on_device(model, values, world.device)
        most_tokens = 0
        if recipe.data.packing and can_continue(model):
            most_tokens = recipe.data.max_length * recipe.batch.per_device_train_batch_size
        models.append(RewardModel(text, model, most_tokens))
    return models


def check_reward_models(recipe: Recipe) -> None:
    """Checks the files of those reward models that are on this machine; reads only headers.

    Raises `UserError` as `build_reward_model` does.
    """
    for name in recipe.rollout.reward_models:
        keys = keys_of_reward(name, recipe)
        if is_here(keys):
            build_reward_model(keys, torch.float32)


def build_reward_model(keys: Model, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Builds a frozen reward model on the meta device.

    Returns (the model, the values of its parameters, which are not read yet). Raises `UserError` as
    `load_reward_models` does, and for quantized weights.
    """
    config = load_config(keys)
    forget_quantization(config)
    model = build_on_meta(config, dtype, keys.trust_remote_code).requires_grad_(False).eval()
    values, quantized = read_base_values(model, config, keys)
    if quantized:
        raise UserError(
            f"rewards: {keys.model_name_or_path}: its weights are stored quantized; name the "
            "unquantized model"
        )
    return model, values
