"""What a run takes beside the memory of its devices: disk, host memory, and time at an assumed MFU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.methods import RowKind
from finetune.config.optimization import count_optimizer_bytes
from finetune.config.quantization import SCHEMES
from finetune.config.schema import Data
from finetune.constants import FP32, ITEMSIZE
from finetune.files.run_json import parse_json
from finetune.flops import PEAK_FLOPS, flop_per_token, fp8_share_of, mix_peaks
from finetune.plan.activations import offloaded_bytes
from finetune.plan.communication import Collective, Links, count_communication
from finetune.plan.run_spec import NVME_BYTES_PER_SECOND, RunSpec, count_multiplied
from finetune.plan.step_memory import find_peak, kv_cache_bytes

PROCESS_BYTES = 2 << 30  # a Python process with torch and CUDA loaded
# Without CUDA, its heap grown by the products that are compiled for each length of a row. Measured, less the planned
# tensors: 477 MiB for the quickstart, 971 MiB after 200 bf16 steps of up to 4,096 tokens (benchmarks/speed.py).
CPU_PROCESS_BYTES = 1 << 30
EXPORT_SHARD_BYTES = 5 * 10**9  # finetune export --max-shard-size


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on the run's disk; `offload` is elsewhere."""

    checkpoint: int  # one of them
    checkpoints_kept: int | None  # save_total_limit; None: all
    checkpoints: int  # those kept, and the one being written
    export: int
    adapter: int
    offload: int = 0  # of one node, in offload_dir while it trains
    rollouts: int = 0  # weights for a server that samples: the ranks' shards, what is made of them, and those before

    @property
    def total(self) -> int:
        return self.checkpoints + self.export + self.adapter + self.rollouts


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes of one node's memory."""

    processes: int  # where ranks compute on the CPU, with all their tensors
    offloaded: int  # parameters, gradients and optimizer state where they are offloaded
    activations: int  # what checkpointed layers keep, where it is offloaded
    saving: int  # the copy of the state that is written while training continues
    export: int  # one output file and one tensor, on the first rank
    buffers: int = 0  # beside a GPU: through which state in files passes

    @property
    def total(self) -> int:
        return self.processes + self.offloaded + self.activations + self.buffers + max(self.saving, self.export)


def plan_disk(spec: RunSpec, base_dtype: str) -> Disk:
    """Disk for the kept checkpoints and the export, in the recipe's `export_dtype` or else `base_dtype`."""
    trained, lora = [tensor for tensor in spec.tensors if tensor.trainable], spec.recipe.lora.use_peft
    recipe, files, optim = spec.recipe.checkpoint, spec.files(), spec.recipe.optimization.optim
    moments = sum(count_optimizer_bytes(optim, t.shape, t.itemsize, name=t.name, on_disk=True) for t in trained)
    # A full model's checkpoint is complete, also where some is frozen.
    stored = trained if lora else spec.tensors
    weights = sum(t.numel * t.itemsize for t in stored)
    checkpoint, is_handed_over = weights + moments, spec.recipe.rollout.vllm_server_base_url is not None
    return Disk(
        checkpoint=checkpoint,
        checkpoints_kept=recipe.save_total_limit,
        checkpoints=checkpoint * ((recipe.save_total_limit or 1) + 1),
        export=_exported_bytes(spec, ITEMSIZE[recipe.export_dtype or base_dtype]) if recipe.export_at_end else 0,
        adapter=sum(t.numel * t.itemsize for t in trained) if lora else 0,
        offload=files.size * min(spec.ranks, spec.ranks_per_node) if files is not None else 0,
        rollouts=is_handed_over * (weights + 2 * ITEMSIZE[spec.compute_dtype] * sum(t.numel for t in stored)),
    )


def _exported_bytes(spec: RunSpec, itemsize: int) -> int:
    """What all of `export_formats` hold."""
    a, keys, aware = spec.architecture, spec.recipe.checkpoint, spec.recipe.quantization_aware
    whole, quantized = itemsize * a.parameters, 0
    name = keys.export_quantization or aware.quantization_aware_training
    if name is not None:
        group = aware.qat_group_size if name == aware.quantization_aware_training else None
        weights = sum(linear.numel for layer in range(a.layers) for linear in a.linears(layer))
        quantized = whole - int(weights * (itemsize - SCHEMES[name].stored_bytes(itemsize, group)))
    return sum(quantized if each == "compressed-tensors" else whole for each in keys.export_formats)


def plan_host(spec: RunSpec) -> Host:
    """The memory of one node, for all its ranks."""
    ranks, files, on_cpu = min(spec.ranks, spec.ranks_per_node), spec.files(), spec.device == "cpu"
    trained, optim = [tensor for tensor in spec.tensors if tensor.trainable], spec.recipe.optimization.optim
    if files is None:
        state = sum(
            t.numel * t.itemsize + count_optimizer_bytes(optim, t.shape, t.itemsize, name=t.name) for t in trained
        )
    else:
        state = sum(t.numel * ITEMSIZE[spec.compute_dtype] + FP32 for t in trained)
    gradients, teacher = (sum(t.numel * t.itemsize for t in of) for of in (trained, spec.teacher_tensors))
    frozen = sum(t.numel * t.itemsize for t in spec.tensors if not t.trainable)
    share = ranks / (spec.state_ranks * spec.stages)  # of the sharded state, on this node
    saved = state + (0 if spec.recipe.lora.use_peft else frozen)
    exported = min(EXPORT_SHARD_BYTES, 4 * spec.architecture.parameters) + 4 * max(t.numel for t in spec.tensors)
    return Host(
        processes=ranks * (CPU_PROCESS_BYTES + find_peak(spec).total if on_cpu else PROCESS_BYTES),
        offloaded=int((state + frozen + gradients + teacher) * share) if spec.sharding.cpu_offload else 0,
        activations=ranks * offloaded_bytes(spec.part, spec.computation, spec.tokens),
        saving=int(saved * min(share, 1)) if files is None and not on_cpu else 0,
        export=exported if spec.recipe.checkpoint.export_at_end else 0,
        buffers=2 * files.buffer * ranks if files is not None and not on_cpu else 0,
    )


ASSUMED_DEVICE = "H100"
ASSUMED_MFU = 0.4
DEVICE_BYTES_PER_SECOND = 3.35e12  # the assumed device's memory
PCIE_BYTES_PER_SECOND = 25e9  # of one GPU to its host and back
HOST_BYTES_PER_SECOND = 100e9  # of a node's memory, as AdamW on its CPUs reaches it
BYTES_PER_TOKEN = 4  # of English text in a large vocabulary; only to guess the length of an epoch from the files' size
ANSWERS = ("chosen", "rejected", "response_w", "response_l")
SAMPLE_BYTES = 1 << 16  # read of a file of JSON lines, to estimate how much of it is text
MIN_MICRO_BATCH_SECONDS = 0.01  # below it, launching kernels takes longer than computing them


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run if it reaches the assumed MFU."""

    flop_per_token: float
    peak_flops: float  # of a device, per second: of bf16, and of FP8 where products run in it
    mfu: float
    tokens_per_second: float  # over all ranks
    tokens_per_step: int  # every row full
    seconds_per_step: float
    steps: int | None  # None: unknown without reading the data
    epoch_tokens: int | None  # None: unknown
    seconds_per_epoch: float | None
    steps_are_guessed: bool  # from the files' size, not from max_steps or the data itself
    micro_batch_seconds: float
    offload_seconds: float  # of a step
    files_seconds: float  # of a step: state in files, read and written
    bubble: float  # the share of a step in which ranks of a pipeline wait; counted in seconds_per_step
    imbalance: float  # the operations of a pipeline's stage with the most, over the mean; counted in too
    links: Links  # the rates at which ranks send
    communication: tuple[Collective, ...]  # of a step
    communication_seconds: float  # of a step, if the computation hid nothing of it; not in seconds_per_step
    awaited_seconds: float  # of these, what layers wait for, so that nothing hides it
    reference_share: float  # of a step's operations: the reference's forward, where adapters are switched off for it
    rollout_seconds: float  # of a step: completions of full length
    reference_seconds: float | None  # before training, where it is computed once; None: unknown, or not needed

    @property
    def is_meaningful(self) -> bool:
        """Whether a step is long enough for its time to follow from its FLOP."""
        return self.micro_batch_seconds >= MIN_MICRO_BATCH_SECONDS


def estimate_speed(spec: RunSpec, mfu: float, read: tuple[int, int] | None = None, links: Links | None = None) -> Speed:
    """The speed at `mfu` of the device's peak on every rank; `links` are by default those of its data sheet.

    `read`: an epoch's tokens and the run's steps, if known; else estimated from the files' size.
    """
    a = spec.architecture
    flops = flop_per_token(
        parameters=count_multiplied(a),
        layers=a.layers,
        heads=a.heads,
        head_size=a.mean_head_size,
        length=spec.recipe.data.max_length,
        frozen=_count_frozen(spec),
    )
    forward = (flops + 2 * _count_frozen(spec)) / 3  # the backward takes twice as many, but for frozen weights
    again = forward if spec.reference == "adapters off" else 0.0
    flops += again
    asked = 0.0 if spec.teacher is None else spec.teacher.flop_per_token(spec.recipe.data.max_length)
    is_stored = spec.recipe.method.distill_top_k is not None  # asked once, before training
    flops += 0.0 if is_stored else asked
    offload, files = offload_seconds(spec), files_seconds(spec)
    peak = mix_peaks(PEAK_FLOPS[ASSUMED_DEVICE], _fp8_share(spec, flops))
    rollout = rollout_seconds(spec, mfu, forward)
    computing = spec.tokens_per_step * flops / (mfu * peak * spec.ranks) * spec.imbalance / (1 - spec.bubble)
    seconds_per_step = computing + offload + files + rollout
    tokens_per_second = spec.tokens_per_step / seconds_per_step
    epoch_tokens, steps = read or _estimate_steps(spec)
    reference_seconds = None
    once = forward if spec.reference == "stored" else asked if is_stored else 0.0
    if once and epoch_tokens is not None:  # a forward of every document; held-out ones aside
        seen = epoch_tokens if steps is None else min(epoch_tokens, steps * spec.tokens_per_step)
        reference_seconds = seen * once / (mfu * PEAK_FLOPS[ASSUMED_DEVICE] * spec.ranks)
    communication = count_communication(spec)
    seconds = [(each.seconds(links or Links(), spec.ranks_per_node), each.is_awaited) for each in communication]
    return Speed(
        flop_per_token=flops,
        peak_flops=peak,
        mfu=mfu,
        tokens_per_second=tokens_per_second,
        tokens_per_step=spec.tokens_per_step,
        seconds_per_step=seconds_per_step,
        steps=steps,
        epoch_tokens=epoch_tokens,
        seconds_per_epoch=None if epoch_tokens is None else epoch_tokens / tokens_per_second,
        steps_are_guessed=read is None and spec.recipe.optimization.max_steps is None,
        micro_batch_seconds=seconds_per_step / spec.accumulation,
        offload_seconds=offload,
        files_seconds=files,
        bubble=spec.bubble,
        imbalance=spec.imbalance,
        links=links or Links(),
        communication=communication,
        communication_seconds=sum(taken for taken, _ in seconds),
        awaited_seconds=sum(taken for taken, is_awaited in seconds if is_awaited),
        rollout_seconds=rollout,
        reference_share=again / flops,
        reference_seconds=reference_seconds,
    )


def _estimate_steps(spec: RunSpec) -> tuple[int | None, int | None]:
    """(tokens of an epoch, steps of the run), as far as the files' sizes or the recipe say."""
    optimization = spec.recipe.optimization
    tokens, steps = estimate_epoch_tokens(spec.recipe.data, spec.recipe.method_facts.rows), optimization.max_steps
    if steps is None and tokens is not None:
        passes = optimization.num_train_epochs * spec.recipe.rollout.num_iterations
        steps = max(1, round(tokens / spec.tokens_per_step * passes))
    return tokens, steps


def _fp8_share(spec: RunSpec, flops: float) -> float:
    """The share of a token's FLOP that is multiplied in FP8."""
    if spec.sharding.fp8 is None:
        return 0.0
    trainable = {tensor.name for tensor in spec.tensors if tensor.trainable}
    trained = sum(numel for name, numel in spec.fp8_weights.items() if name in trainable)
    frozen, in_fp8 = sum(spec.fp8_weights.values()) - trained, spec.sharding.fp8.multiplies_weight_gradients
    return fp8_share_of(flops, trained=trained, frozen=frozen, weight_gradients=in_fp8)


def _count_frozen(spec: RunSpec) -> int:
    """The base's numbers in matrix products that get no gradient."""
    a = spec.architecture
    frozen = sum(t.numel for t in spec.tensors if not t.trainable and (a.tied or t.name != a.embedding.name))
    return frozen - (a.idle_parameters if spec.recipe.lora.use_peft else 0)


def offload_seconds(spec: RunSpec) -> float:
    """Seconds that CPU offload adds to a step, at the assumed rates; 0 without it.

    A micro-batch copies the rank's parameters to the device for the forward, once more for the backward if they were
    freed, and its gradients back. The update reads and writes the parameters and moments, and reads the gradients, in
    memory that all ranks of a node share. No overlap with the computation is assumed.
    """
    if not spec.sharding.cpu_offload:
        return 0.0
    state = spec.state()
    gathers = 1 if spec.sharding.strategy == "SHARD_GRAD_OP" else 2
    moved = spec.accumulation * (gathers * (state.trained + state.frozen) + state.gradients)
    files = spec.files()
    moments = state.optimizer if files is None else files.size
    touched = 2 * state.trained + state.gradients + 2 * moments
    return moved / PCIE_BYTES_PER_SECOND + touched * min(spec.ranks, spec.ranks_per_node) / HOST_BYTES_PER_SECOND


def rollout_seconds(spec: RunSpec, mfu: float, forward: float) -> float:
    """Seconds of a step in which a rank samples completions, each of full length; 0 where it samples none itself.

    A token of all rows reads all weights and half of a full cache, or computes. `forward`: FLOP of a token.
    """
    if not spec.recipe.samples_itself:
        return 0.0
    keys, per_rank = spec.recipe.rollout, -(-spec.rows_per_step // spec.data_ranks)
    rows = min(keys.per_device_generation_batch_size, per_rank)
    weights = sum(t.numel // t.divided * min(t.itemsize, spec.computation.itemsize) for t in spec.part_tensors)
    read = weights + kv_cache_bytes(spec, rows * spec.recipe.data.max_length) / 2
    speed = mfu * PEAK_FLOPS[ASSUMED_DEVICE]
    token = max(read / DEVICE_BYTES_PER_SECOND, rows * forward / speed)
    prompts = per_rank / keys.num_generations * (spec.recipe.data.max_length - keys.max_completion_length)
    seconds = -(-per_rank // rows) * keys.max_completion_length * token + prompts * forward / speed
    return seconds / keys.num_iterations


def files_seconds(spec: RunSpec) -> float:
    """Seconds in which a step reads and writes the state files of a node, at the assumed rate; 0 without.

    Only within the update does one overlap with another: nothing of it with forward and backward.
    """
    files = spec.files()
    return 0.0 if files is None else 2 * files.size * min(spec.ranks, spec.ranks_per_node) / NVME_BYTES_PER_SECOND


def estimate_epoch_tokens(data: Data, rows: RowKind = "answers") -> int | None:
    """Tokens of an epoch, from the size of the local files; None where some are not local or not read whole."""
    total = 0.0
    for source in data.datasets:
        path = Path(source.path)
        if not path.is_file() or source.split != "train" or source.max_samples is not None:
            return None
        total += path.stat().st_size * source.weight * _text_share(path, rows)
    return int(total) // BYTES_PER_TOKEN if data.datasets else None


def _text_share(path: Path, rows: RowKind) -> float:
    """The share of a JSON Lines file that is text, from its first lines; what is read twice counts twice."""
    if path.suffix != ".jsonl":
        return 1.0
    with path.open("rb") as file:
        text = file.read(SAMPLE_BYTES)
    lines = text.split(b"\n")[: -1 if len(text) == SAMPLE_BYTES else None]  # without the last, where it may be cut
    try:
        read = [parse_json(line) for line in lines if line.strip()]
    except ValueError:  # reported where the data is read
        return 1.0
    texts = sum(_text_bytes(row) + _text_bytes(_find_repeated(row, rows)) for row in read)
    return texts / sum(len(line) + 1 for line in lines) if lines else 1.0


def _find_repeated(row: Any, rows: RowKind) -> Any:
    """What a row holds once and is read twice: a pair's prompt (unless of whole conversations); a rated row.

    >>> _find_repeated({"question": "2+2?", "chosen": "4", "rejected": "5"}, "pairs")
    {'question': '2+2?'}
    """
    if rows == "answers" or not isinstance(row, dict):
        return None
    answers = {key: value for key, value in row.items() if key in ANSWERS}
    if any(isinstance(answer, list) and len(answer) > 1 for answer in answers.values()):
        return None
    return row if rows == "ratings" else {key: value for key, value in row.items() if key not in answers}


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_bytes, inner))
