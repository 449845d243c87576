"""The update in the backward (`optim_in_backward`): the gradients of the whole model are never in
memory at the same time.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Recipe
from finetune.distributed.gradients import combine_norms, measure_norm
from finetune.distributed.model_parts import gather_whole, local_part
from finetune.distributed.world import World
from finetune.optim.optimizers import only_group, seed_rounding


class UpdateInBackward:
    """A context in which each backward updates the parameters of `optimizer`, each as soon as its
    gradient is known. A step has one backward.

    A gradient that is not finite never reaches its parameter: it sets a flag on the device, after
    which this rank updates nothing. Some optimizers read this flag themselves. For all others the
    host reads it before each update, and waits for the device. The guard of the step reports the
    fault.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World) -> None:
        self._optimizer = optimizer
        self._seed = recipe.run.seed
        self._world = world
        self._reads_flag = OPTIMIZERS[recipe.optimization.optim].reads_found_inf
        self._flag = self._find_flag()
        self._step = 0
        self._norms: dict[nn.Parameter, Tensor] = {}  # of the gradients of this step
        self._hooks = ExitStack()
        # parameter -> (its index among all parameters, its group in the optimizer)
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}

    def _find_flag(self) -> Tensor:
        """Returns the flag that is 1 once a value was not finite, and else 0.

        It is the flag that a `DeviceGuard` has set on the optimizer, or else a new one.
        """
        flag: Tensor | None = getattr(self._optimizer, "found_inf", None)
        if flag is not None:
            return flag
        # Under CPU offload the host updates: it would read a flag of the GPU before its copy has
        # arrived.
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
        """Begins a step (0-based), which has one backward: drops the norms of the step before."""
        self._step = step
        self._norms.clear()

    def check_loss(self, loss_sum: Tensor) -> None:
        """Prevents all further updates if the loss of any rank is not finite.

        All ranks call it.
        """
        self._mark_unless(torch.isfinite(self._world.sum(loss_sum.detach().clone())))

    def norm(self, model: nn.Module) -> Tensor:
        """Returns the 2-norm of all gradients of the step, over every shard.

        It is 0-dim fp32, on the device. All ranks call it.
        """
        norms = [self._norms[p] for p in model.parameters() if p in self._norms]
        return gather_whole(combine_norms(norms)).float()

    def _update(self, parameter: Any) -> None:
        """Updates `parameter` and drops its gradient.

        Autograd calls it when the gradient is complete.
        """
        gradient: Tensor = parameter.grad
        norm = measure_norm(gradient)
        self._norms[parameter] = norm
        self._mark_unless(torch.isfinite(local_part(norm)))
        # An optimizer that reads the flag skips the update itself: the host need not wait.
        if self._reads_flag or not bool(self._flag):
            index, group = self._places[parameter]
            seed_rounding(self._seed, self._step, self._world.shard_rank, index)
            with only_group(self._optimizer, group | {"params": [parameter]}):
                self._optimizer.step()
        # Hybrid sharding reduces the gradient on another stream than this one: its memory must not
        # be used again before the update here has read it.
        if gradient.is_cuda:
            local_part(gradient).record_stream(torch.cuda.current_stream())
        parameter.grad = None

    def _mark_unless(self, is_finite: Tensor) -> None:
        """Sets the flag if `is_finite`, a bool of 0 dimensions, is False."""
        self._flag.copy_(torch.maximum(self._flag, ~is_finite))
