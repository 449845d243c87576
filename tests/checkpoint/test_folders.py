"""Which checkpoints a run keeps: never is the one gone that it would need, whatever is wrong with the others."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.checkpoint import folders, manifest
from finetune.checkpoint.folders import format_list, summarize_checkpoints
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import find_resume_checkpoint, load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.distributed.join import join, leave
from finetune.distributed.world import World
from finetune.errors import AgreedError, UserError
from finetune.files import durable
from tests.checkpoint.tiny_run import build
from tests.conftest import make_chat, make_model, make_tokenizer

DEEP = b"[" * 50_000 + b"]" * 50_000


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = join(Sharding(layout="single", use_cpu=True))
    yield world
    leave(world)


class Run:
    """A run of a tiny model, which is saved at chosen steps without being trained."""

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.folder, self.world = root, root / "run", world
        make_chat(root / "chat.jsonl", rows=4)
        self.model, self.optimizer = build(
            str(make_model(root / "model", num_hidden_layers=1)), False, world
        )

    def _recipe(self, limit: int | None, **keys: Any) -> Any:
        content = {
            "model_name_or_path": str(self.root / "model"),
            "datasets": [{"path": str(self.root / "chat.jsonl")}],
        }
        path = self.root / "recipe.yaml"
        path.write_text(
            json.dumps(content | {"output_dir": str(self.folder), "save_total_limit": limit} | keys)
        )
        return read_recipe(str(path))

    def make_saver(self, limit: int | None, **keys: Any) -> Saver:
        return Saver(
            self.folder,
            self.model,
            self.optimizer,
            self.world,
            self._recipe(limit, **keys),
            make_tokenizer(),
        )

    def save(self, *steps: int, limit: int | None = None) -> None:
        saver = self.make_saver(limit)
        for step in steps:
            saver.save(Progress(step=step))

    def start(self, limit: int | None = None) -> int:
        """The step at which the next start resumes."""
        folders.remove_leftovers(self.folder)
        start = find_resume_checkpoint(self._recipe(limit), self.folder, self.world)
        return load_checkpoint(start, self.model, self.optimizer, self.world).step

    def damage(self, *steps: int) -> None:
        """Flips a byte of the weights: the sizes stay right."""
        for step in steps:
            weights = next(
                (folders.step_folder(self.folder, step) / manifest.MODEL).glob("*.safetensors")
            )
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)

    def names(self) -> list[str]:
        return sorted(
            path.name
            for path in folders.checkpoints_folder(self.folder).iterdir()
            if path.name[0] != "."
        )


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    return Run(tmp_path, world)


def test_a_step_saved_below_damaged_ones_is_kept_and_resumed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(4, 8, 12)
    run.damage(8, 12)
    assert run.start(limit=2) == 4
    assert "damaged-00000008: damaged, kept under this name until" in capsys.readouterr().out
    run.save(6, limit=2)  # a signal came at step 6
    assert run.names() == ["damaged-00000008", "damaged-00000012", "step-00000004", "step-00000006"]
    assert run.start() == 6
    listed = format_list(
        run.folder, summarize_checkpoints(run.folder, checksums=True), verified=True
    )
    assert [line.split(":")[0] for line in listed if line.startswith("damaged-")] == run.names()[:2]
    run.save(8, 12, limit=2)
    run.damage(12)
    assert run.start() == 8
    assert run.names() == ["damaged-00000012", "step-00000008"], (
        "of a step that is saved again, the sound one stays"
    )
    run.save(12, limit=None)
    run.damage(12)
    assert run.start(limit=None) == 8
    assert "damaged-00000012-2: damaged, kept under this name\n" in capsys.readouterr().out
    assert run.names() == ["damaged-00000012", "damaged-00000012-2", "step-00000008"], (
        "without a limit all are kept"
    )


BEST = {"keep_best_checkpoint": True, "eval_split_size": 1}


@pytest.mark.parametrize(
    ("limit", "keys"),
    [
        (2, {}),
        (2, {"keep_every_steps": 6}),
        (2, {"keep_every_steps": 3}),
        (2, BEST | {"eval_steps": 2}),
        (2, {"save_strategy": "epoch", "save_steps": None}),
        (None, {}),
        (None, BEST | {"eval_steps": 3}),
    ],
    ids=[
        "",
        "milestones",
        "milestones between saves",
        "best",
        "epochs of a stream",
        "all",
        "all and the best",
    ],
)
def test_a_run_starts_only_if_the_disk_holds_what_it_keeps_beyond_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch, limit: int | None, keys: dict[str, Any]
) -> None:
    """Against the most checkpoints that real saves leave side by side, the one just written too."""
    run.save(1)  # as a signal asks for it
    saver = run.make_saver(limit, **{"save_steps": 2} | keys)
    beside: list[int] = []

    def prune(folder: Path, *arguments: Any) -> list[str]:
        beside.append(len(run.names()))
        return folders.prune(folder, *arguments)

    monkeypatch.setattr("finetune.checkpoint.save.prune", prune)
    with monkeypatch.context() as full:
        full.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(UserError) as refused:
            saver.check_save(18)
    for step in range(2, 19):
        if step % 2 == 0 or step % keys.get("eval_steps", 2) == 0:
            saver.save(Progress(step=step, best_step=4 if limit else step))
    assert f"will write {max(beside) - 1} checkpoint" in str(refused.value)


@pytest.mark.parametrize("which", ["model", "method"])
def test_files_that_rank_0_cannot_describe_are_an_error_of_all_ranks(
    run: Run, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Else the other ranks wait for rank 0 in the next collective, until it times out."""

    def fail(*_: object) -> dict[str, bytes]:
        raise PermissionError(13, "Permission denied", "tokenizer.json")

    saver = run.make_saver(2)
    with pytest.raises(AgreedError, match=r"tokenizer\.json: Permission denied"):
        if which == "model":
            monkeypatch.setattr("finetune.checkpoint.save.describe_model", fail)
            run.make_saver(2)
        else:
            monkeypatch.setattr(saver, "_describe_files", fail)
            saver.save(Progress(step=1))


def test_with_a_limit_of_one_the_step_just_published_stays(run: Run) -> None:
    run.save(8, 10)
    run.damage(10)
    assert run.start() == 8
    run.save(9, limit=1)
    assert run.start() == 9, "not removed in favor of the damaged one"


def test_later_checkpoints_that_are_not_known_to_be_sound_are_neither_counted_nor_removed(
    run: Run,
) -> None:
    run.save(2, 4, 10)
    assert folders.prune(run.folder, newest=4, keep=1) == []
    assert run.names() == ["step-00000004", "step-00000010"]


def test_an_old_step_that_is_a_link_is_pruned_and_what_it_leads_to_stays(run: Run) -> None:
    run.save(1)
    elsewhere = run.root / "another disk" / "step-00000001"
    elsewhere.parent.mkdir()
    folders.step_folder(run.folder, 1).rename(elsewhere)
    folders.step_folder(run.folder, 1).symlink_to(elsewhere)
    run.save(2, limit=1)
    assert run.names() == ["step-00000002"]
    assert (elsewhere / manifest.MANIFEST).exists()
    assert run.start() == 2


def test_what_cannot_be_removed_is_reported_and_stops_neither_the_save_nor_the_next_start(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = durable.remove_tree

    def remove(path: Path, *, ignore_errors: bool = False) -> None:
        if ".pruned" not in path.name or not path.exists():
            real(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(
                39, "Directory not empty", str(path)
            )  # as NFS says while another machine reads the folder

    run.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_tree", remove)
        run.save(2, limit=1)
        said = capsys.readouterr().out
        assert (
            "step-00000001: an old checkpoint that could not be removed: Directory not empty"
            in said
        )
        assert run.start() == 2
    assert run.start() == 2
    assert not list(folders.checkpoints_folder(run.folder).glob(".pruned-*"))


MANIFESTS: dict[str, Any] = {
    "a list": [],
    "files is a list": {"files": [["a", 1]]},
    "files of numbers": {"files": {"state.json": 3}},
    "sizes of text": {"files": {"state.json": {"size": "3", "xxh3_128": ""}}},
    "a long name": {"files": {"x" * 5000: {"size": 3}}},
    "half a surrogate pair": {"files": {"\ud800": {"size": 3}}},
    "no name": {"files": {"": {"size": 3}}},
    "packages is a list": {"packages": ["torch"]},
    "step is a list": {"step": [2]},
    "a key that no manifest has": {"more": 1},
}
STATES = {
    "a list": b"[]",
    "deep": DEEP,
    "a deep recipe": b'{"recipe": ' + DEEP + b"}",
    "a step that is a list": b'{"step": [1]}',
    "no recipe": b'{"step": 2}',
    "no JSON": b"\x80\x04",
}


@pytest.mark.parametrize("forged", [*MANIFESTS, *(f"state: {name}" for name in STATES), "deep"])
def test_a_forged_checkpoint_is_passed_over_for_the_one_before_it(run: Run, forged: str) -> None:
    run.save(1, 2)
    newest = folders.step_folder(run.folder, 2)
    content = json.loads((newest / manifest.MANIFEST).read_text())
    del content["checksum"]
    if forged == "deep":
        (newest / manifest.MANIFEST).write_bytes(DEEP)
    elif forged in MANIFESTS:
        change = MANIFESTS[forged]
        (newest / manifest.MANIFEST).write_bytes(
            signed(content | change) if isinstance(change, dict) else b"[]"
        )
    else:
        (newest / manifest.STATE).write_bytes(STATES[forged.removeprefix("state: ")])
        content["files"][manifest.STATE] = durable.checksum(newest / manifest.STATE)
        (newest / manifest.MANIFEST).write_bytes(signed(content))
    listed = summarize_checkpoints(run.folder, checksums=True)
    assert [bool(one.problems) for one in listed] == [False, True]
    assert run.start() == 1
    assert run.names() == ["damaged-00000002", "step-00000001"]


def signed(content: dict[str, Any]) -> bytes:
    """A manifest with the checksum that belongs to it."""
    plain = json.dumps(content, sort_keys=True, indent=1)
    checksum = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({"checksum": checksum} | content, sort_keys=True, indent=1).encode()
