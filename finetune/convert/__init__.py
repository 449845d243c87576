"""Our recipe from TRL's, Axolotl's, LLaMA-Factory's, torchtune's or NeMo Automodel's file, with the same meaning.

Nothing is dropped silently: what differs is listed in the recipe, and a file of another method is refused by name.
"""

from finetune.convert.cli import convert_command

__all__ = ["convert_command"]
