"""`Session`: a model in training, step by step, for scripts and notebooks. docs/api.md shows its
use.

`finetune launch` is built on it: `run.py` opens a session for the recipe, or for each of its
adapters.
"""

import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from finetune.checkpoint.folders import refuse_later_steps, step_folder
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import find_resume_checkpoint, fingerprint_inputs, load_checkpoint
from finetune.checkpoint.save import Saver
from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.facts import with_recipe_keys
from finetune.config.layout import Sharding
from finetune.config.methods import DEFAULT_METHOD
from finetune.config.pretrained import complete_lora
from finetune.config.reader import expect_recipe
from finetune.config.schedules import compute_learning_rate
from finetune.config.schema import Recipe
from finetune.constants import EXPORT, IGNORE_INDEX
from finetune.data.batches import StepBatch
from finetune.data.data_report import Report
from finetune.data.examples import Prompt
from finetune.data.findings import list_warnings
from finetune.data.prepare import PreparedData, batch_rows
from finetune.distributed.join import describe_machine, join, leave, use_deterministic_kernels
from finetune.distributed.parallelize import frozen_parts
from finetune.distributed.world import RankGroup
from finetune.errors import UserError, set_library_environment
from finetune.export.export import export_run
from finetune.files.phases import Phases
from finetune.models.load import ModelSize, build_model, build_teacher, is_here, load_model
from finetune.models.log_probabilities import choose_label_head
from finetune.models.lora import seed_of
from finetune.models.probe import check_training_forward
from finetune.optim.optimizers import build_optimizer
from finetune.plan.architecture import find_local_facts
from finetune.rollout.collect import RolloutBatches
from finetune.rollout.reward_models import check_reward_models
from finetune.training.callbacks import Hooks
from finetune.training.evaluate import SAMPLE_TOKENS, Generation, answer
from finetune.training.lifecycle import (
    encode_prompt,
    make_objective_of_any_rows,
    make_objectives,
    start_run,
)
from finetune.training.objectives.answers import make_answer_objective
from finetune.training.objectives.objective import SFT, Measured, Objective, Objectives, Totals
from finetune.training.objectives.policy import PolicyObjective
from finetune.training.objectives.user_loss import FunctionObjective, LossFunction
from finetune.training.opening import open_run
from finetune.training.reference import evaluating
from finetune.training.screens import explain_out_of_memory
from finetune.training.step import (
    DeviceGuard,
    HostGuard,
    clip_and_update,
    forward_backward,
    handle_nonfinite,
    make_guard,
    set_learning_rate,
)
from finetune.training.training_run import TrainingRun
from finetune.training.watch import SignalListener, uninterrupted

JOINED = (
    "session  warning: several batches of batches() went backward for one update: load() would "
    "repeat data, and the learning rate does not reach the end of its schedule; set "
    "global_batch_size and per_device_train_batch_size instead"
)


class Loss:
    """The loss and metrics of `Session.forward_backward`, over all ranks.

    The ranks have added up their sums before. Reading waits only for this rank's device: no other
    rank needs to read too.
    """

    def __init__(self, totals: Totals, count: int, objective: Objective) -> None:
        self._totals = totals
        self._count = count
        self._objective = objective

    @cached_property
    def _averages(self) -> tuple[float, dict[str, float]]:
        """The loss, and the metrics by name."""
        loss, means = self._totals.average(self._count)
        return loss, self._objective.complete(means)

    @property
    def loss(self) -> float:
        """The mean loss: over the trained tokens, or over the pairs of a method that compares."""
        return self._averages[0]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the recipe's method."""
        return self._averages[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._averages)

    def __repr__(self) -> str:
        return f"Loss(loss={self.loss!r}, metrics={self.metrics!r})"


class Update(NamedTuple):
    """The result of `Session.optim_step`.

    If fp16's loss scaler skips an update, `is_skipped` is False and `grad_norm` is not finite: the
    step counts, as in a run.
    """

    step: int  # steps done, this one included
    learning_rate: float
    grad_norm: float  # the 2-norm of the gradients over all ranks, before clipping
    # Nothing was updated: the loss or gradient was not finite, and on_nonfinite is skip.
    is_skipped: bool


class Gradients(NamedTuple):
    """The gradients that `Session.take_gradients` took, on this rank."""

    tensors: list[Tensor | None]  # one for each parameter of the optimizer, in its order
    # the batches that went backward for these gradients, each with what was measured
    backward: list[tuple[StepBatch, Measured]]


class SampledAnswer(NamedTuple):
    """An answer of `Session.sample`.

    `log_probabilities` are those of the distribution from which the tokens were drawn, after
    `temperature`. `row` is the prompt and the answer as a row for `Session.batch`.
    """

    text: str
    token_ids: tuple[int, ...]  # the answer's, with the token that ends it
    # of each of `token_ids`, at the temperature of the draw; of a greedy answer, at 1
    log_probabilities: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    # of the prompt's tokens after the first, at temperature 1; empty unless `sample` was asked
    prompt_log_probabilities: tuple[float, ...] = ()

    @property
    def row(self) -> dict[str, list[int]]:
        """A row for `Session.batch` that trains on exactly these answer tokens."""
        prompt = list(self.prompt_ids)
        answer = list(self.token_ids)
        return {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}


class Loaded(NamedTuple):
    """What a session loads when it first computes: the model, its optimizer and the objectives."""

    model: nn.Module
    size: ModelSize
    optimizer: torch.optim.Optimizer
    objectives: Objectives | None  # made with the weights before training; None without data


class Session:
    """A recipe's model in training, on one rank of a process group. All ranks make the same calls.

    Opening a session reads the recipe's data. The model is loaded when it is first needed.

        with Session(load_recipe("my_recipe.yaml")) as session:
            for batch in session.batches():
                print(session.forward_backward(batch).loss, session.optim_step().learning_rate)
            session.save()
        session.export()
    """

    def __init__(
        self,
        recipe: Recipe | str | Path,
        config: Sharding | str | None = None,
        *,
        saves: bool = True,
        after: "Session | None" = None,
    ) -> None:
        """Joins the ranks that a launcher has started, locks the run's folder and reads the data.

        A process that no launcher has started is the only rank.

        Args:
            recipe: A recipe of `finetune.load_recipe`, or a file, or a name in recipes/.
            config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
            saves: False if nothing will be saved: then no folder is made.
            after: A session that trained another adapter on the same base. The new session takes
                over its ranks and the base in memory. Of `after`, only `close` may be called then.

        Raises:
            UserError: If the rules refuse the recipe, if data or a tokenizer cannot be read, if the
                data has fatal findings, or if the folder cannot be written or is in use.
        """
        given_recipe = expect_recipe(recipe)
        sharding = _read_sharding(given_recipe, config)
        set_library_environment(deterministic=given_recipe.run.deterministic)
        if after is None and AcceleratorState._shared_state:
            raise UserError("a session, or an Accelerator, is open in this process; close it first")
        complete_recipe = complete_lora(given_recipe)
        machine = describe_machine(sharding, with_liger=complete_recipe.model.use_liger_kernel)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        facts = find_local_facts(complete_recipe.model)
        refuse_problems(find_problems(complete_recipe, sharding, facts, ranks, machine=machine))
        if after is None:
            self.world = join(sharding, complete_recipe.run.timeout_seconds)
        else:
            self.world = after.world
        self.phases = Phases()
        self.progress = Progress()
        # Only the command enters it: a script handles its own signals.
        self.signals = SignalListener()
        # the batches that went backward since the last update
        self._backward: list[tuple[StepBatch, Measured]] = []
        self._is_resumed = False  # whether `load` was called
        self._kept_step = 0  # the step of the newest checkpoint that was saved or loaded
        self._warned: set[str] = set()  # the keys of `_warn`
        self._is_closed = False
        self._on_close = ExitStack()
        self._on_close.callback(leave, self.world)
        # this rank's part of the base that `after` has loaded, by a parameter's name in the base
        self._frozen: dict[str, Tensor] = {} if after is None else after._hand_over_frozen()
        try:
            self._opened = open_run(complete_recipe, self.world, machine, self.phases, saves=saves)
        except BaseException:  # Ctrl-C too: else a notebook could not open another session
            if self.world.size == 1:  # for the same reason as in __exit__
                self.close()
            raise
        self.recipe = self._opened.recipe
        self.tokenizer = self._opened.tokenizer

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error on this rank, `close` would wait for ranks that may not have failed.
        if kind is None or self.world.size == 1:
            self.close()

    def close(self) -> None:
        """Leaves the other ranks. Afterwards the process can open another session."""
        self._on_close.close()
        self._is_closed = True

    def _refuse_closed(self, what: str) -> None:
        """Raises `UserError` if the session is closed. `what`: what the user tried to use."""
        if self._is_closed:
            raise UserError(
                f"{what}: the session is closed; open another, whose load() continues from what "
                "was saved"
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block in which the model computes.

        The recipe's `deterministic` holds in it, and torch's out-of-memory error becomes a
        `UserError` that explains it. Raises `UserError` if the session is closed.
        """
        self._refuse_closed("the model")
        with (
            explain_out_of_memory(self.recipe, self.world, self._opened.data),
            use_deterministic_kernels(on=self.recipe.run.deterministic),
        ):
            yield

    @property
    def folder(self) -> Path:
        """The run's folder. Raises `UserError` if the session was opened with saves=False."""
        if self._opened.folder is None:
            raise UserError(
                "the session was opened with saves=False, and has no folder to save to, load from "
                "or export from; leave saves out"
            )
        return self._opened.folder

    @property
    def data(self) -> PreparedData:
        """The recipe's data, for this rank. Raises `UserError` if the recipe names no data."""
        if self._opened.data is None:
            raise UserError(
                "the recipe names no data; set datasets, or give rows to forward_backward"
            )
        return self._opened.data

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The hashes of what the recipe names (models, data, tokenizer, code), by name.

        Checkpoints keep them, so that a resumed run notices changes.
        """
        return fingerprint_inputs(self.recipe, self.tokenizer, self._opened.data, self.world)

    @cached_property
    def _loaded(self) -> Loaded:
        """The model, the optimizer and the objectives; the first access loads them."""
        recipe = self.recipe
        data = self._opened.data
        with self.phases.timed("weights"), self.computing():
            model, size = load_model(
                recipe.model,
                recipe.lora,
                recipe.run.seed,
                self.world,
                recipe.quantization,
                recipe.optimization,
                self._opened.build_options,
                quantization_aware=recipe.quantization_aware,
                shared=self._frozen,
            )
            self._opened.refuse_unreached_tower(model)
            optimizer = build_optimizer(model, recipe.optimization, self.world)
            check_training_forward(model, recipe.model, recipe.data, self.world)
            objectives = None
            if data is not None:
                folder = self._opened.folder
                objectives = make_objectives(
                    model, recipe, data, self.inputs, self.signals, self.world, folder
                )
        return Loaded(model, size, optimizer, objectives)

    @cached_property
    def _objective_of_any_rows(self) -> Objective:
        """The objective of training, where the recipe names no data and its method needs none."""
        with self.phases.timed("weights"), self.computing():
            return make_objective_of_any_rows(self.recipe, self.world)

    def _hand_over_frozen(self) -> dict[str, Tensor]:
        """Drops the model, and returns its frozen parameters for the session that comes next.

        Returns this rank's part of each, by its name in the base. If this session has loaded no
        model, they are those that it was handed itself.
        """
        # The cached properties are removed, since each of them keeps the model in memory.
        loaded: Loaded | None = vars(self).pop("_loaded", None)
        for name in ("_saver", "_guard", "_objective_of_any_rows"):
            vars(self).pop(name, None)
        if loaded is not None:
            self._frozen = frozen_parts(loaded.model)
        self.world.accelerator._models.clear()
        return self._frozen

    def check_model(self) -> None:
        """Raises `UserError` for problems with the files or keys of the model, the teacher or the
        reward models.

        It reads only the headers of weights. Nothing is downloaded: a model that is not on this
        machine is not checked.
        """
        recipe = self.recipe
        if is_here(recipe.model):
            build_model(
                recipe.model,
                recipe.lora,
                recipe.run.seed,
                self.world,
                recipe.quantization,
                recipe.optimization,
                self._opened.build_options,
            )
        if recipe.teacher is not None and is_here(recipe.teacher):
            build_teacher(recipe, self.world)
        check_reward_models(recipe)

    @property
    def model(self) -> nn.Module:
        """The model, sharded over the ranks."""
        return self._loaded.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of `optim_step`."""
        return self._loaded.optimizer

    @cached_property
    def _saver(self) -> Saver:
        """What saves checkpoints into the run's folder; made when it is first needed."""
        loaded = self._loaded
        objective = SFT if loaded.objectives is None else loaded.objectives.training
        return Saver(
            self.folder,
            loaded.model,
            loaded.optimizer,
            self.world,
            self.recipe,
            self.tokenizer,
            self.inputs,
            objective.describe_files,
            loaded.size,
            self.phases,
        )

    @cached_property
    def _guard(self) -> HostGuard | DeviceGuard:
        """What keeps a loss or gradient that is not finite from changing the parameters."""
        return make_guard(self._loaded.optimizer, self.recipe.optimization, self.world)

    def batches(self) -> Iterator[StepBatch]:
        """Returns this rank's batches of the recipe's data, from the step after the progress so far
        to the last step, in the order of `finetune launch`.

        Each batch is meant for an update of its own, of which `save` and the schedule count the
        steps. To train on more rows in an update, set `global_batch_size`, and with
        `per_device_train_batch_size` how many of them are computed at once.

        Rank 0 prints warnings about the data on stderr, those about a stream while it is read.
        """
        findings = list_warnings(self.data.report.findings)
        self._warn({str(finding): f"data  {finding}" for finding in findings})
        training = None
        if self._loaded.objectives:
            training = self._loaded.objectives.training
        if isinstance(training, PolicyObjective):
            return self._sample_batches(training.rollouts, self.progress.step)
        return self.data.train.batches(self.progress.step, self._keep_report)

    def _keep_report(self, report: Report, news: list[str]) -> None:
        """Keeps the report of a stream up to the block that is trained on, and prints its news."""
        self._opened = replace(self._opened, data=replace(self.data, report=report))
        self._warn({line: f"stream  {line}" for line in news})

    def _sample_batches(self, rollouts: RolloutBatches, from_step: int) -> Iterator[StepBatch]:
        """Yields the batches of the steps from `from_step` on, which the model samples."""
        for step in range(from_step, rollouts.prompts.steps):
            with self.computing():
                batch = rollouts.step_batch(step)
            yield batch

    def batch(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> StepBatch:
        """Makes this rank's share of a step over `rows`, which are read as rows of a data file.

        All ranks give the same rows. Rank 0 prints warnings about them on stderr, each kind once.

        Args:
            rows: Rows in any format that a data file may have.
            columns: The names of the rows' columns that a loss function reads, such as advantages.
                A row has a number in such a column, or a list with a number for each trained token.
                The loss function finds them in `micro_batch.columns[name]`, fp32[positions], as the
                log-probabilities are.

        Raises:
            UserError: If a row cannot be used, or if the recipe's method samples its rows.
        """
        if isinstance(columns, str):
            raise UserError(f"batch: columns: a list of names is expected, such as [{columns!r}]")
        if self.recipe.method_facts.samples:
            raise UserError(
                f"batch: method: {self.recipe.method.method} samples what it learns from; use "
                "batches()"
            )
        batch, findings = batch_rows(
            rows, self.recipe, self.tokenizer, self.world.data_parallel, self.progress.step, columns
        )
        # by name: a loop makes many batches whose rows have the same kinds of findings
        self._warn({finding.name: f"rows  {finding}" for finding in list_warnings(findings)})
        return batch

    def _warn(self, warnings: Mapping[str, str]) -> None:
        """Prints warnings on rank 0: those whose key was not printed in this session.

        `warnings`: a key of each -> its line.
        """
        for key, line in warnings.items():
            if self.world.is_main and key not in self._warned:
                print(line, file=sys.stderr, flush=True)
            self._warned.add(key)

    def forward_backward(
        self,
        batch: StepBatch | Sequence[Mapping[str, Any]],
        loss: LossFunction | Literal["cross_entropy"] | None = None,
    ) -> Loss:
        """Computes the loss of a batch, and adds its gradients to those of earlier calls.

        Before an `optim_step`, several calls may add up their gradients. The loss of each is
        divided by the count of its own batch, and each draws its own dropout. If a forward or
        backward fails, all gradients are dropped.

        Args:
            batch: A batch of `batches` or `batch`, or rows.
            loss: A function `(log_probabilities, micro_batch) -> Tensor`; by default the loss of
                the recipe's method. "cross_entropy" is that of supervised fine-tuning. The
                log-probabilities, fp32[positions], are those of the labels at
                `micro_batch.trained_positions`; 0 at a position without a label.
                `micro_batch.trained_documents` has the document of each position; 0 at a position
                without a label, so that a sum over a document is right and a mean is not.
                `micro_batch.columns` has the columns that `batch` was asked for. The
                function returns a sum (0-dim). It is divided by the trained tokens of the batch
                over all ranks, or by the pairs if the method compares.

        Returns:
            The averages over all ranks. Reading them waits for the device.
        """
        if self.recipe.optimization.optim_in_backward:
            raise UserError(
                "forward_backward: optim_in_backward leaves nothing for optim_step; remove it, or "
                "use train"
            )
        if isinstance(batch, StepBatch):
            step_batch = batch
        else:
            step_batch = self.batch(batch)
        if step_batch.has_own_rows:  # a script may keep such a batch over steps
            step_batch = replace(step_batch, step=self.progress.step)
        step_batch = replace(step_batch, batches_before=len(self._backward))
        objective = self._choose_objective(loss, has_own_rows=step_batch.has_own_rows)
        with self.computing(), self._dropping_gradients_on_error():
            self.model.train()
            measured = forward_backward(self.model, step_batch, objective, self.recipe, self.world)
            if isinstance(objective, FunctionObjective):
                RankGroup(self.world).on_all(objective.raise_fault)
            totals = measured.add_up(self.world)
        self._backward.append((step_batch, measured))
        return Loss(totals, objective.count(step_batch), objective)

    @contextmanager
    def _dropping_gradients_on_error(self) -> Iterator[None]:
        """Drops all gradients if the block raises: the gradients of only some micro-batches would
        spoil the next update.
        """
        try:
            yield
        except BaseException:
            self._loaded.optimizer.zero_grad(set_to_none=True)
            self._backward.clear()
            vars(self).pop("_guard", None)  # a guard remembers the bad steps that it has found
            raise

    def take_gradients(self) -> Gradients:
        """Takes the gradients since the last update out of the model.

        A script that trains several adapters in turn can give them back later.
        """
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        gradients = Gradients([parameter.grad for parameter in trained], [*self._backward])
        self.optimizer.zero_grad(set_to_none=True)
        self._backward.clear()
        return gradients

    def give_gradients(self, gradients: Gradients) -> None:
        """Puts back the gradients that `take_gradients` took; they replace those in the model."""
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        for parameter, gradient in zip(trained, gradients.tensors, strict=True):
            parameter.grad = gradient
        self._backward[:] = gradients.backward

    def log_probabilities(self, batch: StepBatch) -> list[Tensor]:
        """Computes the log-probability of every label, without dropout or gradients.

        All ranks call it.

        Returns:
            For each micro-batch of this rank, fp32[positions], as `forward_backward` gives a loss
            function. A micro-batch with `targets` (several token ids at a position) has
            fp32[positions, targets].
        """
        self._refuse_without_probabilities("log_probabilities", of_classes=True)
        with evaluating(self.model), self.computing():
            on_device = (micro_batch.to(self.world.device) for micro_batch in batch.micro_batches)
            return [
                self.model(
                    **micro_batch.inputs, head_function=choose_label_head(micro_batch.targets)
                )
                for micro_batch in on_device
            ]

    def optim_step(self, learning_rate: float | None = None) -> Update:
        """Clips the gradients, updates the parameters, and drops the gradients.

        Args:
            learning_rate: The learning rate; by default that of the recipe's schedule.

        Raises:
            UserError: If there are no gradients; if the schedule has ended; if the loss or gradient
                is not finite and `on_nonfinite` is stop, or too many steps were skipped.
        """
        self._refuse_closed("optim_step")
        if not self._backward:
            raise UserError("optim_step: no gradients; call forward_backward first")
        if learning_rate is not None:
            learning_rate = _read_number("optim_step: learning_rate", learning_rate)
        keys = self.recipe.optimization
        world = self.world
        self._warn_of_joined()
        batch, measured = _join_backward(self._backward, self.progress.step)
        if learning_rate is None:
            learning_rate = self._compute_scheduled_rate()
        optimizer = self._loaded.optimizer
        guard = self._guard
        set_learning_rate(optimizer, learning_rate)
        saver: Saver | None = vars(self).get("_saver")  # there is none before the first save
        before_update = saver.before_update if saver is not None else lambda: None
        # Ctrl-C must not come between the update and the progress that counts it.
        with uninterrupted():
            with self.computing(), self._dropping_gradients_on_error():
                result = clip_and_update(
                    self.model, optimizer, batch, measured, self.recipe, world, guard, before_update
                )
                guard.raise_if_bad(keys)  # a `DeviceGuard` has only marked a bad step
                if result.failed_check is not None:
                    handle_nonfinite(keys, result.failed_check, self.progress.skipped_steps, world)
            is_skipped = result.failed_check is not None
            self._backward.clear()
            self.progress = self.progress.after_step(batch, is_skipped=is_skipped)
        return Update(self.progress.step, learning_rate, float(result.grad_norm), is_skipped)

    def _warn_of_joined(self) -> None:
        """Prints a warning if several batches of `batches` have gone backward for this update."""
        joined = {batch.step for batch, _ in self._backward if not batch.has_own_rows}
        if len(joined) > 1:
            self._warn({JOINED: JOINED})

    def _compute_scheduled_rate(self) -> float:
        """Computes the learning rate of the next step, by the recipe's schedule.

        Raises `UserError` if the recipe does not say how many steps the schedule has, or if the
        schedule has ended at a rate of 0.
        """
        keys = self.recipe.optimization
        if self._opened.data is None and keys.max_steps is None:
            raise UserError(
                "optim_step: the recipe has no data and no max_steps to schedule by; give "
                "learning_rate"
            )
        steps = self._count_steps()
        assert steps is not None, "the recipe has max_steps or data"
        learning_rate = compute_learning_rate(self.progress.step, keys.schedule(steps))
        if not learning_rate and self.progress.step >= steps:
            raise UserError(
                f"optim_step: the schedule ends at step {steps}, with a learning rate of 0; raise "
                "max_steps, or give learning_rate"
            )
        return learning_rate

    def _count_steps(self) -> int | None:
        """Counts the steps of the recipe; None if it has neither max_steps nor data."""
        data = self._opened.data
        max_steps = self.recipe.optimization.max_steps
        if max_steps is None and data is not None:
            return data.train.steps
        return max_steps

    def sample(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        max_new_tokens: int = SAMPLE_TOKENS,
        temperature: float = 0.0,
        *,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        seed: int | None = None,
        prompt_log_probabilities: bool = False,
    ) -> list[SampledAnswer]:
        """Answers each prompt with the model in its present state.

        Args:
            prompts: Prompts, each a user's turn as text, or messages; the same on all ranks.
            max_new_tokens: The largest number of tokens in an answer.
            temperature: 0 takes the likeliest token each time; above 0, tokens are drawn.
            num_samples: The number of answers to each prompt. They follow one another in the list.
            stop: Texts at which an answer ends, besides the tokens that end a turn.
            seed: The seed of the draws, together with the number of steps done; by default the
                recipe's. Two calls between updates draw the same answers unless their seeds differ.
            prompt_log_probabilities: Whether the prompts' own tokens are scored too.

        Returns:
            The answers, in the order of the prompts, on every rank.
        """
        self._refuse_without_probabilities("sample")
        if isinstance(prompts, str):
            raise UserError(f"sample: a list of prompts is expected, such as [{prompts[:40]!r}]")
        if isinstance(stop, str):
            raise UserError(f"sample: stop: a list of texts is expected, such as [{stop!r}]")
        temperature = _read_number("sample: temperature", temperature)
        num_samples = _read_count("sample: num_samples", num_samples)
        max_new_tokens = _read_count("sample: max_new_tokens", max_new_tokens)
        repeated_prompts = [
            Prompt(encode_prompt(prompt, self.tokenizer, self.recipe.data.chat_template_date), "")
            for prompt in prompts
            for _ in range(num_samples)
        ]
        generation = Generation(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop=tuple(stop),
            with_log_probabilities=True,
        )
        device = self.world.device
        with self.computing(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            # The ranks of a tensor-parallel group must draw the same tokens. Each group answers
            # other prompts, and draws from another seed.
            draws = f"sample/{self.progress.step}/{self.world.tensor_group_index}"
            torch.manual_seed(seed_of(self.recipe.run.seed if seed is None else seed, draws))
            samples = answer(self.model, repeated_prompts, self.tokenizer, self.world, generation)
        ids_of_prompts = [tuple(prompt.prompt_ids) for prompt in repeated_prompts]
        scores = self._score_prompts({*ids_of_prompts}) if prompt_log_probabilities else {}
        return [
            SampledAnswer(
                text=sample.answer,
                token_ids=tuple(sample.token_ids),
                log_probabilities=tuple(sample.log_probabilities),
                prompt_ids=prompt_ids,
                prompt_log_probabilities=scores.get(prompt_ids, ()),
            )
            for sample, prompt_ids in zip(samples, ids_of_prompts, strict=True)
        ]

    def _score_prompts(
        self, prompts: Collection[tuple[int, ...]]
    ) -> dict[tuple[int, ...], tuple[float, ...]]:
        """Computes the log-probabilities of each prompt's tokens after the first, at temperature 1.

        All ranks call it with the same prompts.

        Returns:
            A prompt's token ids -> one number for each id after the first, on every rank. A prompt
            of one token is left out.
        """
        # sorted, so that all ranks make the same batch of the prompts
        ordered = sorted(prompt for prompt in prompts if len(prompt) > 1)
        if not ordered:
            return {}
        # Supervised fine-tuning labels every token of such a row, and no prompt must be cut.
        recipe = replace(
            self.recipe,
            method=replace(self.recipe.method, method=DEFAULT_METHOD),
            data=replace(self.recipe.data, max_length=max(map(len, ordered))),
        )
        rows = [{"input_ids": list(prompt)} for prompt in ordered]
        batch, _ = batch_rows(rows, recipe, self.tokenizer, self.world.data_parallel)
        # this rank's part: (the prompt's index in `ordered`, a label's position in the prompt, the
        # label's log-probability)
        own: list[tuple[int, int, float]] = []
        for micro_batch, values in zip(
            batch.micro_batches, self.log_probabilities(batch), strict=True
        ):
            has_label, documents, positions = micro_batch.find_labeled()
            # an example's id is its index among `rows`
            indexes = [micro_batch.example_ids[number] for number in documents[has_label].tolist()]
            labeled = positions[has_label].tolist()
            own += zip(indexes, labeled, values.cpu()[has_label].tolist(), strict=True)
        scores: dict[int, dict[int, float]] = {}  # index -> position -> log-probability
        for from_rank in self.world.gather(own):
            for index, position, value in from_rank:
                scores.setdefault(index, {})[position] = value
        return {
            prompt: tuple(scores[index][position] for position in range(len(prompt) - 1))
            for index, prompt in enumerate(ordered)
        }

    def save(self) -> Path:
        """Saves a checkpoint of the steps done, and returns its folder when it is on disk.

        `finetune launch` and `load` can resume from it. All ranks call it.

        Raises `UserError` if there are gradients since the last update, or if the folder has later
        checkpoints of another training.
        """
        self._refuse_closed("save")
        if self._backward:
            raise UserError("save: gradients are not part of a checkpoint; call optim_step first")
        if not self._is_resumed:
            RankGroup(self.world).on_main(
                lambda: refuse_later_steps(self.folder, self.progress.step)
            )
        with self.computing():
            self._saver.save(self.progress)
            self._saver.finish()
        self._kept_step = self.progress.step
        return step_folder(self.folder, self.progress.step)

    def load(self) -> Progress:
        """Resumes from the checkpoint that the recipe's `resume_from_checkpoint` names, if there is
        one; returns the progress.

        All ranks call it.

        Raises `UserError` if gradients wait for `optim_step`.
        """
        self._refuse_closed("load")
        if self._backward:
            raise UserError(
                "load: the gradients are those of the model that it replaces; call optim_step first"
            )
        checkpoint = find_resume_checkpoint(self.recipe, self.folder, self.world, self.inputs)
        loaded = self._loaded
        self._is_resumed = True
        if checkpoint is not None:
            with self.phases.timed("weights"), self.computing():
                self.progress = load_checkpoint(
                    checkpoint, loaded.model, loaded.optimizer, self.world
                )
            if loaded.objectives is not None:
                loaded.objectives.training.resume(checkpoint, self.progress.step)
            self._kept_step = self.progress.step
        return self.progress

    def export(self) -> Path:
        """Closes the session, and exports the newest checkpoint: to `export/`, a Hugging Face
        folder, and under LoRA also to `adapter/`, a PEFT folder.

        Returns the folder `export/`. Rank 0 writes it; the other ranks return at once.

        Raises `UserError` if steps are not saved yet (the session stays open then), or if the
        export does not verify.
        """
        folder = self.folder
        if self.progress.step != self._kept_step:
            raise UserError(
                f"export: the model as it is after step {self.progress.step} is not saved; call "
                "session.save() first"
            )
        self.close()
        if self.world.is_main:
            return export_run(folder)
        return folder / EXPORT

    def start(self, hooks: Hooks) -> TrainingRun:
        """Starts the run that `finetune launch` trains, from the progress so far: opens its log,
        and prints its first screen.
        """
        model, size, optimizer, objectives = self._loaded
        assert objectives is not None, "without data nothing is prepared to train on"
        return start_run(
            self.recipe,
            self.world,
            self.folder,
            self.tokenizer,
            self.data,
            model,
            size,
            optimizer,
            objectives,
            self._saver,
            self.progress,
            self.inputs,
            hooks,
            self.phases,
        )

    def _refuse_without_probabilities(self, what: str, *, of_classes: bool = False) -> None:
        """Raises `UserError` if the model does not predict each token from those before it.

        Args:
            what: What the user tried to use, which needs the probabilities of tokens.
            of_classes: Whether the probabilities of classes are enough.
        """
        facts = self.recipe.method_facts
        method = f"method: {self.recipe.method.method}"
        if facts.masks:
            raise UserError(
                f"{what}: is of tokens after one another, and {method} predicts masked ones from "
                "both sides; set method: sft for it"
            )
        if not facts.writes_text and not (of_classes and self.recipe.labels_are_indices):
            raise UserError(
                f"{what}: is of predicted tokens, and {method} makes {facts.makes}; set another "
                "method for it"
            )

    def _choose_objective(
        self, loss: LossFunction | str | None, *, has_own_rows: bool
    ) -> Objective:
        """Chooses the objective that `forward_backward` minimizes.

        Args:
            loss: As in `forward_backward`; None: the loss of the recipe's method.
            has_own_rows: Whether the script gave the batch's rows; they are not the recipe's data.

        Raises:
            UserError: If `loss` does not suit the method, or if the method can only train on the
                recipe's data.
        """
        facts = self.recipe.method_facts
        compares = facts.documents > 1  # a row has several documents, such as a pair
        if loss == "cross_entropy" and facts.rows == "answers":
            return SFT
        if isinstance(loss, str):
            raise UserError(
                f"forward_backward: loss: {loss!r}: a function is expected, or cross_entropy for "
                "answers"
            )
        if loss is not None:
            self._refuse_without_probabilities("forward_backward: a loss function", of_classes=True)
            if compares and self.world.sharding.sequence_parallel_size > 1:
                raise UserError(
                    "forward_backward: a loss function over pairs cannot be combined with sp_size "
                    "or cp_size, which shard the tokens of a document; set it to 1"
                )
            return FunctionObjective(loss, counts_pairs=compares)
        if facts.rows == "answers" and self.recipe.teacher is None:
            return make_answer_objective(self.recipe, self.tokenizer, self._count_steps())
        objectives = self._loaded.objectives
        # A reference's log-probabilities and a teacher's top tokens are stored only for the
        # recipe's data. A teacher in memory can score any row.
        reads_stored = facts.needs_reference or self.recipe.method.distill_top_k or facts.samples
        if reads_stored and (objectives is None or has_own_rows):
            raise UserError(
                f"forward_backward: {self.recipe.method.method} is prepared with the recipe's "
                "data; give datasets, and pass a batch of `batches()`, or pass a loss function"
            )
        return self._objective_of_any_rows if objectives is None else objectives.training


def _read_sharding(recipe: Recipe, config: Sharding | str | None) -> Sharding:
    """Reads the sharding of `config` (None: of the recipe's Accelerate file), and adds the recipe's
    own keys to it.
    """
    if isinstance(config, Sharding):
        sharding = config
    else:
        sharding = read_sharding(config, recipe.run.accelerate_config, os.environ)
    return with_recipe_keys(sharding, recipe)


def _join_backward(
    parts: Sequence[tuple[StepBatch, Measured]], step: int
) -> tuple[StepBatch, Measured]:
    """Joins the batches that have gone backward since the last update to one batch of `step`, and
    adds up their losses.
    """
    batches = [batch for batch, _ in parts]
    batch = replace(
        batches[-1],
        step=step,
        micro_batches=tuple(
            micro_batch for batch in batches for micro_batch in batch.micro_batches
        ),
        tokens=sum(batch.tokens for batch in batches),
        trained_tokens=sum(batch.trained_tokens for batch in batches),
    )
    return batch, Measured(torch.stack([measured.loss_sum for _, measured in parts]).sum())


def _read_number(name: str, number: Any) -> float:
    """Reads the argument `name`, a number of Python or NumPy.

    Raises `UserError` if it is not finite, or below 0.
    """
    if not isinstance(number, Real) or not math.isfinite(number) or number < 0:
        raise UserError(f"{name}: a number of at least 0 is expected, not {number!r}")
    return float(number)


def _read_count(name: str, count: Any) -> int:
    """Reads the argument `name`, an integer of Python or NumPy.

    Raises `UserError` if it is below 1.
    """
    if not isinstance(count, Integral) or count < 1:
        raise UserError(f"{name}: a whole number of at least 1 is expected, not {count!r}")
    return int(count)
