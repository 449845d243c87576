"""A model in training, step by step: what `finetune launch` does, for scripts and notebooks.
docs/api.md shows its use.

The command is built on it: `run.py` opens a session, and trains by the same functions on the same
model.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from finetune.checkpoint.folders import refuse_later_steps, step_folder
from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.resume import find_start, fingerprint_inputs, load_start
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
from finetune.data.examples import Prompt
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
from finetune.rollout.reward_models import check_reward_models
from finetune.training.callbacks import Hooks
from finetune.training.evaluate import SAMPLE_TOKENS, Generation, answer
from finetune.training.lifecycle import encode_prompt, make_objectives, start_run
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


class Loss:
    """The loss and metrics of `Session.forward_backward`, over all ranks. The sums are of all ranks
    already: reading only waits for the device, on the rank that reads.
    """

    def __init__(self, totals: Totals, count: int, objective: Objective) -> None:
        self._totals = totals
        self._count = count
        self._objective = objective

    @cached_property
    def _averages(self) -> tuple[float, dict[str, float]]:
        loss, means = self._totals.average(self._count)
        return loss, self._objective.complete(means)

    @property
    def loss(self) -> float:
        """The mean over the trained tokens, or over the pairs of a method that compares."""
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
    """The result of `Session.optim_step`."""

    step: int  # steps done, this one included
    learning_rate: float
    grad_norm: float  # the 2-norm of all ranks' gradients before clipping
    # the loss or gradient was not finite, and on_nonfinite is skip: nothing was updated
    is_skipped: bool


class Gradients(NamedTuple):
    """The gradients of `Session.take_gradients`, on this rank."""

    tensors: list[Tensor | None]  # in the order of the optimizer's parameters
    backward: list[tuple[StepBatch, Measured]]  # what they are of


class SampledAnswer(NamedTuple):
    """An answer of `Session.sample`.

    `log_probabilities` are those of the distribution that was drawn from, after `temperature`.
    `row` is the prompt and the answer as a row for `Session.batch`.
    """

    text: str
    token_ids: tuple[int, ...]  # with the token that ends it
    # of each token, at the temperature that it was drawn with; at 1 where greedy
    log_probabilities: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    # Of the prompt's tokens after the first, at 1; empty where `sample` was not asked for them.
    prompt_log_probabilities: tuple[float, ...] = ()

    @property
    def row(self) -> dict[str, list[int]]:
        """A row for `Session.batch` that trains on the answer: the very tokens, not its text."""
        prompt = list(self.prompt_ids)
        answer = list(self.token_ids)
        return {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}


class Loaded(NamedTuple):
    """The trained model and its objective."""

    model: nn.Module
    size: ModelSize
    optimizer: torch.optim.Optimizer
    objectives: Objectives | None  # of the weights before training; None without data


class Session:
    """A recipe's model in training, on one rank of a process group. All ranks make the same calls.

    The recipe's data are read at once; the model is loaded when it is first needed.

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
        """Joins the ranks that a launcher has started (a process without one is alone), and locks
        the run's folder.

        Args:
            recipe: Of `finetune.load_recipe`, or a file, or a name in recipes/.
            config: An Accelerate file, or a name in accelerate_configs/; by default the recipe's.
            saves: False where nothing will be saved: no folder is made.
            after: The session of another adapter on the same base. This one takes over its ranks
                and the base that it has in memory; only its `close` may be called from then on.

        Raises:
            UserError: For what the rules refuse, data or a tokenizer that cannot be read, fatal
                findings in the data, or a folder that cannot be written or is in use.
        """
        given = expect_recipe(recipe)
        sharding = _read_sharding(given, config)
        set_library_environment(deterministic=given.run.deterministic)
        if after is None and AcceleratorState._shared_state:
            raise UserError("a session, or an Accelerator, is open in this process; close it first")
        own_recipe = complete_lora(given)
        machine = describe_machine(sharding, with_liger=own_recipe.model.use_liger_kernel)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local_facts = find_local_facts(own_recipe.model)
        refuse_problems(find_problems(own_recipe, sharding, local_facts, ranks, machine=machine))
        if after is None:
            self.world = join(sharding, own_recipe.run.timeout_seconds)
        else:
            self.world = after.world
        self.phases = Phases()
        self.progress = Progress()
        self.signals = SignalListener()  # which the command enters; a script's signals are its own
        self._backward: list[tuple[StepBatch, Measured]] = []  # since the last update
        self._is_resumed = False
        self._kept_step = 0  # of the newest checkpoint that is of this training
        self._is_closed = False
        self._on_close = ExitStack()
        self._on_close.callback(leave, self.world)
        # This rank's part of the frozen parameters of a session before, by their names in the base.
        self._frozen: dict[str, Tensor] = {} if after is None else after._hand_over_frozen()
        try:
            self._opened = open_run(own_recipe, self.world, machine, self.phases, saves=saves)
        except BaseException:  # Ctrl-C in a notebook too, which then could open no other session
            if self.world.size == 1:  # as in __exit__
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
        # else another rank may not have failed, and leaving would wait for it
        if kind is None or self.world.size == 1:
            self.close()

    def close(self) -> None:
        """Leaves the other ranks. Afterwards the process can open another session."""
        self._on_close.close()
        self._is_closed = True

    def _refuse_closed(self, what: str) -> None:
        if self._is_closed:
            raise UserError(
                f"{what}: the session is closed; open another, whose load() continues from what "
                "was saved"
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The block in which the model computes: under `deterministic`, and with a sentence where
        memory runs out.
        """
        self._refuse_closed("the model")
        with (
            explain_out_of_memory(self.recipe, self.world),
            use_deterministic_kernels(on=self.recipe.run.deterministic),
        ):
            yield

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self._opened.folder is not None, "saves=False: this session has no folder"
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
        """A hash of each thing that the recipe names, which checkpoints keep."""
        return fingerprint_inputs(self.recipe, self.tokenizer, self._opened.data, self.world)

    @cached_property
    def _loaded(self) -> Loaded:
        """What a session computes with, loaded when it is first needed."""
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

    def _hand_over_frozen(self) -> dict[str, Tensor]:
        """Drops the model, and returns `_frozen` for the session that comes after this one: this
        rank's part of the frozen parameters, or none where no model was loaded.
        """
        loaded: Loaded | None = vars(self).pop("_loaded", None)
        for name in ("_saver", "_guard"):
            vars(self).pop(name, None)
        if loaded is not None:
            self._frozen = frozen_parts(loaded.model)
        self.world.accelerator._models.clear()
        return self._frozen

    def check_model(self) -> None:
        """Finds problems of the model's and the teacher's files and keys, from the headers of the
        weights alone.

        Nothing is downloaded for it: what is not on this machine is not looked at. Raises
        `UserError`.
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
        loaded = self._loaded
        options: dict[str, Any] = {"carried_bytes": loaded.size.carried_bytes}
        if loaded.objectives is not None:
            options["describe_files"] = loaded.objectives.training.describe_files
        return Saver(
            self.folder,
            loaded.model,
            loaded.optimizer,
            self.world,
            self.recipe,
            self.tokenizer,
            self.inputs,
            **options,
        )

    @cached_property
    def _guard(self) -> HostGuard | DeviceGuard:
        """It keeps a loss or gradient that is not finite from the parameters."""
        return make_guard(self._loaded.optimizer, self.recipe.optimization, self.world)

    def batches(self) -> Iterator[StepBatch]:
        """The batches of the recipe's data that are still to be trained on, in the command's
        order.
        """
        training = None
        if self._loaded.objectives:
            training = self._loaded.objectives.training
        if isinstance(training, PolicyObjective):
            return training.rollouts.batches(self.progress.step)
        return self.data.train.batches(self.progress.step)

    def batch(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> StepBatch:
        """This rank's share of one step over `rows`, which are read as those of a data file.

        All ranks give the same.

        Args:
            rows: Of any format that files have.
            columns: Those of them that a loss function reads, such as advantages: each has a number
                for the row, or a list with one for each trained token. `micro_batch.columns[name]`
                is fp32[positions], as the log-probabilities are.

        Raises:
            UserError: For a row that cannot be used.
        """
        if isinstance(columns, str):
            raise UserError(f"batch: columns: a list of names is expected, such as [{columns!r}]")
        if self.recipe.method_facts.samples:
            raise UserError(
                f"batch: method: {self.recipe.method.method} samples what it learns from; use "
                "batches()"
            )
        return batch_rows(
            rows, self.recipe, self.tokenizer, self.world.data_parallel, self.progress.step, columns
        )

    def forward_backward(
        self,
        batch: StepBatch | Sequence[Mapping[str, Any]],
        loss: LossFunction | Literal["cross_entropy"] | None = None,
    ) -> Loss:
        """Adds the gradients of a batch.

        Several calls before one `optim_step` add up, each divided by its own count; one that fails
        drops them all.

        Args:
            batch: Of `batches` or `batch`; or rows.
            loss: `(log_probabilities, micro_batch) -> Tensor`; by default the loss of the recipe's
                method. The log-probabilities, fp32[positions], are those of the labels at
                `micro_batch.trained_positions`, 0 where there is no label.
                `micro_batch.trained_documents` says which document each position belongs to, and 0
                where there is no label: sum over a document, as a mean would count those positions
                in document 0. `micro_batch.columns`
                has what `batch` was asked for. The function returns a sum (0-dim), which is
                divided by the trained tokens of the batch over all ranks, or by its pairs where
                the method compares.

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
        objective = self._objective(loss, has_own_rows=step_batch.has_own_rows)
        with self.computing(), self._or_no_gradients():
            self.model.train()
            measured = forward_backward(self.model, step_batch, objective, self.recipe, self.world)
            if isinstance(objective, FunctionObjective):
                RankGroup(self.world).on_all(objective.raise_fault)
            totals = measured.add_up(self.world)
        self._backward.append((step_batch, measured))
        return Loss(totals, objective.count(step_batch), objective)

    @contextmanager
    def _or_no_gradients(self) -> Iterator[None]:
        """Drops all gradients where the block raises: those of some micro-batches would spoil the
        next update.
        """
        try:
            yield
        except BaseException:
            self._loaded.optimizer.zero_grad(set_to_none=True)
            self._backward.clear()
            vars(self).pop("_guard", None)  # it remembers what it has found
            raise

    def take_gradients(self) -> Gradients:
        """Takes the gradients since the last update out of the model, for a script that trains
        several adapters in turn.
        """
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        taken = Gradients([parameter.grad for parameter in trained], [*self._backward])
        self.optimizer.zero_grad(set_to_none=True)
        self._backward.clear()
        return taken

    def give_gradients(self, gradients: Gradients) -> None:
        """Puts back what `take_gradients` took, in place of any gradients that there are."""
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        for parameter, gradient in zip(trained, gradients.tensors, strict=True):
            parameter.grad = gradient
        self._backward[:] = gradients.backward

    def log_probabilities(self, batch: StepBatch) -> list[Tensor]:
        """Returns the log-probability of every label, one fp32 tensor for each micro-batch of this
        rank. A micro-batch with `targets` (several token ids at each position) has one of each.

        Runs without dropout or gradients. All ranks call it.
        """
        self._refuse_masked_diffusion("log_probabilities")
        with evaluating(self.model), self.computing():
            each = (micro_batch.to(self.world.device) for micro_batch in batch.micro_batches)
            return [
                self.model(**one.inputs, head_function=choose_label_head(one.targets))
                for one in each
            ]

    def optim_step(self, learning_rate: float | None = None) -> Update:
        """Clips the gradients, updates the parameters, and sets the gradients to zero.

        Args:
            learning_rate: By default that of the recipe's schedule.

        Raises:
            UserError: Where the loss or gradient is not finite, and `on_nonfinite` is stop.
        """
        self._refuse_closed("optim_step")
        if not self._backward:
            raise UserError("optim_step: no gradients; call forward_backward first")
        if learning_rate is not None and not _is_rate(learning_rate):
            raise UserError(
                "optim_step: learning_rate: a number of at least 0 is expected, not "
                f"{learning_rate!r}"
            )
        keys = self.recipe.optimization
        world = self.world
        batch, measured = _together(self._backward, self.progress.step)
        if learning_rate is None:
            learning_rate = self._scheduled_rate()
        optimizer = self._loaded.optimizer
        guard = self._guard
        set_learning_rate(optimizer, learning_rate)
        saver: Saver | None = vars(self).get("_saver")  # there is none before the first save
        before_update = saver.before_update if saver is not None else lambda: None
        with uninterrupted():  # what is updated is counted
            with self._or_no_gradients():
                result = clip_and_update(
                    self.model, optimizer, batch, measured, self.recipe, world, guard, before_update
                )
                guard.raise_if_bad(keys)  # a guard that marks a step on the device alone
                if result.failed_check is not None:
                    handle_nonfinite(keys, result.failed_check, self.progress.skipped_steps, world)
            is_skipped = result.failed_check is not None
            self._backward.clear()
            self.progress = self.progress.after_step(batch, is_skipped=is_skipped)
        return Update(self.progress.step, learning_rate, float(result.grad_norm), is_skipped)

    def _scheduled_rate(self) -> float:
        """The learning rate of the next step, by the recipe's schedule."""
        keys = self.recipe.optimization
        if self._opened.data is None and keys.max_steps is None:
            raise UserError(
                "optim_step: the recipe has no data and no max_steps to schedule by; give "
                "learning_rate"
            )
        steps = self._count_steps()
        assert steps is not None, "the recipe has max_steps or data"
        return compute_learning_rate(self.progress.step, keys.schedule(steps))

    def _count_steps(self) -> int | None:
        """The steps of the recipe; None where it has neither max_steps nor data."""
        data = self._opened.data
        given = self.recipe.optimization.max_steps
        return data.train.steps if given is None and data is not None else given

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
        """Answers each prompt (a user's turn, or messages) by the model as it is.

        Args:
            prompts: The same on all ranks.
            max_new_tokens: Of an answer, at most.
            temperature: 0: greedily. Above it, tokens are drawn.
            num_samples: Answers of each prompt, which stand one after another in the list.
            stop: Texts at which an answer ends, beside the tokens that end a turn.
            seed: Of the draws, together with the steps done; by default the recipe's. Two calls
                between updates draw the same answers, unless they have other seeds.
            prompt_log_probabilities: Whether the prompts' own tokens are scored too.
        """
        self._refuse_masked_diffusion("sample")
        if isinstance(prompts, str):
            raise UserError(f"sample: a list of prompts is expected, such as [{prompts[:40]!r}]")
        if isinstance(stop, str):
            raise UserError(f"sample: stop: a list of texts is expected, such as [{stop!r}]")
        _check_temperature(temperature)
        _check_count("num_samples", num_samples)
        _check_count("max_new_tokens", max_new_tokens)
        asked = [
            Prompt(encode_prompt(prompt, self.tokenizer), "")
            for prompt in prompts
            for _ in range(num_samples)
        ]
        generation = Generation(
            max_new_tokens=max_new_tokens,
            temperature=float(temperature),
            stop=tuple(stop),
            with_log_probabilities=True,
        )
        device = self.world.device
        with self.computing(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            # The ranks of a tensor-parallel group draw the same; the groups have other prompts.
            draws = f"sample/{self.progress.step}/{self.world.tensor_group_index}"
            torch.manual_seed(seed_of(self.recipe.run.seed if seed is None else seed, draws))
            samples = answer(
                self.model,
                asked,
                self.tokenizer,
                self.world,
                self.recipe.model.eot_tokens,
                generation,
            )
        asked_ids = [tuple(prompt.prompt_ids) for prompt in asked]
        scores = self._score_prompts({*asked_ids}) if prompt_log_probabilities else {}
        return [
            SampledAnswer(
                each.answer,
                tuple(each.token_ids),
                tuple(each.log_probabilities),
                ids,
                scores.get(ids, ()),
            )
            for each, ids in zip(samples, asked_ids, strict=True)
        ]

    def _score_prompts(
        self, prompts: Collection[tuple[int, ...]]
    ) -> dict[tuple[int, ...], tuple[float, ...]]:
        """The log-probabilities of each prompt's tokens after the first, on every rank. A prompt of
        one token has none, and is left out.
        """
        ordered = sorted(prompt for prompt in prompts if len(prompt) > 1)
        if not ordered:
            return {}
        recipe = replace(
            self.recipe,
            method=replace(self.recipe.method, method=DEFAULT_METHOD),
            data=replace(self.recipe.data, max_length=max(map(len, ordered))),
        )
        rows = [{"input_ids": list(prompt)} for prompt in ordered]
        batch = batch_rows(rows, recipe, self.tokenizer, self.world.data_parallel)
        # of this rank: (prompt's index in `ordered`, position of a label in it, log-probability)
        own: list[tuple[int, int, float]] = []
        for micro_batch, values in zip(
            batch.micro_batches, self.log_probabilities(batch), strict=True
        ):
            has_label, documents, positions = micro_batch.find_labeled()
            # an example's id is its index among `rows`
            ids = [micro_batch.example_ids[index] for index in documents[has_label].tolist()]
            labeled = positions[has_label].tolist()
            own += zip(ids, labeled, values.cpu()[has_label].tolist(), strict=True)
        scores: dict[int, dict[int, float]] = {}
        for of_rank in self.world.gather(own):
            for index, position, value in of_rank:
                scores.setdefault(index, {})[position] = value
        return {
            prompt: tuple(scores[index][position] for position in range(len(prompt) - 1))
            for index, prompt in enumerate(ordered)
        }

    def save(self) -> Path:
        """Publishes a checkpoint of the steps done; returns its folder.

        `finetune launch` and `load` resume from it. All ranks call it.
        """
        self._refuse_closed("save")
        if self._backward:
            raise UserError("save: gradients are not part of a checkpoint; call optim_step first")
        if not self._is_resumed:
            RankGroup(self.world).on_main(
                lambda: refuse_later_steps(self.folder, self.progress.step)
            )
        self._saver.save(self.progress)
        self._saver.finish()
        self._kept_step = self.progress.step
        return step_folder(self.folder, self.progress.step)

    def load(self) -> Progress:
        """Resumes from where `resume_from_checkpoint` says, where there is a checkpoint; returns
        the progress.
        """
        self._refuse_closed("load")
        start = find_start(self.recipe, self.folder, self.world, self.inputs)
        loaded = self._loaded
        self._is_resumed = True
        if start is not None:
            with self.phases.timed("weights"):
                self.progress = load_start(start, loaded.model, loaded.optimizer, self.world)
            if loaded.objectives is not None:
                loaded.objectives.training.resume(start, self.progress.step)
            self._kept_step = self.progress.step
        return self.progress

    def export(self) -> Path:
        """Closes the session, and writes the newest checkpoint as a Hugging Face folder: `export/`,
        and `adapter/`.

        Rank 0 writes; the other ranks return at once. Raises `UserError` where steps are not saved,
        and the session stays open, and where the export does not verify.
        """
        if self.progress.step != self._kept_step:
            raise UserError(
                f"export: the model as it is after step {self.progress.step} is not saved; call "
                "session.save() first"
            )
        self.close()
        if self.world.is_main:
            return export_run(self.folder)
        return self.folder / EXPORT

    def start(self, hooks: Hooks) -> TrainingRun:
        """The run that the command trains, from the progress so far: its log, and its first
        screen.
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
            self.progress,
            self.inputs,
            hooks,
            self.phases,
        )

    def _refuse_masked_diffusion(self, what: str) -> None:
        """Raises `UserError` where the method predicts masked tokens from both sides: `what` needs
        tokens that are predicted from those before them.
        """
        if self.recipe.method_facts.masks:
            raise UserError(
                f"{what}: is of tokens after one another, and method: {self.recipe.method.method} "
                "predicts masked ones from both sides; set method: sft for it"
            )

    def _objective(self, loss: LossFunction | str | None, *, has_own_rows: bool) -> Objective:
        """Chooses what `forward_backward` minimizes: as `loss` says, or by default as the recipe's
        method does.

        has_own_rows: Whether the batch is of rows that the script gave, not of the recipe's data.

        Raises `UserError` where `loss` does not suit the method, or the method is prepared with the
        recipe's data.
        """
        facts = self.recipe.method_facts
        compares = facts.documents > 1  # a row is a pair of documents, say
        if loss == "cross_entropy" and facts.rows == "answers":
            return SFT
        if isinstance(loss, str):
            raise UserError(
                f"forward_backward: loss: {loss!r}: a function is expected, or cross_entropy for "
                "answers"
            )
        if loss is not None:
            self._refuse_masked_diffusion("forward_backward: a loss function")
            if compares and self.world.sharding.sequence_parallel_size > 1:
                raise UserError(
                    "forward_backward: a loss function over pairs cannot be combined with sp_size "
                    "or cp_size, which shard the tokens of a document; set it to 1"
                )
            return FunctionObjective(loss, counts_pairs=compares)
        if facts.rows == "answers" and self.recipe.teacher is None:
            return make_answer_objective(self.recipe, self.tokenizer, self._count_steps())
        # Log-probabilities of a reference, or a teacher's top tokens, are stored for the recipe's
        # data alone. A teacher in memory answers for any row.
        reads_stored = facts.needs_reference or self.recipe.method.distill_top_k
        if self._loaded.objectives is None or (has_own_rows and reads_stored):
            raise UserError(
                f"forward_backward: {self.recipe.method.method} is prepared with the recipe's "
                "data; give datasets, and pass a batch of `batches()`, or pass a loss function"
            )
        return self._loaded.objectives.training


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def _read_sharding(recipe: Recipe, config: Sharding | str | None) -> Sharding:
    """Reads how `config`, or else the recipe's Accelerate file, shards the model; the recipe's own
    keys are added.
    """
    if isinstance(config, Sharding):
        sharding = config
    else:
        sharding = read_sharding(config, recipe.run.accelerate_config, os.environ)
    return with_recipe_keys(sharding, recipe)


def _together(parts: Sequence[tuple[StepBatch, Measured]], step: int) -> tuple[StepBatch, Measured]:
    """All that has gone backward since the last update, as one batch of `step`."""
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


def _check_temperature(temperature: Any) -> None:
    """Raises `UserError` for what is no temperature to sample with."""
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise UserError(
            f"sample: temperature: a number of at least 0 is expected, not {temperature!r}"
        )


def _check_count(name: str, count: Any) -> None:
    """Raises `UserError` for an argument `name` of `sample` that is no number of things."""
    if not isinstance(count, int) or count < 1:
        raise UserError(f"sample: {name}: a whole number of at least 1 is expected, not {count!r}")
