"""Where each tensor of an optimizer's state lies in a rank's file, and which of them are in memory at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from finetune.constants import count_offloaded_bytes
from finetune.distributed.parallelize import local_part
from finetune.optim.scratch_file import ScratchFile, align, allocate_aligned

CHUNK_BYTES = 8 << 20  # of a tensor that a checkpoint reads or fills, in memory at once
MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"
ON_HOST = torch.device("cpu")


class OffloadedTensor:
    """A tensor of the state, of which this rank's part is in its file from `offset` on. `layout`: the parameter, sharded alike.

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
        """Replaces this rank's part by `values`, shaped like it; of a master weight also what the model computes with."""
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
class Entry:
    """The state of one parameter. `group`: the index of its parameter group."""

    name: str
    parameter: nn.Parameter
    group: int
    tensors: Mapping[str, OffloadedTensor]  # MASTER, where the model computes in another dtype, FIRST and SECOND


@dataclass(frozen=True, slots=True)
class Window:
    """Entries that are in memory together; in the file one after another, from `offset` on."""

    offset: int
    nbytes: int
    entries: tuple[Entry, ...]


class StateLayout:
    """How the state of a sharded model's trained parameters lies in the file of this rank: in the order of the optimizer's
    `groups`. `moment_dtype`: None for that of the parameter; `compute_dtype`: what the model computes in.
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

    def windows(self, file: ScratchFile) -> tuple[Window, ...]:
        """The windows of `file`, each as large as fits into `capacity`: the bytes of the largest decoder layer, or of the largest
        parameter outside of one."""
        found: list[Window] = []
        entries: list[Entry] = []
        begin = offset = 0
        for parameter, group, dtypes, size in self._placed:
            if entries and offset + size - begin > self.capacity:
                found.append(Window(begin, offset - begin, tuple(entries)))
                entries, begin = [], offset
            tensors, place = {}, offset
            for role, dtype in dtypes.items():
                kind = MasterWeight if role == MASTER else OffloadedTensor
                tensors[role] = kind(file, place, parameter, dtype)
                place += align(tensors[role].nbytes)
            entries.append(Entry(self._names[parameter], parameter, group, tensors))
            offset += size
        return (*found, Window(begin, offset - begin, tuple(entries)))


def _find_layers(model: nn.Module) -> dict[nn.Parameter, str]:
    """The decoder layer of each parameter that is in one."""
    layers = set(getattr(model, "_no_split_modules", None) or ())
    return {
        parameter: name
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("FSDP") in layers  # FSDP2 changes the class
        for parameter in module.parameters()
    }
