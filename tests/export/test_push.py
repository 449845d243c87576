"""What `--push-to-hub` sends, to a stand-in hub: a server here that speaks the calls huggingface_hub makes (no hub is at hand)."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_chat, make_model
from tests.ranks import run_python
from tests.training.layouts import train_all, write_config, write_recipe


class StandIn(ThreadingHTTPServer):
    """Repositories with what was committed to them, and large files by their hash."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.sent: list[str] = []  # hashes of the large files, each time one arrives
        self.commits_fail = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content: Any, status: int = 200) -> None:
        sent = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def do_GET(self) -> None:
        self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        content = self.body()
        name = hashlib.sha256(content).hexdigest()
        assert self.path == f"/stored/{name}"
        self.server.stored[name] = content
        self.server.sent.append(name)
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        if self.headers.get("Authorization") != "Bearer hf_of_a_test":
            self.answer({"error": "Invalid token"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/mine", "id": "me/mine"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = {
                each["path"]: "lfs"
                if each["path"].endswith((".safetensors", ".gguf"))
                else "regular"
                for each in files
            }
            self.answer(
                {
                    "files": [
                        {"path": p, "uploadMode": m, "shouldIgnore": False}
                        for p, m in modes.items()
                    ]
                }
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            self.answer(
                {
                    "transfer": "basic",
                    "objects": [self.ask_for(each) for each in json.loads(body)["objects"]],
                }
            )
        elif self.path.endswith("/commit/main"):
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": f"not spoken here: {self.path}"}, 400)

    def ask_for(self, described: dict[str, Any]) -> dict[str, Any]:
        name = described["oid"]
        action = {"actions": {"upload": {"href": f"{self.server.url}/stored/{name}"}}}
        return described | ({} if name in self.server.stored else action)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        if self.server.commits_fail:
            self.answer({"error": "out of order"}, 400)
            return
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
        self.answer({"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1" * 40})


@pytest.fixture
def hub() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.02))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run on a base, and data, in folders of this machine."""
    folder = tmp_path_factory.mktemp("secret-place")
    model, data = make_model(folder / "model"), make_chat(folder / "private-rows.jsonl", rows=24)
    recipe = write_recipe(
        folder / "recipe.yaml",
        model,
        data,
        global_batch_size=4,
        max_steps=3,
        use_peft=True,
        eval_split_size=4,
    )
    train_all(
        folder, [(recipe, write_config(folder, "single"), [f"output_dir={folder}/run"])], ranks=1
    )
    return folder / "run"


def push(run: Path, out: Path, hub: StandIn, *flags: str) -> Any:
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_of_a_test",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [
        "-m",
        "finetune",
        "export",
        str(run),
        "--output",
        str(out),
        "--push-to-hub",
        "me/mine",
        *flags,
    ]
    return run_python(command, env=env)


def test_the_export_is_pushed_whole_private_and_says_nothing_of_this_machine(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    done = push(run, tmp_path / "out", hub)
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.url}/me/mine" in done.stdout
    assert [(each["name"], each["organization"], each["visibility"]) for each in hub.created] == [
        ("mine", "me", "private")
    ]
    local = {
        str(path.relative_to(tmp_path / "out")): path
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert hub.files.keys() == local.keys()
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "adapter/adapter_model.safetensors",
    } <= hub.files.keys()
    assert not [
        name
        for name in hub.files
        if any(word in name for word in ("optimizer", "checkpoint", "metrics", "jsonl"))
    ]
    for name, content in hub.files.items():
        assert str(run.parent).encode() not in content and b"secret-place" not in content, name
        assert str(Path.home()).encode() not in content, name
        if name != "adapter/adapter_config.json":
            assert content == local[name].read_bytes()
    assert (
        json.loads(hub.files["adapter/adapter_config.json"])["base_model_name_or_path"] == "model"
    )
    assert "the base is uploaded as model, without its folder here" in done.stdout


def test_a_push_that_failed_is_tried_again_without_sending_the_weights_again(
    hub: StandIn, run: Path, tmp_path: Path
) -> None:
    hub.commits_fail = True
    done = push(run, tmp_path / "out", hub)
    assert done.returncode == 1
    assert (
        "me/mine: not pushed (" in done.stdout
        and "try again: the same command with --overwrite" in done.stdout
    )
    assert (tmp_path / "out" / "model.safetensors").exists() and not hub.files
    sent, hub.commits_fail = list(hub.sent), False
    assert len(sent) == 2
    done = push(run, tmp_path / "out", hub, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert hub.sent == sent and "model.safetensors" in hub.files
