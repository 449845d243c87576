"""Pushing to the hub: what is uploaded, and that an unreachable hub costs nothing. The hub is the one thing simulated here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from finetune.cli import main


class Hub:
    """Records its calls; fails with `error`."""

    asked: list[tuple[str, dict[str, Any]]]
    error: Exception | None = None

    def create_repo(self, repository: str, **keys: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(("create", {"repo_id": repository} | keys))

    def upload_folder(self, **keys: Any) -> None:
        self.asked.append(
            ("upload", keys | {"files": sorted(path.name for path in Path(keys["folder_path"]).iterdir())})
        )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    return Hub


def test_the_finished_folder_is_pushed(hub: type[Hub], tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["export", str(tiny_llama()), "--output", str(out), "--no-verify", "--push-to-hub", "me/mine"]
    assert main(command) == 0
    (_, created), (_, uploaded) = hub.asked
    assert (created["repo_id"], created["private"]) == ("me/mine", True)
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("me/mine", out)
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= set(uploaded["files"])


def test_an_unreachable_hub_costs_nothing(
    hub: type[Hub],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub, "error", ConnectionError("the hub is unreachable"))
    out = tmp_path / "out"
    command = ["export", str(tiny_llama()), "--output", str(out), "--no-verify", "--push-to-hub", "me/mine"]
    assert main(command) == 1
    assert f"me/mine: not pushed (the hub is unreachable); the export is in {out}" in capsys.readouterr().out
    assert (out / "model.safetensors").exists()
