"""An optimizer with its state in a file of each rank, as ZeRO-Infinity's (Rajbhandari et al. 2021),
under FSDP2.

Moments, and fp32 master weights where the model computes in another dtype, are read into one
buffer, updated there and written back, while what was in the other buffer is written and what comes
next is read into it. A buffer holds a window of the state: parameters in the order of the
optimizer, as many bytes as the largest decoder layer has. Each update is made by the optimizer that
would make it in memory, in the same order: bit for bit the same.

The file has no name, so that no killed process leaves one behind: the system frees what has neither
a name nor a process. Requests are direct (open(2), O_DIRECT) where the file system has that; else
what they leave in the page cache, which would be the very memory that is to be saved, is dropped
after each.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
REQUESTS = 4  # in flight at once: one alone leaves an NVMe disk waiting


def align(byte_count: int) -> int:
    """The next multiple of OFFLOAD_ALIGNMENT.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return round_up(byte_count, OFFLOAD_ALIGNMENT)


TOUCHING_THREADS = 8
TOUCHED_BYTES = 64 * 1024 * 1024  # at once by a thread


def allocate_aligned(byte_count: int, device: torch.device) -> torch.Tensor:
    """Host memory [bytes, a multiple of OFFLOAD_ALIGNMENT] for direct requests; pinned for GPU
    ranks.

    Not by torch's pinned allocator, which rounds up to a power of two.
    """
    size = max(align(byte_count), OFFLOAD_ALIGNMENT)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        # Pages that exist are pinned at 16 GiB/s on the host of an H200, others at 2.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
            list(threads.map(torch.Tensor.zero_, torch.split(memory, TOUCHED_BYTES)))
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # where that fails, copies are only slower
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return memory


def check_scratch_folder(folder: Path, needed: int, ranks: int) -> None:
    """Raises `UserError` where `folder`, which may be missing yet, cannot be written, is in host
    memory, or has not `needed` bytes free for the files of `ranks` ranks; and where the folder
    above it is missing too, as by a typing error.

    Leaves nothing there.
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
    """A file of `size` bytes in `folder`, which is made if missing.

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
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next(
        (mounts[path] for path in (folder.resolve(), *folder.resolve().parents) if path in mounts),
        "unknown",
    )


class ScratchFile:
    """`size` bytes in `folder`, zero at first.

    All offsets and lengths are multiples of OFFLOAD_ALIGNMENT.

    Raises `OSError` where the folder cannot be written, or the disk has not so many bytes free.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        # to reserve it would fill the disk before it failed
        if size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        # open as long as the run
        self._file = self._with_place(lambda: tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
        self._descriptor = self._file.fileno()
        if size:
            self._with_place(lambda: os.posix_fallocate(self._descriptor, 0, size))
        self.is_direct = _make_direct(self._descriptor)
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS, thread_name_prefix="offload")

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fills `into` (uint8, of `allocate_aligned`) with the bytes from `offset` on."""
        self._with_place(lambda: self._request(os.preadv, offset, into))

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Writes `values` (uint8, of `allocate_aligned`) to `offset`."""
        self._with_place(lambda: self._request(os.pwritev, offset, values))
        if not self.is_direct:
            os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, offset, values.nbytes, os.POSIX_FADV_DONTNEED)

    def _request(
        self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: torch.Tensor
    ) -> None:
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
        try:
            return action()
        except OSError as error:
            # the system knows only a descriptor
            error.filename = str(self.folder / "(a file without a name)")
            raise


def _make_direct(descriptor: int) -> bool:
    """Whether requests now pass the page cache by; a file system without that (tmpfs) refuses."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


CHUNK_BYTES = 8 << 20  # of a tensor that a checkpoint reads or fills, in memory at once
MASTER = "master"
FIRST = "exp_avg"
SECOND = "exp_avg_sq"
ON_HOST = torch.device("cpu")


class OffloadedTensor:
    """An optimizer state tensor at `offset` in this rank's file.

    `layout`: the parameter, sharded alike.

    A checkpoint treats it as the rank's tensor, but for its values, which come in `chunks`.
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
        """Replaces this rank's part by `values`; of a master weight also what the model computes
        with.
        """
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
        # rounded as FSDP2 would round the fp32 weight to gather it
        local_part(self.layout).copy_(values)


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter. `group`: the index of its parameter group."""

    name: str
    parameter: nn.Parameter
    group: int
    # MASTER, where the model computes in another dtype, FIRST and SECOND
    tensors: Mapping[str, OffloadedTensor]


@dataclass(frozen=True, slots=True)
class StateWindow:
    """Entries that are in memory together; in the file one after another, from `offset` on."""

    offset: int
    nbytes: int
    entries: tuple[ParameterState, ...]


class StateLayout:
    """How the state of a sharded model's trained parameters lies in the file of this rank: in the
    order of the optimizer's `groups`.

    `moment_dtype`: None for that of the parameter; `compute_dtype`: what the model computes in.
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
        units = _find_layers(model)
        by_unit = dict[str, int]()
        self._placed: list[tuple[nn.Parameter, int, dict[str, torch.dtype], int]] = []
        for group, settings in enumerate(groups):
            for parameter in settings["params"]:
                moment = moment_dtype or parameter.dtype
                if parameter.dtype != compute_dtype:
                    masters = {MASTER: parameter.dtype}
                else:
                    masters = {}
                dtypes = masters | {FIRST: moment, SECOND: moment}
                numel = local_part(parameter.detach()).numel()
                size = count_offloaded_bytes(numel, (dtype.itemsize for dtype in dtypes.values()))
                self._placed.append((parameter, group, dtypes, size))
                unit = units.get(parameter, self._names[parameter])
                by_unit[unit] = by_unit.get(unit, 0) + size
        self.size = sum(by_unit.values())
        self.capacity = max(by_unit.values())

    def windows(self, file: ScratchFile) -> tuple[StateWindow, ...]:
        """The windows of `file`, each within `capacity`: the largest decoder layer, or parameter
        outside of one.
        """
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
    """The optimizer that `make` makes, over the trained parameters of an FSDP2 `model`.

    All ranks call it alike.

    `groups`: its parameter groups. Trained parameters are from here on in the compute dtype. State
    in memory of each: `step` (fp32 scalar). The rest is in the rank's file, which ends with the
    process: only a checkpoint outlives it.

    Raises `UserError` on all ranks where `offload_dir` of one cannot be written, or its disk has
    too little space.
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
            # in memory torch does not choose it for sharded tensors, but would for these
            if "foreach" in group:
                group["foreach"] = False
        self._settings = self._inner.param_groups
        trained = groups[0]["params"][0]
        mixed = world.sharding.mixed_precision
        if mixed == "no":
            compute_dtype = trained.dtype
        else:
            compute_dtype = getattr(torch, COMPUTE_DTYPE[mixed])
        if OPTIMIZERS[optimization.optim].moment_itemsize == 2:
            moment_dtype = torch.bfloat16
        else:
            moment_dtype = None
        layout = StateLayout(unwrap(model), self.param_groups, moment_dtype, compute_dtype)
        opened: list[ScratchFile] = []
        folder = Path(optimization.offload_dir or "")
        self._ranks.on_all(lambda: opened.append(open_scratch_file(folder, layout.size)))
        (self.file,) = opened
        self.windows = layout.windows(self.file)
        self.capacity = layout.capacity
        self.buffers = [allocate_aligned(self.capacity, world.device) for _ in range(2)]
        # A GPU's parameters are updated there, as they are in memory: another processor rounds
        # otherwise.
        on_gpu = trained.device.type != "cpu"
        self._staging = (
            torch.empty(self.capacity, dtype=torch.uint8, device=trained.device) if on_gpu else None
        )
        # One thread: a buffer is written before the next window is read into it.
        self._io = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        entries = [entry for window in self.windows for entry in window.entries]
        masters = {
            entry.parameter: entry.tensors[MASTER] for entry in entries if MASTER in entry.tensors
        }
        self._ranks.on_all(
            lambda: take_master_weights(
                model, compute_dtype, lambda weight: masters[weight].copy_(local_part(weight))
            )
        )
        if self._inner.defaults.get("fused"):
            step_device = trained.device
        else:
            step_device = torch.device("cpu")
        for entry in entries:
            self.state[entry.parameter]["step"] = torch.zeros(
                (), dtype=torch.float32, device=step_device
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Raises `UserError` on all ranks where the disk of one fails.
        """
        assert closure is None, "closures are not supported"
        self._ranks.on_all(self._update_all)

    def master_weights(self) -> dict[str, OffloadedTensor]:
        """The fp32 weights behind the parameters, by the parameters' names; empty where these are
        their own.
        """
        return self._list_tensors(
            lambda entry: {entry.name: entry.tensors[MASTER]} if MASTER in entry.tensors else {}
        )

    def moments(self) -> dict[str, OffloadedTensor | Tensor]:
        """The rest of the state, named as torch's flat optimizer state: `state.<parameter>.exp_avg`
        and so on.
        """
        return self._list_tensors(
            lambda entry: {
                **{f"state.{entry.name}.{name}": entry.tensors[name] for name in (FIRST, SECOND)},
                f"state.{entry.name}.step": self.state[entry.parameter]["step"],
            }
        )

    def _list_tensors(self, of: Callable[[ParameterState], dict[str, Any]]) -> dict[str, Any]:
        return {
            name: tensor
            for window in self.windows
            for entry in window.entries
            for name, tensor in of(entry).items()
        }

    @torch.no_grad()
    def _update_all(self) -> None:
        """One pass over the file: while a window is updated, the one before it is written and the
        one after it read.
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
        """Updates what `buffer` holds, and the parameters.

        Returns the event that ends it; None: it has ended.
        """
        memory = buffer[: window.nbytes]
        if self._staging is not None:
            memory = self._staging[: window.nbytes].copy_(memory, non_blocking=True)
        for index, group in enumerate(self.param_groups):
            self._update_group(
                group,
                index,
                [entry for entry in window.entries if entry.group == index],
                memory,
                window,
            )
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
        """The inner optimizer's step over `entries`, whose state is in `memory`."""
        updated: list[tuple[Tensor, nn.Parameter]] = []
        inner = self._inner
        for entry in entries:
            if entry.parameter.grad is None:
                continue
            views = {
                name: tensor.within(memory, window.offset) for name, tensor in entry.tensors.items()
            }
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
