"""fp16's loss scale (Micikevicius et al. 2018, section 3.2). Under bf16 and fp32 there is no scaler, only the optimizer step.

The scaler skips a step whose gradients overflow and lowers the scale: that is how it finds the right scale, not an error.
"""

import torch

from finetune.distributed.world import World
from finetune.errors import UserError

LOWEST_SCALE = 1.0  # a gradient that overflows fp16 without any scaling does not fit in fp16 at all


def is_scaled(world: World) -> bool:
    """Whether losses are scaled before backward, so that small gradients survive fp16."""
    return world.accelerator.scaler is not None


def unscale(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Divides the gradients by the scale, in place, before they are clipped."""
    if world.accelerator.scaler is not None:
        world.accelerator.scaler.unscale_(optimizer)


def update(optimizer: torch.optim.Optimizer, world: World) -> None:
    """The optimizer's step; under a scale only where no gradient overflowed, and the scale is set for the next.

    Raises `UserError`, on all ranks, where a gradient overflows at `LOWEST_SCALE` too: the scale would be halved without end.
    """
    scaler = world.accelerator.scaler
    if scaler is None:
        optimizer.step()
        return
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if before > scaler.get_scale() and before <= LOWEST_SCALE:
        raise UserError(
            f"mixed_precision: fp16: the gradients are not finite at a loss scale of {before:g} either, so no update can be "
            "made; set mixed_precision: bf16, or lower learning_rate"
        )
