"""The text of a plan: its tables and lines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields

from finetune.config.layout import frozen_dtype
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
from finetune.units import GIB, MIB, count, counted, disk_size, gib

PARTS = tuple(field.name for field in fields(Snapshot) if field.name != "name")
SHORT = {"parameters": "weights", "communication": "reducing", "temporaries": "temp."}


def format_duration(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> format_duration(0.5), format_duration(150), format_duration(8000), format_duration(200000)
    ('0.50 s', '2.5 min', '2.2 h', '2.3 days')
    """
    for limit, size, name in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            if seconds < 1:
                return f"{seconds / size:.2f} {name}"
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 86400:.1f} days"


def name_layout(spec: RunSpec) -> str:
    """The layout and its strategy, and the sizes of a hybrid one."""
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
    """The lines on model, layout, precision, method and batch; and one on the number of ranks where
    that is assumed.
    """
    architecture = spec.architecture
    recipe = spec.recipe
    sharding = spec.sharding
    trained = spec.trained_numel
    tokens = spec.tokens_per_step
    active = ""
    if architecture.facts.experts:
        active = f"{count(architecture.parameters - architecture.idle_parameters)} active, "
    group = sharding.ranks_per_batch
    if group == 1:
        data_ranks = counted(spec.ranks, "rank")
    else:
        data_ranks = f"{counted(spec.data_ranks, 'group')} of {group} ranks"
    model = recipe.model.model_name_or_path or "model_config"
    frozen = ""
    if recipe.lora.use_peft:
        frozen = f"{_name_frozen(spec)} (frozen), adapters "
    parameters = frozen + spec.trained_dtype
    computed = spec.compute_dtype
    if sharding.fp8 is not None:
        share = sum(spec.fp8_weights.values()) / architecture.parameters
        computed += f" and FP8 ({sharding.fp8.recipe_name}; {share:.0%} of the weights)"
    if scheme := recipe.quantization_aware.quantization_aware_training:
        computed += f" of what {scheme} rounds"
    lora = " (LoRA)" if recipe.lora.use_peft else ""
    lines = [
        f"model      {model}: {architecture.model_type}, {count(architecture.parameters)} "
        f"parameters, {active}{count(trained)} trained{lora}, {architecture.layer_names}",
        *_describe_teacher(spec),
        *_describe_reward_models(spec),
        f"layout     {name_layout(spec)} on {counted(spec.ranks, 'rank')} ({sharding.source})",
    ]
    for line in (sharding.describe_sequences(spec.ranks), *sharding.translated):
        if line:
            lines.append(f"           {line}")
    lines.append(
        f"precision  parameters {parameters}, compute {computed}, gradients reduced in "
        f"{spec.reduced_dtype}; activation checkpointing {_describe_checkpointing(spec)}"
    )
    if recipe.optimization.optim_in_backward:
        lines.append("update     each parameter in the backward, its gradient freed at once")
    lines += _describe_method(spec)
    lines.append(
        f"batch      {spec.rows_per_step} rows x {recipe.row_tokens:,} tokens a step = "
        f"{tokens:,} tokens: {data_ranks} x {counted(spec.accumulation, 'micro-batch')} x "
        f"{counted(spec.rows, 'row')}"
    )
    if ranks_assumed:
        lines.append(
            f"ranks      {spec.ranks} assumed; --num-processes N plans for N, and the last table "
            "shows others"
        )
    return "\n".join(lines)


def _describe_checkpointing(spec: RunSpec) -> str:
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
    """The lines on a method whose loss is not the sum over trained tokens; empty for others."""
    if not spec.weighs_documents:
        return []
    facts = spec.recipe.method_facts
    if facts.samples:
        return _describe_sampling(spec)
    method = spec.recipe.method.method
    if facts.scores:
        scored = f"{counted(spec.architecture.scores, 'score')} of each document, at its last token"
        return [f"method     {method}: {scored}"]
    if facts.embeds:
        documents = counted(spec.rows_per_step * (spec.recipe.group_size - 1), "document")
        return [
            f"method     {method}: {counted(spec.rows_per_step, 'pair')} a step, each query among "
            f"{documents}; one more forward of each micro-batch, without gradients"
        ]
    return _describe_preferences(spec)


def _describe_sampling(spec: RunSpec) -> list[str]:
    """The lines on what is sampled, and what of it is not planned."""
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


REFERENCES = {
    "adapters off": (
        "the model with its adapters off: one more forward of each micro-batch, without gradients"
    ),
    "stored": (
        "log-probabilities, computed once before training and stored; no second copy of the weights"
    ),
}


def _describe_preferences(spec: RunSpec) -> list[str]:
    """The answers in a row, and where their reference comes from."""
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
    if spec.teacher is None:
        return []
    architecture = spec.teacher.architecture
    quantization = spec.teacher.quantization
    model = spec.recipe.teacher
    stored = ""
    if quantization.bits:
        stored = f", {describe_quantization(quantization)} in linear layers"
    top_k = spec.recipe.method.distill_top_k
    asked = ""
    if top_k is not None:
        asked = f"; asked before training, its {top_k} likeliest of each token kept in files"
    return [
        f"teacher    {model and model.model_name_or_path}: {architecture.model_type}, "
        f"{count(architecture.parameters)} parameters, "
        f"frozen in {spec.compute_dtype}{stored}{asked}"
    ]


def _describe_reward_models(spec: RunSpec) -> list[str]:
    """The models that pay completions, all of which each rank holds."""
    lines = []
    for name, architecture in zip(
        spec.recipe.rollout.reward_models, spec.reward_models, strict=True
    ):
        sizes = (
            f"{architecture.model_type}, {count(architecture.parameters)} parameters, "
            f"in {spec.compute_dtype}, whole on each rank"
        )
        lines.append(f"reward     {name}: {sizes}")
    for judge in spec.recipe.rollout.judges:
        asked = f"asked at {judge.url}, {judge.concurrency} requests at a time"
        lines.append(f"reward     {judge.title}: {judge.model} {asked}; its time is not counted")
    return lines


def _name_frozen(spec: RunSpec) -> str:
    """The dtype of a frozen base, and how its linear layers are quantized."""
    quantization = spec.recipe.quantization
    dtype = frozen_dtype(spec.sharding, spec.recipe.lora)
    if quantization.bits:
        return f"{dtype}, {describe_quantization(quantization)} in linear layers"
    return dtype


def memory_rows(phases: Sequence[Phase]) -> list[list[str]]:
    """Each phase's peak on the fullest rank, by part: cells, headings first; in MiB if all are
    below 1 GiB.
    """
    small = max(phase.peak.total for phase in phases) < GIB
    shown = [part for part in PARTS if any(getattr(phase.peak, part) for phase in phases)]
    parts = [SHORT.get(part, part) for part in shown]
    head = [f"{'MiB' if small else 'GiB'} on one rank", *parts, "total", "highest at"]

    def cell(bytes_: int) -> str:
        return f"{bytes_ / MIB:.2f}" if small else gib(bytes_)

    rows = [
        [
            phase.name,
            *(cell(getattr(phase.peak, part)) for part in shown),
            cell(phase.peak.total),
            phase.peak.name,
        ]
        for phase in phases
    ]
    return [head, *rows]


def format_layouts(
    rows: Iterable[tuple[str, Sequence[int | None]]], ranks: Sequence[int], limit: int | None
) -> str:
    """The peak of one rank for layouts (rows) and numbers of ranks (columns); above `limit` in
    brackets.
    """

    def cell(value: int | None) -> str:
        if value is None:
            return "-"
        if limit is not None and value > limit:
            return f"({gib(value)})"
        return gib(value)

    head = ["GiB on one rank, by ranks", *(str(number) for number in ranks)]
    return align_columns(
        [head, *([name, *(cell(value) for value in values)] for name, values in rows)], left=(0,)
    )


def format_speed(speed: Speed, ranks: int) -> str:
    """The time, and the formula behind it."""
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
            f"an epoch of about {count(speed.epoch_tokens)} tokens: "
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
    """Describes the messages between ranks in a step, and their time."""
    if not speed.communication:
        return []
    calls = Counter[str]()
    moved = Counter[str]()
    for each in speed.communication:
        calls[each.kind] += each.calls
        moved[each.kind] += each.bytes
    listed = ", ".join(
        f"{kind} {disk_size(moved[kind])} in {count(calls[kind])} calls" for kind in calls
    )
    seconds = format_duration(speed.communication_seconds)
    awaited = ""
    if speed.awaited_seconds:
        awaited = f", of which layers wait for {format_duration(speed.awaited_seconds)}"
    within = f"{disk_size(round(speed.links.within_node))}/s"
    between = f"{disk_size(round(speed.links.between_nodes))}/s"
    lines = [
        f"not counted in: {seconds} a step of communication if nothing hides it{awaited}",
        f"a rank's {listed};",
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
    """The lines on a run's disk, its state in files, and the memory of a host."""
    if disk.checkpoints_kept is None:
        kept = "all are kept"
    else:
        at_least = "at least " if disk.keeps_more else ""
        kept = f"{at_least}{disk.checkpoints_kept} kept, 1 being written"
    adapter = f", adapter {gib(disk.adapter)}" if disk.adapter else ""
    adapter += f", weights for the server {gib(disk.rollouts)}" if disk.rollouts else ""
    lines = [
        f"disk       {gib(disk.total)} GiB: checkpoints {gib(disk.checkpoint)} each ({kept}), "
        f"export {gib(disk.export)}{adapter}"
    ]
    if disk.offload:
        lines.append(
            f"offload    {gib(disk.offload)} GiB a node in offload_dir, read and written in every "
            "step"
        )
    parts = {
        "offloaded state": host.offloaded,
        "buffers": host.buffers,
        "offloaded activations": host.activations,
    }
    shown = "".join(f", {name} {gib(size)}" for name, size in parts.items() if size)
    lines.append(
        f"host       {gib(host.total)} GiB a node: processes {gib(host.processes)}{shown}, while "
        f"saving {gib(host.saving)}, while exporting {gib(host.export)}"
    )
    return "\n".join(lines)


def format_advice(
    advice: Advice, room: Room, source: str, *, has_config: bool, uncounted: bool
) -> str:
    """Says whether a run fits, and if not, what to change.

    Where a part of the room is unknown, or activations are not counted, it says what is required
    instead. `source` and `has_config` are those of `describe_changes`.
    """
    if advice.fits:
        if room.is_known and not uncounted:
            label = "fits       "
        else:
            label = "requires   "
        without = ""
        if uncounted:
            without = ", without activations, which are not counted"
        return f"{label}{compare_need(advice.need, room)}{without}{name_unknown(room)}"
    first = f"too large  {compare_need(advice.need, room)}"
    if advice.changes is None:
        ranks = ""
        if advice.ranks:
            ranks = f"; {advice.ranks} ranks would be enough"
        tried = [
            text
            for each in advice.tried
            for text in describe_changes([each], source, has_config=has_config)
        ]
        assert advice.after is not None, "what all changes leave"
        after = f"even with all changes that go together {compare_need(advice.after, room)}{ranks}"
        return f"{first}\n           {after}\n           tried: {', '.join(tried)}"
    if advice.after is None:
        less = "a smaller save_total_limit, export_at_end=false, or output_dir on another disk"
        return f"{first}\n           less disk: {less}"
    lines = [first, f"           with this {compare_need(advice.after, room)}{name_unknown(room)}:"]
    texts = describe_changes(advice.changes, source, has_config=has_config)
    lines += [
        f"           {text}   ({change.cost})"
        for text, change in zip(texts, advice.changes, strict=True)
    ]
    return "\n".join(lines)


def compare_need(need: Need, room: Room) -> str:
    """Compares the run's need of each part of a machine with what that has, where it is known.

    >>> compare_need(Need(20 * GIB, 211 * GIB, 45 * GIB), Room(24 * GIB, 62 * GIB))
    '20.00 of 24.00 GiB on each GPU, 211 of 62.00 GiB of host memory, 45.00 GiB of disk'
    """
    parts = (
        (need.device, room.device, "of CPU memory" if need.is_on_cpu else "on each GPU"),
        (need.host, room.host, "of host memory"),
        (need.disk, room.disk, "of disk"),
    )
    shown = (
        f"{gib(needed)}{'' if has is None else f' of {gib(has)}'} GiB {what}"
        for needed, has, what in parts
    )
    return ", ".join(shown)


def name_unknown(room: Room) -> str:
    """Names the flags that give the parts of `room` that are unknown; empty where all are known."""
    flags = {"--gpu-memory": room.device, "--host-memory": room.host, "--disk": room.disk}
    missing = [flag for flag, has in flags.items() if has is None]
    if missing:
        return f"; compare with {' and '.join(missing)}"
    return ""


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Rows as lines of aligned columns: right-aligned, except those in `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [row[i].ljust(w) if i in left else row[i].rjust(w) for i, w in enumerate(widths)]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)
