"""One run on a rank: what it is made of, and its folder, with the files that say what was run and
on what.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from finetune import __version__
from finetune.checkpoint.folders import step_folder
from finetune.checkpoint.manifest import Progress
from finetune.config.layout import to_accelerate_config
from finetune.config.reader import write_recipe
from finetune.config.schedules import Schedule
from finetune.config.schema import Recipe
from finetune.constants import count_cores, read_versions
from finetune.data.batches import StepBatch
from finetune.data.examples import Prompt
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import Preempted, UserError
from finetune.files.durable import replace_file
from finetune.files.phases import Phases
from finetune.models.routing import find_routing
from finetune.training.callbacks import Event, Hooks
from finetune.training.metrics import MetricsLog, Window, peak_memory_bytes
from finetune.training.objectives.objective import Objectives
from finetune.training.watch import Watchdog

if TYPE_CHECKING:  # what prepares and saves draws half of the package in; a step needs none of it
    from finetune.checkpoint.save import Saver
    from finetune.data.prepare import PreparedData


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """All that the loop needs of a run, on this rank."""

    recipe: Recipe
    world: World
    folder: Path
    tokenizer: Any
    data: "PreparedData"
    # this rank's training batches from a step (0-based) on
    read_batches: Callable[[int], Iterator[StepBatch]]
    prompts: tuple[Prompt, ...]  # held out, to be answered before and after training
    sample_prompts: tuple[Prompt, ...]  # the recipe's, to be answered at every evaluation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objectives: Objectives
    schedule: Schedule
    saver: "Saver"
    log: MetricsLog
    phases: Phases
    # step -> what this run has logged of evaluations there, also in earlier starts
    results: dict[int, dict[str, Any]]
    inputs: Mapping[str, str]  # fingerprints of what the recipe names
    watchdog: Watchdog
    hooks: Hooks
    count_flop: Callable[[float], float]  # to train on one token of a document of so many tokens
    fp8_share: float  # of those, what is multiplied in FP8
    peak_flops: float | None  # per second and device; None where it is not known

    def without_model(self) -> "TrainingRun":
        """What the end of a run needs, which holds no memory for the adapter that is next."""
        none: Any = None
        return replace(self, model=none, optimizer=none, objectives=none, saver=none)

    def notify(
        self, name: str, progress: Progress, metrics: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Calls the event `name` of the callbacks. All ranks call it.

        Raises `UserError` on all ranks for what a callback raises on one; the steps done are saved
        before.
        """
        if not self.hooks.callbacks:
            return
        event = Event(
            step=progress.step,
            steps=self.schedule.steps,
            metrics=metrics,
            folder=self.folder,
            is_main=self.world.is_main,
            model=self.model,
        )
        is_training = self.model.training
        try:
            RankGroup(self.world).on_all(lambda: self.hooks.call(name, event))
            # whatever a callback has left: dropout is part of the run
            self.model.train(is_training)
        except UserError as error:
            if progress.step == 0:
                raise
            self.saver.finish()
            if not step_folder(self.folder, progress.step).exists():
                self.save(progress)
                self.saver.finish()
            raise UserError(f"{error} (step {progress.step} is saved)") from error

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint, with the callbacks' states of rank 0. All ranks call it.

        Raises `UserError` on all ranks where a state cannot be kept; the step is saved before,
        without new states.
        """
        failure = None
        if self.hooks.callbacks:
            try:
                states = RankGroup(self.world).on_all(self.hooks.read_states)[0]
                progress = replace(progress, callbacks=states or None)
            except UserError as error:
                failure = error
        self.saver.save(progress)
        if failure is not None:
            self.saver.finish()
            raise UserError(f"{failure} (step {progress.step} is saved, without it)") from failure

    def measure(
        self,
        window: Window,
        progress: Progress,
        rate: float,
        grad_norm: torch.Tensor,
        compile_seconds: float | None,
    ) -> dict[str, Any]:
        """A line of metrics.jsonl. The one place of a step where the host waits for the device."""
        loss, means = window.measured.average(max(1, window.count), self.world)
        routing = find_routing(unwrap(self.model))
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(grad_norm),
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_second": window.tokens_per_second(),
            "mfu": self._mfu(window, window.mean_length()),
            "mfu_of_whole_rows": self._mfu(window, self.recipe.data.max_length),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "data_wait_seconds": window.data_wait_seconds,
            **({} if compile_seconds is None else {"compile_seconds": compile_seconds}),
            **self.objectives.training.complete(means),
            **({} if routing is None else routing.take_metrics(self.world)),
        }

    def _mfu(self, window: Window, length: float) -> float | None:
        """Model FLOP utilization with documents of `length` tokens; None where the device's peak is
        not known.
        """
        if self.peak_flops is None:
            return None
        return (
            window.tokens_per_second()
            * self.count_flop(length)
            / (self.peak_flops * self.world.size)
        )

    def preempted(self, where: str, by: str = "a signal") -> Preempted:
        """The exception of a run that a signal stops; `where` says what is saved."""
        if self.recipe.checkpoint.resume_from_checkpoint != "none":
            auto = ""
        else:
            auto = " with resume_from_checkpoint=auto"
        return Preempted(
            f"{self.folder}: stopped by {by} {where}; the same command{auto} resumes from there"
        )


METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"  # what was sampled, and what it was worth
RECIPE = "recipe.yaml"


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
        raise unwritable(folder, error) from None


def write_data_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes data_report.json in place of an older one; `finetune report` may be reading it."""
    replace_file(
        folder / "data_report.json",
        json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n",
    )


def unwritable(folder: Path, error: OSError) -> UserError:
    """The error to raise where the run's folder cannot be written."""
    return UserError(
        f"{folder}: cannot be written ({error.strerror}); set output_dir to a folder that can"
    )


def environment(world: World) -> dict[str, Any]:
    """Versions, machine and command: what a result depends on besides recipe and config."""
    on_gpu = world.device.type == "cuda"
    return {
        "finetune": __version__,
        "python": platform.python_version(),
        "packages": read_versions(),
        "platform": platform.platform(),
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device)
        if on_gpu
        else f"CPU, {count_cores()} cores",
        "threads_per_rank": torch.get_num_threads(),
        "layout": world.sharding.layout,
        "command": sys.argv,
    }
