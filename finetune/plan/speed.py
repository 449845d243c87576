"""The time of a step, the communication in it, and the number of steps of a run.

A step's time is computation at an assumed MFU, offload, and rollouts. Communication is estimated
besides, because computation can hide most of it.

Collectives are counted as the layouts make them; tests/test_layouts_benchmark.py compares them with
those that `benchmarks/layouts.py` measures. Left out are sums of a few numbers (norms, losses), the
collectives of adapters under tensor parallelism, and those of a teacher's units.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.config.layout import Sharding, divides_heads
from finetune.config.methods import RowKind
from finetune.config.schema import Data
from finetune.constants import FP32, ITEMSIZE, ceil_div
from finetune.files.json_files import parse_json
from finetune.flops import (
    PEAK_FLOPS,
    TokenPasses,
    count_token_passes,
    flop_per_token,
    fp8_share_of,
    mix_peaks,
)
from finetune.plan.activations import TOKEN_ID
from finetune.plan.forward_memory import kv_cache_bytes
from finetune.plan.run_spec import RunSpec, count_multiplied
from finetune.plan.state import FsdpUnits, StateTensor, split_into_units

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
COMPRESSED = (".gz", ".parquet")  # files whose size says little about the size of their text
FIRST_BUCKET = 1 << 20  # bytes of DDP's first gradient bucket (torch.nn.parallel.distributed)
BUCKET = 25 << 20  # bytes of DDP's other buckets


@dataclass(frozen=True, slots=True)
class Links:
    """Rates in bytes per second, in one direction."""

    # of one GPU to the other GPUs of its node: NVLink 4 of an H100 or H200, by their data sheets
    within_node: float = 450e9
    # of one node to other nodes: 8 adapters of 400 Gbit/s, as in a DGX H100
    between_nodes: float = 400e9


@dataclass(frozen=True, slots=True)
class Collective:
    """All calls of one kind that a rank makes in a step for one purpose."""

    kind: Kind
    calls: int
    bytes: int  # summed over the calls; a call counts its input or its output, the larger of both
    ranks: int  # ranks in the group
    stride: int = 1  # distance between neighboring ranks of the group
    # a layer waits for the result; if false, the calls can overlap with computation
    is_awaited: bool = False

    def seconds(self, links: Links, ranks_per_node: int) -> float:
        """Estimates the time of all calls.

        The estimate assumes rings, on which each of n ranks sends (n - 1) / n of the bytes, or
        twice that for an all-reduce. Groups that span nodes share each node's network.

        >>> links = Links(within_node=400e9, between_nodes=80e9)
        >>> (
        ...     Collective("all-gather", 1, 8 * 10**9, ranks=8).seconds(links, 8),
        ...     Collective("all-reduce", 1, 10**9, 2, 8).seconds(links, 8),
        ... )
        (0.0175, 0.1)
        """
        ranks_on_node = max(1, min(self.ranks, ranks_per_node // self.stride))
        is_within_node = ranks_on_node == self.ranks
        network_of_rank = links.between_nodes / ranks_per_node
        if self.kind == "send":  # to one neighbor, while all ranks of the node send
            return self.bytes / (links.within_node if is_within_node else network_of_rank)
        sent = self.bytes * (2 if self.kind == "all-reduce" else 1)
        if is_within_node:
            return sent * (self.ranks - 1) / self.ranks / links.within_node
        if self.kind == "all-to-all":  # only messages to ranks of other nodes use the network
            return sent * (self.ranks - ranks_on_node) / self.ranks / network_of_rank
        # A ring leaves the node once, so its ranks on the node share their parts of the network.
        slowest_link = min(links.within_node, network_of_rank * ranks_on_node)
        return sent * (self.ranks - 1) / self.ranks / slowest_link


def count_communication(spec: RunSpec) -> tuple[Collective, ...]:
    """Counts the collectives of a step, if all rows are full and the router uses experts evenly.

    Empty if ranks send each other nothing.
    """
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
    """Yields a pipeline's messages between stages: hidden states, and their gradients back."""
    if spec.stages > 1:
        chunks = spec.sharding.pipeline_chunks // spec.stages  # groups of layers on a rank
        calls = 2 * chunks * spec.accumulation
        hidden_states = spec.tokens * spec.architecture.hidden * spec.computation.itemsize
        stride = spec.ranks // spec.stages
        yield Collective("send", calls, calls * hidden_states, spec.stages, stride)


def _list_unit_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Yields the collectives of FSDP.

    A unit is gathered for the forward of each micro-batch, and again for its backward if it was
    freed in between. Its gradients are reduced in each micro-batch. Under hybrid sharding they are
    also reduced over the replicas: by FSDP2 in the last micro-batch only, by FSDP1 in each.
    """
    if not spec.sharding.is_fsdp:
        return
    micro_batches = spec.accumulation
    replicas = spec.ranks // (spec.stages * spec.state_ranks)
    for tensors, gathers in _list_units(spec):
        expert_ranks = tensors[0].expert_ranks  # the same for all tensors of a unit
        shards = spec.shards // expert_ranks
        stride = spec.tensor_ranks * expert_ranks
        unit_bytes = 0
        gradient_bytes = 0
        for tensor in tensors:
            numel = _count_padded(tensor, shards)
            is_fp8 = tensor.name in spec.fp8_gathered
            unit_bytes += numel * (1 if is_fp8 else spec.computation.itemsize)
            if tensor.trainable:
                gradient_bytes += numel * ITEMSIZE[spec.reduced_dtype]
        calls = round(gathers * micro_batches)
        yield Collective("all-gather", calls, calls * unit_bytes, shards, stride)
        yield Collective(
            "reduce-scatter", micro_batches, micro_batches * gradient_bytes, shards, stride
        )
        calls = 1 if spec.sharding.layout == "fsdp2" else micro_batches
        yield Collective(
            "all-reduce", calls, calls * gradient_bytes // shards, replicas, spec.state_ranks
        )


def _list_units(spec: RunSpec) -> Iterator[tuple[Sequence[StateTensor], float]]:
    """Yields the tensors of each FSDP unit, and how often a micro-batch gathers the unit.

    Experts that ranks share are a unit of their own in each layer.
    """
    units = split_into_units(spec.part, spec.part_tensors, spec.sharding)
    forwards = _count_forwards(spec)
    # (unit, whether ranks share the tensors) -> tensors
    tensors_by_unit: dict[tuple[str, bool], list[StateTensor]] = {}
    for tensor in spec.part_tensors:
        key = (_find_unit(tensor, units, spec.sharding), tensor.expert_ranks > 1)
        tensors_by_unit.setdefault(key, []).append(tensor)
    for (unit, are_shared), tensors in tensors_by_unit.items():
        # A frozen embedding has a backward only under activation checkpointing, which asks for the
        # gradient of its output.
        has_backward = (
            unit != "embedding"
            or any(tensor.trainable for tensor in tensors)
            or spec.sharding.activation_checkpointing
        )
        is_root = unit == "tail" and not are_shared  # FSDP does not free its root unit
        if is_root or units.stay_gathered:
            yield tensors, 1
        elif has_backward:
            yield tensors, forwards + 1
        else:
            yield tensors, forwards


def _find_unit(tensor: StateTensor, units: FsdpUnits, sharding: Sharding) -> str:
    """Returns the name of the FSDP unit that gathers a tensor: `StateTensor.unit`, or a larger one.

    FSDP's root unit, "tail", gathers a tied embedding, and under FSDP1 every embedding. If layers
    are not wrapped, all of them are one unit; under FSDP1 they are in the root too.
    """
    if tensor.unit == "embedding" and units.embedding.numel == 0:
        return "tail"
    if tensor.unit.startswith("layer") and not units.wraps_layers:
        return "tail" if sharding.layout == "fsdp1" else "layers"
    return tensor.unit


def _count_padded(tensor: StateTensor, shards: int) -> int:
    """Counts the elements that FSDP gathers of a tensor, with padding.

    Rows are padded to a multiple of `shards`. Experts that ranks share need no padding.
    """
    if tensor.expert_ranks > 1:
        return tensor.numel // tensor.expert_ranks
    rows = tensor.shape[0]
    padded_rows = ceil_div(rows, shards) * shards
    return tensor.numel // rows * padded_rows


def _list_gradient_reductions(spec: RunSpec) -> Iterator[Collective]:
    """Yields the all-reduces of DDP, which reduces gradients once per step, bucket by bucket."""
    if spec.sharding.layout != "ddp":
        return
    buckets = 0
    bucket_bytes = 0
    limit = FIRST_BUCKET
    gradients = [t.numel * t.itemsize for t in spec.tensors if t.trainable]
    for gradient_bytes in reversed(gradients):  # in the order of the backward
        bucket_bytes += gradient_bytes
        if bucket_bytes >= limit:
            buckets += 1
            bucket_bytes = 0
            limit = BUCKET
    if bucket_bytes > 0:  # the last bucket, which is not full
        buckets += 1
    yield Collective("all-reduce", buckets, sum(gradients), spec.ranks)


class _LayerPasses(NamedTuple):
    """How many passes through a layer a rank makes in a step, summed over its layers."""

    forward: int  # all forwards, with recomputed ones and the reference's
    recomputed: int  # those of activation checkpointing
    backward: int


def _count_passes(spec: RunSpec) -> _LayerPasses:
    """Counts a rank's passes through layers in a step."""
    every = spec.computation.checkpoint_every
    layers = spec.part.layers
    if every is None:
        recomputed = 0
    else:
        recomputed = spec.accumulation * ceil_div(layers, every)
    backward = spec.accumulation * layers
    forward = round(backward * _count_forwards(spec)) + recomputed
    return _LayerPasses(forward, recomputed, backward)


def _list_tensor_parallel_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Yields the collectives of tensor parallelism.

    A layer sums the outputs of attention and MLP, and the gradients of their inputs. In families
    whose plan in transformers gathers the outputs of matmuls, it gathers them in the forward, and
    in the backward the gradients of the next matmul's input. Besides the layers, sums are needed
    for the embedding's output, for the softmax of the loss, and for the gradient of the head's
    input.
    """
    ranks = spec.tensor_ranks
    architecture = replace(spec.architecture, layers=spec.part.layers)
    computation = spec.computation
    if ranks == 1:
        return
    forward, recomputed, backward = _count_passes(spec)
    hidden_states = spec.tokens * architecture.hidden * computation.itemsize
    # A recomputed forward ends with the last tensor that the backward reads, which comes before the
    # sum of the MLP's outputs.
    calls = 2 * forward - recomputed + 2 * backward
    yield Collective("all-reduce", calls, calls * hidden_states, ranks)
    if architecture.family.tensor_parallel == "products":
        if architecture.family.fused:
            # forward: queries with keys and values, and gate with up; backward: a gradient of each
            gathers = 2 * forward + 2 * backward
            output_width = (
                architecture.query_width
                + 2 * architecture.key_value_width
                + 2 * architecture.intermediate
            )
            gradient_width = architecture.query_width + architecture.intermediate
        else:
            # forward: queries, keys and values; backward: the gradient of attention's output
            gathers = 3 * forward + backward
            output_width = architecture.query_width + 2 * architecture.key_value_width
            gradient_width = architecture.query_width
        elements = spec.tokens * (forward * output_width + backward * gradient_width)
        yield Collective("all-gather", gathers, computation.itemsize * elements, ranks)
    forwards = round(spec.accumulation * _count_forwards(spec))
    # the embedding's output
    yield Collective("all-reduce", forwards, forwards * hidden_states, ranks)
    # Three calls of the head: the largest logit of each token; the sum of the exponentials with the
    # label's logit; the gradient of the head's input.
    softmax = 3 * FP32 * spec.tokens
    yield Collective("all-reduce", 3 * forwards, forwards * (softmax + hidden_states), ranks)


def _list_sequence_parallel_collectives(spec: RunSpec) -> Iterator[Collective]:
    """Yields the collectives of sequence parallelism.

    If the ranks divide the heads evenly, a layer's forward has two all-to-alls: of queries, keys
    and values, and of attention's output. The backward has two as well. Else the ranks gather keys
    and values in the forward, and reduce their gradients in the backward.
    """
    ranks = spec.sharding.sequence_parallel_size
    architecture = spec.computed
    forward, _, backward = _count_passes(spec)
    if not divides_heads(architecture.heads, ranks):
        bytes_per_feature = spec.tokens * ranks * spec.computation.itemsize  # of the whole row
        if architecture.latent is not None:
            width = architecture.query_width + architecture.heads * architecture.latent.value
        else:
            width = 2 * architecture.key_value_width
        keys_and_values = bytes_per_feature * width
        stride = spec.tensor_ranks
        yield Collective("all-gather", 2 * forward, forward * keys_and_values, ranks, stride)
        yield Collective("reduce-scatter", 2 * backward, backward * keys_and_values, ranks, stride)
        return
    if architecture.latent is not None:
        output_width = architecture.heads * architecture.latent.value
        key_value_width = architecture.query_width + output_width
    else:
        output_width = architecture.query_width
        # key-value heads are repeated until each rank has as many
        repeats = math.lcm(architecture.key_value_heads, ranks) // architecture.key_value_heads
        key_value_width = 2 * architecture.key_value_width * repeats
    width = architecture.query_width + key_value_width + output_width
    moved = spec.tokens * spec.computation.itemsize * width
    passes = forward + backward
    yield Collective("all-to-all", 2 * passes, passes * moved, ranks, spec.tensor_ranks)


def _list_expert_exchanges(spec: RunSpec) -> Iterator[Collective]:
    """Yields the all-to-alls of expert parallelism.

    In a forward, the ranks first exchange how many tokens come to each expert. Then every token's
    hidden state is sent to each of its experts and back; the backward does so with gradients.
    """
    ranks = spec.sharding.expert_parallel_size
    mixture = spec.architecture.mixture
    if mixture is None or ranks == 1:
        return
    share_with_experts = len(mixture.layers) / spec.architecture.layers
    passes = _count_passes(spec)
    forward = round(passes.forward * share_with_experts)
    backward = round(passes.backward * share_with_experts)
    calls = 2 * (forward + backward)
    states = spec.tokens * mixture.chosen * spec.architecture.hidden * spec.computation.itemsize
    yield Collective("all-to-all", calls, calls * states, ranks)
    counts = TOKEN_ID * mixture.experts  # an int64 for each expert
    yield Collective("all-to-all", forward, forward * counts, ranks)


ASSUMED_DEVICE = "H100"
# The shares of its peak that one H200 reached (benchmarks/results/gpu.json), a little rounded down.
MIXTURE_MFU = 0.28  # 30B-A3B, LoRA, one row of 4,096 tokens, checkpointed
FULL_MFU = 0.55
ADAPTER_MFU = 0.58
CHECKPOINTED_FULL_MFU = 0.5
CHECKPOINTED_ADAPTER_MFU = 0.41
UNCOMPILED = 0.77  # MFU without torch_compile, as a share of that with it (1B on an H100)
DEVICE_BYTES_PER_SECOND = 3.35e12  # of the assumed device's memory
PCIE_BYTES_PER_SECOND = 25e9  # between one GPU and its host
NVME_BYTES_PER_SECOND = 5e9  # of one node's disk, read and written in turns
HOST_BYTES_PER_SECOND = 100e9  # of a node's memory, as AdamW on its CPUs reaches it
# of English text in a large vocabulary; only to guess the length of an epoch from the files' size
BYTES_PER_TOKEN = 4
ANSWERS = ("chosen", "rejected", "response_w", "response_l")  # the keys of answers in a pair
SAMPLE_BYTES = 1 << 16  # read of a JSON Lines file, to estimate how much of the file is text
MIN_MICRO_BATCH_SECONDS = 0.01  # below it, launching kernels takes longer than computing them


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run if it reaches the assumed MFU."""

    flop_per_token: float  # of a step, with a reference's or teacher's forward in it
    peak_flops: float  # of a device, per second: that of bf16, mixed with FP8's for its matmuls
    mfu: float
    tokens_per_second: float  # over all ranks
    tokens_per_step: int  # if every row is full
    seconds_per_step: float  # without communication
    steps: int | None  # None: unknown without reading the data
    epoch_tokens: int | None  # None: unknown
    seconds_per_epoch: float | None  # None: unknown
    steps_are_guessed: bool  # from the files' size, not from max_steps or the data itself
    micro_batch_seconds: float
    offload_seconds: float  # of CPU offload in a step; part of seconds_per_step
    # of reading and writing optimizer state in files in a step; part of seconds_per_step
    files_seconds: float
    # the share of a step in which pipeline ranks wait; seconds_per_step includes it
    bubble: float
    # the cost of the pipeline's largest stage over the mean; seconds_per_step includes it
    imbalance: float
    links: Links  # the rates at which ranks send
    communication: tuple[Collective, ...]  # of a step
    # of a step, if computation hides none of it; not in seconds_per_step
    communication_seconds: float
    awaited_seconds: float  # the part of communication_seconds that layers wait for
    # the second forward's share of a step's FLOP: the reference's with adapters off, or that of an
    # embedding method without gradients
    reference_share: float
    rollout_seconds: float  # of completions of full length, in a step; part of seconds_per_step
    # of a reference's or teacher's forward before training; None: unknown, or there is none
    reference_seconds: float | None

    @property
    def is_meaningful(self) -> bool:
        """Whether a micro-batch is so long that its time follows from its FLOP."""
        return self.micro_batch_seconds >= MIN_MICRO_BATCH_SECONDS


def assume_mfu(spec: RunSpec) -> float:
    """Returns the share of the device's peak that a run of this kind reached when measured."""
    is_checkpointed = spec.sharding.activation_checkpointing
    if spec.architecture.mixture is not None:
        mfu = MIXTURE_MFU
    elif spec.recipe.lora.use_peft:
        mfu = CHECKPOINTED_ADAPTER_MFU if is_checkpointed else ADAPTER_MFU
    else:
        mfu = CHECKPOINTED_FULL_MFU if is_checkpointed else FULL_MFU
    if spec.recipe.model.torch_compile:
        return mfu
    return mfu * UNCOMPILED


def estimate_speed(
    spec: RunSpec, mfu: float, read: tuple[int, int] | None = None, links: Links | None = None
) -> Speed:
    """Estimates the speed of a run.

    Args:
        spec: The run.
        mfu: The share of the device's peak FLOP/s that every rank reaches.
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
    mean_of_ranks = spec.tokens_per_step * flops.step / (mfu * peak * spec.ranks)
    # the largest stage of a pipeline sets the pace, and ranks wait in its bubble
    computing = mean_of_ranks * spec.imbalance / (1 - spec.bubble)
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
        reference_share=flops.second_forward / flops.step,
        reference_seconds=_estimate_reference(
            spec, flops.before_training, mfu, epoch_tokens, steps
        ),
    )


class _FlopPerToken(NamedTuple):
    """The floating-point operations of a token."""

    forward: float  # of the trained model
    # a second forward without gradients: with adapters off, or of an embedding method; else 0
    second_forward: float
    step: float  # all that a step computes, as a mean over tokens, with a teacher's forward
    # a forward before training, of a reference or teacher whose results are stored; else 0
    before_training: float


def _count_flops(spec: RunSpec) -> _FlopPerToken:
    """Counts the FLOP of a token, in rows of max_length tokens."""
    architecture = spec.architecture
    embeds = spec.recipe.method_facts.embeds
    length = spec.recipe.data.max_length
    # an embedding method does not compute the output head
    unused_head = architecture.head_rows * architecture.hidden if embeds else 0
    trained = flop_per_token(
        parameters=count_multiplied(architecture) - unused_head,
        layers=architecture.attending_layers,
        heads=architecture.heads,
        head_size=architecture.mean_head_size,
        length=length,
        # an untied head that is not used counts as frozen (`RunSpec.model_keys`)
        frozen=_count_frozen(spec) - (0 if architecture.tied else unused_head),
    )
    # The backward takes twice the FLOP of the forward, but for frozen weights the same FLOP: they
    # need no gradient of their own.
    forward = (trained + 2 * _count_frozen(spec)) / 3
    passes = _count_token_passes(spec)
    own = passes.trained * trained + passes.measured * forward
    teacher = spec.teacher.flop_per_token(length) if spec.teacher else 0.0
    teacher *= spec.recipe.teacher_passes
    if spec.recipe.method.distill_top_k is not None:  # the teacher runs before training only
        return _FlopPerToken(forward, 0.0, step=own, before_training=teacher)
    return _FlopPerToken(
        forward,
        forward if _measures_all(spec) else 0.0,
        step=own + teacher,
        before_training=forward if spec.reference == "stored" else 0.0,
    )


def _count_token_passes(spec: RunSpec) -> TokenPasses:
    """Counts how often a step computes a token."""
    return count_token_passes(
        are_rated=spec.recipe.method_facts.rows == "ratings",
        measures_all=_measures_all(spec),
        of_generation=spec.recipe.generation_forwards,
    )


def _count_forwards(spec: RunSpec) -> float:
    """Counts the forwards of a micro-batch, without those that checkpointing recomputes.

    More than one run if mismatched answers or a reference are measured. A share of one is run if
    several steps train on what is measured once.
    """
    passes = _count_token_passes(spec)
    return (passes.trained + passes.measured) / passes.trained


def _measures_all(spec: RunSpec) -> bool:
    """Whether each step measures all tokens by a forward of the trained model."""
    facts = spec.recipe.method_facts
    # of a method that samples; with a critic it is run once for several steps
    runs_reference = spec.recipe.has_reference and spec.teacher is None and not facts.has_critic
    return facts.embeds or spec.reference == "adapters off" or runs_reference


def _sum_seconds(collectives: Iterable[Collective], links: Links, spec: RunSpec) -> float:
    """Sums the seconds of all collectives."""
    return sum(each.seconds(links, spec.ranks_per_node) for each in collectives)


def _estimate_reference(
    spec: RunSpec, flop: float, mfu: float, epoch_tokens: int | None, steps: int | None
) -> float | None:
    """Seconds of a forward over all training documents before training, at `flop` FLOP per token.

    None if there is no such forward (`flop` is 0), or the number of tokens is not known.
    """
    if not flop or epoch_tokens is None:
        return None
    if steps is None:
        tokens = epoch_tokens
    else:  # documents that the run does not reach are left out
        tokens = min(epoch_tokens, steps * spec.tokens_per_step)
    return tokens * flop / (mfu * PEAK_FLOPS[ASSUMED_DEVICE] * spec.ranks)


def _estimate_steps(spec: RunSpec) -> tuple[int | None, int | None]:
    """Estimates (tokens of an epoch, steps of the run); None for one that is not known.

    A file's size says how many full rows its text fills, but not how many rows it has. So the
    steps are not known where a row holds one example, nor an epoch's tokens where they are sampled.
    """
    optimization = spec.recipe.optimization
    steps = optimization.max_steps
    if spec.recipe.method_facts.samples:
        return None, steps
    tokens = estimate_epoch_tokens(spec.recipe.data, spec.recipe.method_facts.rows)
    if steps is None and tokens is not None and spec.recipe.data.packing:
        passes = optimization.num_train_epochs * spec.recipe.rollout.num_iterations
        steps = max(1, round(tokens / spec.tokens_per_step * passes))
    return tokens, steps


def _fp8_share(spec: RunSpec, flops: float) -> float:
    """The share of a token's FLOP that is computed in FP8; `flops`: all FLOP of a token."""
    if spec.sharding.fp8 is None:
        return 0.0
    trainable = {tensor.name for tensor in spec.tensors if tensor.trainable}
    trained = sum(numel for name, numel in spec.fp8_weights.items() if name in trainable)
    frozen = sum(spec.fp8_weights.values()) - trained
    return fp8_share_of(
        flops,
        trained=trained,
        frozen=frozen,
        weight_gradients=spec.sharding.fp8.multiplies_weight_gradients,
        passes=_count_token_passes(spec),
    )


def _count_frozen(spec: RunSpec) -> int:
    """Counts the base's elements that multiply a token and get no gradient."""
    architecture = spec.architecture
    left_out = {tensor.name for tensor in spec.tensors if tensor.trainable}
    if not architecture.tied:  # a tied embedding multiplies as the head; another is looked up
        left_out.add(architecture.embedding.name)
    frozen = sum(tensor.numel for tensor in architecture.tensors() if tensor.name not in left_out)
    return frozen - (architecture.idle_parameters if spec.recipe.lora.use_peft else 0)


def offload_seconds(spec: RunSpec) -> float:
    """Seconds that CPU offload adds to a step, at the assumed rates; 0 without CPU offload.

    A micro-batch copies the rank's parameters to the device for the forward, once more for the
    backward if they were freed, and its gradients back. The update reads and writes the parameters
    and moments, and reads the gradients, in memory that all ranks of a node share. No overlap with
    the computation is assumed.
    """
    if not spec.sharding.cpu_offload:
        return 0.0
    state = spec.state()
    copies = 1 if spec.sharding.strategy == "SHARD_GRAD_OP" else 2  # of parameters to the device
    over_pcie = spec.accumulation * (copies * (state.trained + state.frozen) + state.gradients)
    optimizer_file = spec.optimizer_file()
    moments = state.optimizer if optimizer_file is None else optimizer_file.size
    by_update = 2 * state.trained + state.gradients + 2 * moments
    ranks_on_node = min(spec.ranks, spec.ranks_per_node)
    return over_pcie / PCIE_BYTES_PER_SECOND + by_update * ranks_on_node / HOST_BYTES_PER_SECOND


def rollout_seconds(spec: RunSpec, mfu: float, forward: float) -> float:
    """Seconds of a step in which a rank samples completions of full length.

    0 if the model does not sample. Sampling one token for every row takes as long as the slower of
    two: reading all weights and half of a full cache, or computing the forward. Rollouts that serve
    several steps are shared among them.

    Args:
        spec: The run.
        mfu: The share of the device's peak FLOP/s that every rank reaches.
        forward: FLOP of the forward of one token.
    """
    if not spec.recipe.samples_itself:
        return 0.0
    keys = spec.recipe.rollout
    completions = ceil_div(spec.rows_per_step, spec.data_ranks)  # of a rank
    rows = min(keys.per_device_generation_batch_size, completions)  # sampled at once
    weights = sum(
        t.numel // t.expert_ranks * min(t.itemsize, spec.computation.itemsize)
        for t in spec.part_tensors
    )
    bytes_read = weights + kv_cache_bytes(spec, rows * spec.recipe.data.max_length) / 2
    flops_per_second = mfu * PEAK_FLOPS[ASSUMED_DEVICE]
    token_seconds = max(bytes_read / DEVICE_BYTES_PER_SECOND, rows * forward / flops_per_second)
    prompt_length = spec.recipe.data.max_length - keys.max_completion_length
    prompt_tokens = completions / keys.num_generations * prompt_length
    sampling = ceil_div(completions, rows) * keys.max_completion_length * token_seconds
    seconds = sampling + prompt_tokens * forward / flops_per_second
    return seconds / keys.num_iterations


def files_seconds(spec: RunSpec) -> float:
    """Seconds in which a step reads and writes a node's files of optimizer state, at the assumed
    rate; 0 without such files.

    Only the update reads and writes them, so nothing overlaps with forward and backward.
    """
    optimizer_file = spec.optimizer_file()
    if optimizer_file is None:
        return 0.0
    ranks_on_node = min(spec.ranks, spec.ranks_per_node)
    return 2 * optimizer_file.size * ranks_on_node / NVME_BYTES_PER_SECOND


def estimate_epoch_tokens(data: Data, rows: RowKind = "answers") -> int | None:
    """Estimates the tokens of an epoch from the size of the data files.

    None if there is no data, or some file is not local, not read whole, or compressed.
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
    """Estimates from the first lines of a JSON Lines file how much of it is text, as a share.

    Text that training reads twice counts twice. 1 for a file of another format.
    """
    if path.suffix != ".jsonl":
        return 1.0
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = sample.split(b"\n")
    if len(sample) == SAMPLE_BYTES:
        del lines[-1]  # the last line may be cut
    if not lines:
        return 1.0
    try:
        parsed = [parse_json(line) for line in lines if line.strip()]
    except ValueError:  # the error is reported when the data is read
        return 1.0
    text_bytes = sum(_text_bytes(row) + _text_bytes(_find_repeated(row, rows)) for row in parsed)
    newline = 1
    return text_bytes / sum(len(line) + newline for line in lines)


def _find_repeated(row: Any, rows: RowKind) -> Any:
    """Finds the part of a row that the file holds once, but training reads twice.

    In a pair it is the prompt, unless the answers are whole conversations. A rated row is read
    twice as a whole. None if there is no such part.

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
    """Counts the UTF-8 bytes of all strings in a parsed JSON value, without the keys of objects."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    return 0
