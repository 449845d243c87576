"""The script that runs on every rank: `accelerate launch finetune/run.py --config C --recipe R key=value`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script's own folder comes first on sys.path, where our `data` would hijack another's: the project's root must.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import with_recipe_keys
from finetune.config.layout import Sharding
from finetune.config.pretrained_adapter import complete_lora
from finetune.config.reader import read_overrides, read_recipe
from finetune.config.schema import Recipe
from finetune.errors import end_process, exit_code
from finetune.plan.architecture import find_local_facts
from finetune.terminal import set_library_environment


def main() -> None:
    """Reads what the user asked for, which needs no torch, and does it."""
    parser = argparse.ArgumentParser(prog="finetune/run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", default="quickstart", help="a file, or a name in recipes/ (default: quickstart)")
    parser.add_argument("--config", help="an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run and stop")
    options, rest = parser.parse_known_args()
    recipe = read_recipe(options.recipe, read_overrides(rest, vars(options)))
    sharding = read_sharding(options.config, recipe.run.accelerate_config, os.environ)
    fine_tune(recipe, sharding, options.dry_run)


def fine_tune(recipe: Recipe, sharding: Sharding, dry_run: bool = False, callbacks: Sequence[Any] = ()) -> None:
    """A run from its recipe to its export. `callbacks`: beside the recipe's."""
    recipe, sharding = complete_lora(recipe), with_recipe_keys(sharding, recipe)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    refuse_problems(find_problems(recipe, sharding, find_local_facts(recipe.model), ranks))  # before torch is imported
    set_library_environment(deterministic=recipe.run.deterministic)
    from finetune.session import Session
    from finetune.training.evaluate import evaluate_after_training, evaluate_before_training
    from finetune.training.finish import finish, is_finished, leave_ranks
    from finetune.training.hooks import load_hooks
    from finetune.training.loop import train
    from finetune.training.screens import print_plan

    hooks = load_hooks(recipe, callbacks)
    with Session(recipe, sharding, saves=not dry_run) as session:
        data, world = session.data, session.world
        if dry_run:
            return print_plan(session.recipe, world, data) if world.is_main else None
        if is_finished(session.folder, session.recipe, session.inputs, data.train.steps, world):
            return None
        with session.signals as signals:
            progress = session.load()
            run = session.start(hooks)
            with session.computing(), run.log:
                run.notify("on_start", progress)
                evaluate_before_training(run, progress, signals)
                progress = train(run, progress, signals)
                progress = evaluate_after_training(run, progress, signals)
                run.notify("on_end", progress)
                leave_ranks(run, signals)
    return finish(run, progress)


if __name__ == "__main__":
    end_process(exit_code(main))
