"""An export appears whole or not at all, whatever happens to it on the way; then it is pushed, or kept where that fails.

The hub is the one thing simulated here.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from finetune.cli import main
from finetune.errors import UserError
from finetune.export.export import export
from finetune.export.publish import check_disk_space, exit_on_signals, publish
from finetune.files.tensors import header_bytes, read_folder
from tests.ranks import ROOT, environment
from tests.warm_processes import WarmProcess

VOCABULARY = 1_000_000  # of the large model, whose embeddings take a second to write


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of half a gigabyte of zeros, which takes no room on the disk."""
    from tests.conftest import make_model

    folder = make_model(tmp_path_factory.mktemp("large") / "model")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        name: (VOCABULARY, *tensor.shape[1:])
        if "embed_tokens" in name or "lm_head" in name
        else tensor.shape
        for name, tensor in read_folder(folder).items()
    }
    dtype = next(iter(read_folder(folder).values())).dtype
    entries = ((name, dtype, shape) for name, shape in shapes.items())
    header = header_bytes(entries, {"format": "pt"})
    file = folder / "model.safetensors"
    file.write_bytes(header)
    with file.open("r+b") as opened:
        size = (
            sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
            * dtype.itemsize
        )
        opened.truncate(len(header) + size)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_stopped_leaves_nothing(
    number: signal.Signals, large: Path, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "results" / "new" / "out"
    command = ["-m", "finetune", "export", str(large), "--output", str(out)]
    process = WarmProcess(command, environment(), Path(os.devnull), tmp_path / "stderr", cwd=ROOT)
    half_made = out.parent / ".out.exporting" / "model.safetensors"
    deadline = time.monotonic() + 60
    while not (half_made.exists() and half_made.stat().st_blocks * 512 > 10_000_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(UserError, match="another process is exporting to it"), publish(out):
        pass
    os.kill(process.pid, number)
    assert process.wait(timeout=30) != 0
    assert not out.exists()
    assert out.parent.exists() == (
        number == signal.SIGKILL
    )  # after which nobody can clear away; the next export does
    assert main(["export", str(tiny_llama()), "--output", str(out), "--no-verify"]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert read_folder(out)


def test_folders_above_it_are_removed_where_they_were_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), publish(tmp_path / "mine" / "a" / "b" / "out"):
        raise RuntimeError
    assert list((tmp_path / "mine").iterdir()) == []
    with pytest.raises(RuntimeError), publish(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "note").write_text("someone else's")
        raise RuntimeError
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "note"]


def test_a_full_disk_is_reported_before_and_while_writing(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"the export takes 1,000,000 TB, but the disk has"):
        check_disk_space(tmp_path, 10**18)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (50_000_000, before[1])
    )  # a write beyond it fails, as on a full disk
    try:
        assert main(["export", str(large), "--output", str(tmp_path / "out"), "--no-verify"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        "cannot be written: File too large; nothing is left of the export"
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_old_until_the_new_stands(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(tiny_llama("one")), "--output", str(out), "--no-verify"]) == 0
    (out / "mark").write_text("old")
    with pytest.raises(RuntimeError), publish(out, overwrite=True) as staging:
        (staging / "config.json").write_text("{}")
        raise RuntimeError
    assert (out / "mark").read_text() == "old"
    assert (
        main(["export", str(tmp_path / "one"), "--output", str(out), "--no-verify", "--overwrite"])
        == 0
    )
    assert not (out / "mark").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]


def test_a_place_that_cannot_be_written_is_reported(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", str(tiny_llama()), "--output", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written: Not a directory; choose another --output" in capsys.readouterr().err


def test_a_bucket_is_no_folder_to_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^s3://bucket/a: a URL; name a folder of this machine"):
        export(tmp_path, "s3://bucket/a")
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_replaced(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_llama()
    (tmp_path / "out").symlink_to(model)
    other = tiny_llama("other")
    assert (
        main(
            ["export", str(other), "--output", str(tmp_path / "out"), "--no-verify", "--overwrite"]
        )
        == 2
    )
    assert (model / "config.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_the_exit_even_where_a_library_makes_another_error_of_it(
    number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    handler = signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler
    request.addfinalizer(
        partial(signal.signal, number, signal.signal(number, handler))
    )  # nohup ignores SIGHUP
    with pytest.raises(SystemExit) as stopped, exit_on_signals():
        try:
            signal.raise_signal(number)
        except SystemExit:
            raise ValueError(
                "could not determine the shape of a storage"
            ) from None  # as torch does now and then
    assert stopped.value.code == 128 + number


class Hub:
    """Cannot be reached; what is sent to one that can is in test_push.py."""

    def create_repo(self, repository: str, **keys: Any) -> None:
        raise ConnectionError("the hub is unreachable")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")


def test_without_a_token_nothing_is_exported_to_be_pushed(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert (
        main(
            [
                "export",
                str(tiny_llama()),
                "--output",
                str(tmp_path / "out"),
                "--push-to-hub",
                "me/mine",
            ]
        )
        == 2
    )
    assert "there is no token of the hub here; log in with hf auth login" in capsys.readouterr().err
    assert (
        main(
            [
                "export",
                str(tiny_llama()),
                "--output",
                str(tmp_path / "out"),
                "--push-to-hub",
                "me/my/model",
            ]
        )
        == 2
    )
    assert "--push-to-hub: me/my/model: a name of the hub is expected" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("hub")
def test_an_unreachable_hub_costs_nothing(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        "export",
        str(tiny_llama()),
        "--output",
        str(out),
        "--no-verify",
        "--push-to-hub",
        "me/mine",
    ]
    assert main(command) == 1
    assert (
        f"me/mine: not pushed (the hub is unreachable); the export is in {out}"
        in capsys.readouterr().out
    )
    assert (out / "model.safetensors").exists()
