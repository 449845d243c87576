"""Memory that a step takes for a moment: gathered units, gradients that are not yet reduced, and
temporaries of optimizer and quantization.

FSDP's units are the embedding, every decoder layer, and the tail (final norm and head). The order
of events is torch's own (torch/distributed/fsdp/_fully_shard). The backward of a unit begins with
the all-gather of the unit whose backward is next. At the end of the backward the unit is freed, and
its gradients are copied into the input of a reduce-scatter. That input is held until the next
unit's reduce-scatter. The tail stays gathered from forward to backward (Accelerate's
fsdp2_prepare_model).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from finetune.config.optimization import OPTIMIZERS, is_layers_matrix
from finetune.config.quantization import SCHEMES
from finetune.constants import FP32, ITEMSIZE, ceil_div
from finetune.plan.activations import Computation, expert_adapter_rank
from finetune.plan.architecture import Architecture, TensorShape
from finetune.plan.run_spec import RunSpec
from finetune.plan.state import StateTensor, Unit, count_state, is_adapted, split_into_units


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bytes that one rank holds at one point of a run."""

    name: str
    parameters: int = 0  # trained and frozen, this rank's shards
    teacher: int = 0  # the teacher's parameters, this rank's shards
    rewards: int = 0  # the parameters of reward models
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # FSDP units gathered for the computation, or weights cast by autocast
    activations: int = 0
    loss: int = 0  # the chunk of logits, and the gradients that the loss computes in its forward
    communication: int = 0  # gradients of whole units and buffers while they are being reduced
    temporaries: int = 0  # the optimizer's; weights that are dequantized, cast to FP8, or rounded
    slack: int = 0  # held by the caching allocator, which cannot use it
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


# Bytes per element of a tensor that is being cast to FP8, besides the 8-bit copies that are kept.
# Without a compiler these are two fp32 copies and an 8-bit one.
CAST_BYTES = 2 * FP32 + 1
# The same per element on a CPU, where torch multiplies fp32 copies, which take more than the cast.
CPU_FACTOR_BYTES = 18  # of an input or a weight
CPU_OUTPUT_BYTES = 12


def fp8_bytes(spec: RunSpec, tokens: int) -> int:
    """The most bytes that one linear layer takes while it multiplies `tokens` tokens in FP8.

    0 if no layer does.
    """
    return max(_list_fp8_bytes(spec, tokens), default=0)


def _list_fp8_bytes(spec: RunSpec, tokens: int) -> Iterator[int]:
    """Yields these bytes for every linear layer of `_list_linears` that multiplies in FP8."""
    for linear in _list_linears(spec.architecture):
        if linear.name not in spec.fp8_weights:
            continue
        width_out, width_in = linear.shape
        inputs = tokens * width_in
        outputs = tokens * width_out
        weight = linear.numel
        # 8-bit copies: one of the input, and two (by rows and by columns) of output's gradient and
        # weight
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
    """Lists the linear layers of a few decoder layers, which stand for those of all layers.

    They are the widest layer, a layer without experts, and the last layer. The last one is there
    because the model's very first linear layer does not multiply in FP8.
    """
    layers = architecture.largest_layers | {architecture.layers - 1}
    return [linear for layer in sorted(layers) for linear in architecture.linears(layer)]


# tensors in the backward of rounding to integers: scaled, rounded, clamped, mask, scaled back
ROUNDING_TENSORS = 5
# bytes per element while torchao rounds to 4 bits in blocks: it computes in fp32 and int32
BLOCK_ROUNDING_BYTES = 29
# bytes per element of a weight while an adapter is added to it in fp32
MERGING_BYTES = 2 * FP32


def rounded_bytes(spec: RunSpec, tokens: int) -> int:
    """The most bytes that one linear layer takes while quantization-aware training rounds its
    weight and its input of `tokens` tokens.

    0 without quantization-aware training.
    """
    name = spec.recipe.quantization_aware.quantization_aware_training
    if name is None:
        return 0
    scheme = SCHEMES[name]
    itemsize = spec.computation.itemsize
    has_adapters = spec.recipe.lora.use_peft
    merging = MERGING_BYTES if has_adapters else 0
    # `per_weight` and `per_input`: bytes for each element of the weight, and of the input
    if scheme.block:
        per_weight = BLOCK_ROUNDING_BYTES + merging
        per_input = BLOCK_ROUNDING_BYTES
    elif scheme.is_ternary:  # rounds in fp32; a smaller dtype is copied to fp32 first
        copies = 1 if itemsize == FP32 else 2
        per_weight = copies * FP32 + merging
        per_input = copies * FP32
    else:  # the most is in the backward; under LoRA with the gradient of base plus adapter
        weight_tensors = ROUNDING_TENSORS + 1 if has_adapters else ROUNDING_TENSORS
        per_weight = itemsize * weight_tensors
        per_input = 0 if scheme.input_bits is None else itemsize * ROUNDING_TENSORS
    sizes = []
    for linear in _list_linears(spec.architecture):
        width_in = linear.shape[1]
        of_weight = per_weight * linear.numel
        of_input = per_input * tokens * width_in
        if scheme.block:  # weight and input are rounded one after the other
            sizes.append(max(of_weight, of_input))
        else:
            sizes.append(of_weight + of_input)
    return max(sizes)


def dora_bytes(spec: RunSpec) -> int:
    """The most bytes that DoRA takes to compute the norms of one linear layer; 0 without DoRA.

    peft multiplies an identity [in, in] by the adapter's matrices, scales the product, and adds it
    to the weight. Under autocast it does so in fp32, with a copy of the weight; a quantized base is
    dequantized again for it.
    """
    lora = spec.recipe.lora
    if not lora.use_dora:
        return 0
    copies_weight = spec.computation.autocast or spec.recipe.quantization.bits is not None
    of_weight = 4 if copies_weight else 3  # tensors of the weight's size
    elements = [
        linear.shape[1] ** 2 + of_weight * linear.numel
        for linear in _list_linears(spec.architecture)
        if is_adapted(linear, lora)
    ]
    return spec.computation.residual_itemsize * max(elements)


def dora_base_bytes(spec: RunSpec) -> int:
    """Bytes of one decoder layer's dequantized weights that DoRA keeps for the backward.

    With dropout DoRA multiplies the base itself by the inputs after dropout. 0 without dropout, for
    a base that is not quantized, and under autocast, which copies the base in another way.
    """
    computation = spec.computation
    multiplies_base = spec.recipe.lora.use_dora and computation.drops_inputs
    if not multiplies_base or computation.autocast or spec.recipe.quantization.bits is None:
        return 0
    return computation.itemsize * _count_adapted_elements(spec)


def _count_adapted_elements(spec: RunSpec) -> int:
    """Counts the elements of the widest decoder layer's linear weights that have adapters."""
    linears = spec.architecture.linears(spec.architecture.widest_layer)
    return sum(linear.numel for linear in linears if is_adapted(linear, spec.recipe.lora))


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Bytes of copies of the experts' LoRA matrices that grouped matmuls read, on one rank.

    B is always copied, to make each expert's matrix contiguous. A is copied if autocast casts it or
    its rank is padded. The number of tokens does not matter.
    """

    kept: int = 0  # until the backward: of all layers that are not recomputed
    layer: int = 0  # of the layer with the most


def expert_factor_bytes(architecture: Architecture, computation: Computation) -> ExpertFactors:
    """Counts the copies of the experts' LoRA matrices in all layers; 0 if experts have none."""
    if computation.lora is None or not computation.lora.lora_target_parameters:
        return ExpertFactors()
    sizes = [
        _factor_bytes_of_layer(architecture, computation, layer)
        for layer in range(architecture.layers)
    ]
    every = computation.checkpoint_every
    if every is None:
        kept = sum(sizes)
    else:  # layers 0, every, 2 * every, ... are recomputed
        kept = sum(size for layer, size in enumerate(sizes) if layer % every)
    return ExpertFactors(kept=kept, layer=max(sizes))


def _factor_bytes_of_layer(architecture: Architecture, computation: Computation, layer: int) -> int:
    """Bytes of the copies of the experts' LoRA matrices in one layer, on one rank."""
    size = 0
    for weights in architecture.experts(layer):
        lora_rank, padded_rank = expert_adapter_rank(weights.name, computation)
        width_out, width_in = architecture.expert_widths(weights)
        copied_width = width_out  # B is [width_out, rank]
        if padded_rank > lora_rank or computation.autocast:
            copied_width += width_in  # A is [rank, width_in]
        experts = weights.shape[0]
        elements = experts * padded_rank * copied_width
        size += computation.itemsize * elements // computation.expert_ranks
    return size


def most_dequantized_elements(architecture: Architecture, expert_ranks: int = 1) -> int:
    """The most elements (not bytes) of quantized weights that are dequantized at the same time.

    They are those of the largest linear layer, or of the experts that one of `expert_ranks` ranks
    has of a layer.
    """
    experts = sum(weight.numel for weight in architecture.experts(architecture.widest_layer))
    layers = architecture.largest_layers
    linears = [linear.numel for layer in layers for linear in architecture.linears(layer)]
    return max([experts // expert_ranks, *linears])


FP64 = 8  # bytes


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes on one rank while the optimizer updates one part of the model within the backward."""

    gradients: int  # whole, not sharded: only layouts without sharding read it
    temporaries: int
    waiting: int = 0  # the part of `gradients` that waits for a later update


def optimizer_step_temporaries(spec: RunSpec) -> int:
    """Bytes of temporaries on the device in the optimizer step: those of the gradients' norm or of
    the update, whichever are more.
    """
    updates_on_host = spec.sharding.cpu_offload and spec.optimizer_file() is None
    if updates_on_host and spec.device != "cpu":
        return 0
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable]
    # `roots`: bytes of the roots of the second moments, for an optimizer that allocates them
    if spec.optimizer_file() is not None:  # the optimizer's state is in a file
        # One tensor is updated after another: the root, and the root over the bias correction.
        roots = 2 * FP32 * ceil_div(max(tensor.numel for tensor in trained), spec.shards)
    elif updates_on_host:
        roots = 0
    else:  # all tensors are updated together, and their roots are as large as the gradients
        roots = spec.state().gradients
    return _find_largest_temporaries(spec, trained, roots)


def state_making_bytes(spec: RunSpec) -> int:
    """Bytes of temporaries while the optimizer's state is made for a checkpoint: one parameter's
    gradient on this rank, and what its update allocates.
    """
    trained = [tensor for tensor in spec.part_tensors if tensor.trainable]
    largest = max(tensor.numel * tensor.itemsize for tensor in trained)
    gradient = ceil_div(largest, spec.shards)
    return gradient + _find_largest_temporaries(spec, trained, roots=gradient)


def plan_updates_in_backward(spec: RunSpec) -> Mapping[str, UpdateMemory]:
    """Plans the memory of the updates within the backward, on the rank with the most.

    The keys are "head", "layer" and "embedding". A tied head is updated with the embedding.
    """
    layer = _list_trained(spec, "layer")
    embedding = _list_trained(spec, "embedding")
    tail = _list_trained(spec, "tail")
    waiting = 0
    if spec.part.tied and not spec.sharding.is_fsdp:
        # The loss computes the head's gradient in fp32. It waits, whole, for the embedding's.
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
    """Plans the memory while the largest of `tensors` is updated; each is updated by itself.

    `waiting`: bytes of gradients that wait for a later update.
    """
    largest = max((tensor.numel * tensor.itemsize for tensor in tensors), default=0)
    shard_bytes = ceil_div(largest, spec.shards)
    return UpdateMemory(
        gradients=waiting + largest,
        temporaries=_find_largest_temporaries(spec, tensors, roots=shard_bytes),
        waiting=waiting,
    )


def _find_largest_temporaries(spec: RunSpec, tensors: Sequence[StateTensor], roots: int) -> int:
    """Bytes of the largest temporaries: of one gradient's norm, of the update's copies, or `roots`.

    `roots`: bytes of the roots of all second moments that are updated together. They count only for
    an optimizer that allocates them.
    """
    facts = OPTIMIZERS[spec.recipe.optimization.optim]
    largest_shard = ceil_div(max((tensor.numel for tensor in tensors), default=0), spec.shards)
    matrices = [tensor.numel for tensor in tensors if is_layers_matrix(tensor.name, tensor.shape)]
    copies = facts.update_copies * FP32 * largest_shard
    norm = 0
    if spec.device == "cpu":
        norm = FP64 * largest_shard  # computed from a copy in fp64
        at_once = min(largest_shard, facts.cpu_update_numel or largest_shard)
        copies += facts.cpu_update_bytes * at_once
    copies += facts.update_bytes * max(matrices, default=0)  # of a whole matrix, not a shard
    return max(norm, copies, roots if facts.allocates_roots else 0)


def _list_trained(spec: RunSpec, unit: str) -> list[StateTensor]:
    """Lists the trained tensors of units whose name begins with `unit`; "layer" is all layers."""
    return [
        tensor for tensor in spec.part_tensors if tensor.trainable and tensor.unit.startswith(unit)
    ]


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes of one unit on one rank, in each form in which its weights or gradients exist."""

    # copies of the weights in the compute dtype: FSDP's gathered ones (FP8 takes a byte per
    # element), or those that autocast makes where nothing is sharded
    gathered: int = 0
    arriving: int = 0  # the buffer of the unit's all-gather, from which `gathered` is copied
    unreduced: int = 0  # gradients of the whole unit, as its backward leaves them
    reducing: int = 0  # these gradients as the input of the reduce-scatter
    shard: int = 0  # this rank's shard of the gradients


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Bytes of each unit of a model, and of what stays beyond the unit's own forward or backward.

    `layer` is the widest decoder layer, or all layers together if they are one unit.

    The unit of a tied head, and of any head under FSDP1, includes the embedding
    (`tail_has_embedding`). Such a tail stays gathered during every layer, and is reduced after the
    backward of the embedding.
    """

    embedding: UnitMemory
    layer: UnitMemory
    tail: UnitMemory
    layers: int  # how many units like `layer` there are; 1 if all layers are one unit
    # The next two are 0 unless weights of layers stay, gathered or cast, after their forward.
    all_layers_until_loss: int = 0  # bytes of all layers
    # bytes of one layer, until its own backward; see `bytes_until_backward`
    each_layer_until_backward: int = 0
    # Every n-th layer is recomputed, and its backward casts its weights again. None: all stay.
    recasts_every: int | None = None
    staying_embedding: int = 0  # bytes of the embedding, if it stays until its own backward
    tail_has_embedding: bool = False  # then `embedding` is empty
    buckets: int = 0  # DDP's: an fp32 number for each trained one
    # without sharding: the gradient of a tied head, until it is added to the embedding's
    tied_head_gradient: int = 0

    def bytes_until_backward(self, layers: int) -> int:
        """Bytes that the first `layers` layers hold for their own backwards."""
        recast = 0
        if self.recasts_every is not None:
            recast = ceil_div(layers, self.recasts_every)
        return (layers - recast) * self.each_layer_until_backward


def plan_layout_memory(spec: RunSpec) -> LayoutMemory:
    """Plans the memory of each unit in the layout of `spec`."""
    if spec.sharding.is_fsdp:
        return _plan_units(spec)
    return _plan_unsharded(spec)


def _plan_units(spec: RunSpec) -> LayoutMemory:
    """Plans the memory of each unit under FSDP."""
    units = split_into_units(
        spec.part, _list_gathered(spec), spec.sharding, fp8=spec.fp8_gathered, shards=spec.shards
    )
    tail_has_embedding = spec.part.tied or spec.sharding.layout == "fsdp1"
    if units.wraps_layers:
        layer_units = spec.part.layers
        layer_names = [f"layer {spec.part.widest_layer}"]
    else:  # FSDP makes one unit of all layers
        layer_units = 1
        layer_names = [f"layer {i}" for i in range(spec.part.layers)]
    layer = _plan_unit(spec, units.layer, layer_names, units.unshared)
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
        layers=layer_units,
        all_layers_until_loss=(
            units.layers.gathered(spec.computation.itemsize) if units.stay_gathered else 0
        ),
        each_layer_until_backward=layer.gathered if units.stay_gathered else 0,
        staying_embedding=embedding.gathered if units.embedding_stays else 0,
        tail_has_embedding=tail_has_embedding,
    )


def _list_gathered(spec: RunSpec) -> tuple[StateTensor, ...]:
    """Lists the tensors that FSDP copies when it gathers a unit.

    They are all tensors, with one exception: on one rank, FSDP2 uses a frozen tensor in place if
    the tensor already has the compute dtype.
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
        unit: The sizes of the unit, as FSDP gathers it.
        names: The `StateTensor.unit` names that belong to the unit. They are several if FSDP makes
            one unit of several parts of the model.
        unshared: How many of the unit's elements are experts that only this rank holds. They need
            no all-gather, and so no buffer.
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
    """Plans the memory of each unit under DDP and on a single device, where nothing is sharded.

    Nothing is gathered: a unit's `gathered` is the cast copies that autocast makes of a layer's
    trained weights, and its `shard` is all of its gradients. Autocast keeps the copies of all
    layers until the forward ends. A layer that is not recomputed holds its own until its backward;
    the backward of a recomputed layer casts its weights again. DDP holds a bucket entry for every
    gradient (torch.nn.parallel.distributed).
    """
    computation = spec.computation
    architecture = spec.architecture
    cast_layer = computation.itemsize * _count_cast_elements(spec)
    embedding = _trained_bytes(spec, "embedding")
    layer = _trained_bytes(spec, f"layer {architecture.widest_layer}")
    return LayoutMemory(
        embedding=UnitMemory(shard=embedding),
        layer=UnitMemory(gathered=cast_layer, shard=layer),
        tail=UnitMemory(shard=_trained_bytes(spec, "tail")),
        layers=architecture.layers,
        all_layers_until_loss=cast_layer * architecture.layers,
        each_layer_until_backward=cast_layer,
        recasts_every=computation.checkpoint_every,
        buckets=FP32 * spec.trained_numel if spec.sharding.layout == "ddp" else 0,
        tied_head_gradient=embedding if architecture.tied else 0,
    )


def _count_cast_elements(spec: RunSpec) -> int:
    """Counts the elements of the widest decoder layer's weights that autocast copies."""
    architecture = spec.architecture
    computation = spec.computation
    # matmuls of quantization-aware training read rounded weights, not the parameters
    if not computation.autocast or spec.recipe.quantization_aware.quantization_aware_training:
        return 0
    layer = architecture.widest_layer
    if computation.lora is None:
        weights = (*architecture.linears(layer), *architecture.experts(layer))
        return sum(weight.numel for weight in weights)
    # Under LoRA the base is frozen, and in the compute dtype already.
    adapters = _trained_bytes(spec, f"layer {layer}") // FP32
    # With dropout, DoRA multiplies by a copy of the base in fp32, which autocast casts back.
    multiplies_copy = computation.lora.use_dora and computation.drops_inputs
    return adapters + _count_adapted_elements(spec) if multiplies_copy else adapters


def _trained_bytes(spec: RunSpec, unit: str) -> int:
    """Bytes of a unit's trained parameters, which are not sharded."""
    tensors = [tensor for tensor in spec.part_tensors if tensor.unit == unit]
    return sum(tensor.numel * tensor.itemsize for tensor in tensors if tensor.trainable)
