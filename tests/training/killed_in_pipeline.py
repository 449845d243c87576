"""A run whose second rank SIGKILL ends between two chunks of a schedule: `killed_in_pipeline.py CALLS RECIPE CONFIG [KEY=VALUE ...]`.

CALLS: the forwards of chunks on that rank until then, over all steps.
"""

import os
import signal
import sys
from typing import Any

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.distributed.pipeline import Pipeline
from finetune.errors import exit_code
from finetune.run import fine_tune


def main() -> None:
    """Trains until it is killed."""
    calls, recipe, config, *overrides = sys.argv[1:]
    compute, seen = Pipeline._compute_chunk, 0

    def compute_or_die(self: Pipeline, *arguments: Any) -> Any:
        nonlocal seen
        seen += self.rank
        if seen == int(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, *arguments)

    Pipeline._compute_chunk = compute_or_die  # type: ignore[method-assign]
    fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))


if __name__ == "__main__":
    sys.exit(exit_code(main))
