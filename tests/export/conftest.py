"""What the tests of the export share."""

import subprocess
from types import SimpleNamespace

import pytest

from finetune.export import reload_check
from tests.warm_processes import WarmCommand


@pytest.fixture(autouse=True)
def warm_reload(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The separate process that opens an export does not import all again, except where a test is marked `cold`."""
    if request.node.get_closest_marker("cold") is None:
        own = SimpleNamespace(Popen=WarmCommand, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(reload_check, "subprocess", own)
