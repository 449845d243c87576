"""The update in the backward (`optim_in_backward`): gradients of the whole model are never in
memory together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Recipe
from finetune.distributed.gradients import combine_norms, measure_norm
from finetune.distributed.model_parts import gather_whole, local_part
from finetune.distributed.world import World
from finetune.optim.optimizers import seed_rounding


class UpdateInBackward:
    """While entered, every backward updates each parameter of `optimizer` as soon as its gradient
    is known. One step is one backward.

    A gradient that is not finite never reaches its parameter, and nothing is updated after it. The
    optimizer reads a flag on the device for that; where it reads none, the host looks at every
    gradient's norm, and waits for it. The guard of the step reports it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World) -> None:
        self._optimizer = optimizer
        self._seed = recipe.run.seed
        self._world = world
        self._reads_flag = OPTIMIZERS[recipe.optimization.optim].reads_found_inf
        self._flag = self._find_flag()
        self._step = 0
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._hooks = ExitStack()
        # parameter -> its index, and its group
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}

    def _find_flag(self) -> Tensor:
        """The flag that the guard of the run has set on the optimizer, or a new one; 1 once a value
        was not finite.
        """
        flag: Tensor | None = getattr(self._optimizer, "found_inf", None)
        if flag is not None:
            return flag
        # Under CPU offload the host updates, and would read a GPU's flag before it has arrived.
        device = "cpu" if self._world.sharding.cpu_offload else self._world.device
        flag = torch.zeros((), device=device)
        if self._reads_flag:
            self._optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        return flag

    def __enter__(self) -> "UpdateInBackward":
        self._places.clear()
        # The optimizer's parameters are the shards, also while the model's own are gathered.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._places[parameter] = (len(self._places), group)
                hook = parameter.register_post_accumulate_grad_hook(self._update)
                self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def start_step(self, step: int) -> None:
        """Begins step `step` (0-based), which has one backward."""
        self._step = step
        self._norms.clear()

    def check_loss(self, loss_sum: Tensor) -> None:
        """Keeps this step's backward from updating if any rank's loss is not finite.

        All ranks call it.
        """
        self._mark_unless(torch.isfinite(self._world.sum(loss_sum.detach().clone())))

    def norm(self, model: nn.Module) -> Tensor:
        """Returns the 2-norm of all gradients of the step over every shard (0-dim fp32, on the
        device).

        All ranks call it.
        """
        norms = [self._norms[p] for p in model.parameters() if p in self._norms]
        return gather_whole(combine_norms(norms)).float()

    def _update(self, parameter: Any) -> None:
        """Updates `parameter` by its gradient, which is then dropped; autograd calls it."""
        gradient: Tensor = parameter.grad
        norm = measure_norm(gradient)
        self._norms[parameter] = norm
        self._mark_unless(torch.isfinite(local_part(norm)))
        if self._reads_flag or not bool(self._flag):
            index, group = self._places[parameter]
            seed_rounding(self._seed, self._step, self._world.shard_rank, index)
            with self._only(parameter, group):
                self._optimizer.step()
        if gradient.is_cuda:  # hybrid sharding reduces on one stream and calls this on another
            local_part(gradient).record_stream(torch.cuda.current_stream())
        parameter.grad = None

    def _mark_unless(self, is_finite: Tensor) -> None:
        self._flag.copy_(torch.maximum(self._flag, ~is_finite))

    @contextmanager
    def _only(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[None]:
        """In this block the optimizer has one parameter: its step would visit all of them."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": [parameter]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
