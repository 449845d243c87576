"""Our recipe from TRL's, Axolotl's, LLaMA-Factory's or torchtune's file.

The keys and their counterparts are the tables of finetune/recipe/hints.py; here stands how values are carried over.
Nothing is dropped without a word: what has no counterpart is listed in the recipe, with the reason.
"""

from finetune.convert.cli import convert_command

__all__ = ["convert_command"]
