"""Converts a recipe of TRL, Axolotl, LLaMA-Factory, torchtune, NeMo Automodel or ms-swift; lists
what differs.

Nothing is dropped silently: the recipe lists every difference, and a file whose method is not
supported is refused by name.

In all messages of this package "there" is the other tool and "here" this toolkit. A comment above
a message or a table names where the other tool's source code does what is said.
"""
