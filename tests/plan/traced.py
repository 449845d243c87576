"""What a forward really keeps and allocates, counted from torch's own tensors."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that is made inside it and still alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return made

    def ignore(self, tensors: Iterator[torch.Tensor]) -> None:
        """These were there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextmanager
def saved_for_backward(known: Iterator[torch.Tensor]) -> Iterator[dict[int, int]]:
    """The storages that autograd keeps inside this context, by address -> bytes; those of `known` tensors left out."""
    mine = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine and storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
