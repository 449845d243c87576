"""Parameters, gradients and optimizer state: the exact bytes that one rank holds in each layout.

`list_state_tensors` lists the parameters, `count_state` counts what a rank holds of them, and
`split_into_units` sums them by FSDP unit.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import prod
from typing import ParamSpec, TypeVar

from finetune.config.layout import Sharding, find_frozen_dtype, shard_experts
from finetune.config.module_names import (
    find_trained,
    find_value,
    gives_head_adapter,
    is_parameter_named,
    is_saved_whole,
    is_within,
    refuse_other_parameters,
    refuse_unadapted,
    refuse_undivided,
    refuse_unknown_layers,
    refuse_unmatched,
)
from finetune.config.optimization import (
    count_offloaded_bytes,
    count_optimizer_bytes,
    list_offloaded_itemsizes,
)
from finetune.config.quantization import divide_quantization, quantized_bytes
from finetune.config.schema import Lora, Model, Quantization
from finetune.constants import (
    COMPUTE_DTYPE,
    FP32,
    ITEMSIZE,
    ROTATION,
    Names,
    Shape,
    ceil_div,
    round_up,
)
from finetune.plan.architecture import Architecture, TensorShape

_P = ParamSpec("_P")
_R = TypeVar("_R")

# How the names of units begin that are not part of the language model, such as a vision tower.
BESIDE = "beside"
# bytes to which FSDP1 aligns each tensor in a flat parameter (_flat_param.py, _get_aligned_numel)
FLAT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One parameter in memory, before FSDP shards it."""

    name: str
    shape: Shape
    # the FSDP unit: embedding, layer 0, layer 1, ..., tail, beside 0, ...
    unit: str
    itemsize: int  # bytes of one element
    trainable: bool
    # How many ranks share the experts of this parameter under expert parallelism. FSDP shards each
    # of these shares over further ranks.
    expert_ranks: int = 1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard(self, shards: int, rank: int) -> Shape:
        """The shape of the shard that rank `rank` of `shards` ranks holds under FSDP2.

        Each rank holds a block of rows; the last blocks may be smaller or empty. Experts that ranks
        share are split into equal shards, if `shard_experts` finds such a split.
        """
        fsdp_ranks = shards // self.expert_ranks
        if self.expert_ranks > 1 and len(self.shape) > 1:
            equal_shard = shard_experts(self.shape, self.expert_ranks, fsdp_ranks)
            if equal_shard is not None:
                return equal_shard
        rows = self.shape[0] // self.expert_ranks
        block = ceil_div(rows, fsdp_ranks)
        rows_before = rank % fsdp_ranks * block
        rows_of_rank = min(block, max(0, rows - rows_before))
        return (rows_of_rank, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class State:
    """Bytes on one rank."""

    trained: int  # of trained parameters
    frozen: int  # of frozen parameters
    gradients: int
    optimizer: int  # of the optimizer's state: moments and step counters

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.gradients + self.optimizer


def _keep_answers(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Caches a function's last 16 results: a plan asks for the same tensors hundreds of times.

    The arguments hold mappings, which have no hash, so they are compared one by one instead of
    looked up (`functools.lru_cache` needs a hash).
    """
    results: deque[tuple[object, _R]] = deque(maxlen=16)

    @wraps(function)
    def call_or_look_up(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        call = (arguments, keywords)
        for earlier_call, result in results:
            if earlier_call == call:
                return result
        result = function(*arguments, **keywords)
        results.append((call, result))
        return result

    return call_or_look_up


@_keep_answers
def list_state_tensors(
    architecture: Architecture,
    model: Model,
    lora: Lora,
    sharding: Sharding,
    quantization: Quantization,
) -> tuple[StateTensor, ...]:
    """Lists every parameter of the model as the recipe trains it, adapters included.

    Without adapters, all parameters are trained except those that the recipe freezes. With
    adapters, the base is frozen and may be quantized; adapters, `modules_to_save` and a critic are
    trained in fp32.

    Raises `UserError` if a pattern of the recipe matches nothing.
    """
    units = _list_units(architecture)
    names = _name_tensors(architecture)
    text = architecture.text_names
    refuse_unmatched("modules_to_save", lora.modules_to_save, names.values(), text)
    routed = {
        tensor.name for index in range(architecture.layers) for tensor in architecture.routed(index)
    }
    if lora.use_peft:
        _refuse_wrong_targets(architecture, names, lora)
        trained = set()
        itemsize = ITEMSIZE[find_frozen_dtype(sharding, lora)]
        adapters = _list_adapters(architecture, units, names, lora)
    else:
        trained = find_trained(list(names.values()), model, text)
        trained |= {tensor.name for tensor in architecture.critic}
        itemsize = ITEMSIZE[model.dtype]
        adapters = {}
    state: list[StateTensor] = []
    for unit, tensors in units:
        quantizable = _list_quantizable(architecture, unit, quantization)
        for tensor in tensors:
            expert_ranks = 1
            if tensor.name in routed:
                expert_ranks = sharding.expert_parallel_size
            is_whole = tensor.name.startswith(text) and is_saved_whole(names[tensor.name], lora)
            if is_whole or (tensor in architecture.critic and lora.use_peft):
                state.append(StateTensor(tensor.name, tensor.shape, unit, FP32, True, expert_ranks))
            elif tensor in quantizable:
                state += _list_quantized(tensor, unit, itemsize, quantization, expert_ranks)
            else:
                is_trained = tensor.name in trained
                state.append(
                    StateTensor(tensor.name, tensor.shape, unit, itemsize, is_trained, expert_ranks)
                )
            # FSDP1 lays parameters out in the order of the modules: an adapter follows its weight
            state += adapters.pop(tensor.name, ())
        state += adapters.pop(unit, ())
    # What is left is the adapter of a tied head, whose name no tensor has.
    for head_adapter in adapters.values():
        state += head_adapter
    return tuple(state)


def _name_tensors(architecture: Architecture) -> dict[str, list[str]]:
    """Lists all names of each tensor, under its first name.

    Every tensor has one name, except that a tied embedding has the head's name too.
    """
    names = {tensor.name: [tensor.name] for tensor in architecture.tensors()}
    if architecture.tied:
        names[architecture.embedding.name].append(architecture.head_name)
    return names


def _refuse_wrong_targets(
    architecture: Architecture, names: Mapping[str, Sequence[str]], lora: Lora
) -> None:
    """Raises `UserError` if the recipe puts adapters on layers or parameters that the model does
    not have.
    """
    head = architecture.head_name.removesuffix(".weight")
    linears = [linear.name for unit in architecture.adaptable().values() for linear in unit]
    experts = [
        tensor.name
        for index in range(architecture.layers)
        for tensor in architecture.experts(index)
    ]
    layers = [head, *(name.removesuffix(".weight") for name in linears)]
    refuse_unknown_layers(lora, layers, "the model", has_experts=bool(experts))
    refuse_other_parameters(lora.lora_target_parameters, experts, list(names))


def find_adapted_head(
    architecture: Architecture, names: Mapping[str, Sequence[str]], lora: Lora
) -> TensorShape | None:
    """Finds the output head's weight if the recipe gives it an adapter; else returns None.

    A tied head's weight is the embedding, but is returned under the head's own name.
    """
    head_name = architecture.head_name
    first_name = next(first for first, all_names in names.items() if head_name in all_names)
    if not lora.use_peft or not gives_head_adapter(
        head_name.removesuffix(".weight"), names[first_name], lora
    ):
        return None
    shape = next(tensor.shape for tensor in architecture.tensors() if tensor.name == first_name)
    return TensorShape(head_name, shape)


def _list_quantizable(
    architecture: Architecture, unit: str, quantization: Quantization
) -> tuple[TensorShape, ...]:
    """Lists the weights of a unit that the recipe quantizes; only decoder layers have any."""
    if quantization.bits is None or not unit.startswith("layer"):
        return ()
    _, layer = unit.split()
    return architecture.quantizable(int(layer))


def _list_adapters(
    architecture: Architecture,
    units: Iterable[tuple[str, tuple[TensorShape, ...]]],
    names: Mapping[str, Sequence[str]],
    lora: Lora,
) -> dict[str, list[StateTensor]]:
    """Lists the adapters' parameters, by what they adapt.

    The key is the name of a linear layer's weight, or a unit for the experts in that unit. Raises
    `UserError` if a pattern of `rank_pattern` or `alpha_pattern` names no adapted layer, or if a
    layer is both adapted and trained whole.
    """
    adaptable = architecture.adaptable()
    adapters: dict[str, list[StateTensor]] = {}
    adapted: list[str] = []
    for unit, tensors in units:
        linears = [linear for linear in adaptable.get(unit, ()) if is_adapted(linear, lora)]
        experts = [
            tensor
            for tensor in tensors
            if is_parameter_named(tensor.name, lora.lora_target_parameters)
        ]
        for linear in linears:
            adapters[linear.name] = list(_list_adapter(linear, unit, lora))
        adapters[unit] = list(_list_expert_adapters(experts, unit, lora, architecture))
        adapted += [linear.name.removesuffix(".weight") for linear in linears]
        adapted += [tensor.name for tensor in experts]
    head = find_adapted_head(architecture, names, lora)
    if head is not None:
        adapters[head.name] = list(_list_adapter(head, "tail", lora))
        adapted.append(head.name.removesuffix(".weight"))
    refuse_unadapted(lora, adapted)
    return adapters


def list_frozen_tensors(
    architecture: Architecture, itemsize: int, quantization: Quantization, plain: Names
) -> tuple[StateTensor, ...]:
    """Lists every parameter of a frozen model, such as a teacher.

    Args:
        architecture: The model.
        itemsize: Bytes of one element of the parameters that are not quantized.
        quantization: How weights of the layers are quantized.
        plain: Patterns of `modules_to_save`, whose weights are not quantized.
    """
    frozen: list[StateTensor] = []
    for unit, tensors in _list_units(architecture):
        quantizable = _list_quantizable(architecture, unit, quantization)
        for tensor in tensors:
            if tensor in quantizable and not is_within(tensor.name, plain):
                frozen += _list_quantized(tensor, unit, itemsize, quantization)
            else:
                frozen.append(StateTensor(tensor.name, tensor.shape, unit, itemsize, False))
    return tuple(frozen)


def _list_units(architecture: Architecture) -> list[tuple[str, tuple[TensorShape, ...]]]:
    """Lists each FSDP unit with its tensors, in the order of the modules."""
    layers = [(f"layer {index}", architecture.layer(index)) for index in range(architecture.layers)]
    beside = [(f"{BESIDE} {index}", part) for index, part in enumerate(architecture.beside)]
    return [("embedding", (architecture.embedding,)), *layers, ("tail", architecture.tail), *beside]


def _list_quantized(
    weight: TensorShape, unit: str, itemsize: int, quantization: Quantization, expert_ranks: int = 1
) -> Iterator[StateTensor]:
    """Yields the two tensors of a quantized, frozen weight: its codes and its scales.

    Both are stored as elements of the compute dtype (`itemsize` bytes), which FSDP2 gathers without
    converting them. Each of the `expert_ranks` that share a layer's experts quantizes its own.
    """
    if expert_ranks > 1:
        quantization = divide_quantization(weight.numel // expert_ranks, quantization)
    *rows, columns = weight.shape
    quantized = quantized_bytes(prod(rows) // expert_ranks, columns, quantization)
    for part, byte_count in (("codes", quantized.codes), ("scales", quantized.scales)):
        elements = expert_ranks * ceil_div(byte_count, itemsize)
        name = f"{weight.name}.{part}"
        yield StateTensor(name, (elements,), unit, itemsize, False, expert_ranks)


def is_adapted(linear: TensorShape, lora: Lora) -> bool:
    """Whether the recipe gives a decoder layer's weight an adapter.

    A weight that is trained whole gets none. `all-linear` adapts all others.
    """
    if is_saved_whole([linear.name], lora):
        return False
    name = linear.name.removesuffix(".weight")
    return lora.adapts_all or is_parameter_named(name, lora.named_targets)


def _list_adapter(linear: TensorShape, unit: str, lora: Lora) -> Iterator[StateTensor]:
    """Yields the parameters of a linear layer's adapter, all in fp32.

    LoRA computes W + B A, where A is [rank, in] and B is [out, rank] (Hu et al. 2021). DoRA adds a
    magnitude [out] (Liu et al. 2024). OFT has a skew-symmetric matrix [block, block] for each block
    of inputs instead, of which only the independent entries are stored (Qiu et al. 2023).
    """
    name = linear.name.removesuffix(".weight")
    width_out, width_in = linear.shape
    block = lora.oft_block_size
    if block is not None:
        refuse_undivided(lora, {name: width_in})
        shape = (width_in // block, block * (block - 1) // 2)
        yield StateTensor(f"{name}{ROTATION}default.weight", shape, unit, FP32, True)
        return
    rank = find_value(name, lora.rank_pattern, lora.lora_r)
    yield StateTensor(f"{name}.lora_A.default.weight", (rank, width_in), unit, FP32, True)
    yield StateTensor(f"{name}.lora_B.default.weight", (width_out, rank), unit, FP32, True)
    if lora.use_dora:
        yield StateTensor(
            f"{name}.lora_magnitude_vector.default.weight", (width_out,), unit, FP32, True
        )


def _list_expert_adapters(
    weights: Sequence[TensorShape], unit: str, lora: Lora, architecture: Architecture
) -> Iterator[StateTensor]:
    """Yields the LoRA matrices on the experts of one unit: A is [experts * rank, in], B is
    [out, experts * rank].

    peft wraps the experts' module once for each weight. The last weight's adapter is outermost, and
    each earlier one is one `.base_layer` deeper.
    """
    for depth, weight in enumerate(reversed(weights)):
        experts = weight.shape[0]
        width_out, width_in = architecture.expert_widths(weight)
        all_ranks = experts * find_value(weight.name, lora.rank_pattern, lora.lora_r)
        module, _, _ = weight.name.rpartition(".")
        module += ".base_layer" * depth
        yield StateTensor(
            f"{module}.lora_A.default.weight", (all_ranks, width_in), unit, FP32, True
        )
        yield StateTensor(
            f"{module}.lora_B.default.weight", (width_out, all_ranks), unit, FP32, True
        )


def count_state(
    tensors: Sequence[StateTensor],
    sharding: Sharding,
    shards: int,
    optim: str | None,
    rank: int = 0,
) -> State:
    """Counts the bytes of parameters, gradients and optimizer state that one rank holds.

    Args:
        tensors: The parameters.
        sharding: The layout.
        shards: The number of ranks that hold one replica of the parameters.
        optim: The optimizer; None counts no optimizer state.
        rank: The rank; rank 0 holds the most.

    Source: mixed-precision training keeps fp32 parameters, gradients and two Adam moments: 4 + 4 +
    4 + 4 bytes a parameter (Rajbhandari et al. 2020, section 3.1: K = 12 counts the fp32 copies),
    here without a bf16 copy.
    """
    rank_of_replica = rank % shards
    if sharding.layout == "fsdp1":
        parts = list(_split_flat(tensors, shards, rank_of_replica, sharding, optim))
    else:
        parts = list(_split_by_rows(tensors, shards, rank_of_replica, optim))
    trained = sum(part.stored for part in parts if part.trained)
    return State(
        trained=trained,
        frozen=sum(part.stored for part in parts if not part.trained),
        gradients=trained,  # a gradient has the shape and dtype of its parameter
        optimizer=sum(part.optimizer for part in parts),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's shard of a tensor, or under FSDP1 of a flat parameter."""

    stored: int  # bytes, with padding
    trained: bool
    optimizer: int  # bytes of the optimizer's state, without padding


def _split_by_rows(
    tensors: Iterable[StateTensor], shards: int, rank: int, optim: str | None
) -> Iterator[_Part]:
    """Yields the shard of each tensor that `rank` holds under FSDP2, and in layouts without
    sharding.

    FSDP2 splits a tensor as `StateTensor.shard` says, and pads every shard to the size of rank 0's.
    """
    for tensor in tensors:
        unpadded = tensor.shard(shards, rank)
        stored = prod(tensor.shard(shards, 0))
        optimizer = 0
        if tensor.trainable:
            optimizer = count_optimizer_bytes(optim, unpadded, tensor.itemsize, name=tensor.name)
        yield _Part(stored * tensor.itemsize, tensor.trainable, optimizer)


def _split_flat(
    tensors: Iterable[StateTensor], shards: int, rank: int, sharding: Sharding, optim: str | None
) -> Iterator[_Part]:
    """Yields the shard of each flat parameter that `rank` holds under FSDP1.

    FSDP1 concatenates the tensors of a unit into a flat parameter, aligned for the compute dtype,
    and splits that into equal shards. If a unit has both frozen and trained tensors (DoRA), its
    gradient covers all of them.
    """
    precision = sharding.mixed_precision
    for unit in _group_by_flat_unit(list(tensors)):
        itemsize = unit[0].itemsize  # a unit has one dtype
        aligned_itemsize = itemsize if precision == "no" else ITEMSIZE[COMPUTE_DTYPE[precision]]
        end = 0
        trained_spans = []  # (start, end) of each trained tensor in the flat parameter
        for tensor in unit:
            start = round_up(end, FLAT_ALIGNMENT // aligned_itemsize)
            end = start + tensor.numel
            if tensor.trainable:
                trained_spans.append((start, end))
        shard = ceil_div(end, shards)
        shard_start = rank * shard
        shard_end = shard_start + shard
        optimizer = 0
        for start, stop in trained_spans:
            numel = min(stop, shard_end) - max(start, shard_start)
            if numel > 0:
                optimizer += count_optimizer_bytes(optim, (numel,), itemsize)
        yield _Part(shard * itemsize, bool(trained_spans), optimizer)


def _group_by_flat_unit(tensors: Sequence[StateTensor]) -> Iterable[list[StateTensor]]:
    """Groups tensors by the flat parameter of FSDP1 that they are in."""
    # DoRA's adapters, and adapters in a model with `modules_to_save`, are in their layer's unit
    # (config.layout.find_frozen_dtype).
    adapted = any(".default." in tensor.name for tensor in tensors)
    dora = any(tensor.name.endswith("magnitude_vector.default.weight") for tensor in tensors)
    has_saved_layers = adapted and any(
        tensor.trainable and ".default." not in tensor.name for tensor in tensors
    )
    adapters_are_units = not (dora or has_saved_layers)
    units: dict[str, list[StateTensor]] = {}
    for tensor in tensors:
        units.setdefault(_name_flat_unit(tensor, adapters_are_units), []).append(tensor)
    return units.values()


def _name_flat_unit(tensor: StateTensor, adapters_are_units: bool) -> str:
    """Names the flat parameter that a tensor is in.

    A decoder layer has one, and so does each matrix of an adapter if `adapters_are_units`. All
    other tensors are in the root's.
    """
    if adapters_are_units and ".default." in tensor.name:
        return tensor.name
    if tensor.unit.startswith(("layer", BESIDE)):
        return tensor.unit
    return "root"


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """Bytes of one rank's optimizer state that is in a file (`optim_offload`)."""

    size: int  # of the file, which every step reads once and writes once
    buffer: int  # one of the two buffers on the host; a GPU has one more of this size
    counters: int  # of each parameter's step counter, which stays in memory


def count_optimizer_file(
    tensors: Iterable[StateTensor],
    shards: int,
    optim: str,
    dtype: str,
    compute_dtype: str,
    rank: int = 0,
) -> OptimizerFile:
    """Counts the file of `rank` with the optimizer's state of the trained `tensors`.

    The state passes through memory piece by piece (optim/offload.py). A piece is a decoder layer,
    or one parameter that is in no decoder layer; a buffer holds the largest piece.

    `dtype`: the parameters' own dtype; they are split into `shards`.
    """
    itemsizes = list_offloaded_itemsizes(optim, dtype, compute_dtype)
    pieces = dict[str, int]()  # name -> bytes
    parameters = 0
    for tensor in tensors:
        if tensor.trainable:
            parameters += 1
            numel = prod(tensor.shard(shards, rank % shards))
            if tensor.unit.startswith("layer"):
                piece = tensor.unit
            else:
                piece = tensor.name
            pieces[piece] = pieces.get(piece, 0) + count_offloaded_bytes(numel, itemsizes)
    return OptimizerFile(
        size=sum(pieces.values()), buffer=max(pieces.values()), counters=FP32 * parameters
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """The number of elements in one FSDP unit, whose tensors are gathered and freed together."""

    numel: int  # all elements
    trained: int  # those of trained parameters
    fp8: int = 0  # those that are gathered in 8 bits

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.numel + other.numel, self.trained + other.trained, self.fp8 + other.fp8)

    def gathered(self, itemsize: int) -> int:
        """Bytes of the gathered unit: one for an element in FP8, `itemsize` for any other."""
        return itemsize * (self.numel - self.fp8) + self.fp8


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """The units of FSDP: the embedding, one decoder layer, and the tail (final norm and head).

    If the head is tied, and always under FSDP1, the embedding is part of the tail and `embedding`
    is empty. If layers are not units of their own, `layer` is all of them together.
    """

    embedding: Unit
    layer: Unit  # the layer with the most parameters on a rank
    tail: Unit
    layers: Unit  # all decoder layers together
    stay_gathered: bool  # layers stay gathered from forward to backward
    embedding_stays: bool  # the embedding stays gathered from forward to backward
    # elements of `layer` that no layer's all-gather receives: experts that only one rank holds
    unshared: int = 0

    @property
    def wraps_layers(self) -> bool:
        """Whether each decoder layer is a unit; False if the model has only one layer."""
        return self.layer != self.layers


def split_into_units(
    architecture: Architecture,
    tensors: Sequence[StateTensor],
    sharding: Sharding,
    fp8: Container[str] = (),
    shards: int = 0,
) -> FsdpUnits:
    """Splits a model into the FSDP units of a layout, in the size that one rank gathers.

    Args:
        architecture: The model.
        tensors: The model's parameters.
        sharding: The layout.
        fp8: The names of the weights that are gathered in 8 bits.
        shards: The number of ranks that hold one replica; 0 leaves `unshared` at 0.
    """
    largest = [f"layer {index}" for index in architecture.largest_layers]
    embedding = _count_unit(tensors, "embedding", fp8)
    layer = _count_largest(_count_unit(tensors, name, fp8) for name in largest)
    tail = _count_unit(tensors, "tail", fp8)
    if architecture.is_uniform:
        count = architecture.layers
        layers = Unit(layer.numel * count, layer.trained * count, layer.fp8 * count)
    else:
        layers = Unit(0, 0)
        for index in range(architecture.layers):
            layers += _count_unit(tensors, f"layer {index}", fp8)
    is_layer_wrapped = _is_layer_wrapped(architecture, sharding)
    all_stay = sharding.strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    if architecture.tied or sharding.layout == "fsdp1":
        tail += embedding
        embedding = Unit(0, 0)
    # Every rank holds experts of its own if as many ranks share the experts as hold one replica.
    received = [tensor for tensor in tensors if not tensor.expert_ranks == shards > 1]
    received_layer = _count_largest(_count_unit(received, name, fp8) for name in largest)
    return FsdpUnits(
        embedding=embedding,
        layer=layer if is_layer_wrapped else layers,
        tail=tail,
        layers=layers,
        stay_gathered=all_stay or not is_layer_wrapped,
        embedding_stays=all_stay,
        unshared=layer.numel - received_layer.numel,
    )


def _count_largest(units: Iterable[Unit]) -> Unit:
    """Returns the unit with the most elements; its `trained` is the most of any of `units`."""
    counted = list(units)
    largest = max(counted, key=lambda unit: unit.numel)
    return replace(largest, trained=max(unit.trained for unit in counted))


def _is_layer_wrapped(architecture: Architecture, sharding: Sharding) -> bool:
    """Whether each decoder layer is an FSDP unit of its own; else all layers are in one unit."""
    if sharding.wrapping == "SIZE_BASED_WRAP":
        widest = architecture.layer(architecture.widest_layer)
        return sum(tensor.numel for tensor in widest) > sharding.min_num_params
    return sharding.wrapping != "NO_WRAP"


def _count_unit(tensors: Sequence[StateTensor], name: str, fp8: Container[str]) -> Unit:
    """Counts the elements of the tensors in unit `name`, as one rank gathers them.

    `fp8`: the names of the weights that are gathered in 8 bits.
    """
    in_unit = [tensor for tensor in tensors if tensor.unit == name]
    trained = (t.numel // t.expert_ranks for t in in_unit if t.trainable)
    in_fp8 = (t.numel for t in in_unit if t.name in fp8)
    return Unit(sum(t.numel // t.expert_ranks for t in in_unit), sum(trained), sum(in_fp8))
