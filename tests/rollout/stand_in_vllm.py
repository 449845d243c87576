"""A stand-in for a vLLM server: the part of vLLM 0.32's protocol that our engine speaks, answered by transformers and peft.

It is not vLLM: it shows that we send and read what vLLM's own source and answers say, and that weights arrive. A slow test asks
a real server the same where `FINETUNE_VLLM` names its command.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, StoppingCriteriaList

PARTS = (".gate_proj.", ".up_proj.")  # as vLLM knows adapters of a model's gate_up_proj
LOADING = threading.Lock()  # transformers changes the process while it builds a model


def name_for_peft(adapter: Path, folder: Path) -> Path:
    """An adapter whose modules have the names of vLLM's GLM-4, in peft's; any other as it is."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("adapter_names") != "vllm":
        return adapter
    given = load_file(adapter / "adapter_model.safetensors")
    gate, up = PARTS
    tensors = {name: each for name, each in given.items() if gate not in name and up not in name}
    for name, part in given.items():
        if gate in name:
            other = given[name.replace(gate, up)]
            whole = torch.cat([part, other]) if "lora_B" in name else part
            tensors[name.replace(gate, ".gate_up_proj.")] = whole
    del config["adapter_names"]
    config["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class StandInVllm(ThreadingHTTPServer):
    """Serves one model from `url` until the block of `serving` ends; `asked` has every completion's request with its answer."""

    request_queue_size = 256  # as many as may be in flight at once
    generating = threading.Lock()  # of all: torch has one random state

    def __init__(self, model: Path, *, heeds_seeds: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.root, self.lock, self.heeds_seeds = str(model), threading.RLock(), heeds_seeds
        self.answering = 0
        self.seconds_a_token = 0.0
        self.versions: list[str] = []  # of the weights at each of `asked`
        self.is_paused, self.aborts = False, 0
        self.running = threading.Condition()
        self.version, self.adapters, self.loads = "default", dict[str, str](), list[str]()
        self.asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.changes: dict[str, Any] = {}  # path -> what is put in place of its answer
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.adapted: dict[str, Any] = {}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """(status, what vLLM would answer). While it is paused, completions wait; a pause cuts the one that is computed."""
        if path.startswith("/pause") and path not in self.changes:
            return self.at_pause(path)
        if path == "/resume":
            return self.at_resume()
        if path == "/v1/completions":
            with self.running:
                body = body | {"aborts": self.aborts}
                self.running.wait_for(lambda: not self.is_paused or self.aborts > body["aborts"])
        with self.generating if path == "/v1/completions" else self.lock:
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
        if self.generating.locked():
            return 500, {"error": {"message": "the weights change under a request"}}
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(
                kwargs["weights_path"], dtype=torch.float32
            ).eval()
        self.loads.append(kwargs["weights_path"])
        return 200, {"results": [None]}

    def at_pause(self, path: str) -> Any:
        assert path == "/pause?mode=abort"
        with self.running:
            self.is_paused = True
            self.aborts += 1
            self.running.notify_all()
        return 200, {"status": "paused"}

    def at_resume(self) -> Any:
        with self.running:
            self.is_paused = False
            self.running.notify_all()
        return 200, {"status": "resumed"}

    def at_reset_prefix_cache(self) -> Any:
        return 200, {"success": True}

    def at_update_weight_version(self, new_version: str) -> Any:
        self.version = new_version
        return 200, {"success": True, "new_version": new_version}

    def at_v1_load_lora_adapter(self, lora_name: str, lora_path: str) -> Any:
        described = json.loads((Path(self.root) / "config.json").read_text())
        names = load_file(Path(lora_path) / "adapter_model.safetensors").keys()
        if described["model_type"] == "glm4" and any("gate_up_proj" in name for name in names):
            return 400, {"error": {"message": "expected target modules gate_proj, up_proj"}}
        with LOADING:
            base = AutoModelForCausalLM.from_pretrained(self.root, dtype=torch.float32)
            with TemporaryDirectory() as temporary:
                folder = name_for_peft(Path(lora_path), Path(temporary))
                self.adapted[lora_name] = PeftModel.from_pretrained(base, folder).eval()
        self.adapters[lora_name] = lora_path
        self.loads.append(lora_path)
        return 200, f"Success: LoRA adapter '{lora_name}' added successfully."

    def at_v1_unload_lora_adapter(self, lora_name: str) -> Any:
        del self.adapters[lora_name]
        del self.adapted[lora_name]
        return 200, f"Success: LoRA adapter '{lora_name}' removed successfully."

    def at_v1_completions(self, aborts: int, **body: Any) -> Any:
        """A completion with the log-probabilities of its tokens, by transformers' generation; cut where requests have been aborted
        more than `aborts` times."""
        if self.aborts > aborts:
            return 200, {"choices": [self.make_choice(body, [], [], "abort")]}
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

        def is_cut(so_far: Any, *_: Any, **__: Any) -> Any:
            time.sleep(self.seconds_a_token)
            return torch.tensor([self.aborts > aborts])

        made = self.adapted.get(body["model"], self.model).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=body["max_tokens"], pad_token_id=0,
            eos_token_id=body["stop_token_ids"], return_dict_in_generate=True, output_logits=True, stopping_criteria=StoppingCriteriaList([is_cut]), **how,
        )  # fmt: skip
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        rows = [torch.log_softmax(logits[0].float() / temperature, -1) for logits in made.logits]
        logs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        if tokens[-1] in body["stop_token_ids"]:
            reason = "stop"
        else:
            reason = "length" if len(tokens) == body["max_tokens"] else "abort"
        choice = self.make_choice(body, tokens, logs, reason)
        return 200, {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def make_choice(
        self, body: dict[str, Any], tokens: list[int], logs: list[float], reason: str
    ) -> dict[str, Any]:
        """A completion as it is answered, and noted."""
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logs},
        }
        self.asked.append((body, choice))
        self.versions.append(self.version)
        return choice


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
        with self.server.running:
            self.server.answering += 1
        try:
            with torch.no_grad():
                status, found = self.server.answer(self.path, body)
        finally:
            with self.server.running:
                self.server.answering -= 1
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
    # a server looks every half second whether it is to end, unless it is asked to do so more often
    serve = partial(server.serve_forever, poll_interval=0.02)
    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
