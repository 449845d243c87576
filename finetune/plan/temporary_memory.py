"""What a layout itself holds during a step: gathered units, and gradients until they are reduced.

The order of events is torch's own (torch/distributed/fsdp/_fully_shard): the backward of a unit
begins with the all-gather of the one before it; at its end it is freed, its gradients are copied
into the input of a reduce-scatter, and that input is held until the next unit's. Units are the
embedding, every decoder layer, and the tail (final norm and head), which stays gathered from
forward to backward (Accelerate's fsdp2_prepare_model).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from finetune.config.optimization import OPTIMIZERS, is_layers_matrix
from finetune.config.quantization import SCHEMES
from finetune.constants import FP32, ITEMSIZE, ceil_div
from finetune.plan.activations import Computation, expert_adapter_rank
from finetune.plan.architecture import Architecture, TensorShape
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import StateTensor, Unit, count_state, split_into_units


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes that one rank holds at one point of a run."""

    name: str
    parameters: int = 0  # trained and frozen, as sharded
    teacher: int = 0  # its parameters, as sharded
    rewards: int = 0  # the parameters of reward models
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # FSDP units gathered for the computation, or weights cast by autocast
    activations: int = 0
    loss: int = 0  # the chunk of logits, and the gradients that the loss computes in its forward
    communication: int = 0  # unsharded gradients that are being reduced
    temporaries: int = 0  # of the optimizer; what is dequantized, cast to FP8, or rounded
    slack: int = 0  # held by the caching allocator, unusable
    context: int = 0  # outside the allocator

    @property
    def allocated(self) -> int:
        """The bytes that torch.cuda.max_memory_allocated counts."""
        return sum(getattr(self, part) for part in ALLOCATED)

    @property
    def total(self) -> int:
        """The bytes that the device needs to have."""
        return self.allocated + self.slack + self.context


ALLOCATED = tuple(
    part.name for part in fields(Snapshot) if part.name not in ("name", "slack", "context")
)


# Bytes per number that is cast to FP8, or multiplied, beside the 8-bit copies
CAST_BYTES = 2 * FP32 + 1  # without a compiler: two fp32 copies, and 8 bits
# On a CPU torch multiplies copies in fp32, which take more than the cast.
CPU_FACTOR_BYTES = 18  # of an input or a weight
CPU_OUTPUT_BYTES = 12


def fp8_bytes(spec: RunSpec, tokens: int) -> int:
    """The most bytes that a linear layer holds while it multiplies `tokens` tokens in FP8; 0 where
    none does.
    """
    return max(_list_fp8_bytes(spec, tokens), default=0)


def _list_fp8_bytes(spec: RunSpec, tokens: int) -> Iterator[int]:
    """The bytes of the linear layers that multiply in FP8, of one of each size."""
    for linear in _list_linears(spec.architecture):
        if linear.name not in spec.fp8_weights:
            continue
        width_out, width_in = linear.shape
        inputs = tokens * width_in
        outputs = tokens * width_out
        weight = linear.numel
        # 8-bit copies: one of the input; two, by rows and by columns, of gradient and weight
        copies = inputs + 2 * outputs + 2 * weight
        if spec.device == "cpu":
            factors = CPU_FACTOR_BYTES * max(inputs, weight)
            yield copies + max(factors, CPU_OUTPUT_BYTES * outputs)
        elif spec.recipe.model.torch_compile:
            yield copies
        else:
            # one tensor after another is cast; a gathered weight is in 8 bits already
            cast_weight = 0 if linear.name in spec.fp8_gathered else weight
            yield copies + CAST_BYTES * max(inputs, outputs, cast_weight)


def _list_linears(architecture: Architecture) -> list[TensorShape]:
    """Lists linear layers of each size: those of a decoder layer with experts, of one without, and
    of the last, because in the first one not all multiply in FP8.
    """
    layers = {architecture.widest_layer, architecture.dense_layer, architecture.layers - 1}
    return [linear for layer in sorted(layers) for linear in architecture.linears(layer)]


# tensors in the backward of rounding to whole numbers: scaled, rounded, clamped, a mask, and back
ROUNDING_TENSORS = 5
# bytes per number while torchao rounds to 4 bits in blocks: it computes in fp32 and int32
BLOCK_ROUNDING_BYTES = 29
MERGING_BYTES = 2 * FP32  # per number of a weight to which an adapter is added, in fp32


def rounded_bytes(spec: RunSpec, tokens: int) -> int:
    """The most bytes that a linear layer holds while quantization-aware training rounds its weight
    and its input of `tokens` tokens; 0 where nothing is rounded.
    """
    name = spec.recipe.quantization_aware.quantization_aware_training
    if name is None:
        return 0
    scheme = SCHEMES[name]
    itemsize = spec.computation.itemsize
    has_adapters = spec.recipe.lora.use_peft
    merging = MERGING_BYTES if has_adapters else 0
    # bytes per number of the weight, and of the input
    if scheme.block:
        per_weight = BLOCK_ROUNDING_BYTES + merging
        per_input = BLOCK_ROUNDING_BYTES
    elif scheme.is_ternary:  # in fp32, of which other dtypes need a copy first
        copies = 1 if itemsize == FP32 else 2
        per_weight = copies * FP32 + merging
        per_input = copies * FP32
    else:  # in the backward; under LoRA with the gradient of base and adapter together
        weight_tensors = ROUNDING_TENSORS + 1 if has_adapters else ROUNDING_TENSORS
        per_weight = itemsize * weight_tensors
        per_input = 0 if scheme.input_bits is None else itemsize * ROUNDING_TENSORS
    sizes = []
    for linear in _list_linears(spec.architecture):
        of_weight = per_weight * linear.numel
        of_input = per_input * tokens * linear.shape[1]
        if scheme.block:  # one is rounded after the other
            sizes.append(max(of_weight, of_input))
        else:
            sizes.append(of_weight + of_input)
    return max(sizes)


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Bytes of the copies of experts' adapters that grouped products take, whatever the tokens.

    B always, to have each expert's in one piece; A where it is cast or its rank is padded.
    """

    kept: int = 0  # of all layers that are not computed again
    layer: int = 0  # of the layer with the most


def expert_factor_bytes(architecture: Architecture, computation: Computation) -> ExpertFactors:
    """The copies that all layers' experts take of their adapters, on one rank; 0 without any."""
    if computation.lora is None or not computation.lora.lora_target_parameters:
        return ExpertFactors()
    sizes = [
        _factor_bytes_of_layer(architecture, computation, layer)
        for layer in range(architecture.layers)
    ]
    every = computation.checkpoint_every
    if every is None:
        kept = sum(sizes)
    else:  # every `every`-th layer is computed again
        kept = sum(size for layer, size in enumerate(sizes) if layer % every)
    return ExpertFactors(kept=kept, layer=max(sizes))


def _factor_bytes_of_layer(architecture: Architecture, computation: Computation, layer: int) -> int:
    """The bytes of the copies of one layer, on one rank."""
    size = 0
    for tensor in architecture.experts(layer):
        lora_rank, padded = expert_adapter_rank(tensor.name, computation)
        width_out, width_in = architecture.expert_widths(tensor)
        copied = width_out  # of B
        if padded > lora_rank or computation.autocast:
            copied += width_in  # of A
        numbers = tensor.shape[0] * padded * copied
        size += computation.itemsize * numbers // computation.expert_ranks
    return size


def dequantized_at_once(architecture: Architecture, expert_ranks: int = 1) -> int:
    """Numbers that are dequantized at once: of the largest linear layer, or of a rank's experts of
    a layer.
    """
    layer = architecture.widest_layer
    experts = sum(weight.numel for weight in architecture.experts(layer)) // expert_ranks
    return max([experts, *(linear.numel for linear in architecture.linears(layer))])


FP64 = 8  # bytes; on a CPU the norm of a gradient is that of a copy in fp64


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes on one rank while the optimizer updates one part within the backward."""

    gradients: int  # whole; read only where nothing is sharded
    temporaries: int
    waiting: int = 0  # of `gradients`, those that wait for a later update


def update_temporaries(spec: RunSpec) -> int:
    """Returns the bytes that norm and update of all gradients allocate at once."""
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable]
    # of second moments, if the optimizer allocates their roots
    if spec.files() is not None:
        # of one tensor after another: the root of its second moment, and that over the correction
        roots = 2 * FP32 * ceil_div(max(tensor.numel for tensor in trained), spec.shards)
    elif spec.sharding.cpu_offload:
        roots = 0  # the host updates
    else:  # of all together, as large as the gradients
        roots = spec.state().gradients
    return _count_temporaries(spec, trained, roots)


def plan_updates_in_backward(spec: RunSpec) -> Mapping[str, UpdateMemory]:
    """Plans the memory of an update within the backward, on the rank with the most: of "head",
    "layer" and "embedding".

    A tied head is updated with the embedding.
    """
    layer = _list_trained(spec, "layer")
    embedding = _list_trained(spec, "embedding")
    tail = _list_trained(spec, "tail")
    waiting = 0
    if spec.part.tied and not spec.sharding.is_fsdp:
        # the head's gradient waits for the embedding's, whole, as the loss computes it
        waiting = FP32 * sum(tensor.numel for tensor in embedding)
    if spec.part.tied:
        embedding += tail
        tail = []
    return {
        "head": _plan_update(spec, tail),
        "layer": _plan_update(spec, layer, waiting),
        "embedding": _plan_update(spec, embedding, waiting),
    }


def _plan_update(spec: RunSpec, tensors: Sequence[StateTensor], waiting: int = 0) -> UpdateMemory:
    """Plans the memory while one of `tensors`, at worst the largest, is updated by itself.

    `waiting`: bytes of gradients that wait for a later update.
    """
    largest = max((tensor.numel * tensor.itemsize for tensor in tensors), default=0)
    own_shard = ceil_div(largest, spec.shards)
    return UpdateMemory(
        gradients=waiting + largest,
        temporaries=_count_temporaries(spec, tensors, roots=own_shard),
        waiting=waiting,
    )


def _count_temporaries(spec: RunSpec, tensors: Sequence[StateTensor], roots: int) -> int:
    """The most bytes that one gradient's norm, or the optimizer's update of `tensors`, allocates.

    `roots`: bytes of the roots of the second moments that it updates together. Only foreach AdamW
    allocates them.
    """
    facts = OPTIMIZERS[spec.recipe.optimization.optim]
    largest = ceil_div(max((tensor.numel for tensor in tensors), default=0), spec.shards)
    matrices = [tensor.numel for tensor in tensors if is_layers_matrix(tensor.name, tensor.shape)]
    norm = FP64 * largest if spec.device == "cpu" else 0
    update = facts.update_copies * FP32 * largest
    update += facts.update_bytes * max(matrices, default=0)  # of a whole matrix
    return max(norm, update, roots if facts.allocates_roots else 0)


def _list_trained(spec: RunSpec, unit: str) -> list[StateTensor]:
    """The trained tensors of units whose names begin with `unit`; "layer" is all layers."""
    return [
        tensor for tensor in spec.part_tensors if tensor.trainable and tensor.unit.startswith(unit)
    ]


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes of one unit on one rank."""

    # Copies of weights in the compute dtype: FSDP's (in FP8 a byte a number), or autocast's where
    # nothing is sharded.
    gathered: int = 0
    arriving: int = 0  # what its all-gather fills before the unit is copied out of it
    unreduced: int = 0  # gradients as the backward leaves them, of the whole unit
    reducing: int = 0  # the same as the input of the reduce-scatter
    shard: int = 0  # this rank's part of the gradients


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """What each unit of a model takes; `layer` is its widest decoder layer, or all of them where
    they are one unit.

    A tied head, and FSDP1's, has the embedding in its unit (`tail_has_embedding`), which therefore
    stays gathered in every layer and is reduced after the backward of the embedding.
    """

    embedding: UnitMemory
    layer: UnitMemory
    tail: UnitMemory
    layers: int  # how many units such as `layer`; 1 where all layers are one
    # Where layers stay gathered after their forward. Under autocast with activation checkpointing
    # they stay until the loss alone: the backward casts each one again.
    all_layers_until_loss: int = 0  # bytes of all layers
    each_layer_until_backward: int = 0  # bytes of each layer, until its own backward
    staying_embedding: int = 0  # bytes of the embedding, until its own backward
    tail_has_embedding: bool = False  # then `embedding` is empty
    buckets: int = 0  # of DDP, an fp32 number for each trained number
    # of a tied head where nothing is sharded, beside the embedding's own until they are added
    tied_head_gradient: int = 0


def plan_layout_memory(spec: RunSpec) -> LayoutMemory:
    """Plans the memory that the layout of `spec` holds for each unit."""
    if spec.sharding.is_fsdp:
        return _plan_units(spec)
    return _plan_unsharded(spec)


def _plan_units(spec: RunSpec) -> LayoutMemory:
    """Plans the memory of each unit of FSDP."""
    units = split_into_units(
        spec.part, _list_gathered(spec), spec.sharding, fp8=spec.fp8_gathered, shards=spec.shards
    )
    tail_has_embedding = spec.part.tied or spec.sharding.layout == "fsdp1"
    if units.wraps_layers:
        count = spec.part.layers
        names = [f"layer {spec.part.widest_layer}"]
    else:
        count = 1
        names = [f"layer {i}" for i in range(spec.part.layers)]
    # unshared: the experts of this rank alone, for which no all-gather needs a buffer
    layer = _plan_unit(spec, units.layer, names, units.unshared)
    if tail_has_embedding:
        embedding = UnitMemory()
        tail = _plan_unit(spec, units.tail, ["tail", "embedding"])
    else:
        embedding = _plan_unit(spec, units.embedding, ["embedding"])
        tail = _plan_unit(spec, units.tail, ["tail"])
    return LayoutMemory(
        embedding=embedding,
        layer=layer,
        tail=tail,
        layers=count,
        all_layers_until_loss=(
            units.layers.gathered(spec.computation.itemsize) if units.stay_gathered else 0
        ),
        each_layer_until_backward=layer.gathered if units.stay_gathered else 0,
        staying_embedding=embedding.gathered if units.embedding_stays else 0,
        tail_has_embedding=tail_has_embedding,
    )


def _list_gathered(spec: RunSpec) -> tuple[StateTensor, ...]:
    """The tensors that FSDP copies when it gathers a unit.

    All, but on one rank FSDP2 uses a frozen tensor in place if it has the dtype of the computation.
    """
    always_copies = spec.sharding.cpu_offload or bool(spec.fp8_gathered)
    if spec.shards > 1 or spec.sharding.layout != "fsdp2" or always_copies:
        return spec.part_tensors
    itemsize = spec.computation.itemsize
    return tuple(
        tensor for tensor in spec.part_tensors if tensor.trainable or tensor.itemsize != itemsize
    )


def _plan_unit(spec: RunSpec, unit: Unit, names: Sequence[str], unshared: int = 0) -> UnitMemory:
    """Plans the memory of one unit.

    Args:
        spec: The run.
        unit: What is gathered, and what of it is trained.
        names: The names by which its tensors know the unit.
        unshared: How many of its numbers (experts) this rank alone has: no all-gather brings them.
    """
    itemsize = spec.computation.itemsize
    gathered = unit.gathered(itemsize)
    tensors = [tensor for tensor in spec.part_tensors if tensor.unit in names]
    return UnitMemory(
        gathered=gathered,
        arriving=gathered - itemsize * unshared if spec.shards > 1 else 0,
        unreduced=itemsize * unit.trained,
        reducing=ITEMSIZE[spec.reduced_dtype] * unit.trained,
        shard=count_state(tensors, spec.sharding, spec.shards, optim=None).gradients,
    )


def _plan_unsharded(spec: RunSpec) -> LayoutMemory:
    """Plans the memory of each unit under DDP and single, which shard nothing.

    Autocast caches a cast copy of every trained parameter until the forward ends, or until its
    backward has used it; DDP has a bucket beside every gradient (torch.nn.parallel.distributed).
    """
    computation = spec.computation
    architecture = spec.architecture
    layer_weights = sum(
        tensor.numel
        for tensor in (
            *architecture.linears(architecture.widest_layer),
            *architecture.experts(architecture.widest_layer),
        )
    )
    is_cast = (
        computation.autocast
        and computation.lora is None  # the base under LoRA is frozen, in the compute dtype
        # else products read rounded weights, not the parameters
        and not spec.recipe.quantization_aware.quantization_aware_training
    )
    cast = computation.itemsize * layer_weights if is_cast else 0

    embedding = _trained_bytes(spec, "embedding")
    layer = _trained_bytes(spec, f"layer {architecture.widest_layer}")
    return LayoutMemory(
        embedding=UnitMemory(shard=embedding),
        layer=UnitMemory(gathered=cast, shard=layer),
        tail=UnitMemory(shard=_trained_bytes(spec, "tail")),
        layers=architecture.layers,
        all_layers_until_loss=cast * architecture.layers,
        each_layer_until_backward=cast if computation.checkpoint_every is None else 0,
        buckets=FP32 * spec.trained_numel if spec.sharding.layout == "ddp" else 0,
        tied_head_gradient=embedding if architecture.tied else 0,
    )


def _trained_bytes(spec: RunSpec, unit: str) -> int:
    """The bytes of a unit's trained parameters, whole."""
    tensors = [tensor for tensor in spec.part_tensors if tensor.unit == unit]
    return sum(tensor.numel * tensor.itemsize for tensor in tensors if tensor.trainable)
