"""What a training run works with, as one value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.data.batches import OnReport
from finetune.data.checks import check_longest_example
from finetune.data.data_report import Report
from finetune.data.examples import Prompt
from finetune.data.prepare import PreparedData
from finetune.distributed.collective import RankGroup
from finetune.distributed.parallelize import count_wrapped_units, unwrap
from finetune.distributed.world import World
from finetune.durable import replace_file
from finetune.flops import flop_per_token_of
from finetune.metrics import MetricsLog, peak_flops
from finetune.models.load import Size
from finetune.optim.build import Schedule, build_schedule
from finetune.progress import Progress
from finetune.recipe.reader import as_written
from finetune.recipe.schema import Recipe
from finetune.trackers import Tracker, open_tracker
from finetune.training.run_folder import describe_run, run_name
from finetune.training.watchdog import Watchdog
from finetune.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A model on its ranks, the data, and where the run is written down."""

    recipe: Recipe
    world: World
    folder: Path
    tokenizer: Any
    data: PreparedData
    prompts: tuple[Prompt, ...]  # held out, to be answered before and after training
    sample_prompts: tuple[Prompt, ...]  # the recipe's, to be answered at every evaluation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    log: MetricsLog
    inputs: Mapping[str, str]  # fingerprints of what the recipe names
    watchdog: Watchdog
    flop_per_token: float
    peak_flops: float | None  # per second and device; None where it is not known


def assemble(
    recipe: Recipe,
    world: World,
    folder: Path,
    tokenizer: Any,
    data: PreparedData,
    model: nn.Module,
    size: Size,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    inputs: Mapping[str, str],
) -> TrainingRun:
    """The run of this rank; rank 0 opens metrics.jsonl and tells what is about to be done."""
    config: Any = unwrap(model).config
    run = TrainingRun(
        recipe=recipe,
        world=world,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        prompts=tuple(data.held_out_prompts(recipe.run.exact_match_samples)),
        sample_prompts=tuple(Prompt(turn_of_user(text, tokenizer), "") for text in recipe.run.sample_prompts),
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(recipe.optimization, data.train.steps),
        log=open_log(recipe, world, folder, data, progress),
        inputs=inputs,
        watchdog=Watchdog(world.rank, recipe.run.timeout_seconds),
        flop_per_token=flop_per_token_of(
            config, parameters=size.multiplied, length=recipe.data.max_length, frozen_base=recipe.lora.use_peft
        ),
        peak_flops=peak_flops(world.device),
    )
    for line in opening(run, size, progress):
        run.log.say(line)
    return run


def open_log(recipe: Recipe, world: World, folder: Path, data: PreparedData, progress: Progress) -> MetricsLog:
    """On the main rank, metrics.jsonl with the display and the tracker, data_report.json and the description of the run; nothing
    on the others.

    Raises `UserError` on all ranks where one of the files cannot be written, or the tracker does not start.
    """
    tracker: Tracker | None = None
    log = MetricsLog(None, data.train.steps, progress.step)

    def start() -> None:
        nonlocal tracker, log
        tracker = open_tracker(recipe.run.report_to, run_name(recipe), folder, as_written(recipe), progress.step)
        describe_run(folder, recipe, world)
        if data.report.is_complete:  # a stream is reported while it is read
            write_data_report(folder, data.report.as_json())
        log = MetricsLog(folder / "metrics.jsonl", data.train.steps, progress.step, tracker)

    RankGroup(world).main(start)
    return log


def write_data_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes data_report.json, in place of one that is there; `finetune report` may be reading it."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=str)
    replace_file(folder / "data_report.json", text + "\n")


def stream_reporter(run: TrainingRun) -> OnReport:
    """Logs what is found in data that is read while training, and keeps data_report.json up to date."""

    def log_news(report: Report, news: list[str]) -> None:
        for line in news:
            run.log.say(f"stream  {line}")
        if run.world.is_main:
            try:
                write_data_report(run.folder, report.as_json())
            except OSError as error:  # it is only looked at; the next block writes it again
                run.log.say(f"{error.filename}: cannot be written ({error.strerror}); the run continues")

    return log_news


def turn_of_user(text: str, tokenizer: Any) -> list[int]:
    """The ids of `text` as a user's turn, up to where the assistant begins; as it is where there is no chat template."""
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)
    return list(ids)


def opening(run: TrainingRun, size: Size, progress: Progress) -> list[str]:
    """The first screen of a run."""
    sharding, world, recipe = run.world.sharding, run.world, run.recipe
    model: Any = unwrap(run.model)
    name = type(model).__name__.removeprefix("FSDP")  # FSDP2 changes the class
    units = ", ".join(
        f"{count} {name}" for name, count in count_wrapped_units(run.model, world).items() if name in _layers(model)
    )
    layout = {"fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP", "single": "one process"}[sharding.layout]
    lines = [
        f"{run.folder}: {recipe.path} under {sharding.source}, {counted(world.size, 'rank')} on {world.device.type}",
        f"model   {name}, {size.total:,} parameters, {size.trained:,} trained"
        + (f" (LoRA r={recipe.lora.lora_r})" if recipe.lora.use_peft else ""),
        f"layout  {layout}" + (f" {sharding.strategy}, wrapped {units}" if units else "") + f"; {precision(run)}; "
        f"activation checkpointing {'on' if sharding.activation_checkpointing else 'off'}",
        f"batch   {run.data.train.config.global_batch_size} rows of up to {recipe.data.max_length} tokens a step, "
        f"{_steps_an_epoch(run.data)} steps an epoch, {run.data.train.steps:,} in all",
    ]
    report = run.data.report
    positions = getattr(model.config, "max_position_embeddings", None)
    lines += [f"        {line}" for line in check_longest_example(report.longest, positions)]
    totals, *warnings = report.lines()
    lines += [f"data    {totals}", *(f"        {warning}" for warning in warnings)]
    if run.peak_flops is not None:
        lines.append(
            f"mfu     {4 if recipe.lora.use_peft else 6}N + 12 L H Q T = {run.flop_per_token / 1e9:.2f} GFLOP a token, "
            f"of {run.peak_flops / 1e12:.0f} TFLOP/s dense bf16 a device"
        )
    lines += [f"watch   {run.log.watch}"] if run.log.watch else []
    return [*lines, f"resumed at step {progress.step}"] if progress.step else lines


def precision(run: TrainingRun) -> str:
    """The type that is computed in, and those of the parameters as they are in memory."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    trained = next(short[p.dtype] for p in run.model.parameters() if p.requires_grad)
    frozen = next((short[p.dtype] for p in run.model.parameters() if not p.requires_grad), None)
    mixed = run.world.sharding.mixed_precision
    computed = mixed if mixed != "no" else frozen or trained
    if frozen is not None:
        return f"{computed} over {frozen} frozen weights and {trained} adapters"
    return computed if computed == trained else f"{computed} over {trained} weights"


def _steps_an_epoch(data: PreparedData) -> str:
    steps = data.train.steps_per_epoch
    return "streamed, no known" if steps is None else f"{steps:,}"


def _layers(model: nn.Module) -> set[str]:
    return set(getattr(model, "_no_split_modules", None) or ())
