"""How the experts of a mixture are computed: on one rank, from quantized weights, or over the ranks
of a group.

`compute_in_groups` does what transformers' grouped_mm does, with two differences. It moves rows by
permutations, whose gradients are permutations too; the gradient of indexing is a sum by atomic
operations, which is slow and never twice the same. And it multiplies with an adapter's factors one
after the other, x W + s (x A^T) B^T for a weight W [in, out] (Hu et al. 2021, eq. 3); peft adds
s A^T B^T to W, and needs a gradient as large as all experts for it.
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
    recomputed_modules,
    weights_of,
)

ALIGNMENT_BYTES = 16  # torch's grouped products take rows of a multiple of these
GROUPED = "grouped"  # among transformers' names for how experts are computed

Factors = Mapping[str, tuple[Tensor, Tensor, float]]
"""Parameter's name -> (left, right, scale) of the adapter on it: to each expert's matrix [rows,
columns], as the parameter has it, belongs scale x left @ right.

left: [experts, rows, rank]. right: [experts, rank, columns].
"""


def choose_experts_implementation(sharding: Sharding, dtype: torch.dtype, device_type: str) -> str:
    """Chooses grouped products in bf16 on a GPU, and transformers' exact loop over the experts
    elsewhere.

    `GROUPED` suits a GPU before Ampere too: there transformers runs its loop for each product.

    Args:
        sharding: Says which dtype mixed precision casts to, bf16 beside FP8.
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
    """Chooses how a mixture computes its experts: by grouped products under torch.compile, else as
    suits their dtype and the device.
    """
    register_grouped()
    best = choose_experts_implementation(world.sharding, dtype, world.device.type)
    set_experts_implementation(model, GROUPED if is_compiled else best)


def set_experts_implementation(model: Any, name: str) -> None:
    """Makes a mixture compute its experts by transformers' implementation `name`.

    Has no effect on a dense model, even where its class has mixtures too (Gemma 4) and keeps the
    name in its config.
    """
    language_model = language_model_of(model)  # inside of a vision-language model
    if language_model._can_set_experts_implementation():
        language_model.set_experts_implementation(name)


def bypass_adapters(model: nn.Module, module: nn.Module) -> list[Any]:
    """Stops peft from adding its adapters to the parameters of `module`; the caller computes with
    the factors that `find_factors` reads from them.

    Args:
        model: The model with the adapters.
        module: One of its layers of experts.

    Returns:
        peft's modules with the adapters, one for each parameter, from the outermost.
    """
    # peft's ParamWrapper, one around the other for each parameter
    wrappers: Iterator[Any] = (part for part in model.modules() if hasattr(part, "parameter_name"))
    adapters = [wrapper for wrapper in wrappers if wrapper.get_base_layer() is module]
    for adapter in adapters:
        adapter.forward = adapter.base_layer.__call__
    return adapters


def multiply_by_factors(model: nn.Module) -> None:
    """Makes adapted layers of experts multiply by their adapters' factors, in place of adding
    the factors' product to the weights.

    A layer whose forward is replaced, since it is quantized or divided, does so itself.
    """
    for module in expert_modules(model):
        if "forward" in vars(module):
            continue
        adapters = bypass_adapters(model, module)
        if adapters:
            module.forward = partial(_compute_adapted, module, adapters)


def _compute_adapted(module: nn.Module, adapters: Sequence[Any], *inputs: Tensor) -> Tensor:
    return compute_in_groups(module, inputs, factors=find_factors(adapters))


def find_factors(adapters: Iterable[Any], own_experts: slice = slice(None)) -> Factors:
    """The factors of those of peft's `adapters` that are on, for the experts in the slice."""
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
    """Runs an expert layer with other expert weights.

    Args:
        module: The layer.
        parameters: The weights, [experts, ...] each, by the names of the module's own.
        num_experts: How many experts the weights hold.
        inputs: Those of the module's forward; see `compute_in_groups`.
        factors: Of adapters; empty or None without.

    Returns:
        What the module's forward returns: [tokens, width].
    """
    if factors:
        return compute_in_groups(module, inputs, parameters=parameters, factors=factors)
    return type(module).forward(_StandIn(module, parameters, num_experts), *inputs)


class _StandIn:
    """Passes for a module of experts in the module's own forward, with other parameters."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], num_experts: int
    ) -> None:
        self.__dict__ |= parameters
        self._module = module
        self.num_experts = num_experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def register_grouped() -> None:
    """Registers GROUPED with transformers."""
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
        inputs: The inputs of its forward: (hidden [tokens, width], chosen int64[tokens, k] experts
            of each token, weights [tokens, k] of their outputs). A chosen number beyond the last
            expert stands for no expert (Zaya).
        parameters: Replace the module's own parameters, [experts, ...] each; None: its own.
        factors: Of adapters on these parameters.

    Returns:
        [tokens, width], in the dtype of hidden.
    """
    hidden, chosen, weights = inputs
    tokens, k = chosen.shape

    def get(name: str) -> Tensor:
        return getattr(module, name) if parameters is None else parameters[name]

    num_experts = get("down_proj").shape[0]
    weights = weights.reshape(tokens, k, 1).masked_fill(chosen[..., None] >= num_experts, 0)
    expert_of_row, order = chosen.flatten().clamp(max=num_experts - 1).sort(stable=True)
    inverse = order.argsort()
    expert_ids = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(expert_of_row, expert_ids, right=True, out_int32=True)

    def multiply(name: str, rows: Tensor) -> Tensor:
        """Multiplies rows [n, in] by their expert's matrix of parameter `name`: [n, out]."""
        weight = get(name)
        rows = rows.to(product_dtype(weight))
        is_transposed = getattr(module, "is_transposed", False)  # [experts, in, out]
        matrices = weight if is_transposed else weight.mT
        product = multiply_grouped(rows, matrices, ends)
        if factors and name in factors:
            product = _add_adapter(product, rows, factors[name], is_transposed, ends)
        if module.has_bias:
            bias = get(f"{name}_bias").to(rows.dtype)
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
        is_transposed: Whether left @ right, like the frozen weight, is [experts, in, out].
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
    padding = -a.shape[1] % EXPERT_RANK_MULTIPLE
    if padding:
        a = F.pad(a, (0, 0, 0, padding))
        b = F.pad(b, (0, padding))
    inner = multiply_grouped(rows, a.mT, ends)  # [n, rank]
    # peft keeps B of all experts in one matrix, in which the columns of one expert are apart.
    added = multiply_grouped(inner, b.contiguous().mT, ends)
    return product.add(added, alpha=scale)


def multiply_grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each row with the matrix of its expert, or with one factor of its adapter.

    Args:
        rows: [n, in], sorted by expert.
        weights: [experts, in, out].
        ends: int32[experts], where each expert's rows end.

    Returns:
        [n, out].
    """
    from transformers.integrations.moe import _grouped_mm

    weights = weights.to(rows.dtype)
    is_aligned = all(size * weights.itemsize % ALIGNMENT_BYTES == 0 for size in weights.shape[1:])
    if is_aligned:
        multiply = _grouped_mm  # one kernel, but a loop before Ampere
    else:  # a loop, for which the host reads `ends`
        multiply = torch.ops.transformers.grouped_mm_fallback
    product: Tensor = multiply(rows, weights, ends)
    return product


def move_rows(rows: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Repeats each row `copies` times, then puts the copies in another order.

    Args:
        rows: [n / copies, width].
        order: int64[n], a permutation: row i of the result is copy `order[i]`.
        inverse: int64[n], the inverse permutation, by which the backward moves gradients.
        copies: How often each row is repeated; its copies are adjacent before they are permuted.

    Returns:
        [n, width].
    """
    moved: Tensor = _MovedRows.apply(rows, order, inverse, copies)  # type: ignore[no-untyped-call]
    return moved


class _MovedRows(torch.autograd.Function):
    """`move_rows`, whose gradient is a permutation too."""

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
    """Indexes a bias [experts, out] by the experts int64[n] of rows.

    Its gradient is a product, not a sum by index.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(expert_of_row)
        ctx.experts = bias.shape[0]
        return bias[expert_of_row]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (expert_of_row,) = ctx.saved_tensors
        is_own_row = (
            torch.arange(ctx.experts, device=expert_of_row.device)[:, None] == expert_of_row
        )
        return is_own_row.to(gradient.dtype) @ gradient, None


def count_active(model: Any) -> dict[nn.Parameter, int]:
    """Counts the elements of each parameter that compute one token: of routed experts, those of the
    chosen ones alone.
    """
    config = model.config.get_text_config().to_dict()
    experts = count_experts(config)
    chosen = count_chosen(config)
    counts = {parameter: parameter.numel() for parameter in model.parameters()}
    if experts and chosen:
        for module in model.modules():
            # experts, or peft's module around them, whose adapters count by the same share
            if is_experts(_without_adapters(module)):
                counts |= {
                    parameter: parameter.numel() * chosen // experts
                    for parameter in module.parameters()
                }
    return counts


def _without_adapters(module: Any) -> nn.Module:
    """The module inside of peft's wrappers of parameters; any other module as it is."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[no-any-return]


def quantize_experts(
    model: nn.Module, quantization: Quantization, dtype: torch.dtype
) -> frozenset[str]:
    """Replaces the frozen weights of the experts, not their biases, by quantized ones, which are
    empty until they are loaded.

    The layers' forward changes too: it dequantizes the weights, and multiplies by the factors of
    peft's adapters, which peft no longer adds. Call it after adapters and activation checkpointing
    are in.

    Args:
        model: On meta.
        quantization: How frozen weights are quantized. Trained ones (modules_to_save) stay.
        dtype: The dtype of computation. The parameters report it, though their bytes are codes.

    Returns:
        The names of the parameters that hold codes and scales.
    """
    added = set()
    recomputed = recomputed_modules(model)
    for path, module in expert_layers(model):
        frozen = {
            name: weight for name, weight in weights_of(module).items() if not weight.requires_grad
        }
        for name, parameter in frozen.items():
            weight = QuantizedWeight(tuple(parameter.shape), quantization, dtype)
            # the recomputed forward keeps it for the backward that follows at once
            weight.keeps_dequantized = module in recomputed
            delattr(module, name)  # torch refuses a module under the name of a parameter
            setattr(module, name, weight)
            added |= {f"{path}.{name}.{CODES}", f"{path}.{name}.{SCALES}"}
        if frozen:
            adapters = bypass_adapters(model, module)
            module.forward = _QuantizedExperts(module, adapters).forward
    return frozenset(added)


def quantized_children(module: nn.Module) -> dict[str, QuantizedWeight]:
    """The quantized weights of a layer of experts, by name."""
    return {
        name: child for name, child in module.named_children() if isinstance(child, QuantizedWeight)
    }


def expert_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a layer's experts, by name; where ranks divide the experts, those of this
    rank's own.

    Quantized ones, which `DividedExperts` has cut already, are dequantized to the compute dtype.
    """
    weights = {
        name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)
    }
    quantized = quantized_children(module)
    return weights | {name: weight.dequantize(weight.dtype) for name, weight in quantized.items()}


def recompute_dequantized(module: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """Runs `compute(*inputs)`, and has the backward run it again, which dequantizes the weights of
    `module` again, so that none is kept.

    Where nothing needs to be made again, it calls `compute` as it is: without gradients, without
    quantized weights, or under activation checkpointing, which makes all of the layer again.
    """
    weights = quantized_children(module).values()
    frees_weights = any(not weight.keeps_dequantized for weight in weights)
    if not frees_weights or not torch.is_grad_enabled():
        return compute(*inputs)
    # experts have no dropout, which would need the random state of the forward
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


class _QuantizedExperts:
    """Runs a layer of experts with quantized weights and peft's adapters of them.

    The weights are dequantized in the forward, and again in the backward, so that none is kept.
    """

    def __init__(self, module: nn.Module, adapters: Sequence[Any]) -> None:
        self.module = module
        self.adapters = adapters

    def forward(self, *inputs: Any) -> Any:
        return recompute_dequantized(self.module, self.compute, *inputs)

    def compute(self, *inputs: Any) -> Any:
        weights = expert_weights(self.module)
        num_experts: int = self.module.num_experts  # type: ignore[assignment]
        return compute_experts(
            self.module, weights, num_experts, *inputs, factors=find_factors(self.adapters)
        )


def divide_experts(model: nn.Module, world: World) -> None:
    """Shards the experts of `model` by `expert_parallel_size`, and makes them units of FSDP2.

    All other gradients are averages over all ranks. A rank's gradients of its experts are sums over
    the tokens of its expert-parallel group (dimension EXPERT), which FSDP averages over the ranks
    with the same experts alone. So the experts' are divided by `expert_parallel_size`.

    Args:
        model: On meta, not sharded yet.
        world: With the layout.
    """
    size = world.sharding.expert_parallel_size
    if size == 1:
        return
    mesh = make_expert_mesh(world.sharding, world.size, world.device.type)
    is_replicated = mesh[REPLICATE].size() > 1
    set_timeouts(world.collective_timeout)  # of the new groups, which torch gives its own
    plugin: Any = world.accelerator.state.fsdp_plugin
    # FSDP would round the router's weights: they come in as arguments, and in fp32 in some
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
            shard_placement_fn=_choose_sharded_dim(module, size, mesh[EXPERT_SHARD].size()),
        )
        # FSDP calls it with the reduced gradients, also where no replicas need an all-reduce
        sharded.set_all_reduce_hook(lambda gradient: gradient.div_(size))


def divide_layer(model: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each rank of `mesh` some experts of `module`, a layer of experts of `model`, and their
    adapters.
    """
    module.forward = DividedExperts(module, mesh, bypass_adapters(model, module)).forward


class DividedExperts:
    """Expert parallelism: a layer's forward with its experts spread over the ranks of a group.

    Each rank of a group has E / size of the E experts, and FSDP shards these over the ranks that
    have the same ones. A rank's router chooses experts for the rank's own tokens, as without. Then
    each layer takes four steps:

        counts    how many tokens come for each expert            all-to-all
        dispatch  a token's state, once for each chosen expert    all-to-all, uneven
        compute   the experts of this rank, by transformers' own function
        combine   the outputs, back to where the tokens are       all-to-all, uneven

    The router's weights add the outputs up. In the backward, dispatch and combine trade places
    (Lepikhin et al. 2021, arXiv:2006.16668).

    LoRA's adapters of the experts are not spread: FSDP shards them with the other parameters of
    their layer over all ranks, and a rank multiplies with the factors of its own experts. They
    have a few hundredths of the experts' size and are gathered whole. In return their gradients,
    names and checkpoints are those of every other layout. peft keeps the factors B of all experts
    in one matrix, in which the columns of one expert lie r x E columns apart, so no rank's part
    would be a slice.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, adapters: Sequence[Any] = ()) -> None:
        """Makes the module's parameters DTensors over `mesh`, sharded along their first dimension,
        the experts. Cuts quantized weights to the experts of this rank.

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
        # their parameters are no DTensors, and no checkpoint holds them
        for name, weight in quantized_children(module).items():
            setattr(module, name, weight.take_part(self.own_experts))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Computes this rank's tokens on the ranks that have their experts.

        Args:
            hidden: [tokens, width].
            chosen: int64[tokens, k], the experts of each token; none beyond the last, as rules
                refuse the families that have such.
            weights: [tokens, k], of the experts' outputs.

        Returns:
            [tokens, width], in the dtype of hidden.
        """
        tokens, k = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, so by rank as well
        inverse = order.argsort()
        # Rows for each expert of all ranks. Not torch.bincount, which on a GPU makes the host wait
        # for the largest expert.
        sent_counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        # from each rank in turn, rows for each of this rank's experts
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
        """Runs this rank's experts.

        Args:
            rows: [n, width].
            expert_of_row: int64[n], counted from this rank's first.

        Returns:
            [n, width].
        """
        parameters = expert_weights(self.module)
        factors = find_factors(self.adapters, self.own_experts)
        if not rows.shape[0]:
            # Sums of nothing, through which each weight has a gradient of zero: FSDP's collectives
            # need one on every rank.
            trained = list(parameters.values())
            for left, right, _ in factors.values():
                trained += [left, right]
            return rows + sum(tensor[:0].sum() for tensor in trained)
        # each row is a token of one expert, with weight 1
        inputs = rows, expert_of_row[:, None], torch.ones_like(rows[:, :1])
        outputs: Tensor = compute_experts(
            self.module, parameters, self.experts_per_rank, *inputs, factors=factors
        )
        return outputs


def _choose_sharded_dim(
    module: nn.Module, size: int, shards: int
) -> Callable[[nn.Parameter], Shard]:
    """Says along which dimension FSDP shards each parameter: along the experts if they divide
    evenly, else along rows.

    Args:
        module: A layer whose experts are divided over `size` ranks.
        size: The expert-parallel size.
        shards: Ranks over which FSDP shards a rank's part.
    """
    by_dim: dict[int, Shard] = {}
    for weight in quantized_children(module).values():  # codes and scales, one-dimensional
        by_dim |= {id(parameter): Shard(0) for parameter in weight.parameters()}
    for name, parameter in module.named_parameters(recurse=False):
        # a DTensor's shape: of all experts
        shard_shape = shard_experts(tuple(parameter.shape), size, shards)
        assert shard_shape is not None, f"{name}: refused by the rule `experts over shards`"
        has_whole_experts = shard_shape[1:] == tuple(parameter.shape[1:])
        by_dim[id(parameter)] = Shard(0 if has_whole_experts else 1)
    return lambda parameter: by_dim[id(parameter)]
