"""The border of a service: real HTTP on a port, by urllib; skipped where Starlette or uvicorn is not installed."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from finetune.service import wire
from finetune.service.service import Service
from tests.service.served import call, datum, encode_forward_backward, refusing_changes, serving

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("google.protobuf")

from finetune.service import server
from finetune.service.server import Border, start_server


@pytest.fixture(scope="module")
def service(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("border") / "run"
    with serving(folder, shared / "models" / "stories260k") as service:
        yield service


@contextmanager
def listening(service: Service, key: str | None = None) -> Iterator[str]:
    running, port = start_server(Border(service, key).make_app(), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}/api/v1/"
    finally:
        running.should_exit = True


def test_what_is_no_call_of_the_api_is_refused_in_its_form(service: Service) -> None:
    with listening(service) as url:
        assert call(f"{url}healthz") == (200, {"status": "ok"})
        for path, body, status, message in (
            ("publish", {}, 404, "POST /api/v1/publish: is not served"),
            ("create_session", None, 404, "GET /api/v1/create_session: is not served"),
            ("create_model", b"{", 422, "the body is not JSON"),
            ("create_model", [], 422, "the body is no JSON object"),
            ("create_model", b"[" * 100_000, 422, "the body is not JSON"),
            ("create_model", {"session_id": 3}, 422, "session_id: Input should be a valid string"),
            ("retrieve_future", {"request_id": "x"}, 404, "request 'x': is not known here"),
        ):  # fmt: skip
            code, answer = call(url + path, body)
            assert code == status and message in answer["error"], answer
            assert answer["category"] == "user"
        code, answer = call(
            f"{url}forward_backward", b"\xff\xff", **{"Content-Type": wire.PROTOBUF}
        )
        assert code == 422 and "no ForwardBackwardRequest" in answer["error"]


def test_a_stranger_is_refused(service: Service) -> None:
    with listening(service) as url:
        assert call(f"{url}healthz", Host="attacker.example")[0] == 401
    with listening(service, key="secret") as url:
        assert call(f"{url}healthz")[0] == 401
        assert call(f"{url}healthz", **{"X-API-Key": "secreu"})[0] == 401
        assert call(f"{url}healthz", **{"X-API-Key": "secret"})[0] == 200


def test_a_body_that_is_too_large_is_not_read(service: Service) -> None:
    service.most_body_bytes = 1000
    try:
        with listening(service) as url:
            code, answer = call(f"{url}telemetry", {"events": "x" * 1000})
            assert code == 422 and "larger than 1000 bytes" in answer["error"]
    finally:
        service.most_body_bytes = 64 * 1024**2


def test_a_full_disk_is_a_sentence_and_no_fault(service: Service) -> None:
    with listening(service) as url:
        with refusing_changes(service):
            code, answer = call(f"{url}create_session", {})
            assert code == 503 and answer["category"] == "server"
            assert "ledger cannot be written" in answer["error"]
        assert call(f"{url}create_session", {})[0] == 200


def test_a_result_is_waited_for_and_is_a_protocol_buffer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    monkeypatch.setattr(server, "LONGEST_WAIT_SECONDS", 1.0)
    with listening(service) as url:
        _, session = call(f"{url}create_session", {})
        asked = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": service.model_name,
            "lora_config": {"rank": 2},
        }
        _, promise = call(f"{url}create_model", asked)
        waiting = {"request_id": promise["request_id"]}
        code, answer = call(f"{url}retrieve_future", waiting)
        assert (code, answer["type"]) == (408, "try_again")
        monkeypatch.setattr(server, "LONGEST_WAIT_SECONDS", 20.0)
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            result = pool.submit(call, f"{url}retrieve_future", waiting)
            time.sleep(0.2)
            assert service.work(1.0)
            assert result.result() == (
                200,
                {"type": "create_model", "model_id": promise["model_id"]},
            )
            assert time.monotonic() - begun < 10
        own = {"model_id": promise["model_id"], "seq_id": 1, "forward_only": True}
        body = encode_forward_backward([datum([1, 403, 407], weights=1.0)], **own)
        _, promise = call(f"{url}forward_backward", body, **{"Content-Type": wire.PROTOBUF})
        assert service.work(1.0)
        raw = json.dumps({"request_id": promise["request_id"]}).encode()
        with urlopen(Request(f"{url}retrieve_future", raw), timeout=30) as answer:
            assert answer.headers["content-type"] == wire.PROTOBUF
            output = wire._classes()["ForwardBackwardOutput"].FromString(answer.read())
        assert output.metrics["loss:sum"] > 0
        assert threading.active_count() < before + 60


def test_a_server_that_stops_asks_for_the_request_again(service: Service) -> None:
    """The last test: it closes the ledger of the others."""
    with listening(service) as url:
        service.ledger.close()  # while HTTP is still answered, as `_lead` does
        code, answer = call(f"{url}create_session", {})
        assert code == 503 and answer["category"] == "server"
        assert "send the request again" in answer["error"]
