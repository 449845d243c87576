"""Parameters, gradients and optimizer state: the exact bytes that one rank holds under each
layout.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import ParamSpec, TypeVar

from finetune.config.layout import Sharding, frozen_dtype, shard_experts
from finetune.config.module_names import (
    find_trained,
    find_value,
    gives_head_adapter,
    is_parameter_named,
    is_saved_whole,
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
from finetune.constants import COMPUTE_DTYPE, FP32, ITEMSIZE, ROTATION, Shape, ceil_div, round_up
from finetune.plan.architecture import Architecture, TensorShape

_P = ParamSpec("_P")
_R = TypeVar("_R")

BESIDE = "beside"  # begins the units of what is beside a language model
# bytes, of each tensor in FSDP1's flat parameter (_flat_param.py, _get_aligned_numel)
FLAT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One parameter in memory: its FSDP unit, the bytes of one number, and whether it is
    trained.
    """

    name: str
    shape: Shape
    unit: str  # embedding, layer 0, layer 1, ..., tail, beside 0, ...
    itemsize: int
    trainable: bool
    # expert parallelism: the ranks that divide its experts between them, before FSDP shards it over
    # the others
    divided: int = 1

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard(self, shards: int, rank: int) -> Shape:
        """The shape of what rank `rank` of `shards` holds under FSDP2.

        Each rank holds a block of rows; the last blocks may be smaller or empty. Of divided experts
        each holds an equal part where `shard_experts` finds one.
        """
        others = shards // self.divided
        if self.divided > 1 and len(self.shape) > 1:
            held = shard_experts(self.shape, self.divided, others)
            if held is not None:
                return held
        own = self.shape[0] // self.divided
        block = ceil_div(own, others)
        rows = min(block, max(0, own - rank % others * block))
        return (rows, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class State:
    """Bytes on one rank. `optimizer` counts both moments and the step counters."""

    trained: int
    frozen: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.gradients + self.optimizer


def _keep_answers(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps a function's last answers: a plan asks for the same tensors hundreds of times.

    Arguments are compared, for they hold mappings and have no hash.
    """
    answers: deque[tuple[object, _R]] = deque(maxlen=16)

    @wraps(function)
    def ask(*arguments: _P.args, **named: _P.kwargs) -> _R:
        given = (arguments, named)
        for known, answer in answers:
            if known == given:
                return answer
        answer = function(*arguments, **named)
        answers.append((given, answer))
        return answer

    return ask


@_keep_answers
def list_state_tensors(
    architecture: Architecture,
    model: Model,
    lora: Lora,
    sharding: Sharding,
    quantization: Quantization,
) -> tuple[StateTensor, ...]:
    """Lists every parameter of the model.

    Without adapters all are trained but those that the recipe freezes. With adapters the base is
    frozen and may be quantized; the adapters and the modules that are trained whole are fp32.

    Raises `UserError` where a pattern of the recipe names nothing.
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
        itemsize = ITEMSIZE[frozen_dtype(sharding, lora)]
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
            ranks = 1
            if tensor.name in routed:
                ranks = sharding.expert_parallel_size
            is_whole = tensor.name.startswith(text) and is_saved_whole(names[tensor.name], lora)
            if is_whole or (tensor in architecture.critic and lora.use_peft):
                state.append(StateTensor(tensor.name, tensor.shape, unit, FP32, True, ranks))
            elif tensor in quantizable:
                state += _list_quantized(tensor, unit, itemsize, quantization, ranks)
            else:
                is_trained = tensor.name in trained
                state.append(
                    StateTensor(tensor.name, tensor.shape, unit, itemsize, is_trained, ranks)
                )
            # in the order of the modules, in which FSDP1 lays them out
            state += adapters.pop(tensor.name, ())
        state += adapters.pop(unit, ())
    for of_tied_weight in adapters.values():
        state += of_tied_weight
    return tuple(state)


def _name_tensors(architecture: Architecture) -> dict[str, list[str]]:
    """All names of each tensor, by its first: the embedding has the head's too where they are
    tied.
    """
    names = {tensor.name: [tensor.name] for tensor in architecture.tensors()}
    if architecture.tied:
        names[architecture.embedding.name].append(architecture.head_name)
    return names


def _refuse_wrong_targets(
    architecture: Architecture, names: Mapping[str, Sequence[str]], lora: Lora
) -> None:
    """Raises `UserError` where the recipe adapts what the model does not have."""
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
    """The output head's weight, by its own name, where the recipe gives it an adapter."""
    name = architecture.head_name
    first = next(first for first, every in names.items() if name in every)
    if not lora.use_peft or not gives_head_adapter(
        name.removesuffix(".weight"), names[first], lora
    ):
        return None
    shape = next(tensor.shape for tensor in architecture.tensors() if tensor.name == first)
    return TensorShape(name, shape)


def _list_quantizable(
    architecture: Architecture, unit: str, quantization: Quantization
) -> tuple[TensorShape, ...]:
    """The weights of a unit that the recipe quantizes."""
    if quantization.bits is None or not unit.startswith("layer"):
        return ()
    return architecture.quantizable(int(unit.split()[1]))


def _list_adapters(
    architecture: Architecture,
    units: Iterable[tuple[str, tuple[TensorShape, ...]]],
    names: Mapping[str, Sequence[str]],
    lora: Lora,
) -> dict[str, list[StateTensor]]:
    """The adapters of each linear layer, by the name of its weight, and those on the experts of
    each unit, by its name.

    Raises `UserError` where there are none.
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
    architecture: Architecture, itemsize: int, quantization: Quantization
) -> tuple[StateTensor, ...]:
    """Lists every parameter of a frozen model, such as a teacher. Its linear layers and experts may
    be quantized.
    """
    frozen: list[StateTensor] = []
    for unit, tensors in _list_units(architecture):
        quantizable = _list_quantizable(architecture, unit, quantization)
        for tensor in tensors:
            if tensor in quantizable:
                frozen += _list_quantized(tensor, unit, itemsize, quantization)
            else:
                frozen.append(StateTensor(tensor.name, tensor.shape, unit, itemsize, False))
    return tuple(frozen)


def _list_units(architecture: Architecture) -> list[tuple[str, tuple[TensorShape, ...]]]:
    """The tensors of each FSDP unit."""
    layers = [(f"layer {index}", architecture.layer(index)) for index in range(architecture.layers)]
    beside = [(f"{BESIDE} {index}", part) for index, part in enumerate(architecture.beside)]
    return [("embedding", (architecture.embedding,)), *layers, ("tail", architecture.tail), *beside]


def _list_quantized(
    weight: TensorShape, unit: str, itemsize: int, quantization: Quantization, ranks: int = 1
) -> Iterator[StateTensor]:
    """Lists the tensors of a frozen weight that is quantized: its codes and its scales, stored as
    numbers of the compute dtype. Each of the `ranks` that divide its experts has its own.
    """
    if ranks > 1:
        quantization = divide_quantization(weight.numel // ranks, quantization)
    held = quantized_bytes(prod(weight.shape[:-1]) // ranks, weight.shape[-1], quantization)
    for part, byte_count in (("codes", held.codes), ("scales", held.scales)):
        numbers = ceil_div(byte_count, itemsize)
        yield StateTensor(f"{weight.name}.{part}", (ranks * numbers,), unit, itemsize, False, ranks)


def is_adapted(linear: TensorShape, lora: Lora) -> bool:
    """Whether a weight of a decoder layer gets an adapter; `all-linear`: all that are not trained
    whole.
    """
    if is_saved_whole([linear.name], lora):
        return False
    name = linear.name.removesuffix(".weight")
    return lora.adapts_all or is_parameter_named(name, lora.named_targets)


def _list_adapter(linear: TensorShape, unit: str, lora: Lora) -> Iterator[StateTensor]:
    """W + B A: A is [rank, in], B is [out, rank] (Hu et al. 2021); DoRA adds a magnitude [out] (Liu
    et al. 2024).
    """
    name, (width_out, width_in) = linear.name.removesuffix(".weight"), linear.shape
    block = lora.oft_block_size
    if block is not None:  # a skew-symmetric matrix of each block (Qiu et al. 2023)
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
    """The adapters on a layer's experts: A is [experts * rank, in], B is [out, experts * rank].

    peft nests the adapters of several weights, that of the last one outermost.
    """
    for depth, tensor in enumerate(reversed(weights)):
        width_out, width_in = architecture.expert_widths(tensor)
        width = tensor.shape[0] * find_value(tensor.name, lora.rank_pattern, lora.lora_r)
        place = tensor.name.rpartition(".")[0] + ".base_layer" * depth
        yield StateTensor(f"{place}.lora_A.default.weight", (width, width_in), unit, FP32, True)
        yield StateTensor(f"{place}.lora_B.default.weight", (width_out, width), unit, FP32, True)


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
        shards: The ranks that hold one replica of them.
        optim: The optimizer; None counts none.
        rank: The rank; rank 0 holds the most.

    Source: mixed-precision training keeps fp32 parameters, gradients and two Adam moments: 4 + 4 +
    4 + 4 bytes a parameter (Rajbhandari et al. 2020, section 3.1: K = 12 counts the fp32 copies),
    here without a bf16 copy.
    """
    held = list(
        _split_flat(tensors, shards, rank % shards, sharding, optim)
        if sharding.layout == "fsdp1"
        else _split_by_rows(tensors, shards, rank % shards, optim)
    )
    return State(
        trained=sum(part.stored for part in held if part.trained),
        frozen=sum(part.stored for part in held if not part.trained),
        gradients=sum(part.stored for part in held if part.trained),
        optimizer=sum(part.optimizer for part in held),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a tensor, or of a flat parameter."""

    stored: int  # bytes, padding included
    trained: bool
    optimizer: int  # bytes of the optimizer's state, padding not included


def _split_by_rows(
    tensors: Iterable[StateTensor], shards: int, rank: int, optim: str | None
) -> Iterator[_Part]:
    """FSDP2 splits each tensor as `StateTensor.shard` says, and pads every rank's part to the size
    of the first.
    """
    for tensor in tensors:
        real = tensor.shard(shards, rank)
        stored = prod(tensor.shard(shards, 0))
        state = 0
        if tensor.trainable:
            state = count_optimizer_bytes(optim, real, tensor.itemsize, name=tensor.name)
        yield _Part(stored * tensor.itemsize, tensor.trainable, state)


def _split_flat(
    tensors: Iterable[StateTensor], shards: int, rank: int, sharding: Sharding, optim: str | None
) -> Iterator[_Part]:
    """FSDP1 concatenates the tensors of a unit, aligned for the compute dtype, and splits the whole
    into equal parts.

    A unit with both frozen and trained tensors (DoRA) has gradients for all of it.
    """
    mixed = sharding.mixed_precision
    for unit in _group_by_flat_unit(list(tensors)):
        itemsize = unit[0].itemsize
        aligned_itemsize = itemsize if mixed == "no" else ITEMSIZE[COMPUTE_DTYPE[mixed]]
        end = 0
        spans = []  # of the trained tensors, in the concatenated unit
        for tensor in unit:
            start = round_up(end, FLAT_ALIGNMENT // aligned_itemsize)
            end = start + tensor.numel
            if tensor.trainable:
                spans.append((start, end))
        share = ceil_div(end, shards)
        first = rank * share
        state = 0
        for start, stop in spans:
            numel = min(stop, first + share) - max(start, first)
            if numel > 0:
                state += count_optimizer_bytes(optim, (numel,), itemsize)
        yield _Part(share * itemsize, bool(spans), state)


def _group_by_flat_unit(tensors: Sequence[StateTensor]) -> Iterable[list[StateTensor]]:
    # DoRA's adapters, and those beside modules that are trained whole, are in their layer's unit
    # (config.layout.frozen_dtype).
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
    """A layer is a unit, an adapter's matrix is its own (not with DoRA), and the rest belongs to
    the root.
    """
    if adapters_are_units and ".default." in tensor.name:
        return tensor.name
    if tensor.unit.startswith(("layer", BESIDE)):
        return tensor.unit
    return "root"


@dataclass(frozen=True, slots=True)
class Files:
    """Bytes of one rank."""

    size: int  # of its file, which a step reads once and writes once
    buffer: int  # one of the two on the host; on a GPU there is one more
    counters: int  # the steps of each parameter, in memory


def count_files(
    tensors: Iterable[StateTensor],
    shards: int,
    optim: str,
    dtype: str,
    compute_dtype: str,
    rank: int = 0,
) -> Files:
    """The file of `rank` for the trained `tensors`, which are of `dtype` and split into `shards`.

    A buffer holds the largest decoder layer, or parameter that is in none (optim/offload.py).
    """
    itemsizes = list_offloaded_itemsizes(optim, dtype, compute_dtype)
    units = dict[str, int]()
    count = 0
    for tensor in tensors:
        if tensor.trainable:
            count += 1
            numel = prod(tensor.shard(shards, rank % shards))
            if tensor.unit.startswith("layer"):
                unit = tensor.unit
            else:
                unit = tensor.name
            units[unit] = units.get(unit, 0) + count_offloaded_bytes(numel, itemsizes)
    return Files(size=sum(units.values()), buffer=max(units.values()), counters=4 * count)


@dataclass(frozen=True, slots=True)
class Unit:
    """Numbers in one FSDP unit, gathered and freed together: all, the trained ones, and those in 8
    bits.
    """

    numel: int
    trained: int
    fp8: int = 0

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.numel + other.numel, self.trained + other.trained, self.fp8 + other.fp8)

    def gathered(self, itemsize: int) -> int:
        """Bytes of the gathered unit: one for a number in FP8, `itemsize` for any other."""
        return itemsize * (self.numel - self.fp8) + self.fp8


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """The units of FSDP: the embedding, one decoder layer, and the tail (final norm and head).

    Where the head is tied (FSDP2) or in FSDP1's root, the embedding belongs to the tail and its own
    unit is empty. Where layers are not units of their own, `layer` is all of them together.
    """

    embedding: Unit
    layer: Unit
    tail: Unit
    layers: Unit  # all decoder layers
    stay_gathered: bool  # layers remain gathered from forward to backward
    embedding_stays: bool  # and so does the embedding
    # numbers of the layer's experts that no other rank has, so that no all-gather is needed
    unshared: int = 0

    @property
    def wraps_layers(self) -> bool:
        """Whether each decoder layer is a unit; a model's only layer counts as all of them."""
        return self.layer != self.layers


def split_into_units(
    architecture: Architecture,
    tensors: Sequence[StateTensor],
    sharding: Sharding,
    fp8: Container[str] = (),
    shards: int = 0,
) -> FsdpUnits:
    """Splits a model into the FSDP units of a layout, as large as one rank gathers them.

    Args:
        architecture: The model.
        tensors: Its parameters.
        sharding: The layout.
        fp8: The names of the weights that are gathered in 8 bits.
        shards: The ranks that hold one replica; 0 where nobody asks for `unshared`.
    """
    widest = f"layer {architecture.widest_layer}"
    embedding = _unit(tensors, "embedding", fp8)
    layer = _unit(tensors, widest, fp8)
    tail = _unit(tensors, "tail", fp8)
    if architecture.is_uniform:
        count = architecture.layers
        layers = Unit(layer.numel * count, layer.trained * count, layer.fp8 * count)
    else:
        layers = Unit(0, 0)
        for index in range(architecture.layers):
            layers += _unit(tensors, f"layer {index}", fp8)
    is_layer_wrapped = _is_layer_wrapped(architecture, sharding)
    all_stay = sharding.strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    if architecture.tied or sharding.layout == "fsdp1":
        tail += embedding
        embedding = Unit(0, 0)
    on_one_rank_alone = [
        tensor for tensor in tensors if tensor.unit == widest and tensor.divided == shards > 1
    ]
    return FsdpUnits(
        embedding=embedding,
        layer=layer if is_layer_wrapped else layers,
        tail=tail,
        layers=layers,
        stay_gathered=all_stay or not is_layer_wrapped,
        embedding_stays=all_stay,
        unshared=sum(tensor.numel // tensor.divided for tensor in on_one_rank_alone),
    )


def _is_layer_wrapped(architecture: Architecture, sharding: Sharding) -> bool:
    """Whether each decoder layer is a unit of its own; else all layers are one."""
    if sharding.wrapping == "SIZE_BASED_WRAP":
        widest = architecture.layer(architecture.widest_layer)
        return sum(tensor.numel for tensor in widest) > sharding.min_num_params
    return sharding.wrapping != "NO_WRAP"


def _unit(tensors: Sequence[StateTensor], name: str, fp8: Container[str]) -> Unit:
    own = [tensor for tensor in tensors if tensor.unit == name]
    trained = (t.numel // t.divided for t in own if t.trainable)
    in_fp8 = (t.numel for t in own if t.name in fp8)
    return Unit(sum(t.numel // t.divided for t in own), sum(trained), sum(in_fp8))
