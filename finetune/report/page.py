"""`finetune report`: writes an HTML page about one or several runs and a PNG of their losses.

With --serve it serves the page instead, which follows the runs while they train. `Plots` shows the
plots in a notebook.
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
    RECIPE,
    REPORTED_FILES,
    SHARDING,
    RunRecord,
    describe_in_one_line,
    describe_run,
    format_value,
    list_data_sources,
    plan_run,
    read_run,
)
from finetune.units import counted

HERE = Path(__file__).parent
WAITING = "for the first line of metrics; this page then shows it"  # after the title "Waiting"
# keys of the recipe that differ in all runs, so that they are not listed as differences
ALWAYS_DIFFERENT = ("output_dir", "run_name")
# keys of the Accelerate file that are not compared, as `ranks` and `device` already say it
NOT_COMPARED = ("num_processes", "distributed_type", "use_cpu")


def render_page(
    runs: Sequence[RunRecord],
    plans: Sequence[Plan | None],
    *,
    live: bool = False,
    notices: Sequence[str] = (),
) -> str:
    """Renders the HTML page of one run, or of several runs with their plots overlaid.

    Args:
        runs: The contents of the runs' folders; none if no run has logged yet.
        plans: The plan of each run; None if it cannot be made.
        live: Whether the page fetches itself again while it is open.
        notices: Sentences at the top of the page.
    """
    planned_bytes = [plan.peak_bytes + plan.process_bytes if plan else None for plan in plans]
    charts = make_charts(runs, planned_bytes)
    columns = _list_source_columns(runs)
    sections = [
        describe_run(run, plan, columns, live=live) for run, plan in zip(runs, plans, strict=True)
    ]
    # without repetitions, in order
    tile_names = list(dict.fromkeys(tile.name for section in sections for tile in section["tiles"]))
    page = _template().render(
        title=" · ".join(run.name for run in runs) or "Waiting",
        subtitle=_subtitle(runs),
        live=live,
        notices=notices,
        runs=sections,
        source_columns=[name.replace("_", " ") for name in columns],
        tile_names=tile_names,
        differing=list_differences(runs),
        charts=charts,
        folders=", ".join(str(run.folder) for run in runs),
        version=__version__,
        style=_read_style(),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        live_script=Markup((HERE / "live.js").read_text(encoding="utf-8")),
        data=_list_points(charts),
    )
    # a run's JSON may hold half of a surrogate pair, which UTF-8 cannot encode
    return page.encode("utf-8", "replace").decode()


def _list_source_columns(runs: Sequence[RunRecord]) -> list[str]:
    """Lists the columns of the tables of data sources.

    Without "pairs" if all runs use answers, and without "images" if no rows hold any.
    """
    left_out = set()
    if all(run.rows == "answers" for run in runs):
        left_out.add("pairs")
    if not any(source.get("images") for run in runs for source in list_data_sources(run)):
        left_out.add("images")
    return [name for name in OF_SOURCE if name not in left_out]


def _list_points(charts: Sequence[Chart]) -> Markup:
    """Writes the points of all charts as JSON for a script element; page.js shows them on hover."""
    points = {}
    for chart in charts:
        points[chart.key] = [
            {"label": line.label, "run": line.run, "points": line.points, "steps": line.steps}
            for line in chart.lines
        ]
    # a run's name may hold "</script>"
    return Markup(json.dumps(points, separators=(",", ":")).replace("<", "\\u003c"))


def _subtitle(runs: Sequence[RunRecord]) -> str:
    """Describes the only run, or counts the runs."""
    if not runs:
        return WAITING
    if len(runs) == 1:
        return describe_in_one_line(runs[0])
    return counted(len(runs), "run")


def render_plots(run: RunRecord) -> str:
    """Renders the plots of one run as HTML with their style, without the rest of the page."""
    template = _template()
    charts = make_charts([run], planned_bytes=[None])
    plots = template.blocks["plots"](template.new_context({"charts": charts}))
    return f"<style>{_read_style()} body {{ padding: 0 }}</style>{''.join(plots)}"


def _template() -> jinja2.Template:
    """Loads the template of the page. It escapes every value that is not `Markup`."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html.jinja").read_text(encoding="utf-8"))


def _read_style() -> Markup:
    """Reads the page's CSS."""
    return Markup((HERE / "page.css").read_text(encoding="utf-8"))


def list_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Lists the settings in which the runs differ: (key, value of each run as text).

    Settings are layout, ranks, device, and the keys of the Accelerate file and the recipe. Each
    entry of a list or mapping is compared alone. "–" stands for a value that a run does not have.
    """
    settings_by_run = []
    for run in runs:
        machine = {key: run.environment.get(key) for key in ("layout", "ranks", "device")}
        sharding = {key: value for key, value in run.sharding.items() if key not in NOT_COMPARED}
        settings_by_run.append(dict(leaves(machine | {"accelerate": sharding} | run.recipe)))
    # without repetitions, in order
    keys = dict.fromkeys(key for settings in settings_by_run for key in settings)
    differences = []
    for key in keys:
        if key in ALWAYS_DIFFERENT:
            continue
        values = [
            format_value(settings[key]) if key in settings else "–" for settings in settings_by_run
        ]
        if len(set(values)) > 1:
            differences.append((key, values))
    return differences


SECONDS = 1.0  # the shortest time between two drawings
HEIGHT = 430  # pixels of the frame; it shows the loss, and one scrolls to the other plots


class Plots:
    """A callback that shows the run's plots below the notebook cell that trains."""

    def __init__(self) -> None:
        self._display: Any = None  # the handle of what IPython displays
        self._drawn_at = 0.0  # by `time.monotonic`

    def on_log(self, event: Any) -> None:
        """Draws the plots, unless they were drawn within the last SECONDS."""
        if time.monotonic() > self._drawn_at + SECONDS:
            self._draw(event.folder)

    def on_end(self, event: Any) -> None:
        """Draws the plots a last time, with everything that was logged."""
        self._draw(event.folder)

    def _draw(self, folder: Path) -> None:
        """Draws the plots of the run in `folder`, in place of those drawn before."""
        from IPython.display import HTML, display

        with suppress(Exception):  # a plot must not end the training
            page = html.escape(render_plots(read_run(folder)))
            frame = HTML(
                f'<div><iframe srcdoc="{page}" '
                f'style="width:100%;height:{HEIGHT}px;border:0"></iframe></div>'
            )
            if self._display is None:
                self._display = display(frame, display_id=True)
            else:
                self._display.update(frame)
        self._drawn_at = time.monotonic()


ADDRESS = "127.0.0.1"  # only this machine can connect: a report shows data without a password
DEFAULT_PORT = 8000
PORTS_TRIED = 20  # ports that are tried without --port, from DEFAULT_PORT
MAX_CONNECTIONS = 64  # each has a thread, even if it sends no request
# Host headers that are answered. Another site may let its name resolve to 127.0.0.1 to read the
# report through a browser; the Host header is then that site's name.
HOSTS = ("127.0.0.1", "localhost", "[::1]")


def serve_report(folders: Sequence[Path], port: int | None) -> None:
    """Serves the report of the runs in `folders` until Ctrl-C, and prints its address.

    If `port` is None, the first free port from DEFAULT_PORT is used. Raises `UserError` if the port
    is taken or wrong.
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
    """The report's HTML, which is rendered again after a file of a run has changed.

    Several threads may use it.
    """

    folders: tuple[Path, ...]
    _state: str = ""  # hash of the runs' files when `_html` was rendered
    _html: bytes = b""
    # hash of the files that a plan needs -> the plan
    _plans: dict[str, Plan | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> tuple[str, bytes]:
        """Returns (hash of the state of the runs' files, the page for that state)."""
        with self._lock:
            paths = [path for folder in self.folders for path in _list_reported_files(folder)]
            state = _hash_state(paths)
            if state != self._state:
                self._html = self._render()
                self._state = state
            return state, self._html

    def _render(self) -> bytes:
        """Renders the page. A run that cannot be read becomes a notice on it."""
        runs = []
        notices = []
        for folder in self.folders:
            try:
                runs.append(read_run(folder))
            except UserError as error:  # the run has not logged yet, or a file is damaged
                notices.append(str(error))
        return render_page(
            runs, [self._plan(run) for run in runs], live=True, notices=notices
        ).encode()

    def _plan(self, run: RunRecord) -> Plan | None:
        """Plans the run, or returns the plan made before if its files are the same."""
        # a checkpoint has the model's config, from which `plan_run` plans once it is there
        configs = sorted(run.folder.glob("checkpoints/step-*/model/config.json"))[:1]
        files = [run.folder / name for name in (RECIPE, SHARDING, "environment.json")]
        key = _hash_state([*files, *configs])
        if key not in self._plans:
            self._plans[key] = plan_run(run)
        return self._plans[key]


def _list_reported_files(folder: Path) -> list[Path]:
    """Lists the paths of the files in a run's folder that the report shows; some may not exist."""
    return [
        *(folder / name for name in REPORTED_FILES),
        *sorted(folder.glob("checkpoints/step-*/manifest.json")),
    ]


def _hash_state(paths: Sequence[Path]) -> str:
    """Hashes the path, size, modification time and inode of each file, and not its content.

    Of a missing file it hashes the path alone.
    """
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
    """Opens a server of `page` on `port`, or on the first free port from DEFAULT_PORT.

    Raises `UserError` if no port can be used.
    """

    class Handler(_Handler):
        live_page = page

    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else [port]
    for candidate in ports:
        try:
            return _Server((ADDRESS, candidate), Handler)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        except OverflowError:
            reason = "not from 0 to 65535"
    raise UserError(f"--port {ports[-1]}: {reason}; choose another port")


class _Server(ThreadingHTTPServer):
    """A server with a thread for each of at most MAX_CONNECTIONS connections."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"
    request_queue_size = MAX_CONNECTIONS  # with the default of 5, further connections wait seconds

    def __init__(self, *arguments: Any) -> None:
        self.free_connections = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accepts the connection if fewer than MAX_CONNECTIONS are open; else it is closed."""
        return self.free_connections.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection's requests until it ends, then gives its place free."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints the error, except when a browser closes the connection while a page is sent."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page, at / only."""

    live_page: LivePage  # set in a subclass by `_open_server`
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds that an idle connection is kept

    def do_GET(self) -> None:
        """Sends the page, or 304 (not modified) if the browser has it in its current state."""
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

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str, state: str | None = None
    ) -> None:
        """Sends an answer. `state` is its ETag, which the browser sends with its next request."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        if state is not None:
            self.send_header("ETag", f'"{state}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing; the base class prints every request."""


def report_command(arguments: argparse.Namespace) -> int:
    """Writes the report of `arguments.runs` and a PNG of the loss, and prints both paths.

    With `arguments.serve` it serves the report instead. Each name in `arguments.runs` is a run's
    folder or a folder of several runs; the files are written to the first folder unless
    `arguments.output` is given. Without matplotlib there is no PNG.

    Returns the exit code 0. Raises `UserError` if a run cannot be read or a file not written.
    """
    first_folder = Path(arguments.runs[0])
    # a folder of runs stands for the runs in it
    folders = [
        folder for name in arguments.runs for folder in list_runs(Path(name)) or [Path(name)]
    ]
    for folder in folders:
        restore_exports(folder)
    if arguments.serve:
        return _serve(arguments, folders)
    if arguments.port is not None:
        raise UserError("--port: has no effect without --serve; add it, or leave --port out")
    if arguments.output and Path(arguments.output).suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"--output: {arguments.output}: the report is HTML and writes its PNG beside it; its "
            "name ends in .html, for example --output report.html"
        )
    runs = [read_run(folder) for folder in folders]
    if arguments.output:
        path = Path(arguments.output)
        png_path = path.with_suffix(".png")
    else:
        path = first_folder / "report.html"
        png_path = first_folder / "loss.png"
    written = [path]
    try:
        replace_file(path, render_page(runs, [plan_run(run) for run in runs]))
        if find_spec("matplotlib") is not None:
            written.append(png_path)
            draw_loss_png(runs, png_path)
        else:
            command = install_command("plots")
            print(f"no PNG of the loss: matplotlib is not installed; {command}", file=sys.stderr)
    except OSError as error:
        raise UserError(
            f"{written[-1]}: cannot be written ({error.strerror}); name another file with --output"
        ) from None
    for written_path in written:
        print(written_path)
    return 0


def _serve(arguments: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Serves the report of the runs in `folders` until Ctrl-C; returns the exit code 0.

    Raises `UserError` with --output, or if a folder does not exist.
    """
    if arguments.output is not None:
        raise UserError("--output: --serve writes no file; use one of the two")
    for folder in folders:
        # a folder without metrics is no error: the page waits for the run's first line
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; name a run's folder, such as runs/quickstart"
            )
    serve_report(folders, arguments.port)
    return 0
