"""Runs recipe after recipe in one set of ranks, through the same function as run.py: `runs_on_ranks.py RUNS.json`.

RUNS.json: a list of [recipe, config, overrides]. Environment variables that `join` reads are put back between runs.
"""

import json
import os
import sys
from pathlib import Path

from finetune.distributed.accelerate_config import read_sharding
from finetune.errors import exit_code
from finetune.recipe.reader import read_recipe
from finetune.run import fine_tune
from tests.ranks import open_stores


def main() -> None:
    """Trains every run of the list, one after another."""
    launched, runs = dict(os.environ), json.loads(Path(sys.argv[1]).read_text())
    open_stores(len(runs))
    for number, (recipe, config, overrides) in enumerate(runs):
        os.environ.clear()
        os.environ |= launched | {"MASTER_PORT": str(int(launched["MASTER_PORT"]) + number)}
        fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))


if __name__ == "__main__":
    sys.exit(exit_code(main))
