"""A run, from `finetune launch` to its export: the launcher, and the script that it starts on every
rank.

`accelerate launch finetune/run.py --config C --recipe R key=value` is the same run under a launcher
of your own.
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
# A script's own folder comes first on sys.path, where our `data` would hijack another's: the
# project's root must.
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

# of which the rank has written why
REPORTED = (EXIT_FAULT, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_PREEMPTED)
# the run's own handlers save, then stop or continue
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
add_hints(hints)


def main() -> None:
    """Reads what the user asked for, which needs no torch, and does it."""
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
    """A run from its recipe to its export. `callbacks`: beside the recipe's."""
    # before torch is imported
    recipes, sharding = _check(recipe, sharding, int(os.environ.get("WORLD_SIZE", "1")))
    set_library_environment(deterministic=recipe.run.deterministic)
    started = time.perf_counter()
    from finetune.session import Session
    from finetune.training.callbacks import load_hooks
    from finetune.training.lifecycle import finish

    imported = time.perf_counter() - started

    hooks = [load_hooks(own, callbacks) for own in recipes]
    trained: list[tuple[Any, Any]] = []
    with ExitStack() as opened:
        session = None
        for own, own_hooks in zip(recipes, hooks, strict=True):
            session = Session(own, sharding, saves=not dry_run, after=session)
            opened.enter_context(session)
            if own is recipes[0]:
                session.phases.add("imports", imported, None)
            if len(recipes) > 1 and session.world.is_main:
                print(f"adapter {own.folder.name}: in {own.folder}", flush=True)
            if dry_run:
                _try(session)
            else:
                trained += _train(session, own_hooks, is_last=own is recipes[-1])
    for run, progress in trained:
        finish(run, progress)


def _try(session: "Session") -> None:
    """Looks for what would stop a run, and prints its plan."""
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
    """Trains what a session has opened, and leaves the ranks after the last; returns what is to be
    exported then: nothing where the run was done before.
    """
    from finetune.training.evaluate import evaluate_after_training, evaluate_before_training
    from finetune.training.lifecycle import is_finished, leave_ranks
    from finetune.training.loop import train

    steps = session.data.train.steps
    if is_finished(session.folder, session.recipe, session.inputs, steps, session.world):
        return []
    with session.signals as signals:
        progress = session.load()
        run = session.start(hooks)
        with session.computing(), run.log:
            run.notify("on_start", progress)
            evaluate_before_training(run, progress, signals)
            progress = train(run, progress, signals)
            progress = evaluate_after_training(run, progress, signals)
            run.notify("on_end", progress)
            leave_ranks(run, signals, is_last=is_last)
    return [(run.without_model(), progress)]


def _check(recipe: Recipe, sharding: Sharding, ranks: int) -> tuple[tuple[Recipe, ...], Sharding]:
    """Returns the recipes to train in turn, one for each of `adapters`, and how they are sharded;
    each with the keys that it takes from elsewhere.

    Raises `UserError` for what the rules refuse.
    """
    recipes = tuple(complete_lora(each) for each in split_adapters(recipe))
    sharding = with_recipe_keys(sharding, recipe)
    facts = find_local_facts(recipe.model)
    refuse_problems(
        problem for each in recipes for problem in find_problems(each, sharding, facts, ranks)
    )
    return tuple(each.alone for each in recipes), sharding


def launch_command(options: argparse.Namespace) -> int:
    """Starts run.py on the ranks and returns its exit code.

    Raises `UserError` before torch loads.
    """
    recipe = read_recipe(options.recipe, options.overrides)
    return launch_script(options, recipe, RUN, ["--dry-run"] if options.dry_run else [])


def launch_script(
    options: argparse.Namespace, recipe: Recipe, path: Path, more: Sequence[str]
) -> int:
    """Starts the script at `path` on the ranks, with recipe, Accelerate file and the arguments
    `more`; returns its exit code.

    Raises `UserError` before torch loads.
    """
    if options.num_processes is not None and options.num_processes < 1:
        raise UserError(f"--num-processes {options.num_processes}: a run has at least one rank")
    ranks = options.num_processes or _default_ranks()
    config = options.config or recipe.run.accelerate_config
    sharding = read_sharding(config, None, {"WORLD_SIZE": str(ranks)})
    file = None
    if config:
        file = find_file(config, ACCELERATE_CONFIGS, "Accelerate config")
    if file is not None and options.num_processes is None:
        _say_ranks(file, ranks)
    _, sharding = _check(recipe, sharding, ranks)
    script = ["--recipe", options.recipe, *(["--config", str(file)] if file else [])]
    script += more
    # Accelerate ends in a traceback where a file says no without quotes, which YAML reads as false.
    if sharding.fp8 is not None:
        precision = "fp8"
    else:
        precision = sharding.mixed_precision
    return _launch(ranks, file, precision, [str(path), *script, *options.overrides])


def _say_ranks(file: Path, ranks: int) -> None:
    """Says on stderr that num_processes of the Accelerate file is not read, where it is another
    number.
    """
    asked = find_yaml(file).get("num_processes")
    if isinstance(asked, int) and asked != ranks:
        print(
            f"{file}: num_processes: {asked} is not read; {counted(ranks, 'rank')} "
            f"{'starts' if ranks == 1 else 'start'}, one for each GPU; --num-processes {asked} "
            "starts as many",
            file=sys.stderr,
        )


def _default_ranks() -> int:
    """One for each GPU; one on a machine without GPUs, which needs no import of torch to see."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(
        Path(f"/dev/{name}").exists() for name in ("kfd", "dxg")
    ):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _launch(ranks: int, config: Path | None, precision: str, script: list[str]) -> int:
    """Runs `script` on `ranks` processes of this machine through Accelerate's multi-process
    launcher.

    For one rank too: the simple launcher would leave its child behind on a signal.
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
    given = [
        "--num_processes",
        str(ranks),
        "--num_cpu_threads_per_process",
        threads,
        "--main_process_port",
        "0",
    ]
    given += ["--mixed_precision", precision]
    # DeepSpeed's own is not its
    given += ["--config_file", str(config)] if config and config.suffix != ".json" else []
    try:
        arguments, _, _ = _validate_launch_command(
            launch_command_parser().parse_args([*given, *script])
        )
        # torchrun ends the ranks on these; ours are in FORWARDED
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
        return code if code > 0 else 128 - code
    return 0


def _find_cause(codes: Mapping[int, int]) -> tuple[int, int]:
    """Returns (rank, exit code) of the rank that ended the run: one that was preempted or found a
    user's error, else the first.

    `codes`: of the ranks that failed, in the order in which they ended. The launcher ends the
    others by SIGTERM.

    >>> _find_cause({0: 1, 1: 2}), _find_cause({1: -9, 0: -15}), _find_cause({0: 1, 1: -9})
    ((1, 2), (1, -9), (0, 1))
    """
    by_own_code = [
        rank for code in (EXIT_PREEMPTED, EXIT_USER_ERROR) for rank in codes if codes[rank] == code
    ]
    rank = next(iter([*by_own_code, *codes]))
    return rank, codes[rank]


def _describe_end(code: int) -> str:
    """Says how a process ended that printed no message of its own.

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
    """Forwards FORWARDED signals to the ranks and keeps waiting, so that they can save and report
    how they ended.
    """
    import psutil

    def forward(number: int, _frame: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

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
