"""Whether the data fits the model, by the model's config alone: what `launch` warns of or refuses, before it."""

from typing import Any

from finetune.errors import UserError
from finetune.recipe.schema import Recipe


def too_long(longest: int, positions: int | None) -> list[str]:
    """A warning where examples are longer than what the model was made for.

    >>> too_long(512, 512), too_long(512, None)
    ([], [])
    >>> "but the model was made for 512 positions" in too_long(1024, 512)[0]
    True
    """
    if positions is None or longest <= positions:
        return []
    return [
        f"warning: examples have up to {longest:,} tokens, but the model was made for {positions:,} positions "
        f"(max_position_embeddings of its config); set max_length: {positions}"
    ]


def misfits(recipe: Recipe, tokenizer: Any, longest: int) -> list[str]:
    """What `launch` would say of the recipe's model beside data whose longest example has `longest` tokens.

    A line that begins with `fatal:` is what it would refuse.
    """
    from finetune.models.build import load_config
    from finetune.models.load import refuse_unfit

    try:
        config = load_config(recipe.model)
    except UserError as error:
        return [f"notice: not compared with the model: {error}"]
    lines = too_long(longest, getattr(config, "max_position_embeddings", None))
    try:
        refuse_unfit(config, recipe.model, len(tokenizer))
    except UserError as error:
        lines.append(f"fatal: {error}")
    return lines
