"""Converts a recipe of TRL, Axolotl, LLaMA-Factory, torchtune, NeMo Automodel or ms-swift; lists
what differs.

Nothing is dropped silently: differences are listed in the recipe, and a file of another method is
refused by name.
"""
