"""The optimizers of a recipe: how each is made, over which groups of parameters, and the update
rules that torch lacks.

Torch lacks AdamW with bf16 moments, and has Adafactor and Muon for whole tensors only.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from finetune.config.facts import has_compiler
from finetune.config.optimization import OPTIMIZERS, is_layers_matrix
from finetune.config.schema import Optimization
from finetune.distributed.gradients import group_by_mesh
from finetune.distributed.model_parts import local_part
from finetune.distributed.world import World
from finetune.optim.offload import OffloadedOptimizer

# elements updated at once where nothing fuses the update: bounds its fp32 temporaries to 64 MiB
# each
SLICE = 1 << 24


def load_state_unconverted(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict into `optimizer` without casting its tensors."""
    groups: list[dict[str, Any]] = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append(saved | {"params": group["params"]})
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                optimizer.state[parameter] = dict(state_dict["state"][index])
    optimizer.param_groups = groups


class _ByParameter(torch.optim.Optimizer):
    """Updates one parameter after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks of its shards call it."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)

    load_state_dict = load_state_unconverted

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class AdamWBf16Moments(_ByParameter):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with stochastically rounded bf16 moments.

    State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq` (bf16, shaped and sharded
    like it). Draws from torch's default generator: seed it by the step, so that a run resumes
    exactly, and alike on all ranks that hold the same shard, so that replicas stay equal. Where
    `found_inf` (a scalar on the device, as for torch's fused optimizers) is not zero, parameters
    and moments do not change.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        assert parameter.grad is not None
        moments = (state["exp_avg"], state["exp_avg_sq"])
        update_(parameter, parameter.grad, *moments, int(state["step"]), group, self.found_inf)


@cache
def adamw_8bit_moments() -> type[torch.optim.Optimizer]:
    """torchao's AdamW with 8-bit moments (Dettmers et al. 2022), a class whose making imports
    torchao.

    A parameter takes 2 bytes, and a scale for every 256 numbers.
    """
    from torchao.optim import AdamW8bit

    class AdamW8bitMoments(AdamW8bit):  # type: ignore[misc]
        """torchao's AdamW8bit with learning rates that are numbers, like those of the other
        optimizers.

        State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq`, shaped and sharded
        like it. A rank's part is quantized if it has at least 4096 numbers and divides by 256, else
        it is fp32.
        """

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Keeps the rate a number: torchao's tensor would be in the checkpoint for every
            parameter.
            """
            rate = param_group.get("lr", self.defaults["lr"])
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = rate

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            """Updates every parameter with a gradient.

            Rates are tensors meanwhile: numbers would recompile.
            """
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            # torchao compiles its update: on a CPU that takes minutes, and without a compiler it
            # fails.
            compiles = self.param_groups[0]["params"][0].is_cuda and has_compiler()
            with nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
                super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

        load_state_dict = load_state_unconverted

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            # fp32 where it is not quantized: a second moment in plain bf16, as torchao's would be,
            # stops changing.
            moment: Tensor = super()._new_buffer(p.detach().float(), signed)
            return moment

    return AdamW8bitMoments


def update_(
    parameter: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    settings: dict[str, Any],
    found_inf: Tensor | None = None,
) -> None:
    """Updates one parameter and its moments in place; of a sharded one, this rank's part."""
    beta1, beta2 = settings["betas"]
    # All that changes with the step is passed as tensors on the host: a number would recompile the
    # update.
    rate = torch.tensor(settings["lr"] / (1 - beta1**step))
    decay = torch.tensor(1 - settings["lr"] * settings["weight_decay"])
    correction = torch.tensor((1 - beta2**step) ** -0.5)
    flat = [local_part(each).view(-1) for each in (parameter, grad, first, second)]
    if parameter.is_cuda and has_compiler():
        update = _compiled_update()
    else:
        update = _update_
    length = flat[0].numel() if update is not _update_ else SLICE
    for start in range(0, flat[0].numel(), max(length, 1)):
        weights, gradient, mean, variance = (each[start : start + length] for each in flat)
        update(
            weights,
            gradient,
            mean,
            variance,
            rate,
            decay,
            correction,
            found_inf,
            beta1,
            beta2,
            settings["eps"],
        )


@cache
def _compiled_update() -> Callable[..., None]:
    """One kernel that reads and writes every element once; on an 8B model the plain update takes
    ten times as long.
    """
    return torch.compile(_update_, dynamic=True)


def _update_(
    parameter: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    rate: Tensor,
    decay: Tensor,
    correction: Tensor,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """The equations, in fp32.

    All [elements]; `rate` and `correction` carry the bias corrections of this step.
    """
    gradient = grad.float()
    mean = first.float().lerp(gradient, 1 - beta1)
    variance = second.float().lerp(gradient * gradient, 1 - beta2)
    moved = (parameter.float() * decay - rate * mean / (variance.sqrt() * correction + eps)).to(
        parameter.dtype
    )
    changes = (moved, round_stochastically(mean), round_stochastically(variance))
    for old, new in zip((parameter, first, second), changes, strict=True):
        old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


def round_stochastically(values: Tensor) -> Tensor:
    """fp32 -> bf16, up or down with the probability that makes the mean exact.

    bf16 is the upper half of an fp32: a random lower half is added, and the carry decides.
    """
    noise = torch.randint_like(values, 0, 1 << 16, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)


SQUARE_EPSILON = 1e-30  # added to the square of the gradient
CLIP_THRESHOLD = 1.0  # of the update's root mean square
DECAY_RATE = -0.8


class Adafactor(_ByParameter):
    """State of a parameter: `step` (fp32 scalar); of a matrix [rows, columns] `exp_avg_sq_row`
    [rows], sharded like it, and `exp_avg_sq_col` [columns], whole; of a vector, or of a
    convolution's weight, `exp_avg_sq`, shaped and sharded like it.

    All in fp32.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            _make_state(parameter, state)
        state["step"] += 1
        _update_factored(parameter, state, group["lr"], group["weight_decay"])


def _make_state(parameter: Tensor, state: dict[str, Any]) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32)
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.dim() != 2:
        state["exp_avg_sq"] = zeros
        return
    state["exp_avg_sq_row"] = zeros.sum(dim=1)
    state["exp_avg_sq_col"] = torch.zeros(parameter.shape[1], device=local_part(parameter).device)


def _update_factored(
    parameter: Tensor, state: dict[str, Any], rate: float, weight_decay: float
) -> None:
    """Algorithm 4 of the paper, without its relative step sizes; on this rank's part of a sharded
    parameter.
    """
    weights = local_part(parameter)
    grad = local_part(parameter.grad).float()  # type: ignore[arg-type]
    # the weight of this step's square in the running means
    newest = float(state["step"]) ** DECAY_RATE
    square = grad.square() + SQUARE_EPSILON
    if parameter.dim() != 2:
        variance = local_part(state["exp_avg_sq"]).lerp_(square, newest)
        update = variance.rsqrt() * grad
    else:
        rows = local_part(state["exp_avg_sq_row"])
        columns = state["exp_avg_sq_col"]
        rows.lerp_(square.mean(dim=1), newest)
        columns.lerp_(_sum_over_shards(square.sum(dim=0), parameter) / parameter.shape[0], newest)
        mean_of_rows = _sum_over_shards(rows.sum(), parameter) / parameter.shape[0]
        update = grad * (rows / mean_of_rows).rsqrt()[:, None] * columns.rsqrt()
    root_mean_square = (
        _sum_over_shards(update.square().sum(), parameter) / parameter.numel()
    ).sqrt()
    update /= (root_mean_square / CLIP_THRESHOLD).clamp(min=1.0)
    moved = weights.float() * (1 - rate * weight_decay) - rate * update
    weights.copy_(moved.to(weights.dtype))


def _sum_over_shards(part: Tensor, parameter: Tensor) -> Tensor:
    """The sum of `part`, computed from each rank's shard of `parameter`, over the ranks that hold
    the others.
    """
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(part, group=parameter.device_mesh.get_group(dimension))
    return part


SCALE = 0.2
STEPS = 5
NORM_EPSILON = 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.AdamW):
    """Orthogonalizes the updates of groups that have a `momentum` above 0; the others are AdamW's.

    State of a matrix: `momentum_buffer`, shaped and sharded like it.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        # the matrices' half reads no flag: torch's GradScaler asks the host
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks of its shards call it."""
        assert closure is None, "closures are not supported"
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if not group["momentum"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    load_state_dict = load_state_unconverted

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights = local_part(parameter)
        buffer = local_part(state["momentum_buffer"])
        gradient = local_part(parameter.grad)  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).bfloat16()  # Nesterov's
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = parameter.placements
            whole = DTensor.from_local(
                update,
                mesh,
                placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
            update = distribute_tensor(
                orthogonalize(whole), mesh, placements, src_data_rank=None
            ).to_local()
        else:
            update = orthogonalize(update)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(update, alpha=-group["lr"] * SCALE * max(parameter.shape) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with its singular values near 1, by a Newton-Schulz iteration.

    Args:
        matrix: [rows, columns], bf16.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    update = matrix.T if is_tall else matrix
    update = update / update.norm().clamp(min=NORM_EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = update @ update.T
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return (update.T if is_tall else update).contiguous()


def seed_rounding(seed: int, step: int, shard_rank: int, parameter: int | None = None) -> None:
    """Seeds stochastic rounding: ranks that hold the same shard must round alike, or their replicas
    drift apart.

    `parameter`: the index of the only one that is updated, where each is updated by itself.
    """
    seed_from(
        f"{seed}/{step}/rounding/{shard_rank}" + ("" if parameter is None else f"/{parameter}")
    )


def seed_from(text: str) -> None:
    digest = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


Groups = list[dict[str, Any]]

# Vectors by their role, whatever their shape: norms with a row for each head, biases with one for
# each expert, and the rates of recurrent layers (Mamba's A_log, RWKV's time_mix_*).
NOT_DECAYED = re.compile(r"norm|bias$|(^|\.)(A_log|time_mix_\w+)$")


def build_optimizer(
    model: nn.Module, optimization: Optimization, world: World | None = None
) -> torch.optim.Optimizer:
    """The recipe's optimizer over every trainable parameter of the sharded `model`.

    Call it after sharding: an optimizer built before would hold the parameters on meta, and update
    nothing. `world`: needed where its state is in files. Raises `UserError` on all ranks where
    these cannot be made.
    """
    trainable = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert trainable, "no parameter is trained"
    on_meta = [name for name, parameter in trainable.items() if parameter.is_meta]
    assert not on_meta, f"parameters without memory: {on_meta}"
    groups = make_parameter_groups(
        model, optimization.weight_decay, OPTIMIZERS[optimization.optim].momentum
    )
    covered = sum(len(group["params"]) for group in groups)
    assert covered == len(trainable), (
        f"the optimizer covers {covered} of {len(trainable)} trainable parameters"
    )
    make = CONSTRUCTORS[optimization.optim]
    if optimization.optim_offload == "nvme":
        assert world is not None, "files are those of a rank"
        return OffloadedOptimizer(
            model, groups, lambda part: make(part, optimization), optimization, world
        )
    return make(groups, optimization)


@torch.no_grad()
def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that is missing as it is before a parameter's first update.

    All ranks call it, between steps.

    torch makes the state of a parameter with its first gradient, and a checkpoint holds a state for
    all that is trained. An update by nothing at a learning rate of 0 makes it, whatever the
    optimizer; then it is set back to 0.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [p for p in parameters if p not in optimizer.state]
    # under FSDP1 a rank that has nothing of a parameter keeps no state of it once it trains
    if optimizer.state:
        missing = [p for p in missing if local_part(p).numel()]
    if not missing:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in missing:
        parameter.grad = None
        for tensor in optimizer.state.get(parameter, {}).values():
            # torchao's 8 bits are 0
            if isinstance(tensor, Tensor) and not hasattr(local_part(tensor), "codes"):
                tensor.zero_()


def _make_adamw(
    make: Callable[..., torch.optim.Optimizer], groups: Groups, keys: Optimization
) -> torch.optim.Optimizer:
    betas = (keys.adam_beta1, keys.adam_beta2)
    return make(groups, lr=keys.learning_rate, betas=betas, eps=keys.adam_epsilon)


# How each of config/optimization.py is made.
CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], torch.optim.Optimizer]] = {
    "adamw_torch_fused": partial(_make_adamw, partial(torch.optim.AdamW, fused=True)),
    "adamw_torch": partial(_make_adamw, partial(torch.optim.AdamW, fused=False)),
    "adam": partial(_make_adamw, partial(torch.optim.Adam, fused=True)),
    "adamw_bf16_moments": partial(_make_adamw, AdamWBf16Moments),
    "adamw_8bit": lambda groups, keys: _make_adamw(adamw_8bit_moments(), groups, keys),
    "adafactor": lambda groups, keys: Adafactor(groups, lr=keys.learning_rate),
    # foreach, torch's choice on CUDA, would allocate all gradients again to decay weights
    "muon": partial(_make_adamw, Muon),
    "sgd": lambda groups, keys: torch.optim.SGD(groups, lr=keys.learning_rate, foreach=False),
}


def make_parameter_groups(
    model: nn.Module, weight_decay: float, momentum: float | None = None
) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay: matrices decay, vectors do not
    (`NOT_DECAYED`).

    The parameters of a group are sharded over one mesh. `momentum`: Muon's, for groups of layers'
    matrices.
    """
    dims = _count_dims(model)
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (True, False): [],
        (True, True): [],
        (False, False): [],
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = dims[parameter] > 1 and NOT_DECAYED.search(name) is None
            is_muons = momentum is not None and decays and is_layers_matrix(name, parameter.shape)
            kinds[decays, is_muons].append(parameter)
    groups = []
    for (decays, is_muons), of_kind in kinds.items():
        options = {"weight_decay": weight_decay if decays else 0.0}
        if momentum is not None:
            options["momentum"] = momentum if is_muons else 0.0
        groups += [{"params": parameters, **options} for parameters in group_by_mesh(of_kind)]
    return groups


def _count_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """The dimensions of every parameter before sharding.

    FSDP1 flattens parameters, but records their shapes.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    dims = {parameter: parameter.dim() for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, Fsdp1):
            flat: Any = module._flat_param
        else:
            flat = None
        if flat is not None:
            dims |= {
                parameter: len(shape)
                for parameter, shape in zip(flat._params, flat._shapes, strict=True)
            }
    return dims
