"""AdamW whose moments are kept in bf16: 4 bytes a parameter instead of 8, beside fp32 parameters.

torch's fused AdamW wants moments of the parameter's type, and a plain bf16 second moment stops changing: with beta2 =
0.999 a step changes it by 0.1%, and bf16 resolves 0.4%. Stochastic rounding keeps it right on average.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from finetune.config.facts import has_compiler
from finetune.distributed.parallelize import local_part

SLICE = 1 << 24  # elements updated at once where nothing fuses the update: bounds its fp32 temporaries to 64 MiB each


class AdamWBf16Moments(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with stochastically rounded bf16 moments.

    State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq` (bf16, shaped and sharded like it). Draws
    from torch's default generator: seed it by the step, so that a run resumes exactly, and alike on all ranks that hold
    the same shard, so that replicas stay equal. Where `found_inf` (a scalar on the device, as for torch's fused
    optimizers) is not zero, parameters and moments do not change.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                moments = (state["exp_avg"], state["exp_avg_sq"])
                update_(parameter, parameter.grad, *moments, int(state["step"]), group, self.found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but moments stay bf16, which torch would cast to the parameter's dtype."""
        load_state_unconverted(self, state_dict)


def load_state_unconverted(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict into `optimizer` without casting its tensors."""
    groups: list[dict[str, Any]] = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append(saved | {"params": group["params"]})
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                optimizer.state[parameter] = dict(state_dict["state"][index])
    optimizer.param_groups = groups


def update_(
    parameter: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    settings: dict[str, Any],
    found_inf: Tensor | None = None,
) -> None:
    """Updates one parameter and its moments in place; of a sharded one, this rank's part."""
    beta1, beta2 = settings["betas"]
    # All that changes with the step is passed as tensors on the host: a number would recompile the update.
    rate = torch.tensor(settings["lr"] / (1 - beta1**step))
    decay = torch.tensor(1 - settings["lr"] * settings["weight_decay"])
    correction = torch.tensor((1 - beta2**step) ** -0.5)
    flat = [local_part(each).view(-1) for each in (parameter, grad, first, second)]
    update = _compiled_update() if parameter.is_cuda and has_compiler() else _update_
    length = flat[0].numel() if update is not _update_ else SLICE
    for start in range(0, flat[0].numel(), max(length, 1)):
        weights, gradient, mean, variance = (each[start : start + length] for each in flat)
        update(weights, gradient, mean, variance, rate, decay, correction, found_inf, beta1, beta2, settings["eps"])


@cache
def _compiled_update() -> Callable[..., None]:
    """One kernel that reads and writes every element once; on an 8B model the plain update takes ten times as long."""
    return torch.compile(_update_, dynamic=True)


def _update_(
    parameter: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    rate: Tensor,
    decay: Tensor,
    correction: Tensor,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """The equations, in fp32. All [elements]; `rate` and `correction` carry the bias corrections of this step."""
    gradient = grad.float()
    mean = first.float().lerp(gradient, 1 - beta1)
    variance = second.float().lerp(gradient * gradient, 1 - beta2)
    moved = (parameter.float() * decay - rate * mean / (variance.sqrt() * correction + eps)).to(parameter.dtype)
    changes = (moved, round_stochastically(mean), round_stochastically(variance))
    for old, new in zip((parameter, first, second), changes, strict=True):
        old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


def round_stochastically(values: Tensor) -> Tensor:
    """fp32 -> bf16, up or down with the probability that makes the mean exact.

    bf16 is the upper half of an fp32: a random lower half is added, and the carry decides.
    """
    noise = torch.randint_like(values, 0, 1 << 16, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)
