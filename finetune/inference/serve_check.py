"""`finetune serve-check`: compares a server's answers to held-out prompts with transformers'.

The server is started here, or is running already. It is asked by the OpenAI protocol.
"""

import argparse
import json
import math
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch

from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.served import list_server_options, serve_adapter
from finetune.config.yaml_file import find_yaml
from finetune.constants import ADAPTER_CONFIG
from finetune.data.formats import Conversation
from finetune.data.messages import Message
from finetune.errors import UserError
from finetune.export.export import export_for_vllm
from finetune.files.json_files import read_json_object
from finetune.files.network import send
from finetune.inference.conversation import encode_prompt, find_end_ids
from finetune.inference.inference_model import InferenceModel, LoadOptions, load_inference_model
from finetune.inference.inputs import ModelLocation, find_model, read_prompts

START_SECONDS = 600  # vLLM compiles for minutes
ANSWER_SECONDS = 300
OLLAMA = "http://127.0.0.1:11434"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. Returned by `open_server`."""

    url: str  # without /v1
    model: str  # the server's name of the model

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """Continues a text greedily; returns the answer's choice, with "text" and "logprobs"."""
        return self._ask("completions", {"prompt": prompt, "logprobs": 1}, max_tokens)

    def score(self, ids: Sequence[int]) -> list[float] | None:
        """Returns the log-probability of each token of a prompt after the first.

        Returns None if the server gives none for prompts.

        ids: The token ids of the prompt.
        """
        body = {"prompt": list(ids), "logprobs": 1, "echo": True}
        try:
            choice = self._ask("completions", body, 1)
        except UserError:  # the server takes no ids, or no echo
            return None
        scores = _read_logprobs(choice)
        # a server may also give the score of the one token that it generated
        if len(scores) not in (len(ids), len(ids) + 1):
            return None
        prompt_scores = scores[1 : len(ids)]
        is_complete = all(isinstance(each, float) for each in prompt_scores)
        return prompt_scores if is_complete else None

    def chat(self, conversation: Conversation, max_tokens: int) -> str:
        """Answers a conversation greedily. The server renders it by its chat template."""
        body: dict[str, Any] = {"messages": [_send_calls(each) for each in conversation.messages]}
        if conversation.tools:
            # The server shows them to the model, but leaves calls in the text of the answer.
            body |= {"tools": list(conversation.tools), "tool_choice": "none"}
        if conversation.variables:
            body["chat_template_kwargs"] = dict(conversation.variables)
        choice = self._ask("chat/completions", body, max_tokens)
        return str(choice["message"]["content"] or "")

    def _ask(self, path: str, body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """Requests greedy tokens; returns the only choice of the answer.

        Args:
            path: The path of the URL after /v1/.
            body: The fields of the request, without the model and the settings of sampling.
            max_tokens: The most tokens to generate.
        """
        greedy = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        # By default llama-cpp-python's server penalizes repetition by 1.1. vLLM has the other name.
        no_penalty = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
        answer = _request(f"{self.url}/v1/{path}", {**body, **greedy, **no_penalty})
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url}: not an answer of the OpenAI protocol: {json.dumps(answer)[:120]}"
            ) from None


def _send_calls(message: Message) -> Message:
    """Returns a message with the arguments of its tool calls as JSON text, as the protocol asks."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"].get("arguments") or {})
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


@contextmanager
def open_server(
    name: str,
    location: ModelLocation,
    file: Path | None,
    served: str | None,
    log: Callable[[str], object],
) -> Iterator[Server]:
    """Yields a server. It runs only during the block, unless `name` is ollama or a URL.

    Args:
        name: One of STARTED, ollama, or the URL of a server.
        location: The export or adapter.
        file: The file to serve, as `find_file` returns it.
        served: The server's name of the model; None: the name of its only model is asked for.
        log: Called with the command that starts the server.

    Raises:
        UserError: The server is not installed, does not start, or does not answer.
    """
    if name.startswith(("http://", "https://")) or name == "ollama":
        if name == "ollama":
            url = OLLAMA
        else:
            url = name.rstrip("/").removesuffix("/v1")
        yield Server(url, served or _find_served(url))
        return
    if name not in STARTED:
        raise UserError(
            f"--server: {name}: one of {', '.join(STARTED)}, ollama or a URL (http://...) is "
            "expected"
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # at any free port
        _, port = listener.getsockname()
    url = f"http://127.0.0.1:{port}"
    folder = Path(location.name)
    with TemporaryDirectory(prefix="finetune-") as temporary:
        if name == "vllm" and location.kind == "adapter":
            folder = export_for_vllm(folder, Path(temporary) / folder.name)
            command = _serve_adapter(folder, location.base, port)
            served = served or folder.name
        else:
            start = EXPORT_FORMATS[STARTED[name]].start
            assert start is not None
            command = start(folder, file, port)
        log(f"server  {' '.join(command)}")
        with _run_command(command) as (process, output):
            _wait_until_ready(url, process, output, name)
            yield Server(url, served or _find_served(url))


@contextmanager
def _run_command(command: Sequence[str]) -> Iterator[tuple["subprocess.Popen[bytes]", Any]]:
    """Runs a command during the block; yields (the process, the file with the output)."""
    with (
        TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process, output
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _serve_adapter(folder: Path, base: str | None, port: int) -> list[str]:
    """Returns vLLM's command that serves an adapter in the dtype of the base's files.

    Raises `UserError` if vLLM does not load such an adapter.
    """
    command = serve_adapter(folder, base, read_json_object(folder / ADAPTER_CONFIG))
    if command is None:
        raise UserError(
            f"{folder}: vLLM serves no such adapter; export the merged model, and check that"
        )
    return [*command, *list_server_options(Path(str(base)), port)]


# A server that serve-check starts -> the export format that it serves.
STARTED = dict(
    sorted(
        (row.server, name)
        for name, row in EXPORT_FORMATS.items()
        if row.server is not None and row.start
    )
)


def find_file(arguments: argparse.Namespace, folder: Path) -> Path | None:
    """Returns the file to serve: that of the format's option, or else the first in `folder`.

    Returns None if the server serves a folder, or if there is no file. Raises `UserError` if an
    option names a file that does not exist, even for a different server.
    """
    file = None
    for name, row in EXPORT_FORMATS.items():
        if row.suffix is None or row.server is None:
            continue
        option = getattr(arguments, name)
        if option is not None and not Path(option).is_file():
            raise UserError(f"--{name}: {option}: no such file")
        if row.server == arguments.server:
            files = [option] if option is not None else sorted(folder.glob(f"*{row.suffix}"))
            file = Path(files[0]) if files else None
    return file


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", output: Any, name: str) -> None:
    """Waits until a server answers.

    Args:
        url: The server's URL.
        process: The server's process.
        output: The file with the process's output.
        name: The server's name, for messages.

    Raises:
        UserError: The process ends, or START_SECONDS pass.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            _request(f"{url}/v1/models", None, seconds=5)
            return
        except UserError:
            if process.poll() is not None:
                output.seek(0)
                reason = _find_reason(output.read().decode(errors="replace"))
                raise UserError(
                    f"--server {name}: ended with {process.returncode}: {reason}"
                ) from None
            time.sleep(0.5)
    raise UserError(f"--server {name}: did not answer within {START_SECONDS} seconds")


def _find_reason(output: str) -> str:
    """Returns the last line of a server's output that mentions an error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]  # Error or error
    return (errors or lines or ["nothing was said"])[-1][:200]


def _find_served(url: str) -> str:
    """Asks a server for the name of its model. Raises `UserError` unless it has exactly one."""
    listed = _request(f"{url}/v1/models", None).get("data")
    names = [str(each.get("id")) for each in listed] if isinstance(listed, list) else []
    if len(names) != 1:
        raise UserError(
            f"{url}: serves {', '.join(names[:5]) or 'no model'}; name one with --served-model"
        )
    return names[0]


def _request(
    url: str, body: Mapping[str, Any] | None, seconds: float = ANSWER_SECONDS
) -> dict[str, Any]:
    """Sends a request; returns the JSON object of the answer.

    Args:
        url: The URL.
        body: The JSON to post; None: the request is a GET.
        seconds: How long to wait for the answer.

    Raises:
        UserError: There is no answer, or the answer is anything but a JSON object.
    """
    try:
        answer = json.loads(send(url, body, seconds))
    except ValueError as error:
        raise UserError(f"{url}: no answer: {error}") from None
    if not isinstance(answer, dict):
        raise UserError(f"{url}: not an answer of the OpenAI protocol")
    return answer


EXIT_DIFFERS = 1  # the exit code if answers differ
# Rounding may decide between the best two tokens if their log-probabilities are this near.
NEAR_TIE = 0.05


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """The greedy answer of transformers to a prompt."""

    prompt: str  # the text for the server, without a BOS token that the server adds
    ids: list[int]  # of the prompt
    prompt_logprobs: list[float]  # of the prompt's tokens after the first
    tokens: list[int]  # ids of the answer, without the one that ends it
    text: str  # of the answer
    # for each token of the answer:
    logprobs: list[float]
    leads: list[float]  # by how much the log-probability exceeds that of the second best token
    second_best: list[int]  # the id of the second best token


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the answers to one prompt. Returned by `compare`."""

    is_same: bool  # True also if the answers part at a near tie
    # The largest difference between log-probabilities; nan if the server gives none.
    difference: float  # over the tokens of the answer before the answers differ
    prompt_difference: float  # over the tokens of the prompt


def serve_check_command(arguments: argparse.Namespace) -> int:
    """Compares a server's answers with transformers'. Returns 0, or 1 if they differ."""
    _check_numbers(arguments)
    location = find_model(arguments.source)
    prompts = list(islice(_read_prompts(location, arguments.prompts), arguments.count))
    if not prompts:
        raise UserError(
            f"{arguments.prompts or location.name}: holds no prompt; give some by --prompts FILE"
        )
    if any(prompt.images for prompt in prompts):
        raise UserError(
            f"{arguments.prompts or location.name}: a prompt has images, about which no server is "
            "asked; give prompts of text with --prompts FILE"
        )
    folder = Path(location.name)
    file = find_file(arguments, folder)
    with open_server(arguments.server, location, file, arguments.served_model, print) as server:
        options = LoadOptions(
            base_model=arguments.base_model, trust_remote_code=arguments.trust_remote_code
        )
        model = load_inference_model(location, options, print)
        compared = [compare(model, server, prompt, arguments.max_new_tokens) for prompt in prompts]
    return _report(compared, arguments.server, arguments.max_difference)


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raises `UserError` for a number among the options that is out of range."""
    if arguments.max_new_tokens < 1 or arguments.count < 1:
        raise UserError("--max-new-tokens, --count: 1 or more is expected")
    max_difference: float | None = arguments.max_difference
    if max_difference is not None and not max_difference > 0:
        raise UserError(
            f"--max-difference {max_difference:g}: more than 0 nats is expected; 1e-4 holds in "
            "fp32, 0.1 in bf16"
        )


def _report(compared: Sequence[Comparison], server: str, max_difference: float | None) -> int:
    """Prints a summary; returns the command's exit code.

    Args:
        compared: The comparisons of all prompts.
        server: The name of the server.
        max_difference: The largest difference of log-probabilities that is allowed; None: any is.

    Raises:
        UserError: There are no log-probabilities to compare with `max_difference`.
    """
    same = sum(each.is_same for each in compared)
    largest = _find_largest(each.difference for each in compared)
    prompt_largest = _find_largest(each.prompt_difference for each in compared)
    remark = f"; log-probabilities within {largest:.2g}" if largest is not None else ""
    print(f"{same} of {len(compared)} prompts answered alike by {server} and transformers{remark}")
    if prompt_largest is None:
        print("prompts: the server gives no log-probabilities for them")
    else:
        print(f"prompts: log-probabilities of their tokens within {prompt_largest:.2g}")
    if max_difference is not None:
        if largest is None and prompt_largest is None:
            raise UserError(f"--max-difference: {server} gives no log-probabilities")
        if max(largest or 0.0, prompt_largest or 0.0) > max_difference:
            return EXIT_DIFFERS
    return 0 if same == len(compared) else EXIT_DIFFERS


def _find_largest(differences: Iterable[float]) -> float | None:
    """Returns the largest difference that is not nan; None if all are nan."""
    return max((each for each in differences if not math.isnan(each)), default=None)


def _read_prompts(location: ModelLocation, path: str | None) -> Iterator[Conversation]:
    """Reads the prompts of a file.

    Args:
        location: The model.
        path: The file; None: the first file of held-out rows of the run's recipe that exists here,
            or else the first file of rows that were trained on.

    Raises:
        UserError: None of these files exists here.
    """
    if path is not None:
        return read_prompts(path, None)
    recipe = find_yaml(location.run / "recipe.yaml") if location.run is not None else {}
    entries = [*(recipe.get("eval_datasets") or []), *(recipe.get("datasets") or [])]
    paths = [
        str(each["path"])
        for each in entries
        if isinstance(each, dict) and Path(str(each.get("path"))).is_file()
    ]
    if not paths:
        raise UserError(
            f"{location.name}: its run's rows are not in a file here; give prompts with --prompts "
            "FILE"
        )
    remark = "" if recipe.get("eval_datasets") else ", which was trained on"
    print(f"prompts {paths[0]}{remark}")
    return read_prompts(paths[0], None)


def compare(
    model: InferenceModel, server: Server, conversation: Conversation, max_tokens: int
) -> Comparison:
    """Compares the answers of transformers and of a server to one prompt, and prints the result.

    The server gets the rendered prompt. If the model has a chat template, it also gets the messages
    and renders them: the two answers of the server must be equal.

    Args:
        model: The model in transformers.
        server: The server.
        conversation: The prompt.
        max_tokens: The most tokens of an answer.
    """
    expected = _ask_transformers(model, conversation, max_tokens)
    prompt_logprobs = server.score(expected.ids) or []
    choice = server.complete(expected.prompt, max_tokens)
    text = str(choice.get("text") or "")
    first_different = _find_first_different(model, expected, text)
    if first_different is None:
        line = f"the same {len(expected.tokens)} tokens"
        is_same = True
    else:
        line, is_same = _describe_difference(model, expected, text, first_different)
    if model.template is not None:
        chat_text = server.chat(conversation, max_tokens)
        if chat_text.strip() != text.strip():
            line += (
                f"; as a conversation it answers {chat_text[:40]!r}: the server renders another "
                "prompt than the template"
            )
            is_same = False
    print(f"{model.tokenizer.decode(expected.ids)[-40:]!r}: {line}")
    return Comparison(
        is_same,
        difference=_find_difference(expected.logprobs[:first_different], _read_logprobs(choice)),
        prompt_difference=_find_difference(expected.prompt_logprobs, prompt_logprobs),
    )


def _describe_difference(
    model: InferenceModel, expected: GreedyAnswer, text: str, index: int
) -> tuple[str, bool]:
    """Describes where the server's answer leaves that of transformers.

    It is a near tie if the server continues with the second best token, and that is nearly as
    likely as the best.

    Args:
        model: The model in transformers.
        expected: The answer of transformers.
        text: The server's answer.
        index: The index of the first token that differs.

    Returns:
        A line for the user, and whether it is a near tie.
    """
    if not expected.tokens:
        return f"transformers answers nothing, the server {text[:20]!r}", False
    token = model.tokenizer.decode(expected.tokens[index : index + 1])
    common_length = len(model.tokenizer.decode(expected.tokens[:index]))
    rest = text[common_length:][:20]
    second_best = model.tokenizer.decode(expected.second_best[index : index + 1])
    lead = expected.leads[index]
    is_tie = lead < NEAR_TIE and rest.strip().startswith(second_best.strip())
    remark = f"a near tie: ahead by {lead:.2g}" if is_tie else f"ahead by {lead:.2g}"
    line = f"parts at token {index + 1}: transformers {token!r}, the server {rest!r} ({remark})"
    return line, is_tie


def _read_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """Returns the log-probabilities of the tokens of a choice; empty if the server gives none."""
    return (choice.get("logprobs") or {}).get("token_logprobs") or []


def _find_difference(expected: Sequence[float], served: Sequence[float | None]) -> float:
    """Returns the largest difference between log-probabilities of the same tokens.

    Tokens that only one of the lists has are left out. Returns nan if there is nothing to compare.
    """
    pairs = zip(expected, served, strict=False)
    return max((abs(one - other) for one, other in pairs if other is not None), default=math.nan)


@torch.inference_mode()
def _ask_transformers(
    model: InferenceModel, conversation: Conversation, max_tokens: int
) -> GreedyAnswer:
    """Generates the greedy answer with transformers, and scores the prompt."""
    ids = encode_prompt(model, conversation)
    input_ids = torch.tensor([ids], device=model.model.device)
    with model.computing():
        generated: Any = model.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        # the logits at a token score the next one, so those at the last token are left out
        prompt_table = torch.log_softmax(  # [tokens - 1, vocabulary]
            model.model(input_ids=input_ids).logits[0, :-1].float(), -1
        )
    tokens = generated.sequences[0, len(ids) :].tolist()
    end_ids = find_end_ids(model)
    if tokens and tokens[-1] in end_ids:  # servers do not show it
        tokens = tokens[:-1]
    table = torch.log_softmax(torch.cat(generated.logits)[: len(tokens)].float(), -1)
    best_two = table.topk(2)  # [tokens, 2]
    best, second = best_two.values.unbind(1)
    # The server adds BOS to a text if the tokenizer does.
    bos = model.tokenizer.bos_token_id
    adds_bos = bos is not None and model.tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    sent_ids = ids[1:] if adds_bos and ids[:1] == [bos] else ids
    return GreedyAnswer(
        prompt=model.tokenizer.decode(sent_ids),
        ids=ids,
        prompt_logprobs=prompt_table.gather(1, input_ids[0, 1:, None])[:, 0].tolist(),
        tokens=tokens,
        text=model.tokenizer.decode(tokens),
        logprobs=best.tolist(),
        leads=(best - second).tolist(),
        second_best=best_two.indices[:, 1].tolist(),
    )


def _find_first_different(
    model: InferenceModel, expected: GreedyAnswer, served_text: str
) -> int | None:
    """Returns the index of the first expected token that is not in the server's text.

    If the server's text has all of them and is longer, returns the index of the last one. Returns
    None if both texts are equal but for spaces around them.
    """
    if expected.text.strip() == served_text.strip():
        return None
    for index in range(len(expected.tokens)):
        text = model.tokenizer.decode(expected.tokens[: index + 1])
        if not served_text.lstrip().startswith(text.strip()):
            return index
    return max(0, len(expected.tokens) - 1)
