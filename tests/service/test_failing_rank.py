"""A service on two ranks, of which one fails alone in an operation while the other waits for it in a collective."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks, start_ranks
from tests.service.served import call, datum, encode_forward_backward, fetch
from tests.training.layouts import write_config

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("google.protobuf")

PLAIN = [1, 403, 407, 261]
FAILS = {"memory": 400, "fault": 401}  # at these tokens
SECONDS = 30.0  # where a collective would wait for half an hour


@contextmanager
def serving(folder: Path, model: Path, *faults: str) -> Iterator[tuple[Ranks, str]]:
    """The server on two ranks, and its address."""
    layout = write_config(folder, "ddp")
    recipe = {"model_name_or_path": str(model), "use_peft": True, "output_dir": str(folder / "run")}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    options = ["--recipe", str(folder / "recipe.yaml"), "--config", str(layout), "--port", "0"]
    script = Path(__file__).with_name("serve_with_fault.py")
    ranks = start_ranks(script, [*faults, "--", *options])
    try:
        deadline = time.monotonic() + 120
        while (said := re.search(r"clients TINKER_BASE_URL=(\S+)", ranks.output(0))) is None:
            assert time.monotonic() < deadline, ranks.output(0) + ranks.output(1)
            time.sleep(0.05)
        yield ranks, f"{said[1]}/api/v1/"
    finally:
        ranks.kill()


class Client:
    """A model over HTTP."""

    def __init__(self, url: str) -> None:
        session = call(f"{url}create_session", {})[1]["session_id"]
        model = call(f"{url}get_server_capabilities")[1]["supported_models"][0]["model_name"]
        config = {"rank": 4, "seed": 0}
        asked = {"session_id": session, "model_seq_id": 0, "base_model": model}
        made = call(f"{url}create_model", asked | {"lora_config": config})[1]
        self.url = url
        self.name = made["model_id"]
        self.sent = 0
        assert self.result(made)[0] == 200

    def _own(self) -> dict[str, Any]:
        self.sent += 1
        return {"model_id": self.name, "seq_id": self.sent}

    def result(self, promise: dict[str, Any]) -> tuple[int, bytes]:
        return fetch(f"{self.url}retrieve_future", {"request_id": promise["request_id"]})

    def pass_data(self, ids: list[int]) -> tuple[int, bytes]:
        body = encode_forward_backward([datum(ids, weights=1.0)] * 2, **self._own())
        headers = {"Content-Type": "application/x-protobuf"}
        return self.result(call(f"{self.url}forward_backward", body, **headers)[1])

    def step(self) -> tuple[int, bytes]:
        asked = self._own() | {"adam_params": {"learning_rate": 1e-3}}
        return self.result(call(f"{self.url}optim_step", asked)[1])


@pytest.mark.parametrize(
    ("kind", "rank", "sentence"),
    [
        ("memory", 1, "out of memory: CUDA out of memory"),
        pytest.param("fault", 0, "a kernel has failed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_alone_ends_all_in_a_sentence_and_a_restart_goes_on(
    shared: Path, tmp_path: Path, kind: str, rank: int, sentence: str
) -> None:
    model = shared / "models" / "stories260k"
    with serving(tmp_path, model, f"{FAILS[kind]}:{rank}:{kind}") as (ranks, url):
        client = Client(url)
        assert b"error" not in client.pass_data(PLAIN)[1]
        assert b"error" not in client.step()[1]
        before = time.monotonic()
        answer = json.loads(client.pass_data([*PLAIN, FAILS[kind], 5])[1])
        assert time.monotonic() - before < SECONDS
        assert answer["category"] == "server" and f"rank {rank}: " in answer["error"]
        assert sentence in answer["error"] and "start the same command again" in answer["error"]
        finished = ranks.wait(SECONDS)
    assert 0 not in finished.returncodes
    assert all(sentence in output for output in finished.outputs)
    with serving(tmp_path, model) as (_, url):
        client.url = url
        assert json.loads(client.pass_data([*PLAIN, 600])[1])["category"] == "user"
        assert b"error" not in client.pass_data([*PLAIN, FAILS[kind], 5])[1]
        assert b"error" not in client.step()[1]
