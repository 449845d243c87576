"""What a run prints: its plan, its first and last screen, and an explanation if memory runs out.

A function that describes a part of a screen returns the part's lines (list[str]), none if there is
nothing to say, or a text that stands within a line (str).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.attention import current_flash_attention_impl

from finetune.checkpoint.manifest import Progress
from finetune.config.compatibility import find_problems
from finetune.config.facts import MachineFacts, ModelFacts, attends_by_mask
from finetune.config.methods import DEFAULT_METHOD, describe_method
from finetune.config.pretrained import find_adapter, read_facts, read_positions
from finetune.config.quantization import describe_quantization
from finetune.config.reader import to_dict
from finetune.config.schema import Quantization, Recipe
from finetune.constants import ADAPTER_CONFIG
from finetune.data.findings import check_longest_example
from finetune.data.prepare import PreparedData
from finetune.distributed.model_parts import decoder_layers, local_part, unwrap
from finetune.distributed.parallelize import count_wrapped_units
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files.json_files import read_json_lines, read_json_object
from finetune.files.phases import OVERLAPPING, PHASES, seconds_by_phase
from finetune.files.run_files import find_divergence, losses_of
from finetune.models.carried import describe_carried
from finetune.models.cpu_products import describe_products
from finetune.models.documents import find_missing_flash_package
from finetune.models.fake_quantize import find_quantizable
from finetune.models.load import ModelSize, Teacher
from finetune.models.quantized_layers import CODES, SCALES, QuantizedLinear, quantized_layers
from finetune.optim.offload import OffloadedOptimizer, check_scratch_folder
from finetune.plan.activations import attends_in_blocks, copies_attention_output, needs_masks
from finetune.plan.advice import list_changes
from finetune.plan.peaks import find_peak
from finetune.plan.plan import Plan, format_plan, make_plan
from finetune.plan.run_spec import RunSpec
from finetune.report.run_data import plan_run, read_run
from finetune.training.metrics import DIVERGED_ADVICE
from finetune.training.objectives.distill import StoredTeacher
from finetune.training.objectives.objective import Objective
from finetune.training.training_run import COMPLETIONS, METRICS, TrainingRun
from finetune.units import counted, disk_size, duration, gib

SHOWN_ANSWERS = 5  # at most this many held-out questions are shown after training
SHOWN_CHARACTERS = 60  # questions and answers are cut to this length
ROUNDING_DIVERGENCE = 1e-6  # nats a token: a divergence up to this may come from rounding alone
SHOWN_UNREACHED = 3  # at most this many modules are named that no row reaches
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def first_screen(run: TrainingRun, size: ModelSize, progress: Progress) -> list[str]:
    """Returns the lines that a run prints before its first step."""
    world = run.world
    recipe = run.recipe
    model: Any = unwrap(run.model)
    facts = read_facts(model.config, recipe.model.model_name_or_path)
    lines = [
        f"{run.folder}: {recipe.path} under {world.sharding.source}, {counted(world.size, 'rank')} "
        f"on {world.device.type}",
        *_describe_parameters(recipe, size, _name_class(model)),
        *_describe_layout(run),
        *_describe_batch(run),
        *(f"note    {note}" for note in _list_notes(recipe, world, run.data, facts)),
        *describe_offload(run.optimizer),
        *describe_quantized(model, recipe.quantization),
        *describe_rounding(model, recipe),
        *describe_teacher(run.objectives.training, count_longest(run)),
        *_describe_data(run),
        *_describe_flop(run),
    ]
    if run.log.watch:
        lines.append(f"watch   {run.log.watch}")
    if progress.step:
        lines.append(f"resumed at step {progress.step}")
    return lines


def _name_class(module: nn.Module) -> str:
    """Returns the name of a module's class, without FSDP2's prefix."""
    return type(module).__name__.removeprefix("FSDP")


def _describe_parameters(recipe: Recipe, size: ModelSize, class_name: str) -> list[str]:
    """Describes the model's parameters, which of them are trained, and by which method."""
    active = ""
    if size.active < size.total:
        active = f"{size.active:,} active, "
    trained = f"{active}{size.trained:,} trained{describe_trained(recipe)}"
    lines = [f"model   {class_name}, {size.total:,} parameters, {trained}"]
    if recipe.model.drop_vision:
        lines.append("        without its checkpoint's vision tower: the export takes no images")
    lines += describe_unreached(size)
    if size.carried:
        lines.append(f"        {describe_carried(size.carried, class_name)}")
    lines += describe_adapter(recipe)
    if recipe.method.method != DEFAULT_METHOD:
        lines.append(f"method  {describe_method(to_dict(recipe))}")
    return lines


def _describe_layout(run: TrainingRun) -> list[str]:
    """Describes the layout, the precision and activation checkpointing, and how kernels and groups
    of ranks compute.
    """
    world = run.world
    sharding = world.sharding
    layout = {"fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP", "single": "one process"}[
        sharding.layout
    ]
    layer_classes = {_name_class(layer) for layer in decoder_layers(unwrap(run.model))}
    wrapped = count_wrapped_units(run.model)
    units = ", ".join(f"{count} {name}" for name, count in wrapped.items() if name in layer_classes)
    if units:
        layout += f" {sharding.strategy}, wrapped {units}"
    if sharding.expert_parallel_size > 1:
        layout += f", a layer's experts over {sharding.expert_parallel_size} ranks"
    if sharding.activation_checkpointing:
        checkpointing = "on"
    else:
        checkpointing = "off"
    more_lines = (sharding.describe_sequences(world.size), *sharding.translated)
    return [
        f"layout  {layout}; {describe_precision(run)}; activation checkpointing {checkpointing}",
        *describe_products(),
        *describe_flash_kernels(),
        *describe_groups(world),
        *(f"        {line}" for line in more_lines if line),
    ]


def _describe_batch(run: TrainingRun) -> list[str]:
    """Describes the rows and tokens of a step, the number of steps, and whether the update happens
    in the backward.
    """
    recipe = run.recipe
    train = run.data.train
    if recipe.method_facts.samples:
        rows = f"prompts with {recipe.rollout.num_generations} completions each"
    else:
        rows = "rows"
    if train.steps_per_epoch is None:
        an_epoch = "streamed, no known"
    else:
        an_epoch = f"{train.steps_per_epoch:,}"
    lines = [
        f"batch   {train.config.global_batch_size} {rows} of up to {recipe.row_tokens} "
        f"tokens a step, {an_epoch} steps an epoch, {train.steps:,} in all"
    ]
    if recipe.optimization.optim_in_backward:
        lines.append("update  each parameter in the backward, its gradient freed at once")
    return lines


def _list_notes(
    recipe: Recipe, world: World, data: PreparedData, facts: ModelFacts | None = None
) -> list[str]:
    """Lists the notes of the rules on a run. Problems that are errors were raised before.

    `facts`: about the model; None: the rules that need them are left out.
    """
    problems = find_problems(
        recipe,
        world.sharding,
        facts,
        ranks=world.size,
        machine=MachineFacts(device="cpu" if world.device.type == "cpu" else "cuda"),
        steps=data.train.steps,
        images=data.images,
    )
    return [str(problem) for problem in problems if problem.is_note]


def _describe_data(run: TrainingRun) -> list[str]:
    """Describes the totals and findings of the data; warns if an example is longer than the model's
    positions.
    """
    report = run.data.report
    model: Any = unwrap(run.model)
    positions = read_positions(model.config)
    totals, *findings = report.lines()
    return [
        *(f"        {line}" for line in check_longest_example(count_longest(run), positions)),
        f"data    {totals}",
        *(f"        {finding}" for finding in findings),
    ]


def count_longest(run: TrainingRun) -> int:
    """Counts the tokens of the longest example.

    If the method samples, it is the longest prompt with a completion of the largest length.
    """
    longest = run.data.report.longest
    if run.recipe.method_facts.samples:
        return longest + run.recipe.rollout.max_completion_length
    return longest


def _describe_flop(run: TrainingRun) -> list[str]:
    """Describes the formula and the peak by which the MFU is computed.

    Returns no line if the device's peak is not known.
    """
    if run.peak_flops is None:
        return []
    if run.fp8_share:
        kinds = f"FP8 ({run.fp8_share:.0%} of them) and bf16"
    else:
        kinds = "bf16"
    weights_term = _write_weights_term(run.recipe)
    gigaflop = run.count_flop(run.recipe.data.max_length) / 1e9
    return [
        f"mfu     {weights_term} + 12 L H Q T = {gigaflop:.2f} GFLOP a token of a "
        f"whole row, of {run.peak_flops / 1e12:.0f} TFLOP/s dense {kinds} a device"
    ]


def describe_flash_kernels() -> list[str]:
    """Names the installed FlashAttention that computes attention, or else the package to install
    for a faster kernel on this GPU.

    Returns no line if no package is installed and none would help.
    """
    name = current_flash_attention_impl()
    if name is not None:
        version = name[-1]  # torch names it FA and a digit
        return [f"        attention by the installed FlashAttention {version}"]
    package = find_missing_flash_package()
    if package:
        return [
            f"        attention by torch's FlashAttention 2; pip install {package} for a faster one"
        ]
    return []


def describe_groups(world: World) -> list[str]:
    """Describes the stages of a pipeline, and the tensor-parallel groups of ranks in a stage."""
    lines = []
    groups = world.tensor_group_count  # in each stage
    if world.stages > 1:
        of_ranks = counted(world.stage_size, "rank")
        schedule = world.sharding.pipeline_schedule
        lines.append(f"        a pipeline of {world.stages} stages of {of_ranks} each ({schedule})")
    if world.sharding.divides_matrices:
        group_size = world.stage_size // groups
        lines.append(
            f"        tensor parallel over {group_size} ranks, {counted(groups, 'group')}: heads, "
            "intermediate features and vocabulary are divided"
        )
    return lines


def describe_trained(recipe: Recipe) -> str:
    """Describes which parameters are trained, in parentheses; empty if all are."""
    if not recipe.lora.use_peft:
        return _describe_trained_modules(recipe)
    lora = recipe.lora
    whole_modules = list(lora.modules_to_save)
    if recipe.model.added_tokens:
        whole_modules.append("embedding and head, for the added tokens")
    whole = f"; whole: {', '.join(whole_modules)}" if whole_modules else ""
    if lora.oft_block_size is not None:
        return f" (OFT in blocks of {lora.oft_block_size}{whole})"
    ranks = [f", {rank} for {pattern}" for pattern, rank in (lora.rank_pattern or {}).items()]
    return f" (LoRA r={lora.lora_r}{''.join(ranks)}{whole})"


def _describe_trained_modules(recipe: Recipe) -> str:
    """Names the modules that a recipe without adapters trains or freezes; empty if all are
    trained.
    """
    keys = []
    for key in ("trainable_modules", "frozen_modules"):
        modules = getattr(recipe.model, key)
        if modules:
            keys.append(f"{key}: {', '.join(modules)}")
    return f" ({'; '.join(keys)})" if keys else ""


def describe_unreached(size: ModelSize) -> list[str]:
    """Names the modules that the recipe asks to train but that no row reaches, if there are any."""
    if not size.unreached:
        return []
    # module.weight -> module; a parameter of the model itself keeps its own name
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in size.unreached))
    names = ", ".join(modules[:SHOWN_UNREACHED])
    more = ""
    if len(modules) > SHOWN_UNREACHED:
        more = f" and {len(modules) - SHOWN_UNREACHED} more"
    return [
        f"        not trained: {names}{more}: the model reads nothing that they compute of the rows"
    ]


def describe_adapter(recipe: Recipe) -> list[str]:
    """Names the adapter that is trained further, and its base model if its name is not that of the
    recipe's model.

    Returns no line if no adapter is trained further.
    """
    name = recipe.lora.adapter_name_or_path
    model = recipe.model.model_name_or_path or ""
    if name is None:
        return []
    base = read_json_object(find_adapter(name) / ADAPTER_CONFIG).get("base_model_name_or_path")
    line = f"adapter {name}, trained further"
    if isinstance(base, str) and Path(base).name != Path(model).name:
        line += f"; it names another base model: {base}"
    return [line]


def describe_teacher(objective: Objective, longest: int) -> list[str]:
    """Describes the objective's teacher; no line if it has none.

    `longest`: the tokens of the longest example, which may be too long for the teacher.
    """
    teacher: Teacher | StoredTeacher | None = getattr(objective, "teacher", None)
    if isinstance(teacher, StoredTeacher):
        first_ids, _ = teacher.pieces[0]
        k = first_ids.shape[1]
        tokens = sum(len(ids) for ids, _ in teacher.pieces)
        return [
            f"teacher asked before training: its {k} likeliest of each of {tokens:,} tokens, "
            "in files"
        ]
    if teacher is None:
        return []
    positions = read_positions(teacher.model.config)
    dtype = next(teacher.model.parameters()).dtype
    return [
        (
            f"teacher {_name_class(teacher.model)}, {teacher.size.total:,} parameters, frozen in "
            f"{SHORT[dtype]}"
        ),
        *(f"        {line}" for line in check_longest_example(longest, positions, "teacher")),
    ]


def _write_weights_term(recipe: Recipe) -> str:
    """Writes the term of the FLOP formula for the N weights of matrix products, per token."""
    trains_whole_modules = recipe.lora.modules_to_save or recipe.model.added_tokens
    if recipe.lora.use_peft and not trains_whole_modules:
        return "4N"
    names_modules = recipe.model.trainable_modules or recipe.model.frozen_modules
    if recipe.lora.use_peft or names_modules:
        return "(6N less 2 for each frozen weight)"
    return "6N"


def describe_precision(run: TrainingRun) -> str:
    """Describes the compute dtype, and the dtypes of trained and frozen parameters."""
    sharding = run.world.sharding
    trained = next(SHORT[p.dtype] for p in run.model.parameters() if p.requires_grad)
    if isinstance(run.optimizer, OffloadedOptimizer) and run.optimizer.master_weights():
        trained = "fp32"  # the dtype of the master weights, which are in files
    frozen = next((SHORT[p.dtype] for p in run.model.parameters() if not p.requires_grad), None)
    if sharding.mixed_precision != "no":
        computed: str = sharding.mixed_precision
    else:
        computed = frozen or trained
    if sharding.fp8 is not None:
        computed = f"fp8 ({sharding.fp8.recipe_name}) and {computed}"
    if run.recipe.lora.use_peft:
        return f"{computed} over {frozen} frozen weights and {trained} adapters"
    if computed == trained:
        return computed
    return f"{computed} over {trained} weights"


def describe_offload(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes the file of the optimizer's state, and how much of it is in memory at once.

    Returns no line if the state is not in a file.
    """
    if not isinstance(optimizer, OffloadedOptimizer):
        return []
    file = optimizer.file
    if file.is_direct:
        cache = ""
    else:
        cache = ", through the page cache: this file system takes no direct requests"
    if optimizer.master_weights():
        contents = "moments and fp32 master weights"
    else:
        contents = "moments"
    return [
        f"offload {contents}: {disk_size(file.size)} of this rank in a file without a name in "
        f"{file.folder}{cache}; {counted(len(optimizer.windows), 'window')} of up to "
        f"{disk_size(optimizer.capacity)} a step, two in memory"
    ]


def describe_quantized(model: nn.Module, quantization: Quantization) -> list[str]:
    """Describes the quantized layers of the base, and their bytes on this rank, quantized and not.

    Returns no line if the base is not quantized.
    """
    layers = [layer for _, layer in quantized_layers(model)]
    if not layers:
        return []
    linears = sum(isinstance(layer, QuantizedLinear) for layer in layers)
    experts = ""
    if len(layers) > linears:
        experts = f" and {counted(len(layers) - linears, 'weight')} of experts"
    dtype = layers[0].get_parameter(CODES).dtype  # the compute dtype: the bytes are viewed in it
    own_bytes = 0  # on this rank
    whole_bytes = 0  # over all ranks
    for layer in layers:
        for part in (CODES, SCALES):
            parameter = layer.get_parameter(part)
            own_bytes += local_part(parameter).nbytes
            whole_bytes += parameter.numel() * dtype.itemsize
    unquantized_bytes = sum(math.prod(layer.shape) for layer in layers) * dtype.itemsize
    own_unquantized_bytes = round(own_bytes / whole_bytes * unquantized_bytes)
    other_frozen = 0
    for name, parameter in model.named_parameters():
        is_quantized = name.endswith((f".{CODES}", f".{SCALES}"))
        if not (parameter.requires_grad or is_quantized):
            other_frozen += parameter.numel()
    return [
        f"base    {counted(linears, 'linear layer')}{experts} in "
        f"{describe_quantization(quantization)}: {disk_size(own_bytes)} on this rank, "
        f"{disk_size(own_unquantized_bytes)} in {SHORT[dtype]}; {other_frozen:,} other frozen "
        f"parameters in {SHORT[dtype]}"
    ]


def describe_rounding(model: nn.Module, recipe: Recipe) -> list[str]:
    """Describes the layers that quantization-aware training rounds, and how.

    Returns no line if the recipe does not ask for it.
    """
    keys = recipe.quantization_aware
    if keys.quantization_aware_training is None:
        return []
    if keys.qat_group_size is None:
        group = "a row"
    else:
        group = f"{keys.qat_group_size} numbers"
    start = ""
    if keys.fake_quant_after_n_steps:
        start = f", after {keys.fake_quant_after_n_steps:,} steps"
    layers = counted(len(find_quantizable(model)), "linear layer")
    return [
        f"qat     {layers} rounded as {keys.quantization_aware_training}, a scale for "
        f"{group}{start}"
    ]


def last_screen(folder: Path, last_step: int, *, has_teacher: bool = False) -> list[str]:
    """Returns the lines that a run prints at its end: warnings if it diverged or learned nothing,
    memory, time, and where its results are.

    `has_teacher`: whether the method needs a teacher.
    """
    lines = []
    diverged = find_divergence(losses_of(read_json_lines(folder / METRICS), last_step))
    if diverged:
        lines.append(f"warning {diverged}: this run has diverged; {DIVERGED_ADVICE}")
    lines += _warn_of_worse_model(folder)
    if has_teacher:
        lines += _warn_of_equal_teacher(folder)
    lines += _describe_ratios(folder)
    lines += _describe_memory(folder)
    lines += _describe_time(folder)
    return [*lines, results_line(folder)]


def _warn_of_worse_model(folder: Path) -> list[str]:
    """Warns if all held-out losses are higher than the one before the first step.

    No line if the lowest of them is within 1% of that one, nor where the loss is minus the mean
    reward of sampled completions.
    """
    losses = [
        (line["step"], line["eval_loss"])
        for line in _read_lines_with(folder, "eval_loss")
        if "eval_reward" not in line and math.isfinite(line["eval_loss"])
    ]
    first = next((loss for step, loss in losses if step == 0), None)
    later = [(loss, step) for step, loss in losses if step > 0]
    if first is None or not later:
        return []
    lowest, step = min(later)
    if lowest <= first + 0.01 * abs(first):
        return []
    return [
        f"warning the held-out loss was {first:.4f} before the first step, and at the lowest "
        f"{lowest:.4f} after it (step {step:,}): on the held-out rows the model is worse than "
        "before; lower learning_rate, or train on rows that are more like them"
    ]


def _describe_time(folder: Path) -> list[str]:
    """Describes the seconds of training, and of the longest other phase, since the run was last
    started.

    Returns no line if metrics.jsonl has no other phase.
    """
    starts = seconds_by_phase(read_json_lines(folder / METRICS))
    if not starts:
        return []
    latest = starts[max(starts)]
    seconds = {phase: sum(by_step.values()) for phase, by_step in latest.items()}
    trained = seconds.pop("training", 0.0)
    others = {phase: taken for phase, taken in seconds.items() if phase not in OVERLAPPING}
    if not others:
        return []
    longest = max(others, key=lambda phase: others[phase])
    time = f"{PHASES[longest]}, {duration(others[longest])}"
    return [f"time    {duration(trained)} of training; the longest phase beside it: {time}"]


def _describe_memory(folder: Path) -> list[str]:
    """Describes the measured and the planned peak memory of the first rank.

    Returns no line if the run cannot be read or planned from its folder.
    """
    try:
        run = read_run(folder)
    except UserError:  # a line of metrics.jsonl was edited, say: the run is done all the same
        return []
    measured = max((line.get("peak_memory_bytes", 0) for line in run.lines), default=0)
    plan = plan_run(run) if measured else None
    if plan is None:
        return []
    planned = plan.peak_bytes + plan.process_bytes
    return [f"memory  {gib(measured)} GiB seen on the first rank, {gib(planned)} GiB planned"]


def _read_lines_with(folder: Path, key: str) -> list[dict[str, Any]]:
    """Reads the lines of metrics.jsonl that have `key`."""
    lines = read_json_lines(folder / METRICS)
    return [line for line in lines if line is not None and key in line]


def _warn_of_equal_teacher(folder: Path) -> list[str]:
    """Warns that nothing was learned, if the model and its teacher never differed by more than
    rounding. No line otherwise.
    """
    lines = _read_lines_with(folder, "loss")
    divergences = [abs(line.get("kl", math.inf)) for line in lines]
    if not divergences or any(each > ROUNDING_DIVERGENCE for each in divergences):
        return []
    return [
        "warning the teacher gave the model's own probabilities from the first step on: nothing "
        "was learned from it; name another teacher"
    ]


def _describe_ratios(folder: Path) -> list[str]:
    """Describes the probability ratios between the model in training and the sampler, as means over
    the training lines. No line if the method does not sample.

    Warns first if in all lines the completions of each prompt had the same reward. If no token was
    trained on, there are no ratios, and the only line says so.
    """
    sampled = _read_lines_with(folder, "completions/clipped_ratio")
    if sampled and sampled[-1].get("trained_tokens") == 0:
        return [
            "warning all completions were cut at max_completion_length, and "
            "mask_truncated_completions leaves those out: nothing was learned; raise "
            "max_completion_length"
        ]
    lines = _read_lines_with(folder, "ratio/outside")
    if not lines:
        return []

    def mean(name: str) -> float:
        total: float = sum(line.get(name, math.nan) for line in lines)
        return total / len(lines)

    described = []
    # A critic compares no completions of a prompt, so that there is no share of flat groups.
    is_flat = all(line.get("frac_reward_zero_std") == 1 or "value/loss" in line for line in lines)
    if is_flat and all(line.get("grad_norm") == 0 for line in lines):
        described.append(
            "warning all completions of each prompt got the same reward: nothing was learned from "
            "them; take other prompts or rewards, or more num_generations"
        )
    described.append(
        f"ratios  of training to sampling: {mean('ratio/outside'):.2%} of the tokens outside the "
        f"bounds, mean squared log-ratio {mean('log_ratio/mean_square'):.2g}, effective sample "
        f"size {mean('ratio/effective_sample_size'):.1%}"
    )
    return described


def results_line(folder: Path) -> str:
    """Returns the line that lists the results in a run's folder: export, adapter, checkpoints,
    metrics and completions.
    """
    results = [folder / name for name in ("export", "adapter", "checkpoints", METRICS, COMPLETIONS)]
    return "made    " + "  ".join(str(path) for path in results if path.exists())


def answers_before_and_after(path: Path, last_step: int) -> list[str]:
    """Shows the first SHOWN_ANSWERS held-out questions, with the answers before and after training.

    Args:
        path: samples.jsonl. Lines that cannot be read are left out.
        last_step: The step of the answers after training.

    Returns:
        A line for each question; none if no question with an expected answer was asked then.
    """
    samples = [line for line in read_json_lines(path) if _is_sample(line)]
    # Reversed, so that the earliest answer to a prompt is the one that stays.
    first_answers = {sample["prompt"]: sample["answer"] for sample in reversed(samples)}
    lines = []
    for sample in samples:
        if sample["step"] == last_step and sample["expected"]:
            lines.append(_describe_answer(sample, first_answers[sample["prompt"]]))
    return lines[:SHOWN_ANSWERS]


def _is_sample(line: Mapping[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether a line of samples.jsonl has all keys of a sample."""
    if line is None or not isinstance(line.get("step"), int):
        return False
    return all(isinstance(line.get(key), str) for key in ("prompt", "answer", "expected"))


def _describe_answer(sample: dict[str, Any], first_answer: str) -> str:
    """Writes a line with a sample's question, the first answer to it, the sample's own answer, and
    whether that is right.
    """
    answer = sample["answer"]
    expected = sample["expected"]
    if answer.strip() == expected.strip():
        grade = "right"
    else:
        grade = f"wrong, expected {_shorten(expected)!r}"
    return (
        f"  {_shorten(sample['prompt'])}  before: {_shorten(first_answer)!r}  after: "
        f"{_shorten(answer)!r}  {grade}"
    )


def _shorten(text: str) -> str:
    """Puts a text on one line, and cuts it to SHOWN_CHARACTERS."""
    flat = " ".join(text.split())
    if len(flat) <= SHOWN_CHARACTERS:
        return flat
    return f"{flat[: SHOWN_CHARACTERS - 1]}…"


def print_plan(recipe: Recipe, world: World, data: PreparedData) -> None:
    """Prints the plan of a run whose data is prepared: the plan, the data's findings, the rules'
    notes, and the steps.
    """
    report = data.report
    train = data.train
    # how many tokens a stream has is not known yet
    read = (report.tokens, train.steps) if report.is_complete else None
    plan = _plan_for_world(recipe, world, read=read, images=data.images)
    print(format_plan(plan))
    print("data       " + "\n           ".join(report.lines()))
    for note in _list_notes(recipe, world, data):
        if note not in plan.remarks:
            print(f"remark     {note}")
    an_epoch = f"{train.steps_per_epoch:,} an epoch, " if train.steps_per_epoch else ""
    print(f"steps      {an_epoch}{train.steps:,} in all")
    print(f"attention  {_describe_attention(plan.spec)}")
    print("dry run    nothing was trained; the same command without --dry-run starts the run")


def _plan_for_world(recipe: Recipe, world: World, **keys: Any) -> Plan:
    """Plans a run on the ranks of `world`. `keys`: further arguments of `make_plan`."""
    return make_plan(
        recipe,
        world.sharding,
        world.size,
        on_cpu=world.device.type == "cpu",
        ranks_per_node=world.local_size,
        **keys,
    )


def _describe_attention(spec: RunSpec) -> str:
    """Names the attention implementation, and says if attention is in both directions."""
    architecture = spec.architecture
    computation = spec.computation
    facts = architecture.facts
    sees_both_ways = spec.recipe.method_facts.masks
    has_own_code = spec.recipe.model.trust_remote_code
    if spec.recipe.model.attn_implementation != "auto":
        attention: str = spec.recipe.model.attn_implementation
    elif not has_own_code and attends_by_mask(facts.model_type, facts.layer_types):
        attention = "transformers' own, over a mask of all pairs of tokens"
    elif attends_in_blocks(architecture, computation) and not sees_both_ways:
        attention = "flex_attention"
    # what is copied are the outputs of the documents
    elif copies_attention_output(architecture, computation) or needs_masks(
        architecture, computation
    ):
        has_kernel = not architecture.family.caps_scores and not architecture.family.sinks
        attention = f"causal {'SDPA' if has_kernel else 'products'}, document by document"
    else:
        attention = "varlen"
    if sees_both_ways:
        return f"in both directions, {attention.removeprefix('causal ')}"
    return attention


def check_offload_dir(recipe: Recipe, world: World) -> None:
    """Raises `UserError` on all ranks if on any node `offload_dir` cannot be written, is in memory,
    or has less space than the plan needs there.

    All ranks call it. It does nothing if the optimizer's state is not offloaded.
    """
    if recipe.optimization.optim_offload == "none":
        return
    folder = Path(recipe.optimization.offload_dir or "")
    needed = 0  # bytes of the files of a node's ranks; 0 if the model cannot be planned
    # A model with its own code cannot be planned. Writing the files will show if there is room.
    with suppress(UserError):
        plan = _plan_for_world(recipe, world)
        optimizer_file = plan.spec.optimizer_file()
        if optimizer_file is not None:
            needed = optimizer_file.size * world.local_size

    def check() -> None:
        if world.local_rank == 0:
            check_scratch_folder(folder, needed, world.local_size)

    RankGroup(world).on_all(check)


@contextmanager
def explain_out_of_memory(
    recipe: Recipe, world: World, data: PreparedData | None = None
) -> Iterator[None]:
    """Turns torch's out-of-memory error in this block into a `UserError` that says where the memory
    went and what to change.

    `data`: the run's data; None if the recipe names none.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        images = None if data is None else data.images
        raise UserError(describe_out_of_memory(recipe, world, error, images)) from None


def describe_out_of_memory(
    recipe: Recipe, world: World, error: torch.OutOfMemoryError, images: str | None = None
) -> str:
    """Describes an out-of-memory error: the measured memory, the planned memory at its peak, and
    what to change.

    `images`: the model_type of the whole model if rows hold images, else None.
    """
    lines = [f"rank {world.rank}: out of memory: {str(error).split('. ')[0]}"]
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        measured = torch.cuda.max_memory_allocated(world.device)
        lines.append(
            f"measured   {gib(measured)} GiB allocated at most, of {gib(total)} GiB on the device"
        )
    try:
        plan = _plan_for_world(recipe, world, images=images)
    except UserError as refusal:  # a model with its own code cannot be planned
        lines.append(f"planned    not known: {refusal}")
        lines.append(
            "next       more ranks, activation checkpointing, or a smaller max_length or "
            "per_device_train_batch_size"
        )
        return "\n".join(lines)
    peak = max((phase.peak for phase in plan.phases), key=lambda moment: moment.total)
    teacher = f"teacher {gib(peak.teacher)}, " if peak.teacher else ""
    lines.append(
        f"planned    {gib(peak.allocated)} GiB allocated and {gib(peak.total)} GiB in all, "
        f"at {peak.name}: weights {gib(peak.parameters)}, {teacher}gradients "
        f"{gib(peak.gradients)}, optimizer {gib(peak.optimizer)}, gathered "
        f"{gib(peak.gathered)}, activations {gib(peak.activations)}, loss {gib(peak.loss)}"
    )
    lines.append(f"next       {_find_smaller(plan.spec, peak.total)}")
    return "\n".join(lines)


def _find_smaller(spec: RunSpec, peak_bytes: int) -> str:
    """Names the cheapest change after which the plan needs less than `peak_bytes`."""
    for change in list_changes(spec):
        after = find_peak(change.apply(spec)).total
        if after < peak_bytes:
            return f"{change.text}   ({change.cost}; {gib(after)} GiB by the plan)"
    return "more ranks, or a smaller max_length"
