"""Manifests without torch: publish, verify, list."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoint import folders, manifest
from finetune.cli import main, read_arguments
from finetune.errors import UserError
from finetune.files import durable
from tests.checkpoint.plain_state import state_of


def write_checkpoint(
    run_folder: Path, step: int, content: bytes = b"weights", **changed: Any
) -> Path:
    """A published checkpoint of one file in each part."""
    staging = folders.staging_folder(run_folder, step)
    folders.make_staging(staging)
    names = [
        "model/pieces-00000-of-00001.safetensors",
        "optimizer/pieces-00000-of-00001.safetensors",
    ]
    written = {
        name: durable.write_file(staging / name, [content, str(step).encode()]) for name in names
    }
    written[manifest.STATE] = durable.write_file(staging / manifest.STATE, [state_of(step)])
    facts: dict[str, Any] = {
        "step": step,
        "layout": "single",
        "ranks": 1,
        "recipe_sha256": "",
        "packages": {},
    }
    manifest.complete(staging, manifest.Manifest(files=written, **facts | changed))
    return folders.publish(run_folder, staging, step)


def test_the_newest_is_the_highest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    import os

    for step in (30, 10, 20):
        checkpoint = write_checkpoint(tmp_path, step)
        os.utime(checkpoint, (0, 1_000_000 - step))
    assert folders.find_newest_valid(tmp_path) == folders.step_folder(tmp_path, 30)
    folders.prune(tmp_path, newest=30, keep=2)
    assert [step for step, _ in folders.list_checkpoints(tmp_path)] == [20, 30]


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 7)
    for path in [p for p in sorted(checkpoint.rglob("*")) if p.is_file()]:
        original = path.read_bytes()
        for position in range(len(original)):
            changed = bytearray(original)
            changed[position] ^= 1
            path.write_bytes(changed)
            assert manifest.find_damage(checkpoint), f"{path.name}: byte {position}"
        path.write_bytes(original)
    assert manifest.find_damage(checkpoint) == []


def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    newer = write_checkpoint(tmp_path, 2)
    (newer / manifest.STATE).unlink()
    logged: list[str] = []
    assert folders.find_newest_valid(tmp_path, logged.append) == folders.step_folder(tmp_path, 1)
    assert logged == [f"{newer}: passed over: state.json is missing"]


def test_one_that_its_run_prunes_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run replaces its only checkpoint by the next step's, before the listed one is read."""

    def replace_first(checkpoint: Path, **keys: Any) -> list[str]:
        following = int(checkpoint.name[-1]) + 1
        if following % 2 == 0:
            write_checkpoint(tmp_path, following)
            checkpoint.rename(checkpoint.with_name(".pruned"))
            shutil.rmtree(checkpoint.with_name(".pruned"))
        return manifest.find_damage(checkpoint, **keys)

    logged: list[str] = []
    write_checkpoint(tmp_path, 1)
    newest = folders.find_newest_valid(tmp_path, logged.append, verify=replace_first)
    assert newest == folders.step_folder(tmp_path, 2) and not logged
    monkeypatch.setattr(folders, "find_damage", replace_first)
    write_checkpoint(tmp_path, 3)
    listed = folders.summarize_checkpoints(tmp_path, checksums=False)
    assert [(each.step, each.problems) for each in listed] == [(2, [])]


def test_a_path_that_is_no_checkpoint_is_said_with_what_to_give(tmp_path: Path) -> None:
    """A model's folder, or a checkpoint of another tool's: nothing in it is damaged."""
    from finetune.checkpoint.resume import find_checkpoint
    from tests.checkpoint.tiny_run import ALONE

    newest = write_checkpoint(tmp_path / "other", 2)
    for folder in (newest / "model", tmp_path):
        with pytest.raises(
            UserError, match=r"neither a checkpoint nor a run .* model_name_or_path"
        ):
            find_checkpoint(str(folder), tmp_path / "run", ALONE)
    (newest / manifest.STATE).unlink()
    with pytest.raises(
        UserError, match=r"state\.json is missing; give another checkpoint, or the run's"
    ):
        find_checkpoint(str(newest), tmp_path / "run", ALONE)


def test_whoever_waits_hears_of_every_byte_that_is_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 7)
    read: list[int] = []
    assert manifest.find_damage(checkpoint, parts=[manifest.MODEL], advance=read.append) == []
    assert sum(read) == sum(
        path.stat().st_size
        for path in [*(checkpoint / "model").iterdir(), checkpoint / manifest.STATE]
    )


def test_the_manifest_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    one, other = (
        write_checkpoint(tmp_path / "a", 5),
        write_checkpoint(tmp_path / "b", 5, content=b"others!"),
    )
    (one / manifest.MANIFEST).write_bytes((other / manifest.MANIFEST).read_bytes())
    assert any("does not match its checksum" in problem for problem in manifest.find_damage(one))
    assert json.loads((other / manifest.MANIFEST).read_text())["step"] == 5


def test_the_list_prints_a_command_that_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "my runs" / "it's", 10)
    assert main(["checkpoints", str(tmp_path / "my runs" / "it's")]) == 0
    said = capsys.readouterr().out
    assert "written as single on 1 rank; whole" in said
    command = said.partition("export:")[2].partition("   (")[0]
    assert read_arguments(shlex.split(command)[1:]).source == str(checkpoint)

    assert main(["checkpoints", str(tmp_path / "nosuch")]) == 2
    asked = f"{tmp_path}/nosuch: no such folder; name a run's, such as runs/quickstart\n"
    assert capsys.readouterr().err == asked
    for part in (checkpoint, checkpoint.parent):
        assert main(["checkpoints", str(part)]) == 2
        said = capsys.readouterr().err
        assert said == f"{part}: a part of a run; name the run's folder, {checkpoint.parents[1]}\n"
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"{tmp_path}: no run's folder, for it has neither recipe.yaml nor "
    )
    (tmp_path / "recipe.yaml").touch()
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: has no checkpoints yet\n"
