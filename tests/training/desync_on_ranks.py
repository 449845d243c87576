"""Runs in which one rank fails, each on freshly forked ranks.

    python tests/training/desync_on_ranks.py CASES.json

CASES.json: a list of {recipe, config, overrides, fault, log}. The ranks of a case write into its one log, as under a
launcher, so that who spoke first can be seen. Prints one JSON line for each case: how every rank ended, and after how
many seconds since the fault.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.data import prepare
from finetune.run import fine_tune
from finetune.training import step as training_step
from tests.forked_ranks import fork_ranks, import_all, kill, reap

RANKS, FAULTY, STEP = 2, 1, 1
LONGEST_SECONDS = 60.0
AT_ONCE = 3  # cases: most of their time the ranks wait for each other


class Case:
    """A run on freshly forked ranks, from its start to the end of both."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.log = Path(given["log"])
        self.mark = self.log.with_suffix(".fault")
        self.processes = fork_ranks(partial(fail, given, mark=self.mark), RANKS, self.log)
        self.started, self.ended = time.time(), 0.0
        self.codes: dict[int, int] = {}
        self.killed: set[int] = set()

    def is_over(self) -> bool:
        """Whether both ranks have ended; what is left after LONGEST_SECONDS is killed."""
        if len(self.codes) == RANKS:
            return True
        before = len(self.codes)
        reap(self.processes, self.codes)
        if len(self.codes) > before:
            self.ended = time.time()
        if time.time() > self.started + LONGEST_SECONDS and not self.killed:
            self.killed = set(range(RANKS)) - self.codes.keys()
            kill(self.processes, self.codes)
        return len(self.codes) == RANKS

    def result(self) -> dict[str, Any]:
        """How every rank ended (None: it did not), and after how many seconds since the fault."""
        assert self.mark.exists(), f"the run ended before its fault:\n{self.log.read_text()}"
        codes = [None if rank in self.killed else self.codes[rank] for rank in range(RANKS)]
        return {"codes": codes, "seconds": self.ended - self.mark.stat().st_mtime}


def run_cases(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of all cases, AT_ONCE of them running at a time."""
    cases: list[Case] = []
    running = 0
    while running or len(cases) < len(given):
        if running < AT_ONCE and len(cases) < len(given):
            cases.append(Case(given[len(cases)]))
        time.sleep(0.02)
        running = sum(not case.is_over() for case in cases)
    return [case.result() for case in cases]


def fail(case: dict[str, Any], rank: int, *, mark: Path) -> None:
    """The run, with its fault at the beginning of a step on one rank."""
    faults = {
        "raises": lambda: 1 / 0,
        "exits": lambda: os._exit(3),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sleeps": lambda: time.sleep(LONGEST_SECONDS),
    }
    seed_dropout = training_step.seed_dropout

    def seed_and_fail(seed: int, draws: str, of: int) -> None:
        if draws == str(STEP) and rank == FAULTY:
            mark.touch()
            faults[case["fault"]]()
        seed_dropout(seed, draws, of)

    def die_with_tokens(*_: object) -> None:
        mark.touch()
        faults["killed"]()

    training_step.seed_dropout = seed_and_fail
    if (
        case["fault"] == "killed while tokenizing" and rank != FAULTY
    ):  # rank 0, for whose files the other waits
        prepare.write_store = die_with_tokens
    fine_tune(
        read_recipe(case["recipe"], case["overrides"]),
        read_sharding(case["config"], None, os.environ),
    )


if __name__ == "__main__":
    import_all()
    for line in run_cases(json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps(line), flush=True)
