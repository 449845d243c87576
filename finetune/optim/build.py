"""The optimizer of a recipe: its parameter groups, and its updates within the backward (`optim_in_backward`)."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.optimization import OPTIMIZERS, is_layers_matrix
from finetune.config.schema import Optimization, Recipe
from finetune.distributed.gradients import combine_norms, group_by_mesh, measure_norm, whole_norm
from finetune.distributed.parallelize import local_part
from finetune.distributed.world import World
from finetune.optim.offload import OffloadedOptimizer
from finetune.optim.update_rules import MOMENTUM, Adafactor, AdamWBf16Moments, Muon, adamw_8bit_moments, seed_rounding

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


class UpdateInBackward:
    """While entered, every backward updates each parameter of `optimizer` as soon as its gradient is known.

    One step is one backward.

    A gradient that is not finite never reaches its parameter, and nothing is updated after it: by the flag that the
    optimizer reads on the device, else by the host, which then waits for every gradient's norm. The guard of the step
    reports it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, world: World) -> None:
        self._optimizer, self._seed, self._world = optimizer, recipe.run.seed, world
        self._reads_flag = OPTIMIZERS[recipe.optimization.optim].reads_found_inf
        # Where the guard of the run has set a flag on the optimizer already, it is the same one.
        flag: torch.Tensor | None = getattr(optimizer, "found_inf", None)
        # With the parameters: under CPU offload the host updates, and would read a GPU's flag before it has arrived.
        where = torch.device("cpu") if world.sharding.cpu_offload else world.device
        self._flag = torch.zeros((), device=where) if flag is None else flag
        if self._reads_flag and flag is None:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._step = 0
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks = ExitStack()
        self._places: dict[nn.Parameter, tuple[int, dict[str, Any]]] = {}  # its index, and its group

    def __enter__(self) -> "UpdateInBackward":
        # The optimizer's parameters are the shards, also while the model's own are gathered.
        pairs = [(parameter, group) for group in self._optimizer.param_groups for parameter in group["params"]]
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
        """Keeps the parameters from this step's backward if any rank's loss is not finite. All ranks call it."""
        self._mark_unless(torch.isfinite(self._world.sum(loss_sum.detach().clone())))

    def norm(self, model: nn.Module) -> torch.Tensor:
        """The 2-norm of all gradients of the step over every shard (0-dim fp32, on the device). All ranks call it."""
        return whole_norm(combine_norms([self._norms[p] for p in model.parameters() if p in self._norms])).float()

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
        """Within it the optimizer has this parameter alone, so that its step does not look through all of them."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": [parameter]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
