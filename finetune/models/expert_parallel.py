"""Expert parallelism: ranks of a group share a layer's experts, and exchange the tokens for them.

Each rank of a group has E / size of the E experts, and FSDP shards these over the ranks that have the same ones. A
rank's router chooses for its own tokens, as without; then, in each layer:

    counts    how many tokens come for each expert                      all-to-all
    dispatch  a token's state, once for each expert that it has chosen  all-to-all of uneven parts
    compute   the experts of this rank, by transformers' own function
    combine   the outputs, back to where the tokens are                 all-to-all of uneven parts

where the router's weights add them up. Backward, dispatch and combine trade places (Lepikhin et al. 2021,
arXiv:2006.16668).

LoRA's adapters of the experts are not divided: FSDP shards them with the other parameters of their layer over all
ranks, and a rank adds the factors of its own experts to its weights. A few hundredths of the experts' size, they are
gathered whole; in return their gradients, names and checkpoints are those of every other layout. (peft has the factors
B of all experts in one matrix, whose columns of one expert lie r times E columns apart: no rank's part of it would be a
slice.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from finetune.config.layout import shard_experts
from finetune.distributed.join import make_expert_mesh, set_timeouts
from finetune.distributed.world import EXPERT, EXPERT_SHARD, REPLICATE, World, all_to_all
from finetune.models.experts import compute_experts, expert_modules, find_factors, move_rows, take_over_adapters
from finetune.models.quantized_layers import expert_weights, quantized_children, recompute_dequantized


def divide_experts(model: nn.Module, world: World) -> None:
    """Divides the experts of `model`, on meta and not sharded yet, as `world.sharding` asks; makes them units of FSDP2.

    A rank's gradients of its experts are already the sum over the tokens of its group. FSDP then averages them over
    the ranks that hold the same experts, so the result is divided by the group's size.
    """
    size = world.sharding.expert_parallel_size
    if size == 1:
        return
    mesh = make_expert_mesh(world.sharding, world.size, world.device.type)
    is_replicated = mesh[REPLICATE].size() > 1
    set_timeouts(world.collective_timeout)
    plugin: Any = world.accelerator.state.fsdp_plugin
    # FSDP would round the router's weights: they come in as arguments, and in fp32 in some families.
    precision = replace(plugin.mixed_precision_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    for module in expert_modules(model):
        divide_layer(model, module, mesh[EXPERT])
        sharded: Any = fully_shard(
            module,
            mesh=mesh[REPLICATE, EXPERT_SHARD] if is_replicated else mesh[EXPERT_SHARD],
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=precision,
            offload_policy=plugin.cpu_offload,
            shard_placement_fn=_choose_sharded_dim(module, size, mesh[EXPERT_SHARD].size()),
        )
        sharded.set_all_reduce_hook(lambda gradient: gradient.div_(size))


def divide_layer(model: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    """Divides `module`, the experts of a layer of `model`, over the ranks of `mesh`, with their adapters."""
    module.forward = DividedExperts(module, mesh, take_over_adapters(model, module)).forward


class DividedExperts:
    """What `module`, the experts of a layer, computes in place of its own forward. Its parameters become DTensors over
    `mesh`, one dimension of ranks, along their first dimension, the experts; `adapters` (peft's ParamWrapper) are of
    those parameters."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, adapters: Sequence[Any] = ()) -> None:
        self.module, self.group, self.size, self.adapters = module, mesh.get_group(), mesh.size(), adapters
        parameters = dict(module.named_parameters(recurse=False))
        self.experts: int = module.num_experts  # type: ignore[assignment]
        self.local_experts = self.experts // self.size
        self.first = mesh.get_local_rank() * self.local_experts
        for name, parameter in parameters.items():
            assert parameter.shape[0] == self.experts, f"{name}: {tuple(parameter.shape)}, but {self.experts} experts"
            local = parameter.new_empty((self.local_experts, *parameter.shape[1:]))
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for name, weight in quantized_children(module).items():  # each rank's own, which no checkpoint holds
            setattr(module, name, weight.take_part(slice(self.first, self.first + self.local_experts)))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, width]; chosen int64[tokens, k], their experts; weights [tokens, k] -> [tokens, width]."""
        tokens, per_token = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, so by rank as well
        back = order.argsort()
        # Not torch.bincount, which on a GPU makes the host wait for the largest expert.
        counts = flat.new_zeros(self.experts).scatter_add_(0, flat, torch.ones_like(flat))
        arriving = torch.empty_like(counts)  # for each expert of this rank, from rank after rank
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts, arriving]).view(2, self.size, self.local_experts).sum(-1).tolist()
        leaving = move_rows(hidden, order, back, per_token)
        rows = all_to_all(leaving, self.group, sent, received)
        local = torch.arange(self.local_experts, device=flat.device).repeat(self.size)
        own = local.repeat_interleave(arriving, output_size=sum(received))
        outputs = recompute_dequantized(self.module, self.compute, rows, own)
        returned = all_to_all(outputs, self.group, received, sent)
        states = move_rows(returned, back, order).view(tokens, per_token, -1)
        weighted: Tensor = (states * weights[..., None]).sum(1)
        return weighted.to(hidden.dtype)

    def compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """The outputs of this rank's `experts` int64[rows] (counted from its first) for `rows` [rows, width]."""
        parameters = expert_weights(self.module)
        factors = find_factors(self.adapters, slice(self.first, self.first + self.local_experts))
        if not rows.shape[0]:  # gradients of zero: FSDP reduces what every rank has
            trained = [*parameters.values(), *(factor for pair in factors.values() for factor in pair[:2])]
            return rows + sum(each[:0].sum() for each in trained)
        inputs = rows, experts[:, None], torch.ones_like(rows[:, :1])
        outputs: Tensor = compute_experts(self.module, parameters, self.local_experts, *inputs, factors=factors)
        return outputs


def _choose_sharded_dim(module: nn.Module, size: int, shards: int) -> Callable[[nn.Parameter], Shard]:
    """For `fully_shard` over `shards` ranks: whole experts where they divide evenly, else rows of each."""
    by_dim = {
        id(parameter): Shard(0) for weight in quantized_children(module).values() for parameter in weight.parameters()
    }
    for name, parameter in module.named_parameters(recurse=False):
        held = shard_experts(tuple(parameter.shape), size, shards)
        assert held is not None, f"{name}: refused by the rule `experts over shards`"
        by_dim[id(parameter)] = Shard(0 if held[1:] == tuple(parameter.shape[1:]) else 1)
    return lambda parameter: by_dim[id(parameter)]
