"""A run, from `finetune launch` to its export: the launcher, and the script that it starts on every
rank.

This file is both. With a launcher of your own, the same run is
`accelerate launch finetune/run.py --config C --recipe R key=value`.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

RUN = Path(__file__).resolve()
# Python puts a script's own folder first on sys.path, where our `data` would hide another package
# of that name. The project's root takes its place.
if __name__ == "__main__":
    sys.path[0] = str(RUN.parents[1])

from finetune.config.accelerate_file import ACCELERATE_CONFIGS, read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import with_recipe_keys
from finetune.config.layout import Sharding
from finetune.config.pretrained import complete_lora
from finetune.config.reader import add_hints, find_file, read_overrides, read_recipe, split_adapters
from finetune.config.schema import Recipe
from finetune.config.yaml_file import find_yaml
from finetune.constants import count_cores
from finetune.convert import hints
from finetune.errors import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    UserError,
    end_process,
    exit_code,
    set_library_environment,
)
from finetune.plan.architecture import find_local_facts
from finetune.units import counted

if TYPE_CHECKING:  # imports torch
    from finetune.checkpoint.manifest import Progress
    from finetune.session import Session
    from finetune.training.training_run import TrainingRun

# A rank that ends with one of these exit codes has printed why.
REPORTED = (EXIT_FAULT, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_PREEMPTED)
# The launcher forwards these signals to the ranks, which save and then stop or continue.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
add_hints(hints)


def main() -> None:
    """Runs this file as the script of one rank: reads its arguments, and trains.

    Mistakes in the recipe are found before torch is imported.
    """
    parser = argparse.ArgumentParser(
        prog="finetune/run.py", description="Trains a recipe on this rank.", allow_abbrev=False
    )
    parser.add_argument(
        "--recipe", default="quickstart", help="a file, or a name in recipes/ (default: quickstart)"
    )
    parser.add_argument(
        "--config",
        help="an Accelerate file, or a name in accelerate_configs/ (default: the recipe's)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run and stop")
    options, rest = parser.parse_known_args()
    recipe = read_recipe(options.recipe, read_overrides(rest, vars(options)))
    sharding = read_sharding(options.config, recipe.run.accelerate_config, os.environ)
    fine_tune(recipe, sharding, options.dry_run)


def fine_tune(
    recipe: Recipe, sharding: Sharding, dry_run: bool = False, callbacks: Sequence[Any] = ()
) -> None:
    """Trains a recipe on this rank, from reading its data to the export.

    A recipe with several `adapters` trains them in turn, and exports them after the last.

    Args:
        recipe: The recipe.
        sharding: How the model is sharded over the ranks.
        dry_run: Checks what could stop the run, and prints its plan, instead of training.
        callbacks: Callbacks in addition to the recipe's.
    """
    # before torch is imported
    recipes, sharding = _check_recipes(recipe, sharding, int(os.environ.get("WORLD_SIZE", "1")))
    set_library_environment(deterministic=recipe.run.deterministic)
    started = time.perf_counter()
    from finetune.session import Session
    from finetune.training.callbacks import load_hooks
    from finetune.training.lifecycle import finish

    import_seconds = time.perf_counter() - started

    hooks = [load_hooks(own_recipe, callbacks) for own_recipe in recipes]
    trained: list[tuple[Any, Any]] = []
    with ExitStack() as open_sessions:
        session = None
        for own_recipe, own_hooks in zip(recipes, hooks, strict=True):
            session = Session(own_recipe, sharding, saves=not dry_run, after=session)
            open_sessions.enter_context(session)
            if own_recipe is recipes[0]:
                session.phases.add("imports", import_seconds, None)
            if len(recipes) > 1 and session.world.is_main:
                print(f"adapter {own_recipe.folder.name}: in {own_recipe.folder}", flush=True)
            if dry_run:
                _try_run(session)
            else:
                trained += _train(session, own_hooks, is_last=own_recipe is recipes[-1])
    for run, progress in trained:
        finish(run, progress)


def _try_run(session: "Session") -> None:
    """Checks what would stop the run of a session, without training; prints its plan.

    Raises `UserError` for what would stop it.
    """
    from finetune.training.lifecycle import try_folder
    from finetune.training.objectives.online import try_rewards
    from finetune.training.screens import print_plan

    recipe = session.recipe
    try_folder(recipe, session.world)
    session.check_model()
    if recipe.method_facts.samples:
        try_rewards(recipe, session.world, session.data)
    if session.world.is_main:
        print_plan(recipe, session.world, session.data)


def _train(
    session: "Session", hooks: Any, *, is_last: bool
) -> list[tuple["TrainingRun", "Progress"]]:
    """Trains a session's run to its end, with the evaluations before and after.

    `is_last`: whether no other adapter follows; then the ranks leave each other.

    Returns:
        The run and its progress, which are still to be exported; empty if the run was done before.
    """
    from finetune.checkpoint.resume import refuse_other_rows
    from finetune.training.evaluate import evaluate_after_training, evaluate_before_training
    from finetune.training.lifecycle import is_finished, leave_ranks
    from finetune.training.loop import train

    steps = session.data.train.steps
    if is_finished(session.folder, session.recipe, session.inputs, steps, session.world):
        return []
    with session.signals as signals:
        progress = session.load()
        refuse_other_rows(progress, session.recipe, session.data.train.steps_per_epoch)
        run = session.start(hooks)
        with session.computing(), run.log:
            run.notify("on_start", progress)
            progress = evaluate_before_training(run, progress, signals)
            progress = train(run, progress, signals)
            progress = evaluate_after_training(run, progress, signals)
            run.notify("on_end", progress)
            leave_ranks(run, signals, is_last=is_last)
    return [(run.without_model(), progress)]


def _check_recipes(
    recipe: Recipe, sharding: Sharding, ranks: int
) -> tuple[tuple[Recipe, ...], Sharding]:
    """Splits a recipe into one for each of its `adapters`, and applies the rules to them.

    Raises `UserError` if a rule refuses one of them. Imports no torch.

    Returns:
        The recipes to train in turn, each with the keys of the LoRA adapter that it names; the
        recipe alone if it has no `adapters`. And the sharding with the recipe's own keys.
    """
    recipes = tuple(complete_lora(own_recipe) for own_recipe in split_adapters(recipe))
    sharding = with_recipe_keys(sharding, recipe)
    facts = find_local_facts(recipe.model)
    refuse_problems(
        problem
        for own_recipe in recipes
        for problem in find_problems(own_recipe, sharding, facts, ranks)
    )
    return tuple(own_recipe.alone for own_recipe in recipes), sharding


def launch_command(options: argparse.Namespace) -> int:
    """Runs `finetune launch`: starts run.py on the ranks, and returns its exit code.

    Raises `UserError` for mistakes in the recipe, before the ranks start.
    """
    recipe = read_recipe(options.recipe, options.overrides)
    return launch_script(options, recipe, RUN, ["--dry-run"] if options.dry_run else [])


def launch_script(
    options: argparse.Namespace, recipe: Recipe, path: Path, more_arguments: Sequence[str]
) -> int:
    """Starts the script at `path` on the ranks of this machine, and returns its exit code.

    The script gets the recipe, the Accelerate file, `more_arguments` and the recipe's overrides.

    Raises `UserError` for mistakes in the recipe, before the script starts.
    """
    if options.num_processes is not None and options.num_processes < 1:
        raise UserError(f"--num-processes {options.num_processes}: a run has at least one rank")
    ranks = options.num_processes or _count_default_ranks()
    config = recipe.run.accelerate_config if options.config is None else options.config
    # Without a file the ranks read the launcher's settings in this process's variables.
    inherited = os.environ if config is None else {}
    sharding = read_sharding(config, None, {**inherited, "WORLD_SIZE": str(ranks)})
    file = None
    if config is not None:
        file = find_file(config, ACCELERATE_CONFIGS, "Accelerate config")
    if file is not None and options.num_processes is None:
        _report_unread_ranks(file, ranks)
    _, sharding = _check_recipes(recipe, sharding, ranks)
    if sharding.num_machines > 1:
        raise UserError(
            f"{sharding.place_of('num_machines')}: num_machines: {sharding.num_machines}: "
            "`finetune launch` starts the ranks of one machine; `accelerate launch` on each "
            "machine starts those of several (docs/clusters.md)"
        )
    arguments = ["--recipe", options.recipe, *(["--config", str(file)] if file else [])]
    arguments += more_arguments
    # The precision is passed as an option too: with `mixed_precision: no` in the file, which YAML
    # reads as false, Accelerate ends in a traceback.
    if sharding.fp8 is not None:
        precision = "fp8"
    else:
        precision = sharding.mixed_precision
    return _launch(ranks, file, precision, [str(path), *arguments, *options.overrides])


def _report_unread_ranks(file: Path, ranks: int) -> None:
    """Prints on stderr that num_processes of the Accelerate file is not read, if it differs from
    `ranks`.
    """
    num_processes = find_yaml(file).get("num_processes")
    if isinstance(num_processes, int) and num_processes != ranks:
        print(
            f"{file}: num_processes: {num_processes} is not read; {counted(ranks, 'rank')} "
            f"{'starts' if ranks == 1 else 'start'}, one for each GPU; --num-processes "
            f"{num_processes} starts as many",
            file=sys.stderr,
        )


def _count_default_ranks() -> int:
    """Counts the ranks of a run that does not say: one for each GPU, or one without GPUs.

    Imports torch only if the machine seems to have GPUs.
    """
    has_nvidia = any(Path("/dev").glob("nvidia[0-9]*"))
    # /dev/kfd: AMD; /dev/dxg: a GPU under WSL
    if not has_nvidia and not any(Path(f"/dev/{name}").exists() for name in ("kfd", "dxg")):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _launch(ranks: int, config: Path | None, precision: str, script: list[str]) -> int:
    """Runs `script`, a path and its arguments, on `ranks` processes of this machine; returns the
    exit code.

    One rank too is started by Accelerate's multi-process launcher: the simple launcher would leave
    its child behind on a signal.
    """
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
        multi_gpu_launcher,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks report their own errors; the launchers would report the same ones again.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate").setLevel(logging.ERROR)

    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // ranks))
    launcher_options = [
        "--num_processes",
        str(ranks),
        "--num_cpu_threads_per_process",
        threads,
        "--main_process_port",
        "0",
    ]
    launcher_options += ["--mixed_precision", precision]
    # .json is DeepSpeed's own file, not Accelerate's. Without a file Accelerate would take the one
    # that `accelerate config` wrote; the file of `single` passes nothing to the ranks.
    if config is None or config.suffix == ".json":
        config = ACCELERATE_CONFIGS / "single.yaml"
    launcher_options += ["--config_file", str(config)]
    try:
        arguments, _, _ = _validate_launch_command(
            launch_command_parser().parse_args([*launcher_options, *script])
        )
        # torchrun ends the ranks on these signals; those in FORWARDED are left to this launcher
        arguments.signals_to_handle = "SIGHUP,SIGQUIT"
        with _forward_to_children():
            multi_gpu_launcher(arguments)
    except ChildFailedError as error:
        rank, code = _find_cause(
            {rank: failure.exitcode for rank, failure in error.failures.items()}
        )
        if code not in REPORTED:
            resumes = "the same command resumes from the last checkpoint, if one was saved"
            print(
                f"rank {rank} was the first to end, {_describe_end(code)}; {resumes}",
                file=sys.stderr,
                flush=True,
            )
        return code if code > 0 else 128 - code  # a signal's code is negative: 128 + its number
    return 0


def _find_cause(codes: Mapping[int, int]) -> tuple[int, int]:
    """Returns (rank, exit code) of the rank that ended the run.

    That is a rank that was preempted, else one that found a user's error, else the first to end.

    `codes`: rank -> exit code of the ranks that failed, in the order in which they ended. The
    launcher ends the other ranks by SIGTERM.

    >>> _find_cause({0: 1, 1: 2}), _find_cause({1: -9, 0: -15}), _find_cause({0: 1, 1: -9})
    ((1, 2), (1, -9), (0, 1))
    """
    by_own_code = [
        rank for code in (EXIT_PREEMPTED, EXIT_USER_ERROR) for rank in codes if codes[rank] == code
    ]
    rank = next(iter([*by_own_code, *codes]))
    return rank, codes[rank]


def _describe_end(code: int) -> str:
    """Describes how a process ended, for one that printed no message of its own.

    `code`: its exit code; a signal's number is negative.

    >>> _describe_end(3), _describe_end(-15)
    ('with exit code 3', 'by SIGTERM')
    """
    if code >= 0:
        return f"with exit code {code}"
    often = ""
    if -code == signal.SIGKILL:
        often = " (often because the machine ran out of memory)"
    return f"by {signal.Signals(-code).name}{often}"


@contextmanager
def _forward_to_children() -> Iterator[None]:
    """Forwards the signals in FORWARDED to the ranks in this block, instead of ending this process.

    The launcher then waits for the ranks, which save and report how they ended. Without a rank,
    SIGTERM and SIGINT end this process.
    """
    import psutil

    def forward(number: int, _frame: object) -> None:
        ranks = psutil.Process().children()
        for rank in ranks:
            rank.send_signal(number)
        if not ranks and number != signal.SIGUSR1:
            raise SystemExit(128 + number)

    before: dict[signal.Signals, Callable[..., object] | int | None] = {
        number: signal.signal(number, forward) for number in FORWARDED
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    end_process(exit_code(main))
