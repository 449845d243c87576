"""Activation offload: what checkpointed layers keep for the backward lies in host memory until the backward needs it.

Copies run beside the computation: to the host while the next layer's forward runs, back while the backward of the layer above
does. So the device holds what one layer keeps, and two in the backward. torch's own `save_on_cpu` waits for every copy.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

MIN_OFFLOADED_BYTES = 1 << 10  # smaller tensors stay on the device
Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class Copies(Protocol):
    """How tensors are copied to the host and back. A copy has ended once `wait` for its event has returned, or been queued."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Starts a copy of `tensor` in host memory: the copy, and its event."""

    def to_device(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Starts a copy of a host tensor on `device`: the copy, and its event."""

    def wait(self, event: Any) -> None:
        """Has all that the device is given from now on wait for the copy of `event`."""


class CudaCopies:
    """Copies from and to pinned memory on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host, self._copy(host, tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return copy, self._copy(copy, tensor)

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        # The source has to be computed, and the target's memory may still be in use by what was queued before it was freed.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _Kept:
    """A tensor that a layer keeps: on the device until it is released, in host memory until it is taken."""

    def __init__(self, tensor: Tensor, layer: "_Layer", copies: Copies) -> None:
        self._device, self._layer, self._copies = tensor.device, layer, copies
        self._here: Tensor | None = tensor.detach()
        self._host, self._event = copies.to_host(self._here)

    def release(self) -> None:
        """Frees the tensor on the device once it is copied. Freed without that wait, it would be overwritten before."""
        if self._here is not None:
            self._copies.wait(self._event)
            self._here = self._event = None

    def bring_back(self) -> None:
        """Starts the copy to the device."""
        if self._here is None:
            self._here, self._event = self._copies.to_device(self._host, self._device)

    def take(self) -> Tensor:
        """The tensor, for the backward; the layer below it is needed next."""
        self.bring_back()
        self._layer.bring_back_below()
        self._copies.wait(self._event)
        tensor, self._here, self._event = self._here, None, None
        assert tensor is not None
        return tensor


class _Layer:
    """What one forward of a checkpointed layer keeps, and the layer below it."""

    def __init__(self, below: "_Layer | None", copies: Copies) -> None:
        self._below, self._copies = None if below is None else ref(below), copies
        # What stands in for a tensor has to end with the graph that needs it, not when cycles are collected.
        self._kept: list[ref[_Kept]] = []

    def keep(self, tensor: Tensor) -> "_Kept | Tensor":
        """What stands in for `tensor`, or the tensor itself where it is not worth a copy."""
        if not tensor.is_floating_point() or tensor.nbytes < MIN_OFFLOADED_BYTES:
            return tensor
        kept = _Kept(tensor, self, self._copies)
        self._kept.append(ref(kept))
        return kept

    def release(self) -> None:
        """Frees what this layer keeps on the device."""
        for kept in self._alive():
            kept.release()

    def bring_back_below(self) -> None:
        """Starts the copies of what the layer below keeps."""
        below = None if self._below is None else self._below()
        for kept in () if below is None else below._alive():
            kept.bring_back()

    def _alive(self) -> Iterator[_Kept]:
        return (kept for each in self._kept if (kept := each()) is not None)


class ActivationOffload:
    """Offloads what torch's checkpoint keeps of the layers whose checkpointing function is `wrap`ped."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._latest: _Layer | None = None

    def wrap(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The checkpointing function of a layer; its inputs are offloaded, which are all that it saves by itself."""

        def offloaded(function: Callable[..., Any], *inputs: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is kept
                return checkpoint(function, *inputs)
            above, self._latest = self._latest, _Layer(self._latest, self._copies)
            with saved_tensors_hooks(self._latest.keep, _take):
                outputs = checkpoint(function, *inputs)
            if above is not None:  # of the layer before, whose copy had this layer's forward to end in
                above.release()
            return outputs

        return offloaded

    def wrap_contexts(self, contexts: Contexts) -> Contexts:
        """The contexts of selective checkpointing (`create_selective_checkpoint_contexts`), with what they keep offloaded."""
        layer, (keeping, using) = self._latest, contexts
        assert layer is not None
        return _offload_after(keeping, layer), _take_before(using)


def _take(kept: "_Kept | Tensor") -> Tensor:
    return kept.take() if isinstance(kept, _Kept) else kept


@contextmanager
def _offload_after(keeping: Any, layer: _Layer) -> Iterator[None]:
    with keeping:
        yield
    for kept in _selected(keeping):
        if isinstance(kept.val, Tensor):
            kept.val = layer.keep(kept.val)


@contextmanager
def _take_before(using: Any) -> Iterator[None]:
    for kept in _selected(using):
        if isinstance(kept.val, _Kept):
            kept.val = kept.val.take()
            kept.version = kept.val._version
    with using:
        yield


def _selected(context: Any) -> list[Any]:
    """The values that selective checkpointing stores, in torch's own wrappers: `val`, and the `version` that is checked."""
    entries = [entry for by_index in context.storage.values() for entry in by_index.values()]
    return [leaf for leaf in tree_leaves(entries) if hasattr(leaf, "val") and hasattr(leaf, "version")]
