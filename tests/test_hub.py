"""Every failure of the hub becomes one sentence that says what to do. The hub itself is replaced."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from finetune.errors import UserError
from finetune.files.network import download_file
from tests.ranks import ROOT, environment


def test_the_export_of_a_run_that_has_not_been_trained_names_the_run() -> None:
    with pytest.raises(UserError) as refused:
        download_file("runs/quickstart/export", "config.json")
    assert str(refused.value) == (
        "runs/quickstart/export: no such folder: runs/quickstart has not been trained here, or not to its end; do that first "
        "(finetune launch --recipe quickstart)"
    )


def _answered(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    return kind("no", response=SimpleNamespace(status_code=status, headers={}, request=None))


CASES: list[tuple[Exception, str]] = [
    (_answered(errors.GatedRepoError, 403), "gated; accept its license at huggingface.co/a/b"),
    (
        _answered(errors.RepositoryNotFoundError, 404),
        "no such repository on the hub, or it is private",
    ),
    (_answered(errors.RevisionNotFoundError, 404), "no revision v2; correct model_revision"),
    (
        _answered(errors.RemoteEntryNotFoundError, 404),
        "has no config.json; name the repository of a transformers model",
    ),
    (
        errors.LocalEntryNotFoundError("not cached"),
        "config.json is not on this machine and HF_HUB_OFFLINE is set",
    ),
    (errors.OfflineModeIsEnabled("offline"), "is not on this machine"),
    (_answered(errors.HfHubHTTPError, 401), "the hub answered 401 for config.json; log in again"),
    (
        _answered(errors.HfHubHTTPError, 503),
        "the hub answered 503 for config.json; try again later",
    ),
    (errors.HFValidationError("form"), "neither a local folder nor a hub name"),
    (OSError("disk full\nmore"), "config.json cannot be downloaded (disk full)"),
]


@pytest.mark.parametrize(
    ("raised", "said"),
    CASES,
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_hub_that_fails_is_one_sentence(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UserError) as refused:
        download_file("a/b", "config.json", "v2")
    assert str(refused.value).startswith("a/b: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("offline", ["", "1"])
def test_without_a_network_one_sentence_answers_at_once(offline: str, tmp_path: Path) -> None:
    commands = (
        ["chat", "a/b", "--prompt", "Hi"],
        ["evaluate", "a/b", "--tasks", "hellaswag", "--no-compare"],
    )
    code = f"import sys; from finetune.cli import main; print(*map(main, {commands!r}), 'torch' in sys.modules)"
    # No server listens at this port, so each request is refused, as without a network.
    own = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment() | own,
        text=True,
        capture_output=True,
    )
    reason = "HF_HUB_OFFLINE is set" if offline else "the hub is unreachable"
    said = f"a/b: config.json is not on this machine and {reason}; download it while online with `hf download a/b`, or name"
    assert [line.startswith(said) for line in ended.stderr.splitlines()] == [True, True], (
        ended.stderr
    )
    assert ended.stdout.split() == ["2", "2", "False"]
