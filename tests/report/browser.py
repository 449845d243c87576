"""A real Chromium for the tests that look at a page; without one they skip and say so."""

import html
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]


def chromium() -> str:
    """The browser's program; the test skips where there is none."""
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        pytest.skip(
            "no chromium on this machine; install it (Debian: apt-get install chromium) to look at the report"
        )
    return found


def look(
    page: Path, folder: Path, *, width: int, height: int, dark: bool, script: str
) -> tuple[Any, Path]:
    """Opens `page` in a frame of `width` pixels. Returns what the JavaScript expression `script` is there (the frame's
    window is `w`), and a screenshot."""
    outer = folder / f"{page.stem}-{width}-{'dark' if dark else 'light'}.html"
    # A frame, since a headless window cannot be as narrow as a phone; srcdoc, so that this page may look inside.
    outer.write_text(
        f'<body style="margin:0"><iframe style="width:{width}px;height:{height}px;border:0" '
        f'srcdoc="{html.escape(page.read_text())}"></iframe><pre id="answer" hidden></pre><script>'
        "document.querySelector('iframe').onload = (event) => { const w = event.target.contentWindow;"
        f"document.getElementById('answer').textContent = JSON.stringify({script}); }}</script>"
    )
    picture = outer.with_suffix(".png")
    size = f"--window-size={max(width, 500)},{height}"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    common = [chromium(), *FLAGS, size, scheme]
    with tempfile.TemporaryDirectory() as profile:
        profile_flag = f"--user-data-dir={profile}"
        subprocess.run(
            [*common, profile_flag, f"--screenshot={picture}", f"file://{outer}"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        shown = subprocess.run(
            [*common, profile_flag, "--dump-dom", f"file://{outer}"],
            check=True, capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
    answer = shown.rsplit('<pre id="answer" hidden="">', 1)[1].split("</pre>")[0]
    return json.loads(html.unescape(answer)), picture


@contextmanager
def watch(url: str, picture: Path, *, script: str) -> "Iterator[Queue[Any]]":
    """Opens `url` in a browser that stays open for the block. Yields a queue of what the JavaScript expression `script` is
    there (the page's window is `w`), a few times a second; a screenshot of the end is left in `picture`."""
    seen: Queue[Any] = Queue()
    closing = Event()
    outer = (
        f'<body style="margin:0"><iframe src="{url}" style="width:1280px;height:900px;border:0"></iframe><script>'
        "setInterval(() => { const w = document.querySelector('iframe').contentWindow;"
        f"fetch('/', {{method: 'POST', body: JSON.stringify({script})}}); }}, 250)</script>"
        '<img src="/until-the-end">'  # the browser takes its screenshot when everything has been fetched
    )

    class Outer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/until-the-end":
                closing.wait(120)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(outer.encode())

        def do_POST(self) -> None:
            seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Outer)
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(),
            *FLAGS,
            "--disable-web-security",
            "--disable-site-isolation-trials",
        ]  # to look into the frame
        command += [
            f"--user-data-dir={profile}",
            "--window-size=1280,900",
            f"--screenshot={picture}",
        ]
        browser = subprocess.Popen(
            [*command, f"http://127.0.0.1:{server.server_port}/"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield seen
            closing.set()
            browser.wait(60)
        finally:
            closing.set()
            browser.kill()
            browser.wait()
            server.shutdown()
            server.server_close()
