"""torchao's AdamW with 8-bit moments (Dettmers et al. 2022): 2 bytes a parameter and a scale for every 256 numbers.

Imports torchao, so import this module only where a recipe asks for it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit

from finetune.config.facts import has_compiler
from finetune.optim.adamw_bf16 import load_state_unconverted


class AdamW8bitMoments(AdamW8bit):  # type: ignore[misc]
    """torchao's AdamW8bit with learning rates that are numbers, like those of the other optimizers.

    State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq`, shaped and sharded like it. A rank's part is
    quantized if it has at least 4096 numbers and divides by 256, else it is fp32.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Keeps the rate a number: torchao makes it a tensor, which a checkpoint would then hold for every
        parameter."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Updates every parameter that has a gradient. torchao gets rates as tensors: a number would recompile its
        update."""
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32)
        # torchao compiles its update: on a CPU that takes minutes, and without a compiler it fails.
        compiles = self.param_groups[0]["params"][0].is_cuda and has_compiler()
        with nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
            super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but moments keep their dtype, which torch would cast to the parameter's."""
        load_state_unconverted(self, state_dict)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        # fp32 where it is not quantized: a second moment in plain bf16, as torchao's would be, stops changing.
        moment: Tensor = super()._new_buffer(p.detach().float(), signed)
        return moment
