"""The experts of a mixture: computed on one rank, from quantized weights, or over a group of ranks.

`compute_in_groups` does what transformers' grouped_mm does, with two differences:

- It moves rows by permutations, whose gradients are permutations too. The gradient of indexing is a
  sum by atomic operations, which is slow and differs each time.
- It multiplies by the factors of an adapter one after the other: x W + s (x A^T) B^T for a weight
  W [in, out] (Hu et al. 2021, eq. 3). peft adds s A^T B^T to W, and needs a gradient as large as
  all experts for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from finetune.config.facts import count_chosen, count_experts
from finetune.config.layout import Sharding, shard_experts
from finetune.config.schema import Quantization
from finetune.constants import ADAPTER_NAME, EXPERT_RANK_MULTIPLE
from finetune.distributed.join import make_expert_mesh, set_timeouts
from finetune.distributed.model_parts import (
    expert_modules,
    is_experts,
    language_model_of,
    local_part,
    product_dtype,
)
from finetune.distributed.world import EXPERT, EXPERT_SHARD, REPLICATE, World, all_to_all
from finetune.models.quantized_layers import (
    CODES,
    SCALES,
    QuantizedWeight,
    expert_layers,
    expert_weights,
    recomputed_modules,
)

ALIGNMENT_BYTES = 16  # the rows of a grouped product's matrices must be a multiple of this size
# `compute_in_groups` under this name is one of transformers' implementations of experts
GROUPED = "grouped"

Factors = Mapping[str, tuple[Tensor, Tensor, float]]
"""Parameter's name -> (left, right, scale) of its adapter.

The adapter adds scale x left @ right to each expert's matrix [rows, columns], in the order of
dimensions that the parameter has. left: [experts, rows, rank]. right: [experts, rank, columns].
"""


def choose_experts_implementation(sharding: Sharding, dtype: torch.dtype, device_type: str) -> str:
    """Chooses how experts are computed: grouped in bf16 on a GPU, else by transformers' exact loop.

    A GPU before Ampere gets GROUPED too, though transformers computes each of its grouped products
    by a loop over experts there.

    Args:
        sharding: Has the dtype that mixed precision casts to; it is bf16 under FP8 too.
        dtype: The dtype of the experts' parameters.
        device_type: Such as cuda.

    Returns:
        A name for `set_experts_implementation`.
    """
    compute_dtypes = {"no": dtype, "bf16": torch.bfloat16, "fp16": torch.float16}
    compute_dtype = compute_dtypes[sharding.mixed_precision]
    if device_type == "cuda" and compute_dtype == torch.bfloat16:
        return GROUPED
    return "eager"


def install_experts(model: Any, world: World, dtype: torch.dtype, is_compiled: bool) -> None:
    """Chooses how a mixture computes its experts, and sets `model` to it.

    Under torch.compile that is GROUPED, else `choose_experts_implementation` decides.
    """
    register_grouped()
    best = choose_experts_implementation(world.sharding, dtype, world.device.type)
    set_experts_implementation(model, GROUPED if is_compiled else best)


def set_experts_implementation(model: Any, name: str) -> None:
    """Makes a mixture compute its experts by transformers' implementation `name`.

    It has no effect on a dense model, even if the class can also be a mixture (Gemma 4) and keeps
    the name in its config.
    """
    language_model = language_model_of(model)  # the model, or the one in a vision-language model
    if language_model._can_set_experts_implementation():
        language_model.set_experts_implementation(name)


def bypass_adapters(model: nn.Module, module: nn.Module) -> list[Any]:
    """Stops peft from adding its adapters to the parameters of `module`.

    The caller computes with the adapters' factors instead, which `find_factors` returns.

    Args:
        model: The model with the adapters.
        module: One of its layers of experts.

    Returns:
        peft's modules with the adapters, one for each adapted parameter, the outermost first; none
        without adapters.
    """
    # peft puts a ParamWrapper around the layer for each parameter, one around the other.
    wrappers: Iterator[Any] = (each for each in model.modules() if hasattr(each, "parameter_name"))
    adapters = [wrapper for wrapper in wrappers if wrapper.get_base_layer() is module]
    for adapter in adapters:
        adapter.forward = adapter.base_layer.__call__
    return adapters


def multiply_by_factors(model: nn.Module) -> None:
    """Makes adapted layers of experts multiply by the adapters' factors, one after the other.

    peft would add the product of the factors to the weights.
    """
    for module in expert_modules(model):
        # A quantized or divided layer has a forward of its own, which multiplies by factors.
        if "forward" in vars(module):
            continue
        adapters = bypass_adapters(model, module)
        if adapters:
            module.forward = partial(_compute_adapted, module, adapters)


def _compute_adapted(module: nn.Module, adapters: Sequence[Any], *inputs: Tensor) -> Tensor:
    """Runs a layer of experts with the factors of its adapters; `inputs` are its forward's."""
    return compute_in_groups(module, inputs, factors=find_factors(adapters))


def find_factors(adapters: Iterable[Any], own_experts: slice = slice(None)) -> Factors:
    """Returns the factors of peft's adapters, in the shapes of `Factors`.

    Disabled adapters are left out. `own_experts`: which experts, of all those of the layer; each
    rank's adapters hold all.
    """
    factors = {}
    for adapter in adapters:
        if not adapter.disable_adapters:
            left, right, scale = adapter.get_delta_factors(ADAPTER_NAME)
            factors[adapter.parameter_name] = left[own_experts], right[own_experts], scale
    return factors


def compute_experts(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    num_experts: int,
    *inputs: Any,
    factors: Factors | None,
) -> Any:
    """Runs a layer of experts with `parameters` in place of the layer's own.

    Args:
        module: The layer.
        parameters: [experts, ...] each, by the names of the module's parameters.
        num_experts: How many experts the parameters hold.
        inputs: The inputs of the module's forward; see `compute_in_groups`.
        factors: Factors of adapters on the parameters; empty or None: no adapters.

    Returns:
        What the module's forward returns: [tokens, width].
    """
    if factors:
        return compute_in_groups(module, inputs, parameters=parameters, factors=factors)
    return type(module).forward(_StandIn(module, parameters, num_experts), *inputs)


class _StandIn:
    """Stands in for `self` in a module's own forward, with other parameters.

    All other attributes are the module's.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], num_experts: int
    ) -> None:
        self.__dict__ |= parameters
        self._module = module
        self.num_experts = num_experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def register_grouped() -> None:
    """Registers `compute_in_groups` with transformers as the implementation GROUPED."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(
        GROUPED, lambda module, *inputs: compute_in_groups(module, inputs)
    )


def compute_in_groups(
    module: Any,
    inputs: tuple[Tensor, ...],
    parameters: Mapping[str, Tensor] | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Runs a layer of experts with one grouped product for each of its matrices.

    Each token is copied to its k experts. The copies, here called rows, are sorted by expert for
    the products, and put back in the order of the tokens to be summed.

    Args:
        module: The layer. Says whether its experts have a gate and biases.
        inputs: The inputs of the layer's forward:
            hidden: [tokens, width].
            chosen: int64[tokens, k], the experts of each token. A number beyond the last expert
                stands for no expert (Zaya).
            weights: [tokens, k], the weights of the experts' outputs.
        parameters: [experts, ...] each, in place of the module's; None: the module's.
        factors: Factors of adapters on these parameters; None: no adapters.

    Returns:
        [tokens, width], in the dtype of hidden.
    """
    hidden, chosen, weights = inputs
    tokens, k = chosen.shape

    def get_parameter(name: str) -> Tensor:
        return getattr(module, name) if parameters is None else parameters[name]

    num_experts = get_parameter("down_proj").shape[0]
    # A row without an expert is computed by the last one, with weight 0.
    weights = weights.reshape(tokens, k, 1).masked_fill(chosen[..., None] >= num_experts, 0)
    expert_of_row, order = chosen.flatten().clamp(max=num_experts - 1).sort(stable=True)
    inverse = order.argsort()
    expert_ids = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(expert_of_row, expert_ids, right=True, out_int32=True)

    def multiply(name: str, rows: Tensor) -> Tensor:
        """Multiplies rows [n, in] by their expert's matrix of parameter `name`: [n, out]."""
        weight = get_parameter(name)
        rows = rows.to(product_dtype(weight))
        is_transposed = getattr(module, "is_transposed", False)  # [experts, in, out]
        matrices = weight if is_transposed else weight.mT
        product = multiply_grouped(rows, matrices, ends)
        if factors and name in factors:
            product = _add_adapter(product, rows, factors[name], is_transposed, ends)
        if module.has_bias:
            bias = get_parameter(f"{name}_bias").to(rows.dtype)
            product = product + _IndexedBias.apply(bias, expert_of_row)  # type: ignore[no-untyped-call]
        return product

    rows = move_rows(hidden, order, inverse, copies=k)
    if module.has_gate:
        activated = module._apply_gate(multiply("gate_up_proj", rows))
    else:
        activated = module.act_fn(multiply("up_proj", rows))
    outputs = multiply("down_proj", activated)
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    # back from the order of experts to that of tokens
    by_token = move_rows(outputs, inverse, order).view(tokens, k, -1)
    summed: Tensor = (by_token * weights).sum(1)
    return summed.to(hidden.dtype)


def _add_adapter(
    product: Tensor,
    rows: Tensor,
    factors: tuple[Tensor, Tensor, float],
    is_transposed: bool,
    ends: Tensor,
) -> Tensor:
    """Adds scale x (x A^T) B^T to the product of the rows x with the frozen weights.

    Args:
        product: [n, out].
        rows: [n, in], sorted by expert.
        factors: See `Factors`.
        is_transposed: Whether the parameter, and so left @ right, is [experts, in, out]; else it is
            [experts, out, in].
        ends: int32[experts], where each expert's rows end.

    Returns:
        [n, out].
    """
    left, right, scale = factors
    if is_transposed:  # left [experts, in, rank] is A^T, right [experts, rank, out] is B^T
        a = left.mT
        b = right.mT
    else:  # left [experts, out, rank] is B, right [experts, rank, in] is A
        a = right
        b = left
    # Grouped products need rows of a multiple of 16 bytes, so zeros fill up the rank:
    # a [experts, padded rank, in], b [experts, out, padded rank].
    padding = -a.shape[1] % EXPERT_RANK_MULTIPLE
    if padding:
        a = F.pad(a, (0, 0, 0, padding))
        b = F.pad(b, (0, padding))
    inner = multiply_grouped(rows, a.mT, ends)  # [n, padded rank]
    # `contiguous`: peft keeps B of all experts in one matrix, where the columns of an expert are
    # not adjacent.
    added = multiply_grouped(inner, b.contiguous().mT, ends)
    return product.add(added, alpha=scale)


def multiply_grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    Args:
        rows: [n, in], sorted by expert.
        weights: [experts, in, out]: a parameter, or a factor of its adapter.
        ends: int32[experts], where each expert's rows end.

    Returns:
        [n, out].
    """
    from transformers.integrations.moe import _grouped_mm

    weights = weights.to(rows.dtype)
    is_aligned = all(size * weights.itemsize % ALIGNMENT_BYTES == 0 for size in weights.shape[1:])
    if is_aligned:
        multiply = _grouped_mm  # one kernel, but a loop before Ampere
    else:  # a loop over the experts, for which the host waits to read `ends`
        multiply = torch.ops.transformers.grouped_mm_fallback
    product: Tensor = multiply(rows, weights, ends)
    return product


def move_rows(rows: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Repeats each row `copies` times, then puts the copies in another order.

    Args:
        rows: [n / copies, width].
        order: int64[n], a permutation: row i of the result is copy `order[i]`, where the copies of
            a row are adjacent.
        inverse: int64[n], the inverse permutation, by which the backward moves gradients.
        copies: How often each row is repeated.

    Returns:
        [n, width].
    """
    moved: Tensor = _MovedRows.apply(rows, order, inverse, copies)  # type: ignore[no-untyped-call]
    return moved


class _MovedRows(torch.autograd.Function):
    """Does `move_rows`. The gradient is moved by the inverse, then summed over a row's copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies] if copies > 1 else rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        moved = gradient[inverse]
        if ctx.copies > 1:
            moved = moved.view(-1, ctx.copies, gradient.shape[-1]).sum(1)
        return moved, None, None, None


class _IndexedBias(torch.autograd.Function):
    """Returns for each row the bias of its expert: [experts, out] and int64[n] -> [n, out].

    The gradient is a matrix product in place of the sum by index that autograd would make.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(expert_of_row)
        ctx.experts = bias.shape[0]
        return bias[expert_of_row]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (expert_of_row,) = ctx.saved_tensors
        expert_ids = torch.arange(ctx.experts, device=expert_of_row.device)
        is_own_row = expert_ids[:, None] == expert_of_row  # bool[experts, n]
        return is_own_row.to(gradient.dtype) @ gradient, None


def count_active(model: Any) -> dict[nn.Parameter, int]:
    """Counts the elements of each parameter that take part in computing one token.

    Of the parameters of routed experts, only the chosen experts' share counts.
    """
    config = model.config.get_text_config().to_dict()
    num_experts = count_experts(config)
    num_chosen = count_chosen(config)
    counts = {parameter: parameter.numel() for parameter in model.parameters()}
    if num_experts and num_chosen:
        for module in model.modules():
            # The layer, or peft's module around it: its adapters count by the same share.
            if is_experts(_without_adapters(module)):
                counts |= {
                    parameter: parameter.numel() * num_chosen // num_experts
                    for parameter in module.parameters()
                }
    return counts


def _without_adapters(module: Any) -> nn.Module:
    """Returns the module inside peft's wrappers; a module without wrappers as it is."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[no-any-return]


def quantize_experts(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype
) -> frozenset[str]:
    """Replaces the frozen weights of experts, but not biases, by empty quantized weights.

    They are filled when the model is loaded. A layer's forward changes too: it dequantizes the
    weights, and multiplies by the factors of peft's adapters, which peft no longer adds. Call this
    after adapters and activation checkpointing are installed.

    Args:
        model: On meta.
        quantization: How frozen weights are quantized. Trained ones (modules_to_save) stay.
        dtype: The compute dtype. The quantized weights report it as theirs, though they hold codes.

    Returns:
        The names of the parameters that hold codes and scales.
    """
    added = set()
    recomputed = recomputed_modules(model)
    for path, module in expert_layers(model):
        frozen = {
            name: weight
            for name, weight in expert_weights(module).items()
            if not weight.requires_grad
        }
        for name, parameter in frozen.items():
            weight = QuantizedWeight(tuple(parameter.shape), quantization, dtype)
            # Under activation checkpointing the recomputed forward keeps the dequantized copy: the
            # layer's backward follows at once.
            weight.keeps_dequantized = module in recomputed
            delattr(module, name)  # torch refuses a module under the name of a parameter
            setattr(module, name, weight)
            added |= {f"{path}.{name}.{CODES}", f"{path}.{name}.{SCALES}"}
        if frozen:
            compute = partial(_compute_quantized, module, bypass_adapters(model, module))
            module.forward = partial(recompute_dequantized, module, compute)
    return frozenset(added)


def find_quantized(module: nn.Module) -> dict[str, QuantizedWeight]:
    """Finds the quantized weights of a layer of experts, by name; empty if it has none."""
    return {
        name: child for name, child in module.named_children() if isinstance(child, QuantizedWeight)
    }


def collect_weights(module: nn.Module) -> dict[str, Tensor]:
    """Collects the parameters of a layer of experts by name, for this rank's experts.

    Quantized weights, which `DividedExperts` has cut already, are dequantized to the compute dtype.
    """
    weights = {
        name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)
    }
    quantized = find_quantized(module)
    return weights | {name: weight.dequantize(weight.dtype) for name, weight in quantized.items()}


def recompute_dequantized(module: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """Runs `compute(*inputs)`, and again in the backward, so that no dequantized weight is kept.

    `compute` dequantizes the weights of `module`. It runs only once without gradients, without
    quantized weights, and under activation checkpointing, which recomputes the whole layer.
    """
    weights = find_quantized(module).values()
    frees_weights = any(not weight.keeps_dequantized for weight in weights)
    if not frees_weights or not torch.is_grad_enabled():
        return compute(*inputs)
    # Experts have no dropout, so the random state of the forward is not needed.
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def _compute_quantized(module: nn.Module, adapters: Sequence[Any], *inputs: Any) -> Any:
    """Runs a layer of experts with dequantized weights and the factors of its adapters."""
    num_experts: int = module.num_experts  # type: ignore[assignment]
    weights = collect_weights(module)
    return compute_experts(module, weights, num_experts, *inputs, factors=find_factors(adapters))


def divide_experts(model: nn.Module, world: World) -> None:
    """Shards the experts of `model` by `expert_parallel_size`, each layer's as a unit of FSDP2.

    Without expert parallelism it does nothing. The gradients of experts are divided by
    `expert_parallel_size`, so that they are averages over all ranks, as all other gradients are: a
    rank's are sums over the tokens of its expert-parallel group (dimension EXPERT), and FSDP
    averages them only over the ranks with the same experts.

    Args:
        model: On meta, not sharded yet.
        world: With the layout.
    """
    size = world.sharding.expert_parallel_size
    if size == 1:
        return
    mesh = make_expert_mesh(world.sharding, world.size, world.device.type)
    is_replicated = mesh[REPLICATE].size() > 1
    set_timeouts(world.collective_timeout)  # torch gives new groups its default timeout
    plugin: Any = world.accelerator.state.fsdp_plugin
    # FSDP would round the router's weights, which are arguments of the forward and fp32 in some
    # families.
    precision = replace(
        plugin.mixed_precision_policy or MixedPrecisionPolicy(), cast_forward_inputs=False
    )
    for module in expert_modules(model):
        divide_layer(model, module, mesh[EXPERT])
        sharded: Any = fully_shard(
            module,
            mesh=mesh[REPLICATE, EXPERT_SHARD] if is_replicated else mesh[EXPERT_SHARD],
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=precision,
            offload_policy=plugin.cpu_offload,
            shard_placement_fn=_make_shard_placement(module, size, mesh[EXPERT_SHARD].size()),
        )
        # FSDP calls the hook with the reduced gradients, even if there are no replicas.
        sharded.set_all_reduce_hook(lambda gradient: gradient.div_(size))


def divide_layer(model: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each rank of `mesh` a part of the experts of `module`.

    Args:
        model: The model, whose adapters on the layer are bypassed.
        module: A layer of experts in it, on meta.
        mesh: The ranks of the expert-parallel group, in one dimension.
    """
    module.forward = DividedExperts(module, mesh, bypass_adapters(model, module)).forward


class DividedExperts:
    """Expert parallelism: a layer's forward with its experts spread over the ranks of a group.

    Each rank of a group has E / size of the E experts, and FSDP shards these over the ranks that
    have the same experts. A rank's router chooses experts for the rank's own tokens, as it does
    without expert parallelism. Then each layer takes four steps:

        counts    how many tokens come for each expert            all-to-all
        dispatch  a token's state, once for each chosen expert    all-to-all, uneven
        compute   the experts of this rank, by transformers' own function
        combine   the outputs, back to where the tokens are       all-to-all, uneven

    The outputs are then summed with the router's weights. In the backward, dispatch and combine
    trade places (Lepikhin et al. 2021, arXiv:2006.16668).

    The experts' LoRA adapters are not spread. FSDP shards them over all ranks with the other
    parameters of their layer, and gathers them whole; a rank multiplies by the factors of its own
    experts. The adapters have a few hundredths of the experts' size, and their gradients, names and
    checkpoints are the same as in every other layout. Spread, no rank's part would be a slice: peft
    keeps the factors B of all experts in one matrix, where the columns of an expert are not
    adjacent.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, adapters: Sequence[Any] = ()) -> None:
        """Cuts the module's parameters and quantized weights to the experts of this rank.

        Parameters become DTensors over `mesh`, sharded along their first dimension, the experts.

        Args:
            module: The layer; its parameters are on the meta device.
            mesh: The ranks of the group, in one dimension.
            adapters: peft's ParamWrappers of the module's parameters.
        """
        self.module = module
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.adapters = adapters
        self.num_experts: int = module.num_experts  # type: ignore[assignment]
        self.experts_per_rank = self.num_experts // self.size
        first = mesh.get_local_rank() * self.experts_per_rank
        self.own_experts = slice(first, first + self.experts_per_rank)
        for name, parameter in dict(module.named_parameters(recurse=False)).items():
            assert parameter.shape[0] == self.num_experts, (
                f"{name}: {tuple(parameter.shape)}, but {self.num_experts} experts"
            )
            local = parameter.new_empty((self.experts_per_rank, *parameter.shape[1:]))
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        # Quantized weights are cut without a DTensor. No checkpoint holds them.
        for name, weight in find_quantized(module).items():
            setattr(module, name, weight.take_part(self.own_experts))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Computes this rank's tokens on the ranks that have their experts.

        Args:
            hidden: [tokens, width].
            chosen: int64[tokens, k], the experts of each token. None is beyond the last expert:
                rules refuse the families that choose such numbers.
            weights: [tokens, k], the weights of the experts' outputs.

        Returns:
            [tokens, width], in the dtype of hidden.
        """
        tokens, k = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, so by rank as well
        inverse = order.argsort()
        # The rows for each of all experts. torch.bincount would make the host wait on a GPU, for
        # the largest number.
        sent_counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        # from each rank in turn, the rows for each of this rank's experts
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts, group=self.group)
        counts = torch.stack([sent_counts, received_counts])
        by_rank = counts.view(2, self.size, self.experts_per_rank).sum(-1)
        sent, received = by_rank.tolist()  # rows to each rank of the group, and from it
        sent_rows = move_rows(hidden, order, inverse, copies=k)
        rows = all_to_all(sent_rows, self.group, sent, received)
        expert_ids = torch.arange(self.experts_per_rank, device=flat.device).repeat(self.size)
        expert_of_row = expert_ids.repeat_interleave(received_counts, output_size=sum(received))
        outputs = recompute_dequantized(self.module, self.compute, rows, expert_of_row)
        returned = all_to_all(outputs, self.group, received, sent)
        states = move_rows(returned, inverse, order).view(tokens, k, -1)
        weighted: Tensor = (states * weights[..., None]).sum(1)
        return weighted.to(hidden.dtype)

    def compute(self, rows: Tensor, expert_of_row: Tensor) -> Tensor:
        """Runs this rank's experts over the rows that were sent to them.

        Args:
            rows: [n, width].
            expert_of_row: int64[n], counted from this rank's first expert.

        Returns:
            [n, width].
        """
        parameters = collect_weights(self.module)
        factors = find_factors(self.adapters, self.own_experts)
        if not rows.shape[0]:
            # Sums of empty slices give each weight a gradient of zero: FSDP's collectives need a
            # gradient on every rank.
            tensors = list(parameters.values())
            for left, right, _scale in factors.values():
                tensors += [left, right]
            return rows + sum(tensor[:0].sum() for tensor in tensors)
        # Each row is a token with one expert, whose output has weight 1.
        inputs = rows, expert_of_row[:, None], torch.ones_like(rows[:, :1])
        outputs: Tensor = compute_experts(
            self.module, parameters, self.experts_per_rank, *inputs, factors=factors
        )
        return outputs


def _make_shard_placement(
    module: nn.Module, size: int, shards: int
) -> Callable[[nn.Parameter], Shard]:
    """Makes the function by which FSDP finds the dimension that it shards a parameter along.

    That is the dimension of the experts if they divide evenly, else the next one.

    Args:
        module: A layer whose experts are divided over `size` ranks.
        size: The expert-parallel size.
        shards: The number of ranks that have the same experts, over which FSDP shards them.
    """
    placements: dict[int, Shard] = {}
    for weight in find_quantized(module).values():  # codes and scales, one-dimensional
        placements |= {id(parameter): Shard(0) for parameter in weight.parameters()}
    for name, parameter in module.named_parameters(recurse=False):
        # The parameter is a DTensor, whose shape has the experts of all ranks.
        shard_shape = shard_experts(tuple(parameter.shape), size, shards)
        assert shard_shape is not None, f"{name}: refused by the rule `experts over shards`"
        has_whole_experts = shard_shape[1:] == tuple(parameter.shape[1:])
        placements[id(parameter)] = Shard(0 if has_whole_experts else 1)
    return lambda parameter: placements[id(parameter)]
