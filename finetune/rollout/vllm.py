"""The engine of vLLM servers: they get the weights as files, and are asked over HTTP, token ids in
and out.

Weights have a name made of their values. A server that has weights of that name is not given them
again, and what it has answered under that name is kept, so that a resumed run learns from the same
completions: a server's depend on what else it computes beside them.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from finetune.checkpoint.manifest import MODEL
from finetune.checkpoint.save import describe_model, write_shards
from finetune.checkpoint.shards import get_model_state, list_shards, weighted_sum
from finetune.config.layout import compute_dtype
from finetune.config.pretrained import text_config_of
from finetune.config.schema import Recipe
from finetune.config.served import list_expert_parameters
from finetune.constants import ADAPTER_CONFIG
from finetune.distributed.model_parts import unwrap
from finetune.distributed.world import RankGroup, World
from finetune.errors import UserError, printable
from finetune.export.export import export_source
from finetune.export.publish import ExportOptions
from finetune.export.source import open_source
from finetune.files.durable import empty_folder, make_folder, write_file
from finetune.files.json_files import append_json_lines, read_json_lines, read_json_object
from finetune.files.network import send
from finetune.rollout.engine import Converse, Ended, Request, Sampled, Sampling
from finetune.rollout.in_flight import LOST, InFlight, read_lines, start, start_all, wait_for
from finetune.rollout.vllm_answers import (
    SHOWN,
    AnswerKind,
    CacheReset,
    Choice,
    ServedCompletion,
    ServedModels,
    ServerAnswer,
    ServerInfo,
    WeightInfo,
    read_answer,
)

FOLDER = "rollouts"  # of a run: what the server has answered
WEIGHTS = "weights"  # what it reads
PATHS: Mapping[type[ServerAnswer], str] = {
    ServedModels: "/v1/models",
    ServerInfo: "/server_info?config_format=json",
    WeightInfo: "/weight_info",
    CacheReset: "/reset_prefix_cache",
    ServedCompletion: "/v1/completions",
}
ENDS = {
    "stop": Ended.STOPPED,
    "length": Ended.CUT,
    "abort": Ended.ABORTED,
}  # the protocol's finish_reason
GONE_SECONDS = 15.0  # in which a server says at least what it serves
CLOSED_SECONDS = 20.0  # in which a server ends what it computes
UNCHANGED = "default"  # the version of the weights that a server has started with
# A server takes what a request does not say from the model's generation_config.json.
WHOLE_DISTRIBUTION = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
TOKENS = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {} --logprobs-mode "
    "processed_logprobs"
)


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that samples."""

    url: str  # of its root
    timeout: float  # seconds
    key: str = "vllm_server_base_url"  # by which the user has named it

    def require(self) -> None:
        """Raises `UserError` where the server does not even say what it serves."""
        send(self.url + PATHS[ServedModels], None, GONE_SECONDS)

    def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The server's answer. One that is gone meanwhile, or hangs, is noticed before the
        timeout.
        """
        answer = start(lambda: send(self.url + path, body, self.timeout))
        return bytes(wait_for(answer, self.require))

    def ask(
        self, kind: type[AnswerKind], path: str = "", body: dict[str, Any] | None = None
    ) -> AnswerKind:
        """The server's answer of a `kind`. Raises `UserError` where it is another."""
        path = path or PATHS[kind]
        return read_answer(kind, self.send(path, body), self.url + path)

    def has_weights(self, name: str, *, of_adapter: bool) -> bool:
        """Whether it samples from the weights of this name."""
        version = self.ask(WeightInfo).weight_version
        if not of_adapter:
            return version == name
        return version == UNCHANGED and name in [each.id for each in self.ask(ServedModels).data]

    def replace_adapter(self, name: str, weights: Path, run_folder: Path) -> None:
        """Has it load an adapter in place of the earlier one of this run."""
        for each in self.ask(ServedModels).data:
            if Path(each.root).is_relative_to(run_folder):
                self.send("/v1/unload_lora_adapter", {"lora_name": each.id})
        self.load_adapter(name, weights)

    def load_adapter(self, name: str, weights: Path) -> None:
        """Has it load an adapter, under the names that it knows."""
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(weights)}
        if list_expert_parameters(read_json_object(weights / ADAPTER_CONFIG)):
            body["is_3d_lora_weight"] = True
        self.send("/v1/load_lora_adapter", body)

    def load_model(self, name: str, weights: str) -> None:
        """Has it load all weights. Raises `UserError` where it keeps what others have computed."""
        self.send(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": weights}}
        )
        if not self.ask(CacheReset, body={}).success:
            raise UserError(
                f"{self.url}: kept the keys and values of other weights; does another run use it?"
            )
        self.send("/update_weight_version", {"new_version": name})

    def complete(
        self,
        model: str,
        request: Request,
        sampling: Sampling,
        stop_ids: Sequence[int],
        vocabulary: int,
        *,
        may_be_aborted: bool = False,
    ) -> Sampled:
        """A completion. Raises `UserError` for an answer that cannot be learned from.

        Args:
            model: The name of the model or adapter that samples.
            request, sampling: What is asked.
            stop_ids: The tokens that end it.
            vocabulary: The tokens that there are.
            may_be_aborted: Whether we cut it ourselves.
        """
        most = sampling.limit(request)
        how = {"max_tokens": most, "temperature": 0 if sampling.greedy else sampling.temperature}
        body = {
            "model": model,
            "prompt": list(request.prompt_ids),
            "stop_token_ids": list(stop_ids),
            **how,
        }
        body |= TOKENS | WHOLE_DISTRIBUTION | {"seed": request.draw_seed()}
        path = self.url + PATHS[ServedCompletion]
        choice = read_answer(ServedCompletion, send(path, body, self.timeout), path).choices[0]
        ids = choice.token_ids
        logs = choice.logprobs.token_logprobs
        ended = ENDS[choice.finish_reason]
        if ended is Ended.ABORTED and not may_be_aborted:
            raise UserError(f"{self.url}: a completion was aborted; does another run use it?")
        fault = _find_fault(choice, most, stop_ids, vocabulary)
        if fault is not None:
            raise UserError(f"{self.url}: {fault}")
        # an estimate of the entropy: the rest is not answered
        return Sampled(ids, logs, -float(sum(logs)), ended)

    def check(self, recipe: Recipe, *, any_temperature: bool = False) -> str:
        """Returns the server's name of its model. Raises `UserError` where it cannot sample for
        this run.

        any_temperature: Whether requests may have another temperature than the recipe's.
        """
        base = str(recipe.model.model_name_or_path)
        try:
            served = self.ask(ServedModels).data[0]
            logprobs_mode = self.ask(ServerInfo).vllm_config.model.logprobs_mode
            version = self.ask(WeightInfo).weight_version
        except UserError as error:
            raise UserError(
                f"{self.key}: {error}; start vLLM 0.32 with {START.format(base)}"
            ) from None
        if served.root != base and not _is_same_folder(served.root, base):
            raise UserError(
                f"{self.key}: {self.url}: serves {_short(served.root)}, but {base} is trained"
            )
        if recipe.lora.use_peft and version != UNCHANGED:
            raise UserError(
                f"{self.key}: {self.url}: has the weights {_short(version)}, not those "
                f"of {base}, over which adapters are sampled; start it again"
            )
        room = served.max_model_len or 0
        most = recipe.data.max_length
        if room < most:
            raise UserError(
                f"{self.key}: {self.url}: has room for {room:,} tokens, but max_length "
                f"is {most:,}; start it with --max-model-len {most}"
            )
        temperature = "requests" if any_temperature else f"{recipe.method.temperature:g}"
        if logprobs_mode != "processed_logprobs" and temperature != "1":
            raise UserError(
                f"{self.key}: {self.url}: gives log-probabilities without the temperature of "
                f"{temperature}; start it with --logprobs-mode processed_logprobs"
            )
        return served.id


def _find_fault(choice: Choice, most: int, stop_ids: Sequence[int], vocabulary: int) -> str | None:
    """Finds what is wrong with a completion of at most so many tokens; None where nothing is."""
    ids = choice.token_ids
    ended = ENDS[choice.finish_reason]
    scores = len(choice.logprobs.token_logprobs)
    if len(ids) != scores:
        return f"{len(ids)} tokens with {scores} log-probabilities"
    if not ids and ended is not Ended.ABORTED:
        return "a completion without a token"
    if max(ids, default=0) >= vocabulary:
        return f"a completion has the token {max(ids)}, but there are {vocabulary:,}"
    if len(ids) > most:
        return f"a completion of {len(ids)} tokens, where {most} were asked for"
    if ended is Ended.CUT and len(ids) != most:
        return f"a completion is cut after {len(ids)} of {most} tokens"
    if ended is Ended.STOPPED and ids[-1] not in stop_ids:
        return f"a completion without its last token: it stopped after {ids[-1]}"
    return None


def list_servers(recipe: Recipe) -> list[VllmServer]:
    """The servers that sample for a run."""
    return [
        VllmServer(address.rstrip("/").removesuffix("/v1"), recipe.rollout.vllm_server_timeout)
        for address in recipe.rollout.servers
    ]


def check_servers(recipe: Recipe) -> list[str]:
    """Returns each server's name of its model. Raises `UserError` where one cannot sample for this
    run.
    """
    return [server.check(recipe) for server in list_servers(recipe)]


def _is_same_folder(one: str, other: str) -> bool:
    try:
        return Path(one).resolve() == Path(other).resolve()
    except (OSError, ValueError):  # no path, such as one with a NUL
        return False


def _short(text: str) -> str:
    return printable(" ".join(text.split()))[:SHOWN]


class VllmEngine:
    """Samples completions from vLLM servers, which divide the prompts.

    Of ranks with the same requests the first asks. All ranks write the weights; rank 0 has the
    servers load them.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        recipe: Recipe,
        tokenizer: Any,
        stop_ids: Sequence[int],
        run_folder: Path,
    ) -> None:
        self._model = model
        self._world = world
        self._recipe = recipe
        self._stop_ids = sorted(stop_ids)
        self._servers = list_servers(recipe)
        self._folder = run_folder.absolute() / FOLDER
        if world.is_main:
            self._descriptions = describe_model(model, recipe, tokenizer)
        else:
            self._descriptions = {}
        self._name = ""  # of the weights handed over last
        self.version = 0  # the optimizer steps after which the weights are as they are now
        self._handed_over: int | None = None  # the version that the servers have
        self.hand_over_seconds = 0.0  # of the last time
        threads = recipe.rollout.per_device_generation_batch_size * world.tensor_group_count
        keeps = recipe.rollout.in_flight == "keep"
        self._in_flight = InFlight(self._complete, threads, keeps)
        self._recalled: dict[str, Sampled] = {}  # by the names of requests
        self._recalled_steps = set[int]()  # of their prompts
        self._noting = threading.Lock()
        self._older = set[Path]()  # folders of before the last save
        # what each server calls the base
        self._served: list[str] = RankGroup(world).on_main(self._open_servers)
        self._vocabulary = int(text_config_of(unwrap(model).config).vocab_size)

    def _open_servers(self) -> list[str]:
        """Returns each server's name of its model. Resumes a server that a killed run has left
        paused.
        """
        names = check_servers(self._recipe)
        if self._recipe.rollout.max_staleness:
            for server in self._servers:
                server.send("/resume", {})
        return names

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """A completion of each request.

        All ranks call it: together they hand over the weights where they are new.
        """
        self.hand_over()
        world = self._world
        ranks = RankGroup(self._world)
        of_group = world.stage_size // world.tensor_group_count
        # of those with the same requests
        is_first = world.rank < world.stage_size and world.rank % of_group == 0
        samples: list[Sampled] = []
        ranks.on_all(lambda: samples.extend(self._answer(requests, sampling)) if is_first else None)
        ranks.on_main(self._refuse_stale)
        if not self._recipe.rollout.max_staleness:
            return samples
        return [replace(each, versions=[self.version] * len(each.token_ids)) for each in samples]

    def submit(self, prompts_step: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begins to sample completions of `requests` from the weights handed over last, on the main
        rank.
        """
        if self._world.is_main:
            self._submit(prompts_step, requests, sampling)

    def converse(self, prompts_step: int, converse: Converse, sampling: Sampling) -> None:
        """Has a thread of the main rank sample completions of the prompts of `prompts_step` by
        `converse`.
        """
        if not self._world.is_main:
            return

        def sample(requests: Sequence[Request]) -> list[Sampled]:
            answers = self._submit(prompts_step, requests, sampling)
            return [wait_for(each, self._require_servers) for each in answers]

        self._in_flight.converse(prompts_step, partial(converse, sample))

    def _submit(
        self, prompts_step: int, requests: Sequence[Request], sampling: Sampling
    ) -> list[Future[Sampled]]:
        by_name = {_name_request(each, sampling): each for each in requests}
        known = self._recalled | self._read_answers(self._name)
        if prompts_step in self._recalled_steps:  # the end of a run has cut what is not known
            known = dict.fromkeys(by_name, LOST) | known
        note = partial(self._note, self._folder / self._name)
        return self._in_flight.submit(prompts_step, self._name, by_name, sampling, known, note)

    def is_in_flight(self, prompts_step: int) -> bool:
        """Whether completions of the prompts of `prompts_step` have been begun; asked of all
        ranks.
        """
        return bool(RankGroup(self._world).on_main(lambda: prompts_step in self._in_flight.flights))

    def take(self, prompts_step: int) -> list[Sampled]:
        """The completions of the prompts of `prompts_step`, on every rank, once all are there."""

        def take() -> list[dict[str, Any]]:
            taken = self._in_flight.take(prompts_step, self._require_servers)
            self._refuse_stale()
            return [each.as_json() for each in taken]

        return [Sampled.of_json(each) for each in RankGroup(self._world).on_main(take)]

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """A line for each completion that was begun, with its weights, on the main rank."""
        return self._in_flight.describe_lines()

    def recall(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes the lines of a checkpoint back, with what was answered to them after it."""
        answered: dict[str, Sampled] = {}
        for weights in sorted({line["weights"] for line in lines}):
            answered |= self._read_answers(weights)
        self._recalled = read_lines(lines)
        self._recalled_steps = {line["prompts_step"] for line in lines}
        for name, sampled in self._recalled.items():
            if not sampled.token_ids and name in answered:
                self._recalled[name] = answered[name]

    def forget(self) -> None:
        """Removes what was answered before the checkpoint before the one that is about to be
        published.
        """
        for folder in self._older:
            shutil.rmtree(folder, ignore_errors=True)
        needed = {self._name, *self._in_flight.list_weights()}
        self._older = {folder for folder in self._folder.glob("*") if folder.name not in needed}

    def _require_servers(self) -> None:
        for server in self._servers:
            server.require()

    def hand_over(self) -> None:
        """Gives the servers the weights as they are now, by the stream of an export, unless they
        have them.
        """
        if self._recipe.rollout.max_staleness and self._handed_over == self.version:
            return
        started = time.perf_counter()
        model = self._model
        world = self._world
        ranks = RankGroup(self._world)
        shards = [
            each
            for each in list_shards(get_model_state(model), MODEL, world.stages)
            if each.is_first_copy
        ]
        sums = ranks.on_all(
            lambda: {
                f"{each.name} {each.offsets}": int(weighted_sum(each.tensor)) for each in shards
            }
        )
        described = json.dumps([sums, asdict(self._recipe.lora)], sort_keys=True, default=str)
        name = f"{self._folder.parent.name}-{xxhash.xxh3_64_hexdigest(described.encode())}"
        if ranks.on_main(lambda: self._find_stale(name) is not None):
            folder = self._folder / name
            ranks.on_main(lambda: empty_folder(folder / MODEL))
            ranks.on_all(lambda: write_shards(folder, shards, world))
            ranks.on_main(lambda: self._load(folder))
        self._name = name
        self._handed_over = self.version
        self._in_flight.open(self.version)
        self.hand_over_seconds = time.perf_counter() - started

    def _find_stale(self, name: str) -> VllmServer | None:
        """The first server that has other weights than those of this name; None where none has."""
        of_adapter = self._recipe.lora.use_peft
        for server in self._servers:
            if not server.has_weights(name, of_adapter=of_adapter):
                return server
        return None

    def _load(self, folder: Path) -> None:
        """Exports the shards of all ranks in `folder`, in the dtype that training computes in, and
        has all servers load them.
        """
        keys = self._recipe.model
        for name, content in self._descriptions.items():
            write_file(folder / name, [content])
        is_adapter = self._recipe.lora.use_peft
        source = open_source(
            folder / MODEL, base_model=keys.model_name_or_path if is_adapter else None, log=_silent
        )
        options = ExportOptions(
            dtype=compute_dtype(self._world.sharding, keys, self._recipe.lora),
            verify=False,
            overwrite=True,
            model=not is_adapter,
            adapter_names="vllm" if is_adapter else "peft",
            trust_remote_code=keys.trust_remote_code,
        )
        weights = export_source(source, folder / WEIGHTS, options, _silent)
        shutil.rmtree(folder / MODEL)
        is_cut = self._cut_requests()

        def load(server: VllmServer) -> None:
            if is_adapter:
                server.replace_adapter(folder.name, weights, self._folder)
            else:
                server.load_model(folder.name, str(weights))
            if is_cut:
                server.send("/resume", {})

        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(load, self._servers))
        for other in self._folder.glob(f"*/{WEIGHTS}"):
            if other.parent != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _cut_requests(self) -> bool:
        """Has the servers end what they compute, and compute nothing until they resume; returns
        whether there was anything.
        """
        paused: list[str] = []

        def cut() -> None:
            for server in self._servers:
                server.send("/pause?mode=abort", {})
            paused.append(self._name)

        self._in_flight.close(cut, CLOSED_SECONDS)
        return bool(paused)

    def _refuse_stale(self) -> None:
        """Raises `UserError` where a server has other weights than it was given."""
        stale = self._find_stale(self._name)
        if stale is not None:
            raise UserError(
                f"{stale.url}: has other weights than {self._name}, which it was given for this "
                "step; was it started again, or does another run use it?"
            )

    def _answer(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """A completion of each request: as it was answered before under these weights, else by the
        server.
        """
        said = [_name_request(each, sampling) for each in requests]
        known = self._read_answers(self._name)
        asked = {
            name: request for name, request in zip(said, requests, strict=True) if name not in known
        }
        answers = start_all(
            [partial(self._complete, request, sampling) for request in asked.values()],
            self._recipe.rollout.per_device_generation_batch_size,
        )
        for name, answer in zip(asked, answers, strict=True):
            known[name] = wait_for(answer, self._require_servers)
            self._note(self._folder / self._name, name, known[name])
        return [known[name] for name in said]

    def _read_answers(self, weights: str) -> dict[str, Sampled]:
        """Reads the answers that were sampled under the weights of this name, by the names of
        requests.
        """
        known: dict[str, Sampled] = {}
        for path in sorted((self._folder / weights).glob("*.jsonl")):
            for line in read_json_lines(path):
                # a line that was damaged is asked for again
                with suppress(KeyError, TypeError, ValueError):
                    known[line["request"]] = Sampled.of_json(line["sampled"])  # type: ignore[index]
        return known

    def _note(self, folder: Path, name: str, sampled: Sampled) -> None:
        """Keeps an answer in the folder of its weights; threads call it, too."""
        line = {"request": name, "sampled": sampled.as_json()}
        with self._noting:
            make_folder(folder)
            append_json_lines(folder / f"answers-{self._world.rank:05d}.jsonl", [line])

    def _complete(self, request: Request, sampling: Sampling) -> Sampled:
        # all completions of a prompt at one server, which computes the prompt once
        place = request.seed[2] % len(self._servers)
        model = self._name if self._recipe.lora.use_peft else self._served[place]
        return self._servers[place].complete(
            model,
            request,
            sampling,
            self._stop_ids,
            self._vocabulary,
            may_be_aborted=bool(self._recipe.rollout.max_staleness),
        )


def _silent(_: str) -> None:
    pass


def _name_request(request: Request, sampling: Sampling) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([request, asdict(sampling)]).encode())
