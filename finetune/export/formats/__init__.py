"""The formats that are written beside a Hugging Face folder of safetensors, or instead of it.

Their rows are in config/export_formats.py; each row names the planner, a function of a file here.
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
    """The files that a format will write, planned with their sizes before a byte is written."""

    @property
    def byte_count(self) -> int:
        """The largest number of bytes that `write` holds on disk at once."""

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes the files into `folder`, verifies them, and returns a line for each file.

        Args:
            folder: The folder of the export.
            logits: The checkpoint's logits, to compare with those of the files; None: they are not
                compared.

        Raises:
            UserError: The files that were read back do not hold the model.
        """


# (source, target, weights, options, title, log) -> the planned files. `title` is the model card's,
# and `log` takes lines for the user.
Planner = Callable[
    [Source, TargetModel, Weights, ExportOptions, str, Callable[[str], object]], PlannedFormat
]


def load_planners(formats: Sequence[str]) -> list[Planner]:
    """Imports the functions that plan `formats`; safetensors has none, and is skipped.

    Raises `ImportError` if a format's package is not installed.
    """
    planners = []
    for name in formats:
        planner = EXPORT_FORMATS[name].plan  # MODULE:FUNCTION
        if planner is not None:
            module, _, function = planner.partition(":")
            planners.append(getattr(importlib.import_module(module), function))
    return planners
