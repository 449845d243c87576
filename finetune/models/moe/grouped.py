"""Experts as grouped products: rows sorted by expert, one product for all experts of a layer, nothing read by the host.

transformers has the same by the name grouped_mm. Two things are different here. Rows are moved by permutations, whose
gradients are permutations too: indexing would add gradients up by atomic operations, which are slow and never twice the
same. And an adapter of a weight W [in, out] stays in its factors (Hu et al. 2021, eq. 3): x W + s (x A) B. peft adds
their product to the weight, whose gradient, of the size of all experts, is then multiplied with each factor.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.constants import EXPERT_RANK_MULTIPLE

ROW_BYTES = 16  # whose multiples torch's grouped products take
GROUPED = "grouped"  # among transformers' names for how experts are computed

Factors = Mapping[str, tuple[Tensor, Tensor, float]]
"""By the parameter's name: left and right, whose product times the number is added to it, expert by expert."""


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
    """What `module`, a layer of experts, computes, by the function of transformers that it stands for.

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
