"""A folder for each file of tests that starts ranks once for many of them."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all tests of a file share: models, recipes, runs."""
    return tmp_path_factory.mktemp(request.path.stem.removeprefix("test_").replace("_", "-"))
