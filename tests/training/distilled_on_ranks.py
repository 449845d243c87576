"""Runs on forked ranks, as many runs as wanted on each set of them: `distilled_on_ranks.py RUNS.json`.

RUNS.json: number of ranks -> a list of [recipe, config, overrides]. What the ranks write goes to RANKS.log beside it.
"""

import json
import os
import sys
from pathlib import Path

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.run import fine_tune
from tests.forked_ranks import fork_ranks, import_all, wait
from tests.ranks import free_port


def main(path: Path) -> int:
    """Trains every run; 0 where every rank ended so."""
    import_all()
    failed = 0
    for ranks, runs in json.loads(path.read_text()).items():
        ports = [str(free_port()) for _ in runs]

        def train(
            rank: int, runs: list[tuple[str, str, list[str]]] = runs, ports: list[str] = ports
        ) -> None:
            launched = dict(os.environ)
            for (recipe, config, overrides), port in zip(runs, ports, strict=True):
                os.environ.clear()
                os.environ |= launched | {"MASTER_PORT": port}
                fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))

        failed += any(
            wait(fork_ranks(train, int(ranks), path.with_name(f"{ranks}.log")), seconds=200)
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
