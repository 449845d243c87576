"""Chooses the objective of the methods that learn the data's answers without a second model.

They are supervised fine-tuning, masked diffusion and early exits.
"""

from typing import Any

from finetune.config.schema import Recipe
from finetune.data.tokenizer import find_mask_id
from finetune.errors import UserError
from finetune.training.objectives.early_exit import EarlyExit
from finetune.training.objectives.masked_diffusion import MaskedDiffusion
from finetune.training.objectives.objective import SFT, Objective


def make_answer_objective(recipe: Recipe, tokenizer: Any, steps: int | None) -> Objective:
    """Makes the objective of the recipe's method.

    `steps`: how many steps the run has; None if that is unknown. Raises `UserError` if the method
    masks tokens and there is no mask token, or if the curriculum of exits needs an unknown `steps`.
    """
    facts = recipe.method_facts
    keys = recipe.method
    seed = recipe.run.seed
    if facts.masks:
        mask_id = find_mask_id(tokenizer, keys.mask_token)
        return MaskedDiffusion(mask_id, keys.mask_eps, seed)
    if facts.exits:
        if keys.exit_curriculum == "gradual" and steps is None:
            raise UserError(
                "exit_curriculum: gradual goes by the steps of the run, which neither max_steps "
                "nor data says; set max_steps"
            )
        return EarlyExit(keys, seed, steps)
    return SFT
