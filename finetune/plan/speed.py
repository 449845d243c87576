"""The time of a step: computation at an assumed MFU, offload, and what ranks send each other; and
the steps of a run.

Collectives are counted as the layouts make them; tests/test_layouts_benchmark.py holds them to what
`benchmarks/layouts.py` measures. Left out are sums of a few numbers (norms, losses), those of
adapters under tensor parallelism, and a teacher's units.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.config.layout import divides_heads
from finetune.config.methods import RowKind
from finetune.config.schema import Data
from finetune.constants import FP32, ITEMSIZE, ceil_div
from finetune.files.json_files import parse_json
from finetune.flops import PEAK_FLOPS, flop_per_token, fp8_share_of, mix_peaks
from finetune.plan.activations import TOKEN_ID
from finetune.plan.forward_memory import kv_cache_bytes
from finetune.plan.run_spec import RunSpec, count_multiplied
from finetune.plan.state import StateTensor, split_into_units

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
COMPRESSED = (".gz", ".parquet")  # files whose size says little of their text
FIRST_BUCKET = 1 << 20  # bytes of DDP's (torch.nn.parallel.distributed)
BUCKET = 25 << 20  # bytes of its others


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second in one direction: of a GPU to the others of its node, and of a node to the
    others.
    """

    within_node: float = 450e9  # NVLink 4 of an H100 or H200, by their data sheets
    between_nodes: float = 400e9  # 8 adapters of 400 Gbit/s, as in a DGX H100


@dataclass(frozen=True, slots=True)
class Collective:
    """All calls of one kind that a rank makes in a step.

    `bytes` is their sum: a call counts its input or its output, whichever is larger. Ranks of the
    group are `stride` apart.
    """

    kind: Kind
    calls: int
    bytes: int
    ranks: int
    stride: int = 1
    # a layer needs the result at once; else it can run beside the computation
    is_awaited: bool = False

    def seconds(self, links: Links, ranks_per_node: int) -> float:
        """Estimates the time over rings, on which a rank sends (n - 1) / n of the bytes, twice for
        an all-reduce. What leaves a node shares its network with the node's other groups.

        >>> links = Links(within_node=400e9, between_nodes=80e9)
        >>> (
        ...     Collective("all-gather", 1, 8 * 10**9, ranks=8).seconds(links, 8),
        ...     Collective("all-reduce", 1, 10**9, 2, 8).seconds(links, 8),
        ... )
        (0.0175, 0.1)
        """
        ranks_on_node = max(1, min(self.ranks, ranks_per_node // self.stride))
        is_within_node = ranks_on_node == self.ranks
        network_share = links.between_nodes / ranks_per_node  # of one rank
        if self.kind == "send":  # to a neighbor, beside the sends of all ranks of the node
            return self.bytes / (links.within_node if is_within_node else network_share)
        sent = self.bytes * (2 if self.kind == "all-reduce" else 1)
        if is_within_node:
            return sent * (self.ranks - 1) / self.ranks / links.within_node
        if self.kind == "all-to-all":
            return sent * (self.ranks - ranks_on_node) / self.ranks / network_share
        slowest = min(links.within_node, network_share * ranks_on_node)
        return sent * (self.ranks - 1) / self.ranks / slowest


def count_communication(spec: RunSpec) -> tuple[Collective, ...]:
    """The collectives of a step, for rows that are full and routers that prefer no expert."""
    collectives = [*_list_unit_collectives(spec), *_list_gradient_reductions(spec)]
    awaited = (
        *_list_tensor_parallel_collectives(spec),
        *_list_sequence_parallel_collectives(spec),
        *_list_expert_exchanges(spec),
        *_list_pipeline_sends(spec),
    )
    collectives += [replace(each, is_awaited=True) for each in awaited]
    return tuple(each for each in collectives if each.ranks > 1 and each.bytes)


def _list_pipeline_sends(spec: RunSpec) -> Iterator[Collective]:
    """The states that enter a group of layers, and their gradients, from rank to rank."""
    if spec.stages > 1:
        calls = 2 * spec.sharding.pipeline_chunks // spec.stages * spec.accumulation
        state = spec.tokens * spec.architecture.hidden * spec.computation.itemsize
        yield Collective("send", calls, calls * state, spec.stages, spec.ranks // spec.stages)


def _list_unit_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Lists the collectives of FSDP.

    A unit is gathered for the forward of each micro-batch, and again for its backward where it was
    freed. Its gradients are reduced in each micro-batch. Under hybrid sharding they are also
    reduced over the replicas: by FSDP2 in the last micro-batch, by FSDP1 in each.
    """
    if not spec.sharding.is_fsdp:
        return
    times = spec.accumulation
    replicas = spec.ranks // (spec.stages * spec.state_ranks)
    for tensors, gathers in _list_units(spec):
        divided = tensors[0].divided
        stride = spec.tensor_ranks
        shards = spec.shards // divided
        unit_bytes = 0
        reduced = 0  # bytes of gradients
        for tensor in tensors:
            numel = _padded(tensor, shards)
            is_fp8 = tensor.name in spec.fp8_gathered
            unit_bytes += numel * (1 if is_fp8 else spec.computation.itemsize)
            if tensor.trainable:
                reduced += numel * ITEMSIZE[spec.reduced_dtype]
        yield Collective(
            "all-gather", gathers * times, gathers * times * unit_bytes, shards, stride * divided
        )
        yield Collective("reduce-scatter", times, times * reduced, shards, stride * divided)
        reductions = 1 if spec.sharding.layout == "fsdp2" else times
        yield Collective(
            "all-reduce", reductions, reductions * reduced // shards, replicas, spec.state_ranks
        )


def _list_units(spec: RunSpec) -> Iterator[tuple[Sequence[StateTensor], int]]:
    """The tensors of each unit, and how often a micro-batch gathers it.

    Divided experts are units of their own.
    """
    units = split_into_units(spec.part, spec.part_tensors, spec.sharding)
    forwards = 2 if spec.reference == "adapters off" else 1
    tensors_by_unit: dict[str, list[StateTensor]] = {}
    for tensor in spec.part_tensors:
        name = tensor.unit
        if name.startswith("layer") and not units.wraps_layers:
            name = "layers"
        is_tied_embedding = name == "embedding" and units.embedding.numel == 0
        if is_tied_embedding or (name == "layers" and spec.sharding.layout == "fsdp1"):
            name = "tail"
        if tensor.divided > 1:
            name += ", divided"
        tensors_by_unit.setdefault(name, []).append(tensor)
    for name, tensors in tensors_by_unit.items():
        stays = name == "tail" or units.stay_gathered
        # Nothing asks for the gradient of a frozen embedding's output but activation checkpointing.
        has_backward = (
            name != "embedding"
            or any(t.trainable for t in tensors)
            or spec.sharding.activation_checkpointing
        )
        if stays:
            yield tensors, 1
        else:
            yield tensors, forwards + has_backward


def _padded(tensor: StateTensor, shards: int) -> int:
    """Numbers of what FSDP gathers of a tensor: rows padded to a multiple of the shards; experts
    divide evenly.
    """
    if tensor.divided > 1:
        return tensor.numel // tensor.divided
    rows = tensor.shape[0]
    return tensor.numel // rows * ceil_div(rows, shards) * shards


def _list_gradient_reductions(spec: RunSpec) -> Iterator[Collective]:
    """Lists the all-reduces of DDP, which reduces gradients once a step, in buckets."""
    if spec.sharding.layout != "ddp":
        return
    calls = 0
    size = 0
    limit = FIRST_BUCKET
    gradients = [t.numel * t.itemsize for t in spec.tensors if t.trainable]
    for gradient in reversed(gradients):
        size += gradient
        if size >= limit:
            calls += 1
            size = 0
            limit = BUCKET
    if size > 0:  # the last bucket, not full
        calls += 1
    yield Collective("all-reduce", calls, sum(gradients), spec.ranks)


class _LayerPasses(NamedTuple):
    """How often a step computes a layer, summed over the layers of a rank."""

    forward: int  # with the reference's, and recomputed ones
    recomputed: int
    backward: int


def _count_passes(spec: RunSpec) -> _LayerPasses:
    every = spec.computation.checkpoint_every
    layers = spec.part.layers
    if every is None:
        recomputed = 0
    else:
        recomputed = spec.accumulation * ceil_div(layers, every)
    backward = spec.accumulation * layers
    forward = backward + recomputed
    if spec.reference == "adapters off":
        forward += backward
    return _LayerPasses(forward, recomputed, backward)


def _list_tensor_parallel_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Lists the collectives of tensor parallelism.

    A layer sums the outputs of attention and MLP, and the gradients of their inputs. Where
    transformers' plan gathers products, it gathers them in the forward, and in the backward the
    gradients of the next layer's input. The embedding's output is summed, and so are the numbers
    of the softmax and the gradient of the head's input.
    """
    ranks = spec.tensor_ranks
    architecture = replace(spec.architecture, layers=spec.part.layers)
    computation = spec.computation
    if ranks == 1:
        return
    forward, recomputed, backward = _count_passes(spec)
    size = spec.tokens * architecture.hidden * computation.itemsize
    # The recomputed forward ends with the last tensor that its backward reads: before the sum of
    # the MLP's outputs.
    calls = 2 * forward - recomputed + 2 * backward
    yield Collective("all-reduce", calls, calls * size, ranks)
    if architecture.family.tensor_parallel == "products":
        products = architecture.query_width + 2 * architecture.key_value_width
        inputs = architecture.query_width
        gathers = 3 * forward + backward  # of queries, keys and values; of the gradient
        if architecture.family.fused:  # of those together and gate with up; of both gradients
            products += 2 * architecture.intermediate
            inputs += architecture.intermediate
            gathers = 2 * forward + 2 * backward
        moved = spec.tokens * computation.itemsize * (forward * products + backward * inputs)
        yield Collective("all-gather", gathers, moved, ranks)
    forwards = spec.accumulation * (2 if spec.reference == "adapters off" else 1)
    yield Collective("all-reduce", forwards, forwards * size, ranks)  # the embedding
    yield Collective("all-reduce", 3 * forwards, forwards * (3 * FP32 * spec.tokens + size), ranks)


def _list_sequence_parallel_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Lists the collectives of sequence parallelism.

    A layer has two all-to-alls in the forward: of queries, keys and values, and of the outputs. It
    has as many in the backward. Ranks that do not divide the heads gather keys and values, and
    reduce their gradients.
    """
    ranks = spec.sharding.sequence_parallel_size
    architecture = spec.computed
    forward, _, backward = _count_passes(spec)
    if not divides_heads(architecture.heads, ranks):
        row = spec.tokens * ranks * spec.computation.itemsize
        if architecture.latent is not None:
            width = architecture.query_width + architecture.heads * architecture.latent.value
        else:
            width = 2 * architecture.key_value_width
        yield Collective("all-gather", 2 * forward, forward * row * width, ranks, spec.tensor_ranks)
        yield Collective(
            "reduce-scatter", 2 * backward, backward * row * width, ranks, spec.tensor_ranks
        )
        return
    repeated = math.lcm(architecture.key_value_heads, ranks) // architecture.key_value_heads
    key_value = 2 * architecture.key_value_width * repeated
    output = architecture.query_width
    if architecture.latent is not None:
        key_value = architecture.query_width + architecture.heads * architecture.latent.value
        output = architecture.heads * architecture.latent.value
    moved = (
        spec.tokens * spec.computation.itemsize * (architecture.query_width + key_value + output)
    )
    times = forward + backward
    yield Collective("all-to-all", 2 * times, times * moved, ranks, spec.tensor_ranks)


def _list_expert_exchanges(spec: RunSpec) -> Iterator[Collective]:
    """Lists the all-to-alls of expert parallelism.

    The ranks first exchange how many tokens come to each expert. Then every token goes to each of
    its experts and comes back.
    """
    ranks = spec.sharding.expert_parallel_size
    mixture = spec.architecture.mixture
    if mixture is None or ranks == 1:
        return
    share = len(mixture.layers) / spec.architecture.layers
    passes = _count_passes(spec)
    forward = round(passes.forward * share)
    backward = round(passes.backward * share)
    calls = 2 * (forward + backward)
    states = spec.tokens * mixture.chosen * spec.architecture.hidden * spec.computation.itemsize
    yield Collective("all-to-all", calls, calls * states, ranks)
    yield Collective("all-to-all", forward, forward * TOKEN_ID * mixture.experts, ranks)


ASSUMED_DEVICE = "H100"
# The shares of its peak that one H200 reached (benchmarks/results/gpu.json), a little rounded down.
MIXTURE_MFU = 0.28  # 30B-A3B, LoRA, one row of 4,096 tokens, checkpointed
FULL_MFU = 0.55
ADAPTER_MFU = 0.58
CHECKPOINTED_FULL_MFU = 0.5
CHECKPOINTED_ADAPTER_MFU = 0.41
UNCOMPILED = 0.77  # of what compiled layers reach (1B on an H100)
DEVICE_BYTES_PER_SECOND = 3.35e12  # the assumed device's memory
PCIE_BYTES_PER_SECOND = 25e9  # of one GPU to its host and back
NVME_BYTES_PER_SECOND = 5e9  # of one node, read and written in turns
HOST_BYTES_PER_SECOND = 100e9  # of a node's memory, as AdamW on its CPUs reaches it
# of English text in a large vocabulary; only to guess the length of an epoch from the files' size
BYTES_PER_TOKEN = 4
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
    # the share of a step in which ranks of a pipeline wait; counted in seconds_per_step
    bubble: float
    # the operations of a pipeline's stage with the most, over the mean; counted in too
    imbalance: float
    links: Links  # the rates at which ranks send
    communication: tuple[Collective, ...]  # of a step
    # of a step, if the computation hid nothing of it; not in seconds_per_step
    communication_seconds: float
    awaited_seconds: float  # of these, what layers wait for, so that nothing hides it
    # of a step's operations: the reference's forward, where adapters are switched off for it
    reference_share: float
    rollout_seconds: float  # of a step: completions of full length
    # before training, where it is computed once; None: unknown, or not needed
    reference_seconds: float | None

    @property
    def is_meaningful(self) -> bool:
        """Whether a step is long enough for its time to follow from its FLOP."""
        return self.micro_batch_seconds >= MIN_MICRO_BATCH_SECONDS


def assume_mfu(spec: RunSpec) -> float:
    """The share of the peak that such a run reached where it was measured."""
    is_checkpointed = spec.sharding.activation_checkpointing
    if spec.architecture.mixture is not None:
        share = MIXTURE_MFU
    elif spec.recipe.lora.use_peft:
        if is_checkpointed:
            share = CHECKPOINTED_ADAPTER_MFU
        else:
            share = ADAPTER_MFU
    else:
        share = CHECKPOINTED_FULL_MFU if is_checkpointed else FULL_MFU
    if spec.recipe.model.torch_compile:
        return share
    return share * UNCOMPILED


def estimate_speed(
    spec: RunSpec, mfu: float, read: tuple[int, int] | None = None, links: Links | None = None
) -> Speed:
    """Estimates the speed of a run.

    Args:
        spec: The run.
        mfu: The share of the device's peak that every rank reaches.
        read: The tokens of an epoch and the steps of the run; None estimates both from the files'
            size.
        links: The rates at which ranks send; None for those of the device's data sheet.
    """
    flops = _count_flops(spec)
    links = links or Links()
    offload = offload_seconds(spec)
    files = files_seconds(spec)
    rollout = rollout_seconds(spec, mfu, flops.forward)
    peak = mix_peaks(PEAK_FLOPS[ASSUMED_DEVICE], _fp8_share(spec, flops.step))
    one_rank = spec.tokens_per_step * flops.step / (mfu * peak * spec.ranks)
    computing = one_rank * spec.imbalance / (1 - spec.bubble)
    seconds_per_step = computing + offload + files + rollout
    tokens_per_second = spec.tokens_per_step / seconds_per_step
    epoch_tokens, steps = read or _estimate_steps(spec)
    communication = count_communication(spec)
    awaited = [each for each in communication if each.is_awaited]
    return Speed(
        flop_per_token=flops.step,
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
        links=links,
        communication=communication,
        communication_seconds=_sum_seconds(communication, links, spec),
        awaited_seconds=_sum_seconds(awaited, links, spec),
        rollout_seconds=rollout,
        reference_share=flops.again / flops.step,
        reference_seconds=_estimate_reference(spec, flops.once, mfu, epoch_tokens, steps),
    )


class _FlopPerToken(NamedTuple):
    """The floating-point operations of a token."""

    forward: float  # of the trained model
    again: float  # a second forward: with adapters off, or over text that embeds
    step: float  # all that a step computes, a teacher's forward included
    once: float  # a forward before training: of a reference or teacher whose answers are stored


def _count_flops(spec: RunSpec) -> _FlopPerToken:
    architecture = spec.architecture
    embeds = spec.recipe.method_facts.embeds
    length = spec.recipe.data.max_length
    unasked = architecture.head_rows * architecture.hidden if embeds else 0  # the output head
    trained = flop_per_token(
        parameters=count_multiplied(architecture) - unasked,
        layers=architecture.attending_layers,
        heads=architecture.heads,
        head_size=architecture.mean_head_size,
        length=length,
        frozen=_count_frozen(spec) - (0 if architecture.tied else unasked),
    )
    # the backward takes twice as many, but for frozen weights
    forward = (trained + 2 * _count_frozen(spec)) / 3
    has_second = embeds or spec.reference == "adapters off"
    again = forward if has_second else 0.0
    teacher = spec.teacher.flop_per_token(length) if spec.teacher else 0.0
    if spec.recipe.method.distill_top_k is not None:
        return _FlopPerToken(forward, again, trained + again, once=teacher)
    if spec.recipe.method_facts.has_critic:
        # values and reference, once for all updates on the same completions
        teacher = (teacher + forward) / spec.recipe.rollout.num_iterations
    once = forward if spec.reference == "stored" else 0.0
    return _FlopPerToken(forward, again, trained + again + teacher, once)


def _sum_seconds(collectives: Iterable[Collective], links: Links, spec: RunSpec) -> float:
    return sum(each.seconds(links, spec.ranks_per_node) for each in collectives)


def _estimate_reference(
    spec: RunSpec, once: float, mfu: float, epoch_tokens: int | None, steps: int | None
) -> float | None:
    """Seconds of a forward of every training document before training, of `once` FLOP a token;
    None where there is no such forward, or the number of tokens is not known.
    """
    if not once or epoch_tokens is None:
        return None
    seen = epoch_tokens if steps is None else min(epoch_tokens, steps * spec.tokens_per_step)
    return seen * once / (mfu * PEAK_FLOPS[ASSUMED_DEVICE] * spec.ranks)


def _estimate_steps(spec: RunSpec) -> tuple[int | None, int | None]:
    """Returns (tokens of an epoch, steps of the run); None for those that are not known."""
    optimization = spec.recipe.optimization
    tokens = estimate_epoch_tokens(spec.recipe.data, spec.recipe.method_facts.rows)
    steps = optimization.max_steps
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
    frozen = sum(spec.fp8_weights.values()) - trained
    in_fp8 = spec.sharding.fp8.multiplies_weight_gradients
    return fp8_share_of(flops, trained=trained, frozen=frozen, weight_gradients=in_fp8)


def _count_frozen(spec: RunSpec) -> int:
    """The base's numbers in matrix products that get no gradient."""
    architecture = spec.architecture
    trained = {tensor.name for tensor in spec.tensors if tensor.trainable}
    left_out = trained if architecture.tied else trained | {architecture.embedding.name}
    frozen = sum(tensor.numel for tensor in architecture.tensors() if tensor.name not in left_out)
    return frozen - (architecture.idle_parameters if spec.recipe.lora.use_peft else 0)


def offload_seconds(spec: RunSpec) -> float:
    """Seconds that CPU offload adds to a step, at the assumed rates; 0 without it.

    A micro-batch copies the rank's parameters to the device for the forward, once more for the
    backward if they were freed, and its gradients back. The update reads and writes the parameters
    and moments, and reads the gradients, in memory that all ranks of a node share. No overlap with
    the computation is assumed.
    """
    if not spec.sharding.cpu_offload:
        return 0.0
    state = spec.state()
    gathers = 1 if spec.sharding.strategy == "SHARD_GRAD_OP" else 2
    moved = spec.accumulation * (gathers * (state.trained + state.frozen) + state.gradients)
    files = spec.files()
    moments = state.optimizer if files is None else files.size
    touched = 2 * state.trained + state.gradients + 2 * moments
    return (
        moved / PCIE_BYTES_PER_SECOND
        + touched * min(spec.ranks, spec.ranks_per_node) / HOST_BYTES_PER_SECOND
    )


def rollout_seconds(spec: RunSpec, mfu: float, forward: float) -> float:
    """Seconds of a step in which a rank samples completions of full length; 0 where it samples
    none itself.

    To sample one token for every row takes as long as the slower of two: reading all weights and
    half of a full cache, or computing.

    Args:
        spec: The run.
        mfu: The share of the device's peak.
        forward: FLOP of the forward of one token.
    """
    if not spec.recipe.samples_itself:
        return 0.0
    keys = spec.recipe.rollout
    per_rank = ceil_div(spec.rows_per_step, spec.data_ranks)
    rows = min(keys.per_device_generation_batch_size, per_rank)
    weights = sum(
        t.numel // t.divided * min(t.itemsize, spec.computation.itemsize) for t in spec.part_tensors
    )
    read = weights + kv_cache_bytes(spec, rows * spec.recipe.data.max_length) / 2
    speed = mfu * PEAK_FLOPS[ASSUMED_DEVICE]
    token_seconds = max(read / DEVICE_BYTES_PER_SECOND, rows * forward / speed)
    prompt_length = spec.recipe.data.max_length - keys.max_completion_length
    prompt_tokens = per_rank / keys.num_generations * prompt_length
    sampled = ceil_div(per_rank, rows) * keys.max_completion_length * token_seconds
    seconds = sampled + prompt_tokens * forward / speed
    return seconds / keys.num_iterations


def files_seconds(spec: RunSpec) -> float:
    """Seconds in which a step reads and writes the state files of a node, at the assumed rate; 0
    without such files.

    Files are read and written in the update alone, so that nothing overlaps with forward and
    backward.
    """
    files = spec.files()
    if files is None:
        return 0.0
    return 2 * files.size * min(spec.ranks, spec.ranks_per_node) / NVME_BYTES_PER_SECOND


def estimate_epoch_tokens(data: Data, rows: RowKind = "answers") -> int | None:
    """Tokens of an epoch, from the size of the local files; None where some are not local, not read
    whole, or compressed.
    """
    total = 0.0
    for source in data.datasets:
        path = Path(source.path)
        if not path.is_file() or path.suffix.lower() in COMPRESSED:
            return None
        if source.split != "train" or source.max_samples is not None:
            return None
        total += path.stat().st_size * source.weight * _text_share(path, rows)
    return int(total) // BYTES_PER_TOKEN if data.datasets else None


def _text_share(path: Path, rows: RowKind) -> float:
    """The share of a JSON Lines file that is text, from its first lines; 1 of another file.

    What is read twice counts twice.
    """
    if path.suffix != ".jsonl":
        return 1.0
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = sample.split(b"\n")
    if len(sample) == SAMPLE_BYTES:
        del lines[-1]  # it may be cut
    if not lines:
        return 1.0
    try:
        read = [parse_json(line) for line in lines if line.strip()]
    except ValueError:  # reported where the data is read
        return 1.0
    texts = sum(_text_bytes(row) + _text_bytes(_find_repeated(row, rows)) for row in read)
    return texts / sum(len(line) + 1 for line in lines)


def _find_repeated(row: Any, rows: RowKind) -> Any:
    """Finds the part of a row that the file holds once and that is read twice.

    Of a pair it is the prompt, unless its answers are whole conversations; a rated row is read
    twice as a whole.

    >>> _find_repeated({"question": "2+2?", "chosen": "4", "rejected": "5"}, "pairs")
    {'question': '2+2?'}
    """
    if rows == "answers" or not isinstance(row, dict):
        return None
    answers = {key: value for key, value in row.items() if key in ANSWERS}
    if any(isinstance(answer, list) and len(answer) > 1 for answer in answers.values()):
        return None
    if rows == "ratings":
        return row
    return {key: value for key, value in row.items() if key not in answers}


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    return 0
