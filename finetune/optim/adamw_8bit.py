"""torchao's AdamW with 8-bit moments (Dettmers et al. 2022): 2 bytes a parameter and a scale for every 256 numbers.

Imports torchao, so that it is imported only where a recipe asks for it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit

from finetune.optim.adamw_bf16 import has_compiler, load_state_unconverted


class AdamW8bitMoments(AdamW8bit):  # type: ignore[misc]
    """torchao's AdamW8bit with learning rates that are numbers, as every other optimizer's here.

    State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq`, shaped and sharded like it; of what a rank
    holds, 4096 numbers and more that divide by 256 are quantized, and the rest is fp32.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; torchao would make the rate a tensor, which a checkpoint would then hold for every parameter."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient. torchao wants rates as tensors: numbers compile it anew."""
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32)
        with compile_on_cuda_only(self.param_groups[0]["params"][0].device):
            super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the moments stay as they are where torch would make them the parameter's type."""
        load_state_unconverted(self, state_dict)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        # A second moment in plain bf16, as torchao's would be where it is not quantized, stops moving.
        moment: Tensor = super()._new_buffer(p.detach().float(), signed)
        return moment


def compile_on_cuda_only(device: torch.device) -> AbstractContextManager[Any]:
    """torchao compiles its update for every shape. On a CPU that takes minutes, and without a compiler it fails."""
    if device.type == "cuda" and has_compiler():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
