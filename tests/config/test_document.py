"""The page of recipe keys is the schema's, and the one of other tools' keys that of the tables."""

import itertools

from benchmarks.pages import DOCS, coming_from_page, recipes_page
from finetune.config.schema import recipe_keys
from finetune.convert.counterparts import DATA_SET_KEYS, KEYS, TOOL_NAMES, list_counterparts


def test_the_pages_are_current() -> None:
    assert (DOCS / "recipes.md").read_text(encoding="utf-8") == recipes_page(), (
        "run python benchmarks/pages.py"
    )
    assert (DOCS / "coming-from.md").read_text(encoding="utf-8") == coming_from_page(), (
        "run python benchmarks/pages.py"
    )


def test_every_key_is_on_it_with_a_sentence() -> None:
    page = recipes_page()
    for name, key in recipe_keys().items():
        assert f"| `{name}` |" in page
        assert key.help.endswith("."), name
        assert "|" not in key.help, f"{name}: would break the table"


def test_every_key_of_another_tool_that_differs_is_on_the_page_of_its_tool() -> None:
    shared, *sections = coming_from_page().partition("\n## ")[2].split("\n## ")
    by_tool = dict(zip(TOOL_NAMES, sections, strict=True))
    for tool, table in itertools.product(TOOL_NAMES, (KEYS, DATA_SET_KEYS)):
        for pair in list_counterparts(tool, table):
            is_renamed = pair.note or pair.ours != pair.key.rpartition(".")[2]
            if pair.has_effect and is_renamed:
                assert f"`{pair.key}`" in by_tool[tool] + shared, f"{tool}: {pair.key}"
