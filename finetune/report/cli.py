"""`finetune report`: one HTML page of a run or of several, and their losses as a PNG."""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.files.durable import replace_file, restore_exports
from finetune.report.charts import can_draw_png, draw_loss_png
from finetune.report.page import render_page
from finetune.report.run_data import plan_run, read_run


def report_command(arguments: argparse.Namespace) -> int:
    """Writes the report of `arguments.runs`, and the loss as a PNG beside it, and prints both paths; or serves the report.

    Returns the exit code.
    """
    for name in arguments.runs:
        restore_exports(Path(name))
    if arguments.serve:
        return _serve(arguments)
    if arguments.port is not None:
        raise UserError("--port: goes with --serve")
    runs = [read_run(Path(name)) for name in arguments.runs]
    path = Path(arguments.output) if arguments.output else runs[0].folder / "report.html"
    if path.suffix == ".png":
        raise UserError(
            f"{path}: the report is HTML and writes its PNG beside it; pass --output {path.with_suffix('.html')}"
        )
    written = [path]
    try:
        replace_file(path, render_page(runs, [plan_run(run) for run in runs]))
        if can_draw_png():
            written.append(path.with_suffix(".png") if arguments.output else path.with_name("loss.png"))
            draw_loss_png(runs, written[-1])
        else:
            print('no PNG of the loss: matplotlib is not installed; pip install "finetune[plots]"', file=sys.stderr)
    except OSError as error:
        raise UserError(
            f"{written[-1]}: cannot be written ({error.strerror}); name another file with --output"
        ) from None
    for each in written:
        print(each)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from finetune.report.serve import serve_report

    if arguments.output is not None:
        raise UserError("--output: --serve writes no file; use one of the two")
    folders = [Path(name) for name in arguments.runs]
    for folder in folders:
        if not folder.is_dir():  # one that has not logged yet is waited for
            raise UserError(f"{folder}: no such folder; name a run's folder, such as runs/quickstart")
    serve_report(folders, arguments.port)
    return 0
