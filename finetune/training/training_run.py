"""The parts of a run on this rank, and the files in the run's folder that describe it.

A run may start several times: a start that resumes it begins at the step of a checkpoint.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

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

if TYPE_CHECKING:  # these modules import half of the package, which a step does not need
    from finetune.checkpoint.save import Saver
    from finetune.data.prepare import PreparedData


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """All that the training loop needs to know of a run, on this rank."""

    recipe: Recipe
    world: World
    folder: Path
    tokenizer: Any
    data: "PreparedData"
    # a step (0-based) -> this rank's training batches from that step on
    read_batches: Callable[[int], Iterator[StepBatch]]
    prompts: tuple[Prompt, ...]  # held-out prompts, which are answered before and after training
    sample_prompts: tuple[Prompt, ...]  # the recipe's, which are answered at every evaluation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objectives: Objectives
    schedule: Schedule
    saver: "Saver"
    log: MetricsLog
    phases: Phases
    # step -> the results of evaluations that this run has logged there, also in earlier starts
    results: dict[int, dict[str, Any]]
    inputs: Mapping[str, str]  # name of an input of the recipe, such as "base" -> its fingerprint
    watchdog: Watchdog
    hooks: Hooks
    # tokens of a document -> FLOP to train on one of these tokens
    count_flop: Callable[[float], float]
    fp8_share: float  # the share of these FLOP that is multiplied in FP8
    peak_flops: float | None  # FLOP per second of a device; None if that is not known

    def without_model(self) -> "TrainingRun":
        """Returns the run without the parts that only training needs.

        If the old run is dropped, their memory is free for the next adapter.
        """
        none: Any = None
        return replace(self, model=none, optimizer=none, objectives=none, saver=none)

    def notify(
        self, name: str, progress: Progress, metrics: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Calls the event `name` of each callback. All ranks call it.

        If a callback raises on any rank, it saves a checkpoint of the steps done and raises
        `UserError` on all ranks.
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
        self.watchdog.beat(f"callbacks run {name}")
        try:
            RankGroup(self.world).on_all(lambda: self.hooks.call(name, event))
            # a callback may have switched dropout on or off
            self.model.train(is_training)
        except UserError as error:
            if progress.step == 0:  # there is nothing to save
                raise
            self.finish_save()  # an async save may be about to publish this very step
            if not step_folder(self.folder, progress.step).exists():
                self.save(progress)
                self.finish_save()
            raise UserError(f"{error} (step {progress.step} is saved)") from error

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint, with the states that the callbacks have on rank 0. All ranks call it.

        If a state cannot be kept, it saves the checkpoint with the callbacks' former states and
        raises `UserError` on all ranks.
        """
        failure = None
        if self.hooks.callbacks:
            try:
                # On all ranks, so that an error on any of them is raised on all.
                states_of_rank_0, *_ = RankGroup(self.world).on_all(self.hooks.read_states)
                progress = replace(progress, callbacks=states_of_rank_0 or None)
            except UserError as error:
                failure = error
        self.saver.save(progress)
        if failure is not None:
            self.finish_save()
            raise UserError(f"{failure} (step {progress.step} is saved, without it)") from failure

    def finish_save(self) -> None:
        """Waits until an async save is published. Raises its error if it failed."""
        self.watchdog.beat("finishing an async save")
        self.saver.finish()

    def measure(
        self,
        window: Window,
        progress: Progress,
        rate: float,
        grad_norm: Tensor,
        compile_seconds: float | None,
    ) -> dict[str, Any]:
        """Makes a line of metrics.jsonl. Waits for the device; all ranks call it.

        If all steps since the last line were skipped, the loss is NaN and the method's metrics are
        left out: there is nothing to average.

        Args:
            window: The steps since the last line.
            progress: After these steps.
            rate: The learning rate of the last step.
            grad_norm: The gradient norm of the last step.
            compile_seconds: The seconds of compilation since the process began; None if nothing is
                compiled.
        """
        loss, means = window.measured.average(max(1, window.count), self.world)
        routing = find_routing(unwrap(self.model))
        line: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss if window.steps else float("nan"),
            "learning_rate": rate,
            "grad_norm": float(grad_norm),
            "tokens": progress.tokens,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_second": window.tokens_per_second(),
            "mfu": self._mfu(window, window.mean_length()),
            "mfu_of_whole_rows": self._mfu(window, self.recipe.data.max_length),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "data_wait_seconds": window.data_wait_seconds,
        }
        if compile_seconds is not None:
            line["compile_seconds"] = compile_seconds
        if window.steps:
            line |= self.objectives.training.complete(means)
        if routing is not None:
            line |= routing.take_metrics(self.world)
        return line

    def _mfu(self, window: Window, length: float) -> float | None:
        """Computes the model FLOP utilization of the window, as if all documents had `length`
        tokens.

        Returns None if the peak of the device is not known.
        """
        if self.peak_flops is None:
            return None
        flop_per_second = window.tokens_per_second() * self.count_flop(length)
        return flop_per_second / (self.peak_flops * self.world.size)

    def preempted(self, where: str, by: str = "a signal") -> Preempted:
        """Makes the exception of a run that is stopped and can be resumed.

        Args:
            where: When the run stops, and which step is saved: a part of the message.
            by: What stops the run.
        """
        if self.recipe.checkpoint.resume_from_checkpoint != "none":
            option = ""
        else:
            option = " with resume_from_checkpoint=auto"
        return Preempted(
            f"{self.folder}: stopped by {by} {where}; the same command{option} resumes from there"
        )


# Files in the run's folder.
METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"  # the sampled completions with their rewards
RECIPE = "recipe.yaml"
DATA_REPORT = "data_report.json"


def describe_run(folder: Path, recipe: Recipe, world: World) -> None:
    """Writes recipe.yaml, accelerate.yaml and environment.json, which are enough to repeat the run.

    Only the main rank calls it, once the run is sure to start. Raises `UserError` if a file cannot
    be written.
    """
    with refuse_unwritable(folder):
        write_recipe(recipe, folder / RECIPE)
        machines = world.size // world.local_size
        accelerate_config = to_accelerate_config(world.sharding, world.size, machines)
        replace_file(folder / "accelerate.yaml", yaml.safe_dump(accelerate_config, sort_keys=False))
        environment = json.dumps(describe_environment(world), indent=2) + "\n"
        replace_file(folder / "environment.json", environment)


def write_data_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes data_report.json.

    It replaces the file as a whole, since `finetune report` may be reading an older one.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n"
    replace_file(folder / DATA_REPORT, text)


@contextmanager
def refuse_unwritable(folder: Path) -> Iterator[None]:
    """In this block an `OSError` becomes a `UserError`: the run's folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); set output_dir to a folder that can"
        ) from None


def describe_environment(world: World) -> dict[str, Any]:
    """Describes versions, machine and command, on which a result depends besides the recipe."""
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    else:
        device = f"CPU, {count_cores()} cores"
    return {
        "finetune": __version__,
        "python": platform.python_version(),
        "packages": read_versions(),
        "platform": platform.platform(),
        "ranks": world.size,
        "device": device,
        "threads_per_rank": torch.get_num_threads(),
        "layout": world.sharding.layout,
        "command": sys.argv,
    }
