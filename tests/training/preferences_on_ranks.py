"""Runs on freshly forked ranks: `preferences_on_ranks.py STARTS.json`.

STARTS.json: a list of {ranks, log, killed_after, runs}; runs: a list of [recipe, config, overrides], which one set of ranks walks.
`killed_after`: all ranks are killed once this step has been saved; null: they are not. Prints the exit codes of each start.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from finetune.checkpoint.save import Saver
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.progress import Progress
from finetune.run import fine_tune
from tests.forked_ranks import fork_ranks, import_all, wait


def start(given: dict[str, Any]) -> list[int]:
    """Trains every run on one set of ranks; the exit code of each rank."""

    def train(_rank: int) -> None:
        if given["killed_after"] is not None:
            kill_after(given["killed_after"])
        launched = dict(os.environ)
        for number, (recipe, config, overrides) in enumerate(given["runs"]):
            os.environ.clear()
            os.environ |= launched | {"MASTER_PORT": str(int(launched["MASTER_PORT"]) + number)}
            fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))

    return wait(fork_ranks(train, given["ranks"], Path(given["log"])), seconds=200)


def kill_after(step: int) -> None:
    """Kills this rank once it has saved `step`."""
    save = Saver.save

    def save_and_die(self: Saver, progress: Progress) -> None:
        save(self, progress)
        if progress.step == step:
            self.finish()
            os.kill(os.getpid(), signal.SIGKILL)

    Saver.save = save_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    import_all()

    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(start(each)), flush=True)
