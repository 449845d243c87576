"""Runs with the optimizer's state in files and in memory, each on freshly forked ranks: `offloads_on_ranks.py CASES.json`.

CASES.json: a list of {recipe, config, overrides, ranks, fault, log}. `fault`: "killed" takes all ranks at step 4, half of a
window being written; "full" lets the last rank's disk fail at step 3. Prints one JSON line for each case: the ranks' exit codes,
the windows of a pass, and the names left in `offload_dir`.
"""

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.optim.offload import OffloadedOptimizer, ScratchFile, align
from finetune.run import fine_tune
from tests.forked_ranks import fork_ranks, import_all, wait

KILLED_AT, FAILING_AT = 4, 3  # steps, from 1


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Trains and returns how every rank ended."""
    log = Path(case["log"])

    def train(rank: int) -> None:
        watch(case["fault"], is_last=rank == case["ranks"] - 1)
        fine_tune(
            read_recipe(case["recipe"], case["overrides"]),
            read_sharding(case["config"], None, os.environ),
        )

    codes = wait(fork_ranks(train, case["ranks"], log), seconds=120)
    folder = Path(case["offload_dir"])
    return {"codes": codes, "log": log.read_text(), "left": sorted(map(str, folder.rglob("*")))}


def watch(fault: str, is_last: bool) -> None:
    """Has this rank report its windows, and suffer the case's fault."""
    step, write, steps = OffloadedOptimizer.step, ScratchFile.write, [0]

    def watched(self: OffloadedOptimizer, closure: Any = None) -> None:
        steps[0] += 1
        if steps[0] == 1:
            windows, direct = len(self.windows), self.file.is_direct
            # One write: two ranks share the log, and print() writes its arguments one by one.
            os.write(1, f"WINDOWS {windows} DIRECT {direct}\n".encode())
        step(self, closure)

    def failing(self: ScratchFile, offset: int, values: torch.Tensor) -> None:
        if fault == "killed" and steps[0] == KILLED_AT and offset > 0:
            write(self, offset, values[: align(len(values) // 2)])
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "full" and steps[0] == FAILING_AT and is_last:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder))
        write(self, offset, values)

    OffloadedOptimizer.step = watched  # type: ignore[method-assign]
    ScratchFile.write = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    import_all()
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_case(each)), flush=True)
