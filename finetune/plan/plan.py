"""`finetune plan`: memory by phase, disk, host memory and time of a run in one value, as text and
as JSON.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

from finetune.config.accelerate_file import read_sharding
from finetune.config.compatibility import refuse_problems
from finetune.config.facts import adopt_quantization, with_recipe_keys
from finetune.config.layout import UNDIVIDED, Sharding
from finetune.config.module_names import adopt_published_names
from finetune.config.pretrained import complete_lora
from finetune.config.quantization import read_teacher_quantization
from finetune.config.reader import read_recipe, split_adapters
from finetune.config.schema import Method, Model, Recipe
from finetune.constants import ITEMSIZE, find_positions, grow_rows
from finetune.errors import UserError
from finetune.plan.advice import Advice, Room, advise, describe_changes
from finetune.plan.architecture import (
    Architecture,
    find_config,
    read_architecture,
    read_reward_model,
    set_scores,
)
from finetune.plan.loss_memory import compared_bytes, count_held_out_queries
from finetune.plan.peaks import Phase, find_peak, plan_phases
from finetune.plan.run_spec import (
    CPU_PROCESS_BYTES,
    Disk,
    Host,
    RunSpec,
    TeacherSpec,
    plan_disk,
    plan_host,
)
from finetune.plan.speed import Links, Speed, assume_mfu, estimate_speed
from finetune.plan.table import (
    align_columns,
    format_advice,
    format_duration,
    format_header,
    format_layouts,
    format_speed,
    format_storage,
    memory_rows,
)
from finetune.units import MIB, counted, disk_size, gib, read_gpu_memory, read_size

LARGE_BUBBLE = 0.25  # of a step
TABLE_RANKS = (1, 2, 4, 8, 16, 64)  # the columns of the table of layouts


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory, time and disk that a run will need."""

    spec: RunSpec
    phases: tuple[Phase, ...]
    disk: Disk
    host: Host
    speed: Speed
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return format_plan(self)

    @property
    def peak_bytes(self) -> int:
        """Device memory of the phase that needs the most."""
        return max(phase.peak.total for phase in self.phases)

    @property
    def process_bytes(self) -> int:
        """Host memory of a rank's process on top of `peak_bytes` where ranks compute on the CPU;
        else 0.
        """
        return CPU_PROCESS_BYTES if self.spec.device == "cpu" else 0


def make_plan(
    recipe: Recipe,
    sharding: Sharding,
    ranks: int,
    *,
    mfu: float | None = None,
    on_cpu: bool = False,
    read: tuple[int, int] | None = None,
    links: Links | None = None,
    images: str | None = None,
) -> Plan:
    """Plans a run.

    Args:
        recipe: What to train.
        sharding: The layout.
        ranks: The number of ranks.
        mfu: The share of the device's peak; None for what such a run reached where it was measured.
        on_cpu: Ranks compute on the CPU.
        read: The tokens of an epoch and the steps of the run; None estimates both from the files'
            size.
        links: The rates at which ranks send; None for those of the device's data sheet.
        images: The family of the whole model, where rows hold images.

    Raises `UserError` for a config.json that cannot be read or is of no known family, and for an
    unsupported run.
    """
    config, where = find_config(recipe.model)
    recipe = adopt_published_names(complete_lora(recipe), str(config.get("model_type")))
    config = set_scores(config, recipe.score_names)
    asked = recipe
    architecture, recipe = _with_tokens(read_architecture(config, where), recipe)
    architecture = replace(architecture, has_critic=recipe.method_facts.has_critic)
    stored_dtype = str(config.get("dtype") or config.get("torch_dtype"))
    spec = RunSpec(
        architecture=architecture,
        recipe=adopt_quantization(recipe, architecture.facts),
        sharding=with_recipe_keys(sharding, recipe),
        ranks=ranks,
        device="cpu" if on_cpu or sharding.use_cpu else "cuda",
        grouped_attention=_torch_version() >= (2, 12),
        teacher=None if recipe.teacher is None else _read_teacher(recipe.teacher, recipe.method),
        reward_models=tuple(map(read_reward_model, recipe.rollout.reward_models)),
        base_dtype=stored_dtype if stored_dtype in ITEMSIZE else "bfloat16",
        images=images,
    )
    problems = refuse_problems(replace(spec, recipe=asked).find_problems())
    phases = plan_phases(spec)
    speed = estimate_speed(spec, assume_mfu(spec) if mfu is None else mfu, read, links)
    remarks = (
        *_judge_length(config, recipe.data.max_length),
        *_describe_traces(spec),
        *_describe_held_out(spec),
        *_judge_bubble(spec),
        *_suggest_a_stage_on_each_node(spec, speed, links),
    )
    return Plan(
        spec=spec,
        phases=phases,
        disk=plan_disk(spec),
        host=plan_host(spec, max(phase.peak.total for phase in phases)),
        speed=speed,
        remarks=(*map(str, problems), *remarks),
    )


def read_planned_sharding(recipe: Recipe, config: str | None, ranks: int) -> Sharding:
    """The layout of a run on `ranks` ranks, whatever a launcher has set.

    `config`: its file; None: the recipe's.
    """
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_"))
    }
    return read_sharding(config, recipe.run.accelerate_config, environ | {"WORLD_SIZE": str(ranks)})


def _judge_length(config: Mapping[str, Any], max_length: int) -> Iterator[str]:
    """Says that documents may be longer than the model was made for."""
    positions = find_positions(config)
    if positions is None or max_length <= positions:
        return
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaled = "" if kind == "default" else f" with its {kind} RoPE"
    yield (
        f"max_length {max_length:,} is beyond the {positions:,} positions that the model was made "
        f"for{scaled} (max_position_embeddings of its config); a document longer than these trains "
        "positions that it has not seen"
    )


def _describe_held_out(spec: RunSpec) -> Iterator[str]:
    """Says that held-out vectors are not counted, where their number is not known."""
    if spec.recipe.method_facts.embeds and count_held_out_queries(spec) is None:
        each = compared_bytes(spec, 1)
        yield (
            f"held-out queries are compared all at once, {each / 1024:.0f} KiB each, which are not "
            "counted: eval_split_size as a count, or max_samples, says how many there are"
        )


def _describe_traces(spec: RunSpec) -> Iterator[str]:
    """Says that activations are not counted, or that recurrent layers hold less than is counted."""
    packages = spec.architecture.family.recurrence and spec.architecture.family.recurrence.packages
    if spec.uncounted:
        yield (
            "activations are not counted, so that memory is what is needed without them: "
            f"{spec.uncounted}"
        )
    elif (
        spec.architecture.trace(spec.computation) is not None and packages and spec.device == "cuda"
    ):
        yield (
            "recurrent layers are counted as transformers' own code computes them, which runs "
            f"without {' and '.join(packages)} and holds more than their kernels"
        )


def _judge_bubble(spec: RunSpec) -> Iterator[str]:
    """Says that ranks of a pipeline wait much."""
    if spec.bubble > LARGE_BUBBLE:
        batches = counted(spec.accumulation, "micro-batch")
        yield (
            f"ranks of the pipeline wait {spec.bubble:.0%} of a step, which has {batches} for "
            f"{spec.stages} stages; a smaller per_device_train_batch_size, or more rows in a step, "
            "make more of them"
        )


def _suggest_a_stage_on_each_node(
    spec: RunSpec, speed: Speed, links: Links | None
) -> Iterator[str]:
    """Suggests a pipeline over the nodes where FSDP gathers layers over all of them, and a step
    would be faster.
    """
    nodes = spec.ranks // spec.ranks_per_node
    if (
        spec.stages > 1
        or nodes < 2
        or spec.sharding.layout != "fsdp2"
        or nodes > spec.architecture.layers
    ):
        return
    model = replace(spec.recipe.model, pipeline_parallel_size=nodes)
    staged = replace(
        spec,
        recipe=replace(spec.recipe, model=model),
        sharding=replace(spec.sharding, pipeline_parallel_size=nodes),
    )
    if staged.accumulation < nodes or any(
        not problem.is_note for problem in staged.find_problems()
    ):
        return
    other = estimate_speed(staged, speed.mfu, None, links)
    if _overlapped_seconds(other) < 0.9 * _overlapped_seconds(speed):
        yield (
            f"pipeline_parallel_size={nodes} puts a stage on each node, within which its layers "
            f"are gathered: a step sends for {_describe_sending(other)} of computing, instead of "
            f"{_describe_sending(speed)}"
        )


def _overlapped_seconds(speed: Speed) -> float:
    """Seconds of a step that computes while it sends, and then awaits the rest."""
    return max(speed.seconds_per_step, speed.communication_seconds) + speed.awaited_seconds


def _describe_sending(speed: Speed) -> str:
    return (
        f"{format_duration(speed.communication_seconds)} beside "
        f"{format_duration(speed.seconds_per_step)}"
    )


def _read_teacher(model: Model, method: Method) -> TeacherSpec:
    try:
        config, where = find_config(model)
    except UserError as error:
        raise UserError(f"teacher_model_name_or_path: {error}") from None
    quantization = read_teacher_quantization(config.get("quantization_config"), method)
    return TeacherSpec(architecture=read_architecture(config, where), quantization=quantization)


def _with_tokens(architecture: Architecture, recipe: Recipe) -> tuple[Architecture, Recipe]:
    """The model with the recipe's `added_tokens`; and the recipe, whose LoRA trains embedding and
    head whole for them.

    No tokenizer is read. So that the plan is never too small, no token counts as known already, and
    every row of the embedding counts as used.
    """
    keys = recipe.model
    if not keys.added_tokens:
        return architecture, recipe
    tokens = architecture.vocabulary + len(set(keys.added_tokens))
    rows = grow_rows(architecture.vocabulary, tokens, keys.pad_vocab_to_multiple_of)
    if recipe.lora.use_peft:
        saved = (
            *recipe.lora.modules_to_save,
            re.escape(architecture.embedding.name.removesuffix(".weight")),
            "lm_head",
        )
        recipe = replace(recipe, lora=replace(recipe.lora, modules_to_save=saved))
    facts = replace(architecture.facts, vocabulary=rows)
    return replace(architecture, vocabulary=rows, facts=facts), recipe


def format_plan(plan: Plan, *, ranks_assumed: bool = False) -> str:
    """The plan as text, without the table of layouts and without advice."""
    spec = plan.spec
    needs = [format_storage(plan.disk, plan.host)]
    if spec.device != "cpu":  # a CPU's MFU is unknown
        needs.append(format_speed(plan.speed, spec.ranks))
    header = "\n".join(
        [format_header(spec, ranks_assumed), *(f"remark     {remark}" for remark in plan.remarks)]
    )
    rows = memory_rows(plan.phases)
    return "\n\n".join([header, align_columns(rows, left=(0, len(rows[0]) - 1)), "\n".join(needs)])


def to_dict(
    plan: Plan, advice: Advice | None = None, room: Room | None = None, *, has_config: bool = False
) -> dict[str, Any]:
    """The plan as JSON: bytes and seconds; `has_config` as in `describe_changes`.

    `fits` is false where a known part of the room is too small. It is true where all parts are
    known and large enough, and null where one is unknown or activations are not counted.
    """
    spec = plan.spec
    content: dict[str, Any] = {
        "parameters": spec.architecture.parameters,
        "active_parameters": spec.architecture.parameters - spec.architecture.idle_parameters,
        "trained_parameters": spec.trained_numel,
        "teacher_parameters": None
        if spec.teacher is None
        else spec.teacher.architecture.parameters,
        "ranks": spec.ranks,
        "sharding": {key: value for key, value in asdict(spec.sharding).items() if key != "places"},
        "global_batch_size": spec.global_batch_size,
        "gradient_accumulation_steps": spec.accumulation,
        "memory_bytes": {
            phase.name: asdict(phase.peak)
            | {"allocated": phase.peak.allocated, "total": phase.peak.total}
            for phase in plan.phases
        },
        "peak_bytes": plan.peak_bytes,
        "disk_bytes": asdict(plan.disk) | {"total": plan.disk.total},
        "host_bytes": asdict(plan.host) | {"total": plan.host.total},
        "time": asdict(plan.speed),
        "remarks": list(plan.remarks),
        "peak_bytes_by_ranks": {
            name: dict(zip(map(str, TABLE_RANKS), values, strict=True))
            for name, values in compare_layouts(spec)
        },
    }
    if advice is not None:
        is_known = room is not None and room.is_known and not spec.uncounted
        if is_known or not advice.fits:
            content["fits"] = advice.fits
        else:
            content["fits"] = None
        content["changes"] = advice.changes and describe_changes(
            advice.changes, spec.sharding.source, has_config=has_config
        )
    return content


def compare_layouts(spec: RunSpec) -> list[tuple[str, list[int | None]]]:
    """Peak bytes of one rank for each layout and number of TABLE_RANKS; None where the layout is
    impossible.

    In these layouts ranks divide neither rows nor matrices, experts or layers. Where those of
    `spec` do, its own layout comes first.
    """
    plain = replace(
        spec.sharding,
        layout="fsdp2",
        cpu_offload=False,
        replicate_size=None,
        shard_size=None,
        **UNDIVIDED,
        expert_parallel_size=1,
        pipeline_parallel_size=1,
    )
    layouts = {
        "fsdp_full_shard": replace(plain, strategy="FULL_SHARD"),
        "fsdp_shard_grad_op": replace(plain, strategy="SHARD_GRAD_OP"),
        "fsdp_hybrid_shard": replace(plain, strategy="HYBRID_SHARD"),
        "fsdp_cpu_offload": replace(plain, strategy="FULL_SHARD", cpu_offload=True),
        "ddp": replace(plain, layout="ddp", strategy="FULL_SHARD"),
    }
    own = spec.sharding
    sizes = own.group_sizes | {
        name: getattr(own, name) for name in ("expert_parallel_size", "pipeline_parallel_size")
    }
    if named := ", ".join(f"{key} {size}" for key, size in sizes.items() if size > 1):
        layouts = {f"this run's: {named}": own} | layouts

    def peak(name: str, sharding: Sharding, ranks: int) -> int | None:
        is_hybrid = name == "fsdp_hybrid_shard"
        if ranks % sharding.smallest_world or (is_hybrid and ranks <= spec.ranks_per_node):
            return None
        return find_peak(replace(spec, sharding=sharding, ranks=ranks)).total

    return [
        (name, [peak(name, sharding, ranks) for ranks in TABLE_RANKS])
        for name, sharding in layouts.items()
    ]


def _torch_version() -> tuple[int, int]:
    """The installed torch's version without importing it; where there is none, the newest
    tested.
    """
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return (2, 13)
    return int(major), int(minor)


def plan_command(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.recipe`.

    Returns 1 where it does not fit what is given of a machine, else 0.
    """
    room = read_room(arguments.gpu_memory, arguments.host_memory, arguments.disk)
    mfu: float | None = arguments.mfu
    if mfu is not None and not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: must be above 0 and at most 1; for example --mfu 0.4")
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise UserError(f"--num-processes {arguments.num_processes}: a run has at least one rank")
    if arguments.num_processes is not None and arguments.num_processes > 100_000:
        raise UserError(
            f"--num-processes {arguments.num_processes}: a run has at most 100,000 ranks"
        )
    recipe = read_recipe(arguments.recipe, arguments.overrides)
    ranks = arguments.num_processes or _assume_ranks(recipe, arguments.config)
    sharding = read_planned_sharding(recipe, arguments.config, ranks)
    # asked with all that the rules know of several adapters
    plans = [
        make_plan(each, sharding, ranks, mfu=mfu, links=_read_links(arguments))
        for each in split_adapters(recipe)
    ]
    heaviest = max(plans, key=lambda plan: plan.peak_bytes)
    if len(plans) > 1 and not arguments.json:
        print(_describe_adapters(plans, heaviest))
    return _show(heaviest, room, arguments)


def _describe_adapters(plans: Sequence[Plan], heaviest: Plan) -> str:
    """Lists what each of several adapters takes."""
    name = heaviest.spec.recipe.folder.name
    lines = [
        f"adapters   {len(plans)}, trained in turn on one base: memory is that of the largest, "
        f"{name}, whose plan follows"
    ]
    for plan in plans:
        room = f"{gib(plan.peak_bytes)} GiB, {disk_size(plan.disk.total)} on disk"
        lines.append(f"           {plan.spec.recipe.folder.name}: {room}")
    return "\n".join(lines) + "\n"


def _show(plan: Plan, room: Room, arguments: argparse.Namespace) -> int:
    """Prints a plan with its advice; returns the exit code."""
    advice = None if room == Room(None) else advise(plan.spec, room)
    has_config = arguments.config is not None
    if arguments.json:
        print(json.dumps(to_dict(plan, advice, room, has_config=has_config), indent=2))
    else:
        print(format_plan(plan, ranks_assumed=arguments.num_processes is None))
        if arguments.num_processes is None:
            print("\n" + format_layouts(compare_layouts(plan.spec), TABLE_RANKS, room.device))
        if advice is not None:
            is_uncounted = plan.spec.uncounted is not None
            print(
                "\n"
                + format_advice(
                    advice,
                    room,
                    plan.spec.sharding.source,
                    has_config=has_config,
                    uncounted=is_uncounted,
                )
            )
    return 0 if advice is None or advice.fits else 1


def read_room(gpu_memory: str | None, host_memory: str | None, disk: str | None) -> Room:
    """Reads a machine's memory and disk from these flags. A bare number is read as GiB, and a line
    on stderr says so.

    Raises `UserError` for what is no size.
    """
    sizes: list[int | None] = []
    for flag, text in (
        ("--gpu-memory", gpu_memory),
        ("--host-memory", host_memory),
        ("--disk", disk),
    ):
        if text is None:
            sizes.append(None)
            continue
        if (read := read_gpu_memory(text)) != text:
            print(f"{flag} {text}: read as {read}", file=sys.stderr)
        sizes.append(_read_size(flag, read))
    return Room(*sizes)


def _read_links(arguments: argparse.Namespace) -> Links:
    """The rates that --gpu-link and --network give, else those of the assumed device."""
    usual = Links()
    within, between = (
        None if text is None else float(_read_size(flag, text))
        for flag, text in (("--gpu-link", arguments.gpu_link), ("--network", arguments.network))
    )
    return Links(within or usual.within_node, between or usual.between_nodes)


def _read_size(flag: str, text: str) -> int:
    """`read_size` of what `flag` gave. Its `UserError` names the flag, also for a size below 1 MiB,
    which lacks its unit.
    """
    try:
        size = read_size(text)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    if size < MIB:
        raise UserError(f"{flag} {text}: is {size} bytes; write a unit, for example 80GiB")
    return size


def _assume_ranks(recipe: Recipe, config: str | None) -> int:
    """The number of ranks where --num-processes is not given: as many as the file's mesh has, one
    for a single process, else those of a usual node.
    """
    sharding = read_sharding(config, recipe.run.accelerate_config, {})
    if sharding.mesh_sizes is not None:
        return prod(sharding.mesh_sizes.values())
    return 1 if sharding.layout == "single" else 8
