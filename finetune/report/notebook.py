"""The report's plots in a notebook's cell, drawn again while a run trains."""

import html
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.report.page import render_plots
from finetune.report.run_data import read_run

SECONDS = 1.0  # between two drawings, at least
HEIGHT = 430  # pixels: of the loss; the other plots are below it


class Plots:
    """A callback that shows the run's plots below the cell that trains."""

    def __init__(self) -> None:
        self._shown: Any = None
        self._drawn_at = 0.0

    def on_log(self, event: Any) -> None:
        """Draws, but for lines that follow one another closely."""
        if time.monotonic() > self._drawn_at + SECONDS:
            self._draw(event.folder)

    def on_end(self, event: Any) -> None:
        """Draws all that was logged."""
        self._draw(event.folder)

    def _draw(self, folder: Path) -> None:
        from IPython.display import HTML, display

        with suppress(UserError, OSError):  # it is only looked at
            page = html.escape(render_plots(read_run(folder)))
            frame = HTML(f'<div><iframe srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0"></iframe></div>')
            if self._shown is None:
                self._shown = display(frame, display_id=True)
            else:
                self._shown.update(frame)
        self._drawn_at = time.monotonic()
