"""The objectives of a run, chosen by its method."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from finetune.data.batches import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.distributed.world import World
from finetune.models.probe import check_training_forward
from finetune.models.teacher import load_teacher
from finetune.recipe.schema import Recipe
from finetune.training.distillation import Distillation
from finetune.training.objective import SFT, Objectives
from finetune.training.preference_objective import PreferenceObjective
from finetune.training.reference import StoredReference, load_or_compute, trains_adapters_alone, without_adapters


def make_objectives(
    model: nn.Module, recipe: Recipe, data: PreparedData, inputs: Mapping[str, str], world: World
) -> Objectives:
    """What the run minimizes, and what is measured on held-out data. All ranks call it.

    `model` still has the weights that training starts with, which are the reference of a method that needs one.
    `inputs`: of `fingerprint_inputs`.
    """
    if recipe.teacher is not None:
        teacher = load_teacher(recipe, world)
        check_training_forward(teacher.model, recipe.teacher, recipe.data, world)
        return Objectives(Distillation(teacher), Distillation(teacher))
    if recipe.method_facts.rows == "answers":
        return Objectives(SFT, SFT)
    training = PreferenceObjective(recipe.method, None, recipe.optimization.label_smoothing)
    held_out = replace(training, label_smoothing=0.0, chosen_tokens_per_pair=_chosen_tokens_per_pair(data.evaluation))
    if not recipe.method_facts.needs_reference:
        return Objectives(training, held_out)
    if trains_adapters_alone(model):
        return Objectives(replace(training, reference=without_adapters), replace(held_out, reference=without_adapters))
    found = load_or_compute(model, recipe, data, inputs.get("base"), world)
    tables = {name: StoredReference(values) for name, values in found.items()}
    return Objectives(
        replace(training, reference=tables["training"]), replace(held_out, reference=tables.get("held_out"))
    )


def _chosen_tokens_per_pair(batches: StoredBatches | None) -> float | None:
    if batches is None:
        return None
    examples = batches.examples
    return int(examples.trained[:: examples.group_size].sum(dtype=np.int64)) / max(1, examples.groups)
