"""Runs under every fault that a checkpoint must survive, in random order: stories of one run each, through run.py.

A story is one run of one recipe in one layout. Before each of its lives something may be damaged or edited; during it the
ranks may be killed or preempted, and images of the run's folder are taken, each what a SIGKILL of all ranks would leave there.
After each life what is there, and each image, must be what a reference run left that nobody disturbed (see comparing.py).
"""

import json
import os
import random
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.checkpoint import folders, manifest
from tests.checkpoint import comparing, faults
from tests.checkpoint.comparing import LOOKED_AT, METRICS, STEPS, Images, Lost, Reference, Silent
from tests.checkpoint.disk import FAULTS, SAID, Disk, DiskFault, open_disk, unmount_below
from tests.checkpoint.lives import Ended, Life, Moment

REFERENCE = "reference"
LIVES = 12  # of one story that are disturbed; in the next it must come to its end
IMAGES = 25  # of one life, at most
ASIDE = (
    "held-out data",
    "metrics.jsonl, a line missing",
)  # what is said, while the run continues: done to a copy of it


@dataclass(slots=True)
class Story:
    """One run, from its start to its end."""

    setup: faults.Setup
    name: str
    reference: Reference
    chance: random.Random
    counts: Counter[str]
    launcher_share: float
    disk: Disk | None = None  # on which the run's folder is
    unlike: set[str] = field(default_factory=set)  # files of LOOKED_AT that were damaged
    is_unrepaired: bool = False  # metrics.jsonl was damaged, and no life has begun since
    damaged: set[int] = field(
        default_factory=set
    )  # steps whose checkpoint was damaged and not written again since
    sound: set[int] = field(
        default_factory=set
    )  # steps whose checkpoint must be there, or a later one

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
        edit = self._edit() if is_disturbed and self.sound and self.chance.random() < 0.25 else None
        newest = max(self.sound, default=0)
        by_launcher = self.chance.random() < self.launcher_share
        moment = self._moment(newest, by_launcher) if is_disturbed and not edit else None
        name = (
            self._aside(edit)
            if edit in ASIDE and not (edit == ASIDE[0] and self.reference.keeps_best)
            else self.name
        )
        life = Life(self.setup, name, by_launcher, disk=self.disk)
        wants_images = is_disturbed and not edit and not by_launcher
        images = (
            Images(self.run_folder, self.setup.root / "images", IMAGES) if wants_images else None
        )
        try:
            ended = life.run(moment, self.reference.seconds, images)
        finally:
            if edit:
                faults.restore(self.setup)
        if (
            "address already in use" in ended.log.lower()
        ):  # another process of this machine took the port
            return False
        self.counts.update(done)
        self.counts["lives by the launcher" if by_launcher else "lives"] += 1
        if edit:
            self._check_edit(ended, edit, newest if name != self.name else None)
            self.counts[f"edited: {edit}"] += 1
            return False
        if ended.met:
            self.counts[ended.met] += 1
        before, damaged, is_unrepaired = set(self.sound), set(self.damaged), self.is_unrepaired
        is_over = self._look(
            ended, newest, bool({f"{METRICS}: doubled", f"{METRICS}: junk"} & set(done))
        )
        if images and images.taken:
            return self._look_at_images(images, before, damaged, is_unrepaired) and is_over
        return is_over

    def _look_at_images(
        self, images: Images, before: set[int], damaged: set[int], is_unrepaired: bool
    ) -> bool:
        """Judges the images in a child, whose locks end with it. Often the story continues from one of them; returns whether not."""
        chosen = self.chance.choice(images.taken) if self.chance.random() < 0.7 else None
        copy = self.setup.root / "chosen"
        if chosen:
            shutil.copytree(chosen, copy)
        names = [METRICS] * (not is_unrepaired) + self._alike()
        found = in_child(
            lambda: images.judge(self.reference, before, damaged, names), copy.with_suffix(".json")
        )
        self.counts.update(found)
        shutil.rmtree(images.taken[0].parent)
        if chosen is None:
            return True
        shutil.rmtree(self.run_folder)
        shutil.copytree(copy, self.run_folder, symlinks=True)
        shutil.rmtree(copy)
        self.sound = comparing.compare_checkpoints(self.run_folder, self.reference, before, damaged)
        self.damaged, self.is_unrepaired = damaged, is_unrepaired
        self.counts["lives from an image"] += 1
        return False

    def _aside(self, edit: str) -> str:
        """A copy of the run, for a life after `edit`."""
        shutil.rmtree(self.setup.root / "aside", ignore_errors=True)
        shutil.copytree(self.run_folder, self.setup.root / "aside")
        if edit != ASIDE[0]:
            faults.remove_line(self.setup.root / "aside" / METRICS, max(self.sound), self.chance)
        return "aside"

    def _done_before(self) -> list[str]:
        """Damages between two lives; returns their names."""
        done = []
        if self.sound and self.chance.random() < 0.7:
            # Mostly one is left to resume from.
            steps = sorted(self.sound)
            victims = steps if self.chance.random() < 0.05 else steps[1:] if len(steps) > 1 else []
            for step in self.chance.sample(
                victims, self.chance.randint(min(1, len(victims)), len(victims))
            ):
                others = [
                    folders.step_folder(self.run_folder, other) for other in steps if other != step
                ]
                kind = faults.damage_checkpoint(
                    folders.step_folder(self.run_folder, step), others, self.chance
                )
                done.append(f"damaged: {kind}")
                self.sound.discard(step)
                self.damaged.add(step)
        files = sorted(
            path
            for path in self.setup.cache.rglob("*")
            if path.is_file() and "lock" not in path.name
        )
        if files and self.chance.random() < 0.5:
            victim = self.chance.choice(files)
            what = "reference" if victim.name.startswith("reference-") else "token cache"
            done.append(f"{what}: {faults.damage_file(victim, self.chance)}")
        for name in (*LOOKED_AT, METRICS):
            if (self.run_folder / name).exists() and self.chance.random() < 0.2:
                done.append(f"{name}: {faults.damage_lines(self.run_folder / name, self.chance)}")
                self.unlike |= {name} - {METRICS}
                self.is_unrepaired = self.is_unrepaired or name == METRICS
        return done

    def _alike(self) -> list[str]:
        """The files of LOOKED_AT that are still the undisturbed run's."""
        return [name for name in LOOKED_AT if name not in self.unlike]

    def _edit(self) -> str | None:
        """Edits an input of the run, and returns which; None where there is none to edit."""
        can_miss_line = (
            max(self.sound) > 2 and not self.is_unrepaired
        )  # of fewer lines none is surely missing
        kinds = faults.find_edits(self.setup) + [ASIDE[1]] * can_miss_line
        kind = self.chance.choice(kinds) if kinds else None
        if kind is not None and kind != ASIDE[1]:
            faults.edit(self.setup, kind)
        return kind

    def _moment(self, newest: int, by_launcher: bool) -> Moment | None:
        """When and how this life is disturbed; None where it may come to its end."""
        if self.chance.random() < 0.1 or (newest == STEPS and self.chance.random() < 0.3):
            return None
        what: signal.Signals | DiskFault = (
            signal.SIGKILL if self.chance.random() < 0.6 else signal.SIGTERM
        )
        if self.disk is not None and self.chance.random() < 0.25:
            spare = self.chance.choice((0, 1 << self.chance.randrange(12, 22)))
            what = DiskFault(self.chance.choice(FAULTS), spare, self.chance.random())
        everyone = self.chance.random() < 0.7 or (self.setup.ranks == 1 and not by_launcher)
        victim = None if everyone else self.chance.randrange(self.setup.ranks)
        if self.chance.random() < 0.15:
            return Moment(
                what, victim, "starting", None, self.chance.random() * self.reference.seconds / 2
            )
        phase, pattern = self.chance.choice(
            faults.phases(self.setup, self.name, newest, self.chance)
        )
        return Moment(
            what, victim, phase, pattern, self.chance.choice((0.0, 0.1 * self.chance.random()))
        )

    def _check_edit(self, ended: Ended, edit: str, newest: int | None) -> None:
        """The start was refused with a sentence; what decides nothing is said in one, in the copy that resumes at `newest`."""
        sentence = (
            "eval_datasets: the same files are named" if edit == ASIDE[0] else f"{METRICS}: no line"
        )
        is_right = (
            2 in ended.codes
            if newest is None
            else sentence in ended.log and set(ended.codes) == {0}
        )
        if "Traceback" in ended.log or not is_right:
            raise Silent(
                f"{edit}: edited, and the run ended with {ended.codes}\n{ended.log[-3000:]}"
            )
        self._compare(ended)

    def _look(self, ended: Ended, newest: int, is_to_be_said: bool) -> bool:
        if "Traceback" in ended.log and "another rank ended" not in ended.log:
            raise Lost(f"a traceback; codes {ended.codes}\n{ended.log[-4000:]}")
        resumed = comparing.resumed_step(ended.log)
        begun = re.search(r"^layout  ", ended.log, re.M) is not None
        if begun and resumed != newest:
            raise Lost(
                f"resumed at step {resumed}, but step {newest} was sound\n{ended.log[-3000:]}"
            )
        if (
            begun
            and newest
            and is_to_be_said
            and not re.search(f"{METRICS}: .* removed", ended.log)
        ):
            raise Silent(f"{METRICS} was damaged, and nothing was said\n{ended.log[-3000:]}")
        self.is_unrepaired = self.is_unrepaired and not begun
        is_of_disk = ended.met is not None and ended.met.startswith(FAULTS)
        says_disk = re.search(SAID, ended.log) is not None
        if (
            not self.sound
            and self.damaged
            and not begun
            and 2 in ended.codes
            and not (is_of_disk and says_disk)
        ):
            if "none of its checkpoints verif" not in ended.log:
                raise Lost(f"every checkpoint was damaged, and this was said:\n{ended.log[-3000:]}")
            self.counts["stories ended: every checkpoint damaged"] += 1
            return True
        self._compare(ended)
        codes = set(ended.codes)
        if is_of_disk and codes != {0} and not (2 in codes and says_disk):
            raise Lost(f"{ended.met}, and it ended with {ended.codes}\n{ended.log[-4000:]}")
        if ended.met is None and codes != {0}:
            raise Lost(f"nobody disturbed it, and it ended with {ended.codes}\n{ended.log[-4000:]}")
        saved = max(self.sound, default=0)
        said = rf"stopped by \w[\w ]* (after step {saved}( of {STEPS})?, which is saved|during the .*; all {saved} steps are saved)"
        if saved in (0, STEPS):
            said += (
                "|before the first step"
                if saved == 0
                else "|before the export; all steps are saved"
            )
        if codes == {75} and not re.search(said, ended.log):
            raise Lost(
                f"preempted, but what it says it saved is not there: {sorted(self.sound)}\n{ended.log[-3000:]}"
            )
        if codes == {0}:
            self._check_end(ended)
            self.counts["stories finished"] += 1
            return True
        return False

    def _compare(self, ended: Ended) -> None:
        """Every checkpoint, line and export that is there is the reference's, and what was sound is there still, or a later one."""
        try:
            self.sound = comparing.compare_checkpoints(
                self.run_folder, self.reference, self.sound, self.damaged
            )
            if not self.is_unrepaired:
                comparing.compare_lines(
                    self.run_folder, METRICS, self.reference, max(self.sound, default=0)
                )
            for name in self._alike():
                comparing.compare_lines(self.run_folder, name, self.reference, 0)
            comparing.compare_export(self.run_folder, self.reference)
        except Lost as what:
            raise type(what)(f"{what}\n{ended.log[-3000:]}") from None
        there = dict(folders.list_checkpoints(self.run_folder))
        self.damaged &= {step for step, path in there.items() if manifest.find_damage(path)}

    def _check_end(self, ended: Ended) -> None:
        if STEPS not in self.sound:  # what a kill kept from being pruned may be there too
            raise Lost(f"finished, but {sorted(self.sound)} are there\n{ended.log[-3000:]}")
        comparing.compare_lines(self.run_folder, METRICS, self.reference, STEPS, is_whole=True)
        for name in self._alike():
            comparing.compare_lines(self.run_folder, name, self.reference, STEPS, is_whole=True)
        comparing.compare_export(self.run_folder, self.reference, is_whole=True)


def make_reference(setup: faults.Setup) -> Reference:
    """Runs `setup` once without a fault."""
    started = time.monotonic()
    ended = Life(setup, REFERENCE, by_launcher=False, keep=None).run(None, 60.0)
    if set(ended.codes) != {0}:
        raise Lost(f"the reference ended with {ended.codes}\n{ended.log[-4000:]}")
    seconds = time.monotonic() - started
    return comparing.read_reference(
        setup.root / REFERENCE, setup.limit, setup.kind == "best", seconds
    )


def in_child(function: Callable[[], Counter[str]], results: Path) -> Counter[str]:
    """The counts that `function` returns in a forked process. Raises the `Lost` that it raises."""
    process = os.fork()
    if not process:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            found: dict[str, Any] = {"counts": function()}
        except Lost as what:
            found = {"lost": str(what), "is_silent": isinstance(what, Silent)}
        except BaseException:
            found = {"lost": traceback.format_exc(), "is_silent": False}
        results.write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(process, 0)
    found = json.loads(results.read_text())
    if "lost" in found:
        raise (Silent if found["is_silent"] else Lost)(found["lost"])
    return Counter(found["counts"])


def soak(
    setups: Iterable[faults.Setup],
    chance: random.Random,
    is_enough: Callable[[int], bool],
    launcher_share: float,
    report: Path,
) -> None:
    """Runs stories, setup after setup, until `is_enough(faults so far)`. Keeps the counts, and what was lost, in `report`."""
    total, lost, silent = Counter[str](), list[str](), list[str]()
    by_recipe, by_layout = Counter[str](), Counter[str]()
    for setup in setups:
        counts = Counter[str]()
        try:
            faults.make_inputs(setup)
            if not setup.is_possible():
                shutil.rmtree(setup.root)
                continue
            reference = make_reference(setup)
            disk = open_disk(setup.root / "disk")
            name = "run" if disk is None else "disk/run"
            story = Story(setup, name, reference, chance, counts, launcher_share, disk)
            try:
                story.to_its_end(lambda: is_enough(faults_in(total + counts)))  # noqa: B023
            finally:
                unmount_after(disk, setup.root)
        except Lost as what:
            (silent if isinstance(what, Silent) else lost).append(
                f"{setup.label}, {setup.root}: {what}"
            )
        else:
            shutil.rmtree(setup.root, ignore_errors=True)
        total += counts
        by_recipe[setup.kind] += faults_in(counts)
        by_layout[setup.layout] += faults_in(counts)
        found = {"kinds": dict(total), "recipes": dict(by_recipe), "layouts": dict(by_layout)}
        report.write_text(json.dumps(found | {"lost": lost, "silent": silent}))
        if is_enough(faults_in(total)):
            return


def unmount_after(disk: Disk | None, root: Path) -> None:
    """Removes the disk of a story; what is on it stays to be looked at."""
    if disk is None:
        return
    disk.end()
    kept = root / "of-the-disk"
    shutil.copytree(disk.folder, kept, symlinks=True, dirs_exist_ok=True)
    unmount_below(root)


def faults_in(counts: Counter[str]) -> int:
    """How many of the counts are faults."""
    return sum(n for name, n in counts.items() if not name.startswith(("lives", "stories")))
