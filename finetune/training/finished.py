"""A run that is done: written down at its end, so that the same command, started again, has nothing to do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.checkpoint.manifest import hash_recipe
from finetune.checkpoint.retention import list_checkpoints
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.durable import replace_file
from finetune.recipe.reader import as_written
from finetune.recipe.schema import Recipe

FINISHED = "finished.json"


def write_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str], step: int) -> None:
    """Writes down that the run of `recipe` on these inputs is done: `step` is its last, and what it exports is there."""
    replace_file(folder / FINISHED, json.dumps(_record(recipe, inputs, step), indent=1) + "\n")


def is_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str], world: World) -> bool:
    """Whether this very run is done: same recipe, same inputs, and its last checkpoint and its exports still there.

    All ranks call it; rank 0 looks, and prints where the results are.
    """
    done: bool = RankGroup(world).main(lambda: _is_finished(folder, recipe, inputs))
    if done and world.is_main:
        print(f"{folder}: this run is done, there is nothing left to do")
        print(results(folder))
    return done


def results(folder: Path) -> str:
    """Where the results of a run are, as the last line of its output."""
    made = [name for name in ("export", "adapter", "checkpoints", "metrics.jsonl") if (folder / name).exists()]
    return "made    " + "  ".join(str(folder / name) for name in made)


def _is_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str]) -> bool:
    steps = [step for step, _ in list_checkpoints(folder)]
    exports = ["export", *(["adapter"] if recipe.lora.use_peft else [])] if recipe.checkpoint.export_at_end else []
    if not steps or not all((folder / name).is_dir() for name in exports):
        return False
    try:
        then = json.loads((folder / FINISHED).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(then == _record(recipe, inputs, steps[-1]))


def _record(recipe: Recipe, inputs: Mapping[str, str], step: int) -> dict[str, Any]:
    return {"step": step, "recipe_sha256": hash_recipe(as_written(recipe)), "inputs": dict(inputs)}
