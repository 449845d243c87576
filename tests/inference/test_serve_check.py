"""`finetune serve-check`: against llama.cpp's own server (slow), and against a stand-in for what a server can say wrongly.

llama.cpp's server needs `pip install -e ".[llama-cpp]" "llama-cpp-python[server]"`, vLLM's `FINETUNE_VLLM` (slow, both). Ollama is
not at hand: the stand-in speaks the same protocol, and is a mock.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from typing import Any, ClassVar

import pytest
import torch
import yaml

from finetune.cli import main
from finetune.config.export_formats import is_installed
from finetune.inference.serve_check import NEAR_TIE
from tests.conftest import make_chat, make_model
from tests.export.gguf_models import make_gguf_model

MakeModel = Callable[..., Path]
PROMPTS = "Lily and Tom went to the park.\nOnce upon a time\nWhat is 12 + 30?\n"
needs_server = pytest.mark.skipif(
    not (is_installed("llama_cpp") and is_installed("fastapi") and is_installed("uvicorn")),
    reason="llama.cpp's server is not installed: pip install 'llama-cpp-python[server]'",
)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return str(path)


@pytest.mark.slow
@needs_server
def test_llama_cpps_server_answers_with_the_same_tokens(
    shared: Path, tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_gguf_model(tmp_path / "model", "qwen3", shared), tmp_path / "out"
    assert main(["export", str(model), "--output", str(out), "--format", "safetensors,gguf"]) == 0
    command = [
        "serve-check",
        str(out),
        "--server",
        "llama.cpp",
        "--prompts",
        prompts,
        "--max-new-tokens",
        "16",
    ]
    assert main(command) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.count(": the same 16 tokens") == 3
    assert (
        "3 of 3 prompts answered alike by llama.cpp and transformers; log-probabilities within 0.0"
        in said
    )
    # The same server with another model, and then with the model under another template.
    other = make_gguf_model(tmp_path / "other", "qwen2", shared)
    assert (
        main(["export", str(other), "--output", str(tmp_path / "theirs"), "--format", "gguf"]) == 0
    )
    assert main([*command, "--gguf", str(next((tmp_path / "theirs").glob("*.gguf")))]) == 1
    assert (
        "parts at token" in (said := capsys.readouterr().out)
        and "0 of 3 prompts answered alike" in said
    )
    template = (model / "chat_template.jinja").read_text().replace("<|im_start|>", "### ")
    (model / "chat_template.jinja").write_text(template)
    assert (
        main(["export", str(model), "--output", str(tmp_path / "templated"), "--format", "gguf"])
        == 0
    )
    assert main([*command, "--gguf", str(next((tmp_path / "templated").glob("*.gguf")))]) == 1
    assert "the server renders another prompt than the template" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif("FINETUNE_VLLM" not in os.environ, reason="FINETUNE_VLLM names no vllm command")
@pytest.mark.parametrize("kind", ["llama/export", "llama/adapter", "glm4/adapter"])
def test_vllms_server_gives_the_log_probabilities_of_transformers(
    kind: str,
    lora_of_served: Callable[[str], Path],
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM itself, in an environment of its own: `FINETUNE_VLLM` is the path of its command."""
    monkeypatch.setenv("PATH", str(Path(os.environ["FINETUNE_VLLM"]).parent), prepend=":")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    family, _, name = kind.partition("/")
    folder = lora_of_served(family) / name
    command = ["serve-check", str(folder), "--server", "vllm", "--prompts", prompts]
    assert main([*command, "--max-new-tokens", "8", "--max-difference", "1e-4"]) == 0, (
        capsys.readouterr()
    )
    said = capsys.readouterr().out
    assert "3 of 3 prompts answered alike by vllm and transformers" in said
    assert "prompts: log-probabilities of their tokens within " in said


@pytest.fixture(scope="module")
def lora_of_served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of a LoRA run over a model of a family whose heads vLLM has kernels for."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        recipe = {
            "model_name_or_path": str(make_model(folder / "base", model_type=family, head_dim=32)),
            "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=24))}],
            "max_length": 64,
            "global_batch_size": 4,
            "max_steps": 4,
            "learning_rate": 0.05,
            "use_peft": True,
            "export_dtype": "float32",
            "output_dir": str(folder / "run"),
        }
        (folder / "lora.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["launch", "--recipe", str(folder / "lora.yaml"), "--num-processes", "1"]) == 0
        return folder / "run"

    return make


class StandIn(BaseHTTPRequestHandler):
    """Says what `answers` holds for the path, whatever is asked. A mock: what it says is no model's."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    asked: ClassVar[dict[str, Any]] = {}  # path -> the last body sent there

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, {"error": "no such page"}))
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked[self.path] = body
        if body.get("echo") and "echo" in self.answers:
            self.path = "echo"
        self.do_GET()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def stand_in() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


MODELS = (200, {"data": [{"id": "served"}]})
WRONG: dict[str, tuple[dict[str, tuple[int, Any]], str]] = {
    "several models": (
        {"/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})},
        "serves a, b; name one with --served-model",
    ),
    "no models": ({}, "/v1/models: answered 404: "),
    "no JSON": ({"/v1/models": (200, "<html>")}, "/v1/models: no answer: "),
    "no choice": (
        {"/v1/models": MODELS, "/v1/completions": (200, {"object": "x"})},
        "not an answer of the OpenAI protocol",
    ),
    "an error": (
        {"/v1/models": MODELS, "/v1/completions": (500, {"error": "out of memory"})},
        "answered 500",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_server_that_does_not_answer_is_a_sentence(
    case: str,
    stand_in: str,
    tiny_llama: MakeModel,
    prompts: str,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers, sentence = WRONG[case]
    monkeypatch.setattr(StandIn, "answers", answers)
    assert main(["serve-check", str(tiny_llama()), "--server", stand_in, "--prompts", prompts]) == 2
    assert f"{stand_in}" in (error := capsys.readouterr().err) and sentence in error, error


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"]
)
def test_a_server_that_speaks_otherwise_or_breaks_off_is_a_sentence(
    said: bytes, tiny_llama: MakeModel, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Says(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(said)

    with TCPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert main(["serve-check", str(tiny_llama()), "--server", url, "--prompts", prompts]) == 2
        server.shutdown()
    assert f"{url}/v1/models: no answer: " in capsys.readouterr().err


def test_the_runs_own_rows_are_asked_and_the_first_other_token_is_named(
    stand_in: str,
    tiny_llama: MakeModel,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, rows = tmp_path / "run", tmp_path / "heldout.jsonl"
    tiny_llama("run/export")
    rows.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "!"}]}
        )
    )
    recipe = {"eval_datasets": [{"path": str(rows)}], "datasets": [{"path": str(rows)}]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    model, tokenizer = (
        c.from_pretrained(run / "export") for c in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer(
        "<|begin|><|user|>Hi<|end|><|assistant|>", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        new = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(new)
    with torch.no_grad():
        logprobs = torch.log_softmax(
            model(torch.cat([ids[0], new])[None]).logits[0, ids.shape[1] - 1 : -1], -1
        )
    given = [float(row[token]) + 0.25 for row, token in zip(logprobs, new, strict=True)]
    command = ["serve-check", str(run), "--server", stand_in, "--max-new-tokens", "6"]

    def answer(text: str, chat: str) -> None:
        said = {"choices": [{"text": text, "logprobs": {"token_logprobs": given}}]}
        chatted = {"choices": [{"message": {"content": chat}}]}
        pages = {
            "/v1/models": MODELS,
            "/v1/completions": (200, said),
            "/v1/chat/completions": (200, chatted),
        }
        monkeypatch.setattr(StandIn, "answers", pages)

    answer(text, text)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert (
        f"prompts {rows}\n" in said
        and "1 of 1 prompts answered alike" in said
        and "log-probabilities within 0.25\n" in said
    )
    other = tokenizer.decode(new[:3]) + "~~~~"
    answer(other, other)
    assert main(command) == 1
    assert (
        "parts at token 4: transformers " in (said := capsys.readouterr().out)
        and "the server '~~~~'" in said
    )
    best = logprobs.topk(2)
    place, lead = min(
        enumerate((best.values[:, 0] - best.values[:, 1]).tolist()), key=lambda pair: pair[1]
    )
    tie = tokenizer.decode([*new[:place], best.indices[place, 1]])
    answer(tie, tie)
    assert lead < NEAR_TIE  # the two best tokens are as good as equal there: neither is wrong
    assert main(command) == 0
    assert (
        f"parts at token {place + 1}: " in (said := capsys.readouterr().out)
        and "(a near tie: ahead by " in said
    )
    answer(text, "Something else")
    assert main(command) == 1
    assert "as a conversation it answers 'Something else'" in capsys.readouterr().out


def test_the_log_probabilities_of_prompts_are_compared_with_transformers(
    stand_in: str,
    tiny_llama: MakeModel,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_llama()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n")
    model, tokenizer = (c.from_pretrained(folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Once upon a time"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        scores = torch.log_softmax(model(ids).logits[0], -1)
    given = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    answer = tokenizer.decode(new, skip_special_tokens=True)
    command = [
        "serve-check",
        str(folder),
        "--server",
        stand_in,
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "4",
    ]
    command += ["--max-difference", "0.001"]

    def serve(echoed: list[float | None]) -> None:
        pages = {
            "/v1/models": MODELS,
            "/v1/completions": (200, {"choices": [{"text": answer}]}),
            "/v1/chat/completions": (200, {"choices": [{"message": {"content": answer}}]}),
            "echo": (200, {"choices": [{"text": "", "logprobs": {"token_logprobs": echoed}}]}),
        }
        monkeypatch.setattr(StandIn, "answers", pages)

    serve([None, *given, -1.0])
    assert main(command) == 0, capsys.readouterr().out
    assert re.search(
        r"^prompts: log-probabilities of their tokens within (0|\d(\.\d)?e-0[5-9])$",
        capsys.readouterr().out,
        re.M,
    )
    serve([None, *given[:-1], given[-1] - 0.5, -1.0])
    assert main(command) == 1
    assert "prompts: log-probabilities of their tokens within 0.5\n" in capsys.readouterr().out
    serve([None, *given[:-1]])  # of another number of tokens: not what was asked
    assert main(command) == 2
    said = capsys.readouterr()
    assert "prompts: the server gives no log-probabilities for them\n" in said.out
    assert (
        "--max-difference: http://127.0.0.1" in said.err
        and "gives no log-probabilities" in said.err
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--server", "vllm", "--max-difference", "0"],
            "--max-difference 0: more than 0 nats is expected",
        ),
        (
            ["--server", "tgi"],
            "--server: tgi: one of llama.cpp, vllm, ollama or a URL (http://...) is expected",
        ),
        (
            ["--server", "llama.cpp"],
            "holds no GGUF file; write one with finetune export --format gguf",
        ),
        (["--server", "llama.cpp", "--gguf", "absent.gguf"], "--gguf: absent.gguf: no such file"),
        (["--server", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: no answer: "),
        (["--server", "vllm", "--count", "0"], "--max-new-tokens, --count: 1 or more is expected"),
    ],
)
def test_a_wrong_request_is_a_sentence(
    arguments: list[str],
    sentence: str,
    tiny_llama: MakeModel,
    prompts: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve-check", str(tiny_llama()), "--prompts", prompts, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_prompts_must_be_named_where_there_is_no_run(
    tiny_llama: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-check", str(tiny_llama()), "--server", "vllm"]) == 2
    assert (
        "its run's rows are not in a file here; give prompts with --prompts FILE"
        in capsys.readouterr().err
    )


def test_the_server_can_render_the_tools_and_variables_of_a_row(
    stand_in: str, tiny_llama: MakeModel, tmp_path: Path, monkeypatch: Any
) -> None:
    from transformers import AutoTokenizer

    folder = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ tools | tojson }} {{ tone }} {{ messages | tojson }}"
    tokenizer.save_pretrained(folder)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    row = {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "4"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "Adds."}}],
        "chat_template_kwargs": {"tone": "kind"},
    }
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(row))
    choice = {"text": "", "logprobs": None, "message": {"content": ""}}
    paths = ("/v1/completions", "/v1/chat/completions")
    answers = {path: (200, {"choices": [choice]}) for path in paths}
    monkeypatch.setattr(StandIn, "answers", {"/v1/models": MODELS, **answers})
    main(["serve-check", str(folder), "--server", stand_in, "--prompts", str(prompts)])
    prompt, sent = (StandIn.asked[path] for path in paths)
    function = sent["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])  # JSON text in the protocol
    keys = sent["chat_template_kwargs"]
    assert prompt["prompt"] == tokenizer.apply_chat_template(
        sent["messages"], tools=sent["tools"], tokenize=False, **keys
    )


def test_a_prompt_with_an_image_is_refused(
    tiny_llama: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "dot.png")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "<image>What?"}], "images": ["dot.png"]}
        )
    )
    command = ["serve-check", str(tiny_llama()), "--server", "ollama", "--prompts", str(prompts)]
    assert main(command) == 2
    assert "a prompt has images, about which no server is asked" in capsys.readouterr().err


def test_an_empty_answer_of_transformers_differs_from_a_text(
    stand_in: str,
    tiny_llama: MakeModel,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_llama()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    command = ["serve-check", str(folder), "--server", stand_in, "--max-new-tokens", "4"]
    command += ["--prompts", str(prompts)]
    ends = {"eos_token_id": list(range(300))}  # any token ends the answer
    (folder / "generation_config.json").write_text(json.dumps(ends))
    choice = {"text": "words", "logprobs": None, "message": {"content": "words"}}
    pages = {"/v1/models": MODELS}
    for path in ("/v1/completions", "/v1/chat/completions"):
        pages[path] = (200, {"choices": [choice]})
    monkeypatch.setattr(StandIn, "answers", pages)
    assert main(command) == 1
    assert "transformers answers nothing, the server 'words'" in capsys.readouterr().out
