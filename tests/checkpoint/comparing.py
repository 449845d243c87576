"""What a run leaves, compared with what the same run leaves that nobody disturbed: every checkpoint, every value of every
line of metrics.jsonl and samples.jsonl, and every file of the export. Clocks and memory alone may differ."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from finetune.checkpoint import folders, manifest
from finetune.checkpoint.manifest import read_state
from finetune.checkpoint.resume import find_checkpoint
from finetune.errors import UserError
from finetune.files.durable import ADAPTER, EXPORT, restore_exports
from finetune.files.run_files import drop_later_lines
from tests.checkpoint.tiny_run import ALONE

CLOCKS = {"tokens_per_second", "mfu", "mfu_of_whole_rows", "peak_memory_bytes", "data_wait_seconds"}
METRICS, SAMPLES, FINISHED = "metrics.jsonl", "samples.jsonl", "finished.json"
COMPLETIONS = "completions.jsonl"
LOOKED_AT = (SAMPLES, COMPLETIONS)  # nothing is computed with them
STEPS = 6
EVALUATED = ("best_eval_loss", "best_step", "evaluations_since_best", "owes_evaluation")


class Lost(Exception):
    """Something that was promised did not hold; its text says what."""


class Silent(Lost):
    """Something differs, and nothing was said."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run leaves that nobody disturbed."""

    checkpoints: Mapping[int, Mapping[str, Any]]  # step -> `contents` of its checkpoint
    best: Mapping[int, int | None]  # step -> the best step that its checkpoint knows
    lines: Mapping[str, list[dict[str, Any]]]  # of METRICS and LOOKED_AT
    export: Mapping[str, str]
    limit: int | None  # checkpoints that the disturbed runs keep
    keeps_best: bool
    seconds: float = 0.0

    def kept(self, newest: int) -> set[int]:
        """The steps whose checkpoints are kept once that of step `newest` is there and none was damaged."""
        kept = {
            step
            for step in range(1, newest + 1)
            if self.limit is None or step > newest - self.limit
        }
        best = self.best.get(newest) if self.keeps_best else None
        return kept | ({best} if best is not None else set())


def read_reference(
    run_folder: Path, limit: int | None, keeps_best: bool, seconds: float
) -> Reference:
    """What the finished run in `run_folder`, which kept every checkpoint, has left."""
    found = dict(folders.list_checkpoints(run_folder))
    if sorted(found) != list(range(1, STEPS + 1)):
        raise Lost(f"the undisturbed run left the checkpoints {sorted(found)}")
    return Reference(
        {step: contents(path) for step, path in found.items()},
        {step: read_state(path)["best_step"] for step, path in found.items()},
        {name: read_lines(run_folder / name) for name in (METRICS, *LOOKED_AT)},
        exported(run_folder),
        limit,
        keeps_best,
        seconds,
    )


def contents(checkpoint: Path) -> dict[str, Any]:
    """The checksum of each of a checkpoint's files, and state.json but for the recipe, which names the run's folder."""
    files = {
        name: entry
        for name, entry in manifest.read_manifest(checkpoint).files.items()
        if name != manifest.STATE
    }
    return files | {manifest.STATE: read_state(checkpoint) | {"recipe": None}}


def without_evaluation(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The `contents` of a checkpoint without what the evaluation of its step writes in state.json."""
    state = contents.get(manifest.STATE, {})
    return dict(contents) | {manifest.STATE: state | dict.fromkeys(EVALUATED)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, without its clocks and seconds; a killed process may leave a half after them."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        lines = [json.loads(line) for line in whole]
    except ValueError as error:
        raise Lost(f"{path}: {error}") from None
    return [
        {key: value for key, value in line.items() if key not in CLOCKS}
        for line in lines
        if "phase" not in line
    ]


def exported(run_folder: Path) -> dict[str, str]:
    """Every file of the export and of the adapter -> a digest; the title of the model card is the run's folder."""
    found = {}
    for path in sorted(
        path
        for name in (EXPORT, ADAPTER)
        for path in (run_folder / name).rglob("*")
        if path.is_file()
    ):
        content = path.read_bytes()
        if path.name == "README.md":
            content = re.sub(rb"^# .*$", b"#", content, count=1, flags=re.MULTILINE)
        found[str(path.relative_to(run_folder))] = xxhash.xxh3_128_hexdigest(content)
    return found


def compare_checkpoints(
    run_folder: Path, reference: Reference, before: set[int], damaged: set[int]
) -> set[int]:
    """The steps whose checkpoints are there and sound. `before`: those that were, when the run was last looked at; `damaged`:
    those that were damaged since they were written."""
    there, sound = dict(folders.list_checkpoints(run_folder)), set()
    for step, path in there.items():
        problems = manifest.find_damage(path)
        if problems and step in damaged:
            continue
        if problems:
            raise Lost(f"{path.name}: {problems}")
        expected, found = reference.checkpoints.get(step, {}), contents(path)
        if found[manifest.STATE].get("owes_evaluation"):  # a signal has stopped it
            expected, found = map(without_evaluation, (expected, found))
        if difference := first_difference(expected, found):
            raise Silent(f"{path.name} is not the undisturbed run's: {difference}")
        sound.add(step)
    resumed, newest = max(before, default=0), max(sound, default=0)
    if newest < resumed:
        raise Lost(f"step {resumed} was sound, and {sorted(there)} are left")
    written = before | set(range(resumed + 1, newest + 1))
    if missing := reference.kept(newest) & written - sound:
        raise Lost(
            f"{sorted(missing)} should be kept with step {newest}, and {sorted(there)} are left"
        )
    return sound


def compare_lines(
    run_folder: Path, name: str, reference: Reference, step: int, *, is_whole: bool = False
) -> None:
    """The lines up to now are the undisturbed run's first; a run that resumes at `step` has all of the steps before."""
    lines, expected = read_lines(run_folder / name), reference.lines[name]
    if lines != expected[: len(lines)]:
        differing = next(
            (pair for pair in zip(lines, expected, strict=False) if pair[0] != pair[1]), lines[-1:]
        )
        raise Silent(f"{name}: {len(lines)} lines, and one is {differing[0]}, not {differing[-1]}")
    needed = [
        line
        for line in expected
        if line["step"] < step or (line["step"] == step and "loss" in line)
    ]
    if len(lines) < len(expected if is_whole else needed):
        raise Silent(f"{name}: {len(lines)} lines, of {len(expected)}, when step {step} was saved")


def compare_export(run_folder: Path, reference: Reference, *, is_whole: bool = False) -> None:
    """The export and the adapter, where they are there: they get their names when they are whole."""
    found = exported(run_folder)
    there = {name.partition("/")[0] for name in found}
    expected = {
        n: digest
        for n, digest in reference.export.items()
        if is_whole or n.partition("/")[0] in there
    }
    if difference := first_difference(expected, found):
        raise Silent(f"another export: {difference}")


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The first of the names, sorted, whose values differ, with both; empty where none does."""
    names = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    return f"{names[0]}: {found.get(names[0])}, not {expected.get(names[0])}" if names else ""


def judge_image(
    image: Path, reference: Reference, before: set[int], damaged: set[int], names: Sequence[str]
) -> set[int]:
    """Starts the run in `image` as far as its files are concerned, by the functions that a start calls; returns the sound steps.

    `names`: of the files whose lines are compared as they are; those of METRICS are once more, after their repair."""
    folders.lock_run(image)
    restore_exports(image)
    sound = compare_checkpoints(image, reference, before, damaged)
    try:
        found = find_checkpoint("auto", image, ALONE)
    except UserError:
        found = None
        if not damaged:
            raise
    resumed = max(sound, default=0)
    if resumed and found != folders.step_folder(image, resumed):
        raise Lost(f"resumes from {found}, but step {resumed} is sound")
    for name in names:
        compare_lines(image, name, reference, 0)
    drop_later_lines(image / METRICS, resumed)
    compare_lines(image, METRICS, reference, resumed)
    compare_export(image, reference, is_whole=(image / FINISHED).exists())
    return sound


def name_phase(image: Path) -> str:
    """What the run was doing, by what lies in its folder."""
    names = [path.name for path in (image / "checkpoints").glob(".*-*")] + [
        path.name for path in image.iterdir()
    ]
    for beginning, phase in (
        (".staging-00000000", "checking that a save works"),
        (".pruned", "pruning"),
        (".staging", "saving"),
        (".export", "exporting"),
        (FINISHED, "after the end"),
        (METRICS, "training and evaluating"),
    ):
        if any(name.startswith(beginning) for name in names):
            return phase
    return "starting"


class Images:
    """Copies of a run's folder, made while all of its ranks stand still: each is what a SIGKILL of all of them would leave there."""

    def __init__(self, run_folder: Path, folder: Path, most: int) -> None:
        self._run_folder, self._folder, self._most = run_folder, folder, most
        self._seen: list[tuple[str, int, int]] = []
        self.taken: list[Path] = []
        shutil.rmtree(folder, ignore_errors=True)

    def is_new(self) -> bool:
        """Whether something has changed in the folder since the last image."""
        return len(self.taken) < self._most and self._look() != self._seen

    def take(self) -> None:
        """One more image; the ranks stand still."""
        self._seen = self._look()
        image = self._folder / f"{len(self.taken):04d}"
        shutil.copytree(self._run_folder, image, symlinks=True)
        self.taken.append(image)

    def judge(
        self, reference: Reference, before: set[int], damaged: set[int], names: Sequence[str]
    ) -> Counter[str]:
        """What the images show, by phase. `names`: of the files of lines that were not damaged. Raises `Lost`."""
        counts, known = Counter[str](), set(before)
        for image in self.taken:
            phase = name_phase(image)
            try:
                known = judge_image(image, reference, known, damaged, names)
            except Lost as what:
                raise type(what)(f"{image}, {phase}: {what}") from None
            counts[f"killed in an image: {phase}"] += 1
        return counts

    def _look(self) -> list[tuple[str, int, int]]:
        return sorted(_walk(str(self._run_folder))) if self._run_folder.exists() else self._seen


def _walk(folder: str) -> Iterable[tuple[str, int, int]]:
    try:
        entries = list(os.scandir(folder))
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status.st_size, status.st_mtime_ns
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
    except OSError:  # it has just gone
        return


def resumed_step(log: str) -> int:
    """The step at which a life went on, by what it said; 0 for none."""
    found = re.search(r"resumed at step (\d+)", log)
    return int(found[1]) if found else 0
