"""Files and folders are there whole or as they were before: writing, publishing by rename, locking."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.files.durable import (
    FolderInUse,
    checksum,
    lock_folder,
    publish_folder,
    recover_replaced,
    replace_file,
    stage_and_rename,
    write_file,
)
from finetune.training.metrics import MetricsLog


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    metrics.write_text(lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, before[1])
    )  # every write fails, as on a full disk (SIGXFSZ is ignored)
    try:
        with pytest.raises(OSError, match="too large"):
            MetricsLog(
                metrics, steps=3, start_step=1
            )  # a resumed run drops the lines after its checkpoint
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert metrics.read_text() == lines
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    replace_file(Path("/dev/null"), "new")
    assert not Path("/dev/null").is_file()


def test_what_a_killed_process_left_is_removed_by_the_next_replacement(tmp_path: Path) -> None:
    """Killed by SIGKILL while the file is written; what a process that still runs writes stays, and so do other files."""
    program = (
        "import os, signal, sys; from pathlib import Path; from finetune.files import durable\n"
        "durable.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "durable.replace_file(Path(sys.argv[1]), 'half')\n"
    )
    target = tmp_path / "recipe.yaml"
    killed = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert killed.returncode == -9 and len(list(tmp_path.iterdir())) == 1
    host = os.uname().nodename
    others = {
        f".recipe.yaml.{host}-{os.getppid()}.part",
        f".recipe.yaml.{host}-mine.part",
        ".recipe.yaml.bak",
    }
    others |= {
        ".recipe.yaml.another-host-99999999.part"
    }  # of a machine whose processes are not seen here
    for name in others:
        (tmp_path / name).write_text("")
    replace_file(target, "whole")
    assert {path.name for path in tmp_path.iterdir()} == others | {"recipe.yaml"}


def test_what_is_written_is_returned_with_the_checksum_that_reading_it_gives(
    tmp_path: Path,
) -> None:
    written = write_file(tmp_path / "file", [b"ab", memoryview(b"cd")])
    assert written["size"] == 4 and checksum(tmp_path / "file") == written
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b""])


class Folders:
    """The three names of one published folder."""

    def __init__(self, root: Path) -> None:
        self.target, self.staging, self.replaced = (
            root / "name",
            root / ".name.staging",
            root / ".name.replaced",
        )

    def publish(self, text: str, *, replace: bool = True) -> None:
        with stage_and_rename(
            self.target, self.staging, self.replaced if replace else None
        ) as staging:
            (staging / "file").write_text(text)

    def text(self) -> str:
        assert not self.staging.exists() and not self.replaced.exists()
        return (self.target / "file").read_text()


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    folders.staging.mkdir()
    (folders.staging / "left by a killed process").write_text("")
    folders.publish("old")
    assert folders.text() == "old" and len(list(folders.target.iterdir())) == 1
    with (
        pytest.raises(RuntimeError),
        stage_and_rename(folders.target, folders.staging, folders.replaced),
    ):
        raise RuntimeError
    assert folders.text() == "old"
    folders.publish("another process was first", replace=False)
    assert folders.text() == "old"
    folders.publish("new")
    assert folders.text() == "new"


def test_a_rename_that_fails_or_is_killed_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(tmp_path)
    folders.publish("old")
    with pytest.raises(FileNotFoundError):
        publish_folder(folders.target, folders.staging, folders.replaced)
    assert folders.text() == "old"
    folders.target.rename(folders.replaced)  # as a kill between the two renames leaves it
    recover_replaced(folders.target, folders.replaced)
    assert folders.text() == "old"
    real = Path.rename

    def rename(source: Path, target: Path) -> Path:
        if source == folders.staging:
            raise OSError(5, "Input/output error")
        return real(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        folders.publish("new")
    assert folders.text() == "old"


@pytest.mark.parametrize("file", [None, ".lock"], ids=["on the folder", "on a file"])
def test_a_lock_is_held_until_it_is_closed_or_its_process_is_gone(
    tmp_path: Path, file: str | None
) -> None:
    code = f"import sys; from pathlib import Path; from finetune.files.durable import *; lock_folder(Path({str(tmp_path)!r}), {file!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(
            FolderInUse, match=f"process {other.pid}" if file else "another process"
        ):
            lock_folder(tmp_path, file)
        other.kill()
    lock = lock_folder(tmp_path, file)
    with pytest.raises(FolderInUse):
        lock_folder(tmp_path, file)
    os.close(lock)
    os.close(lock_folder(tmp_path, file))


def test_the_lock_of_a_folder_that_was_renamed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import finetune.files.durable as durable

    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: folder.rename(tmp_path / "published"))
    with pytest.raises(FolderInUse):
        lock_folder(folder)
