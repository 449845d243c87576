"""Runs under every fault that a checkpoint must survive, in random order: stories of one run each, through run.py.

A story is one run in one layout with one optimizer. Before each of its lives something may be damaged or edited; during
it the ranks may be killed or preempted. After each life every checkpoint that is published must be, bit for bit, that of
a reference run which nobody disturbed, and none that was sound may be gone; at the end metrics and export are compared too.
"""

import json
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.checkpoint import manifest, retention
from tests.checkpoint import faults
from tests.checkpoint.faults import STEPS
from tests.checkpoint.lives import Ended, Life, Moment

STORIES = 2  # of one setup, against one reference
LIVES = 20  # of one story that are disturbed; in the next it must come to its end
EDITS = {"chat template", "tokenizer", "data", "data order", "LoRA base"}
CLOCK = ("tokens_per_second", "mfu", "peak_memory_bytes", "data_wait_seconds")


class Lost(Exception):
    """Something that was promised did not hold; its text says what."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run leaves that nobody disturbed: STEP -> checksums of its tensor files; losses; files of the export -> digests."""

    checkpoints: dict[int, dict[str, Any]]
    losses: list[tuple[int, float]]
    export: dict[str, str]
    stores: list[Path]  # the token cache's
    seconds: float


@dataclass(slots=True)
class Story:
    """One run, from its start to its end."""

    setup: faults.Setup
    name: str
    reference: Reference
    chance: random.Random
    counts: Counter[str]
    launcher_share: float
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoint was damaged and not written again since
    sound: set[int] = field(default_factory=set)  # steps whose checkpoint must be there, or a later one

    @property
    def run_folder(self) -> Path:
        return self.setup.root / self.name

    def to_its_end(self, is_enough: Callable[[], bool]) -> None:
        """Lives until the run is finished, or cannot be because everything was damaged, or it is enough. Raises `Lost`."""
        for life in range(LIVES + 1):
            if is_enough() or self._live(is_disturbed=life < LIVES):
                return
        raise Lost(f"not finished in a life without a fault, after {LIVES} lives")

    def _live(self, is_disturbed: bool) -> bool:
        """Faults, one life, and a look at what it left. Returns whether the story is over."""
        done = self._done_before() if is_disturbed else []
        edit = self._edit() if is_disturbed and self.sound and self.chance.random() < 0.4 else None
        newest = max(self.sound, default=0)
        moment = self._moment(newest) if is_disturbed and not edit else None
        by_launcher = self.chance.random() < self.launcher_share
        life = Life(self.setup, self.name, by_launcher)
        try:
            ended = life.run(moment, self.reference.seconds)
        finally:
            if edit:
                faults.restore(self.setup)
        if "address already in use" in ended.log.lower():  # another process of this machine took the port
            return False
        self.counts.update(done)
        self.counts["lives by the launcher" if by_launcher else "lives"] += 1
        if edit:
            self._check_refusal(ended, edit)
            self.counts[f"edited: {edit}"] += 1
            return False
        if ended.met:
            self.counts[f"{ended.met}"] += 1
        return self._look(ended, newest)

    def _done_before(self) -> list[str]:
        """Damages between two lives; returns their names."""
        done = []
        if self.sound and self.chance.random() < 0.7:
            # Mostly one is left to resume from.
            steps = sorted(self.sound)
            victims = steps if self.chance.random() < 0.05 else steps[1:] if len(steps) > 1 else []
            for step in self.chance.sample(victims, self.chance.randint(min(1, len(victims)), len(victims))):
                kind = faults.damage_checkpoint(retention.step_folder(self.run_folder, step), self.chance)
                done.append(f"damaged: {kind}")
                self.sound.discard(step)
                self.damaged.add(step)
        for store in self.reference.stores:
            files = sorted(path for path in store.glob("*") if path.is_file())
            if files and self.chance.random() < 0.5:
                done.append(f"token cache: {faults.damage_file(self.chance.choice(files), self.chance)}")
        if (self.run_folder / "samples.jsonl").exists() and self.chance.random() < 0.5:
            done.append(f"samples.jsonl: {faults.damage_samples(self.run_folder / 'samples.jsonl', self.chance)}")
        return done

    def _edit(self) -> str:
        possible = sorted(EDITS - ({"data order"} if not self.setup.streaming else {"data"}))
        if not self.setup.lora:
            possible.remove("LoRA base")
        kind = self.chance.choice(possible)
        faults.edit(self.setup, kind)
        return kind

    def _moment(self, newest: int) -> Moment | None:
        """When and how this life is disturbed; None where it may come to its end."""
        if self.chance.random() < 0.05 or (newest == STEPS and self.chance.random() < 0.3):
            return None
        number = signal.SIGKILL if self.chance.random() < 0.6 else signal.SIGTERM
        everyone = self.chance.random() < 0.7 or self.setup.ranks == 1
        victim = None if everyone else self.chance.randrange(self.setup.ranks)
        if self.chance.random() < 0.15:
            return Moment(number, victim, "starting", None, self.chance.random() * self.reference.seconds / 2)
        phase, pattern = self.chance.choice(faults.phases(self.setup, self.name, newest, self.chance))
        return Moment(number, victim, phase, pattern, self.chance.choice((0.0, 0.1 * self.chance.random())))

    def _check_refusal(self, ended: Ended, edit: str) -> None:
        if "Traceback" in ended.log or 2 not in ended.codes:
            raise Lost(
                f"{edit} was edited, and the run ended with {ended.codes}, not with 2 and a sentence\n{ended.log[-3000:]}"
            )
        self._compare(ended)

    def _look(self, ended: Ended, newest: int) -> bool:
        if "Traceback" in ended.log and "another rank ended" not in ended.log:
            raise Lost(f"a traceback; codes {ended.codes}\n{ended.log[-4000:]}")
        resumed = re.search(r"resumed at step (\d+)", ended.log)
        begun = re.search(r"^layout  ", ended.log, re.M) is not None
        if begun and int(resumed[1] if resumed else 0) != newest:
            raise Lost(f"resumed at step {resumed and resumed[1]}, but step {newest} was sound\n{ended.log[-3000:]}")
        if not self.sound and self.damaged and not begun and 2 in ended.codes:
            if "none of its checkpoints verif" not in ended.log:
                raise Lost(f"every checkpoint was damaged, and this was said:\n{ended.log[-3000:]}")
            self.counts["stories ended: every checkpoint damaged"] += 1
            return True
        self._compare(ended)
        codes = set(ended.codes)
        if ended.met is None and codes != {0}:
            raise Lost(f"nobody disturbed it, and it ended with {ended.codes}\n{ended.log[-4000:]}")
        saved = max(self.sound, default=0)
        said = rf"stopped by \w[\w ]* (after step {saved} of|during the .*; all {saved} steps are saved)"
        if saved in (0, STEPS):
            said += "|before the first step" if saved == 0 else "|before the export; all steps are saved"
        if codes == {75} and not re.search(said, ended.log):
            raise Lost(f"preempted, but what it says it saved is not there: {sorted(self.sound)}\n{ended.log[-3000:]}")
        if codes == {0}:
            self._check_end(ended)
            self.counts["stories finished"] += 1
            return True
        return False

    def _compare(self, ended: Ended) -> None:
        """Every checkpoint that is there is the reference's, and what was sound is there still, or a later one."""
        there = dict(retention.list_checkpoints(self.run_folder))
        now = set()
        for step, path in there.items():
            problems = manifest.find_problems(path)
            if problems and step in self.damaged:
                continue
            if problems:
                raise Lost(f"{path.name}: {problems}\n{ended.log[-3000:]}")
            if step not in self.reference.checkpoints or tensors(path) != self.reference.checkpoints[step]:
                raise Lost(f"{path.name} is not the checkpoint of the run that nobody disturbed\n{ended.log[-3000:]}")
            now.add(step)
        if self.sound and max(self.sound) not in now and max(now, default=-1) < max(self.sound):
            raise Lost(f"step {max(self.sound)} was sound, and {sorted(there)} are left\n{ended.log[-3000:]}")
        self.damaged &= there.keys() - now
        self.sound = now

    def _check_end(self, ended: Ended) -> None:
        if max(self.sound, default=0) != STEPS:
            raise Lost(f"finished, but {sorted(self.sound)} are there\n{ended.log[-3000:]}")
        if losses(self.run_folder) != self.reference.losses:
            raise Lost(f"other losses: {losses(self.run_folder)}, not {self.reference.losses}")
        if exported(self.run_folder) != self.reference.export:
            raise Lost(f"another export\n{ended.log[-3000:]}")


def make_reference(setup: faults.Setup) -> Reference:
    """Runs `setup` once without a fault."""
    name = "reference"
    started = time.monotonic()
    ended = Life(setup, name, by_launcher=False, keep=None).run(None, 60.0)
    if set(ended.codes) != {0}:
        raise Lost(f"the reference ended with {ended.codes}\n{ended.log[-4000:]}")
    run_folder = setup.root / name
    checkpoints = {step: tensors(path) for step, path in retention.list_checkpoints(run_folder)}
    assert sorted(checkpoints) == list(range(1, STEPS + 1)), ended.log
    return Reference(
        checkpoints, losses(run_folder), exported(run_folder), sorted(setup.cache.iterdir()), time.monotonic() - started
    )


def tensors(checkpoint: Path) -> dict[str, Any]:
    """The checksums of a checkpoint's tensor files."""
    entries = manifest.read_manifest(checkpoint).files
    return {name: entry for name, entry in entries.items() if name.endswith(".safetensors")}


def losses(run_folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training line of metrics.jsonl."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def exported(run_folder: Path) -> dict[str, str]:
    """Weight files of the export -> a digest."""
    from finetune.data.sources import hash_file

    return {path.name: hash_file(str(path)) for path in sorted((run_folder / "export").glob("*.safetensors"))}


def soak(
    setups: Iterable[faults.Setup],
    chance: random.Random,
    is_enough: Callable[[int], bool],
    launcher_share: float,
    report: Path,
) -> None:
    """Runs stories, setup after setup, until `is_enough(faults so far)`. Keeps the counts, and what was lost, in `report`."""
    counts, lost = Counter[str](), list[str]()
    for setup in setups:
        try:
            faults.make_inputs(setup)
            reference = make_reference(setup)
            for story in range(STORIES):
                run = Story(setup, f"run{story}", reference, chance, counts, launcher_share)
                run.to_its_end(lambda: is_enough(faults_in(counts)))
        except Lost as what:
            lost.append(f"{setup.label}, {setup.root}: {what}")
        else:
            shutil.rmtree(setup.root, ignore_errors=True)
        report.write_text(json.dumps({"counts": dict(counts), "lost": lost}))
        if is_enough(faults_in(counts)):
            return


def faults_in(counts: Counter[str]) -> int:
    """How many of the counts are faults."""
    return sum(n for name, n in counts.items() if not name.startswith(("lives", "stories")))
