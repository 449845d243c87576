"""Formats a plan as text.

Each line begins with a label in a column of 11 characters; lines that continue it are indented by
as many.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from finetune.config.layout import find_frozen_dtype
from finetune.config.quantization import describe_quantization
from finetune.flops import FORMULA
from finetune.plan.advice import Advice, Need, Room, describe_changes
from finetune.plan.peaks import Phase
from finetune.plan.run_spec import Disk, Host, RunSpec
from finetune.plan.speed import (
    ASSUMED_DEVICE,
    HOST_BYTES_PER_SECOND,
    NVME_BYTES_PER_SECOND,
    PCIE_BYTES_PER_SECOND,
    Speed,
)
from finetune.plan.temporary_memory import Snapshot
from finetune.units import GIB, MIB, counted, disk_size, format_count, gib

# The columns of the memory table: the fields of a snapshot that are bytes, in their order.
PARTS = tuple(field.name for field in fields(Snapshot) if field.name != "name")
# field -> heading, where they differ
SHORT = {"parameters": "weights", "communication": "reducing", "temporaries": "temp."}


def format_duration(seconds: float) -> str:
    """Formats a duration in seconds, minutes, hours or days.

    >>> format_duration(0.5), format_duration(150), format_duration(8000), format_duration(200000)
    ('0.50 s', '2.5 min', '2.2 h', '2.3 days')
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def name_layout(spec: RunSpec) -> str:
    """Names the layout, its strategy, and the sizes of its groups of ranks."""
    sharding = spec.sharding
    name = sharding.layout if not sharding.is_fsdp else f"{sharding.layout} {sharding.strategy}"
    if sharding.strategy == "HYBRID_SHARD" and sharding.is_fsdp:
        name += f" ({spec.ranks // (spec.stages * spec.state_ranks)} x {spec.shards})"
    if sharding.divides_matrices:
        name += f", tensor parallel over {spec.tensor_ranks}"
    if spec.stages > 1:
        name += f", a pipeline of {spec.stages} stages ({sharding.pipeline_schedule})"
    if sharding.expert_parallel_size > 1:
        name += f", a layer's experts over {sharding.expert_parallel_size} ranks"
    return name + (", offloaded to the host" if sharding.cpu_offload else "")


def format_header(spec: RunSpec, ranks_assumed: bool) -> str:
    """Formats the lines above the memory table: model, layout, precision, method and batch.

    `ranks_assumed`: adds a line which says that the user has not given the number of ranks.
    """
    lines = [
        _describe_model(spec),
        *_describe_teacher(spec),
        *_describe_reward_models(spec),
        *_describe_layout(spec),
        _describe_precision(spec),
    ]
    if spec.recipe.optimization.optim_in_backward:
        lines.append("update     each parameter in the backward, its gradient freed at once")
    lines += _describe_method(spec)
    lines.append(_describe_batch(spec))
    if ranks_assumed:
        lines.append(
            f"ranks      {spec.ranks} assumed; --num-processes N plans for N, and the last table "
            "shows others"
        )
    return "\n".join(lines)


def _describe_model(spec: RunSpec) -> str:
    """The line on the model: name, family, parameters and layers."""
    architecture = spec.architecture
    name = spec.recipe.model.model_name_or_path or "model_config"
    active = ""
    if architecture.facts.experts:
        active = f"{format_count(architecture.parameters - architecture.idle_parameters)} active, "
    lora = " (LoRA)" if spec.recipe.lora.use_peft else ""
    return (
        f"model      {name}: {architecture.model_type}, {format_count(architecture.parameters)} "
        f"parameters, {active}{format_count(spec.trained_numel)} trained{lora}, "
        f"{architecture.layer_names}"
    )


def _describe_layout(spec: RunSpec) -> list[str]:
    """The line on the layout, then lines on its sequence groups and translated keys, if any."""
    sharding = spec.sharding
    details = [sharding.describe_sequences(spec.ranks), *sharding.translated]
    return [
        f"layout     {name_layout(spec)} on {counted(spec.ranks, 'rank')} ({sharding.source})",
        *(f"           {detail}" for detail in details if detail),
    ]


def _describe_precision(spec: RunSpec) -> str:
    """The line on dtypes, FP8, quantization-aware training and activation checkpointing."""
    fp8 = spec.sharding.fp8
    parameters = spec.trained_dtype
    if spec.recipe.lora.use_peft:
        parameters = f"{_name_frozen(spec)} (frozen), adapters {spec.trained_dtype}"
    computed = spec.compute_dtype
    if fp8 is not None:
        share = sum(spec.fp8_weights.values()) / spec.architecture.parameters
        computed += f" and FP8 ({fp8.recipe_name}; {share:.0%} of the weights)"
    if scheme := spec.recipe.quantization_aware.quantization_aware_training:
        computed += f" of what {scheme} rounds"
    return (
        f"precision  parameters {parameters}, compute {computed}, gradients reduced in "
        f"{spec.reduced_dtype}; activation checkpointing {_describe_checkpointing(spec)}"
    )


def _describe_batch(spec: RunSpec) -> str:
    """The line on the rows and tokens of a step, and on how ranks and micro-batches share them."""
    ranks_per_group = spec.sharding.ranks_per_batch
    if ranks_per_group == 1:
        data_ranks = counted(spec.ranks, "rank")
    else:
        data_ranks = f"{counted(spec.data_ranks, 'group')} of {ranks_per_group} ranks"
    is_full = spec.data_ranks * spec.accumulation * spec.rows == spec.rows_per_step
    return (
        f"batch      {counted(spec.rows_per_step, 'row')} x {spec.recipe.row_tokens:,} tokens a "
        f"step = {spec.tokens_per_step:,} tokens: {data_ranks} x "
        f"{counted(spec.accumulation, 'micro-batch')} x {'' if is_full else 'at most '}"
        f"{counted(spec.rows, 'row')}"
    )


def _describe_checkpointing(spec: RunSpec) -> str:
    """Names the layers that are checkpointed, what they offload and what they keep; or "off"."""
    if not spec.sharding.activation_checkpointing:
        return "off"
    keys = spec.recipe.model
    every = keys.activation_checkpointing_every
    text = "every layer" if every == 1 else f"one layer in {every}"
    if keys.activation_offload:
        text += ", offloaded"
    if keys.activation_checkpointing_keeps != "nothing":
        text += f", {keys.activation_checkpointing_keeps.replace('_', ' ')} kept"
    return text


def _describe_method(spec: RunSpec) -> list[str]:
    """The lines on the method; empty if its loss is the sum over trained tokens."""
    if not spec.weighs_documents:
        return []
    facts = spec.recipe.method_facts
    if facts.samples:
        return _describe_sampling(spec)
    method = spec.recipe.method.method
    if facts.scores:
        scores = counted(spec.architecture.scores, "score")
        return [f"method     {method}: {scores} of each document, at its last token"]
    if facts.embeds:
        documents = counted(spec.rows_per_step * (spec.recipe.group_size - 1), "document")
        return [
            f"method     {method}: {counted(spec.rows_per_step, 'pair')} a step, each query among "
            f"{documents}; one more forward of each micro-batch, without gradients"
        ]
    return _describe_preferences(spec)


def _describe_sampling(spec: RunSpec) -> list[str]:
    """The lines on sampled completions, and on the parts of sampling that are not planned."""
    keys = spec.recipe.rollout
    lines = [
        f"method     {spec.recipe.method.method}: {keys.num_generations} completions of "
        f"{counted(spec.global_batch_size, 'prompt')} a step, of up to "
        f"{keys.max_completion_length:,} tokens each, {keys.per_device_generation_batch_size} "
        "at once on a rank; as if each filled a row"
    ]
    if keys.takes_turns:
        lines.append("           tools answer in between, whose time is not planned")
    if not spec.recipe.samples_itself:
        lines.append(
            "           sampled by the vLLM server, whose memory and time are not planned; each "
            "step writes it the weights"
        )
    return lines


# where the reference comes from (`RunSpec.reference`) -> how the plan says it
REFERENCES = {
    "adapters off": (
        "the model with its adapters off: one more forward of each micro-batch, without gradients"
    ),
    "stored": (
        "log-probabilities, computed once before training and stored; no second copy of the weights"
    ),
}


def _describe_preferences(spec: RunSpec) -> list[str]:
    """The lines on a preference method: the answers in a row, and the reference if there is one."""
    is_pair = spec.recipe.method_facts.rows == "pairs"
    answers = "pairs" if is_pair else "an answer and a mismatched one"
    lines = [
        f"method     {spec.recipe.method.method}: a row holds {answers} of up to "
        f"{spec.recipe.data.max_length:,} tokens each; log-probabilities by document"
    ]
    if spec.reference:
        lines.append(f"reference  {REFERENCES[spec.reference]}")
    return lines


def _describe_teacher(spec: RunSpec) -> list[str]:
    """The line on the teacher; empty without one."""
    if spec.teacher is None:
        return []
    architecture = spec.teacher.architecture
    quantization = spec.teacher.quantization
    model = spec.recipe.teacher
    quantized = ""
    if quantization.bits:
        quantized = f", {describe_quantization(quantization)} in linear layers"
    top_k = spec.recipe.method.distill_top_k
    before_training = ""
    if top_k is not None:
        before_training = (
            f"; asked before training, its {top_k} likeliest of each token kept in files"
        )
    return [
        f"teacher    {model and model.model_name_or_path}: {architecture.model_type}, "
        f"{format_count(architecture.parameters)} parameters, "
        f"frozen in {spec.compute_dtype}{quantized}{before_training}"
    ]


def _describe_reward_models(spec: RunSpec) -> list[str]:
    """A line for each reward model, then for each judge, which is a model on a server."""
    lines = []
    names = spec.recipe.rollout.reward_models
    for name, architecture in zip(names, spec.reward_models, strict=True):
        lines.append(
            f"reward     {name}: {architecture.model_type}, "
            f"{format_count(architecture.parameters)} parameters, in {spec.compute_dtype}, "
            "whole on each rank"
        )
    for judge in spec.recipe.rollout.judges:
        lines.append(
            f"reward     {judge.title}: {judge.model} asked at {judge.url}, {judge.concurrency} "
            "requests at a time; its time is not counted"
        )
    return lines


def _name_frozen(spec: RunSpec) -> str:
    """Names the dtype of a frozen base and, if its linear layers are quantized, how."""
    quantization = spec.recipe.quantization
    dtype = find_frozen_dtype(spec.sharding, spec.recipe.lora)
    if quantization.bits:
        return f"{dtype}, {describe_quantization(quantization)} in linear layers"
    return dtype


def memory_rows(phases: Sequence[Phase]) -> list[list[str]]:
    """Makes the cells of the memory table, headings first: a row for each phase's peak.

    A column is a part of a snapshot; parts that are 0 in all phases are left out. Cells are in MiB
    if all peaks are below 1 GiB, else in GiB.
    """
    is_in_mib = max(phase.peak.total for phase in phases) < GIB
    parts = [part for part in PARTS if any(getattr(phase.peak, part) for phase in phases)]
    headings = [
        f"{'MiB' if is_in_mib else 'GiB'} on one rank",
        *(SHORT.get(part, part) for part in parts),
        "total",
        "highest at",
    ]

    def format_cell(bytes_: int) -> str:
        return f"{bytes_ / MIB:.2f}" if is_in_mib else gib(bytes_)

    rows = [
        [
            phase.name,
            *(format_cell(getattr(phase.peak, part)) for part in parts),
            format_cell(phase.peak.total),
            phase.peak.name,
        ]
        for phase in phases
    ]
    return [headings, *rows]


def format_layouts(
    rows: Iterable[tuple[str, Sequence[int | None]]], ranks: Sequence[int], limit: int | None
) -> str:
    """Formats the table of layouts: the peak of one rank in GiB.

    Args:
        rows: The name of each layout, and its peak bytes for each of `ranks`; None is shown as "-".
        ranks: The numbers of ranks, which head the columns.
        limit: Bytes that a device has; larger peaks are in brackets. None: no limit is known.
    """

    def format_cell(peak_bytes: int | None) -> str:
        if peak_bytes is None:
            return "-"
        if limit is not None and peak_bytes > limit:
            return f"({gib(peak_bytes)})"
        return gib(peak_bytes)

    headings = ["GiB on one rank, by ranks", *(str(number) for number in ranks)]
    cells = [[name, *(format_cell(peak_bytes) for peak_bytes in peaks)] for name, peaks in rows]
    return align_columns([headings, *cells], left=(0,))


def format_speed(speed: Speed, ranks: int) -> str:
    """Formats the lines on a step's time, on the formula behind it, and on the time's parts."""
    steps = ""
    if speed.steps is not None:
        steps = f"; {counted(speed.steps, 'step')}"
        if speed.steps_are_guessed:
            steps = f"; about {counted(speed.steps, 'step')} by the files' size"
    if not speed.is_meaningful:
        return (
            "time       no estimate: launching the kernels of so small a micro-batch takes longer "
            f"than computing them{steps}"
        )
    if speed.steps is not None:
        steps += f": {format_duration(speed.steps * speed.seconds_per_step)}"
    epoch = "the length of an epoch is known once the data has been read"
    if speed.seconds_per_epoch is not None and speed.epoch_tokens is not None:
        epoch = (
            f"an epoch of about {format_count(speed.epoch_tokens)} tokens: "
            f"{format_duration(speed.seconds_per_epoch)}"
        )
    lines = [
        f"{format_duration(speed.seconds_per_step)} a step, {speed.tokens_per_second:,.0f} "
        f"tokens/s on {counted(ranks, 'rank')}{steps}; {epoch}",
        f"at {speed.mfu:.0%} of {speed.peak_flops / 1e12:.0f} TFLOP/s ({ASSUMED_DEVICE}), "
        f"{speed.flop_per_token / 1e9:.3g} GFLOP a token ({FORMULA}); change it with --mfu",
    ]
    if speed.rollout_seconds:
        lines.append(
            f"of a step, {format_duration(speed.rollout_seconds)} are completions of full length, "
            "as fast as memory is read or tokens are computed"
        )
    if speed.bubble:
        lines.append(
            f"of a step, {speed.bubble:.0%} is the pipeline's bubble; its largest stage computes "
            f"{speed.imbalance:.2f} times the mean"
        )
    if speed.reference_share:
        lines.append(
            f"of a step, {speed.reference_share:.0%} is the reference's forward (2N + 4LHQT, "
            "counted in)"
        )
    if speed.reference_seconds is not None:
        seconds = format_duration(speed.reference_seconds)
        lines.append(
            f"before training {seconds} for the reference or the teacher: a forward of the data"
        )
    if speed.offload_seconds:
        lines.append(
            f"of a step, {format_duration(speed.offload_seconds)} are offload: state and gradients "
            f"over PCIe at {PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s, the update in host memory at "
            f"{HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s a node"
        )
    if speed.files_seconds:
        lines.append(
            f"of a step, {format_duration(speed.files_seconds)} are the state in offload_dir, read "
            f"and written at {NVME_BYTES_PER_SECOND / 1e9:.0f} GB/s a node"
        )
    return "time       " + f"\n{'':11}".join([*lines, *_describe_communication(speed)])


def _describe_communication(speed: Speed) -> list[str]:
    """The lines on the messages between ranks in a step and their time; empty on one rank."""
    if not speed.communication:
        return []
    calls_of_kind = Counter[str]()
    bytes_of_kind = Counter[str]()
    for collective in speed.communication:
        calls_of_kind[collective.kind] += collective.calls
        bytes_of_kind[collective.kind] += collective.bytes
    kinds = ", ".join(
        f"{kind} {disk_size(bytes_of_kind[kind])} in {format_count(calls)} calls"
        for kind, calls in calls_of_kind.items()
    )
    seconds = format_duration(speed.communication_seconds)
    awaited = ""
    if speed.awaited_seconds:
        awaited = f", of which layers wait for {format_duration(speed.awaited_seconds)}"
    within = f"{disk_size(round(speed.links.within_node))}/s"
    between = f"{disk_size(round(speed.links.between_nodes))}/s"
    lines = [
        f"not counted in: {seconds} a step of communication if nothing hides it{awaited}",
        f"a rank's {kinds};",
        (
            f"at {within} between GPUs of a node and {between} a node between nodes: --gpu-link "
            "and --network change these"
        ),
    ]
    if speed.communication_seconds - speed.awaited_seconds > speed.seconds_per_step:
        lines.append(
            "that is longer than the computation, which cannot hide it: a step takes at least as "
            "long"
        )
    return lines


def format_storage(disk: Disk, host: Host) -> str:
    """Formats the lines on a run's disk, on optimizer state in files, and on a node's memory."""
    if disk.checkpoints_kept is None:
        kept = "all are kept"
    else:
        at_least = "at least " if disk.keeps_more else ""
        kept = f"{at_least}{disk.checkpoints_kept} kept, 1 being written"
    adapter = f", adapter {gib(disk.adapter)}" if disk.adapter else ""
    adapter += f", weights for the server {gib(disk.rollouts)}" if disk.rollouts else ""
    adapter += f", other adapters {gib(disk.other_adapters)}" if disk.other_adapters else ""
    lines = [
        f"disk       {gib(disk.total)} GiB: checkpoints {gib(disk.checkpoint)} each ({kept}), "
        f"export {gib(disk.export)}{adapter}"
    ]
    if disk.offload:
        lines.append(
            f"offload    {gib(disk.offload)} GiB a node in offload_dir, read and written in every "
            "step"
        )
    optional_parts = {
        "offloaded state": host.offloaded,
        "buffers": host.buffers,
        "offloaded activations": host.activations,
    }
    parts = "".join(f", {name} {gib(size)}" for name, size in optional_parts.items() if size)
    lines.append(
        f"host       {gib(host.total)} GiB a node: processes {gib(host.processes)}{parts}, while "
        f"saving {gib(host.saving)}, while exporting {gib(host.export)}"
    )
    return "\n".join(lines)


def format_advice(
    advice: Advice, room: Room, source: str, *, has_config: bool, uncounted: bool
) -> str:
    """Says whether a run fits, and if not, which changes make it fit.

    Args:
        advice: The advice.
        room: What the machine has.
        source: As in `describe_changes`.
        has_config: As in `describe_changes`.
        uncounted: Activations are not counted, so that nobody knows whether the run fits.
    """
    if advice.fits:
        if room.is_known and not uncounted and not advice.need.keeps_more:
            label = "fits       "
        else:
            label = "requires   "
        without = ""
        if uncounted:
            without = ", without activations, which are not counted"
        return f"{label}{compare_need(advice.need, room)}{without}{name_unknown(room)}"
    too_large = f"too large  {compare_need(advice.need, room)}"
    if advice.changes is None:  # no changes are enough
        ranks = ""
        if advice.ranks:
            ranks = f"; {advice.ranks} ranks would be enough"
        tried = [
            text
            for change in advice.tried
            for text in describe_changes([change], source, has_config=has_config)
        ]
        assert advice.after is not None, "the need after all changes"
        after = f"even with all changes that go together {compare_need(advice.after, room)}{ranks}"
        return f"{too_large}\n           {after}\n           tried: {', '.join(tried)}"
    if advice.after is None:  # memory is enough, the disk is not
        less = "a smaller save_total_limit, export_at_end=false, or output_dir on another disk"
        return f"{too_large}\n           less disk: {less}"
    after = f"with this {compare_need(advice.after, room)}{name_unknown(room)}:"
    lines = [too_large, f"           {after}"]
    texts = describe_changes(advice.changes, source, has_config=has_config)
    lines += [
        f"           {text}   ({change.cost})"
        for text, change in zip(texts, advice.changes, strict=True)
    ]
    return "\n".join(lines)


def compare_need(need: Need, room: Room) -> str:
    """Compares what a run needs of each part of a machine with what the machine has.

    A part that is not known is named with the need alone.

    >>> compare_need(Need(20 * GIB, 211 * GIB, 45 * GIB), Room(24 * GIB, 62 * GIB))
    '20.00 of 24.00 GiB on each GPU, 211 of 62.00 GiB of host memory, 45.00 GiB of disk'
    """
    parts = (
        (need.device, room.device, "of CPU memory" if need.is_on_cpu else "on each GPU"),
        (need.host, room.host, "of host memory"),
        (need.disk, room.disk, "of disk or more" if need.keeps_more else "of disk"),
    )
    texts = []
    for needed, available, name in parts:
        of_available = "" if available is None else f" of {gib(available)}"
        texts.append(f"{gib(needed)}{of_available} GiB {name}")
    return ", ".join(texts)


def name_unknown(room: Room) -> str:
    """Names the flags that give the unknown parts of `room`; "" if all parts are known."""
    flags = {"--gpu-memory": room.device, "--host-memory": room.host, "--disk": room.disk}
    missing = [flag for flag, available in flags.items() if available is None]
    if missing:
        return f"; compare with {' and '.join(missing)}"
    return ""


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Formats rows of cells as lines of aligned columns.

    `left`: the indexes of left-aligned columns; all others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
