"""The optimizer of a recipe, and its parameter groups."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.optimization import is_layers_matrix
from finetune.config.schema import Optimization
from finetune.distributed.gradients import group_by_mesh
from finetune.distributed.world import World
from finetune.optim.offload import OffloadedOptimizer
from finetune.optim.update_rules import MOMENTUM, Adafactor, AdamWBf16Moments, Muon, adamw_8bit_moments

Groups = list[dict[str, Any]]

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
    groups = make_parameter_groups(model, optimization.weight_decay, MOMENTUM if optimization.optim == "muon" else None)
    covered = sum(len(group["params"]) for group in groups)
    assert covered == len(trainable), f"the optimizer covers {covered} of {len(trainable)} trainable parameters"
    make = CONSTRUCTORS[optimization.optim]
    if optimization.optim_offload == "nvme":
        assert world is not None, "files are those of a rank"
        return OffloadedOptimizer(model, groups, lambda part: make(part, optimization), optimization, world)
    return make(groups, optimization)


def _make_adamw(
    make: Callable[..., torch.optim.Optimizer], groups: Groups, keys: Optimization
) -> torch.optim.Optimizer:
    betas = (keys.adam_beta1, keys.adam_beta2)
    return make(groups, lr=keys.learning_rate, betas=betas, eps=keys.adam_epsilon)


def _make_adamw_8bit(groups: Groups, keys: Optimization) -> torch.optim.Optimizer:
    return _make_adamw(adamw_8bit_moments(), groups, keys)


# How each of config/optimization.py is made.
CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], torch.optim.Optimizer]] = {
    "adamw_torch_fused": partial(_make_adamw, partial(torch.optim.AdamW, fused=True)),
    "adamw_torch": partial(_make_adamw, partial(torch.optim.AdamW, fused=False)),
    "adam": partial(_make_adamw, partial(torch.optim.Adam, fused=True)),
    "adamw_bf16_moments": partial(_make_adamw, AdamWBf16Moments),
    "adamw_8bit": _make_adamw_8bit,
    "adafactor": lambda groups, keys: Adafactor(groups, lr=keys.learning_rate),
    # foreach, torch's choice on CUDA, would allocate all gradients again to decay weights
    "muon": partial(_make_adamw, Muon),
    "sgd": lambda groups, keys: torch.optim.SGD(groups, lr=keys.learning_rate, foreach=False),
}


def make_parameter_groups(model: nn.Module, weight_decay: float, momentum: float | None = None) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay: matrices decay, vectors do not (`NOT_DECAYED`).

    The parameters of a group are sharded over one mesh. `momentum`: Muon's, for groups of layers' matrices.
    """
    dims = _count_dims(model)
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {(True, False): [], (True, True): [], (False, False): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = dims[parameter] > 1 and NOT_DECAYED.search(name) is None
            is_muons = momentum is not None and decays and is_layers_matrix(name, parameter.shape)
            kinds[decays, is_muons].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        | ({} if momentum is None else {"momentum": momentum if is_muons else 0.0})
        for (decays, is_muons), of_kind in kinds.items()
        for parameters in group_by_mesh(of_kind)
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
