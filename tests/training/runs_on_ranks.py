"""Runs recipe after recipe in one set of ranks, through the same function as run.py: `runs_on_ranks.py RUNS.json [STEP]`.

RUNS.json: a list of [recipe, config, overrides]. STEP: in which (0-based) every rank is killed by SIGKILL. Environment
variables that `join` reads are put back between runs.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import exit_code
from finetune.run import fine_tune
from finetune.training import step as training_step
from tests.ranks import open_stores


def main() -> None:
    """Trains every run of the list, one after another."""
    launched, runs = dict(os.environ), json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:
        die_in_step(int(sys.argv[2]))
    open_stores(len(runs))
    for number, (recipe, config, overrides) in enumerate(runs):
        os.environ.clear()
        os.environ |= launched | {"MASTER_PORT": str(int(launched["MASTER_PORT"]) + number)}
        fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))


def die_in_step(step: int) -> None:
    """Makes the loop kill this process in a step, between its gradients and the update."""
    clip = training_step.clip_gradients
    steps = 0

    def clip_or_die(*arguments: Any) -> Any:
        nonlocal steps
        if steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        return clip(*arguments)

    training_step.clip_gradients = clip_or_die


if __name__ == "__main__":
    sys.exit(exit_code(main))
