"""Distillation as an `Objective`: the divergence from a teacher beside the cross entropy of the labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config.facts import ModelFacts
from finetune.config.schema import Recipe
from finetune.constants import IGNORE_INDEX
from finetune.data.batches import MicroBatch, StepBatch
from finetune.data.tokenizer import refuse_other_tokenizer
from finetune.errors import UserError
from finetune.files.tensors import read_folder
from finetune.models.load import Teacher
from finetune.pretrained_config import load_config, read_facts
from finetune.training.objectives.sft import Measured, Objective


class Distillation(Objective):
    """alpha x divergence + (1 - alpha) x cross entropy, averaged over the trained tokens of the step."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def measure(
        self, model: nn.Module, micro_batch: MicroBatch, inputs: Mapping[str, Any], batch: StepBatch
    ) -> Measured:
        """The loss, and as metrics the divergence and the cross entropy of a token. The teacher reads no noise."""
        head_function = self.teacher.compare(micro_batch.inputs)
        loss, divergence, cross_entropy = model(**inputs, head_function=head_function).unbind()
        trained = (micro_batch.labels != IGNORE_INDEX).sum().to(loss.dtype)
        means = {"kl": divergence, "cross_entropy": cross_entropy}
        return Measured(loss, {name: torch.stack([total.detach(), trained]) for name, total in means.items()})


def teacher_flop_per_token(objective: Objective, length: float) -> float:
    """FLOP of the teacher's forward of one token in a document of `length` tokens; 0 where there is no teacher."""
    teacher: Teacher | None = getattr(objective, "teacher", None)
    return 0.0 if teacher is None else teacher.flop_per_token(length)


def read_teacher_facts(recipe: Recipe, tokenizer: Any) -> ModelFacts | None:
    """The facts of the recipe's teacher, for the rules; None where it has none.

    Raises:
        UserError: For a config, a tokenizer or headers of weights with which it cannot teach.
    """
    teacher = recipe.teacher
    if teacher is None:
        return None
    name = str(teacher.model_name_or_path)
    try:
        facts = read_facts(load_config(teacher), name, len(tokenizer))
        if recipe.method_facts.needs_teacher:
            refuse_other_tokenizer(tokenizer, teacher)
        if Path(name).is_dir():
            read_folder(name)  # headers only, before the data is read
    except UserError as error:
        raise UserError(f"teacher_model_name_or_path: {error}") from None
    return facts
