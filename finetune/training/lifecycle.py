"""The start of a run (folder, objectives, log, first screen) and its end (export, last screen,
finished.json).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.checkpoint.folders import list_checkpoints, lock_run, step_folder
from finetune.checkpoint.manifest import Progress, find_damage, hash_recipe, read_state
from finetune.checkpoint.resume import compare_to_saved, read_progress, refuse_damaged_model
from finetune.checkpoint.save import Saver
from finetune.config.layout import gathers_fp8
from finetune.config.pretrained import text_config_of
from finetune.config.reader import to_dict
from finetune.config.schema import Model, Recipe, recipe_keys
from finetune.config.yaml_file import read_yaml
from finetune.data.batches import StepBatch
from finetune.data.data_report import OnReport, Report
from finetune.data.examples import Prompt
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.tokenizer import asks_for_date
from finetune.distributed.join import leave
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.export.merge_choice import write_comparison_rows
from finetune.files.durable import replace_file, restore_exports, restore_folder, try_writing
from finetune.files.json_files import append_json_lines, read_json_lines, read_json_object
from finetune.files.phases import Phases
from finetune.files.run_files import drop_later_lines
from finetune.flops import flop_per_token_of, forward_flop_per_token_of
from finetune.models.load import ModelSize, Teacher, load_teacher
from finetune.models.probe import check_training_forward
from finetune.training.callbacks import Hooks, Tracker, list_trackers, open_tracker
from finetune.training.evaluate import SAMPLES
from finetune.training.loop import is_out_of_patience
from finetune.training.metrics import MetricsLog, find_fp8_share, peak_flops
from finetune.training.objectives.answers import make_answer_objectives
from finetune.training.objectives.contrastive import ContrastiveObjective
from finetune.training.objectives.distill import (
    Distillation,
    find_stored_teacher,
    teacher_flop_per_token,
)
from finetune.training.objectives.objective import Objective, Objectives
from finetune.training.objectives.online import make_policy_objectives
from finetune.training.objectives.policy import PolicyObjective
from finetune.training.objectives.preference import PreferenceObjective, RatingObjective
from finetune.training.objectives.scores import SCORING
from finetune.training.reference import find_references
from finetune.training.screens import (
    answers_before_and_after,
    first_screen,
    last_screen,
    results_line,
)
from finetune.training.training_run import (
    COMPLETIONS,
    METRICS,
    RECIPE,
    TrainingRun,
    describe_run,
    unwritable,
    write_data_report,
)
from finetune.training.watch import SignalListener, Watchdog, profile_steps


def open_run_folder(recipe: Recipe, world: World) -> Path:
    """Makes the run's folder (`output_dir`, else runs/<run_name>) and locks it against other runs.

    Rank 0 does it, all ranks return it. Raises `UserError` on all where it cannot be written or
    another run has locked it, and where the recipe names a checkpoint that is damaged.
    """
    folder = recipe.folder
    RankGroup(world).on_main(lambda: _open_folder(folder, recipe))
    return folder


def _open_folder(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
        restore_exports(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    if recipe.model.model_name_or_path is not None:
        restore_folder(Path(recipe.model.model_name_or_path))
    refuse_damaged_model(recipe)


def try_folder(recipe: Recipe, world: World) -> None:
    """Raises `UserError` on all ranks where the run's folder could not be made and written.

    Leaves nothing there.
    """
    RankGroup(world).on_main(lambda: _try_folder(recipe.folder))


def _try_folder(folder: Path) -> None:
    try:
        try_writing(folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def fix_template_date(recipe: Recipe, folder: Path, tokenizer: Any, world: World) -> Recipe:
    """The recipe with the day that its chat template writes, where that asks for one: the day on
    which the run began.

    Else ranks that tokenize around midnight would differ, and a run resumed the next day would
    train on another text.
    """
    if recipe.data.chat_template_date is not None or not asks_for_date(tokenizer):
        return recipe
    day = RankGroup(world).on_main(lambda: _first_day(folder / RECIPE))
    return replace(recipe, data=replace(recipe.data, chat_template_date=day))


def _first_day(recipe_of_run: Path) -> str | None:
    """The day in the run's own recipe; today where there is none yet.

    None in a run of a version that fixed no day.
    """
    if not recipe_of_run.is_file():
        return date.today().isoformat()
    try:
        known: str | None = read_yaml(recipe_of_run).get("chat_template_date")
    except UserError as error:
        raise UserError(f"{error}; set chat_template_date to the run's day") from None
    return known


def make_objectives(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
    folder: Path | None = None,
) -> Objectives:
    """Makes the objectives of training and of held-out data. All ranks call it.

    `model` still has the weights that training starts with, a method's reference. `inputs`: of
    `fingerprint_inputs`. `folder`: the run's, where it has one.
    """
    facts = recipe.method_facts
    teacher = None
    if recipe.teacher is not None:
        load = partial(load_checked_teacher, recipe, recipe.teacher, world)
        if recipe.method.distill_top_k is not None:
            known = find_stored_teacher(model, recipe, data, inputs, world, load)
            return Objectives(
                *(
                    Distillation(known.get(name, known["training"]))
                    for name in ("training", "held_out")
                )
            )
        teacher = load()
        if not facts.samples:
            return Objectives(Distillation(teacher), Distillation(teacher))
    if facts.samples:
        return make_policy_objectives(model, recipe, data, world, teacher, folder)
    if facts.rows == "answers":
        return make_answer_objectives(recipe, data.tokenizer, data.train.steps)
    if facts.scores:
        scoring = SCORING[facts.rows](recipe, world.sequence_group)
        return Objectives(scoring, scoring.for_evaluation())
    if facts.embeds:
        contrastive = ContrastiveObjective.of(recipe, world.sequence_group)
        return Objectives(contrastive, replace(contrastive, is_held_out=True))
    if facts.needs_reference:
        references = find_references(model, recipe, data, inputs, signals, world)
    else:
        references = None
    group = world.sequence_group
    if facts.rows == "ratings":
        assert references is not None, "ratings are of answers against the reference's"
        keys = recipe.method
        return Objectives(
            *(RatingObjective(keys, reference, sequence_group=group) for reference in references)
        )
    training = PreferenceObjective(
        recipe.method, None, recipe.optimization.label_smoothing, sequence_group=group
    )
    held_out = replace(
        training,
        label_smoothing=0.0,
        chosen_tokens_per_pair=_chosen_tokens_per_pair(data.evaluation),
    )
    if references is None:
        return Objectives(training, held_out)
    return Objectives(
        replace(training, reference=references[0]), replace(held_out, reference=references[1])
    )


def load_checked_teacher(recipe: Recipe, keys: Model, world: World) -> Teacher:
    """The recipe's teacher (or the reference of a method that samples), whose forward is compared
    with its own.
    """
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
    return int(examples.trained[:: examples.group_size].sum(dtype=np.int64)) / max(
        1, examples.groups
    )


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
    phases: Phases,
) -> TrainingRun:
    """The run on this rank; rank 0 opens metrics.jsonl and prints the first screen.

    All ranks call it.

    Raises `UserError` on all ranks where one of the run's files cannot be written, or the tracker
    does not start.
    """
    config: Any = text_config_of(unwrap(model).config)
    if gathers_fp8(world.sharding):
        from finetune.models.fp8 import keep_scales_current  # imports torchao

        keep_scales_current(model, optimizer)
    log, results = open_log(recipe, world, folder, data, progress)
    phases.write_to(log.phase, progress.step)

    # a forward for the vectors of the step, before those with a backward
    embeds = recipe.method_facts.embeds

    def count_flop(length: float) -> float:
        own = flop_per_token_of(
            config, parameters=size.multiplied, length=length, frozen=size.frozen_multiplied
        )
        if embeds:
            again = forward_flop_per_token_of(config, parameters=size.multiplied, length=length)
        else:
            again = 0.0
        return own + again + teacher_flop_per_token(objectives.training, length)

    fp8_share = find_fp8_share(unwrap(model), world.sharding, count_flop(recipe.data.max_length))
    run = TrainingRun(
        recipe=recipe,
        world=world,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        read_batches=partial(read_batches, recipe, world, folder, data, objectives.training, log),
        prompts=tuple(data.held_out_prompts(recipe.run.exact_match_samples)),
        sample_prompts=tuple(
            Prompt(prompt_ids(text, tokenizer), "") for text in recipe.run.sample_prompts
        ),
        model=model,
        optimizer=optimizer,
        objectives=objectives,
        schedule=recipe.optimization.schedule(data.train.steps),
        saver=Saver(
            folder,
            model,
            optimizer,
            world,
            recipe,
            tokenizer,
            inputs,
            objectives.training.describe_files,
            size.carried_bytes,
            phases,
        ),
        log=log,
        phases=phases,
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
    # a state that no checkpoint can keep is said before the first step
    RankGroup(world).on_all(hooks.read_states)
    return run


def open_log(
    recipe: Recipe, world: World, folder: Path, data: PreparedData, progress: Progress
) -> tuple[MetricsLog, dict[str, Any]]:
    """Opens, on the main rank, metrics.jsonl with the display and the trackers, data_report.json
    and the description of the run; the other ranks have a silent log.

    Returns it and, on every rank, what an earlier start has logged of evaluations at this step.
    """
    step = progress.step
    trackers: list[Tracker] = []
    log = MetricsLog(None, data.train.steps, step)

    def start() -> dict[str, Any]:
        nonlocal log
        for name in list_trackers(recipe.run.report_to):
            trackers.append(open_tracker(name, recipe.name, folder, to_dict(recipe), step))
        describe_run(folder, recipe, world)
        if data.report.is_complete:  # a stream is reported while it is read
            write_data_report(folder, data.report.as_json())
        if recipe.labels_are_indices and not recipe.method_facts.samples and data.images is None:
            batches = data.evaluation or data.train
            # what an export is measured on; a stream keeps none
            if isinstance(batches, StoredBatches):
                write_comparison_rows(
                    folder, batches.examples, held_out=data.evaluation is not None
                )
        samples = drop_later_lines(folder / SAMPLES, step)
        drop_later_lines(folder / COMPLETIONS, step)
        log = MetricsLog(folder / METRICS, data.train.steps, step, trackers)
        lines = [
            line
            for line in read_json_lines(folder / METRICS)
            if line is not None and line.get("step") == step
        ]
        results = {
            key: value
            for line in lines
            for key, value in line.items()
            if key in ("eval_loss", "exact_match")
        }
        has_samples = any(
            sample["step"] == step and sample.get("expected") == "" for sample in samples
        )
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
    """This rank's batches from `from_step` (0-based) to the end, those of `profile_steps` under the
    profiler.

    Where the method samples, each is sampled when it is asked for: from the weights after the step
    before.
    """
    if isinstance(objective, PolicyObjective):
        batches = objective.rollouts.batches(from_step, partial(write_completions, folder, log))
    else:
        batches = data.train.batches(from_step, stream_reporter(world, folder, log))
    return profile_steps(batches, recipe.run.profile_steps, folder, world.rank)


def write_completions(folder: Path, log: MetricsLog, lines: list[dict[str, Any]]) -> None:
    """Adds lines to completions.jsonl.

    They are only looked at: a full disk does not end the run.
    """
    try:
        append_json_lines(folder / COMPLETIONS, lines)
    except OSError as error:
        log.say(f"{folder / COMPLETIONS}: cannot be written ({error.strerror}); the run continues")


def stream_reporter(world: World, folder: Path, log: MetricsLog) -> OnReport:
    """Logs what is found in data that is read while training, and keeps data_report.json up to
    date.
    """

    def log_news(report: Report, news: list[str]) -> None:
        for line in news:
            log.say(f"stream  {line}")
        if world.is_main:
            try:
                write_data_report(folder, report.as_json())
            except OSError as error:  # it is only looked at; the next block writes it again
                log.say(
                    f"{error.filename}: cannot be written ({error.strerror}); the run continues"
                )

    return log_news


def prompt_ids(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """The ids of a user's turn, or of messages, up to where the assistant begins; without a
    template, of the text.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


FINISHED = "finished.json"


def leave_ranks(run: TrainingRun, signals: SignalListener, *, is_last: bool) -> None:
    """Ends the tracker and, after the last of several adapters, the process group.

    Raises `Preempted` where a signal has asked to stop meanwhile.
    """
    run.log.close_tracker()
    if is_last:
        leave(run.world)
        must_stop = signals.stop
    else:  # all ranks stop, or none
        must_stop = signals.agree(run.world).stop
    if must_stop:
        raise run.preempted("before the export; all steps are saved")


def finish(run: TrainingRun, progress: Progress) -> None:
    """Exports on rank 0, which needs no other rank: nobody waits in a collective.

    Prints the last screen.
    """
    if not run.world.is_main:
        return
    for line in answers_before_and_after(run.folder / SAMPLES, progress.step):
        run.log.say(line)
    if run.recipe.checkpoint.export_at_end:
        export(run, progress)
    record = _record(run.recipe, run.inputs, progress.step)
    # all of it is done, and exported
    replace_file(run.folder / FINISHED, json.dumps(record, indent=1) + "\n")
    for line in last_screen(
        run.folder, progress.step, has_teacher=run.recipe.method_facts.needs_teacher
    ):
        run.log.say(line)
    run.log.close()


def export(run: TrainingRun, progress: Progress) -> None:
    """Exports the run's last checkpoint, or its best.

    Raises `Preempted` where a signal stops it.
    """
    from finetune.export.export import export_run
    from finetune.export.publish import exit_on_signals

    if run.recipe.checkpoint.keep_best_checkpoint:
        best = progress.best_step
    else:
        best = None
    if best is not None:
        run.log.say(f"best    step {best}, held-out loss {progress.best_eval_loss:.4f}")
    if best is None:
        checkpoint = None
    else:
        checkpoint = step_folder(run.folder, best)
    # not saved, or in the folder that the run was resumed from
    if checkpoint is not None and not checkpoint.is_dir():
        run.log.say(
            f"best    step {best} has no checkpoint in {run.folder}; the newest one is exported"
        )
        checkpoint = None
    try:
        with exit_on_signals():
            export_run(run.folder, checkpoint=checkpoint, log=run.log.say, phases=run.phases)
    except SystemExit as stop:
        number = Signals(int(str(stop.code)) - 128).name
        raise run.preempted(
            f"during the export; all {progress.step} steps are saved", by=number
        ) from None


def is_finished(
    folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int, world: World
) -> bool:
    """Whether this very run is done: same recipe, same inputs, its exports there, and its last
    checkpoint verifies.

    All ranks call it; rank 0 looks, and prints where the results are. `steps`: the schedule's.

    Raises `UserError` where nothing is left to train, but the recipe trains otherwise than the run
    did: it would be described and exported as if it had been trained so.
    """
    is_done: bool = RankGroup(world).on_main(lambda: _is_finished(folder, recipe, inputs, steps))
    if is_done and world.is_main:
        print(f"{folder}: this run is done, there is nothing left to do")
        print(results_line(folder))
    return is_done


def _is_finished(folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int) -> bool:
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return False
    last, newest = checkpoints[-1]
    exports = []
    if recipe.checkpoint.export_at_end:
        if recipe.lora.use_peft:
            exports = ["export", "adapter"]
        else:
            exports = ["export"]
    if read_json_object(folder / FINISHED) == _record(recipe, inputs, last):
        return all((folder / name).is_dir() for name in exports) and not find_damage(newest)
    try:
        is_over = last >= steps or is_out_of_patience(read_progress(newest), recipe.run)
    except ValueError:  # damaged, and passed over when the run resumes
        is_over = False
    # the checkpoint of a run that continues is read once, by `find_start`
    if is_over and not find_damage(newest):
        _refuse_other_training(folder, recipe, inputs, newest)
    return False


def _refuse_other_training(
    folder: Path, recipe: Recipe, inputs: Mapping[str, str], newest: Path
) -> None:
    """Raises `UserError` where `recipe` trains otherwise than the run whose last checkpoint is
    `newest`.
    """
    deciding, other = compare_to_saved(read_state(newest), recipe, inputs)
    changed = [
        change
        for change in other
        if recipe_keys()[re.split(r"\W", change)[0]].section == "optimization"
    ]
    if changed and not deciding:  # those are refused, or taken, by `find_start`
        raise UserError.of(
            [
                (
                    f"{folder}: this run is finished, nothing is left to train, and its recipe has "
                    "changed since:"
                ),
                *(f"  {change}" for change in changed),
                "set another output_dir to train with it, or set it back",
            ]
        )


def _record(recipe: Recipe, inputs: Mapping[str, str], step: int) -> dict[str, Any]:
    return {"step": step, "recipe_sha256": hash_recipe(to_dict(recipe)), "inputs": dict(inputs)}
