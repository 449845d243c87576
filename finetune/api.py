"""The commands as functions, for scripts and notebooks: `import finetune`. docs/api.md lists what
is public.

Imports no torch: each function imports what it needs when it is called.
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
    """Reads a recipe: a file or a name in recipes/, keys alone, or a file with keys laid over it.

    Args:
        recipe: The file. Paths in it are relative to it; those in `keys` to the current folder.
        model: In place of model_name_or_path, a model of transformers, which is written to a
            folder. Without tokenizer_name_or_path, the tokenizer is that of what it was loaded
            from.
        keys: Keys of docs/recipes.md, as values of Python. Where a file of rows is named, a list
            of rows, a `datasets.Dataset` or a data frame may stand; where a function, the function.
            Without `datasets` only a `Session` can train on it.

    Raises:
        UserError: With every mistake, one a line.

    >>> recipe = load_recipe("quickstart", learning_rate=1e-3, max_steps=5)
    >>> recipe.optimization.learning_rate, recipe.data.max_length
    (0.001, 128)
    """
    given: Mapping[str, Any] = keys
    if model is not None:
        from finetune.models.given_model import name_model

        given = name_model(model, keys)
    named = name_given(given)
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in named.items()]
    name = None if recipe is None else str(recipe)
    return read_recipe(name, overrides, needs_data=False, place=LOAD_RECIPE)


def make_plan(recipe: Recipe | str | Path, config: str | None = None, ranks: int = 1) -> "Plan":
    """Calculates what a run will need: `str(plan)` is what `finetune plan` prints.

    Args:
        recipe: Of `load_recipe`, or a file, or a name in recipes/.
        config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
        ranks: One for each GPU.

    Raises:
        UserError: For a combination that the rules refuse, and a model that transformers cannot
            build.
    """
    from finetune.plan import plan

    recipe = expect_recipe(recipe)
    return plan.make_plan(recipe, plan.read_planned_sharding(recipe, config, ranks), ranks)


def prepare(recipe: Recipe | str | Path) -> "PreparedData":
    """Reads, checks and tokenizes the recipe's data, as a run does; `.report` says what was found.

    Raises:
        UserError: For data that cannot be read, and for fatal findings.
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
        """The lines of metrics.jsonl but for seconds of phases: losses, norms, speed, held-out
        results.
        """
        lines = read_json_lines(self.folder / "metrics.jsonl")
        return [line for line in lines if line is not None and PHASE not in line]

    @property
    def export(self) -> Path | None:
        """The exported model, a Hugging Face folder; None where there is none."""
        return self._existing(EXPORT)

    @property
    def adapter(self) -> Path | None:
        """The exported adapter, a PEFT folder; None where there is none."""
        return self._existing(ADAPTER)

    @property
    def adapters(self) -> dict[str, "RunResult"]:
        """The run of each adapter, by its name, of a recipe that names `adapters`."""
        return {each.name: RunResult(each) for each in list_runs(self.folder)}

    def _existing(self, name: str) -> Path | None:
        if (self.folder / name).is_dir():
            return self.folder / name
        return None


def train(
    recipe: Recipe | str | Path, config: str | None = None, callbacks: Sequence["Callback"] = ()
) -> RunResult:
    """Trains, evaluates, saves and exports, as `finetune launch` does; resumes where a run was
    stopped.

    In a notebook the report's plots grow below the cell. To interrupt the kernel is to stop and
    save.

    On several GPUs every rank calls it: under `accelerate launch my_script.py`, or by
    `accelerate.notebook_launcher(finetune.train, (recipe,), num_processes=2)`.
    Rank 0 exports; the others return before.

    Args:
        recipe: Of `load_recipe`, or a file, or a name in recipes/.
        config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
        callbacks: What is called at the run's events, after those that the recipe names.

    Raises:
        UserError: For what a person can correct.
        Preempted: Where a signal (Ctrl-C, SIGTERM) has stopped the run after it was saved.
    """
    from finetune.run import fine_tune

    recipe = expect_recipe(recipe, may_have_adapters=True)
    if not isinstance(callbacks, list | tuple):
        raise UserError("train: callbacks: a list is expected, such as [Notify()]")
    called: list[Any] = list(callbacks)
    if is_notebook() and "WORLD_SIZE" not in os.environ:  # ranks of its own cannot show anything
        from finetune.report.page import Plots

        called.append(Plots())
    fine_tune(
        recipe, read_sharding(config, recipe.run.accelerate_config, os.environ), callbacks=called
    )
    return RunResult(recipe.folder)


def export_run(
    run: RunResult | str | Path, output: str | Path | None = None, **options: Any
) -> Path:
    """Writes a run or a checkpoint as a Hugging Face folder, verified, and returns it.

    Args:
        run: Of `train`, or the folder of a run or a checkpoint.
        output: The folder to make; by default export/ in the run's.
        options: Of `finetune.export.export.export`: `dtype`, `max_shard_size`, `verify`,
            `overwrite`, `adapter_only`...

    Raises:
        UserError: Where the run or the result is wrong, or the folder exists.
    """
    from finetune.export.export import export

    folder = run.folder if isinstance(run, RunResult) else Path(run)
    return export(folder, output or folder / EXPORT, **options)


def chat(model: RunResult | str | Path, messages: Sequence[Mapping[str, Any]] = ()) -> "Chat":
    """Loads a model to talk with: a run, a checkpoint, an adapter, a Hugging Face folder or a hub
    name.

    Args:
        model: Of `train`, or its folder or name.
        messages: What has been said before, such as a system message.

    Raises:
        UserError: Where it cannot be loaded.
    """
    from finetune.inference.conversation import Chat
    from finetune.inference.inference_model import LoadOptions, load_inference_model
    from finetune.inference.inputs import find_model

    name = model.folder if isinstance(model, RunResult) else model
    loaded = load_inference_model(find_model(str(name)), LoadOptions(), lambda line: None)
    return Chat(loaded, [dict(each) for each in messages])
