"""The formats that are written beside a Hugging Face folder, or instead of one, by their rows in
config/.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from finetune.config.export_formats import EXPORT_FORMATS
from finetune.export.logits import CheckpointLogits
from finetune.export.publish import ExportOptions
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.export.write import Weights


class PlannedFormat(Protocol):
    """The files that a format will write: planned, down to their size, before a byte is written."""

    @property
    def byte_count(self) -> int:
        """The bytes on disk at once, at most."""

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes into `folder`, and returns a line on each file.

        `logits`: the checkpoint's; None: nothing is verified.

        Raises `UserError` where what is read back is not the model.
        """


Planner = Callable[
    [Source, TargetModel, Weights, ExportOptions, str, Callable[[str], object]], PlannedFormat
]


def load_planners(formats: Sequence[str]) -> list[Planner]:
    """The functions that plan these formats, without the Hugging Face folder.

    Imports packages that may be missing.
    """
    planners = []
    for name in formats:
        place = EXPORT_FORMATS[name].plan
        if place is not None:
            module, _, function = place.partition(":")
            planners.append(getattr(importlib.import_module(module), function))
    return planners
