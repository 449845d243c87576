"""Muon (Jordan 2024) for the matrices of a model's layers, AdamW for embeddings, head and vectors.

Updates are scaled as by Moonshot (Liu et al. 2025, torch's adjust_lr_fn="match_rms_adamw"), so that one learning rate
and one weight decay serve both. torch.optim.Muon computes the same of whole matrices; here each rank gathers a sharded
matrix's update in bf16, to which the iteration rounds it anyway, and keeps its own shard of the result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune.distributed.parallelize import local_part
from finetune.optim.adamw_bf16 import load_state_unconverted

MOMENTUM, SCALE, STEPS, EPSILON = 0.95, 0.2, 5, 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.AdamW):
    """Orthogonalizes the updates of groups that have a `momentum` above 0; the others are AdamW's.

    State of a matrix: `momentum_buffer`, shaped and sharded like it.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._step_supports_amp_scaling = False  # the matrices' half reads no flag: torch's GradScaler asks the host

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks of its shards call it."""
        assert closure is None, "closures are not supported"
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if not group["momentum"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, whose AdamW expects a step of every parameter."""
        load_state_unconverted(self, state_dict)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights, buffer = local_part(parameter), local_part(state["momentum_buffer"])
        gradient = local_part(parameter.grad)  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).bfloat16()  # Nesterov's
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = DTensor.from_local(
                update, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            ).full_tensor()
            update = distribute_tensor(orthogonalize(whole), mesh, placements, src_data_rank=None).to_local()
        else:
            update = orthogonalize(update)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(update, alpha=-group["lr"] * SCALE * max(parameter.shape) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with its singular values near 1, by a Newton-Schulz iteration.

    Args:
        matrix: [rows, columns], bf16.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.T if is_tall else found).contiguous()
