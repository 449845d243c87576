"""`finetune report`: writes one HTML page about one or more runs, and their losses as a PNG, or
serves the page while they train.
"""

import argparse
import hashlib
import html
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from finetune import __version__
from finetune.config.keys import leaves
from finetune.errors import UserError, install_command
from finetune.files.durable import replace_file, restore_exports
from finetune.files.run_files import list_runs
from finetune.plan.plan import Plan
from finetune.report.charts import Chart, draw_loss_png, make_charts
from finetune.report.run_data import (
    OF_SOURCE,
    REPORTED_FILES,
    RunRecord,
    describe_in_one_line,
    describe_run,
    format_value,
    plan_run,
    read_run,
)
from finetune.units import counted

HERE = Path(__file__).parent
WAITING = "for the first line of metrics; this page then shows it"
ALWAYS_DIFFERENT = ("output_dir", "run_name")
# keys of the Accelerate file that `ranks` and `device` say too
NOT_COMPARED = ("num_processes", "distributed_type", "use_cpu")


def render_page(
    runs: Sequence[RunRecord],
    plans: Sequence[Plan | None],
    *,
    live: bool = False,
    notices: Sequence[str] = (),
) -> str:
    """Renders the whole page of one run, or of several with their plots overlaid.

    Args:
        runs: What their folders hold.
        plans: Each run's plan; None where it cannot be made.
        live: Whether the page fetches itself again while it is open.
        notices: Sentences at the top of the page.
    """
    planned_bytes = [plan.peak_bytes + plan.process_bytes if plan else None for plan in plans]
    charts = make_charts(runs, planned_bytes)
    columns = _list_source_columns(runs)
    sections = [
        describe_run(run, plan, columns, live=live) for run, plan in zip(runs, plans, strict=True)
    ]
    names = list(dict.fromkeys(tile.name for section in sections for tile in section["tiles"]))
    page = _template().render(
        title=" · ".join(run.name for run in runs) or "Waiting",
        subtitle=_subtitle(runs),
        live=live,
        notices=notices,
        runs=sections,
        source_columns=[name.replace("_", " ") for name in columns],
        tile_names=names,
        differing=list_differences(runs),
        charts=charts,
        folders=", ".join(str(run.folder) for run in runs),
        version=__version__,
        style=_style(),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        live_script=Markup((HERE / "live.js").read_text(encoding="utf-8")),
        data=_list_points(charts),
    )
    # A run's JSON may hold half of a surrogate pair, which UTF-8 cannot encode.
    return page.encode("utf-8", "replace").decode()


def _list_source_columns(runs: Sequence[RunRecord]) -> list[str]:
    """The columns of the tables of data sources; runs on answers alone have no pairs."""
    has_pairs = any(run.rows != "answers" for run in runs)
    return [name for name in OF_SOURCE if name != "pairs" or has_pairs]


def _list_points(charts: Sequence[Chart]) -> Markup:
    """The points of all charts as JSON for the tooltips of page.js."""
    points = {}
    for chart in charts:
        points[chart.key] = [
            {"label": line.label, "run": line.run, "points": line.points, "steps": line.steps}
            for line in chart.lines
        ]
    # A run's name may hold `</script>`.
    return Markup(json.dumps(points, separators=(",", ":")).replace("<", "\\u003c"))


def _subtitle(runs: Sequence[RunRecord]) -> str:
    if not runs:
        return WAITING
    if len(runs) == 1:
        return describe_in_one_line(runs[0])
    return counted(len(runs), "run")


def render_plots(run: RunRecord) -> str:
    """Renders the plots of one run without the rest of the page."""
    template = _template()
    plots = template.blocks["plots"](template.new_context({"charts": make_charts([run], [None])}))
    return f"<style>{_style()} body {{ padding: 0 }}</style>{''.join(plots)}"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html.jinja").read_text(encoding="utf-8"))


def _style() -> Markup:
    return Markup((HERE / "page.css").read_text(encoding="utf-8"))


def list_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Lists the settings in which the runs differ, each with every run's value.

    Settings are layout, ranks, device and the recipe's keys; of lists and mappings their entries.
    """
    settings = []
    for run in runs:
        machine = {key: run.environment.get(key) for key in ("layout", "ranks", "device")}
        spread = {key: value for key, value in run.sharding.items() if key not in NOT_COMPARED}
        settings.append(dict(leaves(machine | {"accelerate": spread} | run.recipe)))
    keys = list(
        dict.fromkeys(key for of_run in settings for key in of_run if key not in ALWAYS_DIFFERENT)
    )
    values = [
        (key, [format_value(of_run[key]) if key in of_run else "–" for of_run in settings])
        for key in keys
    ]
    return [(key, of_runs) for key, of_runs in values if len(set(of_runs)) > 1]


SECONDS = 1.0  # at least, between two drawings
HEIGHT = 430  # pixels; shows the loss, the reader scrolls to the other plots


class Plots:
    """A callback that shows the run's plots below the cell that trains."""

    def __init__(self) -> None:
        self._shown: Any = None
        self._drawn_at = 0.0

    def on_log(self, event: Any) -> None:
        """Draws, unless it has drawn within the last SECONDS."""
        if time.monotonic() > self._drawn_at + SECONDS:
            self._draw(event.folder)

    def on_end(self, event: Any) -> None:
        """Draws everything that was logged."""
        self._draw(event.folder)

    def _draw(self, folder: Path) -> None:
        from IPython.display import HTML, display

        with suppress(UserError, OSError):  # a plot must not end the training
            page = html.escape(render_plots(read_run(folder)))
            frame = HTML(
                f'<div><iframe srcdoc="{page}" '
                f'style="width:100%;height:{HEIGHT}px;border:0"></iframe></div>'
            )
            if self._shown is None:
                self._shown = display(frame, display_id=True)
            else:
                self._shown.update(frame)
        self._drawn_at = time.monotonic()


ADDRESS = "127.0.0.1"  # this machine alone: a report shows data without a password
DEFAULT_PORT = 8000
PORTS_TRIED = 20
MAX_CONNECTIONS = 64  # each has a thread, even one that sends no request
# Another site may let its name resolve to 127.0.0.1 to read the report; its Host header differs.
HOSTS = ("127.0.0.1", "localhost", "[::1]")


def serve_report(folders: Sequence[Path], port: int | None) -> None:
    """Serves the report of the runs in `folders` until Ctrl-C; prints its address.

    Raises `UserError` where `port` is taken; without one, the next that is free is used.
    """
    page = LivePage(tuple(folders))
    with _open_server(page, port) as server:
        print(f"http://{ADDRESS}:{server.server_port}   Ctrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


@dataclass(slots=True)
class LivePage:
    """The report's HTML, rendered again when a file of a run has changed."""

    folders: tuple[Path, ...]
    _state: str = ""
    _html: bytes = b""
    _plans: dict[str, Plan | None] = field(default_factory=dict)  # by a hash of the files they need
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> tuple[str, bytes]:
        """Returns (a hash of the runs' state, the page)."""
        with self._lock:
            state = _hash_state(
                [path for folder in self.folders for path in _reported_files(folder)]
            )
            if state != self._state:
                self._html = self._render()
                self._state = state
            return state, self._html

    def _render(self) -> bytes:
        runs = []
        notices = []
        for folder in self.folders:
            try:
                runs.append(read_run(folder))
            except UserError as error:  # it has not logged yet, or a file is damaged
                notices.append(str(error))
        return render_page(
            runs, [self._plan(run) for run in runs], live=True, notices=notices
        ).encode()

    def _plan(self, run: RunRecord) -> Plan | None:
        configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))[:1]
        key = _hash_state([run.folder / "recipe.yaml", run.folder / "environment.json", *configs])
        if key not in self._plans:
            self._plans[key] = plan_run(run)
        return self._plans[key]


def _reported_files(folder: Path) -> list[Path]:
    return [
        *(folder / name for name in REPORTED_FILES),
        *sorted(folder.glob("checkpoints/step-*/manifest.json")),
    ]


def _hash_state(paths: Sequence[Path]) -> str:
    """Hashes the names, sizes and times of `paths`; a missing file by its name alone."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            stat = os.stat(path)  # noqa: PTH116  # raises an OSError for every path without a file
            digest.update(
                f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode(
                    errors="replace"
                )
            )
        except OSError:
            digest.update(f"{path}\n".encode(errors="replace"))
    return digest.hexdigest()[:32]


def _open_server(page: LivePage, port: int | None) -> ThreadingHTTPServer:
    class Handler(_Handler):
        live_page = page

    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else [port]
    for each in ports:
        try:
            return _Server((ADDRESS, each), Handler)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        except OverflowError:
            reason = "not from 0 to 65535"
    raise UserError(f"--port {ports[-1]}: {reason}; choose another port")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name == "posix"
    request_queue_size = MAX_CONNECTIONS  # with the default of 5, others wait for seconds

    def __init__(self, *arguments: Any) -> None:
        self.free_connections = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.free_connections.acquire(blocking=False)  # else the connection is closed

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser may close the page while it is sent.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    live_page: LivePage
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds that an idle connection is kept

    def do_GET(self) -> None:
        if re.sub(r":\d+$", "", self.headers.get("Host", "")) not in HOSTS:
            return self._answer(
                HTTPStatus.FORBIDDEN, b"this report is served to localhost alone\n", "text/plain"
            )
        if self.path.partition("?")[0] != "/":
            return self._answer(HTTPStatus.NOT_FOUND, b"the report is at /\n", "text/plain")
        state, html = self.live_page.current()
        if self.headers.get("If-None-Match") == f'"{state}"':
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", "text/html; charset=utf-8", state)
        return self._answer(HTTPStatus.OK, html, "text/html; charset=utf-8", state)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, state: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        if state is not None:
            self.send_header("ETag", f'"{state}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def report_command(arguments: argparse.Namespace) -> int:
    """Writes the report of `arguments.runs` and a PNG of the loss, and prints both paths; or serves
    the report.

    Returns the exit code.
    """
    first = Path(arguments.runs[0])
    arguments.runs = [
        str(each) for name in arguments.runs for each in list_runs(Path(name)) or [name]
    ]
    for name in arguments.runs:
        restore_exports(Path(name))
    if arguments.serve:
        return _serve(arguments)
    if arguments.port is not None:
        raise UserError("--port: has no effect without --serve; add it, or leave --port out")
    if arguments.output and Path(arguments.output).suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"--output: {arguments.output}: the report is HTML and writes its PNG beside it; its "
            "name ends in .html, for example --output report.html"
        )
    runs = [read_run(Path(name)) for name in arguments.runs]
    if arguments.output:
        path = Path(arguments.output)
    else:
        path = first / "report.html"
    written = [path]
    try:
        replace_file(path, render_page(runs, [plan_run(run) for run in runs]))
        if find_spec("matplotlib") is not None:
            written.append(
                path.with_suffix(".png") if arguments.output else path.with_name("loss.png")
            )
            draw_loss_png(runs, written[-1])
        else:
            command = install_command("plots")
            print(f"no PNG of the loss: matplotlib is not installed; {command}", file=sys.stderr)
    except OSError as error:
        raise UserError(
            f"{written[-1]}: cannot be written ({error.strerror}); name another file with --output"
        ) from None
    for each in written:
        print(each)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        raise UserError("--output: --serve writes no file; use one of the two")
    folders = [Path(name) for name in arguments.runs]
    for folder in folders:
        if not folder.is_dir():  # a run that has not logged yet is no error: the page waits for it
            raise UserError(
                f"{folder}: no such folder; name a run's folder, such as runs/quickstart"
            )
    serve_report(folders, arguments.port)
    return 0
