"""The page of recipe keys is the schema's, and the one of other tools' keys that of the tables."""

from benchmarks.pages import DOCS, coming_from_page, recipes_page
from finetune.config.schema import recipe_keys


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
