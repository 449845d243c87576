"""An optimizer under FSDP2 with its state in a file of each rank, as in ZeRO-Infinity (Rajbhandari
et al. 2021).

The state is the moments, and fp32 master weights where the model computes in another dtype. It is
divided into windows in the order of the optimizer's parameters; the largest decoder layer gives
their size. There are two buffers. While the window in one buffer is updated, the other buffer is
written to the file, and the next window is read into it. The optimizer that would update the
parameters in memory updates them here, in the same order. The results are equal bit for bit.

The file has no name: the system frees it when its process ends, even if that is killed. Requests
bypass the page cache (open(2), O_DIRECT) where the file system can. Elsewhere the cached pages are
dropped after each request, because they would take the memory that offloading saves.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from finetune.config.optimization import OPTIMIZERS, count_offloaded_bytes
from finetune.config.schema import Optimization
from finetune.constants import COMPUTE_DTYPE, OFFLOAD_ALIGNMENT, round_up
from finetune.distributed.model_parts import decoder_layers, local_part, unwrap
from finetune.distributed.parallelize import take_master_weights
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError
from finetune.files.durable import try_writing
from finetune.units import counted, disk_size

T = TypeVar("T")
REQUEST_BYTES = 8 << 20
REQUESTS = 4  # requests in flight; an NVMe disk would wait after a single one


def align(byte_count: int) -> int:
    """Rounds up to a multiple of OFFLOAD_ALIGNMENT.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return round_up(byte_count, OFFLOAD_ALIGNMENT)


TOUCHING_THREADS = 8
TOUCHED_BYTES = 64 * 1024 * 1024  # that a thread clears at once


def allocate_aligned(byte_count: int, device: torch.device) -> Tensor:
    """Allocates host memory for direct requests, pinned for a GPU.

    torch's pinned allocator would round up to a power of two.

    Returns:
        uint8[bytes], aligned, and at least `byte_count` rounded up by `align`.
    """
    size = max(align(byte_count), OFFLOAD_ALIGNMENT)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        # On the host of an H200 existing pages are pinned at 16 GiB/s, others at 2.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
            list(threads.map(Tensor.zero_, torch.split(memory, TOUCHED_BYTES)))
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # if this fails, copies are only slower
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return memory


def check_scratch_folder(folder: Path, needed: int, ranks: int) -> None:
    """Raises `UserError` where a folder cannot hold the files of the optimizer's state.

    It cannot if it is not writable, is in host memory, or has too little space. It may be missing,
    but its parent may not: that is a typing error. Nothing is left in the folder.

    Args:
        folder: The folder.
        needed: The bytes of all files in it.
        ranks: The number of ranks with a file in it.
    """
    if not folder.exists() and not folder.absolute().parent.exists():
        raise UserError(
            f"offload_dir: {folder}: no such folder, nor one to make it in; make {folder.parent}, "
            "or correct the path"
        )
    try:
        existing = try_writing(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    kind = _find_filesystem(existing)
    if kind in ("tmpfs", "ramfs"):
        raise UserError(
            f"offload_dir: {folder}: a {kind}, which is host memory; name a folder on a disk"
        )
    if needed > shutil.disk_usage(existing).free:
        raise _too_small(existing, needed, ranks)


def open_scratch_file(folder: Path, size: int) -> "ScratchFile":
    """Makes a file of `size` bytes in `folder`, which is made if missing.

    Raises `UserError` if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ScratchFile(folder, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(folder, size, 1) from None
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"offload_dir: {folder}: cannot be written ({error.strerror}); name another folder"
    )


def _too_small(folder: Path, needed: int, ranks: int) -> UserError:
    free = disk_size(shutil.disk_usage(folder).free)
    return UserError(
        f"offload_dir: {folder}: the optimizer's state of {counted(ranks, 'rank')} takes "
        f"{disk_size(needed)}, but {free} are free there; make room, name a larger disk, or launch "
        "on more nodes"
    )


def _find_filesystem(folder: Path) -> str:
    """Returns the type of the file system of `folder`, such as ext4, or "unknown"."""
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    for path in (resolved, *resolved.parents):
        if path in mounts:
            return str(mounts[path])
    return "unknown"


class ScratchFile:
    """A file of `size` bytes in `folder`, filled with zeros.

    All offsets and lengths are multiples of OFFLOAD_ALIGNMENT. Raises `OSError` where the folder
    cannot be written, or the disk has too little space.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        # `posix_fallocate` would fill the disk before it fails
        if size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        # stays open until the process ends
        self._file = self._with_place(lambda: tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
        self._descriptor = self._file.fileno()
        if size:
            self._with_place(lambda: os.posix_fallocate(self._descriptor, 0, size))
        self.is_direct = _make_direct(self._descriptor)
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS, thread_name_prefix="offload")

    def read(self, offset: int, into: Tensor) -> None:
        """Fills `into` (uint8, from `allocate_aligned`) with the file's bytes from `offset` on."""
        self._with_place(lambda: self._request(os.preadv, offset, into))

    def write(self, offset: int, values: Tensor) -> None:
        """Writes `values` (uint8, from `allocate_aligned`) to the file at `offset`."""
        self._with_place(lambda: self._request(os.pwritev, offset, values))
        if not self.is_direct:
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, offset, values.nbytes, os.POSIX_FADV_DONTNEED)

    def _request(
        self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: Tensor
    ) -> None:
        """Moves `memory` by several requests at once. `call`: `os.preadv` or `os.pwritev`."""
        view = memory.numpy().data

        def move(start: int) -> None:
            part = view[start : start + REQUEST_BYTES]
            place = offset + start
            while part:
                moved = call(self._descriptor, [part], place)
                if moved == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                part = part[moved:]
                place = place + moved

        list(self._pool.map(move, range(0, len(view), REQUEST_BYTES)))
        if call is os.preadv and not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)

    def _with_place(self, action: Callable[[], T]) -> T:
        """Returns the result of `action`. An `OSError` gets the folder as its file name."""
        try:
            return action()
        except OSError as error:
            error.filename = str(self.folder / "(a file without a name)")
            raise


def _make_direct(descriptor: int) -> bool:
    """Makes requests bypass the page cache; returns whether the file system can (tmpfs cannot)."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


CHUNK_BYTES = 8 << 20  # the part of a tensor in memory while a checkpoint reads or fills it
MASTER = "master"
FIRST = "exp_avg"
SECOND = "exp_avg_sq"
ON_HOST = torch.device("cpu")


class OffloadedTensor:
    """This rank's shard of a tensor of the optimizer's state, at `offset` in the rank's file.

    A checkpoint treats it like a tensor, but reads its values in `chunks`.

    layout: The parameter, which is sharded alike.
    """

    def __init__(
        self, file: ScratchFile, offset: int, layout: nn.Parameter, dtype: torch.dtype
    ) -> None:
        self.layout: Any = layout
        self.dtype = dtype
        self.shape = local_part(layout.detach()).shape
        self._file = file
        self._offset = offset

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        """The number of elements in this rank's shard."""
        return prod(self.shape)

    def within(self, memory: Tensor, start: int) -> Tensor:
        """Returns the view of the shard in `memory` (uint8), the file's bytes from `start` on."""
        first = self._offset - start
        return memory[first : first + self.nbytes].view(self.dtype).view(self.shape)

    def chunks(self) -> Iterator[Tensor]:
        """Yields the values, flat, CHUNK_BYTES at once. Each chunk overwrites the one before."""
        memory = allocate_aligned(min(CHUNK_BYTES, self.nbytes), ON_HOST)
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - start)
            self._file.read(self._offset + start, memory[: align(size)])
            yield memory[:size].view(self.dtype)

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Writes `values` to the file."""
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
        """Writes `values` to the file, and rounds them to the parameter as FSDP2 would."""
        super().copy_(values)
        local_part(self.layout).copy_(values)


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter."""

    name: str
    parameter: nn.Parameter
    group: int  # the index of its parameter group
    # FIRST, SECOND and, where the model computes in another dtype, MASTER
    tensors: Mapping[str, OffloadedTensor]


@dataclass(frozen=True, slots=True)
class StateWindow:
    """States that are in memory together, and adjacent in the file."""

    offset: int  # in the file
    nbytes: int
    entries: tuple[ParameterState, ...]


class StateLayout:
    """The places of the parameters' states in the rank's file, in the order of `groups`.

    Args:
        model: The sharded model.
        groups: The optimizer's parameter groups.
        moment_dtype: The dtype of moments; None: that of the parameter.
        compute_dtype: The dtype in which the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        moment_dtype: torch.dtype | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self._names = {
            parameter: clean_tensor_name(name) for name, parameter in model.named_parameters()
        }
        layers = _find_layers(model)
        bytes_by_unit: Counter[str] = Counter()  # a unit is a layer, or a parameter outside layers
        # (parameter, index of its group, role -> dtype, bytes of its state)
        self._placed: list[tuple[nn.Parameter, int, dict[str, torch.dtype], int]] = []
        for group, settings in enumerate(groups):
            for parameter in settings["params"]:
                moment = moment_dtype or parameter.dtype
                dtypes = {FIRST: moment, SECOND: moment}
                if parameter.dtype != compute_dtype:
                    dtypes = {MASTER: parameter.dtype, **dtypes}
                numel = local_part(parameter.detach()).numel()
                size = count_offloaded_bytes(numel, (dtype.itemsize for dtype in dtypes.values()))
                self._placed.append((parameter, group, dtypes, size))
                bytes_by_unit[layers.get(parameter, self._names[parameter])] += size
        self.size = bytes_by_unit.total()
        self.capacity = max(bytes_by_unit.values())  # of a window

    def windows(self, file: ScratchFile) -> tuple[StateWindow, ...]:
        """Divides the state in `file` into windows of at most `capacity` bytes."""
        windows: list[StateWindow] = []
        entries: list[ParameterState] = []
        begin = offset = 0
        for parameter, group, dtypes, size in self._placed:
            if entries and offset + size - begin > self.capacity:
                windows.append(StateWindow(begin, offset - begin, tuple(entries)))
                entries = []
                begin = offset
            tensors = {}
            place = offset
            for role, dtype in dtypes.items():
                kind = MasterWeight if role == MASTER else OffloadedTensor
                tensors[role] = kind(file, place, parameter, dtype)
                place += align(tensors[role].nbytes)
            entries.append(ParameterState(self._names[parameter], parameter, group, tensors))
            offset += size
        return (*windows, StateWindow(begin, offset - begin, tuple(entries)))


def _find_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the name of the decoder layer of each parameter that is in one."""
    layers = decoder_layers(model)
    names = {}
    for name, module in model.named_modules():
        if module in layers:
            names.update(dict.fromkeys(module.parameters(), name))
    return names


def _find_compute_dtype(parameter: nn.Parameter, world: World) -> torch.dtype:
    """Returns the dtype in which FSDP2 computes with a parameter."""
    mixed = world.sharding.mixed_precision
    if mixed == "no":
        return parameter.dtype
    dtype: torch.dtype = getattr(torch, COMPUTE_DTYPE[mixed])
    return dtype


MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer over the trained parameters of an FSDP2 model, with its state in a file.

    In memory each parameter has a `step` (fp32 scalar). The rest is in the rank's file, which ends
    with the process. Making it casts the trained parameters to the compute dtype. All ranks make
    the same calls.

    Args:
        model: The model.
        groups: The optimizer's parameter groups.
        make: Makes the optimizer that updates a window, from parameter groups.
        optimization: The recipe's section.
        world: This rank's place.

    Raises:
        UserError: On all ranks, where one cannot write to `offload_dir`, or its disk is too small.
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
            # torch would choose foreach for these tensors, but not for sharded ones in memory
            if "foreach" in group:
                group["foreach"] = False
        self._settings = self._inner.param_groups
        trained = groups[0]["params"][0]
        compute_dtype = _find_compute_dtype(trained, world)
        is_bf16 = OPTIMIZERS[optimization.optim].moment_itemsize == 2
        moment_dtype = torch.bfloat16 if is_bf16 else None
        layout = StateLayout(unwrap(model), self.param_groups, moment_dtype, compute_dtype)
        opened: list[ScratchFile] = []
        folder = Path(optimization.offload_dir or "")
        self._ranks.on_all(lambda: opened.append(open_scratch_file(folder, layout.size)))
        (self.file,) = opened
        self.windows = layout.windows(self.file)
        self.capacity = layout.capacity
        self.buffers = [allocate_aligned(self.capacity, world.device) for _ in range(2)]
        # Parameters on a GPU are updated there, as without offloading: a CPU rounds differently.
        self._staging: Tensor | None = None
        if trained.device.type != "cpu":
            self._staging = torch.empty(self.capacity, dtype=torch.uint8, device=trained.device)
        # With one thread a buffer is written before the next window is read into it.
        self._io = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        self._write_masters(model, compute_dtype)
        step_device = trained.device if self._inner.defaults.get("fused") else ON_HOST
        for entry in self._entries():
            step = torch.zeros((), dtype=torch.float32, device=step_device)
            self.state[entry.parameter]["step"] = step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Raises `UserError` on all ranks where the disk of one fails.
        """
        assert closure is None, "closures are not supported"
        self._ranks.on_all(self._update_all)

    def master_weights(self) -> dict[str, OffloadedTensor]:
        """Returns the fp32 weights by the parameters' names; none where the parameters are fp32."""
        weights = {}
        for entry in self._entries():
            if MASTER in entry.tensors:
                weights[entry.name] = entry.tensors[MASTER]
        return weights

    def moments(self) -> dict[str, OffloadedTensor | Tensor]:
        """Returns the rest of the state by torch's flat names, such as `state.<parameter>.step`."""
        state: dict[str, OffloadedTensor | Tensor] = {}
        for entry in self._entries():
            for role in (FIRST, SECOND):
                state[f"state.{entry.name}.{role}"] = entry.tensors[role]
            state[f"state.{entry.name}.step"] = self.state[entry.parameter]["step"]
        return state

    def _write_masters(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        """Writes the master weights to the file, and casts the parameters to the compute dtype."""
        masters = {}
        for entry in self._entries():
            if MASTER in entry.tensors:
                masters[entry.parameter] = entry.tensors[MASTER]

        def take(weight: nn.Parameter) -> None:
            masters[weight].copy_(local_part(weight))

        self._ranks.on_all(lambda: take_master_weights(model, compute_dtype, take))

    def _entries(self) -> Iterator[ParameterState]:
        return chain.from_iterable(window.entries for window in self.windows)

    @torch.no_grad()
    def _update_all(self) -> None:
        """Passes over the file once.

        While a window is updated, the one before is written and the one after is read.
        """
        following = self._io.submit(self._read, 0)
        written: list[Future[None]] = []
        try:
            for index, window in enumerate(self.windows):
                following.result()
                if index + 1 < len(self.windows):
                    following = self._io.submit(self._read, index + 1)
                event = self._update(window, self.buffers[index % 2])
                written.append(self._io.submit(self._write, index, event))
        finally:  # requests in flight use the buffers
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
        """Updates the window's state, which is in `buffer`, and its parameters.

        Returns the CUDA event that ends the update; None: it has ended.
        """
        memory = buffer[: window.nbytes]
        if self._staging is not None:
            memory = self._staging[: window.nbytes].copy_(memory, non_blocking=True)
        for index, group in enumerate(self.param_groups):
            entries = [entry for entry in window.entries if entry.group == index]
            self._update_group(group, index, entries, memory, window)
        if self._staging is None:
            return None
        buffer[: window.nbytes].copy_(memory, non_blocking=True)
        return torch.cuda.current_stream(memory.device).record_event()

    def _update_group(
        self,
        group: dict[str, Any],
        index: int,
        entries: list[ParameterState],
        memory: Tensor,
        window: StateWindow,
    ) -> None:
        """Steps the inner optimizer over `entries`, which are in one group.

        Args:
            group: The parameter group.
            index: The index of the group.
            entries: The states to update.
            memory: The bytes of the window.
            window: The window that has the entries.
        """
        updated: list[tuple[Tensor, nn.Parameter]] = []
        inner = self._inner
        for entry in entries:
            if entry.parameter.grad is None:
                continue
            views = {}
            for role, tensor in entry.tensors.items():
                views[role] = tensor.within(memory, window.offset)
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
        inner.state.clear()  # which would keep the gradients
        inner.param_groups = self._settings
