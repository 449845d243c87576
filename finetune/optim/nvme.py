"""An optimizer with its state in a file of each rank, as ZeRO-Infinity's (Rajbhandari et al. 2021), under FSDP2.

Moments, and fp32 master weights where the model computes in another dtype, are read into one buffer, updated there and
written back, while what was in the other buffer is written and what comes next is read into it. A buffer holds a window
of the state: parameters in the order of the optimizer, as many bytes as the largest decoder layer has. Each update is
made by the optimizer that would make it in memory, in the same order: bit for bit the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import clean_tensor_name

from finetune.config.optimization import OPTIMIZERS, count_offloaded_bytes
from finetune.config.schema import Optimization
from finetune.constants import COMPUTE_DTYPE
from finetune.distributed.model_parts import decoder_layers, unwrap
from finetune.distributed.parallelize import list_groups, local_part
from finetune.distributed.world import RankGroup, World
from finetune.optim.scratch_file import ScratchFile, align, allocate_aligned, open_scratch_file


@torch.no_grad()
def take_master_weights(model: nn.Module, dtype: torch.dtype, take: Callable[[nn.Parameter], object]) -> None:
    """Hands every trained parameter of another dtype than `dtype` to `take`, then casts it to `dtype`.

    One after another, so that no two copies of the model exist. What FSDP2 gathers is bit for bit what it would have
    cast from the fp32 shard, and a gradient keeps the dtype that it had. Call it before the first forward.
    """
    for group in _groups_of(model):
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


def _groups_of(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each once: a group may lie over several modules."""
    seen: set[int] = set()
    for module in model.modules():
        for group in list_groups(module) if isinstance(module, FSDPModule) else ():
            if id(group) not in seen:
                seen.add(id(group))
                yield group


CHUNK_BYTES = 8 << 20  # of a tensor that a checkpoint reads or fills, in memory at once
MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"
ON_HOST = torch.device("cpu")


class OffloadedTensor:
    """An optimizer state tensor at `offset` in this rank's file. `layout`: the parameter, sharded alike.

    A checkpoint treats it as the rank's tensor, but for its values, which come in `chunks`.
    """

    def __init__(self, file: ScratchFile, offset: int, layout: nn.Parameter, dtype: torch.dtype) -> None:
        self.layout: Any = layout
        self.dtype, self.shape = dtype, local_part(layout.detach()).shape
        self._file, self._offset = file, offset

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        """Numbers in this rank's part."""
        return prod(self.shape)

    def within(self, memory: Tensor, start: int) -> Tensor:
        """This rank's part in `memory` (uint8), which holds the file's bytes from `start` on."""
        first = self._offset - start
        return memory[first : first + self.nbytes].view(self.dtype).view(self.shape)

    def chunks(self) -> Iterator[Tensor]:
        """The values, flat, at most CHUNK_BYTES at once. Each chunk overwrites the one before."""
        memory = allocate_aligned(min(CHUNK_BYTES, self.nbytes), ON_HOST)
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - start)
            self._file.read(self._offset + start, memory[: align(size)])
            yield memory[:size].view(self.dtype)

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Replaces this rank's part by `values`; of a master weight also what the model computes with."""
        flat = values.detach().to(ON_HOST, self.dtype).contiguous().view(-1).view(torch.uint8)
        memory = allocate_aligned(min(CHUNK_BYTES, self.nbytes), ON_HOST)
        for start in range(0, self.nbytes, CHUNK_BYTES):
            part = flat[start : start + CHUNK_BYTES]
            memory[: len(part)].copy_(part)
            self._file.write(self._offset + start, memory[: align(len(part))])


class MasterWeight(OffloadedTensor):
    """The fp32 weight behind a parameter in the compute dtype."""

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        super().copy_(values)
        local_part(self.layout).copy_(values)  # rounded as FSDP2 would round the fp32 weight to gather it


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter. `group`: the index of its parameter group."""

    name: str
    parameter: nn.Parameter
    group: int
    tensors: Mapping[str, OffloadedTensor]  # MASTER, where the model computes in another dtype, FIRST and SECOND


@dataclass(frozen=True, slots=True)
class StateWindow:
    """Entries that are in memory together; in the file one after another, from `offset` on."""

    offset: int
    nbytes: int
    entries: tuple[ParameterState, ...]


class StateLayout:
    """How the state of a sharded model's trained parameters lies in the file of this rank: in the order of the
    optimizer's `groups`. `moment_dtype`: None for that of the parameter; `compute_dtype`: what the model computes in.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        moment_dtype: torch.dtype | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self._names = {parameter: clean_tensor_name(name) for name, parameter in model.named_parameters()}
        units, by_unit = _find_layers(model), dict[str, int]()
        self._placed: list[tuple[nn.Parameter, int, dict[str, torch.dtype], int]] = []
        for group, settings in enumerate(groups):
            for parameter in settings["params"]:
                moment = moment_dtype or parameter.dtype
                masters = {MASTER: parameter.dtype} if parameter.dtype != compute_dtype else {}
                dtypes = masters | {FIRST: moment, SECOND: moment}
                numel = local_part(parameter.detach()).numel()
                size = count_offloaded_bytes(numel, (dtype.itemsize for dtype in dtypes.values()))
                self._placed.append((parameter, group, dtypes, size))
                unit = units.get(parameter, self._names[parameter])
                by_unit[unit] = by_unit.get(unit, 0) + size
        self.size, self.capacity = sum(by_unit.values()), max(by_unit.values())

    def windows(self, file: ScratchFile) -> tuple[StateWindow, ...]:
        """The windows of `file`, each within `capacity`: the largest decoder layer, or parameter outside of one."""
        found: list[StateWindow] = []
        entries: list[ParameterState] = []
        begin = offset = 0
        for parameter, group, dtypes, size in self._placed:
            if entries and offset + size - begin > self.capacity:
                found.append(StateWindow(begin, offset - begin, tuple(entries)))
                entries, begin = [], offset
            tensors, place = {}, offset
            for role, dtype in dtypes.items():
                kind = MasterWeight if role == MASTER else OffloadedTensor
                tensors[role] = kind(file, place, parameter, dtype)
                place += align(tensors[role].nbytes)
            entries.append(ParameterState(self._names[parameter], parameter, group, tensors))
            offset += size
        return (*found, StateWindow(begin, offset - begin, tuple(entries)))


def _find_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """The decoder layer of each parameter that is in one."""
    layers = decoder_layers(model)
    return {
        parameter: name
        for name, module in model.named_modules()
        if module in layers
        for parameter in module.parameters()
    }


MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer that `make` makes, over the trained parameters of an FSDP2 `model`. All ranks call it alike.

    `groups`: its parameter groups. Trained parameters are from here on in the compute dtype. State in memory of each:
    `step` (fp32 scalar). The rest is in the rank's file, which ends with the process: only a checkpoint outlives it.

    Raises `UserError` on all ranks where `offload_dir` of one cannot be written, or its disk has too little space.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        make: MakeOptimizer,
        optimization: Optimization,
        world: World,
    ) -> None:
        super().__init__(groups, {"lr": optimization.learning_rate})
        self._ranks = RankGroup(world)
        self._inner = make([group | {"params": [nn.Parameter(torch.empty(0))]} for group in groups])
        for group in self._inner.param_groups:
            if "foreach" in group:  # in memory torch does not choose it for sharded tensors, but would for these
                group["foreach"] = False
        self._settings = self._inner.param_groups
        trained = groups[0]["params"][0]
        mixed = world.sharding.mixed_precision
        compute_dtype = trained.dtype if mixed == "no" else getattr(torch, COMPUTE_DTYPE[mixed])
        moment_dtype = torch.bfloat16 if OPTIMIZERS[optimization.optim].moment_itemsize == 2 else None
        layout = StateLayout(unwrap(model), self.param_groups, moment_dtype, compute_dtype)
        opened: list[ScratchFile] = []
        folder = Path(optimization.offload_dir or "")
        self._ranks.on_all(lambda: opened.append(open_scratch_file(folder, layout.size)))
        (self.file,) = opened
        self.windows, self.capacity = layout.windows(self.file), layout.capacity
        self.buffers = [allocate_aligned(self.capacity, world.device) for _ in range(2)]
        # A GPU's parameters are updated there, as they are in memory: another processor rounds otherwise.
        on_gpu = trained.device.type != "cpu"
        self._staging = torch.empty(self.capacity, dtype=torch.uint8, device=trained.device) if on_gpu else None
        # One thread: a buffer is written before the next window is read into it.
        self._io = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        entries = [entry for window in self.windows for entry in window.entries]
        masters = {entry.parameter: entry.tensors[MASTER] for entry in entries if MASTER in entry.tensors}
        self._ranks.on_all(
            lambda: take_master_weights(model, compute_dtype, lambda weight: masters[weight].copy_(local_part(weight)))
        )
        step_device = trained.device if self._inner.defaults.get("fused") else torch.device("cpu")
        for entry in entries:
            self.state[entry.parameter]["step"] = torch.zeros((), dtype=torch.float32, device=step_device)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. Raises `UserError` on all ranks where the disk of one fails."""
        assert closure is None, "closures are not supported"
        self._ranks.on_all(self._update_all)

    def master_weights(self) -> dict[str, OffloadedTensor]:
        """The fp32 weights behind the parameters, by the parameters' names; empty where these are their own."""
        return self._list_tensors(lambda entry: {entry.name: entry.tensors[MASTER]} if MASTER in entry.tensors else {})

    def moments(self) -> dict[str, OffloadedTensor | Tensor]:
        """The rest of the state, named as torch's flat optimizer state: `state.<parameter>.exp_avg` and so on."""
        return self._list_tensors(
            lambda entry: {
                **{f"state.{entry.name}.{name}": entry.tensors[name] for name in (FIRST, SECOND)},
                f"state.{entry.name}.step": self.state[entry.parameter]["step"],
            }
        )

    def _list_tensors(self, of: Callable[[ParameterState], dict[str, Any]]) -> dict[str, Any]:
        return {
            name: tensor for window in self.windows for entry in window.entries for name, tensor in of(entry).items()
        }

    @torch.no_grad()
    def _update_all(self) -> None:
        """One pass over the file: while a window is updated, the one before it is written and the one after it read."""
        following = self._io.submit(self._read, 0)
        written: list[Future[None]] = []
        try:
            for index, window in enumerate(self.windows):
                following.result()
                if index + 1 < len(self.windows):
                    following = self._io.submit(self._read, index + 1)
                event = self._update(window, self.buffers[index % 2])
                written.append(self._io.submit(self._write, index, event))
        finally:  # what is still under way uses the buffers
            failures = [each.exception() for each in (following, *written)]
        for failure in failures:
            if failure is not None:
                raise failure

    def _read(self, index: int) -> None:
        window = self.windows[index]
        self.file.read(window.offset, self.buffers[index % 2][: window.nbytes])

    def _write(self, index: int, event: Any) -> None:
        if event is not None:
            event.synchronize()
        window = self.windows[index]
        self.file.write(window.offset, self.buffers[index % 2][: window.nbytes])

    def _update(self, window: StateWindow, buffer: Tensor) -> Any:
        """Updates what `buffer` holds, and the parameters. Returns the event that ends it; None: it has ended."""
        memory = buffer[: window.nbytes]
        if self._staging is not None:
            memory = self._staging[: window.nbytes].copy_(memory, non_blocking=True)
        for index, group in enumerate(self.param_groups):
            self._update_group(
                group, index, [entry for entry in window.entries if entry.group == index], memory, window
            )
        if self._staging is None:
            return None
        buffer[: window.nbytes].copy_(memory, non_blocking=True)
        return torch.cuda.current_stream(memory.device).record_event()

    def _update_group(
        self, group: dict[str, Any], index: int, entries: list[ParameterState], memory: Tensor, window: StateWindow
    ) -> None:
        """The inner optimizer's step over `entries`, whose state is in `memory`."""
        updated: list[tuple[Tensor, nn.Parameter]] = []
        inner = self._inner
        for entry in entries:
            if entry.parameter.grad is None:
                continue
            views = {name: tensor.within(memory, window.offset) for name, tensor in entry.tensors.items()}
            weight = views.pop(MASTER, None)
            if weight is None:
                weight = local_part(entry.parameter).detach()
            weight.grad = local_part(entry.parameter.grad)
            inner.state[weight] = {"step": self.state[entry.parameter]["step"], **views}
            updated.append((weight, entry.parameter))
        if not updated:
            return
        settings = {"lr": group["lr"], "params": [weight for weight, _ in updated]}
        inner.param_groups = [self._settings[index] | settings]
        inner.step()
        for weight, parameter in updated:
            local_part(parameter).copy_(weight)
        inner.state.clear()  # it would keep the gradients
        inner.param_groups = self._settings
