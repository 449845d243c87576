"""A maker of prepared data, for tests that begin at a recipe and end at batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from finetune.config.reader import read_recipe
from finetune.data.prepare import PreparedData, prepare_data
from finetune.data.tokenizer import load_tokenizer
from tests.conftest import make_tokenizer
from tests.data.world import Rank

Prepare = Callable[..., PreparedData]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """A maker of prepared data from recipe keys, with the tests' byte-level tokenizer unless one is given."""
    tokenizer = tmp_path / "tokenizer"
    make_tokenizer().save_pretrained(tokenizer)

    def make(
        datasets: list[dict[str, Any]], *, rank: int = 0, size: int = 1, **keys: Any
    ) -> PreparedData:
        recipe = {
            "model_config": {"model_type": "llama"},
            "tokenizer_name_or_path": str(tokenizer),
            "dataset_cache_dir": str(tmp_path / "cache"),
            "max_length": 64,
            "datasets": datasets,
        } | keys
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        read = read_recipe(str(path))
        tokenizer_of_run = load_tokenizer(read.model, read.data)
        return prepare_data(read, tokenizer_of_run, Rank(rank, size))

    return make


@pytest.fixture(scope="module")
def shared_tokenizer(shared: Path) -> Any:
    """Llama 3's; the test skips where it is absent."""
    folder = shared / "tokenizers" / "llama3"
    if not folder.is_dir():
        pytest.skip(f"no tokenizer in {folder}")
    return AutoTokenizer.from_pretrained(folder)
