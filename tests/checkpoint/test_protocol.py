"""The protocol killed at every single operation on the file system, on a disk that loses all that was not fsynced."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint import folders, manifest
from finetune.files import durable
from tests.checkpoint.plain_state import state_of

KEEP = 2
PATCHED = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Killed(BaseException):
    """The process is no more: nothing that it would do in an `except` or `finally` happens either."""


class Disk:
    """Counts the operations under `root`, dies at the `last`-th, and knows what a power cut would take away."""

    def __init__(self, root: Path, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.last, self.count = str(root), last, 0
        self.unsynced_files: set[int] = set()  # inodes whose bytes are in memory only
        self.unsynced_names: list[
            tuple[str, Callable[[], None]]
        ] = []  # (folder, how to undo the change in it)
        self._paths: dict[int, str] = {}  # of open descriptors
        self._real = {name: getattr(os, name) for name in PATCHED}
        for name in PATCHED:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))

    def power_cut(self) -> None:
        for _, undo in reversed(self.unsynced_names):
            undo()
        for path in Path(self.root).rglob("*"):
            if path.is_file() and path.stat().st_ino in self.unsynced_files:
                os.truncate(path, 0)

    def _operation(self) -> None:
        self.count += 1
        if self.count >= self.last:
            raise Killed

    def _changed(self, path: str, undo: Callable[[], None]) -> None:
        self.unsynced_names.append((str(Path(path).parent), undo))

    def _open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        created = bool(flags & os.O_CREAT) and str(path).startswith(self.root)
        if created:
            self._operation()
        descriptor: int = self._real["open"](path, flags, *rest, **options)
        self._paths[descriptor] = str(path)
        if created:
            self._changed(str(path), lambda: self._real["unlink"](path))
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        self._operation()
        self.unsynced_files.add(os.fstat(descriptor).st_ino)
        half = max(1, len(data) // 2)  # a kill can come between two halves of a file
        written: int = self._real["write"](descriptor, data[:half])
        return written

    def _fsync(self, descriptor: int) -> None:
        self._operation()
        self.unsynced_files.discard(os.fstat(descriptor).st_ino)
        path = self._paths[descriptor]
        self.unsynced_names = [
            (where, undo) for where, undo in self.unsynced_names if where != path
        ]

    def _rename(self, source: Any, target: Any) -> None:
        self._operation()
        self._real["rename"](source, target)
        self._changed(str(target), lambda: self._real["rename"](target, source))

    def _mkdir(self, path: Any, *rest: Any, **options: Any) -> None:
        self._operation()
        self._real["mkdir"](path, *rest, **options)
        self._changed(str(path), lambda: self._real["rmdir"](path))

    def _unlink(self, *arguments: Any, **options: Any) -> None:
        self._operation()
        self._real["unlink"](*arguments, **options)

    def _rmdir(self, *arguments: Any, **options: Any) -> None:
        self._operation()
        self._real["rmdir"](*arguments, **options)


def write_checkpoint(run_folder: Path, step: int, content: bytes) -> None:
    """One save as a world of one does it: stage, complete, publish, prune."""
    staging = folders.staging_folder(run_folder, step)
    folders.make_staging(staging)
    names = [
        "model/pieces-00000-of-00001.safetensors",
        "optimizer/pieces-00000-of-00001.safetensors",
    ]
    written = {name: durable.write_file(staging / name, [content, name.encode()]) for name in names}
    written[manifest.STATE] = durable.write_file(staging / manifest.STATE, [state_of(step)])
    described = manifest.Manifest(
        step=step, layout="single", ranks=1, recipe_sha256="", packages={}, files=written
    )
    manifest.complete(staging, described)
    folders.publish(run_folder, staging, step)
    folders.prune(run_folder, step, keep=KEEP)


@dataclass(frozen=True)
class Story:
    """A run that has published `before` saves `step`."""

    before: tuple[int, ...]
    step: int

    def begin(self, root: Path) -> None:
        for step in self.before:
            write_checkpoint(root, step, b"before")

    def run_until(
        self, last: int, root: Path, monkeypatch: pytest.MonkeyPatch, power_cut: bool
    ) -> bool:
        """Saves on a disk that dies at its `last`-th operation. Returns whether the save came to its end."""
        with monkeypatch.context() as patch:
            disk = Disk(root, last, patch)
            try:
                write_checkpoint(root, self.step, b"newer")
                return True
            except Killed:
                pass
        if power_cut:
            disk.power_cut()
        return False


STORIES = {"first": Story((), 1), "pruning": Story((1, 2), 3), "replacing": Story((1, 2), 2)}


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_no_published_checkpoint_is_ever_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Story, power_cut: bool
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # the disk below knows what it would have done
    for kill in range(1, 1000):
        root = tmp_path / str(kill)
        story.begin(root)
        ended = story.run_until(kill, root, monkeypatch, power_cut)
        folders.remove_leftovers(root)  # what the next start does first
        found = {step: manifest.find_damage(path) for step, path in folders.list_checkpoints(root)}
        assert not any(found.values()), f"killed at operation {kill}: {found}"
        ever = {*story.before, *found} | ({story.step} if ended else set())
        assert set(sorted(ever)[-KEEP:]) <= found.keys(), (
            f"killed at operation {kill}: only {list(found)} are left"
        )
        left = {path.name for path in folders.checkpoints_folder(root).glob("*")}
        assert left == {f"step-{step:08d}" for step in found}, f"killed at operation {kill}: {left}"
        write_checkpoint(root, 9, b"the run continues")
        assert folders.find_newest_valid(root) == folders.step_folder(root, 9)
        if ended:
            print(f"killed at each of {kill - 1} operations")
            return


def test_the_disk_of_these_tests_loses_what_was_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above must be able to fail: where no folder is synced, a published checkpoint is gone after a power cut."""
    story = STORIES["first"]
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_folder", lambda path: None)
        disk = Disk(tmp_path, 1000, patch)
        write_checkpoint(tmp_path, story.step, b"newer")
    assert folders.find_newest_valid(tmp_path) == folders.step_folder(tmp_path, story.step)
    disk.power_cut()
    assert folders.find_newest_valid(tmp_path) is None
