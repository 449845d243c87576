"""Started by two launchers, one for each "node": trains one run after another, and once kills one of its ranks.

    nodes_on_ranks.py RUNS.json

RUNS.json: a list of [recipe, config, overrides]. In the last run rank 3 is killed at a step, once. Rank 0 prints the
timeouts of every process group of a run, in seconds.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import end_process, exit_code
from finetune.run import fine_tune
from finetune.training import step as training_step
from tests.ranks import open_stores

KILLED_RANK, KILLED_AT_STEP = 3, 4


def main() -> None:
    """Trains every run of the list, the last one with a fault."""
    launched = dict(os.environ)
    runs = json.loads(Path(sys.argv[1]).read_text())
    os.environ["MASTER_PORT"] = str(int(launched["MASTER_PORT"]) + 1)
    open_stores(len(runs))
    for number, (recipe, config, overrides) in enumerate(runs):
        os.environ.clear()
        os.environ |= launched
        if number == len(runs) - 1:
            kill_once(int(launched["RANK"]), Path(sys.argv[1]).with_name("killed"))
        else:
            os.environ["MASTER_PORT"] = str(int(launched["MASTER_PORT"]) + 1 + number)
            os.environ.pop("ACCELERATE_USE_FSDP")  # the launcher's file is that of the last run
        seed_dropout = print_timeouts(launched["RANK"] == "0", Path(config).stem)
        fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))
        training_step.seed_dropout = seed_dropout


def print_timeouts(is_main: bool, run: str) -> Callable[[int, str, int], None]:
    """Makes the loop print the timeouts of all process groups at its first step. Returns what it called until now."""
    seed_dropout = training_step.seed_dropout

    def seed_and_print(seed: int, draws: str, rank: int) -> None:
        if is_main and draws == "0":
            groups = dist.distributed_c10d._world.pg_map
            backends = (group._get_backend(torch.device("cpu")) for group in groups)
            seconds = sorted(backend.options._timeout.total_seconds() for backend in backends)
            print(f"{run}: timeouts {seconds}", flush=True)
        seed_dropout(seed, draws, rank)

    training_step.seed_dropout = seed_and_print
    return seed_dropout


def kill_once(rank: int, mark: Path) -> None:
    """Makes the loop kill this process at the beginning of a step, if it is the one and `mark` is not there yet."""
    seed_dropout = training_step.seed_dropout

    def seed_and_die(seed: int, draws: str, of: int) -> None:
        if rank == KILLED_RANK and draws == str(KILLED_AT_STEP) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        seed_dropout(seed, draws, of)

    training_step.seed_dropout = seed_and_die


if __name__ == "__main__":
    end_process(exit_code(main))
