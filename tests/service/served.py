"""A service in this process, on the shared tiny model: requests in the API's JSON, without HTTP."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

import finetune
from finetune.service import wire
from finetune.service.endpoints import ENDPOINTS
from finetune.service.operations import Operations
from finetune.service.serve import prepare
from finetune.service.service import Service


def recipe(folder: Path, model: Path, **keys: Any) -> "finetune.Recipe":
    own = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "max_length": 128} | keys
    return prepare(finetune.load_recipe(model_name_or_path=str(model), output_dir=folder, **own))


class Client:
    """Calls endpoints, and does what waits before it reads a result."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.session = self.post("create_session", {})["session_id"]
        self.models = 0

    def post(self, path: str, sent: Mapping[str, Any]) -> dict[str, Any]:
        return ENDPOINTS["POST", path](self.service, json.loads(json.dumps(sent)))

    def result(self, promise: Mapping[str, Any]) -> dict[str, Any]:
        while self.service.work(0.0):
            pass
        found = self.service.ledger.result(promise["request_id"])
        assert found is not None
        return {"raw": found.content} if "protobuf" in found.media else json.loads(found.content)

    def model(self, rank: int = 8, seed: int = 0) -> "Model":
        asked = {
            "session_id": self.session,
            "model_seq_id": self.models,
            "base_model": self.service.model_name,
            "lora_config": {"rank": rank, "seed": seed},
        }
        self.models += 1
        return Model(self, self.result(self.post("create_model", asked))["model_id"])


class Model:
    """A model of a client, whose requests are numbered."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.seq = 0

    def send(self, path: str, /, **sent: Any) -> dict[str, Any]:
        self.seq += 1
        return self.client.post(path, {"model_id": self.name, "seq_id": self.seq, **sent})

    def pass_data(
        self, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy", **sent: Any
    ) -> dict[str, Any]:
        """The promise of a forward_backward."""
        own = {"forward_only": False, "loss_fn": loss, "options": {}, "problem": None}
        return self.send("forward_backward", data=data, **own | sent)

    def step(self, learning_rate: float = 1e-2, **params: float) -> dict[str, Any]:
        return self.send("optim_step", adam_params={"learning_rate": learning_rate, **params})


def sample(client: Client, sampler: str, seq: int, prompt: list[int], **how: Any) -> dict[str, Any]:
    """The promise of samples."""
    names = ("num_samples", "prompt_logprobs", "topk_prompt_logprobs")
    more = {name: how.pop(name) for name in names if name in how}
    chunks = [{"type": "encoded_text", "tokens": prompt}]
    asked = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": chunks},
        "sampling_params": how,
    }
    return client.post("asample", asked | more)


@contextmanager
def serving(
    folder: Path, model: Path, *, most_stacked: int = 8, vllm_server: str | None = None, **keys: Any
) -> Iterator[Service]:
    """The service of a recipe; again in the same folder it is one that was started again."""
    with finetune.Session(recipe(folder, model, **keys)) as session:
        home = session.folder / "service"
        operations = Operations(session, home / "states", vllm_server)
        service = Service(operations, home, operations.run, most_stacked=most_stacked)
        try:
            yield service
        finally:
            service.ledger.close()


@contextmanager
def refusing_changes(service: Service) -> Iterator[None]:
    """The ledger takes no changes, as on a full disk."""
    service.ledger._database.execute("PRAGMA query_only = 1")
    try:
        yield
    finally:
        service.ledger._database.execute("PRAGMA query_only = 0")


def read_outputs(answer: Mapping[str, Any]) -> tuple[float, list[list[Any]]]:
    """The loss and the log-probabilities of each datum that a forward_backward has answered."""
    message = wire._classes()["ForwardBackwardOutput"].FromString(answer["raw"])
    rows = []
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        ends = np.frombuffer(tensor.offsets, np.int64) // 4
        values = np.frombuffer(tensor.data, np.float32)
        shape = (-1, *tensor.trailing_shape)
        rows += [values[a:b].reshape(shape).tolist() for a, b in pairwise(ends)]
    return message.metrics["loss:sum"], rows


def read_samples(
    answer: Mapping[str, Any],
) -> tuple[list[tuple[list[int], list[float]]], list[float]]:
    """The tokens and log-probabilities of each sample, and the prompt's log-probabilities."""
    message = wire._classes()["SampleResponse"].FromString(answer["raw"])
    every = [
        (
            np.frombuffer(each.tokens, np.int32).tolist(),
            np.frombuffer(each.logprobs, np.float32).tolist(),
        )
        for each in message.sequences
    ]
    return every, np.frombuffer(message.prompt_logprobs, np.float32).tolist()


def read_top(answer: Mapping[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest ids at each of a prompt's tokens, and their log-probabilities."""
    top = wire._classes()["SampleResponse"].FromString(answer["raw"]).topk_prompt_logprobs
    shape = (top.length, top.k)
    ids = np.frombuffer(top.token_ids, np.int32).reshape(shape).tolist()
    return ids, np.frombuffer(top.logprobs, np.float32).reshape(shape).tolist()


def datum(ids: Sequence[int], **inputs: float | Sequence[float]) -> dict[str, Any]:
    """Predicts every token after the first; a number stands for as many."""
    targets = list(ids[1:])
    spread = {
        name: [value] * len(targets) if isinstance(value, int | float) else list(value)
        for name, value in inputs.items()
    }
    return {"tokens": list(ids[:-1]), "inputs": {"target_tokens": targets, **spread}}


def encode_forward_backward(data: Sequence[Mapping[str, Any]], **own: Any) -> bytes:
    """The body of a forward_backward of `datum`s by cross_entropy."""
    request = wire._classes()["ForwardBackwardRequest"](loss_fn="cross_entropy", **own)
    for each in data:
        message = request.data.add()
        message.model_input.add().encoded_text.tokens = np.array(each["tokens"], "<i4").tobytes()
        for name, values in each["inputs"].items():
            is_ids = name == "target_tokens"
            tensor = message.loss_fn_inputs[name]
            numbers = np.array(values, "<i8" if is_ids else "<f4")
            tensor.dense = numbers.tobytes()
            tensor.shape.extend(numbers.shape)
            tensor.dtype = 2 if is_ids else 1
    raw: bytes = request.SerializeToString()
    return raw


def fetch(url: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    """The status and the body of an answer; without a body it is a GET."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        with urlopen(Request(url, raw, headers), timeout=30) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def call(url: str, body: object = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """As `fetch`, where the answer is JSON."""
    status, content = fetch(url, body, **headers)
    return status, json.loads(content)
