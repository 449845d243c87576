"""The start of a run: its log, its first screen, and everything that training works with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.checkpoint.manifest import Progress
from finetune.checkpoint.save import Saver
from finetune.config.layout import gathers_fp8
from finetune.config.reader import to_dict
from finetune.config.schema import Model, Recipe
from finetune.data.batches import OnReport, StepBatch, StoredBatches
from finetune.data.data_report import Report
from finetune.data.examples import Prompt
from finetune.data.prepare import PreparedData
from finetune.distributed.collective import RankGroup
from finetune.distributed.parallelize import unwrap
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.export.merge_choice import write_comparison_rows
from finetune.files.run_json import append_json_lines, drop_later_lines, read_json_lines
from finetune.flops import flop_per_token_of
from finetune.models.load import ModelSize, Teacher, load_teacher
from finetune.models.probe import check_training_forward
from finetune.pretrained_config import text_config_of
from finetune.training.evaluate import SAMPLES
from finetune.training.hooks import Hooks
from finetune.training.objectives.distill import Distillation, find_stored_teacher, teacher_flop_per_token
from finetune.training.objectives.policy import PolicyObjective, make_policy_objectives
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.objectives.sft import SFT, Objective, Objectives
from finetune.training.reference import find_references
from finetune.training.run_folder import COMPLETIONS, METRICS, choose_run_name, describe_run, write_data_report
from finetune.training.run_log import MetricsLog, Tracker, list_trackers, open_tracker
from finetune.training.screens import first_screen
from finetune.training.throughput import find_fp8_share, peak_flops, profile_steps
from finetune.training.training_run import TrainingRun
from finetune.training.watch import SignalListener, Watchdog


def make_objectives(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
    folder: Path | None = None,
) -> Objectives:
    """What the run minimizes, and what is measured on held-out data. All ranks call it.

    `model` still has the weights that training starts with, a method's reference. `inputs`: of `fingerprint_inputs`.
    `folder`: the run's, where it has one.
    """
    facts, teacher = recipe.method_facts, None
    if recipe.teacher is not None:
        load = partial(load_checked_teacher, recipe, recipe.teacher, world)
        if recipe.method.distill_top_k is not None:
            known = find_stored_teacher(model, recipe, data, inputs, world, load)
            return Objectives(*(Distillation(known.get(name, known["training"])) for name in ("training", "held_out")))
        teacher = load()
        if not facts.samples:
            return Objectives(Distillation(teacher), Distillation(teacher))
    if facts.samples:
        return make_policy_objectives(model, recipe, data, world, teacher, folder)
    if facts.rows == "answers":
        return Objectives(SFT, SFT)
    references = find_references(model, recipe, data, inputs, signals, world) if facts.needs_reference else None
    group = world.sequence_group
    if facts.rows == "ratings":
        assert references is not None, "ratings are of answers against the reference's"
        keys = recipe.method
        return Objectives(*(RatingObjective(keys, reference, sequence_group=group) for reference in references))
    training = PreferenceObjective(recipe.method, None, recipe.optimization.label_smoothing, sequence_group=group)
    held_out = replace(training, label_smoothing=0.0, chosen_tokens_per_pair=_chosen_tokens_per_pair(data.evaluation))
    if references is None:
        return Objectives(training, held_out)
    return Objectives(replace(training, reference=references[0]), replace(held_out, reference=references[1]))


def load_checked_teacher(recipe: Recipe, keys: Model, world: World) -> Teacher:
    """The recipe's teacher (or the reference of a method that samples), whose forward is compared with its own."""
    try:
        teacher = load_teacher(recipe, world)
        check_training_forward(teacher.model, keys, recipe.data, world)
    except UserError as error:
        raise UserError(f"teacher_model_name_or_path: {error}") from error
    return teacher


def _chosen_tokens_per_pair(batches: StoredBatches | None) -> float | None:
    if batches is None:
        return None
    examples = batches.examples
    return int(examples.trained[:: examples.group_size].sum(dtype=np.int64)) / max(1, examples.groups)


def start_run(
    recipe: Recipe,
    world: World,
    folder: Path,
    tokenizer: Any,
    data: PreparedData,
    model: nn.Module,
    size: ModelSize,
    optimizer: torch.optim.Optimizer,
    objectives: Objectives,
    progress: Progress,
    inputs: Mapping[str, str],
    hooks: Hooks,
) -> TrainingRun:
    """The run on this rank; rank 0 opens metrics.jsonl and prints the first screen. All ranks call it.

    Raises `UserError` on all ranks where one of the run's files cannot be written, or the tracker does not start.
    """
    config: Any = text_config_of(unwrap(model).config)
    if gathers_fp8(world.sharding):
        from finetune.models.fp8 import keep_scales_current  # imports torchao

        keep_scales_current(model, optimizer)
    log, results = open_log(recipe, world, folder, data, progress)

    def count_flop(length: float) -> float:
        own = flop_per_token_of(config, parameters=size.multiplied, length=length, frozen=size.frozen_multiplied)
        return own + teacher_flop_per_token(objectives.training, length)

    fp8_share = find_fp8_share(unwrap(model), world.sharding, count_flop(recipe.data.max_length))
    run = TrainingRun(
        recipe=recipe,
        world=world,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        read_batches=partial(read_batches, recipe, world, folder, data, objectives.training, log),
        prompts=tuple(data.held_out_prompts(recipe.run.exact_match_samples)),
        sample_prompts=tuple(Prompt(prompt_ids(text, tokenizer), "") for text in recipe.run.sample_prompts),
        model=model,
        optimizer=optimizer,
        objectives=objectives,
        schedule=recipe.optimization.schedule(data.train.steps),
        saver=Saver(folder, model, optimizer, world, recipe, tokenizer, inputs, objectives.training.describe_files),
        log=log,
        results={progress.step: results},
        inputs=inputs,
        hooks=hooks,
        watchdog=Watchdog(world.rank, recipe.run.timeout_seconds),
        count_flop=count_flop,
        fp8_share=fp8_share,
        peak_flops=peak_flops(world.device, fp8_share),
    )
    for line in first_screen(run, size, progress):
        log.say(line)
    hooks.load_states(progress)
    RankGroup(world).on_all(hooks.read_states)  # a state that no checkpoint can keep is said before the first step
    return run


def open_log(
    recipe: Recipe, world: World, folder: Path, data: PreparedData, progress: Progress
) -> tuple[MetricsLog, dict[str, Any]]:
    """On the main rank, metrics.jsonl with the display and the tracker, data_report.json and the description of the
    run; a silent log on the others. With it, on every rank, what an earlier start has logged of evaluations at this
    step.
    """
    step = progress.step
    trackers: list[Tracker] = []
    log = MetricsLog(None, data.train.steps, step)

    def start() -> dict[str, Any]:
        nonlocal log
        for name in list_trackers(recipe.run.report_to):
            trackers.append(open_tracker(name, choose_run_name(recipe), folder, to_dict(recipe), step))
        describe_run(folder, recipe, world)
        if data.report.is_complete:  # a stream is reported while it is read
            write_data_report(folder, data.report.as_json())
        if not recipe.method_facts.samples and data.images is None:
            batches = data.evaluation or data.train
            if isinstance(batches, StoredBatches):  # what an export is measured on; a stream keeps none
                write_comparison_rows(folder, batches.examples, held_out=data.evaluation is not None)
        samples = drop_later_lines(folder / SAMPLES, step)
        drop_later_lines(folder / COMPLETIONS, step)
        log = MetricsLog(folder / METRICS, data.train.steps, step, trackers)
        lines = [line for line in read_json_lines(folder / METRICS) if line is not None and line.get("step") == step]
        results = {key: value for line in lines for key, value in line.items() if key in ("eval_loss", "exact_match")}
        has_samples = any(sample["step"] == step and sample.get("expected") == "" for sample in samples)
        return results | ({"sample_prompts": True} if has_samples else {})

    results: dict[str, Any] = RankGroup(world).on_main(start)
    return log, results


def read_batches(
    recipe: Recipe,
    world: World,
    folder: Path,
    data: PreparedData,
    objective: Objective,
    log: MetricsLog,
    from_step: int,
) -> Iterator[StepBatch]:
    """This rank's batches from `from_step` (0-based) to the end, those of `profile_steps` under the profiler.

    Where the method samples, each is sampled when it is asked for: from the weights after the step before.
    """
    if isinstance(objective, PolicyObjective):
        batches = objective.rollouts.batches(from_step, partial(write_completions, folder, log))
    else:
        batches = data.train.batches(from_step, stream_reporter(world, folder, log))
    return profile_steps(batches, recipe.run.profile_steps, folder, world.rank)


def write_completions(folder: Path, log: MetricsLog, lines: list[dict[str, Any]]) -> None:
    """Adds lines to completions.jsonl. They are only looked at: a full disk does not end the run."""
    try:
        append_json_lines(folder / COMPLETIONS, lines)
    except OSError as error:
        log.say(f"{folder / COMPLETIONS}: cannot be written ({error.strerror}); the run continues")


def stream_reporter(world: World, folder: Path, log: MetricsLog) -> OnReport:
    """Logs what is found in data that is read while training, and keeps data_report.json up to date."""

    def log_news(report: Report, news: list[str]) -> None:
        for line in news:
            log.say(f"stream  {line}")
        if world.is_main:
            try:
                write_data_report(folder, report.as_json())
            except OSError as error:  # it is only looked at; the next block writes it again
                log.say(f"{error.filename}: cannot be written ({error.strerror}); the run continues")

    return log_news


def prompt_ids(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The ids of a user's turn, or of messages, up to where the assistant begins; without a template, of the text."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
