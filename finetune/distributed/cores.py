"""The CPU cores of this process. Imports no torch."""

import os


def count_cores() -> int:
    """The cores that this process may use: of its affinity mask where the system has one, else the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
