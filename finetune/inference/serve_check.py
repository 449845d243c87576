"""`finetune serve-check`: compares a server's answers to held-out prompts with transformers'.

The server is started here or runs already. It is asked through the OpenAI protocol.
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
    model: str  # the server's name of it

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """Continues a text greedily; returns the protocol's choice: "text" and "logprobs"."""
        return self._ask("completions", {"prompt": prompt, "logprobs": 1}, max_tokens)

    def score(self, ids: Sequence[int]) -> list[float] | None:
        """Returns the log-probability of each token of a prompt after the first.

        None where the server gives no log-probabilities for prompts.
        """
        body = {"prompt": list(ids), "logprobs": 1, "echo": True}
        try:
            choice = self._ask("completions", body, 1)
        except UserError:  # the server takes no ids, or no echo
            return None
        scores = _read_logprobs(choice)
        if len(scores) not in (len(ids), len(ids) + 1):  # the prompt, and maybe one token more
            return None
        prompt_scores = scores[1 : len(ids)]
        is_complete = all(isinstance(each, float) for each in prompt_scores)
        return prompt_scores if is_complete else None

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> str:
        """Answers a conversation greedily; the server renders it."""
        choice = self._ask("chat/completions", {"messages": list(messages)}, max_tokens)
        return str(choice["message"]["content"] or "")

    def _ask(self, path: str, body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """Sends a request for greedy tokens; returns the only choice of the answer."""
        greedy = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        # By default llama-cpp-python's server penalizes repetition by 1.1. vLLM names it otherwise.
        plain = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
        answer = _request(f"{self.url}/v1/{path}", {**body, **greedy, **plain})
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url}: not an answer of the OpenAI protocol: {json.dumps(answer)[:120]}"
            ) from None


@contextmanager
def open_server(
    name: str,
    location: ModelLocation,
    file: Path | None,
    served: str | None,
    log: Callable[[str], object],
) -> Iterator[Server]:
    """Yields a server, started for the block unless `name` is ollama or a URL.

    Args:
        name: One of STARTED, ollama, or the URL of a server.
        location: The export or adapter.
        file: The file that `find_file` returned.
        served: The name of the model at the server; None: its only model.
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        with _running(command) as (process, said):
            _wait(url, process, said, name)
            yield Server(url, served or _find_served(url))


@contextmanager
def _running(command: Sequence[str]) -> Iterator[tuple["subprocess.Popen[bytes]", Any]]:
    """Runs a command during the block; yields (its process, the file with its output)."""
    with (
        TemporaryFile() as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process, said
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _serve_adapter(folder: Path, base: str | None, port: int) -> list[str]:
    """Returns the command that serves an adapter in the dtype of its base's files."""
    command = serve_adapter(folder, base, read_json_object(folder / ADAPTER_CONFIG))
    if command is None:
        raise UserError(
            f"{folder}: vLLM serves no such adapter; export the merged model, and check that"
        )
    return [*command, *list_server_options(Path(str(base)), port)]


# A server that this command starts -> the export format that it serves.
STARTED = dict(
    sorted(
        (row.server, name)
        for name, row in EXPORT_FORMATS.items()
        if row.server is not None and row.start
    )
)


def find_file(arguments: argparse.Namespace, folder: Path) -> Path | None:
    """Returns the file to serve: the option's, or the first in `folder`.

    None where the server serves a folder. Raises `UserError` where the option's file does not
    exist.
    """
    file = None
    for name, row in EXPORT_FORMATS.items():
        if row.suffix is None or row.server is None:
            continue
        given = getattr(arguments, name)
        if given is not None and not Path(given).is_file():
            raise UserError(f"--{name}: {given}: no such file")
        if row.server == arguments.server:
            files = [given] if given is not None else sorted(folder.glob(f"*{row.suffix}"))
            file = Path(files[0]) if files else None
    return file


def _wait(url: str, process: "subprocess.Popen[bytes]", said: Any, name: str) -> None:
    """Waits until the server answers. Raises `UserError` where it ends, or takes too long.

    said: The file with its output.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            _request(f"{url}/v1/models", None, seconds=5)
            return
        except UserError:
            if process.poll() is not None:
                said.seek(0)
                reason = _find_reason(said.read().decode(errors="replace"))
                raise UserError(
                    f"--server {name}: ended with {process.returncode}: {reason}"
                ) from None
            time.sleep(0.5)
    raise UserError(f"--server {name}: did not answer within {START_SECONDS} seconds")


def _find_reason(output: str) -> str:
    """Returns the last line of a server's output that mentions an error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["nothing was said"])[-1][:200]


def _find_served(url: str) -> str:
    """Returns the server's name of its model. Raises `UserError` unless it has exactly one."""
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
    """Returns the JSON object that `url` answers. Raises `UserError` for any other answer."""
    try:
        answer = json.loads(send(url, body, seconds))
    except ValueError as error:
        raise UserError(f"{url}: no answer: {error}") from None
    if not isinstance(answer, dict):
        raise UserError(f"{url}: not an answer of the OpenAI protocol")
    return answer


EXIT_DIFFERS = 1
# Rounding decides between the best two tokens where their log-probabilities are this near.
NEAR_TIE = 0.05


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """The greedy answer of transformers."""

    prompt: str  # as the server gets it, without a bos that the server adds
    ids: list[int]  # of the prompt
    prompt_logprobs: list[float]  # of the prompt's tokens after the first
    tokens: list[int]  # of the answer, without the end
    text: str
    logprobs: list[float]  # of each token
    leads: list[float]  # by how much each exceeds the log-probability of the second best token
    seconds: list[int]  # the second best token at each place


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one prompt. Returned by `compare`."""

    line: str  # for the user
    is_same: bool
    # The largest difference between log-probabilities, of answer and prompt; nan: not given.
    difference: float  # over the tokens before the answers differ
    prompt_difference: float


def serve_check_command(arguments: argparse.Namespace) -> int:
    """Compares the server's answers with transformers'. Returns 0, or 1 where they differ."""
    _check_numbers(arguments)
    location = find_model(arguments.source)
    prompts = list(islice(_read_prompts(location, arguments.prompts), arguments.count))
    if not prompts:
        raise UserError(
            f"{arguments.prompts or location.name}: holds no prompt; give some by --prompts FILE"
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
    if arguments.max_new_tokens < 1 or arguments.count < 1:
        raise UserError("--max-new-tokens, --count: 1 or more is expected")
    most: float | None = arguments.max_difference
    if most is not None and not most > 0:
        raise UserError(
            f"--max-difference {most:g}: more than 0 nats is expected; 1e-4 holds in fp32, 0.1 in "
            "bf16"
        )


def _report(compared: Sequence[Comparison], server: str, most: float | None) -> int:
    """Prints a summary; returns the command's exit code.

    Args:
        compared: The comparisons of all prompts.
        server: The name of the server.
        most: The largest difference of log-probabilities that is the same; None: any.

    Raises:
        UserError: There are no log-probabilities to compare with `most`.
    """
    same = sum(each.is_same for each in compared)
    largest = _find_largest(each.difference for each in compared)
    of_prompts = _find_largest(each.prompt_difference for each in compared)
    near = f"; log-probabilities within {largest:.2g}" if largest is not None else ""
    print(f"{same} of {len(compared)} prompts answered alike by {server} and transformers{near}")
    if of_prompts is None:
        print("prompts: the server gives no log-probabilities for them")
    else:
        print(f"prompts: log-probabilities of their tokens within {of_prompts:.2g}")
    if most is not None:
        if largest is None and of_prompts is None:
            raise UserError(f"--max-difference: {server} gives no log-probabilities")
        if max(largest or 0.0, of_prompts or 0.0) > most:
            return EXIT_DIFFERS
    return 0 if same == len(compared) else EXIT_DIFFERS


def _find_largest(differences: Iterable[float]) -> float | None:
    """Returns the largest difference that is not nan; None where all are nan."""
    return max((each for each in differences if not math.isnan(each)), default=None)


def _read_prompts(location: ModelLocation, given: str | None) -> Iterator[Conversation]:
    """Reads the prompts of the file `given`, or of the run's first file of held-out rows.

    A run without one gives the first file of rows on which it was trained.
    """
    if given is not None:
        return read_prompts(given, None)
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
    """Compares the answers to the rendered prompt and, by a chat template, to the conversation.

    Prints the result.
    """
    ours = _ask_transformers(model, conversation, max_tokens)
    prompt_logprobs = server.score(ours.ids) or []
    choice = server.complete(ours.prompt, max_tokens)
    text = str(choice.get("text") or "")
    parted = _find_parting(model, ours, text)
    if parted is None:
        line = f"the same {len(ours.tokens)} tokens"
        is_same = True
    else:
        line, is_same = _describe_parting(model, ours, text, parted)
    if model.template is not None:
        said = server.chat(conversation.messages, max_tokens)
        if said.strip() != text.strip():
            line += (
                f"; as a conversation it answers {said[:40]!r}: the server renders another prompt "
                "than the template"
            )
            is_same = False
    print(f"{model.tokenizer.decode(ours.ids)[-40:]!r}: {line}")
    return Comparison(
        line,
        is_same,
        difference=_find_difference(ours.logprobs[:parted], _read_logprobs(choice)),
        prompt_difference=_find_difference(ours.prompt_logprobs, prompt_logprobs),
    )


def _describe_parting(
    model: InferenceModel, ours: GreedyAnswer, theirs: str, parted: int
) -> tuple[str, bool]:
    """Describes where two answers part; returns (a line, whether it is a near tie)."""
    if not ours.tokens:
        return f"transformers answers nothing, the server {theirs[:20]!r}", False
    piece = model.tokenizer.decode(ours.tokens[parted : parted + 1])
    rest = theirs[len(model.tokenizer.decode(ours.tokens[:parted])) :][:20]
    second = model.tokenizer.decode(ours.seconds[parted : parted + 1])
    lead = ours.leads[parted]
    is_tie = lead < NEAR_TIE and rest.strip().startswith(second.strip())
    remark = f"a near tie: ahead by {lead:.2g}" if is_tie else f"ahead by {lead:.2g}"
    line = f"parts at token {parted + 1}: transformers {piece!r}, the server {rest!r} ({remark})"
    return line, is_tie


def _read_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """Returns the log-probabilities of the tokens of a choice; empty where there are none."""
    return (choice.get("logprobs") or {}).get("token_logprobs") or []


def _find_difference(ours: Sequence[float], theirs: Sequence[float | None]) -> float:
    """Returns the largest difference between two lists, as far as both go; nan without a pair."""
    pairs = zip(ours, theirs, strict=False)
    return max((abs(one - other) for one, other in pairs if other is not None), default=math.nan)


@torch.inference_mode()
def _ask_transformers(
    model: InferenceModel, conversation: Conversation, max_tokens: int
) -> GreedyAnswer:
    """Generates greedily with transformers, and scores the prompt."""
    ids = encode_prompt(model, conversation)
    given = torch.tensor([ids], device=model.model.device)
    with model.computing():
        made: Any = model.model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        of_prompt = torch.log_softmax(model.model(input_ids=given).logits[0, :-1].float(), -1)
    tokens = made.sequences[0, len(ids) :].tolist()
    end_ids = find_end_ids(model)
    if tokens and tokens[-1] in end_ids:  # servers do not show it
        tokens = tokens[:-1]
    best_two = [
        torch.log_softmax(logits[0].float(), -1).topk(2) for logits in made.logits[: len(tokens)]
    ]
    scores = [each.values for each in best_two]
    bos = model.tokenizer.bos_token_id
    adds_bos = bos is not None and model.tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    sent = ids[1:] if adds_bos and ids[:1] == [bos] else ids
    return GreedyAnswer(
        prompt=model.tokenizer.decode(sent),
        ids=ids,
        prompt_logprobs=of_prompt.gather(1, given[0, 1:, None])[:, 0].tolist(),
        tokens=tokens,
        text=model.tokenizer.decode(tokens),
        logprobs=[float(best) for best, _ in scores],
        leads=[float(best - second) for best, second in scores],
        seconds=[int(each.indices[1]) for each in best_two],
    )


def _find_parting(model: InferenceModel, ours: GreedyAnswer, theirs: str) -> int | None:
    """Returns the index of our first token that the server's text does not continue with.

    None where both texts are the same.
    """
    if ours.text.strip() == theirs.strip():
        return None
    for index in range(len(ours.tokens)):
        text = model.tokenizer.decode(ours.tokens[: index + 1])
        if not theirs.lstrip().startswith(text.strip()):
            return index
    return max(0, len(ours.tokens) - 1)
