"""Profiling of a few steps, and garbage collection between steps."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from finetune.compiler import CACHE_VARIABLE
from finetune.data.batches import StepBatch
from finetune.units import counted


class Compilation:
    """Reads the counters between two lines of metrics. Imports nothing of torch's compiler where nothing is
    compiled."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._graphs = 0  # that have been reported

    def seconds(self) -> float | None:
        """Since the process began; None where nothing is compiled."""
        if not self._is_on:
            return None
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])

    def news(self) -> str | None:
        """A sentence where graphs were compiled since it was asked last, else None."""
        if not self._is_on:
            return None
        counters = torch._dynamo.utils.counters
        graphs, cached = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        if graphs == self._graphs:
            return None
        self._graphs = graphs
        where = f", in {os.environ[CACHE_VARIABLE]}" if CACHE_VARIABLE in os.environ else ""
        return (
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts {compiled} were "
            f"compiled and {cached} were in the cache{where}"
        )


def profile_steps(
    batches: Iterator[StepBatch], steps: tuple[int, int] | None, folder: Path, rank: int
) -> Iterator[StepBatch]:
    """Yields `batches`, and records the steps from the first to the last of `steps` (1-based) in `folder`/profile.

    Leaves `trace-rank<r>.json` (chrome://tracing, ui.perfetto.dev), and on CUDA `memory-rank<r>.json`: the allocator's
    segments and blocks with the stack of each, without a pickle.
    """
    if not steps:
        yield from batches
        return
    first, last = steps
    profiler: torch.profiler.profile | None = None
    for batch in batches:
        if batch.step + 1 == first:
            profiler = _start()
        yield batch
        if batch.step + 1 == last and profiler is not None:
            _finish(profiler, folder / "profile", rank)
            profiler = None
    if profiler is not None:  # the run ended before `last`
        _finish(profiler, folder / "profile", rank)


def _start() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler


def _finish(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
    if torch.cuda.is_available():
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        (folder / f"memory-rank{rank}.json").write_text(json.dumps(snapshot, default=str))


@contextmanager
def garbage_collected_between_lines() -> Iterator[None]:
    """Keeps Python's garbage collector out of the steps: a full collection stops one rank, and all others wait for it.

    The loop collects at its lines of metrics instead, see `collect_garbage`.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage() -> None:
    """Collects what steps have left behind: the young generations only."""
    gc.collect(1)
