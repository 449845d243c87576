"""Converts a file of TRL, Axolotl, LLaMA-Factory, torchtune or NeMo Automodel into our recipe and lists what differs.

Nothing is dropped silently: differences are listed in the recipe, and a file of another method is refused by name.
"""
