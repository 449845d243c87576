"""Adafactor (Shazeer and Stern 2018) at a given learning rate: a number for each row and column of a matrix.

Transformers' own, as its Trainer makes it (scale_parameter=False, relative_step=False, beta1=None), computes with the
tensors of one process; here the means over a sharded matrix are those of the whole. torch's is another: it scales the
rate by each parameter's size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from finetune.distributed.parallelize import local_part
from finetune.optim.adamw_bf16 import load_state_unconverted

EPSILON = 1e-30  # added to the square of the gradient
CLIP_THRESHOLD = 1.0  # of the update's root mean square
DECAY_RATE = -0.8


class Adafactor(torch.optim.Optimizer):
    """State of a parameter: `step` (fp32 scalar); of a matrix [rows, columns] `exp_avg_sq_row` [rows], sharded like it,
    and `exp_avg_sq_col` [columns], whole; of a vector `exp_avg_sq`, shaped and sharded like it. All in fp32.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]] | Iterable[Tensor], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks of its shards call it."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    _make_state(parameter, state)
                state["step"] += 1
                _update(parameter, state, group["lr"], group["weight_decay"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but the state stays fp32, which torch would cast to the parameter's dtype."""
        load_state_unconverted(self, state_dict)


def _make_state(parameter: Tensor, state: dict[str, Any]) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32)
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.dim() < 2:
        state["exp_avg_sq"] = zeros
        return
    assert parameter.dim() == 2, "matrices and vectors only"
    state["exp_avg_sq_row"] = zeros.sum(dim=1)
    state["exp_avg_sq_col"] = torch.zeros(parameter.shape[1], device=local_part(parameter).device)


def _update(parameter: Tensor, state: dict[str, Any], rate: float, weight_decay: float) -> None:
    """Algorithm 4 of the paper, without its relative step sizes; on this rank's part of a sharded parameter."""
    weights, grad = local_part(parameter), local_part(parameter.grad).float()  # type: ignore[arg-type]
    newest = float(state["step"]) ** DECAY_RATE  # the weight of this step's square in the running means
    square = grad.square() + EPSILON
    if parameter.dim() < 2:
        variance = local_part(state["exp_avg_sq"]).lerp_(square, newest)
        update = variance.rsqrt() * grad
    else:
        rows, columns = local_part(state["exp_avg_sq_row"]), state["exp_avg_sq_col"]
        rows.lerp_(square.mean(dim=1), newest)
        columns.lerp_(_sum_over_shards(square.sum(dim=0), parameter) / parameter.shape[0], newest)
        mean_of_rows = _sum_over_shards(rows.sum(), parameter) / parameter.shape[0]
        update = grad * (rows / mean_of_rows).rsqrt()[:, None] * columns.rsqrt()
    root_mean_square = (_sum_over_shards(update.square().sum(), parameter) / parameter.numel()).sqrt()
    update /= (root_mean_square / CLIP_THRESHOLD).clamp(min=1.0)
    moved = weights.float() * (1 - rate * weight_decay) - rate * update
    weights.copy_(moved.to(weights.dtype))


def _sum_over_shards(part: Tensor, parameter: Tensor) -> Tensor:
    """The sum of `part`, computed from each rank's shard of `parameter`, over the ranks that hold the others."""
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(part, group=parameter.device_mesh.get_group(dimension))
    return part
