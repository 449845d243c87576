"""The folder of a run: opened and locked at its start, with the files that say what was run and on what."""

import json
import platform
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from finetune import __version__
from finetune.checkpoint.folders import lock_run
from finetune.checkpoint.resume import refuse_damaged_model
from finetune.config.layout import to_accelerate_config
from finetune.config.reader import write_recipe
from finetune.config.schema import Recipe
from finetune.config.yaml_file import read_yaml
from finetune.constants import count_cores, read_versions
from finetune.data.tokenizer import asks_for_date
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files.durable import replace_file, restore_exports, restore_folder

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"  # what was sampled, and what it was worth
RECIPE = "recipe.yaml"


def choose_run_name(recipe: Recipe) -> str:
    """The run's name, for folders and trackers: `run_name`, else the recipe's file name."""
    return recipe.run.run_name or Path(recipe.path).stem


def run_folder(recipe: Recipe) -> Path:
    """`output_dir`, else runs/<run_name>."""
    return Path(recipe.run.output_dir or Path("runs") / choose_run_name(recipe))


def open_run_folder(recipe: Recipe, world: World) -> Path:
    """Makes the run's folder (`output_dir`, else runs/<run_name>) and locks it against other runs.

    Rank 0 does it, all ranks return it. Raises `UserError` on all where it cannot be written or another run has locked
    it, and where the recipe names a checkpoint that is damaged.
    """
    folder = run_folder(recipe)
    RankGroup(world).on_main(lambda: _open(folder, recipe))
    return folder


def _open(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
        restore_exports(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    if recipe.model.model_name_or_path is not None:
        restore_folder(Path(recipe.model.model_name_or_path))
    refuse_damaged_model(recipe)


def fix_template_date(recipe: Recipe, folder: Path, tokenizer: Any, world: World) -> Recipe:
    """The recipe with the day that its chat template writes, where that asks for one: the day on which the run began.

    Else ranks that tokenize around midnight would differ, and a run resumed the next day would train on another text.
    """
    if recipe.data.chat_template_date is not None or not asks_for_date(tokenizer):
        return recipe
    day = RankGroup(world).on_main(lambda: _first_day(folder / RECIPE))
    return replace(recipe, data=replace(recipe.data, chat_template_date=day))


def _first_day(recipe_of_run: Path) -> str | None:
    """The day in the run's own recipe; today where there is none yet. None in a run of a version that fixed no day."""
    if not recipe_of_run.is_file():
        return date.today().isoformat()
    try:
        known: str | None = read_yaml(recipe_of_run).get("chat_template_date")
    except UserError as error:
        raise UserError(f"{error}; set chat_template_date to the run's day") from None
    return known


def describe_run(folder: Path, recipe: Recipe, world: World) -> None:
    """Writes what is enough to repeat the run, on the main rank, once it is sure to start.

    Raises `UserError` where it cannot be written.
    """
    try:
        write_recipe(recipe, folder / RECIPE)
        accelerate_config = to_accelerate_config(world.sharding, world.size)
        replace_file(folder / "accelerate.yaml", yaml.safe_dump(accelerate_config, sort_keys=False))
        replace_file(folder / "environment.json", json.dumps(environment(world), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from None


def write_data_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes data_report.json in place of an older one; `finetune report` may be reading it."""
    replace_file(folder / "data_report.json", json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n")


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder}: cannot be written ({error.strerror}); set output_dir to a folder that can")


def environment(world: World) -> dict[str, Any]:
    """Versions, machine and command: what a result depends on besides recipe and config."""
    on_gpu = world.device.type == "cuda"
    return {
        "finetune": __version__,
        "python": platform.python_version(),
        "packages": read_versions(),
        "platform": platform.platform(),
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else f"CPU, {count_cores()} cores",
        "threads_per_rank": torch.get_num_threads(),
        "layout": world.sharding.layout,
        "command": sys.argv,
    }
