"""Whatever is in a file, the reader has a recipe or a sentence; never a traceback."""

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config.keys import keys_of
from finetune.config.reader import read_overrides, read_recipe
from finetune.config.schema import DatasetSource, recipe_keys
from finetune.errors import UserError

NAMES = st.sampled_from(sorted(recipe_keys().keys() | keys_of(DatasetSource).keys())) | st.text(
    max_size=8
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def read(content: bytes, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.yaml"
        file.write_bytes(content)
        try:
            read_recipe(str(file), overrides)
        except UserError as error:
            assert str(error)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.lists(st.text(max_size=20), max_size=2))
def test_any_mapping(recipe: dict[str, object], overrides: list[str]) -> None:
    read(yaml.safe_dump(recipe).encode("utf-8", "surrogatepass"), read_overrides(overrides))


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text("-:[]{}&*!|>'\"%@`#,? \n\t0aé\u2028", max_size=60).map(str.encode)
)
def test_any_bytes(content: bytes) -> None:
    read(content, [])
