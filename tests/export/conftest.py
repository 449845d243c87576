"""What the tests of the export share."""

import pytest

from finetune.export import reload_check
from tests.warm_processes import warm_reload


@pytest.fixture(autouse=True)
def reload_warm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The separate process that opens an export does not import all again, except where a test is marked `cold`."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(reload_check, "subprocess", warm_reload())
