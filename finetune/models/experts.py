"""How the experts of a mixture are computed. What its routers choose is in routing.py.

`compute_in_groups` is what transformers has by the name grouped_mm, but for two things. Rows are moved by permutations,
whose gradients are permutations too: indexing would add gradients up by atomic operations, which are slow and never
twice the same. And an adapter of a weight W [in, out] stays in its factors (Hu et al. 2021, eq. 3): x W + s (x A) B.
peft adds their product to the weight, whose gradient, of the size of all experts, is then multiplied with each factor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.config.facts import count_chosen, count_experts
from finetune.config.layout import Sharding
from finetune.constants import ADAPTER_NAME, EXPERT_RANK_MULTIPLE
from finetune.distributed.model_parts import language_model_of
from finetune.distributed.world import World

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


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer in one parameter each."""
    return [module for module in model.modules() if is_experts(module)]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes `module` by one of its experts implementations, which its decorator marks."""
    return hasattr(type(module), "_apply_gate")


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
    """What `module`, a layer of experts, computes with `parameters` of so many experts in place of its own, and the
    `factors` of their adapters."""
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
