"""docs/coming-from.md, made from the tables: `python -m finetune.convert.docs_page > docs/coming-from.md`."""

from collections.abc import Iterable

from finetune.convert.datasets import ENTRY_KEYS
from finetune.recipe.hints import TOOLS, Counterpart


def coming_from_page() -> str:
    """docs/coming-from.md, from the tables."""
    lines = [
        "# Coming from TRL, Axolotl, LLaMA-Factory or torchtune",
        "",
        "`finetune convert THEIR.yaml --output recipe.yaml` writes our recipe from theirs, and lists what has no counterpart. A",
        "key of theirs in a recipe of ours is an error that names ours. This page is made from the same tables",
        "(`finetune/recipe/hints.py`, `finetune/convert/datasets.py`): `python -m finetune.convert.docs_page > docs/coming-from.md`.",
        "",
        "Sharding, computing precision and activation checkpointing stand in the Accelerate file that `accelerate_config` (or",
        "`--config`) names, and nowhere else: see [layouts](layouts.md). Keys that are the same in both are left out of the tables.",
    ]
    for tool, pairs in TOOLS.items():
        lines += ["", f"## {tool}", "", "| There | Here | |", "| --- | --- | --- |"]
        lines += _rows(pairs)
        lines += ["", "Within a data set's own entry:", "", "| There | Here | |", "| --- | --- | --- |"]
        lines += _rows(ENTRY_KEYS[tool])
    return "\n".join(lines) + "\n"


def _rows(pairs: Iterable[Counterpart]) -> list[str]:
    return [
        f"| `{pair.theirs}` | {f'`{pair.ours}`' if pair.ours else '–'} | {pair.note} |"
        for pair in pairs
        if pair.ours != pair.theirs or pair.note
    ]


if __name__ == "__main__":
    print(coming_from_page(), end="")
