"""Runs in which one rank fails, each on freshly forked ranks (what takes long, the imports, is done once, before).

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

import transformers.models.llama.modeling_llama  # noqa: F401

import finetune.data.prepare
import finetune.models.load
import finetune.optim.optimizer
import finetune.training.finish  # noqa: F401
from finetune.checkpoint import resume as resuming  # noqa: F401
from finetune.data import token_cache
from finetune.distributed.accelerate_config import read_sharding
from finetune.errors import end_process, exit_code
from finetune.recipe.reader import read_recipe
from finetune.run import fine_tune
from finetune.training import loop
from tests.ranks import free_port

RANKS, FAULTY, STEP = 2, 1, 1
LONGEST_SECONDS = 60.0


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Forks the ranks, waits for their ends, kills what is left after LONGEST_SECONDS."""
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    port, mark = free_port(), Path(case["log"]).with_suffix(".fault")
    ranks = {}
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.dup2(log, 1)
            os.dup2(log, 2)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            os.environ |= {name: str(value) for name, value in names.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            end_process(exit_code(partial(fail, case, rank, mark)))
        ranks[child] = rank
    codes, ended, started = {}, 0.0, time.time()
    while ranks and time.time() < started + LONGEST_SECONDS:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
            ended = time.time()
        time.sleep(0.02)
    for child in ranks:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(log)
    assert mark.exists(), f"the run ended before its fault:\n{Path(case['log']).read_text()}"
    return {"codes": [codes.get(rank) for rank in range(RANKS)], "seconds": ended - mark.stat().st_mtime}


def fail(case: dict[str, Any], rank: int, mark: Path) -> None:
    """The run, with its fault at the beginning of a step on one rank."""
    faults = {
        "raises": lambda: 1 / 0,
        "exits": lambda: os._exit(3),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sleeps": lambda: time.sleep(LONGEST_SECONDS),
    }
    seed_dropout = loop.seed_dropout

    def seed_and_fail(seed: int, step: int, of: int) -> None:
        if step == STEP and rank == FAULTY:
            mark.touch()
            faults[case["fault"]]()
        seed_dropout(seed, step, of)

    def die_with_tokens(*_: object) -> None:
        mark.touch()
        faults["killed"]()

    loop.seed_dropout = seed_and_fail
    if case["fault"] == "killed while tokenizing" and rank != FAULTY:  # rank 0, for whose files the other waits
        token_cache.write_store = die_with_tokens
    fine_tune(read_recipe(case["recipe"], case["overrides"]), read_sharding(case["config"], None, os.environ))


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_case(each)), flush=True)
