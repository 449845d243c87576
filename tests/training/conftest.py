"""A folder for each file of tests that starts ranks once for many of them."""

from pathlib import Path

import pytest

from tests.conftest import make_once
from tests.training.calling import teach


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all tests of a file share: models, recipes, runs."""
    return tmp_path_factory.mktemp(request.path.stem.removeprefix("test_").replace("_", "-"))


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learned to call a tool, trained once for all files of tests."""
    return make_once(tmp_path_factory, "caller", teach)
