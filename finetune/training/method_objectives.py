"""The objectives of a run, chosen by its method."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from finetune.config.schema import Recipe
from finetune.data.batches import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.probe import check_training_forward
from finetune.models.teacher import load_teacher
from finetune.training.objectives.distill import Distillation
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.objectives.sft import SFT, Objectives
from finetune.training.reference import find_references


def make_objectives(
    model: nn.Module, recipe: Recipe, data: PreparedData, inputs: Mapping[str, str], world: World
) -> Objectives:
    """What the run minimizes, and what is measured on held-out data. All ranks call it.

    `model` still has the weights that training starts with, which are the reference of a method that needs one.
    `inputs`: of `fingerprint_inputs`.
    """
    if recipe.teacher is not None:
        try:
            teacher = load_teacher(recipe, world)
            check_training_forward(teacher.model, recipe.teacher, recipe.data, world)
        except UserError as error:
            raise UserError(f"teacher_model_name_or_path: {error}") from error
        return Objectives(Distillation(teacher), Distillation(teacher))
    facts = recipe.method_facts
    if facts.rows == "answers":
        return Objectives(SFT, SFT)
    references = find_references(model, recipe, data, inputs, world) if facts.needs_reference else None
    group = world.sequence_group
    if facts.rows == "ratings":
        assert references is not None, "ratings are of answers against the reference's"
        keys = recipe.method
        return Objectives(*(RatingObjective(keys, reference, sequence_group=group) for reference in references))
    training = PreferenceObjective(recipe.method, None, recipe.optimization.label_smoothing, sequence_group=group)
    held_out = replace(training, label_smoothing=0.0, chosen_tokens_per_pair=_chosen_tokens_per_pair(data.evaluation))
    if references is None:
        return Objectives(training, held_out)
    return Objectives(replace(training, reference=references[0]), replace(held_out, reference=references[1]))


def _chosen_tokens_per_pair(batches: StoredBatches | None) -> float | None:
    if batches is None:
        return None
    examples = batches.examples
    return int(examples.trained[:: examples.group_size].sum(dtype=np.int64)) / max(1, examples.groups)
