"""The optimizer of a recipe, and its parameter groups."""

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.schema import Optimization
from finetune.distributed.gradients import group_by_mesh
from finetune.distributed.world import World
from finetune.optim.adafactor import Adafactor
from finetune.optim.adamw_bf16 import AdamWBf16Moments
from finetune.optim.nvme import OffloadedOptimizer

# Vectors by their role, whatever their shape: norms with a row for each head, biases with one for each expert, and the
# rates of recurrent layers (Mamba's A_log, RWKV's time_mix_*).
NOT_DECAYED = re.compile(r"norm|bias$|(^|\.)(A_log|time_mix_\w+)$")


def build_optimizer(model: nn.Module, optimization: Optimization, world: World | None = None) -> torch.optim.Optimizer:
    """The recipe's optimizer over every trainable parameter of the sharded `model`.

    Call it after sharding: an optimizer built before would hold the parameters on meta, and update nothing. `world`:
    needed where its state is in files. Raises `UserError` on all ranks where these cannot be made.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable, "no parameter is trained"
    on_meta = [name for name, parameter in trainable.items() if parameter.is_meta]
    assert not on_meta, f"parameters without memory: {on_meta}"
    groups = make_parameter_groups(model, optimization.weight_decay)
    covered = sum(len(group["params"]) for group in groups)
    assert covered == len(trainable), f"the optimizer covers {covered} of {len(trainable)} trainable parameters"
    if optimization.optim_offload == "nvme":
        assert world is not None, "files are those of a rank"
        return OffloadedOptimizer(model, groups, partial(_make_optimizer, optimization), optimization, world)
    return _make_optimizer(optimization, groups)


def _make_optimizer(optimization: Optimization, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if optimization.optim == "adafactor":
        return Adafactor(groups, lr=optimization.learning_rate)
    if optimization.optim == "sgd":
        # foreach, torch's choice on CUDA, would allocate all gradients again to decay weights
        return torch.optim.SGD(groups, lr=optimization.learning_rate, foreach=False)
    betas = (optimization.adam_beta1, optimization.adam_beta2)
    if optimization.optim == "adamw_bf16_moments":
        return AdamWBf16Moments(groups, lr=optimization.learning_rate, betas=betas, eps=optimization.adam_epsilon)
    if optimization.optim == "adamw_8bit":
        from finetune.optim.adamw_8bit import AdamW8bitMoments  # imports torchao

        return AdamW8bitMoments(groups, lr=optimization.learning_rate, betas=betas, eps=optimization.adam_epsilon)
    return torch.optim.AdamW(
        groups,
        lr=optimization.learning_rate,
        betas=betas,
        eps=optimization.adam_epsilon,
        fused=optimization.optim == "adamw_torch_fused",
    )


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay: matrices decay, vectors do not (`NOT_DECAYED`).

    The parameters of a group are sharded over one mesh.
    """
    dims = _count_dims(model)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[dims[parameter] > 1 and NOT_DECAYED.search(name) is None].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for decays, all_parameters in groups.items()
        for parameters in group_by_mesh(all_parameters)
    ]


def _count_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """The dimensions of every parameter before sharding. FSDP1 flattens parameters, but records their shapes."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    dims = {parameter: parameter.dim() for parameter in model.parameters()}
    for module in model.modules():
        flat: Any = module._flat_param if isinstance(module, Fsdp1) else None
        if flat is not None:
            dims |= {parameter: len(shape) for parameter, shape in zip(flat._params, flat._shapes, strict=True)}
    return dims
