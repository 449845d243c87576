"""`finetune serve-check`: what a server answers to held-out prompts, beside what transformers
answers.

The server is started or running already, and is asked through the OpenAI protocol.
"""

import argparse
import json
import math
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from finetune.inference.conversation import encode_prompt, end_ids
from finetune.inference.inference_model import InferenceModel, LoadOptions, load_inference_model
from finetune.inference.inputs import ModelLocation, find_model, read_prompts

START_SECONDS = 600  # vLLM compiles
ANSWER_SECONDS = 300
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

    def score(self, ids: Sequence[int]) -> list[float] | None:
        """The log-probability of each token after the first; None where the server does not give
        them for prompts.
        """
        body = {"prompt": list(ids), "logprobs": 1, "echo": True} | self._greedy(1)
        try:
            answer = self._choose(_request(f"{self.url}/v1/completions", body))
        except UserError:  # it takes no ids, or no echo
            return None
        given = (answer.get("logprobs") or {}).get("token_logprobs") or []
        of_prompt = given[1 : len(ids)]
        is_complete = len(given) in (len(ids), len(ids) + 1) and all(
            isinstance(each, float) for each in of_prompt
        )
        return of_prompt if is_complete else None

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> str:
        """The greedy answer to a conversation, which the server renders itself."""
        answer = _request(
            f"{self.url}/v1/chat/completions",
            {"messages": list(messages)} | self._greedy(max_tokens),
        )
        return str(self._choose(answer)["message"]["content"] or "")

    def _greedy(self, max_tokens: int) -> dict[str, Any]:
        # llama-cpp-python's server penalizes repetition by 1.1 unless a request says otherwise;
        # vLLM's key is another.
        plain = {"repeat_penalty": 1.0, "repetition_penalty": 1.0}
        return {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0} | plain

    def _choose(self, answer: Mapping[str, Any]) -> dict[str, Any]:
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
    """The server `name`: llama.cpp or vllm, started for the block; ollama or a URL, which must run
    already.

    Args:
        location: The export or adapter.
        file: Of `find_file`.
        served: What a running server calls the model; None: the only one that it has.

    Raises:
        UserError: Where the server is not installed, does not start, or does not answer.
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
    with ExitStack() as beside:
        if name == "vllm" and location.kind == "adapter":
            temporary = beside.enter_context(TemporaryDirectory(prefix="finetune-"))
            folder = Path(location.name)
            folder = export_for_vllm(folder, Path(temporary) / folder.name)
            command = _serve_adapter(folder, location.base, port)
            served = served or folder.name
        else:
            start = EXPORT_FORMATS[STARTED[name]].start
            assert start is not None
            command = start(Path(location.name), file, port)
        log(f"server  {' '.join(command)}")
        said = beside.enter_context(TemporaryFile())
        process = beside.enter_context(
            subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        )
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


def _serve_adapter(folder: Path, base: str | None, port: int) -> list[str]:
    """The command that serves an adapter, in the dtype of its base's files."""
    command = serve_adapter(folder, base, read_json_object(folder / ADAPTER_CONFIG))
    if command is None:
        raise UserError(
            f"{folder}: vLLM serves no such adapter; export the merged model, and check that"
        )
    return [*command, *list_server_options(Path(str(base)), port)]


# By the name of the server: the format that it is started with.
STARTED = dict(
    sorted(
        (row.server, name)
        for name, row in EXPORT_FORMATS.items()
        if row.server is not None and row.start
    )
)


def find_file(arguments: argparse.Namespace, folder: Path) -> Path | None:
    """The file that the server serves: as given, else the first in `folder`; None where it serves
    the folder.

    Raises `UserError` where a file that is given is not there.
    """
    file = None
    for name, row in EXPORT_FORMATS.items():
        if row.suffix is None or row.server is None:
            continue
        given = getattr(arguments, name)
        if given is not None and not Path(given).is_file():
            raise UserError(f"--{name}: {given}: no such file")
        if row.server == arguments.server:
            if given is not None:
                file = Path(given)
            else:
                file = next(iter(sorted(folder.glob(f"*{row.suffix}"))), None)
    return file


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
                lines = [
                    line
                    for line in said.read().decode(errors="replace").splitlines()
                    if line.strip()
                ]
                errors = [line for line in lines if "rror" in line] or lines or ["nothing was said"]
                raise UserError(
                    f"--server {name}: ended with {process.returncode}: {errors[-1].strip()[:200]}"
                ) from None
            time.sleep(0.5)
    raise UserError(f"--server {name}: did not answer within {START_SECONDS} seconds")


def _find_served(url: str) -> str:
    """Returns the server's name of its model. Raises `UserError` where it has several, or none."""
    listed = _request(f"{url}/v1/models", None).get("data")
    if isinstance(listed, list):
        names = [str(each.get("id")) for each in listed]
    else:
        names = []
    if len(names) != 1:
        raise UserError(
            f"{url}: serves {', '.join(names[:5]) or 'no model'}; name one with --served-model"
        )
    return names[0]


def _request(
    url: str, body: Mapping[str, Any] | None, seconds: float = ANSWER_SECONDS
) -> dict[str, Any]:
    """The JSON that `url` answers. Raises `UserError` where it does not."""
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

    prompt: str  # as it is sent, without a bos that the server adds
    ids: list[int]  # of the prompt
    prompt_logprobs: list[float]  # of each of them after the first
    tokens: list[int]
    text: str
    logprobs: list[float]  # of each token
    leads: list[float]  # of each token's over the second best
    seconds: list[int]  # the second best token at each place


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt. Returned by `compare`."""

    line: str
    is_same: bool
    # the largest of the log-probabilities, over the tokens that are the same; nan: not given
    difference: float
    prompt_difference: float  # the same, over the tokens of the prompt


def serve_check_command(arguments: argparse.Namespace) -> int:
    """Compares the server's answers with transformers'. Returns 0, or 1 where they part."""
    if arguments.max_new_tokens < 1 or arguments.count < 1:
        raise UserError("--max-new-tokens, --count: 1 or more is expected")
    most: float | None = arguments.max_difference
    if most is not None and not most > 0:
        raise UserError(
            f"--max-difference {most:g}: more than 0 nats is expected; 1e-4 holds in fp32, 0.1 in "
            "bf16"
        )
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
    same = sum(each.is_same for each in compared)
    largest = _find_largest(each.difference for each in compared)
    of_prompts = _find_largest(each.prompt_difference for each in compared)
    if largest is None:
        near = ""
    else:
        near = f"; log-probabilities within {largest:.2g}"
    print(
        f"{same} of {len(compared)} prompts answered alike by {arguments.server} and "
        f"transformers{near}"
    )
    print(
        "prompts: the server gives no log-probabilities for them"
        if of_prompts is None
        else f"prompts: log-probabilities of their tokens within {of_prompts:.2g}"
    )
    if most is not None and largest is None and of_prompts is None:
        raise UserError(f"--max-difference: {arguments.server} gives no log-probabilities")
    is_near = most is None or max(largest or 0.0, of_prompts or 0.0) <= most
    return 0 if same == len(compared) and is_near else EXIT_DIFFERS


def _find_largest(differences: Iterable[float]) -> float | None:
    """The largest, without those that are not given; None where none is."""
    return max((each for each in differences if not math.isnan(each)), default=None)


def _read_prompts(location: ModelLocation, given: str | None) -> Iterator[Conversation]:
    """The prompts of a file, or of the run's held-out rows; of those it trained on where it held
    out no file.
    """
    if given is not None:
        return read_prompts(given, None)
    if location.run is not None:
        recipe = find_yaml(location.run / "recipe.yaml")
    else:
        recipe = {}
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
    print(f"prompts {paths[0]}{'' if recipe.get('eval_datasets') else ', which was trained on'}")
    return read_prompts(paths[0], None)


def compare(
    model: InferenceModel, server: Server, conversation: Conversation, max_tokens: int
) -> Comparison:
    """Asks both, as a text and, where the model has a chat template, as a conversation.

    Prints what was found.
    """
    ours = _ask_transformers(model, conversation, max_tokens)
    prompt_logprobs = server.score(ours.ids)
    answer = server.complete(ours.prompt, max_tokens)
    text = str(answer.get("text") or "")
    given = (answer.get("logprobs") or {}).get("token_logprobs") or []
    parted = _find_parting(model, ours, text)
    is_tie = False
    alike = len(ours.tokens) if parted is None else parted
    pairs = zip(ours.logprobs[:alike], given[:alike], strict=False)
    difference = max(
        (abs(one - other) for one, other in pairs if other is not None), default=math.nan
    )
    if parted is None:
        line = f"the same {len(ours.tokens)} tokens"
    else:
        piece = model.tokenizer.decode(ours.tokens[parted : parted + 1])
        rest = text[len(model.tokenizer.decode(ours.tokens[:parted])) :][:20]
        line = f"parts at token {parted + 1}: transformers {piece!r}, the server {rest!r}"
        second = model.tokenizer.decode(ours.seconds[parted : parted + 1])
        is_tie = ours.leads[parted] < NEAR_TIE and rest.strip().startswith(second.strip())
        line += f" ({'a near tie: ' if is_tie else ''}ahead by {ours.leads[parted]:.2g})"
    is_same = parted is None or is_tie
    if model.template is not None:
        said = server.chat(conversation.messages, max_tokens)
        if said.strip() != text.strip():
            line += (
                f"; as a conversation it answers {said[:40]!r}: the server renders another prompt "
                "than the template"
            )
            is_same = False
    prompt_pairs = zip(ours.prompt_logprobs, prompt_logprobs or (), strict=False)
    prompt_difference = max((abs(one - other) for one, other in prompt_pairs), default=math.nan)
    comparison = Comparison(line, is_same, difference, prompt_difference)
    print(f"{model.tokenizer.decode(encode_prompt(model, conversation))[-40:]!r}: {line}")
    return comparison


@torch.inference_mode()
def _ask_transformers(
    model: InferenceModel, conversation: Conversation, max_tokens: int
) -> GreedyAnswer:
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
    ends = end_ids(model)
    if tokens and tokens[-1] in ends:  # servers do not show it
        tokens = tokens[:-1]
    two = [
        torch.log_softmax(scores[0].float(), -1).topk(2) for scores in made.logits[: len(tokens)]
    ]
    best = [each.values for each in two]
    bos = model.tokenizer.bos_token_id
    adds_bos = bos is not None and model.tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    sent = ids[1:] if adds_bos and ids[:1] == [bos] else ids
    return GreedyAnswer(
        model.tokenizer.decode(sent),
        ids,
        of_prompt.gather(1, given[0, 1:, None])[:, 0].tolist(),
        tokens,
        model.tokenizer.decode(tokens),
        [float(pair[0]) for pair in best],
        [float(pair[0] - pair[1]) for pair in best],
        [int(each.indices[1]) for each in two],
    )


def _find_parting(model: InferenceModel, ours: GreedyAnswer, theirs: str) -> int | None:
    """The number of the first of our tokens that the server's text does not have; None where all is
    the same.
    """
    if ours.text.strip() == theirs.strip():
        return None
    decoded = (
        model.tokenizer.decode(ours.tokens[: number + 1]) for number in range(len(ours.tokens))
    )
    partings = (
        number
        for number, text in enumerate(decoded)
        if not theirs.lstrip().startswith(text.strip())
    )
    return next(partings, max(0, len(ours.tokens) - 1))
