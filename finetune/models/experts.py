"""How the experts of a mixture are computed: on one rank, from quantized weights, or over the ranks of a group.

`compute_in_groups` is what transformers has by the name grouped_mm, but for two things. Rows are moved by permutations,
whose gradients are permutations too: indexing would add gradients up by atomic operations, which are slow and never
twice the same. And an adapter of a weight W [in, out] stays in its factors (Hu et al. 2021, eq. 3): x W + s (x A) B.
peft adds their product to the weight, whose gradient, of the size of all experts, is then multiplied with each factor.
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
from finetune.distributed.model_parts import expert_modules, is_experts, language_model_of, local_part
from finetune.distributed.world import EXPERT, EXPERT_SHARD, REPLICATE, World, all_to_all
from finetune.models.quantized_layers import (
    CODES,
    SCALES,
    QuantizedWeight,
    expert_layers,
    recomputed_modules,
    weights_of,
)

ROW_BYTES = 16  # whose multiples torch's grouped products take
GROUPED = "grouped"  # among transformers' names for how experts are computed

Factors = Mapping[str, tuple[Tensor, Tensor, float]]
"""By the parameter's name: left and right, whose product times the number is added to it, expert by expert."""


def choose_experts_implementation(sharding: Sharding, dtype: torch.dtype, device_type: str) -> str:
    """The name for how experts are computed: grouped products in bf16 on a GPU, elsewhere transformers' exact loop over
    the experts. `dtype`: of their parameters, which mixed precision casts. On a GPU before Ampere the products are a
    loop."""
    dtype = {"no": dtype, "bf16": torch.bfloat16, "fp16": torch.float16}[sharding.mixed_precision]
    return GROUPED if device_type == "cuda" and dtype == torch.bfloat16 else "eager"


def install_experts(model: Any, world: World, dtype: torch.dtype, is_compiled: bool) -> None:
    """Makes a mixture compute its experts (kept in `dtype`) as this machine, or torch.compile, does best."""
    register_grouped()
    best = choose_experts_implementation(world.sharding, dtype, world.device.type)
    set_experts_implementation(model, GROUPED if is_compiled else best)


def set_experts_implementation(model: Any, name: str) -> None:
    """Makes a mixture compute its experts by transformers' implementation `name`; no effect on a dense model."""
    language_model = language_model_of(model)  # which may be another family's
    if language_model._can_set_experts_implementation():
        language_model.set_experts_implementation(name)


def take_over_adapters(model: nn.Module, experts: nn.Module) -> list[Any]:
    """peft's adapters of the parameters of `experts`, from the outermost, which add nothing; see `find_factors`."""
    wrappers: Iterator[Any] = (each for each in model.modules() if hasattr(each, "parameter_name"))
    adapters = [each for each in wrappers if each.get_base_layer() is experts]
    for adapter in adapters:
        adapter.forward = adapter.base_layer.__call__
    return adapters


def keep_factors(model: nn.Module) -> None:
    """Has the layers of experts whose parameters peft adapts multiply with the adapters' factors, one after the other;
    but for layers whose forward is not their class's any more."""
    for experts in expert_modules(model):
        adapters = take_over_adapters(model, experts) if "forward" not in vars(experts) else []
        if adapters:
            experts.forward = partial(_compute_adapted, experts, adapters)


def _compute_adapted(experts: nn.Module, adapters: Sequence[Any], *inputs: Tensor) -> Tensor:
    return compute_in_groups(experts, inputs, factors=find_factors(adapters))


def find_factors(adapters: Iterable[Any], own: slice = slice(None)) -> Factors:
    """The factors of peft's `adapters`, those that are on; `own`: of which experts."""
    found = {}
    for each in adapters:
        if not each.disable_adapters:
            left, right, scale = each.get_delta_factors(ADAPTER_NAME)
            found[each.parameter_name] = left[own], right[own], scale
    return found


def compute_experts(
    module: nn.Module, parameters: Mapping[str, Tensor], experts: int, *inputs: Any, factors: Factors | None = None
) -> Any:
    """Runs an expert layer with other expert weights.

    Args:
        module: The layer.
        parameters: The weights, by the names of the module's own.
        experts: How many experts the weights hold.
        inputs: Of the module's forward.
        factors: Of the adapters of the weights.
    """
    if factors:
        return compute_in_groups(module, inputs, parameters=parameters, factors=factors)
    return type(module).forward(_StandIn(module, parameters, experts), *inputs)


class _StandIn:
    """Stands in for a module of experts in its own forward: with other parameters than its own."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor], experts: int) -> None:
        self.__dict__ |= parameters
        self._module, self.num_experts = module, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def register_grouped() -> None:
    """Makes transformers know GROUPED."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(GROUPED, lambda module, *inputs: compute_in_groups(module, inputs))


def compute_in_groups(
    module: Any,
    inputs: tuple[Tensor, ...],
    parameters: Mapping[str, Tensor] | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """What `module`, a layer of experts, computes: rows sorted by expert, and one product for all experts of the layer.

    Args:
        module: How the experts are made: with a gate or not, with biases or not.
        inputs: Of its forward: hidden [tokens, width]; chosen int64[tokens, k], the experts of each token, where a
            number beyond the last expert stands for none (Zaya); weights [tokens, k] of their outputs.
        parameters: In place of the module's own.
        factors: Of adapters of the parameters.
    """

    def held(name: str) -> Tensor:
        return getattr(module, name) if parameters is None else parameters[name]

    hidden, chosen, weights = inputs
    experts = held("down_proj").shape[0]
    tokens, per_token = chosen.shape
    flat = chosen.flatten()
    weights = weights.reshape(tokens, per_token, 1).masked_fill(chosen[..., None] >= experts, 0)
    of_rows, order = flat.clamp(max=experts - 1).sort(stable=True)
    back, numbers = order.argsort(), torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)

    def multiply(rows: Tensor, name: str) -> Tensor:
        weight = held(name)
        device = rows.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        rows = rows.to(dtype)
        is_transposed = getattr(module, "is_transposed", False)
        product = _multiply(rows, weight if is_transposed else weight.mT, ends)
        if factors and name in factors:
            left, right, scale = factors[name]
            # [experts, rank, in] and [experts, out, rank]
            down, up = (left.mT, right.mT) if is_transposed else (right, left)
            padding = -down.shape[1] % EXPERT_RANK_MULTIPLE
            if padding:
                down, up = F.pad(down, (0, 0, 0, padding)), F.pad(up, (0, padding))
            # As peft keeps it, no row of an expert's B lies in one piece.
            added = _multiply(_multiply(rows, down.mT, ends), up.contiguous().mT, ends)
            product = product.add(added, alpha=scale)
        if module.has_bias:
            product = product + _Rows.apply(held(f"{name}_bias").to(dtype), of_rows)  # type: ignore[no-untyped-call]
        return product

    rows = move_rows(hidden, order, back, per_token)
    activate, first = (module._apply_gate, "gate_up_proj") if module.has_gate else (module.act_fn, "up_proj")
    outputs = multiply(activate(multiply(rows, first)), "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    summed: Tensor = (move_rows(outputs, back, order).view(tokens, per_token, -1) * weights).sum(1)
    return summed.to(hidden.dtype)


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [n, in], sorted by expert; weights [experts, in, out]; ends int32[experts], of their rows -> [n, out]."""
    from transformers.integrations.moe import _grouped_mm

    weights = weights.to(rows.dtype)
    is_aligned = all(size * weights.itemsize % ROW_BYTES == 0 for size in weights.shape[1:])
    # transformers' loop, for which the host reads where the experts' rows end
    product: Tensor = (_grouped_mm if is_aligned else torch.ops.transformers.grouped_mm_fallback)(rows, weights, ends)
    return product


def move_rows(rows: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """`rows`, of each `copies` one after another, in the `order` of a permutation int64[n]; `back` is its inverse."""
    moved: Tensor = _Moved.apply(rows, order, back, copies)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows[order // copies] if copies > 1 else rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        moved = gradient[back]
        return moved.view(-1, ctx.copies, gradient.shape[-1]).sum(1) if ctx.copies > 1 else moved, None, None, None


class _Rows(torch.autograd.Function):
    """The row of `bias` [experts, out] for each expert of int64[n]. Its gradient is a product, not a sum by index."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, of_rows: Tensor) -> Tensor:
        ctx.save_for_backward(of_rows)
        ctx.experts = bias.shape[0]
        return bias[of_rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (of_rows,) = ctx.saved_tensors
        is_of = torch.arange(ctx.experts, device=of_rows.device)[:, None] == of_rows
        return is_of.to(gradient.dtype) @ gradient, None


def count_active(model: Any) -> dict[nn.Parameter, int]:
    """How many numbers of each parameter work on one token: of routed experts, those of the ones that it chooses."""
    config = model.config.get_text_config()
    routed = {p for module in model.modules() if is_experts(_without_adapters(module)) for p in module.parameters()}
    experts, chosen = count_experts(config.to_dict()), count_chosen(config.to_dict())
    if not experts or not chosen:
        routed = set()
    return {p: p.numel() * chosen // experts if p in routed else p.numel() for p in model.parameters()}


def _without_adapters(module: Any) -> nn.Module:
    """What peft's adapters of parameters are wrapped around."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[no-any-return]


def quantize_experts(model: nn.Module, quantization: Quantization, dtype: torch.dtype) -> frozenset[str]:
    """Puts quantized weights, in `dtype`, into the experts of `model` on meta; returns the names of their parameters.

    Call it after adapters and activation checkpointing are in place.
    """
    added, recomputed = set(), recomputed_modules(model)
    for path, experts in expert_layers(model):
        frozen = {name: weight for name, weight in weights_of(experts).items() if not weight.requires_grad}
        for name, parameter in frozen.items():  # the others are in modules_to_save
            delattr(experts, name)
            weight = QuantizedWeight(tuple(parameter.shape), quantization, dtype)
            weight.keeps_dequantized = experts in recomputed
            setattr(experts, name, weight)
            added |= {f"{path}.{name}.{CODES}", f"{path}.{name}.{SCALES}"}
        if frozen:
            experts.forward = _QuantizedExperts(experts, take_over_adapters(model, experts)).forward
    return frozenset(added)


def quantized_children(experts: nn.Module) -> dict[str, QuantizedWeight]:
    """The weights of `experts` that are quantized, by name."""
    return {name: each for name, each in experts.named_children() if isinstance(each, QuantizedWeight)}


def expert_weights(experts: nn.Module) -> dict[str, Tensor]:
    """The parameters of `experts` as this rank has them, those that are quantized dequantized."""
    weights = {name: local_part(parameter) for name, parameter in experts.named_parameters(recurse=False)}
    return weights | {name: each.dequantize(each.dtype) for name, each in quantized_children(experts).items()}


def recompute_dequantized(experts: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """What `compute` returns. A backward dequantizes weights of `experts` again, so that nothing is kept."""
    weights = quantized_children(experts).values()
    if not torch.is_grad_enabled() or all(weight.keeps_dequantized for weight in weights):
        return compute(*inputs)
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random


class _QuantizedExperts:
    """What `module`, a layer of experts with quantized weights and peft's `adapters`, computes."""

    def __init__(self, module: nn.Module, adapters: Sequence[Any]) -> None:
        self.module, self.adapters = module, adapters

    def forward(self, *inputs: Any) -> Any:
        return recompute_dequantized(self.module, self.compute, *inputs)

    def compute(self, *inputs: Any) -> Any:
        weights = expert_weights(self.module)
        experts: int = self.module.num_experts  # type: ignore[assignment]
        return compute_experts(self.module, weights, experts, *inputs, factors=find_factors(self.adapters))


def divide_experts(model: nn.Module, world: World) -> None:
    """Divides the experts of `model`, on meta and not sharded yet, as `world.sharding` asks; makes them units of FSDP2.

    A rank's gradients of its experts are already the sum over the tokens of its group. FSDP then averages them over
    the ranks that hold the same experts, so the result is divided by the group's size.
    """
    size = world.sharding.expert_parallel_size
    if size == 1:
        return
    mesh = make_expert_mesh(world.sharding, world.size, world.device.type)
    is_replicated = mesh[REPLICATE].size() > 1
    set_timeouts(world.collective_timeout)
    plugin: Any = world.accelerator.state.fsdp_plugin
    # FSDP would round the router's weights: they come in as arguments, and in fp32 in some families.
    precision = replace(plugin.mixed_precision_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
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
        sharded.set_all_reduce_hook(lambda gradient: gradient.div_(size))


def divide_layer(model: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    """Divides `module`, the experts of a layer of `model`, over the ranks of `mesh`, with their adapters."""
    module.forward = DividedExperts(module, mesh, take_over_adapters(model, module)).forward


class DividedExperts:
    """The experts of a layer over the ranks of a group, in place of the module's own forward (expert parallelism).

    Each rank of a group has E / size of the E experts, and FSDP shards these over the ranks that have the same ones. A
    rank's router chooses for its own tokens, as without; then, in each layer:

        counts    how many tokens come for each expert                      all-to-all
        dispatch  a token's state, once for each expert that it has chosen  all-to-all of uneven parts
        compute   the experts of this rank, by transformers' own function
        combine   the outputs, back to where the tokens are                 all-to-all of uneven parts

    where the router's weights add them up. Backward, dispatch and combine trade places (Lepikhin et al. 2021,
    arXiv:2006.16668).

    LoRA's adapters of the experts are not divided: FSDP shards them with the other parameters of their layer over all
    ranks, and a rank adds the factors of its own experts to its weights. A few hundredths of the experts' size, they
    are gathered whole; in return their gradients, names and checkpoints are those of every other layout. (peft has the
    factors B of all experts in one matrix, whose columns of one expert lie r times E columns apart: no rank's part of
    it would be a slice.)

    The module's parameters become DTensors over `mesh`, one dimension of ranks, along their first dimension, the
    experts; `adapters` (peft's ParamWrapper) are of those parameters.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, adapters: Sequence[Any] = ()) -> None:
        self.module, self.group, self.size, self.adapters = module, mesh.get_group(), mesh.size(), adapters
        parameters = dict(module.named_parameters(recurse=False))
        self.experts: int = module.num_experts  # type: ignore[assignment]
        self.local_experts = self.experts // self.size
        self.first = mesh.get_local_rank() * self.local_experts
        for name, parameter in parameters.items():
            assert parameter.shape[0] == self.experts, f"{name}: {tuple(parameter.shape)}, but {self.experts} experts"
            local = parameter.new_empty((self.local_experts, *parameter.shape[1:]))
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for name, weight in quantized_children(module).items():  # each rank's own, which no checkpoint holds
            setattr(module, name, weight.take_part(slice(self.first, self.first + self.local_experts)))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, width]; chosen int64[tokens, k], their experts; weights [tokens, k] -> [tokens, width]."""
        tokens, per_token = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, so by rank as well
        back = order.argsort()
        # Not torch.bincount, which on a GPU makes the host wait for the largest expert.
        counts = flat.new_zeros(self.experts).scatter_add_(0, flat, torch.ones_like(flat))
        arriving = torch.empty_like(counts)  # for each expert of this rank, from rank after rank
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts, arriving]).view(2, self.size, self.local_experts).sum(-1).tolist()
        leaving = move_rows(hidden, order, back, per_token)
        rows = all_to_all(leaving, self.group, sent, received)
        local = torch.arange(self.local_experts, device=flat.device).repeat(self.size)
        own = local.repeat_interleave(arriving, output_size=sum(received))
        outputs = recompute_dequantized(self.module, self.compute, rows, own)
        returned = all_to_all(outputs, self.group, received, sent)
        states = move_rows(returned, back, order).view(tokens, per_token, -1)
        weighted: Tensor = (states * weights[..., None]).sum(1)
        return weighted.to(hidden.dtype)

    def compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """The outputs of this rank's `experts` int64[rows] (counted from its first) for `rows` [rows, width]."""
        parameters = expert_weights(self.module)
        factors = find_factors(self.adapters, slice(self.first, self.first + self.local_experts))
        if not rows.shape[0]:  # gradients of zero: FSDP reduces what every rank has
            trained = [*parameters.values(), *(factor for pair in factors.values() for factor in pair[:2])]
            return rows + sum(each[:0].sum() for each in trained)
        inputs = rows, experts[:, None], torch.ones_like(rows[:, :1])
        outputs: Tensor = compute_experts(self.module, parameters, self.local_experts, *inputs, factors=factors)
        return outputs


def _choose_sharded_dim(module: nn.Module, size: int, shards: int) -> Callable[[nn.Parameter], Shard]:
    """For `fully_shard` over `shards` ranks: whole experts where they divide evenly, else rows of each."""
    by_dim = {
        id(parameter): Shard(0) for weight in quantized_children(module).values() for parameter in weight.parameters()
    }
    for name, parameter in module.named_parameters(recurse=False):
        held = shard_experts(tuple(parameter.shape), size, shards)
        assert held is not None, f"{name}: refused by the rule `experts over shards`"
        by_dim[id(parameter)] = Shard(0 if held[1:] == tuple(parameter.shape[1:]) else 1)
    return lambda parameter: by_dim[id(parameter)]
