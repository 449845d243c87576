"""Every key of a recipe is shown by a test: one that no test names would be a promise that nobody holds."""

import re
from pathlib import Path

import pytest

from finetune.config.keys import keys_of
from finetune.config.schema import DatasetSource, recipe_keys

TESTS = Path(__file__).resolve().parents[1]
# Lists of many keys show the effect of none.
LISTS = {
    Path(__file__).name,
    "test_convert.py",
    "test_reader.py",
    "test_document.py",
    "test_any_file.py",
}
TEXT = "\n".join(path.read_text() for path in sorted(TESTS.rglob("*.py")) if path.name not in LISTS)


@pytest.mark.parametrize("key", sorted({*recipe_keys(), *keys_of(DatasetSource)}))
def test_the_key_is_named_by_a_test(key: str) -> None:
    assert re.search(rf"\b{key}\b", TEXT), f"no test shows what {key} does"
