"""An optimizer for FSDP2 whose state is in a file, one for each rank.

The method is that of ZeRO-Infinity (Rajbhandari et al. 2021). The state is the moments, and also
fp32 master weights if the model computes in another dtype. It is divided into windows, in the order
of the optimizer's parameters; the largest decoder layer sets their size. There are two buffers.
While the window in one buffer is updated, the other buffer is written to the file, and the next
window is read into it. Each window is updated by the same optimizer, in the same order, as it would
be without offloading. The results are equal bit for bit.

The file has no name: the system frees it when its process ends, even if the process is killed.
Requests bypass the page cache (open(2), O_DIRECT) if the file system supports this. Otherwise the
cached pages are dropped after each request, because they would take the memory that offloading
saves.
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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

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

REQUEST_BYTES = 8 << 20  # the most bytes that one request reads or writes
REQUESTS = 4  # requests at the same time; with one, an NVMe disk would idle between requests


def align(byte_count: int) -> int:
    """Rounds a number of bytes up to a multiple of OFFLOAD_ALIGNMENT.

    >>> align(1), align(4096), align(0)
    (4096, 4096, 0)
    """
    return round_up(byte_count, OFFLOAD_ALIGNMENT)


TOUCHING_THREADS = 8  # threads that clear new memory, so that its pages exist
TOUCHED_BYTES = 64 * 1024 * 1024  # what such a thread clears at once


def allocate_aligned(byte_count: int, device: torch.device) -> Tensor:
    """Allocates host memory that O_DIRECT accepts; it is pinned if `device` is a GPU.

    torch's own pinned allocator would round the size up to a power of two.

    Returns:
        uint8[bytes], aligned. Its length is `byte_count` rounded up by `align`, and never 0.
    """
    size = max(align(byte_count), OFFLOAD_ALIGNMENT)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        # The pages are made first, by writing to them: on the host of an H200, existing pages are
        # pinned at 16 GiB/s, and others at 2 GiB/s.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
            list(threads.map(Tensor.zero_, torch.split(memory, TOUCHED_BYTES)))
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # The result is not checked: if pinning fails, copies are only slower.
        no_flags = 0
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, no_flags)
    return memory


def check_scratch_folder(folder: Path, needed: int, ranks: int) -> None:
    """Raises `UserError` if `folder` cannot hold the files of the optimizer's state.

    It must be writable, not in host memory, and on a disk with enough free space. If it does not
    exist, its parent must: a missing parent is taken for a typing error. Nothing is left in the
    folder.

    Args:
        folder: The recipe's `offload_dir`.
        needed: The size of all files in it together, in bytes.
        ranks: The number of ranks that have a file in it.
    """
    if not folder.exists() and not folder.absolute().parent.exists():
        raise UserError(
            f"offload_dir: {folder}: no such folder, nor one to make it in; make {folder.parent}, "
            "or correct the path"
        )
    try:
        existing = try_writing(folder)
    except OSError as error:
        raise UserError(
            f"offload_dir: {folder}: cannot be written ({error.strerror}); name another folder"
        ) from None
    filesystem = _find_filesystem(existing)
    if filesystem in ("tmpfs", "ramfs"):
        raise UserError(
            f"offload_dir: {folder}: a {filesystem}, which is host memory; name a folder on a disk"
        )
    if needed > shutil.disk_usage(existing).free:
        raise _make_space_error(existing, needed, ranks)


def _make_space_error(folder: Path, needed: int, ranks: int) -> UserError:
    """Makes the error for a disk that has no room for `needed` bytes, the files of `ranks`."""
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
    """A file without a name, of `size` bytes on the disk of `folder`, filled with zeros.

    Makes the folder if it does not exist. All offsets and lengths must be multiples of
    OFFLOAD_ALIGNMENT.

    Raises:
        OSError: The folder cannot be written.
        UserError: The disk has too little space.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        folder.mkdir(parents=True, exist_ok=True)
        # checked first, because `posix_fallocate` would fill the disk before it fails
        if size > shutil.disk_usage(folder).free:
            raise _make_space_error(folder, size, ranks=1)
        # stays open until the process ends
        with self._named_errors():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            self._descriptor = self._file.fileno()
            if size:
                os.posix_fallocate(self._descriptor, 0, size)
        self.is_direct = _make_direct(self._descriptor)
        self._pool = ThreadPoolExecutor(max_workers=REQUESTS, thread_name_prefix="offload")

    def read(self, offset: int, into: Tensor) -> None:
        """Fills `into` (uint8, from `allocate_aligned`) with the file's bytes from `offset` on."""
        self._transfer(os.preadv, offset, into)

    def write(self, offset: int, values: Tensor) -> None:
        """Writes `values` (uint8, from `allocate_aligned`) to the file at `offset`."""
        self._transfer(os.pwritev, offset, values)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], offset: int, memory: Tensor
    ) -> None:
        """Reads or writes `memory` (uint8) at `offset` of the file, by several requests at once.

        `call` is `os.preadv` or `os.pwritev`.
        """
        view = memory.numpy().data

        def transfer_piece(start: int) -> None:
            remaining = view[start : start + REQUEST_BYTES]
            position = offset + start
            while remaining:  # a request may stop early
                moved = call(self._descriptor, [remaining], position)
                if moved == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                remaining = remaining[moved:]
                position = position + moved

        with self._named_errors():
            # `list` waits for all requests, and raises the error of one that failed
            list(self._pool.map(transfer_piece, range(0, len(view), REQUEST_BYTES)))
            if not self.is_direct:
                os.fdatasync(self._descriptor)  # only pages that are on disk can be dropped
                os.posix_fadvise(self._descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Makes every `OSError` of this block name the folder."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.folder / "(a file without a name)")
            raise


def _make_direct(descriptor: int) -> bool:
    """Makes requests to an open file bypass the page cache (O_DIRECT).

    Returns False if the file system does not support it, such as tmpfs.
    """
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return False
    return True


CHUNK_BYTES = 8 << 20  # how much of a tensor is in memory while a checkpoint reads or fills it
# roles of a parameter's tensors in the state; those of moments are torch's names
MASTER = "master"
FIRST = "exp_avg"
SECOND = "exp_avg_sq"
ON_HOST = torch.device("cpu")


class OffloadedTensor:
    """This rank's shard of a tensor of the optimizer's state, in the rank's file.

    Checkpoints use it like a tensor, but read the values in `chunks`.

    Args:
        file: The rank's file.
        offset: The position of the shard in the file, in bytes.
        layout: The parameter that the state belongs to, which is sharded in the same way.
        dtype: The dtype of the values.
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
        """The size of this rank's shard in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        """The number of elements in this rank's shard."""
        return prod(self.shape)

    def within(self, memory: Tensor, start: int) -> Tensor:
        """Returns the shard as a view of `memory`, uint8, which has the file's bytes from `start`.

        `memory` must contain all of the shard's bytes.
        """
        first = self._offset - start
        return memory[first : first + self.nbytes].view(self.dtype).view(self.shape)

    def chunks(self) -> Iterator[Tensor]:
        """Reads the values from the file; yields them as flat tensors of at most CHUNK_BYTES.

        Each chunk overwrites the chunk before.
        """
        memory = allocate_aligned(min(CHUNK_BYTES, self.nbytes), ON_HOST)
        for start in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - start)
            self._file.read(self._offset + start, memory[: align(size)])
            yield memory[:size].view(self.dtype)

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Writes `values`, cast to this tensor's dtype, to the file."""
        content = values.detach().to(ON_HOST, self.dtype).contiguous().view(-1).view(torch.uint8)
        memory = allocate_aligned(min(CHUNK_BYTES, self.nbytes), ON_HOST)
        for start in range(0, self.nbytes, CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            memory[: len(chunk)].copy_(chunk)
            self._file.write(self._offset + start, memory[: align(len(chunk))])


class MasterWeight(OffloadedTensor):
    """The fp32 weight of a parameter whose own copy in memory has the compute dtype."""

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Writes `values` to the file, and, rounded to the compute dtype, into the parameter."""
        super().copy_(values)
        local_part(self.layout).copy_(values)


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter in the file."""

    name: str  # the parameter's name
    parameter: nn.Parameter
    group: int  # the index of the parameter's group
    # role -> tensor: FIRST, SECOND and, if the model computes in another dtype, MASTER
    tensors: Mapping[str, OffloadedTensor]


@dataclass(frozen=True, slots=True)
class StateWindow:
    """A range of the file that is in memory at once, with the states of adjacent parameters."""

    offset: int  # the position of the range in the file, in bytes
    nbytes: int
    entries: tuple[ParameterState, ...]


class StateLayout:
    """Decides where in the rank's file the state of each parameter is.

    The states are in the order of the parameters in `groups`. `size`: the size of the file.
    `capacity`: the largest size of a window, which has room for any decoder layer.

    Args:
        model: The sharded model.
        groups: The optimizer's parameter groups.
        moment_dtype: The dtype of moments; None for the dtype of each parameter.
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
        layer_names = _name_layers(model)
        # name of a decoder layer, or of a parameter outside layers -> bytes of its state
        bytes_by_unit: Counter[str] = Counter()
        # (parameter, index of its group, role -> dtype, bytes of its state)
        self._states: list[tuple[nn.Parameter, int, dict[str, torch.dtype], int]] = []
        for group, settings in enumerate(groups):
            for parameter in settings["params"]:
                parameter_moment_dtype = moment_dtype or parameter.dtype
                dtypes = {FIRST: parameter_moment_dtype, SECOND: parameter_moment_dtype}
                if parameter.dtype != compute_dtype:
                    dtypes = {MASTER: parameter.dtype, **dtypes}
                numel = local_part(parameter.detach()).numel()
                size = count_offloaded_bytes(numel, (dtype.itemsize for dtype in dtypes.values()))
                self._states.append((parameter, group, dtypes, size))
                unit = layer_names.get(parameter, self._names[parameter])
                bytes_by_unit[unit] += size
        self.size = bytes_by_unit.total()
        self.capacity = max(bytes_by_unit.values())

    def windows(self, file: ScratchFile) -> tuple[StateWindow, ...]:
        """Divides the state in `file` into windows of at most `capacity` bytes."""
        windows: list[StateWindow] = []
        entries: list[ParameterState] = []  # of the window that is being filled
        begin = 0  # where this window begins in the file
        offset = 0  # where the next parameter's state begins
        for parameter, group, dtypes, size in self._states:
            if entries and offset + size - begin > self.capacity:
                windows.append(StateWindow(begin, offset - begin, tuple(entries)))
                entries = []
                begin = offset
            tensors = {}
            tensor_offset = offset
            for role, dtype in dtypes.items():
                tensor_class = MasterWeight if role == MASTER else OffloadedTensor
                tensors[role] = tensor_class(file, tensor_offset, parameter, dtype)
                tensor_offset += align(tensors[role].nbytes)
            entries.append(ParameterState(self._names[parameter], parameter, group, tensors))
            offset += size
        return (*windows, StateWindow(begin, offset - begin, tuple(entries)))


def _name_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns parameter -> name of the decoder layer, for each parameter in a decoder layer."""
    layers = decoder_layers(model)
    names = {}
    for name, module in model.named_modules():
        if module in layers:
            names.update(dict.fromkeys(module.parameters(), name))
    return names


def _find_compute_dtype(parameter: nn.Parameter, world: World) -> torch.dtype:
    """Returns the dtype in which FSDP2 computes with `parameter`."""
    precision = world.sharding.mixed_precision
    if precision == "no":
        return parameter.dtype
    dtype: torch.dtype = getattr(torch, COMPUTE_DTYPE[precision])
    return dtype


# parameter groups -> an optimizer over them
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer over the trained parameters of an FSDP2 model, whose state is in a file.

    Of the state, only `step` (an fp32 scalar for each parameter) is in memory. The rest is in the
    rank's file, which is gone when the process ends. The constructor casts the trained parameters
    to the compute dtype. All ranks make the same calls.

    Args:
        model: The sharded model, which may have a wrapper.
        groups: The optimizer's parameter groups.
        make: Makes the inner optimizer, which updates one window after another.
        optimization: The recipe's section.
        world: The ranks.

    Raises:
        UserError: On all ranks, if one cannot write to `offload_dir`, or its disk is too small.
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
        # The inner optimizer gets its real parameters window by window; until then each of its
        # groups has an empty parameter.
        self._inner = make([group | {"params": [nn.Parameter(torch.empty(0))]} for group in groups])
        for group in self._inner.param_groups:
            # torch would choose foreach for the plain tensors of a window. It does not for the
            # sharded tensors in memory, and the results must be equal.
            if "foreach" in group:
                group["foreach"] = False
        self._inner_groups = self._inner.param_groups
        trained = groups[0]["params"][0]
        compute_dtype = _find_compute_dtype(trained, world)
        is_bf16 = OPTIMIZERS[optimization.optim].moment_itemsize == 2
        moment_dtype = torch.bfloat16 if is_bf16 else None
        layout = StateLayout(unwrap(model), self.param_groups, moment_dtype, compute_dtype)
        opened: list[ScratchFile] = []
        folder = Path(optimization.offload_dir or "")
        self._ranks.on_all(lambda: opened.append(ScratchFile(folder, layout.size)))
        (self.file,) = opened
        self.windows = layout.windows(self.file)
        self.capacity = layout.capacity
        self.buffers = [allocate_aligned(self.capacity, world.device) for _ in range(2)]
        # Parameters on a GPU are updated there, as without offloading, since a CPU rounds
        # differently. This is the window's memory on the GPU.
        self._staging: Tensor | None = None
        if trained.device.type != "cpu":
            self._staging = torch.empty(self.capacity, dtype=torch.uint8, device=trained.device)
        # One thread does all requests in order: a buffer is written before it is read into again.
        self._io = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        self._write_masters(model, compute_dtype)
        # torch's fused optimizers need `step` on the device of the parameters
        step_device = trained.device if self._inner.defaults.get("fused") else ON_HOST
        for entry in self._entries():
            step = torch.zeros((), dtype=torch.float32, device=step_device)
            self.state[entry.parameter]["step"] = step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Raises `UserError` on all ranks if the disk of one rank fails.
        """
        assert closure is None, "closures are not supported"
        self._ranks.on_all(self._update_all)

    def master_weights(self) -> dict[str, OffloadedTensor]:
        """Returns name of a parameter -> its master weight.

        Empty if the model computes in the dtype of its parameters.
        """
        weights = {}
        for entry in self._entries():
            if MASTER in entry.tensors:
                weights[entry.name] = entry.tensors[MASTER]
        return weights

    def moments(self) -> dict[str, OffloadedTensor | Tensor]:
        """Returns the moments and steps by torch's flat names, such as `state.<parameter>.step`."""
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
        """Returns the states of all parameters, in the order of the file."""
        return chain.from_iterable(window.entries for window in self.windows)

    @torch.no_grad()
    def _update_all(self) -> None:
        """Updates all windows of the file, one after another.

        While a window is updated, the window before is written and the window after is read.
        """
        next_read = self._io.submit(self._read, 0)
        writes: list[Future[None]] = []
        try:
            for index, window in enumerate(self.windows):
                next_read.result()
                if index + 1 < len(self.windows):
                    next_read = self._io.submit(self._read, index + 1)
                event = self._update(window, self.buffers[index % 2])
                writes.append(self._io.submit(self._write, index, event))
        finally:  # waits for all requests, even after an error, because they use the buffers
            failures = [request.exception() for request in (next_read, *writes)]
        for failure in failures:
            if failure is not None:
                raise failure

    def _read(self, index: int) -> None:
        """Reads a window into the buffer in which it is updated."""
        window = self.windows[index]
        self.file.read(window.offset, self.buffers[index % 2][: window.nbytes])

    def _write(self, index: int, event: Any) -> None:
        """Writes a window from its buffer, after the update that ends with `event`, if any."""
        if event is not None:
            event.synchronize()
        window = self.windows[index]
        self.file.write(window.offset, self.buffers[index % 2][: window.nbytes])

    def _update(self, window: StateWindow, buffer: Tensor) -> Any:
        """Updates the parameters of a window, and their state, which is in `buffer`.

        Returns a CUDA event after which the new state is in `buffer`; None if it is there already.
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
        """Updates the parameters of one group in a window by the inner optimizer.

        Parameters without a gradient stay as they are.

        Args:
            group: The parameter group.
            index: The index of the group.
            entries: The states of the group's parameters in the window.
            memory: The bytes of the window.
            window: The window.
        """
        # (weight that the inner optimizer updates: the master weight or the parameter; parameter)
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
        inner.param_groups = [self._inner_groups[index] | settings]
        inner.step()
        for weight, parameter in updated:
            local_part(parameter).copy_(weight)
        inner.state.clear()  # its keys, the weights, would keep the gradients
        inner.param_groups = self._inner_groups
