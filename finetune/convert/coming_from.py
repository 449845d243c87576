"""docs/coming-from.md, made from the tables: `python -m finetune.convert.coming_from > docs/coming-from.md`."""

from collections.abc import Iterable

from finetune.convert.dataset_keys import ENTRY_KEYS
from finetune.convert.tool_keys import TOOLS
from finetune.recipe.counterpart import Counterpart


def coming_from_page() -> str:
    """docs/coming-from.md, from the tables."""
    lines = [
        "# Coming from TRL, Axolotl, LLaMA-Factory, torchtune or NeMo Automodel",
        "",
        "`finetune convert THEIR.yaml --output recipe.yaml` converts their file into a recipe: its values, and",
        "that tool's defaults where ours differ. Differences are listed in it; a file of another method is refused by name.",
        "Another tool's key in a recipe is an error that names ours. This page is made from the same tables",
        "(`finetune/config/other_tools.py`, `finetune/convert`): `python -m finetune.convert.coming_from > docs/coming-from.md`.",
        "",
        "Sharding, compute dtype and activation checkpointing belong in the Accelerate file that `accelerate_config` (or",
        "`--config`) names, and nowhere else: see [layouts](layouts.md). Keys that are the same in both are not in the tables.",
    ]
    for tool, pairs in TOOLS.items():
        lines += ["", f"## {tool}", "", "| There | Here | |", "| --- | --- | --- |"]
        lines += _rows(pairs)
        unneeded = ", ".join(f"`{pair.theirs}`" for pair in pairs if not pair.has_effect)
        lines += ["", f"Without effect here: {unneeded}."]
        lines += ["", "Within a data set's own entry:", "", "| There | Here | |", "| --- | --- | --- |"]
        lines += _rows(ENTRY_KEYS[tool])
    return "\n".join(lines) + "\n"


def _rows(pairs: Iterable[Counterpart]) -> list[str]:
    return [
        f"| `{pair.theirs}` | {f'`{pair.ours}`' if pair.ours else '–'} | {pair.note} |"
        for pair in pairs
        if pair.has_effect and (pair.ours != pair.theirs or pair.note)
    ]


if __name__ == "__main__":
    print(coming_from_page(), end="")
