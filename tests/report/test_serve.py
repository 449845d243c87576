"""`finetune report --serve`: the page of a run in progress, in a browser that stays open, and what the server refuses."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from finetune.report.page import MAX_CONNECTIONS, LivePage, _Handler, _open_server
from finetune.report.run_data import read_run
from tests.ranks import ROOT, default_interrupt, environment, run_command
from tests.report.browser import watch
from tests.report.runs import STEPS, make_run

SECONDS = 60.0  # for a change to be seen; two are enough on a quiet machine
# The first time the page is seen, its recipe is opened and a plot gets the focus: both must outlive every change.
SEEN = """(() => {
  const d = w.document, text = (selector) => [...d.querySelectorAll(selector)].map((each) => each.textContent);
  // The plots' listeners are added at the end of the page; a focus before them shows no values.
  if (d.readyState === 'complete' && !d.body.dataset.seen && d.querySelector('details')) {
    d.body.dataset.seen = 'yes';
    d.querySelector('details').open = true;
    d.querySelector('#loss .plot').focus();
  }
  return {
    loaded: d.body.dataset.seen || 'again', steps: (text('.tile strong')[0] || text('tbody td')[0]), title: d.title, notices: text('.notice'),
    live: text('.live'), state: (d.querySelector('.live') || {dataset: {}}).dataset.state, open: (d.querySelector('details') || {}).open,
    tip: (d.querySelector('#loss .tip') || {}).innerText,
  };
})()"""


@contextmanager
def serve(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The command while it runs, and the port that it prints."""
    command = [sys.executable, "-m", "finetune", "report", *arguments, "--serve"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupt,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        yield process, int(address.rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def wait_for(seen: "Queue[Any]", is_right: Callable[[Any], bool]) -> Any:
    deadline, last = time.monotonic() + SECONDS, None
    while time.monotonic() < deadline:
        last = seen.get(timeout=SECONDS)
        if is_right(last):
            return last
    raise AssertionError(f"not seen within {SECONDS:.0f} s; at last {last}")


def test_an_open_page_shows_what_its_runs_write(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    done, growing = (
        make_run(tmp_path / "done", recipe),
        make_run(tmp_path / "growing", recipe, learning_rate=2e-3),
    )
    lines = (growing / "metrics.jsonl").read_text().splitlines(keepends=True)
    (growing / "metrics.jsonl").unlink()
    picture = tmp_path / "live.png"
    with serve(str(growing), str(done)) as (process, port):
        with watch(f"http://127.0.0.1:{port}/", picture, script=SEEN) as seen:
            first = wait_for(seen, lambda page: page.get("tip"))
            assert first["title"] == "done"
            assert first["notices"] == [
                f"{growing}: no metrics.jsonl; it is not a run's folder, or the run has not logged yet"
            ]
            (growing / "metrics.jsonl").write_text("".join(lines[:20]))
            both = wait_for(seen, lambda page: page["title"] == "growing · done")
            assert both["notices"] == []
            with (growing / "metrics.jsonl").open("a") as file:
                file.write("".join(lines[20:]))
            last = wait_for(seen, lambda page: page.get("steps", "").startswith(f"{STEPS}"))
            assert last["loaded"] == "yes", "the page was never reloaded"
            assert last["open"] is True, "what was opened stays open"
            assert last["tip"].startswith(f"step {STEPS}\ngrowing "), (
                "the values at the cursor are the new ones"
            )
            assert last["live"][0].startswith("live, as of ")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            ended = wait_for(seen, lambda page: page.get("state") == "lost")
            assert ended["live"] == ["no answer: finetune report --serve has ended"]
        assert picture.read_bytes().startswith(b"\x89PNG")


def wait_until_answered(get: Callable[[], http.client.HTTPResponse]) -> None:
    """Repeats a request until the server has a thread for it; fails after 30 seconds."""
    deadline = time.monotonic() + 30
    while True:
        try:
            assert get().status == 200
            return
        except ConnectionError:  # closed without an answer: every thread is still taken
            assert time.monotonic() < deadline, "the closed connections keep their threads"
            time.sleep(0.05)


def test_only_what_has_changed_is_sent_and_to_this_machine_alone(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    with serve(str(run)) as (_, port):

        def get(path: str = "/", **headers: str) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path, headers=headers)
            return connection.getresponse()

        first = get()
        assert first.status == 200
        assert b"live.js" not in (page := first.read()) and b"DOMParser" in page
        tag = str(first.headers["ETag"])
        assert get(**{"If-None-Match": tag}).status == 304
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": STEPS + 1, "eval_loss": 0.123}) + "\n")
        changed = get(**{"If-None-Match": tag})
        assert changed.status == 200
        assert b"0.1230" in changed.read()
        assert get(Host=f"localhost:{port}").status == 200
        assert get(Host=f"elsewhere.example:{port}").status == 403, (
            "no other site's name is answered"
        )
        assert get(Host="[").status == 403
        assert get("//[").status == 404
        assert get("/metrics.jsonl").status == 404, "nothing but the report"
        idle = [
            socket.create_connection(("127.0.0.1", port), timeout=30)
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        assert idle[-1].recv(1) == b"", (
            "one connection too many is closed at once: each takes a thread"
        )
        for connection in idle:
            connection.close()
        wait_until_answered(get)  # the server's threads see a closed connection a moment later
        (run / "metrics.jsonl").write_text('{"step": 1}\n???\n{"step": 2}\n')
        assert b"not a JSON object" in get().read(), (
            "a damaged run is named, and the server keeps running"
        )
        taken = run_command(
            ["python", "-m", "finetune", "report", str(run), "--serve", "--port", str(port)]
        )
        assert (taken.returncode, taken.stderr) == (
            2,
            f"--port {port}: Address already in use; choose another port\n",
        )
    assert not (run / "report.html").exists()


def test_connections_that_ask_for_nothing_are_let_go(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-open ones, and one that sends a letter now and then: each has a thread, and the page must answer again."""
    monkeypatch.setattr(_Handler, "timeout", 0.2)
    run = make_run(tmp_path / "run", tiny_recipe())
    with _open_server(LivePage((run,)), None) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        before = threading.active_count()
        address = ("127.0.0.1", server.server_port)
        held = [socket.create_connection(address, timeout=30) for _ in range(MAX_CONNECTIONS)]
        for connection in held[:5]:
            connection.sendall(b"GET / HT")
        assert [connection.recv(1) for connection in held] == [b""] * len(held), (
            "closed by the server"
        )
        while threading.active_count() > before + MAX_CONNECTIONS // 2:
            threading.Event().wait(0.01)
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        server.shutdown()


def test_the_page_plans_again_for_another_layout(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    page = LivePage((run,))
    record = read_run(run)
    before = page._plan(record)
    (run / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: no\n")
    after = page._plan(record)
    assert before is not None and after is not None
    assert before.spec.sharding.layout != after.spec.sharding.layout == "ddp"


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for arguments, message in (
        (
            (str(tmp_path / "gone"), "--serve"),
            f"{tmp_path / 'gone'}: no such folder; name a run's folder",
        ),
        (
            (str(tmp_path / "run"), "--serve", "--output", "a.html"),
            "--output: --serve writes no file",
        ),
        (
            (str(tmp_path / "run"), "--port", "8000"),
            "--port: has no effect without --serve; add it",
        ),
        (
            (str(tmp_path / "run"), "--serve", "--port", "65536"),
            "--port 65536: not from 0 to 65535",
        ),
    ):
        ended = run_command(["python", "-m", "finetune", "report", *arguments])
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
        assert ended.stderr.startswith(message)
