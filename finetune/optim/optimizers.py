"""The optimizers of a recipe: how each is made, their parameter groups, and update rules that torch
lacks.

Torch has no AdamW with bf16 moments. Its Adafactor and Muon do not support sharded tensors.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from finetune.config.facts import has_compiler
from finetune.config.optimization import NOT_DECAYED, OPTIMIZERS, is_layers_matrix
from finetune.config.schema import Optimization
from finetune.distributed.gradients import group_by_mesh
from finetune.distributed.model_parts import local_part
from finetune.distributed.world import World
from finetune.optim.offload import OffloadedOptimizer

# The elements that an update without a compiler does at once: bounds each fp32 temporary to 64 MiB.
SLICE = 1 << 24


def load_state_unconverted(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict into `optimizer` without casting its tensors, as torch would."""
    groups: list[dict[str, Any]] = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        groups.append(saved | {"params": group["params"]})
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                optimizer.state[parameter] = dict(state_dict["state"][index])
    optimizer.param_groups = groups


class _ByParameter(Optimizer):
    """An optimizer that updates one parameter after another by `_update`."""

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
    like the parameter). The rounding draws from torch's default generator, which `seed_rounding`
    seeds before each update. Where `found_inf` (a scalar on the device, as in torch's fused
    optimizers) is not 0, parameters and moments do not change.
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
def adamw_8bit_moments() -> type[Optimizer]:
    """Imports torchao, and returns its AdamW with 8-bit moments (Dettmers et al. 2022).

    The state has 2 bytes for each element, and a scale for each moment's block of 256.
    """
    from torchao.optim import AdamW8bit

    class AdamW8bitMoments(AdamW8bit):  # type: ignore[misc]
        """torchao's AdamW8bit with numbers as learning rates, like the other optimizers.

        State of a parameter: `step` (fp32 scalar), `exp_avg` and `exp_avg_sq`, shaped and sharded
        like the parameter. A rank's shard is quantized if its number of elements is at least 4096
        and a multiple of 256; else it is fp32.
        """

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Keeps the rate a number: checkpoints would have a tensor for each parameter."""
            rate = param_group.get("lr", self.defaults["lr"])
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = rate

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            """Updates every parameter with a gradient.

            Meanwhile the rates are tensors: a number would recompile the update at every step.
            """
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            # torchao compiles its update. On a CPU that takes minutes, without a compiler it fails.
            compiles = self.param_groups[0]["params"][0].is_cuda and has_compiler()
            with nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
                super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

        load_state_dict = load_state_unconverted

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            # fp32 where it is not quantized. torchao would take the parameter's dtype, and a second
            # moment in bf16 stops changing.
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
    found_inf: Tensor | None,
) -> None:
    """Updates a parameter and its moments in place; of a sharded one this rank's shard.

    Args:
        parameter: The parameter.
        grad: Its gradient.
        first: The running mean of gradients, bf16.
        second: The running mean of squared gradients, bf16.
        step: The number of this update, from 1.
        settings: The parameter group, with `lr`, `betas`, `eps` and `weight_decay`.
        found_inf: Where it is above 0, nothing changes.
    """
    beta1, beta2 = settings["betas"]
    # Values that change with the step are tensors on the host: numbers would recompile the update.
    rate = torch.tensor(settings["lr"] / (1 - beta1**step))
    decay = torch.tensor(1 - settings["lr"] * settings["weight_decay"])
    correction = torch.tensor((1 - beta2**step) ** -0.5)
    flat = [local_part(each).view(-1) for each in (parameter, grad, first, second)]
    update = _update_
    length = SLICE
    if parameter.is_cuda and has_compiler():
        update = _compiled_update()
        length = max(1, flat[0].numel())
    for start in range(0, flat[0].numel(), length):
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
    """Returns `_update_` as one kernel, which reads and writes every element once.

    On an 8B model the plain function takes ten times as long.
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
    """Computes AdamW's equations in fp32, on flat tensors.

    `rate` includes the bias correction of the first moment, `correction` is that of the second.
    """
    gradient = grad.float()
    mean = first.float().lerp(gradient, 1 - beta1)
    variance = second.float().lerp(gradient * gradient, 1 - beta2)
    moved = parameter.float() * decay - rate * mean / (variance.sqrt() * correction + eps)
    rounded = moved.to(parameter.dtype)
    changes = (rounded, round_stochastically(mean), round_stochastically(variance))
    for old, new in zip((parameter, first, second), changes, strict=True):
        old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


def round_stochastically(values: Tensor) -> Tensor:
    """Rounds fp32 to bf16, up or down with the probability that makes the mean exact.

    bf16 is the upper half of an fp32. A random lower half is added, and its carry rounds up.
    """
    noise = torch.randint_like(values, 0, 1 << 16, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(torch.bfloat16)


SQUARE_EPSILON = 1e-30  # added to the square of the gradient
CLIP_THRESHOLD = 1.0  # the largest root mean square of an update
DECAY_RATE = -0.8


class Adafactor(_ByParameter):
    """Adafactor (Shazeer and Stern 2018, algorithm 4) without relative step sizes.

    State of a parameter: `step` (scalar). A matrix [rows, columns] has `exp_avg_sq_row` [rows],
    sharded like the matrix, and `exp_avg_sq_col` [columns], replicated. Any other parameter has
    `exp_avg_sq`, shaped and sharded like the parameter. All are fp32.
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
    """Fills Adafactor's `state` of a parameter with zeros."""
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
    """Updates a parameter by Adafactor in place; of a sharded one this rank's shard."""
    weights = local_part(parameter)
    grad = local_part(parameter.grad).float()  # type: ignore[arg-type]
    newest = float(state["step"]) ** DECAY_RATE  # the weight of this step in the running means
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
    mean_square = _sum_over_shards(update.square().sum(), parameter) / parameter.numel()
    root_mean_square = mean_square.sqrt()
    update /= (root_mean_square / CLIP_THRESHOLD).clamp(min=1.0)
    moved = weights.float() * (1 - rate * weight_decay) - rate * update
    weights.copy_(moved.to(weights.dtype))


def _sum_over_shards(part: Tensor, parameter: Tensor) -> Tensor:
    """Sums `part`, which each rank computed from its shard of `parameter`, over all shards.

    The sum is in place, and the same on every rank of the parameter's mesh.
    """
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(part, group=parameter.device_mesh.get_group(dimension))
    return part


MUON_SCALE = 0.2  # gives an update the root mean square of AdamW's
NEWTON_SCHULZ_STEPS = 5
NORM_EPSILON = 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.AdamW):
    """Orthogonalizes the updates of groups with a `momentum` above 0; the others are AdamW's.

    State of a matrix: `momentum_buffer`, shaped and sharded like the matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        # Muon's update does not read `found_inf`: torch's GradScaler is to ask on the host.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks of its shards call it."""
        assert closure is None, "closures are not supported"
        groups = self.param_groups
        for group in groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if not group["momentum"]]
        try:
            super().step()  # AdamW's groups
        finally:
            self.param_groups = groups

    load_state_dict = load_state_unconverted

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Updates a matrix in place; of a sharded one this rank's shard."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights = local_part(parameter)
        buffer = local_part(state["momentum_buffer"])
        gradient = local_part(parameter.grad)  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).bfloat16()  # Nesterov's
        if isinstance(parameter, DTensor):
            update = _orthogonalize_shards(update, parameter)
        else:
            update = orthogonalize(update)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(update, alpha=-group["lr"] * MUON_SCALE * max(parameter.shape) ** 0.5)


def _orthogonalize_shards(shard: Tensor, like: DTensor) -> Tensor:
    """Gathers a matrix from the ranks' shards, orthogonalizes it, and returns this rank's shard.

    like: A tensor that is sharded alike.
    """
    mesh = like.device_mesh
    sharded = DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    update = orthogonalize(sharded.full_tensor())
    return distribute_tensor(update, mesh, like.placements, src_data_rank=None).to_local()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Brings a matrix's singular values near 1 by a Newton-Schulz iteration.

    Args:
        matrix: [rows, columns], bf16.

    Returns:
        [rows, columns], bf16.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    update = matrix.T if is_tall else matrix
    update = update / update.norm().clamp(min=NORM_EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = update @ update.T
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return (update.T if is_tall else update).contiguous()


def seed_rounding(seed: int, step: int, shard_rank: int, parameter: int | None = None) -> None:
    """Seeds stochastic rounding for a step, so that a resumed run rounds alike.

    Args:
        seed: The run's seed.
        step: The optimizer step.
        shard_rank: Equal on ranks with the same shard, whose replicas would differ otherwise.
        parameter: The index of the only parameter that is updated; None: all are updated.
    """
    text = f"{seed}/{step}/rounding/{shard_rank}"
    if parameter is not None:
        text += f"/{parameter}"
    seed_from(text)


def seed_from(text: str) -> None:
    """Seeds torch's default generators by a hash of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


Groups = list[dict[str, Any]]


def build_optimizer(
    model: nn.Module, optimization: Optimization, world: World | None = None
) -> Optimizer:
    """Makes the recipe's optimizer over every trainable parameter of the sharded `model`.

    Call it after sharding: an optimizer made before would update parameters on the meta device.

    Args:
        model: The model.
        optimization: The recipe's section.
        world: This rank's place; needed where the state is in files.

    Raises:
        UserError: On all ranks, where these files cannot be made.
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
def complete_state(optimizer: Optimizer) -> None:
    """Makes the state of parameters without one, as it is before their first update.

    torch makes the state of a parameter with its first gradient, but a checkpoint has a state for
    every trained parameter. In any optimizer an update with gradient 0 and learning rate 0 makes
    it. Then the state is set to 0. All ranks call it, between steps.
    """
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    missing = [each for each in parameters if each not in optimizer.state]
    # under FSDP1 a training rank has no state for parameters of which it has no element
    if optimizer.state:
        missing = [each for each in missing if each.numel()]
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
            # torchao's 8-bit tensors are 0, and cannot be filled
            if isinstance(tensor, Tensor) and not hasattr(local_part(tensor), "codes"):
                tensor.zero_()


def _make_adamw(make: Callable[..., Optimizer], groups: Groups, keys: Optimization) -> Optimizer:
    betas = (keys.adam_beta1, keys.adam_beta2)
    return make(groups, lr=keys.learning_rate, betas=betas, eps=keys.adam_epsilon)


# The name of an optimizer in config/optimization.py -> the function that makes it.
CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], Optimizer]] = {
    "adamw_torch_fused": partial(_make_adamw, partial(torch.optim.AdamW, fused=True)),
    "adamw_torch": partial(_make_adamw, partial(torch.optim.AdamW, fused=False)),
    "adam": partial(_make_adamw, partial(torch.optim.Adam, fused=True)),
    "adamw_bf16_moments": partial(_make_adamw, AdamWBf16Moments),
    "adamw_8bit": lambda groups, keys: _make_adamw(adamw_8bit_moments(), groups, keys),
    "adafactor": lambda groups, keys: Adafactor(groups, lr=keys.learning_rate),
    # torch's default on CUDA, foreach, would allocate all gradients again to decay weights
    "muon": partial(_make_adamw, Muon),
    "sgd": lambda groups, keys: torch.optim.SGD(groups, lr=keys.learning_rate, foreach=False),
}


def make_parameter_groups(
    model: nn.Module, weight_decay: float, momentum: float | None = None
) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay, momentum and mesh.

    Matrices decay, vectors (`NOT_DECAYED`) do not.

    Args:
        model: The sharded model.
        weight_decay: That of matrices.
        momentum: Muon's, for the matrices of layers; None: no group has one.

    Returns:
        The groups, with `params`, `weight_decay` and, unless None, `momentum`.
    """
    dims = _count_dims(model)
    decaying: list[nn.Parameter] = []
    muons: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if dims[parameter] <= 1 or NOT_DECAYED.search(name):
            others.append(parameter)
        elif momentum is not None and is_layers_matrix(name, parameter.shape):
            muons.append(parameter)
        else:
            decaying.append(parameter)
    groups = []
    for members, decay, muons_momentum in (
        (decaying, weight_decay, 0.0),
        (muons, weight_decay, momentum),
        (others, 0.0, 0.0),
    ):
        options: dict[str, Any] = {"weight_decay": decay}
        if momentum is not None:
            options["momentum"] = muons_momentum
        groups += [{"params": parameters, **options} for parameters in group_by_mesh(members)]
    return groups


def _count_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """Counts the dimensions that every parameter had before sharding.

    FSDP1 flattens parameters, but records their shapes.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    dims = {parameter: parameter.dim() for parameter in model.parameters()}
    for module in model.modules():
        flat: Any = module._flat_param if isinstance(module, Fsdp1) else None
        if flat is not None:
            for parameter, shape in zip(flat._params, flat._shapes, strict=True):
                dims[parameter] = len(shape)
    return dims
