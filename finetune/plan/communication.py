"""What the ranks of a run send each other in a step: the collectives of each kind, with their calls, bytes and time.

Counted as the layouts make them; tests/test_layouts_benchmark.py holds them to what `benchmarks/layouts.py` measures.
Left out are sums of a few numbers (norms, losses), those of adapters under tensor parallelism, and a teacher's units.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from finetune.config.layout import divides_heads
from finetune.constants import FP32, ITEMSIZE
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import StateTensor, split_into_units

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DDP's (torch.nn.parallel.distributed)


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second in one direction: of a GPU to the others of its node, and of a node to the others."""

    within_node: float = 450e9  # NVLink 4 of an H100 or H200, by their data sheets
    between_nodes: float = 400e9  # 8 adapters of 400 Gbit/s, as in a DGX H100


@dataclass(frozen=True, slots=True)
class Collective:
    """All calls of one kind that a rank makes in a step. `bytes` is their sum: a call counts its input or its output,
    whichever is larger. Ranks of the group are `stride` apart."""

    kind: Kind
    calls: int
    bytes: int
    ranks: int
    stride: int = 1
    is_awaited: bool = False  # a layer needs the result at once; else it can run beside the computation

    def seconds(self, links: Links, ranks_per_node: int) -> float:
        """By rings, over which a rank sends (n - 1) / n of the bytes, twice for an all-reduce; what leaves a node
        shares its network with the node's other groups.

        >>> links = Links(within_node=400e9, between_nodes=80e9)
        >>> Collective("all-gather", 1, 8 * 10**9, ranks=8).seconds(links, 8), Collective("all-reduce", 1, 10**9, 2, 8).seconds(links, 8)
        (0.0175, 0.1)
        """  # noqa: E501
        here = max(1, min(self.ranks, ranks_per_node // self.stride))
        if self.kind == "send":  # to a neighbor, beside the sends of all ranks of the node
            return self.bytes / (links.within_node if here == self.ranks else links.between_nodes / ranks_per_node)
        of_rank = links.between_nodes / ranks_per_node
        sent = self.bytes * (2 if self.kind == "all-reduce" else 1)
        if here == self.ranks:
            return sent * (self.ranks - 1) / self.ranks / links.within_node
        if self.kind == "all-to-all":
            return sent * (self.ranks - here) / self.ranks / of_rank
        return sent * (self.ranks - 1) / self.ranks / min(links.within_node, of_rank * here)


def count_communication(spec: RunSpec) -> tuple[Collective, ...]:
    """The collectives of a step, for rows that are full and routers that prefer no expert."""
    found = [*_of_units(spec), *_of_buckets(spec)]
    waited = (*_of_tensors(spec), *_of_sequences(spec), *_of_experts(spec), *_of_pipeline(spec))
    found += [replace(each, is_awaited=True) for each in waited]
    return tuple(each for each in found if each.ranks > 1 and each.bytes)


def _of_pipeline(spec: RunSpec) -> Iterator[Collective]:
    """The states that enter a group of layers, and their gradients, from rank to rank."""
    if spec.stages > 1:
        calls = 2 * spec.sharding.pipeline_chunks // spec.stages * spec.accumulation
        state = spec.tokens * spec.architecture.hidden * spec.computation.itemsize
        yield Collective("send", calls, calls * state, spec.stages, spec.ranks // spec.stages)


def _of_units(spec: RunSpec) -> Iterator[Collective]:
    """FSDP gathers a unit for the forward of each micro-batch, and again for its backward where it was freed; it
    reduces the gradients that the unit has, under hybrid sharding over the replicas too: FSDP2 in the last micro-batch
    only."""
    if not spec.sharding.is_fsdp:
        return
    times, replicas = spec.accumulation, spec.ranks // (spec.stages * spec.state_ranks)
    for tensors, gathers in _list_units(spec):
        divided, stride = tensors[0].divided, spec.tensor_ranks
        shards = spec.shards // divided
        whole = sum(
            _padded(t, shards) * (1 if t.name in spec.fp8_gathered else spec.computation.itemsize) for t in tensors
        )
        reduced = sum(_padded(t, shards) for t in tensors if t.trainable) * ITEMSIZE[spec.reduced_dtype]
        yield Collective("all-gather", gathers * times, gathers * times * whole, shards, stride * divided)
        yield Collective("reduce-scatter", times, times * reduced, shards, stride * divided)
        meetings = 1 if spec.sharding.layout == "fsdp2" else times
        yield Collective("all-reduce", meetings, meetings * reduced // shards, replicas, spec.state_ranks)


def _list_units(spec: RunSpec) -> Iterator[tuple[Sequence[StateTensor], int]]:
    """The tensors of each unit, and how often a micro-batch gathers it. Divided experts are units of their own."""
    u = split_into_units(spec.part, spec.part_tensors, spec.sharding)
    forwards = 2 if spec.reference == "adapters off" else 1
    units: dict[str, list[StateTensor]] = {}
    for tensor in spec.part_tensors:
        is_layer = tensor.unit.startswith("layer")
        name = "layers" if is_layer and u.layer == u.layers else tensor.unit
        if (name == "embedding" and u.embedding.numel == 0) or (name == "layers" and spec.sharding.layout == "fsdp1"):
            name = "tail"
        units.setdefault(f"{name}, divided" if tensor.divided > 1 else name, []).append(tensor)
    for name, tensors in units.items():
        stays = name == "tail" or u.stay_gathered
        # Nothing asks for the gradient of a frozen embedding's output but activation checkpointing.
        is_passed = name != "embedding" or any(t.trainable for t in tensors) or spec.sharding.activation_checkpointing
        yield tensors, 1 if stays else forwards + is_passed


def _padded(tensor: StateTensor, shards: int) -> int:
    """Numbers of what FSDP gathers of a tensor: rows padded to a multiple of the shards; experts divide evenly."""
    if tensor.divided > 1:
        return tensor.numel // tensor.divided
    rows = tensor.shape[0]
    return tensor.numel // rows * -(-rows // shards) * shards


def _of_buckets(spec: RunSpec) -> Iterator[Collective]:
    """DDP reduces gradients once a step, in buckets."""
    if spec.sharding.layout != "ddp":
        return
    calls, size, limit = 0, 0, FIRST_BUCKET
    for each in reversed([t.numel * t.itemsize for t in spec.tensors if t.trainable]):
        size += each
        if size >= limit:
            calls, size, limit = calls + 1, 0, BUCKET
    whole = sum(t.numel * t.itemsize for t in spec.tensors if t.trainable)
    yield Collective("all-reduce", calls + (size > 0), whole, spec.ranks)


def _count_passes(spec: RunSpec) -> tuple[int, int]:
    """How often a step computes a layer forward (reference and recomputation included), and backward."""
    every, reference = spec.computation.checkpoint_every, spec.reference == "adapters off"
    layers = spec.part.layers
    recomputed = 0 if every is None else -(-layers // every)
    return spec.accumulation * (layers * (1 + reference) + recomputed), spec.accumulation * layers


def _of_tensors(spec: RunSpec) -> Iterator[Collective]:
    """In a layer the outputs of attention and MLP are summed, and the gradients of their inputs; where transformers'
    plan gathers products, these in the forward and the gradients of the next layer's input in the backward; at the ends
    the embedding's output, the softmax's numbers and the gradient of what enters the head."""
    ranks, a, run = spec.tensor_ranks, replace(spec.architecture, layers=spec.part.layers), spec.computation
    if ranks == 1:
        return
    forward, backward = _count_passes(spec)
    size, recomputed = spec.tokens * a.hidden * run.itemsize, forward - backward * (2 if spec.reference else 1)
    # The recomputed forward ends with the last tensor that its backward reads: before the sum of the MLP's outputs.
    calls = 2 * forward - max(0, recomputed) + 2 * backward
    yield Collective("all-reduce", calls, calls * size, ranks)
    if a.family.tensor_parallel == "products":
        products = a.query_width + 2 * a.key_value_width + (2 * a.intermediate if a.family.fused else 0)
        inputs = a.query_width + (a.intermediate if a.family.fused else 0)
        moved = spec.tokens * run.itemsize * (forward * products + backward * inputs)
        yield Collective(
            "all-gather", forward * (2 if a.family.fused else 3) + backward * (2 if a.family.fused else 1), moved, ranks
        )
    forwards = spec.accumulation * (2 if spec.reference == "adapters off" else 1)
    yield Collective("all-reduce", forwards, forwards * size, ranks)  # the embedding
    yield Collective("all-reduce", 3 * forwards, forwards * (3 * FP32 * spec.tokens + size), ranks)


def _of_sequences(spec: RunSpec) -> Iterator[Collective]:
    """Two all-to-alls a layer: queries with keys and values, and the outputs; as many in the backward. More ranks than
    heads gather keys and values, and reduce their gradients."""
    ranks, a = spec.sharding.sequence_parallel_size, spec.computed
    if not divides_heads(a.heads, ranks):
        forward, _ = _count_passes(spec)
        layers, row = a.layers * spec.accumulation, spec.tokens * ranks * spec.computation.itemsize
        width = a.query_width + a.heads * a.latent.value if a.latent is not None else 2 * a.key_value_width
        yield Collective("all-gather", 2 * forward, forward * row * width, ranks, spec.tensor_ranks)
        yield Collective("reduce-scatter", 2 * layers, layers * row * width, ranks, spec.tensor_ranks)
        return
    repeated = math.lcm(a.key_value_heads, ranks) // a.key_value_heads
    key_value, output = 2 * a.key_value_width * repeated, a.query_width
    if a.latent is not None:
        key_value, output = a.query_width + a.heads * a.latent.value, a.heads * a.latent.value
    forward, backward = _count_passes(spec)
    moved = spec.tokens * spec.computation.itemsize * (a.query_width + key_value + output)
    times = forward + backward
    yield Collective("all-to-all", 2 * times, times * moved, ranks, spec.tensor_ranks)


def _of_experts(spec: RunSpec) -> Iterator[Collective]:
    """Tokens to their experts and back, once for each expert of a token; first, how many come to each."""
    ranks, mixture = spec.sharding.expert_parallel_size, spec.architecture.mixture
    if mixture is None or ranks == 1:
        return
    share = len(mixture.layers) / spec.architecture.layers
    forward, backward = (round(passes * share) for passes in _count_passes(spec))
    states = spec.tokens * mixture.chosen * spec.architecture.hidden * spec.computation.itemsize
    yield Collective("all-to-all", 2 * (forward + backward), 2 * (forward + backward) * states, ranks)
    yield Collective("all-to-all", forward, forward * 8 * mixture.experts, ranks)
