"""What a training run works with, as one value: model, optimizer, ranks, data, log and saver."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.retention import step_folder
from finetune.config.optimization import Schedule
from finetune.config.schema import Recipe
from finetune.data.batches import StepBatch
from finetune.data.examples import Prompt
from finetune.distributed.collective import RankGroup
from finetune.distributed.world import World
from finetune.errors import Preempted, UserError
from finetune.training.hooks import Event, Hooks
from finetune.training.objectives.sft import Objectives
from finetune.training.run_log import MetricsLog
from finetune.training.watch import Watchdog

if TYPE_CHECKING:  # what prepares and saves draws half of the package in; a step needs none of it
    from finetune.checkpoint.save import Saver
    from finetune.data.prepare import PreparedData


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One run on this rank."""

    recipe: Recipe
    world: World
    folder: Path
    tokenizer: Any
    data: "PreparedData"
    read_batches: Callable[[int], Iterator[StepBatch]]  # this rank's training batches from a step (0-based) on
    prompts: tuple[Prompt, ...]  # held out, to be answered before and after training
    sample_prompts: tuple[Prompt, ...]  # the recipe's, to be answered at every evaluation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objectives: Objectives
    schedule: Schedule
    saver: "Saver"
    log: MetricsLog
    results: dict[int, dict[str, Any]]  # step -> what this run has logged of evaluations there, also in earlier starts
    inputs: Mapping[str, str]  # fingerprints of what the recipe names
    watchdog: Watchdog
    hooks: Hooks
    count_flop: Callable[[float], float]  # to train on one token of a document of so many tokens
    fp8_share: float  # of those, what is multiplied in FP8
    peak_flops: float | None  # per second and device; None where it is not known

    def notify(self, name: str, progress: Progress, metrics: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Calls the event `name` of the callbacks. All ranks call it.

        Raises `UserError` on all ranks for what a callback raises on one; the steps done are saved before.
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
            self.model.train(is_training)  # whatever a callback has left: dropout is part of the run
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

        Raises `UserError` on all ranks where a state cannot be kept; the step is saved before, without new states.
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

    def preempted(self, where: str, by: str = "a signal") -> Preempted:
        """The exception of a run that a signal stops; `where` says what is saved."""
        auto = "" if self.recipe.checkpoint.resume_from_checkpoint != "none" else " with resume_from_checkpoint=auto"
        return Preempted(f"{self.folder}: stopped by {by} {where}; the same command{auto} resumes from there")
