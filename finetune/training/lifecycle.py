"""How a run starts (folder, objectives, log, first screen) and how it ends (export, last screen,
finished.json).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from finetune.checkpoint.folders import list_checkpoints, lock_run, step_folder
from finetune.checkpoint.manifest import Progress, hash_recipe, read_state
from finetune.checkpoint.resume import (
    compare_to_saved,
    find_key,
    list_starts,
    read_progress,
    refuse_damaged_model,
)
from finetune.checkpoint.save import Saver
from finetune.checkpoint.verify_shares import find_damage_together
from finetune.config.layout import gathers_fp8
from finetune.config.pretrained import text_config_of
from finetune.config.reader import to_dict
from finetune.config.schema import Model, Recipe, recipe_keys
from finetune.config.yaml_file import read_yaml
from finetune.data.batches import StepBatch
from finetune.data.data_report import OnReport, Report
from finetune.data.examples import Prompt
from finetune.data.messages import BadRow, Message, read_content
from finetune.data.packing import StoredBatches
from finetune.data.prepare import PreparedData
from finetune.data.tokenizer import apply_template, asks_for_date, encode_plain, make_renderer
from finetune.distributed.join import leave
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.export.merge_choice import write_comparison_rows
from finetune.files.durable import (
    hash_json,
    replace_file,
    restore_exports,
    restore_folder,
    try_writing,
)
from finetune.files.json_files import append_json_lines, read_json_lines, read_json_object
from finetune.files.phases import Phases
from finetune.files.run_files import drop_later_lines, readable_lines
from finetune.flops import count_token_passes, flop_per_token_of, forward_flop_per_token_of
from finetune.models.load import ModelSize, Teacher, load_teacher
from finetune.models.probe import check_training_forward
from finetune.training.callbacks import Hooks, list_trackers, open_tracker
from finetune.training.evaluate import SAMPLES
from finetune.training.loop import is_out_of_patience
from finetune.training.metrics import MetricsLog, find_fp8_share, peak_flops
from finetune.training.objectives.answers import make_answer_objective
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
from finetune.training.reference import Reference, StoredReference, find_references
from finetune.training.screens import (
    answers_before_and_after,
    first_screen,
    last_screen,
    results_line,
)
from finetune.training.training_run import (
    COMPLETIONS,
    DATA_REPORT,
    METRICS,
    RECIPE,
    TrainingRun,
    describe_run,
    refuse_unwritable,
    write_data_report,
)
from finetune.training.watch import SignalListener, Watchdog, profile_steps


def open_run_folder(recipe: Recipe, world: World) -> Path:
    """Makes the run's folder (`output_dir`, else runs/<run_name>), and locks it against other runs.

    Rank 0 makes the folder; all ranks call this and return it. Raises `UserError` on all ranks if
    the folder cannot be written, if another run has locked it, or if a model of the recipe is a
    damaged checkpoint.
    """
    folder = recipe.folder
    RankGroup(world).on_main(lambda: _open_folder(folder, recipe))
    refuse_damaged_model(recipe, world)
    return folder


def _open_folder(folder: Path, recipe: Recipe) -> None:
    """Does the work of `open_run_folder`, on rank 0.

    Restores exports that a killed process was replacing: the run's own, and the recipe's model.
    """
    with refuse_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
        restore_exports(folder)
    if recipe.model.model_name_or_path is not None:
        restore_folder(Path(recipe.model.model_name_or_path))


def try_folder(recipe: Recipe, world: World) -> None:
    """Raises `UserError` on all ranks if the run's folder cannot be made or written.

    Leaves no folder or file behind. All ranks call it.
    """

    def try_folder_on_main() -> None:
        with refuse_unwritable(recipe.folder):
            try_writing(recipe.folder)

    RankGroup(world).on_main(try_folder_on_main)


def fix_template_date(recipe: Recipe, folder: Path, tokenizer: Any, world: World) -> Recipe:
    """Sets `chat_template_date` to the day on which the run first started, if the recipe sets none
    and a chat template writes the date; returns the recipe. A reward model's template may.

    With the current date, ranks that tokenize around midnight would differ, and a run resumed the
    next day would train on another text.
    """
    may_ask = asks_for_date(tokenizer) or bool(recipe.rollout.reward_models)
    if recipe.data.chat_template_date is not None or not may_ask:
        return recipe
    template = hash_json(tokenizer.chat_template)
    resume_from = recipe.checkpoint.resume_from_checkpoint
    day = RankGroup(world).on_main(lambda: _find_first_day(folder, resume_from, template))
    return replace(recipe, data=replace(recipe.data, chat_template_date=day))


def _find_first_day(folder: Path, resume_from: str, template: str) -> str | None:
    """Returns the day in the recipe.yaml of a run's folder, else in the newest readable checkpoint
    from which the run may resume; today if there is no such checkpoint, or if it has no day and was
    saved under another template.

    A script's session writes no recipe.yaml. In a run that has yet to start from a checkpoint of
    another folder, recipe.yaml does not count. Returns None if an older version saved the
    checkpoint, without a day.

    Args:
        folder: The run's folder.
        resume_from: The recipe's `resume_from_checkpoint`.
        template: The hash of the chat template, as `fingerprint_inputs` returns it.
    """
    starts: list[Path] = []
    with suppress(UserError):  # `find_resume_checkpoint` raises it
        starts = list_starts(resume_from, folder)
    run_recipe = folder / RECIPE
    starts_elsewhere = bool(starts) and not list_checkpoints(folder)
    if run_recipe.is_file() and not starts_elsewhere:
        try:
            first_day: str | None = read_yaml(run_recipe).get("chat_template_date")
        except UserError as error:
            raise UserError(f"{error}; set chat_template_date to the run's day") from None
        if first_day is not None:  # else the run's template did not ask for a date
            return first_day
    today = date.today().isoformat()
    day: str | None = today
    for checkpoint in starts:
        with suppress(ValueError):  # damaged
            state = read_state(checkpoint)
            is_same = state.get("inputs", {}).get("chat_template") in (None, template)
            day = state["recipe"].get("chat_template_date") or (None if is_same else today)
    return day


def make_objectives(
    model: nn.Module,
    recipe: Recipe,
    data: PreparedData,
    inputs: Mapping[str, str],
    signals: SignalListener,
    world: World,
    folder: Path | None = None,
) -> Objectives:
    """Makes the objectives of training and of held-out data for the recipe's method.

    All ranks call it. It loads the teacher and computes the reference, if the method needs them.

    Args:
        model: The model with the weights that training starts from: some methods compare with it.
        recipe: The recipe, which names the method.
        data: The run's data.
        inputs: The fingerprints that `fingerprint_inputs` returned.
        signals: A signal may stop the computation of a reference, or of a stored teacher.
        world: The ranks of the run.
        folder: The run's folder; None if it has none.
    """
    facts = recipe.method_facts
    if recipe.teacher is not None and recipe.method.distill_top_k is not None:
        load = partial(load_checked_teacher, recipe, recipe.teacher, world)
        stored = find_stored_teacher(model, recipe, data, inputs, signals, world, load)
        training = stored["training"]
        held_out = stored.get("held_out", training)  # without held-out data, never measured
        return Objectives(Distillation(training), Distillation(held_out))
    if facts.samples:
        teacher = None
        if recipe.teacher is not None:
            teacher = load_checked_teacher(recipe, recipe.teacher, world)
        return make_policy_objectives(model, recipe, data, world, teacher, folder)
    if recipe.teacher is None and facts.rows == "answers":
        return Objectives.of(make_answer_objective(recipe, data.tokenizer, data.train.steps))
    if recipe.teacher is not None or not facts.writes_text:
        return Objectives.of(make_objective_of_any_rows(recipe, world))
    references: tuple[Reference | None, Reference | None] = (None, None)
    if facts.needs_reference:
        references = find_references(model, recipe, data, inputs, signals, world)
    return _make_preference_objectives(recipe, data, references, world.sequence_group)


def make_objective_of_any_rows(recipe: Recipe, world: World) -> Objective:
    """Makes the objective of training of a method that needs nothing but rows: no reference, no
    stored tokens of a teacher, no samples. It is not for answers without a teacher.

    All ranks call it. It loads the teacher, if the method has one.
    """
    facts = recipe.method_facts
    if recipe.teacher is not None:
        return Distillation(load_checked_teacher(recipe, recipe.teacher, world))
    if facts.scores:
        return SCORING[facts.rows](recipe, world.sequence_group)
    if facts.embeds:
        return ContrastiveObjective.of(recipe, world.sequence_group)
    return PreferenceObjective(
        recipe.method,
        None,
        recipe.optimization.label_smoothing,
        sequence_group=world.sequence_group,
    )


def _make_preference_objectives(
    recipe: Recipe,
    data: PreparedData,
    references: tuple[Reference | None, Reference | None],
    sequence_group: ProcessGroup | None,
) -> Objectives:
    """Makes the objectives of a method that learns from pairs or from ratings.

    `references`: of the training data and of the held-out data; None if the method needs none.
    """
    keys = recipe.method
    for_training, for_held_out = references
    if recipe.method_facts.rows == "ratings":
        assert for_training is not None and for_held_out is not None
        rating = RatingObjective(keys, for_training, sequence_group=sequence_group)
        return Objectives(rating, replace(rating, reference=for_held_out))
    training = PreferenceObjective(
        keys, for_training, recipe.optimization.label_smoothing, sequence_group=sequence_group
    )
    held_out = replace(
        training,
        reference=for_held_out,
        label_smoothing=0.0,
        chosen_tokens_per_pair=_mean_chosen_tokens(data.evaluation),
    )
    return Objectives(training, held_out)


def load_checked_teacher(recipe: Recipe, keys: Model, world: World) -> Teacher:
    """Loads the recipe's teacher, or the reference of a method that samples; checks its forward.

    `keys`: the recipe's `teacher`, the keys by which this second model is loaded.

    Raises `UserError` if the model cannot be loaded, or if its forward differs from transformers'
    own.
    """
    try:
        teacher = load_teacher(recipe, world)
        check_training_forward(teacher.model, keys, recipe.data, world)
    except UserError as error:
        raise UserError(f"{recipe.teacher_key}: {error}") from error
    return teacher


def _runs_reference(recipe: Recipe, objective: Objective) -> bool:
    """Whether each step runs the model without its adapters on all tokens, as the reference."""
    if recipe.has_reference:  # with a critic it is run once for several steps
        return recipe.teacher is None and not recipe.method_facts.has_critic
    reference = getattr(objective, "reference", None)
    return reference is not None and not isinstance(reference, StoredReference)


def _mean_chosen_tokens(batches: StoredBatches | None) -> float | None:
    """Computes the mean number of trained tokens in a chosen answer; None without `batches`."""
    if batches is None:
        return None
    examples = batches.examples
    trained_of_chosen = examples.trained[:: examples.group_size]  # the first of each group
    return int(trained_of_chosen.sum(dtype=np.int64)) / max(1, examples.groups)


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
    saver: Saver,
    progress: Progress,
    inputs: Mapping[str, str],
    hooks: Hooks,
    phases: Phases,
) -> TrainingRun:
    """Makes this rank's `TrainingRun`. Rank 0 also opens metrics.jsonl and prints the first screen.

    All ranks call it.

    Raises `UserError` on all ranks if a file of the run cannot be written, if a tracker does not
    start, or if a checkpoint could not keep a callback's state.
    """
    config: Any = text_config_of(unwrap(model).config)
    if gathers_fp8(world.sharding):
        from finetune.models.fp8 import keep_scales_current  # imports torchao

        keep_scales_current(model, optimizer)
    log, results = open_log(recipe, world, folder, data, progress)
    phases.write_to(log.write_phase, progress.step)

    facts = recipe.method_facts
    passes = count_token_passes(
        are_rated=facts.rows == "ratings",
        # of an embedding method: GradCache's forward of all texts
        measures_all=facts.embeds or _runs_reference(recipe, objectives.training),
        of_generation=recipe.generation_forwards,
    )

    def count_flop(length: float) -> float:
        """Counts the FLOP of a step for one token in a document of `length` tokens, as a mean over
        tokens, including a teacher's forward.
        """
        parameters = size.multiplied
        training = flop_per_token_of(
            config, parameters=parameters, length=length, frozen=size.frozen_multiplied
        )
        forward = forward_flop_per_token_of(config, parameters=parameters, length=length)
        own = passes.trained * training + passes.measured * forward
        teacher = teacher_flop_per_token(objectives.training, length)
        return own + recipe.teacher_passes * teacher

    whole_row_flop = count_flop(recipe.data.max_length)
    fp8_share = find_fp8_share(unwrap(model), world.sharding, whole_row_flop, passes)
    run = TrainingRun(
        recipe=recipe,
        world=world,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        read_batches=partial(read_batches, recipe, world, folder, data, objectives.training, log),
        prompts=tuple(data.held_out_prompts(recipe.run.exact_match_samples)),
        sample_prompts=tuple(
            Prompt(encode_prompt(text, tokenizer, recipe.data.chat_template_date), "")
            for text in recipe.run.sample_prompts
        ),
        model=model,
        optimizer=optimizer,
        objectives=objectives,
        schedule=recipe.optimization.schedule(data.train.steps),
        saver=saver,
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
    if recipe.run.exact_match_samples and not run.prompts:
        log.say(
            "exact_match_samples: nothing is answered, since no held-out example has a prompt and "
            "all of its answer; raise max_length, or hold out other rows"
        )
    ranks = RankGroup(world)
    ranks.on_all(lambda: hooks.load_states(progress))
    # Raises at the start, instead of at the first save, if a checkpoint could not keep a state.
    ranks.on_all(hooks.read_states)
    return run


def open_log(
    recipe: Recipe, world: World, folder: Path, data: PreparedData, progress: Progress
) -> tuple[MetricsLog, dict[str, Any]]:
    """Opens the log of metrics, and writes the files that describe the run. All ranks call it.

    Rank 0 does both, and its log has the display and the trackers. The other ranks get a log that
    writes and shows nothing.

    Returns:
        The log, and the results of evaluations at this step that an earlier start of the run has
        logged, on every rank.
    """
    step = progress.step
    log = MetricsLog(None, data.train.steps, step)

    def open_on_main() -> dict[str, Any]:
        nonlocal log
        # first, because a tracker that does not start ends the run
        trackers = [
            open_tracker(name, recipe.name, folder, to_dict(recipe), step)
            for name in list_trackers(recipe.run.report_to)
        ]
        describe_run(folder, recipe, world)
        if data.report.is_complete:  # else `make_stream_reporter` writes it while the data is read
            write_data_report(folder, data.report.as_json())
        _keep_comparison_rows(folder, recipe, data)
        drop_later_lines(folder / SAMPLES, step)
        drop_later_lines(folder / COMPLETIONS, step)
        log = MetricsLog(folder / METRICS, data.train.steps, step, trackers)
        return _find_results(
            read_json_lines(folder / METRICS), read_json_lines(folder / SAMPLES), step
        )

    results: dict[str, Any] = RankGroup(world).on_main(open_on_main)
    return log, results


def _keep_comparison_rows(folder: Path, recipe: Recipe, data: PreparedData) -> None:
    """Writes the rows on which the export will be compared with the model before training.

    Writes none if the data is streamed or has images, if the method samples, or if its labels are
    not outputs of the head.
    """
    predicts_tokens = recipe.labels_are_indices and not recipe.method_facts.samples
    batches = data.evaluation or data.train
    if predicts_tokens and data.images is None and isinstance(batches, StoredBatches):
        write_comparison_rows(folder, batches.examples, held_out=data.evaluation is not None)


def _find_results(
    metrics: Iterable[dict[str, Any] | None], samples: Iterable[dict[str, Any] | None], step: int
) -> dict[str, Any]:
    """Finds the results of evaluations at `step` that were logged before.

    Args:
        metrics: The lines of metrics.jsonl; None for a line that cannot be read.
        samples: The lines of samples.jsonl, likewise.
        step: The step.

    Returns:
        "eval_loss" and "exact_match" -> the number; "sample_prompts" -> True. Only what was logged.
    """
    results: dict[str, Any] = {}
    for line in readable_lines(metrics):
        if line.get("step") == step:
            results |= {key: line[key] for key in ("eval_loss", "exact_match") if key in line}
    for sample in readable_lines(samples):
        # only answers to sample_prompts have no expected answer
        if sample.get("step") == step and sample.get("expected") == "":
            results["sample_prompts"] = True
    return results


def read_batches(
    recipe: Recipe,
    world: World,
    folder: Path,
    data: PreparedData,
    objective: Objective,
    log: MetricsLog,
    from_step: int,
) -> Iterator[StepBatch]:
    """Yields this rank's training batches from `from_step` (0-based) to the end of the schedule.

    The profiler records the recipe's `profile_steps`. If the method samples, a batch is made only
    when the loop asks for it, because the model in training writes its completions.
    """
    if isinstance(objective, PolicyObjective):
        batches = objective.rollouts.batches(from_step, partial(write_completions, folder, log))
    else:
        batches = data.train.batches(from_step, make_stream_reporter(world, folder, log))
    return profile_steps(batches, recipe.run.profile_steps, folder, world.rank)


def write_completions(folder: Path, log: MetricsLog, lines: list[dict[str, Any]]) -> None:
    """Appends lines to completions.jsonl. A failed write does not end the run, because only people
    read this file.
    """
    with log.report_unwritable(folder / COMPLETIONS):
        append_json_lines(folder / COMPLETIONS, lines)


def make_stream_reporter(world: World, folder: Path, log: MetricsLog) -> OnReport:
    """Makes the function that is called with new findings about streamed data: it logs them, and
    keeps data_report.json up to date.
    """

    def log_news(report: Report, news: list[str]) -> None:
        for line in news:
            log.say(f"stream  {line}")
        if world.is_main:
            with log.report_unwritable(folder / DATA_REPORT):
                write_data_report(folder, report.as_json())

    return log_news


def encode_prompt(
    prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any, date: str | None = None
) -> list[int]:
    """Encodes a prompt in the chat template, up to where the assistant's answer begins.

    Args:
        prompt: A user's turn as text, or messages. Without a chat template it must be text, which
            is encoded as it is.
        tokenizer: The tokenizer.
        date: What the template writes as today's, such as 2026-01-31; None: today.

    Raises:
        UserError: The prompt cannot be read, or the chat template rejects it.
    """
    try:
        messages = _read_prompt(prompt)
        if tokenizer.chat_template is None:
            if not isinstance(prompt, str):
                raise BadRow("the tokenizer has no chat template for messages; set chat_template")
            return encode_plain(tokenizer, prompt)
        renderer = make_renderer(tokenizer, assistant_only=True, date=date)
        text = apply_template(renderer, messages, add_generation_prompt=True)
    except BadRow as error:
        raise UserError(f"the prompt {str(prompt)[:100]!r}: {error}") from None
    return list(tokenizer.encode(text, add_special_tokens=False))


def _read_prompt(prompt: Any) -> list[Message]:
    """Reads a prompt, which is a user's turn as text or messages, as messages for a chat template.

    A content of parts is joined to a text, as in a row of data. Raises `BadRow` if the prompt is
    something else, or has an image.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise BadRow("a text or a list of messages is expected, each with role and content")
    messages = [dict(turn) for turn in prompt]
    images: list[Any] = []
    for number, message in enumerate(messages, 1):
        if isinstance(message.get("content"), list):
            role = message.get("role", "user")
            message["content"] = read_content(message["content"], role, number, images)
    if images:
        raise BadRow("has an image, which is not read here; finetune.chat(...).ask reads images")
    return messages


FINISHED = "finished.json"  # in the run's folder once the run is done; `_make_record` describes it


def leave_ranks(run: TrainingRun, signals: SignalListener, *, is_last: bool) -> None:
    """Closes the trackers and, if this is the last of the recipe's adapters, the process group.

    Raises `Preempted` if a signal has asked to stop.
    """
    run.log.close_trackers()
    if is_last:
        leave(run.world)
        must_stop = signals.stop  # each rank decides alone: there is no group to agree in
    else:  # the next adapter needs all ranks: all of them stop, or none
        must_stop = signals.agree(run.world).stop
    if must_stop:
        raise run.preempted("before the export; all steps are saved")


def finish(run: TrainingRun, progress: Progress) -> None:
    """Exports the run, writes finished.json and prints the last screen.

    Only rank 0 does this; the process group is closed already.
    """
    if not run.world.is_main:
        return
    for line in answers_before_and_after(run.folder / SAMPLES, progress.step):
        run.log.say(line)
    if run.recipe.checkpoint.export_at_end:
        export(run, progress)
    record = _make_record(run.recipe, run.inputs, progress.step)
    replace_file(run.folder / FINISHED, json.dumps(record, indent=1) + "\n")
    for line in last_screen(
        run.folder, progress.step, has_teacher=run.recipe.method_facts.needs_teacher
    ):
        run.log.say(line)
    run.log.close()


def export(run: TrainingRun, progress: Progress) -> None:
    """Exports the run's best checkpoint if the run keeps it, else the newest.

    Raises `Preempted` if a signal stops the export.
    """
    from finetune.export.export import export_run
    from finetune.export.publish import exit_on_signals

    checkpoint = _find_best(run, progress)
    try:
        with exit_on_signals():
            export_run(run.folder, checkpoint=checkpoint, log=run.log.say, phases=run.phases)
    except SystemExit as stop:
        # `exit_on_signals` exits with 128 + the signal's number
        signal_name = Signals(int(str(stop.code)) - 128).name
        raise run.preempted(
            f"during the export; all {progress.step} steps are saved", by=signal_name
        ) from None


def _find_best(run: TrainingRun, progress: Progress) -> Path | None:
    """Finds the checkpoint of the step with the lowest held-out loss, and logs that step.

    Returns None if the run keeps no best checkpoint, or if this one is not in the run's folder.
    """
    best = progress.best_step
    if best is None or not run.recipe.checkpoint.keep_best_checkpoint:
        return None
    run.log.say(f"best    step {best}, held-out loss {progress.best_eval_loss:.4f}")
    checkpoint = step_folder(run.folder, best)
    if checkpoint.is_dir():
        return checkpoint
    # it was not saved, or it is in another folder, from which the run was resumed
    run.log.say(
        f"best    step {best} has no checkpoint in {run.folder}; the newest one is exported"
    )
    return None


def is_finished(
    folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int, world: World
) -> bool:
    """Whether this run is done already: finished.json has the same recipe and inputs, the exports
    exist, and the last checkpoint is not damaged.

    All ranks call it. Rank 0 looks, and prints where the results are if the run is done.

    `steps`: the number of steps in the schedule.

    Raises `UserError` if all steps are trained but keys of optimization have changed since: the
    export would be described by keys that it was not trained with.
    """
    ranks = RankGroup(world)
    end = ranks.on_main(lambda: _find_end(folder, recipe, inputs, steps))
    # Verified only here: if steps are left to train, `find_resume_checkpoint` verifies it.
    if end is None or find_damage_together(Path(end["checkpoint"]), world):
        return False
    if not end["is_recorded"]:
        ranks.on_main(
            lambda: _refuse_other_training(folder, recipe, inputs, Path(end["checkpoint"]))
        )
        return False
    if world.is_main:
        print(f"{folder}: this run is done, there is nothing left to do")
        print(results_line(folder))
    return True


def _find_end(
    folder: Path, recipe: Recipe, inputs: Mapping[str, str], steps: int
) -> dict[str, Any] | None:
    """Finds the last checkpoint of a run that has no step left to train; None if it has some, or
    if its exports are missing.

    Returns {"checkpoint": its path, "is_recorded": whether finished.json is of this recipe and
    these inputs}. The checkpoint is not verified.
    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    last_step, newest = checkpoints[-1]
    is_recorded = read_json_object(folder / FINISHED) == _make_record(recipe, inputs, last_step)
    if is_recorded:
        is_over = _has_exports(folder, recipe)
    else:
        try:
            is_over = last_step >= steps or is_out_of_patience(read_progress(newest), recipe.run)
        except ValueError:  # the checkpoint is damaged: a run that resumes takes an older one
            is_over = False
    return {"checkpoint": str(newest), "is_recorded": is_recorded} if is_over else None


def _has_exports(folder: Path, recipe: Recipe) -> bool:
    """Whether the run's folder has every export that the recipe asks for."""
    if not recipe.checkpoint.export_at_end:
        return True
    has_adapter = not recipe.lora.use_peft or (folder / "adapter").is_dir()
    return has_adapter and (folder / "export").is_dir()


def _refuse_other_training(
    folder: Path, recipe: Recipe, inputs: Mapping[str, str], newest: Path
) -> None:
    """Raises `UserError` if keys of optimization have changed since the run saved `newest`, its
    last checkpoint.

    Does nothing if the changes make this another run: `find_resume_checkpoint` handles those.
    """
    to_another_run, harmless = compare_to_saved(read_state(newest), recipe, inputs)
    if to_another_run:
        return
    changed = [
        change for change in harmless if recipe_keys()[find_key(change)].section == "optimization"
    ]
    if changed:
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


def _make_record(recipe: Recipe, inputs: Mapping[str, str], step: int) -> dict[str, Any]:
    """Makes the content of finished.json, for a run that is done and exported at `step`."""
    return {"step": step, "recipe_sha256": hash_recipe(to_dict(recipe)), "inputs": dict(inputs)}
