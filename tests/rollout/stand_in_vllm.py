"""A stand-in for a vLLM server: the part of vLLM 0.32's protocol that our engine speaks, answered by transformers and peft.

It is not vLLM: it shows that we send and read what vLLM's own source and answers say, and that weights arrive. A slow test asks
a real server the same where `FINETUNE_VLLM` names its command.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


class StandInVllm(ThreadingHTTPServer):
    """Serves one model from `url` until the block of `serving` ends; `asked` has every completion's request with its answer."""

    def __init__(self, model: Path, *, heeds_seeds: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.root, self.lock, self.heeds_seeds = str(model), threading.Lock(), heeds_seeds
        self.version, self.adapters, self.loads = "default", dict[str, str](), list[str]()
        self.asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.changes: dict[str, Any] = {}  # path -> what is put in place of its answer
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.adapted: dict[str, Any] = {}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """(status, what vLLM would answer)."""
        with self.lock:
            if path in self.changes:
                return self.changes[path]
            return getattr(self, "at_" + path.strip("/").replace("/", "_").partition("?")[0])(
                **body
            )

    def at_v1_models(self) -> Any:
        base = {"id": "served", "root": self.root, "parent": None, "max_model_len": 480}
        adapters = [
            {"id": name, "root": path, "parent": "served"} for name, path in self.adapters.items()
        ]
        return 200, {"data": [base, *adapters]}

    def at_server_info(self) -> Any:
        return 200, {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}

    def at_weight_info(self) -> Any:
        return 200, {"weight_version": self.version}

    def at_collective_rpc(self, method: str, kwargs: dict[str, str]) -> Any:
        assert method == "reload_weights"
        self.model = AutoModelForCausalLM.from_pretrained(
            kwargs["weights_path"], dtype=torch.float32
        ).eval()
        self.loads.append(kwargs["weights_path"])
        return 200, {"results": [None]}

    def at_reset_prefix_cache(self) -> Any:
        return 200, {"success": True}

    def at_update_weight_version(self, new_version: str) -> Any:
        self.version = new_version
        return 200, {"success": True, "new_version": new_version}

    def at_v1_load_lora_adapter(self, lora_name: str, lora_path: str) -> Any:
        base = AutoModelForCausalLM.from_pretrained(self.root, dtype=torch.float32)
        self.adapted = {lora_name: PeftModel.from_pretrained(base, lora_path).eval()}
        self.adapters[lora_name] = lora_path
        self.loads.append(lora_path)
        return 200, f"Success: LoRA adapter '{lora_name}' added successfully."

    def at_v1_unload_lora_adapter(self, lora_name: str) -> Any:
        del self.adapters[lora_name]
        return 200, f"Success: LoRA adapter '{lora_name}' removed successfully."

    def at_v1_completions(self, **body: Any) -> Any:
        """A completion with the log-probabilities of its tokens, by transformers' generation."""
        if body["model"] not in ("served", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        assert (
            body["top_p"] == 1
            and body["top_k"] == body["min_p"] == 0
            and body["repetition_penalty"] == 1
        )
        assert body["logprobs"] == 0 and body["return_token_ids"] and body["ignore_eos"]
        is_drawn, temperature = body["temperature"] > 0, body["temperature"] or 1.0
        if self.heeds_seeds:
            torch.manual_seed(body["seed"])
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if is_drawn
            else {"do_sample": False}
        )
        ids = torch.tensor([body["prompt"]])
        made = self.adapted.get(body["model"], self.model).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=body["max_tokens"], pad_token_id=0,
            eos_token_id=body["stop_token_ids"], return_dict_in_generate=True, output_logits=True, **how,
        )  # fmt: skip
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        rows = [torch.log_softmax(logits[0].float() / temperature, -1) for logits in made.logits]
        stopped = tokens[-1] in body["stop_token_ids"]
        choice = {
            "index": 0,
            "finish_reason": "stop" if stopped else "length",
            "token_ids": tokens,
            "logprobs": {
                "token_logprobs": [
                    float(row[token]) for row, token in zip(rows, tokens, strict=True)
                ]
            },
        }
        self.asked.append((body, choice))
        return 200, {"object": "text_completion", "model": body["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """Hands requests to the server's `answer`."""

    server: StandInVllm

    def do_GET(self) -> None:
        """Answers a GET."""
        self._reply({})

    def do_POST(self) -> None:
        """Answers a POST of JSON."""
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        with torch.no_grad():
            status, found = self.server.answer(self.path, body)
        content = found if isinstance(found, str) else json.dumps(found)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(model: Path, **keys: Any) -> Iterator[StandInVllm]:
    """A server of `model` for the block."""
    server = StandInVllm(model, **keys)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
