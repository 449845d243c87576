"""FSDP2 over shards in the compute dtype, where the fp32 master weights lie elsewhere: gradients are still reduced and added in fp32."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@torch.no_grad()
def take_master_weights(model: nn.Module, dtype: torch.dtype, take: Callable[[nn.Parameter], object]) -> None:
    """Hands every trained parameter of the sharded `model` whose dtype is not `dtype` to `take`, then turns it into `dtype`.

    One after another, so that no two copies of the model exist. What FSDP2 gathers is bit for bit what it would have cast
    from the fp32 shard, and a gradient keeps the dtype that it had. Call it before the first forward.
    """
    for group in _list_groups(model):
        kept = set()
        for held in group.fsdp_params:
            held.reset_sharded_param()  # weights that are tied were tied again after sharding
            parameter = held.sharded_param
            if not parameter.requires_grad or parameter.dtype == dtype:
                continue
            take(parameter)
            kept.add(parameter.dtype)
            lower = nn.Parameter(parameter.detach().to(dtype))
            lower.grad_dtype = parameter.dtype
            torch.utils.swap_tensors(parameter, lower)  # type: ignore[no-untyped-call]  # the same object, so that ties and names stay
            held.reset_sharded_param()
        if kept:
            _keep_gradient_dtype(group, kept.pop())


def _keep_gradient_dtype(group: Any, dtype: torch.dtype) -> None:
    """FSDP2 casts a reduced gradient to its parameter's dtype, which it looks up again at every `unshard`."""
    look_up = group._init_mp_dtypes

    def look_up_and_keep() -> None:
        look_up()
        group._orig_dtype = dtype

    group._init_mp_dtypes = look_up_and_keep


def _list_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each once: a group may lie over several modules."""
    seen: set[int] = set()
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        groups = () if state is None else getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group
