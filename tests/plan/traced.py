"""What a forward really saves and allocates, by torch's own hooks and its allocator."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.distributed.model_parts import local_part


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers in any tensor that an operator returns inside this context."""

    numbers = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return out


def allocated_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator held at once of what was allocated during `run`."""
    gc.collect()  # what is freed of before would count as negative
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(accumulate(changes), default=0))


def allocated_after(run: Callable[[], object]) -> int:
    """The bytes that torch's CPU allocator still holds of what was allocated during `run`, whose result is kept meanwhile."""
    gc.collect()  # what is freed of before would count as negative
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        kept = run()
    held = sum(
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    del kept
    return int(held)


@contextmanager
def saved_for_backward(known: Iterator[torch.Tensor]) -> Iterator[dict[int, int]]:
    """The storages that autograd saves inside this context, by address -> bytes; without those of `known` tensors."""
    mine = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        storage = getattr(
            local, "elem", local
        ).untyped_storage()  # of a collective that is still under way
        if storage.data_ptr() not in mine and storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
