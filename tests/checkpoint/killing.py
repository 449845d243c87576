"""Kills the ranks of a run at random moments, many times, and looks whether anything was lost.

    python tests/checkpoint/killing.py --kills 100 [--ranks 2] [--seed 0] [--minutes 30]

Each life of the run is a set of freshly forked ranks (what takes long, the imports, is done once, before) that resume,
compare the state bit for bit with that of a run which nobody killed, then train and save at every step until SIGKILL
comes to one rank or to all of them. A shared byte for each rank says what it was doing at that moment.

Ends with 1 and a sentence at the first fault; else with a line of counts as JSON.
"""

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoTokenizer

from finetune.checkpoint import folders, shards
from finetune.checkpoint import resume as resuming
from finetune.checkpoint import save as saving
from finetune.checkpoint.manifest import Progress
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.distributed.join import join, leave
from tests.checkpoint.tiny_run import build, digest, train_step
from tests.conftest import make_chat, make_model
from tests.ranks import free_port

PHASES = ("training", "staging", "publishing", "pruning")
UNBEGUN = 255
STEPS = 30  # then the run is done, and another begins in a new folder
LIFE_SECONDS = 60.0


def main(kills: int = 10) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="killing-"))
    try:
        print(
            json.dumps(
                kill_and_resume(
                    root, options.kills, options.ranks, options.seed, options.minutes * 60
                )
            )
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


def kill_and_resume(
    root: Path, kills: int, ranks: int, seed: int, seconds: float
) -> dict[str, Any]:
    """Kills until `kills` are done or `seconds` are over; returns what was done to whom, in which phase."""
    make_model(root / "model", num_hidden_layers=1)
    make_chat(root / "chat.jsonl", rows=4)
    chance, counts, ended = random.Random(seed), Counter[str](), time.monotonic() + seconds
    reference = Life(root, root / "reference", ranks, asynchronous=False, reference=None)
    assert reference.run(kill_after=None, victims=(), during="") == "finished", reference.output()
    expected = reference.digests()
    runs = lives = 0
    saved = 0
    while sum(counts.values()) < kills and time.monotonic() < ended:
        lives += 1
        life = Life(root, root / f"run{runs}", ranks, chance.random() < 0.5, expected)
        victims = tuple(range(ranks)) if chance.random() < 0.5 else (chance.randrange(ranks),)
        outcome = life.run(chance.uniform(0.0, 0.5), victims, chance.choice(PHASES))
        steps = [step for step, _ in folders.list_checkpoints(life.run_folder)]
        if outcome == "fault" or (saved and (not steps or max(steps) < saved)):
            raise SystemExit(
                f"life {lives}: step {saved} was saved, {steps} are left\n{life.output()}"
            )
        saved = life.saved() or saved
        if outcome == "finished":
            runs, saved = runs + 1, 0
        else:
            who = "all ranks" if len(victims) == ranks else "one rank"
            counts[f"{who} while {outcome}"] += 1
    return {
        "kills": sum(counts.values()),
        "lives": lives,
        "runs_finished": runs,
        **dict(sorted(counts.items())),
    }


class Life:
    """One start of a run: its ranks, what they said, and how it ended."""

    def __init__(
        self,
        root: Path,
        run_folder: Path,
        ranks: int,
        asynchronous: bool,
        reference: dict[str, str] | None,
    ) -> None:
        self.root, self.run_folder, self.ranks = root, run_folder, ranks
        self.asynchronous, self.reference = asynchronous, reference
        self.phases = mmap.mmap(-1, ranks)  # shared with the ranks
        self.phases[:] = bytes([UNBEGUN]) * ranks
        self.log = root / "life.log"
        self.log.unlink(missing_ok=True)

    def run(self, kill_after: float | None, victims: tuple[int, ...], during: str) -> str:
        """Starts the ranks and kills `victims` `kill_after` seconds after the first step, once rank 0 is in the phase
        `during` (waiting a second for that at most). Returns the phase that the kill met, "finished" where the run was
        done before, or "fault"."""
        port = free_port()
        processes = [self._fork(rank, port) for rank in range(self.ranks)]
        begun, met, deadline = None, None, time.monotonic() + LIFE_SECONDS
        codes: dict[int, int] = {}
        while len(codes) < self.ranks:
            for rank, process in enumerate(processes):
                if rank not in codes and (status := os.waitpid(process, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(status[1])
            begun = begun or (time.monotonic() if self.phases[0] != UNBEGUN else None)
            late = (
                met is not None and time.monotonic() > met[1] + 5.0
            )  # the others end by themselves; if not, so
            waited = (
                time.monotonic() - begun - kill_after if begun and kill_after is not None else -1.0
            )
            phase = PHASES[self.phases[0]] if begun else ""
            if met is None and not codes and waited > (0.0 if phase == during else 1.0):
                for rank in victims:
                    os.kill(processes[rank], signal.SIGKILL)
                met = (phase, time.monotonic())
            elif late or time.monotonic() > deadline or (met is None and any(codes.values())):
                for rank in set(range(self.ranks)) - codes.keys():
                    os.kill(processes[rank], signal.SIGKILL)
            time.sleep(0.0005 if begun and met is None else 0.01)
        if "FAULT" in self.output() or (met is None and any(codes.values())):
            return "fault"
        return met[0] if met else "finished"

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def saved(self) -> int | None:
        """The last step whose save had returned."""
        steps = [
            int(line.split()[1]) for line in self.output().splitlines() if line.startswith("saved ")
        ]
        return max(steps, default=None)

    def digests(self) -> dict[str, str]:
        """`STEP RANK` -> digest of that rank's state after that step."""
        lines = [line.split() for line in self.output().splitlines() if line.startswith("state ")]
        return {f"{step} {rank}": value for _, step, rank, value in lines}

    def _log_line(self, line: str) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)

    def _fork(self, rank: int, port: int) -> int:
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
            }
            os.environ |= {
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            descriptor = os.open(self.root / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            self._live(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _live(self, rank: int) -> None:
        recipe = self._recipe()
        world = join(Sharding(layout="fsdp2", use_cpu=True), timeout_seconds=30.0)
        if world.is_main:
            folders.lock_run(self.run_folder)
        model, optimizer = build(str(self.root / "model"), False, world)
        tokenizer = AutoTokenizer.from_pretrained(self.root / "model")
        progress = resuming.load_checkpoint(
            resuming.find_resume_checkpoint(recipe, self.run_folder, world), model, optimizer, world
        )

        def compare(step: int) -> None:
            tensors = shards.get_model_state(model) | shards.select_tensors(
                shards.get_optimizer_state(model, optimizer.optimizer)
            )
            value, name = digest(tensors), f"{step} {rank}"
            if self.reference is None:
                self._log_line(f"state {name} {value}")
            elif self.reference[name] != value:
                self._log_line(
                    f"FAULT rank {rank}: the state after step {step} is not that of the run that nobody killed"
                )
                raise AssertionError

        if progress.step:
            compare(progress.step)
        self._mark_phases(rank)
        with saving.Saver(self.run_folder, model, optimizer, world, recipe, tokenizer) as saver:
            for step in range(progress.step, STEPS):
                train_step(step, model, optimizer, world, saver)
                saver.save(Progress(step=step + 1))
                if not saver.is_async and world.is_main:
                    self._log_line(f"saved {step + 1}")
                compare(step + 1)
        leave(world)

    def _recipe(self) -> Recipe:
        path = self.root / "recipe.yaml"
        content = {
            "model_name_or_path": str(self.root / "model"),
            "datasets": [{"path": str(self.root / "chat.jsonl")}],
            "output_dir": str(self.run_folder),
            "async_save": self.asynchronous,
        }
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(json.dumps(content))
        mine.replace(path)
        return read_recipe(str(path))

    def _mark_phases(self, rank: int) -> None:
        def marked(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                before = self.phases[rank]
                self.phases[rank] = PHASES.index(phase)
                try:
                    return function(*arguments, **options)
                finally:
                    self.phases[rank] = before

            return call

        self.phases[rank] = 0
        saving.Saver._stage = marked(saving.Saver._stage, "staging")  # type: ignore[method-assign]
        saving.publish = marked(saving.publish, "publishing")
        saving.prune = marked(saving.prune, "pruning")


if __name__ == "__main__":
    main()
