"""A run whose first rank SIGKILL ends at a named place: `killed_while_sampling.py PLACE,CALLS RECIPE CONFIG [KEY=VALUE ...]`.

CALLS: of what is done there, until the one that dies. PLACE: sampling (between two tokens), rewards (while the process of the rewards computes), tools (while tools run), step (before the update), save (when
the checkpoint of that step is about to get its name), nowhere.
"""

import os
import signal
import sys
from typing import Any

from finetune.checkpoint import save
from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.errors import exit_code
from finetune.rollout import embedded, rewards
from finetune.run import fine_tune
from finetune.training import step as training_step


def die_in(module: Any, name: str, calls: int) -> None:
    """Makes the call number `calls` of a function end this process."""
    function, seen = getattr(module, name), 0

    def call(*arguments: Any, **keys: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keys)

    setattr(module, name, call)


def main() -> None:
    """Trains until it is killed."""
    dies, recipe, config, *overrides = sys.argv[1:]
    place, calls = dies.split(",")
    places = {
        "sampling": (embedded, "draw_tokens"),
        "rewards": (rewards, "_read_line"),  # the answer is awaited
        "tools": (rewards.Rewards, "call_tools"),
        "step": (training_step, "clip_gradients"),
        "save": (save, "publish"),
    }
    if place in places and os.environ.get("RANK", "0") == "0":
        die_in(*places[place], int(calls))
    fine_tune(read_recipe(recipe, overrides), read_sharding(config, None, os.environ))


if __name__ == "__main__":
    sys.exit(exit_code(main))
