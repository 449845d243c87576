"""`finetune report RUN [RUN ...]`."""

import argparse
import sys
from pathlib import Path

from finetune.durable import replace_file
from finetune.errors import UserError
from finetune.export.publish import bring_back_exports
from finetune.report.page import page
from finetune.report.planned import planned
from finetune.report.png import can_draw, draw_loss
from finetune.report.run_data import read_run


def report_command(arguments: argparse.Namespace) -> int:
    """Writes the HTML of `arguments.runs`, and the loss curve as a PNG beside it (of the same name, where one was given)."""
    for name in arguments.runs:
        bring_back_exports(Path(name))
    runs = [read_run(Path(name)) for name in arguments.runs]
    path = Path(arguments.output) if arguments.output else runs[0].folder / "report.html"
    if path.suffix == ".png":
        raise UserError(
            f"{path}: the report is HTML, with a picture beside it; name a file such as {path.with_suffix('.html')}"
        )
    made = [path]
    try:
        replace_file(path, page(runs, [planned(run) for run in runs]))
        if can_draw():
            made.append(path.with_suffix(".png") if arguments.output else path.with_name("loss.png"))
            draw_loss(runs, made[-1])
        else:
            print('no PNG of the loss: it needs matplotlib, pip install "finetune[plots]"', file=sys.stderr)
    except OSError as error:
        raise UserError(f"{made[-1]}: cannot be written ({error.strerror}); name another file with --output") from None
    for one in made:
        print(one)
    return 0
