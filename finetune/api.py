"""The commands as functions, for scripts and notebooks: `import finetune`. docs/api.md lists what
is public.

Importing this module imports no torch: each function imports what it needs when it is called.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from finetune.config.accelerate_file import read_sharding
from finetune.config.given import name_given
from finetune.config.reader import add_hints, expect_recipe, read_recipe
from finetune.config.schema import Recipe
from finetune.config.yaml_file import LOAD_RECIPE
from finetune.constants import ADAPTER, EXPORT
from finetune.convert import hints
from finetune.errors import UserError, is_notebook
from finetune.files.json_files import read_json_lines
from finetune.files.phases import PHASE
from finetune.files.run_files import list_runs

if TYPE_CHECKING:  # imports torch or takes long
    from transformers import PreTrainedModel

    from finetune.data.prepare import PreparedData
    from finetune.inference.conversation import Chat
    from finetune.plan.plan import Plan
    from finetune.recipe_keys import RecipeKeys  # a .pyi file only
    from finetune.training.callbacks import Callback

add_hints(hints)


def load_recipe(
    recipe: str | Path | None = None,
    *,
    model: "PreTrainedModel | None" = None,
    **keys: Unpack["RecipeKeys"],
) -> Recipe:
    """Reads a recipe from a file, from keys, or from a file whose keys are partly replaced.

    Args:
        recipe: A file, or a name in recipes/; None takes `keys` alone. Paths are
            looked for in the current folder; those in the file then in the file's folder too.
        model: A model of transformers in place of model_name_or_path; it is written to a folder.
            Unless tokenizer_name_or_path is given, the tokenizer is the one of the folder or hub
            name from which the model was loaded.
        keys: Keys of docs/recipes.md with Python values; they replace those in the file. In place
            of the name of a file of rows, a list of rows, a `datasets.Dataset` or a data frame may
            be given; in place of the name of a function, the function. Without `datasets`, only a
            `Session` can train on the recipe.

    Raises:
        UserError: If there are mistakes; it lists all of them, one a line.

    >>> recipe = load_recipe("quickstart", learning_rate=1e-3, max_steps=5)
    >>> recipe.optimization.learning_rate, recipe.data.max_length
    (0.001, 128)
    """
    with_model: Mapping[str, Any] = keys
    if model is not None:
        from finetune.models.given_model import name_model

        with_model = name_model(model, keys)
    # now every value is one that a recipe's file could hold
    plain_keys = name_given(with_model)
    overrides = [f"{key}={json.dumps(value, default=_plain)}" for key, value in plain_keys.items()]
    name = None if recipe is None else str(recipe)
    return read_recipe(name, overrides, needs_data=False, place=LOAD_RECIPE)


def _plain(value: Any) -> Any:
    """Returns the numbers of a NumPy value or a tensor as Python's, any other value as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def make_plan(recipe: Recipe | str | Path, config: str | None = None, ranks: int = 1) -> "Plan":
    """Calculates the memory, time and disk space that a run will need, without training.

    `str(plan)` is the text that `finetune plan` prints.

    Args:
        recipe: A recipe of `load_recipe`, or a file, or a name in recipes/.
        config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
        ranks: The number of ranks: one for each GPU.

    Raises:
        UserError: If the rules refuse the combination, or transformers cannot build the model.
    """
    from finetune.plan import plan

    recipe = expect_recipe(recipe)
    return plan.make_plan(recipe, plan.read_planned_sharding(recipe, config, ranks), ranks)


def prepare(recipe: Recipe | str | Path) -> "PreparedData":
    """Reads, checks and tokenizes the recipe's data, as a run does.

    The result's `report` lists the findings.

    Raises:
        UserError: If data cannot be read, or has fatal findings.
    """
    from finetune.data.prepare import prepare_data
    from finetune.data.tokenizer import load_tokenizer
    from finetune.distributed.world import alone

    recipe = expect_recipe(recipe)
    keys = recipe.rollout
    tokenizer = load_tokenizer(recipe.model, recipe.data, keys.tools, keys.environments)
    return prepare_data(recipe, tokenizer, alone())


@dataclass(frozen=True, slots=True)
class RunResult:
    """The files of a finished run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl with losses, norms, speed or held-out results; lines with the
        seconds of a phase are left out.
        """
        lines = read_json_lines(self.folder / "metrics.jsonl")
        return [line for line in lines if line is not None and PHASE not in line]

    @property
    def export(self) -> Path | None:
        """The exported model, a Hugging Face folder; None if there is none."""
        return self._find_folder(EXPORT)

    @property
    def adapter(self) -> Path | None:
        """The exported adapter, a PEFT folder; None if there is none."""
        return self._find_folder(ADAPTER)

    @property
    def adapters(self) -> dict[str, "RunResult"]:
        """The adapter's name -> its run, if the recipe names several `adapters`; else empty."""
        return {each.name: RunResult(each) for each in list_runs(self.folder)}

    def _find_folder(self, name: str) -> Path | None:
        """Returns the folder `name` in the run's folder; None if it does not exist."""
        if (self.folder / name).is_dir():
            return self.folder / name
        return None


def train(
    recipe: Recipe | str | Path, config: str | None = None, callbacks: Sequence["Callback"] = ()
) -> RunResult:
    """Trains, evaluates, saves and exports, as `finetune launch` does. A run that was stopped is
    resumed.

    In a notebook the report's plots grow below the cell. Interrupting the kernel saves the run and
    stops it. Outside the main thread no signal does, because only the main thread gets signals.

    On several GPUs every rank calls it: under `accelerate launch my_script.py`, or by
    `accelerate.notebook_launcher(finetune.train, (recipe,), num_processes=2)`.
    Rank 0 exports; the other ranks return before that.

    Args:
        recipe: A recipe of `load_recipe`, or a file, or a name in recipes/.
        config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
        callbacks: Callbacks that are called after those that the recipe names.

    Raises:
        UserError: If there is a mistake that the user can fix.
        Preempted: If a signal (Ctrl-C, SIGTERM) has stopped the run, after a save.
    """
    from finetune.run import fine_tune

    recipe = expect_recipe(recipe, may_have_adapters=True)
    if not isinstance(callbacks, list | tuple):
        raise UserError("train: callbacks: a list is expected, such as [Notify()]")
    all_callbacks: list[Any] = list(callbacks)
    # Ranks that a notebook has launched have no cell to show plots in.
    if is_notebook() and "WORLD_SIZE" not in os.environ:
        from finetune.report.page import Plots

        all_callbacks.append(Plots())
    sharding = read_sharding(config, recipe.run.accelerate_config, os.environ)
    fine_tune(recipe, sharding, callbacks=all_callbacks)
    return RunResult(recipe.folder)


def export_run(
    run: RunResult | str | Path, output: str | Path | None = None, **options: Any
) -> Path:
    """Exports a run or a checkpoint as a Hugging Face folder, verifies it, and returns the folder.

    Args:
        run: The result of `train`, or the folder of a run or a checkpoint.
        output: The folder to make; by default export/ in the run's folder.
        options: Options of `finetune.export.export.export`, such as `dtype`, `max_shard_size`,
            `verify`, `overwrite` and `adapter_only`.

    Raises:
        UserError: If the run or the result is wrong, or the folder exists.
    """
    from finetune.export.export import export

    folder = run.folder if isinstance(run, RunResult) else Path(run)
    return export(folder, output or folder / EXPORT, **options)


def chat(model: RunResult | str | Path, messages: Sequence[Mapping[str, Any]] = ()) -> "Chat":
    """Loads a model to talk with, and returns the conversation.

    Args:
        model: The result of `train`; the folder of a run, a checkpoint, an adapter or a Hugging
            Face model; or a hub name.
        messages: The messages with which the conversation begins, such as a system message.

    Raises:
        UserError: If the model cannot be loaded.
    """
    from finetune.inference.conversation import Chat
    from finetune.inference.inference_model import LoadOptions, load_inference_model
    from finetune.inference.inputs import find_model

    name = model.folder if isinstance(model, RunResult) else model
    loaded = load_inference_model(find_model(str(name)), LoadOptions(), lambda line: None)
    return Chat(loaded, [dict(each) for each in messages])
