"""The script that the launcher starts on every rank: `accelerate launch finetune/run.py --config C --recipe R key=value`."""

import argparse
import os
import sys
from pathlib import Path

# A script's own folder comes first on sys.path, where our `data` or `export` would hijack another's: the project's root must.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from finetune.distributed.accelerate_config import Sharding, read_sharding
from finetune.errors import end_process, exit_code
from finetune.quiet import quieten
from finetune.recipe.overrides import read_overrides
from finetune.recipe.reader import read_recipe
from finetune.recipe.schema import Recipe


def main() -> None:
    """Reads what the user asked for, which needs no torch, and does it."""
    parser = argparse.ArgumentParser(prog="finetune/run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", default="quickstart", help="a file, or a name in recipes/ (default: quickstart)")
    parser.add_argument("--config", help="an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run and stop")
    options, rest = parser.parse_known_args()
    recipe = read_recipe(options.recipe, read_overrides(rest, vars(options)))
    fine_tune(recipe, read_sharding(options.config, recipe.run.accelerate_config, os.environ), options.dry_run)


def fine_tune(recipe: Recipe, sharding: Sharding, dry_run: bool = False) -> None:
    """A run from its recipe to its export."""
    quieten()
    from finetune.checkpoint import inputs
    from finetune.checkpoint import resume as resuming
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer
    from finetune.distributed.world import join, leave
    from finetune.models.load import load_model
    from finetune.models.probe import refuse_unsound
    from finetune.optim.build import build_optimizer
    from finetune.training import dry_run as beforehand
    from finetune.training import evaluate as evaluation
    from finetune.training import finish as conclusion
    from finetune.training import finished, loop, run_folder
    from finetune.training.summary import assemble

    world = join(sharding, recipe.run.timeout_seconds)
    if dry_run:
        return beforehand.dry_run(recipe, world)
    folder = run_folder.open_run_folder(recipe, world)
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    data = prepare_data(recipe, tokenizer, world)
    recipe = data.complete_recipe(recipe)
    found = inputs.fingerprint_inputs(recipe, tokenizer, data, world)
    if finished.is_finished(folder, recipe, found, world):
        return leave(world)
    with beforehand.out_of_memory_answered(recipe, world):
        model, size = load_model(recipe.model, recipe.lora, recipe.run.seed, len(tokenizer), world)
        optimizer = build_optimizer(model, recipe.optimization)
        progress = resuming.resume(recipe, folder, model, optimizer, world, found)
        refuse_unsound(model, recipe.model, recipe.data, world)
        run = assemble(recipe, world, folder, tokenizer, data, model, size, optimizer, progress, found)
        evaluation.evaluate_untrained(run, progress)
        progress = evaluation.evaluate(run, loop.train(run, progress), questions=True)
    return conclusion.conclude(run, progress)


if __name__ == "__main__":
    end_process(exit_code(main))
