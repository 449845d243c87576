"""The page of recipe keys is the schema's."""

from finetune.config.docs import PAGE, document
from finetune.config.schema import recipe_keys


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run python -m finetune.config.docs"


def test_every_key_is_on_it_with_a_sentence() -> None:
    page = document()
    for name, key in recipe_keys().items():
        assert f"| `{name}` |" in page
        assert key.help.endswith("."), name
        assert "|" not in key.help, f"{name}: would break the table"
