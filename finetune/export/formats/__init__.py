"""The formats that are written beside a Hugging Face folder, or instead of one: a row for each."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from finetune.export.publish import COMPRESSED, ExportOptions
from finetune.export.source import Source
from finetune.export.target import TargetModel
from finetune.export.write import Weights


class PlannedFormat(Protocol):
    """What a format will write: planned, down to its size, before a byte is written."""

    @property
    def byte_count(self) -> int:
        """What is on disk at once, at most."""

    def write(self, folder: Path, logits: Future[torch.Tensor] | None) -> list[str]:
        """Writes into `folder`, and returns a line on each file. `logits`: the checkpoint's; None: nothing is verified.

        Raises `UserError` where what is read back is not the model.
        """


Planner = Callable[[Source, TargetModel, Weights, ExportOptions, str, Callable[[str], object]], PlannedFormat]


def _plan_gguf(*described: Any) -> PlannedFormat:
    from finetune.export.formats.gguf_export import plan_gguf  # needs a package that may be missing

    return plan_gguf(*described)


def _plan_compressed(*described: Any) -> PlannedFormat:
    from finetune.export.formats.compressed_tensors_export import plan_compressed  # needs a package that may be missing

    return plan_compressed(*described)


PLANNERS: Mapping[str, Planner] = {"gguf": _plan_gguf, COMPRESSED: _plan_compressed}
