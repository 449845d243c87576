"""The update in the backward (`optim_in_backward`): gradients of the whole model are never in
memory together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from finetune.config.optimization import OPTIMIZERS
from finetune.config.schema import Recipe
from finetune.distributed.gradients import combine_norms, measure_norm
from finetune.distributed.model_parts import gather_whole, local_part
from finetune.distributed.world import World
from finetune.optim.optimizers import seed_rounding


class UpdateInBackward:
    """While entered, every backward updates each parameter of `optimizer` as soon as its gradient
    is known.

    One step is one backward.

    A gradient that is not finite never reaches its parameter, and nothing is updated after it: by
    the flag that the optimizer reads on the device, else by the host, which then waits for every
    gradient's norm. The guard of the step reports it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World) -> None:
        self._optimizer = optimizer
        self._seed = recipe.run.seed
        self._world = world
        self._reads_flag = OPTIMIZERS[recipe.optimization.optim].reads_found_inf
        # Where the guard of the run has set a flag on the optimizer already, it is the same one.
        flag: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        # With the parameters: under CPU offload the host updates, and would read a GPU's flag
        # before it has arrived.
        if world.sharding.cpu_offload:
            where = torch.device("cpu")
        else:
            where = world.device
        if flag is None:
            self._flag = torch.zeros((), device=where)
        else:
            self._flag = flag
        if self._reads_flag and flag is None:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._step = 0
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks = ExitStack()
        # its index, and its group
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}

    def __enter__(self) -> "UpdateInBackward":
        # The optimizer's parameters are the shards, also while the model's own are gathered.
        pairs = [
            (parameter, group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        ]
        self._places = {parameter: (index, group) for index, (parameter, group) in enumerate(pairs)}
        for parameter in self._places:
            hook = parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def start_step(self, step: int) -> None:
        """Begins step `step` (0-based), after which one backward follows."""
        self._step = step
        self._norms.clear()

    def check_loss(self, loss_sum: torch.Tensor) -> None:
        """Keeps the parameters from this step's backward if any rank's loss is not finite.

        All ranks call it.
        """
        self._mark_unless(torch.isfinite(self._world.sum(loss_sum.detach().clone())))

    def norm(self, model: nn.Module) -> torch.Tensor:
        """The 2-norm of all gradients of the step over every shard (0-dim fp32, on the device).

        All ranks call it.
        """
        return gather_whole(
            combine_norms([self._norms[p] for p in model.parameters() if p in self._norms])
        ).float()

    def _update(self, parameter: Any) -> None:
        gradient: torch.Tensor = parameter.grad
        norm = self._norms[parameter] = measure_norm(gradient)
        self._mark_unless(torch.isfinite(local_part(norm)))
        if self._reads_flag or not bool(self._flag):
            index, group = self._places[parameter]
            seed_rounding(self._seed, self._step, self._world.shard_rank, index)
            with self._only(parameter, group):
                self._optimizer.step()
        if gradient.is_cuda:  # hybrid sharding reduces on one stream and calls this on another
            local_part(gradient).record_stream(torch.cuda.current_stream())
        parameter.grad = None

    def _mark_unless(self, is_finite: torch.Tensor) -> None:
        self._flag.copy_(torch.maximum(self._flag, ~is_finite))

    @contextmanager
    def _only(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[None]:
        """In this block the optimizer has this parameter alone, so that its step does not look
        through all of them.
        """
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": [parameter]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
