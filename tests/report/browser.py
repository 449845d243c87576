"""A real Chromium for the tests that look at a page; without one they skip and say so."""

import html
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
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
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on this machine; install it (Debian: apt-get install chromium) to look at the report")
    return found


def look(page: Path, folder: Path, *, width: int, height: int, dark: bool, script: str) -> tuple[Any, Path]:
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
