"""What torch.compile takes in this process: seconds, and how many graphs its cache had, by torch's own counters."""

import os

import torch

from finetune.compiler import CACHE_VARIABLE
from finetune.units import counted


class Compilation:
    """Reads the counters between two lines of metrics. Imports nothing of torch's compiler where nothing is compiled."""

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
            f"compile {self.seconds():.0f} s so far: {counted(graphs, 'graph')}, of whose parts {compiled} were compiled and {cached} were in "
            f"the cache{where}"
        )
