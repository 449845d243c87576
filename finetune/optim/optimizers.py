"""Makes a recipe's optimizer and its parameter groups; has the update rules that torch lacks.

torch has no AdamW with bf16 moments, and its Adafactor and Muon do not support sharded tensors.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from finetune.config.facts import has_compiler
from finetune.config.optimization import NOT_DECAYED, OPTIMIZERS, UPDATED_AT_ONCE, is_layers_matrix
from finetune.config.schema import Optimization
from finetune.distributed.gradients import group_by_mesh
from finetune.distributed.model_parts import local_part
from finetune.distributed.world import World
from finetune.optim.offload import OffloadedOptimizer


def load_state_unconverted(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict into `optimizer`, and keeps the dtypes of its tensors.

    torch's own `load_state_dict` would cast them to the dtype of the parameters.
    """
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
        """Updates every parameter that has a gradient. All ranks that share a parameter call it."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)

    load_state_dict = load_state_unconverted

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates a parameter and its state in place; an empty `state` is filled first."""
        raise NotImplementedError


class AdamWBf16Moments(_ByParameter):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with stochastically rounded bf16 moments.

    The state of a parameter is `step` (fp32 scalar), and `exp_avg` and `exp_avg_sq` (bf16, shaped
    and sharded like the parameter). The rounding draws from torch's default generator, which
    `seed_rounding` seeds before each update.
    """

    # Set from outside, as for torch's fused optimizers: a scalar on the device. If it is above 0,
    # parameters and moments do not change.
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None  # also of torch's fused optimizers; not read here

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
    """Imports torchao and returns the class of its AdamW with 8-bit moments (Dettmers et al. 2022).

    The state has 2 bytes for each element, and for each moment a scale for each block of 256.
    """
    from torchao.optim import AdamW8bit

    class AdamW8bitMoments(AdamW8bit):  # type: ignore[misc]
        """torchao's AdamW8bit with numbers as learning rates, like the other optimizers.

        The state of a parameter is `step` (fp32 scalar), `exp_avg` and `exp_avg_sq`, both shaped
        and sharded like the parameter. A moment of a rank's shard is quantized if it has at least
        4096 elements and a multiple of 256; else it is fp32.
        """

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Adds a group whose learning rate stays a number.

            torchao makes it a tensor, which a checkpoint would then have for each parameter.
            """
            rate = param_group.get("lr", self.defaults["lr"])
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = rate

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            """Updates every parameter that has a gradient.

            During the update the learning rates are tensors, because torchao would compile its
            update again for every new number.
            """
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            # torchao compiles its update. On a CPU this takes minutes; without a compiler it fails.
            can_compile = self.param_groups[0]["params"][0].is_cuda and has_compiler()
            with nullcontext() if can_compile else torch.compiler.set_stance("force_eager"):
                super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

        load_state_dict = load_state_unconverted

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            """Makes a moment of `p`, which is fp32 if it is not quantized.

            torchao would use the dtype of `p`, and a second moment in bf16 stops changing.
            """
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
    """Updates a parameter and its moments by AdamW, in place: this rank's shards of them.

    Args:
        parameter: The parameter.
        grad: The parameter's gradient.
        first: The running mean of gradients, bf16.
        second: The running mean of squared gradients, bf16.
        step: The number of this update, from 1.
        settings: The parameter group, with `lr`, `betas`, `eps` and `weight_decay`.
        found_inf: A scalar; if it is above 0, nothing changes. None: always update.
    """
    beta1, beta2 = settings["betas"]
    # Values that change with the step are tensors on the host: numbers would recompile the update.
    rate = torch.tensor(settings["lr"] / (1 - beta1**step))
    decay = torch.tensor(1 - settings["lr"] * settings["weight_decay"])
    correction = torch.tensor((1 - beta2**step) ** -0.5)
    flat_shards = [local_part(tensor).view(-1) for tensor in (parameter, grad, first, second)]
    elements = flat_shards[0].numel()
    if parameter.is_cuda and has_compiler():
        update = _compiled_update()
        length = max(1, elements)
    else:
        update = _update_
        length = UPDATED_AT_ONCE
    for start in range(0, elements, length):
        parts = (shard[start : start + length] for shard in flat_shards)
        update(*parts, rate, decay, correction, found_inf, beta1, beta2, settings["eps"])


@cache
def _compiled_update() -> Callable[..., None]:
    """Returns `_update_` compiled to one kernel, which reads and writes every element once.

    On an 8B model the function without compilation takes ten times as long.
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
    """Computes AdamW's equations in fp32, on flat tensors; updates the first, third and fourth.

    `rate` is the learning rate with the bias correction of the first moment. `decay` is the factor
    of the weights. `correction` is the bias correction of the second moment's square root.
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
    """Rounds fp32 to bf16, up or down at random, so that the expected value is exact.

    A bf16 number is the upper half of an fp32 number. So a random lower half is added, whose carry
    rounds up, and then the lower half is set to 0.
    """
    noise = torch.randint_like(values, 0, 1 << 16, dtype=torch.int32)
    upper_half = (values.view(torch.int32) + noise) & -0x10000
    return upper_half.view(torch.float32).to(torch.bfloat16)


# of Adafactor
SQUARE_EPSILON = 1e-30  # added to the square of the gradient
CLIP_THRESHOLD = 1.0  # the largest root mean square of an update
DECAY_RATE = -0.8  # the newest gradient has the weight step ** DECAY_RATE in the running means


class Adafactor(_ByParameter):
    """Adafactor (Shazeer and Stern 2018, algorithm 4) without relative step sizes.

    The state is fp32. Every parameter has `step` (scalar). A matrix [rows, columns] has
    `exp_avg_sq_row` [rows], sharded like the matrix, and `exp_avg_sq_col` [columns], replicated.
    Any other parameter has `exp_avg_sq`, shaped and sharded like the parameter.
    """

    def __init__(self, params: Iterable[dict[str, Any]] | Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            _make_state(parameter, state)
        state["step"] += 1
        _update_factored(parameter, state, group["lr"], group["weight_decay"])


def _make_state(parameter: Tensor, state: dict[str, Any]) -> None:
    """Puts zeros into `state`, Adafactor's state of a parameter."""
    state["step"] = torch.zeros((), dtype=torch.float32)
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.dim() != 2:
        state["exp_avg_sq"] = zeros
        return
    state["exp_avg_sq_row"] = zeros.sum(dim=1)  # zeros [rows], sharded like the matrix
    state["exp_avg_sq_col"] = torch.zeros(parameter.shape[1], device=local_part(parameter).device)


def _update_factored(
    parameter: Tensor, state: dict[str, Any], rate: float, weight_decay: float
) -> None:
    """Updates this rank's shard of a parameter by Adafactor, in place.

    All ranks that share the parameter call it.
    """
    weights = local_part(parameter)
    grad = local_part(parameter.grad).float()  # type: ignore[arg-type]
    newest = float(state["step"]) ** DECAY_RATE  # the weight of this step in the running means
    square = grad.square().add_(SQUARE_EPSILON)
    if parameter.dim() != 2:
        variance = local_part(state["exp_avg_sq"]).lerp_(square, newest)
        update = variance.rsqrt().mul_(grad)
    else:
        # a matrix is sharded by rows: a column's mean needs the sum over all shards
        row_count = parameter.shape[0]
        row_means = local_part(state["exp_avg_sq_row"])
        column_means = state["exp_avg_sq_col"]
        row_means.lerp_(square.mean(dim=1), newest)
        column_sums = _sum_over_shards(square.sum(dim=0), parameter)
        column_means.lerp_(column_sums / row_count, newest)
        mean_of_rows = _sum_over_shards(row_means.sum(), parameter) / row_count
        update = grad * (row_means / mean_of_rows).rsqrt()[:, None]
        update *= column_means.rsqrt()
    del square  # `update_copies` of config/optimization.py counts what is allocated at once
    mean_square = _sum_over_shards(update.square().sum(), parameter) / parameter.numel()
    root_mean_square = mean_square.sqrt()
    update /= (root_mean_square / CLIP_THRESHOLD).clamp(min=1.0)
    update *= rate
    new_weights = weights.to(torch.float32, copy=True)
    new_weights *= 1 - rate * weight_decay
    new_weights -= update
    weights.copy_(new_weights)


def _sum_over_shards(partial_sum: Tensor, parameter: Tensor) -> Tensor:
    """Sums `partial_sum`, which each rank computed from its shard of `parameter`, over all shards.

    Works in place. The sum is the same on every rank of the parameter's mesh.
    """
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(partial_sum, group=parameter.device_mesh.get_group(dimension))
    return partial_sum


# of Muon
MUON_SCALE = 0.2  # gives an update about the root mean square of an AdamW update
NEWTON_SCHULZ_STEPS = 5
NORM_EPSILON = 1e-7  # the least norm by which a matrix is divided
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial in a Newton-Schulz step


class Muon(torch.optim.AdamW):
    """Orthogonalizes the updates of groups whose `momentum` is above 0; the rest is AdamW.

    A group with momentum has matrices only. The state of a matrix is `momentum_buffer`, shaped and
    sharded like the matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        # Muon's update does not read `found_inf`, so torch's GradScaler must check for it on the
        # host, and skip the step.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. All ranks that share a parameter call it."""
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
        """Updates this rank's shard of a matrix, in place."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights = local_part(parameter)
        buffer = local_part(state["momentum_buffer"])
        gradient = local_part(parameter.grad)  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).bfloat16()  # Nesterov momentum
        if isinstance(parameter, DTensor):
            update = _orthogonalize_shards(update, parameter)
        else:
            update = orthogonalize(update)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(update, alpha=-group["lr"] * MUON_SCALE * max(parameter.shape) ** 0.5)


def _orthogonalize_shards(shard: Tensor, like: DTensor) -> Tensor:
    """Gathers a matrix from the ranks' shards, orthogonalizes it, and returns this rank's shard.

    `like`: a tensor that is sharded like the matrix. All ranks of its mesh call this.
    """
    mesh = like.device_mesh
    sharded = DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    orthogonal = orthogonalize(sharded.full_tensor())
    # every rank has computed the whole matrix: it takes its shard without communication
    return distribute_tensor(orthogonal, mesh, like.placements, src_data_rank=None).to_local()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Brings a matrix's singular values near 1 by a Newton-Schulz iteration.

    bf16[rows, columns] -> bf16[rows, columns].
    """
    rows, columns = matrix.shape
    is_tall = rows > columns
    wide = matrix.T if is_tall else matrix  # so that the Gram matrix is the smaller one
    x: Tensor = wide / wide.norm().clamp(min=NORM_EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.addmm(x, polynomial, x, beta=a)  # a x + polynomial x
    return (x.T if is_tall else x).contiguous()


def seed_rounding(seed: int, step: int, shard_rank: int, parameter: int | None = None) -> None:
    """Seeds stochastic rounding for a step, so that a resumed run rounds in the same way.

    The stages of a pipeline have equal seeds. The first parameter of the first and of the last one
    may be copies of a tied weight, whose moments must be rounded equally.

    Args:
        seed: The run's seed.
        step: The optimizer step.
        shard_rank: An index of this rank's shard. It is the same on all ranks that have this shard,
            so that replicas stay equal.
        parameter: The index of the parameter, if each parameter is updated by itself; None if all
            are updated together.
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
    """Makes the recipe's optimizer over every trainable parameter of `model`.

    Call it after sharding: an optimizer made before would hold parameters on the meta device. All
    ranks call it.

    Args:
        model: The sharded model.
        optimization: The recipe's section.
        world: The ranks; required with `optim_offload: nvme`, whose state is in a file of each.

    Raises:
        UserError: On all ranks, if these files cannot be made.
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
            model,
            groups,
            lambda inner_groups: make(inner_groups, optimization),
            optimization,
            world,
        )
    return make(groups, optimization)


@torch.no_grad()
def complete_state(optimizer: Optimizer) -> None:
    """Gives each parameter that has no state the state it has before its first update.

    torch makes a parameter's state at its first gradient, but a checkpoint has a state for every
    trained parameter. All ranks call it, between steps. One parameter follows the other, so that
    the gradients of all are never in memory together.
    """
    if isinstance(optimizer, torch.optim.SGD):  # keeps no state
        return
    had_state = bool(optimizer.state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Under FSDP1 a rank may have no element of a parameter, and after an update no state
            # for it.
            is_empty = had_state and not parameter.numel()
            if parameter not in optimizer.state and not is_empty:
                _give_state(optimizer, parameter, group)


def _give_state(optimizer: Optimizer, parameter: Tensor, group: dict[str, Any]) -> None:
    """Makes the state of `parameter`, which is of `group`.

    In any optimizer, an update with gradient 0 and learning rate 0 makes the state, which is then
    set to 0.
    """
    parameter.grad = torch.zeros_like(parameter)
    with only_group(optimizer, group | {"params": [parameter], "lr": 0.0}):
        optimizer.step()
    parameter.grad = None
    for tensor in optimizer.state.get(parameter, {}).values():
        # torchao's 8-bit tensors are 0 after such an update, and cannot be filled
        if isinstance(tensor, Tensor) and not hasattr(local_part(tensor), "codes"):
            tensor.zero_()


@contextmanager
def only_group(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[None]:
    """In this block `optimizer` has only this group, since a step visits all groups it has."""
    all_groups = optimizer.param_groups
    optimizer.param_groups = [group]
    try:
        yield
    finally:
        optimizer.param_groups = all_groups


def _make_adamw(make: Callable[..., Optimizer], groups: Groups, keys: Optimization) -> Optimizer:
    """Makes an optimizer with AdamW's arguments, by the class or function `make`."""
    betas = (keys.adam_beta1, keys.adam_beta2)
    return make(groups, lr=keys.learning_rate, betas=betas, eps=keys.adam_epsilon)


# the name of an optimizer in config/optimization.py -> a function that makes the optimizer
CONSTRUCTORS: Mapping[str, Callable[[Groups, Optimization], Optimizer]] = {
    "adamw_torch_fused": partial(_make_adamw, partial(torch.optim.AdamW, fused=True)),
    "adamw_torch": partial(_make_adamw, partial(torch.optim.AdamW, fused=False)),
    "adam": partial(_make_adamw, partial(torch.optim.Adam, fused=True)),
    "adamw_bf16_moments": partial(_make_adamw, AdamWBf16Moments),
    "adamw_8bit": lambda groups, keys: _make_adamw(adamw_8bit_moments(), groups, keys),
    "adafactor": lambda groups, keys: Adafactor(groups, lr=keys.learning_rate),
    "muon": partial(_make_adamw, Muon),
    # foreach, torch's default on CUDA, would allocate all gradients again for weight decay
    "sgd": lambda groups, keys: torch.optim.SGD(groups, lr=keys.learning_rate, foreach=False),
}


def make_parameter_groups(
    model: nn.Module, weight_decay: float, momentum: float | None = None
) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay, momentum and mesh.

    Weights of matrices decay. Vectors, and parameters whose names match NOT_DECAYED, do not.

    Args:
        model: The sharded model.
        weight_decay: The weight decay of matrices.
        momentum: Muon's momentum, for the matrices of layers; None for other optimizers.

    Returns:
        The groups, with `params` and `weight_decay`. With Muon they also have `momentum`, which is
        0 in AdamW's groups.
    """
    dims = _count_dims(model)
    muon_matrices: list[nn.Parameter] = []
    other_matrices: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if dims[parameter] <= 1 or NOT_DECAYED.search(name):
            not_decayed.append(parameter)
        elif momentum is not None and is_layers_matrix(name, parameter.shape):
            muon_matrices.append(parameter)
        else:
            other_matrices.append(parameter)
    groups = []
    for members, group_decay, group_momentum in (
        (other_matrices, weight_decay, 0.0),
        (muon_matrices, weight_decay, momentum),
        (not_decayed, 0.0, 0.0),
    ):
        options: dict[str, Any] = {"weight_decay": group_decay}
        if momentum is not None:
            options["momentum"] = group_momentum
        groups += [{"params": parameters, **options} for parameters in group_by_mesh(members)]
    return groups


def _count_dims(model: nn.Module) -> dict[nn.Parameter, int]:
    """Returns each parameter -> the number of its dimensions before sharding.

    FSDP1 flattens parameters, but records their shapes.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    dims = {parameter: parameter.dim() for parameter in model.parameters()}
    for module in model.modules():
        flat_parameter: Any = module._flat_param if isinstance(module, Fsdp1) else None
        if flat_parameter is not None:
            shapes = zip(flat_parameter._params, flat_parameter._shapes, strict=True)
            for parameter, shape in shapes:
                dims[parameter] = len(shape)
    return dims
