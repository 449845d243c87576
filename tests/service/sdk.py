"""The Tinker SDK and its cookbook, as their users have them: a home with the tiny model, the server, and scripts."""

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import ROOT

NAME = "Qwen/Qwen3-8B-Base"  # what the tiny model is called, whose renderer the cookbook knows
PACKAGES = ("tinker", "starlette", "uvicorn")
TWO_RANKS = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: 'no'\n"


def make_home(folder: Path, shared: Path, length: int = 512) -> Path:
    """A folder where the tiny model lies under NAME, with a recipe; `length` is that of its contexts."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    (folder / NAME).mkdir(parents=True)
    for path in (shared / "models" / "stories260k").iterdir():
        (folder / NAME / path.name).symlink_to(path)
    config = folder / NAME / "config.json"
    keys = json.loads(config.read_text()) | {"max_position_embeddings": length}
    config.unlink()
    config.write_text(json.dumps(keys))
    (folder / "two.yaml").write_text(TWO_RANKS)
    recipe = {
        "model_name_or_path": NAME,
        "use_peft": True,
        "lora_r": 32,
        "max_length": length,
        "output_dir": "run",
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}


@contextmanager
def server(home: Path, port: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in a process group of its own, once it listens."""
    command = [
        sys.executable,
        "-m",
        "finetune",
        "serve-training",
        "--recipe",
        "recipe.yaml",
        "--port",
        str(port),
    ]
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *more],
            cwd=home,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while b"serving" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_script(home: Path, *command: str, seconds: float = 900) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=home,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout


def state_of(home: Path, run: str, path: str) -> Path:
    """The PEFT folder of a checkpoint."""
    with sqlite3.connect(home / run / "service" / "ledger.sqlite") as ledger:
        query = "SELECT body FROM record WHERE kind = 'checkpoint' AND id = ?"
        (body,) = ledger.execute(query, [path]).fetchone()
    return home / run / "service" / "states" / json.loads(body)["state"]
