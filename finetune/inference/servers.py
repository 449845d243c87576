"""Inference servers, started or running already, and asked through the OpenAI protocol. Imports no torch."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from finetune.errors import UserError
from finetune.files.http import send

START_SECONDS = 600  # vLLM compiles
ANSWER_SECONDS = 300
CONTEXT = 4096
OLLAMA = "http://127.0.0.1:11434"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. Returned by `open_server`."""

    url: str  # without /v1
    model: str  # as it calls it

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """The greedy continuation of a text: "text" and "logprobs", of its tokens."""
        body = {"prompt": prompt, "logprobs": 1}
        return self._choose(_request(f"{self.url}/v1/completions", body | self._greedy(max_tokens)))

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> str:
        """The greedy answer to a conversation, which the server renders itself."""
        answer = _request(f"{self.url}/v1/chat/completions", {"messages": list(messages)} | self._greedy(max_tokens))
        return str(self._choose(answer)["message"]["content"] or "")

    def _greedy(self, max_tokens: int) -> dict[str, Any]:
        # llama-cpp-python's server penalizes repetition by 1.1 unless a request says otherwise; vLLM's key is another.
        plain = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
        return {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0} | plain

    def _choose(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.url}: not an answer of the OpenAI protocol: {json.dumps(answer)[:120]}") from None


@contextmanager
def open_server(
    name: str, folder: Path, gguf: Path | None, served: str | None, log: Callable[[str], object]
) -> Iterator[Server]:
    """The server `name`: llama.cpp or vllm, started for the block; ollama or a URL, which must run already.

    Args:
        folder: Of the export, for vLLM.
        gguf: The file, for llama.cpp.
        served: What a running server calls the model; None: the only one that it has.

    Raises:
        UserError: Where the server is not installed, does not start, or does not answer.
    """
    if name.startswith(("http://", "https://")) or name == "ollama":
        url = OLLAMA if name == "ollama" else name.rstrip("/").removesuffix("/v1")
        yield Server(url, served or _find_served(url))
        return
    if name not in STARTS:
        raise UserError(f"--server: {name}: one of {', '.join(STARTS)}, ollama or a URL (http://...) is expected")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = STARTS[name](folder, gguf, port)
    log(f"server  {' '.join(command)}")
    with TemporaryFile() as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, said, name)
            yield Server(url, served or _find_served(url))
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _start_llama_cpp(folder: Path, gguf: Path | None, port: int) -> list[str]:
    if gguf is None:
        raise UserError(
            f"{folder}: holds no GGUF file; write one with finetune export --format gguf, and name it with --gguf"
        )
    if binary := shutil.which("llama-server"):
        return [binary, "-m", str(gguf), "--port", str(port), "-c", str(CONTEXT)]
    if not all(importlib.util.find_spec(each) for each in ("llama_cpp", "fastapi", "uvicorn")):
        raise UserError(
            '--server llama.cpp: not installed; pip install "llama-cpp-python[server]", or put llama-server on PATH'
        )
    options = ["--port", str(port), "--n_ctx", str(CONTEXT), "--logits_all", "true"]
    return [sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), *options]


def _start_vllm(folder: Path, gguf: Path | None, port: int) -> list[str]:
    binary = shutil.which("vllm")
    if binary is None:
        raise UserError("--server vllm: not installed; pip install vllm, or name a running server by its URL")
    return [binary, "serve", str(folder), "--port", str(port), "--max-model-len", str(CONTEXT)]


STARTS: Mapping[str, Callable[[Path, Path | None, int], list[str]]] = {
    "llama.cpp": _start_llama_cpp,
    "vllm": _start_vllm,
}


def _wait(url: str, process: "subprocess.Popen[bytes]", said: Any, name: str) -> None:
    """Returns once the server answers. Raises `UserError` where it ends, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            _request(f"{url}/v1/models", None, seconds=5)
            return
        except UserError:
            if process.poll() is not None:
                said.seek(0)
                lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
                errors = [line for line in lines if "rror" in line] or lines or ["nothing was said"]
                raise UserError(
                    f"--server {name}: ended with {process.returncode}: {errors[-1].strip()[:200]}"
                ) from None
            time.sleep(0.5)
    raise UserError(f"--server {name}: did not answer within {START_SECONDS} seconds")


def _find_served(url: str) -> str:
    """What the server calls its model. Raises `UserError` where it has several, or none."""
    listed = _request(f"{url}/v1/models", None).get("data")
    names = [str(each.get("id")) for each in listed] if isinstance(listed, list) else []
    if len(names) != 1:
        raise UserError(f"{url}: serves {', '.join(names[:5]) or 'no model'}; name one with --served-model")
    return names[0]


def _request(url: str, body: Mapping[str, Any] | None, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The JSON that `url` answers. Raises `UserError` where it does not."""
    try:
        found = json.loads(send(url, body, seconds))
    except ValueError as error:
        raise UserError(f"{url}: no answer: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{url}: not an answer of the OpenAI protocol")
    return found
