"""`finetune plan`: memory by phase, disk, host memory and time of a run.

`make_plan` calculates them as one `Plan`, which this file formats as text and as JSON.
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
from finetune.config.quantization import read_stored_quantization
from finetune.config.reader import read_recipe, split_adapters
from finetune.config.schema import Model, Recipe
from finetune.constants import ITEMSIZE, find_positions, grow_rows, round_up, stored_token_bytes
from finetune.errors import UserError
from finetune.plan.advice import Advice, Room, advise, describe_changes
from finetune.plan.architecture import (
    Architecture,
    find_config,
    read_architecture,
    read_reward_model,
    set_scores,
)
from finetune.plan.loss_memory import compared_bytes, count_held_out
from finetune.plan.peaks import Phase, find_peak, plan_phases
from finetune.plan.run_spec import (
    CPU_PROCESS_BYTES,
    RANKS_PER_NODE,
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

LARGE_BUBBLE = 0.25  # the share of a step above which a pipeline's bubble gets a remark
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
        """Bytes of device memory in the phase that needs the most, on one rank."""
        return max(phase.peak.total for phase in self.phases)

    @property
    def process_bytes(self) -> int:
        """Bytes of a rank's process in host memory besides `peak_bytes`; 0 if ranks have GPUs."""
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
    ranks_per_node: int | None = None,
) -> Plan:
    """Plans a run.

    Args:
        recipe: What to train.
        sharding: The layout.
        ranks: The number of ranks.
        mfu: The share of the device's peak FLOP/s that the run reaches; None for the share that was
            measured for such a run.
        on_cpu: Ranks compute on the CPU.
        read: The tokens of an epoch and the steps of the run; None estimates both from the files'
            size.
        links: The rates at which ranks send; None for those of the device's data sheet.
        images: The model_type of the whole model if rows hold images; else None.
        ranks_per_node: The ranks of a node; None divides the ranks by the layout's num_machines,
            or assumes RANKS_PER_NODE if that is 1.

    Raises `UserError` for a config.json that cannot be read or is of no known family, and for an
    unsupported run.
    """
    config, where = find_config(recipe.model)
    recipe = adopt_published_names(complete_lora(recipe), str(config.get("model_type")))
    config = set_scores(config, recipe.score_names)
    given_recipe = recipe  # the rules judge it without what `_with_tokens` adds to modules_to_save
    architecture, recipe = _with_tokens(read_architecture(config, where), recipe)
    architecture = replace(architecture, has_critic=recipe.method_facts.has_critic)
    stored_dtype = str(config.get("dtype") or config.get("torch_dtype"))
    spec = RunSpec(
        architecture=architecture,
        recipe=adopt_quantization(recipe, architecture.facts),
        sharding=with_recipe_keys(sharding, recipe),
        ranks=ranks,
        ranks_per_node=ranks_per_node or _assume_ranks_per_node(ranks, sharding.num_machines),
        device="cpu" if on_cpu or sharding.use_cpu else "cuda",
        grouped_attention=_torch_version() >= (2, 12),
        teacher=None if recipe.teacher is None else _read_teacher(recipe.teacher, recipe),
        reward_models=tuple(map(read_reward_model, recipe.rollout.reward_models)),
        base_dtype=stored_dtype if stored_dtype in ITEMSIZE else "bfloat16",
        images=images,
    )
    problems = refuse_problems(replace(spec, recipe=given_recipe).find_problems())
    phases = plan_phases(spec)
    speed = estimate_speed(spec, assume_mfu(spec) if mfu is None else mfu, read, links)
    remarks = (
        *_judge_length(config, recipe.data.max_length),
        *_describe_traces(spec),
        *_describe_held_out(spec),
        *_describe_stored_teacher(spec, speed),
        *_describe_states(spec),
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


def _assume_ranks_per_node(ranks: int, machines: int) -> int:
    """Divides the ranks among several machines; one machine may be all that is known of a cluster.

    >>> _assume_ranks_per_node(16, 4), _assume_ranks_per_node(16, 1)
    (4, 8)
    """
    if machines == 1:
        return RANKS_PER_NODE
    return max(1, ranks // machines)


def read_planned_sharding(recipe: Recipe, config: str | None, ranks: int) -> Sharding:
    """Reads the layout of a run on `ranks` ranks.

    Environment variables that a launcher has set for this process are ignored.

    `config`: the Accelerate file; None uses the recipe's.
    """
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_"))
    }
    return read_sharding(config, recipe.run.accelerate_config, environ | {"WORLD_SIZE": str(ranks)})


def _judge_length(config: Mapping[str, Any], max_length: int) -> Iterator[str]:
    """Yields a remark if documents may be longer than the model was made for."""
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
    """Yields a remark if held-out vectors are not counted, because their number is not known."""
    if spec.recipe.method_facts.embeds and count_held_out(spec) is None:
        bytes_per_query = compared_bytes(spec, queries=1)
        yield (
            f"held-out queries are compared all at once, {bytes_per_query / 1024:.0f} KiB each, "
            "which are not counted: eval_split_size as a count, or max_samples, says how many "
            "there are"
        )


def _describe_stored_teacher(spec: RunSpec, speed: Speed) -> Iterator[str]:
    """Yields a remark on the disk that the teacher's likeliest tokens take (`distill_top_k`)."""
    top_k = spec.recipe.method.distill_top_k
    if top_k is None:
        return
    token_bytes = stored_token_bytes(top_k)
    if speed.epoch_tokens is None:
        whole = ""
    else:
        whole = f", {disk_size(token_bytes * speed.epoch_tokens)} if all of an epoch are trained on"
    yield (
        f"the teacher's likeliest tokens take {token_bytes:,} bytes of disk a trained token in "
        f"dataset_cache_dir, which are not counted{whole}"
    )


def _describe_states(spec: RunSpec) -> Iterator[str]:
    """Yields a remark if recurrent layers keep states of completions, which are not counted."""
    if spec.recipe.samples_itself and spec.architecture.family.recurrence is not None:
        yield (
            "recurrent layers keep a state of each completion while it is sampled, which is not "
            "counted; a smaller per_device_generation_batch_size samples fewer at once"
        )


def _describe_traces(spec: RunSpec) -> Iterator[str]:
    """Yields a remark if activations cannot be counted, or recurrent layers hold less than is
    counted.
    """
    recurrence = spec.architecture.family.recurrence
    packages = recurrence and recurrence.packages  # kernels for recurrent layers on a GPU
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
    """Yields a remark if the ranks of a pipeline wait for a large share of a step."""
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
    """Yields a remark if a pipeline with a stage on each node would make a step faster.

    Without one, FSDP gathers every layer over all nodes.
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
    staged_speed = estimate_speed(staged, speed.mfu, read=None, links=links)
    if _overlapped_seconds(staged_speed) < 0.9 * _overlapped_seconds(speed):
        yield (
            f"pipeline_parallel_size={nodes} puts a stage on each node, within which its layers "
            f"are gathered: a step sends for {_describe_sending(staged_speed)} of computing, "
            f"instead of {_describe_sending(speed)}"
        )


def _overlapped_seconds(speed: Speed) -> float:
    """Seconds of a step if communication overlaps with computation wherever layers do not wait for
    it.
    """
    return max(speed.seconds_per_step, speed.communication_seconds) + speed.awaited_seconds


def _describe_sending(speed: Speed) -> str:
    """Names the seconds of communication and of computation in a step."""
    return (
        f"{format_duration(speed.communication_seconds)} beside "
        f"{format_duration(speed.seconds_per_step)}"
    )


def _read_teacher(model: Model, recipe: Recipe) -> TeacherSpec:
    """Reads the architecture and quantization of the recipe's teacher, `model`."""
    try:
        config, where = find_config(model)
    except UserError as error:
        raise UserError(f"{recipe.teacher_key}: {error}") from None
    stored = read_stored_quantization(config.get("quantization_config"), where)
    return TeacherSpec(
        architecture=read_architecture(config, where),
        quantization=stored or recipe.teacher_quantization,
    )


def _with_tokens(architecture: Architecture, recipe: Recipe) -> tuple[Architecture, Recipe]:
    """Adds the recipe's `added_tokens` to the model's vocabulary.

    Under LoRA the returned recipe also trains embedding and head whole, as the run does for new
    tokens. Without `added_tokens` both are returned as they are.

    No tokenizer is read. So that the plan is never too small, every token counts as new, and every
    row of the embedding as used.
    """
    keys = recipe.model
    if not keys.added_tokens:
        return architecture, recipe
    tokens = architecture.vocabulary + len(set(keys.added_tokens))
    vocabulary = grow_rows(architecture.vocabulary, tokens, keys.pad_vocab_to_multiple_of)
    if recipe.lora.use_peft:
        saved = (
            *recipe.lora.modules_to_save,
            re.escape(architecture.embedding.name.removesuffix(".weight")),
            "lm_head",
        )
        recipe = replace(recipe, lora=replace(recipe.lora, modules_to_save=saved))
    facts = replace(architecture.facts, vocabulary=vocabulary)
    return replace(architecture, vocabulary=vocabulary, facts=facts), recipe


def format_plan(plan: Plan, *, ranks_assumed: bool = False) -> str:
    """Formats the plan as text, without the table of layouts and without advice.

    `ranks_assumed`: the user has not given the number of ranks, which the text then says.
    """
    spec = plan.spec
    remarks = [f"remark     {remark}" for remark in plan.remarks]
    header = "\n".join([format_header(spec, ranks_assumed), *remarks])
    rows = memory_rows(plan.phases)
    last_column = len(rows[0]) - 1
    memory = align_columns(rows, left=(0, last_column))
    needs = [format_storage(plan.disk, plan.host)]
    if spec.device != "cpu":  # a CPU's MFU is unknown
        needs.append(format_speed(plan.speed, spec.ranks))
    return "\n\n".join([header, memory, "\n".join(needs)])


def to_dict(
    plan: Plan, advice: Advice | None = None, room: Room | None = None, *, has_config: bool = False
) -> dict[str, Any]:
    """Converts the plan to JSON values; memory is in bytes and time in seconds.

    With `advice`, the result has `fits` and `changes`. `fits` is false if a known part of the room
    is too small. It is true if all parts are known and large enough, and null if one is unknown, or
    if activations or some checkpoints are not counted.

    `has_config`: as in `describe_changes`.
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
        is_known = room is not None and room.is_known
        is_counted = not spec.uncounted and not plan.disk.keeps_more
        if (is_known and is_counted) or not advice.fits:
            content["fits"] = advice.fits
        else:
            content["fits"] = None
        content["changes"] = advice.changes and describe_changes(
            advice.changes, spec.sharding.source, has_config=has_config
        )
    return content


def compare_layouts(spec: RunSpec) -> list[tuple[str, list[int | None]]]:
    """Calculates the peak of the run in other layouts.

    Returns:
        For each layout its name, and the peak bytes of one rank for each number in TABLE_RANKS;
        None if the layout is impossible on that many ranks. These layouts shard neither rows nor
        matrices, experts or layers. If the run's own layout does, it comes first.
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
    own_sharding = spec.sharding
    sizes = own_sharding.group_sizes | {
        "expert_parallel_size": own_sharding.expert_parallel_size,
        "pipeline_parallel_size": own_sharding.pipeline_parallel_size,
    }
    own_sizes = ", ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    if own_sizes:
        layouts = {f"this run's: {own_sizes}": own_sharding} | layouts

    def calculate_peak(name: str, sharding: Sharding, ranks: int) -> int | None:
        # on one node, hybrid sharding is full sharding
        is_hybrid = name == "fsdp_hybrid_shard"
        if ranks % sharding.smallest_world or (is_hybrid and ranks <= spec.ranks_per_node):
            return None
        return find_peak(replace(spec, sharding=sharding, ranks=ranks)).total

    return [
        (name, [calculate_peak(name, sharding, ranks) for ranks in TABLE_RANKS])
        for name, sharding in layouts.items()
    ]


def _torch_version() -> tuple[int, int]:
    """Reads the installed torch's version without importing torch: (major, minor).

    Without torch it is the newest version that was tested.
    """
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return (2, 13)
    return int(major), int(minor)


def plan_command(arguments: argparse.Namespace) -> int:
    """Prints the plan of `arguments.recipe`.

    Returns the exit code: 1 if the run does not fit the sizes that the flags give, else 0.
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
    # `each`, not `each.alone`, so that the rules of `make_plan` know of the other adapters
    plans = [
        make_plan(each, sharding, ranks, mfu=mfu, links=_read_links(arguments))
        for each in split_adapters(recipe)
    ]
    heaviest = max(plans, key=lambda plan: plan.peak_bytes)
    if len(plans) > 1 and not arguments.json:
        print(_describe_adapters(plans, heaviest))
    others = sum(plan.disk.total for plan in plans) - heaviest.disk.total
    spec = replace(heaviest.spec, other_adapters_bytes=others)
    return _show(replace(heaviest, spec=spec, disk=plan_disk(spec)), room, arguments)


def _describe_adapters(plans: Sequence[Plan], heaviest: Plan) -> str:
    """Describes the memory and disk that each of several adapters needs."""
    name = heaviest.spec.recipe.folder.name
    lines = [
        f"adapters   {len(plans)}, trained in turn on one base: memory is that of the largest, "
        f"{name}, whose plan follows"
    ]
    for plan in plans:
        need = f"{gib(plan.peak_bytes)} GiB, {disk_size(plan.disk.total)} on disk"
        lines.append(f"           {plan.spec.recipe.folder.name}: {need}")
    return "\n".join(lines) + "\n"


def _show(plan: Plan, room: Room, arguments: argparse.Namespace) -> int:
    """Prints a plan, and advice if a part of the room is known; returns the exit code."""
    nothing_known = Room(device=None)
    advice = None if room == nothing_known else advise(plan.spec, room)
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
    """Reads a machine's memory and disk from the values of three flags; None: not given.

    A bare number is read as GiB, and a line on stderr says so. Raises `UserError` if a value is not
    a size.
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
        with_unit = read_gpu_memory(text)
        if with_unit != text:
            print(f"{flag} {text}: read as {with_unit}", file=sys.stderr)
        sizes.append(_read_size(flag, with_unit))
    device_bytes, host_bytes, disk_bytes = sizes
    return Room(device_bytes, host_bytes, disk_bytes)


def _read_links(arguments: argparse.Namespace) -> Links:
    """Reads the rates of --gpu-link and --network; without a flag, that of the assumed device."""
    assumed = Links()
    within_node = assumed.within_node
    if arguments.gpu_link is not None:
        within_node = float(_read_size("--gpu-link", arguments.gpu_link))
    between_nodes = assumed.between_nodes
    if arguments.network is not None:
        between_nodes = float(_read_size("--network", arguments.network))
    return Links(within_node, between_nodes)


def _read_size(flag: str, text: str) -> int:
    """Reads the size in bytes that `flag` gives.

    Raises `UserError`, with the flag's name, for a text that is not a size, and for a size below
    1 MiB, which probably lacks a unit.
    """
    try:
        size = read_size(text)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    if size < MIB:
        raise UserError(f"{flag} {text}: is {size} bytes; write a unit, for example 80GiB")
    return size


def _assume_ranks(recipe: Recipe, config: str | None) -> int:
    """Assumes a number of ranks, for a plan without --num-processes.

    It is the size of the mesh in the Accelerate file, times the stages of a pipeline. Without a
    mesh it is 1 for a single process, else 8, the GPUs of a usual node, or as many more as the
    recipe's groups of ranks require.
    """
    sharding = read_sharding(config, recipe.run.accelerate_config, {})
    sharding = with_recipe_keys(sharding, recipe)
    if sharding.mesh_sizes is not None:
        return prod(sharding.mesh_sizes.values()) * sharding.pipeline_parallel_size
    return 1 if sharding.layout == "single" else round_up(8, sharding.smallest_world)
