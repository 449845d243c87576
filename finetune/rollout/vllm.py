"""The engine of vLLM servers: they read the weights from files, and answer requests over HTTP.

Weights have a name: the run's name and a hash of their values. A server that has the weights of a
name does not get them again. Its answers are kept in a folder of that name, so that a resumed run
trains on the same completions. The server would not repeat them exactly, because its rounding
depends on the requests that it answers at the same time.
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
from finetune.checkpoint.shards import TensorShard, get_model_state, list_shards, weighted_sum
from finetune.config.layout import find_compute_dtype
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
from finetune.rollout.in_flight import LOST, DaemonPool, InFlight, read_lines, start, wait_for
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

FOLDER = "rollouts"  # in the run's folder; it has a folder for each name of weights
WEIGHTS = "weights"  # in the folder of a name: the files that the server reads
# The path of each kind of answer.
PATHS: Mapping[type[ServerAnswer], str] = {
    ServedModels: "/v1/models",
    ServerInfo: "/server_info?config_format=json",
    WeightInfo: "/weight_info",
    CacheReset: "/reset_prefix_cache",
    ServedCompletion: "/v1/completions",
}
# By the `finish_reason` of a completion.
ENDS = {"stop": Ended.STOPPED, "length": Ended.CUT, "abort": Ended.ABORTED}
GONE_SECONDS = 15.0  # a server that does not list its models within this time is gone
CLOSED_SECONDS = 20.0  # the time that servers have to interrupt their requests
UNCHANGED = "default"  # the `weight_version` of a server that still has the weights of its start
# Keys of a request that samples from the whole vocabulary. Without them a server uses the values of
# the model's generation_config.json.
WHOLE_DISTRIBUTION = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# Keys of a request for token ids, with the log-probabilities of the sampled tokens alone.
RETURN_TOKEN_IDS = {
    "logprobs": 0,
    "return_token_ids": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
# The command that starts a server of a model, for error messages.
START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {} --logprobs-mode "
    "processed_logprobs"
)


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A vLLM server."""

    url: str  # of its root; paths are appended
    timeout: float  # seconds for one request
    key: str = "vllm_server_base_url"  # the recipe's key or the option that has the address

    def require(self) -> None:
        """Raises `UserError` if the server does not list its models within GONE_SECONDS."""
        send(self.url + PATHS[ServedModels], None, GONE_SECONDS)

    def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Sends a request; returns the content of the server's answer.

        body: Sent as JSON by POST; None: a GET request.

        Raises `UserError` if the request fails or takes longer than `timeout`; already before if
        the server is gone.
        """
        answer = start(lambda: send(self.url + path, body, self.timeout))
        return bytes(wait_for(answer, self.require))

    def ask(self, kind: type[AnswerKind], body: dict[str, Any] | None = None) -> AnswerKind:
        """Sends a request to the path of `kind`; returns the answer as a `kind`.

        Raises `UserError` if the answer is of another kind, or as `send`.
        """
        path = PATHS[kind]
        return read_answer(kind, self.send(path, body), self.url + path)

    def resume(self) -> None:
        """Resumes the server, which a run that was ended may have left paused."""
        self.send("/resume", {})

    def has_weights(self, name: str, *, of_adapter: bool) -> bool:
        """Returns whether the server has the weights of this name.

        of_adapter: Whether they are an adapter, which the server loads beside the base's weights of
            its start; else they are those of the model.
        """
        version = self.ask(WeightInfo).weight_version
        if not of_adapter:
            return version == name
        if version != UNCHANGED:
            return False
        return name in [model.id for model in self.ask(ServedModels).data]

    def replace_adapter(self, name: str, weights: Path, adapters_folder: Path) -> None:
        """Has the server unload all adapters from `adapters_folder`, and load this one."""
        for model in self.ask(ServedModels).data:
            if Path(model.root).is_relative_to(adapters_folder):
                self.send("/v1/unload_lora_adapter", {"lora_name": model.id})
        self.load_adapter(name, weights)

    def load_adapter(self, name: str, weights: Path) -> None:
        """Has the server load the adapter in the folder `weights`; requests call it `name`."""
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(weights)}
        if list_expert_parameters(read_json_object(weights / ADAPTER_CONFIG)):
            body["is_3d_lora_weight"] = True
        self.send("/v1/load_lora_adapter", body)

    def load_model(self, name: str, weights: str) -> None:
        """Has the server load the model's weights, and drop the keys and values of earlier weights.

        The server reports another version meanwhile. So a run that resumes after this one was ended
        in between does not find the earlier weights' name, and loads them again.

        Args:
            name: The name of the weights, which the server then reports as its version.
            weights: The folder with the weights.

        Raises `UserError` if the server does not drop keys and values.
        """
        self.send("/update_weight_version", {"new_version": f"{name}-loading"})
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
        """Samples a completion.

        Args:
            model: The server's name of the model or adapter.
            request: The prompt and seed.
            sampling: The temperature, and the most tokens if the request has no limit.
            stop_ids: The tokens that end a completion.
            vocabulary: The number of tokens in the vocabulary.
            may_be_aborted: Whether the run itself may interrupt the request.

        Raises:
            UserError: The answer is faulty, or was interrupted and `may_be_aborted` is False.
        """
        most_tokens = sampling.limit(request)
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(request.prompt_ids),
            "stop_token_ids": list(stop_ids),
            "max_tokens": most_tokens,
            "temperature": 0 if sampling.greedy else sampling.temperature,
            "seed": request.draw_seed(),
        }
        body |= RETURN_TOKEN_IDS | WHOLE_DISTRIBUTION
        url = self.url + PATHS[ServedCompletion]
        answer = read_answer(ServedCompletion, send(url, body, self.timeout), url)
        choice = answer.choices[0]
        ended = ENDS[choice.finish_reason]
        if ended is Ended.ABORTED and not may_be_aborted:
            raise UserError(f"{self.url}: a completion was aborted; does another run use it?")
        fault = _find_fault(choice, most_tokens, stop_ids, vocabulary)
        if fault is not None:
            raise UserError(f"{self.url}: {fault}")
        log_probabilities = choice.logprobs.token_logprobs
        # Estimated from the sampled tokens, because the server does not give the entropy.
        entropy = -float(sum(log_probabilities))
        return Sampled(choice.token_ids, log_probabilities, entropy, ended)

    def check(self, recipe: Recipe, *, any_temperature: bool = False) -> str:
        """Checks that the server can sample for this run; returns the server's name of its model.

        any_temperature: Whether requests may have another temperature than the recipe's.

        Raises `UserError` if the server cannot sample for this run.
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
                f"{self.key}: {self.url}: serves {_shorten(served.root)}, but {base} is trained"
            )
        if recipe.lora.use_peft and version != UNCHANGED:
            raise UserError(
                f"{self.key}: {self.url}: has the weights {_shorten(version)}, not those "
                f"of {base}, over which adapters are sampled; start it again"
            )
        room = served.max_model_len or 0
        max_length = recipe.data.max_length
        if room < max_length:
            raise UserError(
                f"{self.key}: {self.url}: has room for {room:,} tokens, but max_length "
                f"is {max_length:,}; start it with --max-model-len {max_length}"
            )
        # As the message words it. At temperature 1, both modes give the same log-probabilities.
        temperature = "requests" if any_temperature else f"{recipe.method.temperature:g}"
        if logprobs_mode != "processed_logprobs" and temperature != "1":
            raise UserError(
                f"{self.key}: {self.url}: gives log-probabilities without the temperature of "
                f"{temperature}; start it with --logprobs-mode processed_logprobs"
            )
        return served.id


def _find_fault(
    choice: Choice, most_tokens: int, stop_ids: Sequence[int], vocabulary: int
) -> str | None:
    """Describes the first fault of a completion; returns None if it has none.

    Args:
        choice: The completion.
        most_tokens: The most tokens that it may have.
        stop_ids: The tokens that end a completion.
        vocabulary: The number of tokens in the vocabulary.
    """
    ids = choice.token_ids
    ended = ENDS[choice.finish_reason]
    log_probabilities = len(choice.logprobs.token_logprobs)
    if len(ids) != log_probabilities:
        return f"{len(ids)} tokens with {log_probabilities} log-probabilities"
    if not ids and ended is not Ended.ABORTED:
        return "a completion without a token"
    if max(ids, default=0) >= vocabulary:
        return f"a completion has the token {max(ids)}, but there are {vocabulary:,}"
    if len(ids) > most_tokens:
        return f"a completion of {len(ids)} tokens, where {most_tokens} were asked for"
    if ended is Ended.CUT and len(ids) != most_tokens:
        return f"a completion is cut after {len(ids)} of {most_tokens} tokens"
    if ended is Ended.STOPPED and ids[-1] not in stop_ids:
        return f"a completion without its last token: it stopped after {ids[-1]}"
    return None


def list_servers(recipe: Recipe) -> list[VllmServer]:
    """Lists the vLLM servers that a recipe names; [] if it names none."""
    return [
        VllmServer(address.rstrip("/").removesuffix("/v1"), recipe.rollout.vllm_server_timeout)
        for address in recipe.rollout.servers
    ]


def check_servers(recipe: Recipe) -> list[str]:
    """Checks the recipe's servers; returns the name that each gives to its model.

    Raises `UserError` if a server cannot sample for this run.
    """
    return [server.check(recipe) for server in list_servers(recipe)]


def _is_same_folder(first: str, second: str) -> bool:
    """Returns whether two paths lead to the same folder; False if one is not a valid path."""
    try:
        return Path(first).resolve() == Path(second).resolve()
    except (OSError, ValueError):  # for example a text with a NUL
        return False


def _shorten(text: str) -> str:
    """Returns the first SHOWN characters of a server's text, on one line and printable."""
    return printable(" ".join(text.split()))[:SHOWN]


class VllmEngine:
    """Samples completions from vLLM servers, each of which gets a share of the prompts.

    Ranks with the same requests form a group, whose first rank sends them. All ranks write the
    weights; rank 0 exports them, and has the servers load them.
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
        # On rank 0, the files of an export beside its weights, such as the config: file name ->
        # content
        self._descriptions: Mapping[str, bytes] = {}

        def describe() -> None:
            self._descriptions = describe_model(model, recipe, tokenizer)

        RankGroup(world).on_main(describe)
        self._name = ""  # of the servers' weights
        self.version = 0  # the number of optimizer steps that the model's weights have had
        self._handed_over: int | None = None  # the version last handed over; None: none yet
        self.hand_over_seconds = 0.0
        threads = recipe.rollout.per_device_generation_batch_size
        self._pool = DaemonPool(threads)  # for the requests of this rank, which `sample` waits for
        ahead = DaemonPool(threads * world.tensor_group_count)  # for those of all ranks
        self._in_flight = InFlight(self._complete, ahead, recipe.rollout.in_flight == "keep")
        # a request's name -> its completion in the checkpoint that the run resumes from
        self._recalled: dict[str, Sampled] = {}
        self._recalled_steps = set[int]()  # the `prompts_step` of each of these
        # weights' name -> request's name -> answer: those on disk of the weights asked for last
        self._answers: dict[str, dict[str, Sampled]] = {}
        self._noting = threading.Lock()  # held while answers are read or written
        self._older = set[Path]()  # folders of answers that the latest checkpoint does not need
        # the name that each server gives to the base model
        self._served: list[str] = RankGroup(world).on_main(self._open_servers)
        self._vocabulary = int(text_config_of(unwrap(model).config).vocab_size)

    def _open_servers(self) -> list[str]:
        """Checks the servers and resumes them; returns the name that each gives to its model."""
        names = check_servers(self._recipe)
        for server in self._servers:
            server.resume()
        return names

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Hands over the current weights; returns a completion of each request.

        All ranks call it. Only the first rank of a group returns completions, the others [].
        """
        self.hand_over()
        world = self._world
        ranks = RankGroup(world)
        group_size = world.stage_size // world.tensor_group_count
        is_first = world.rank < world.stage_size and world.rank % group_size == 0
        completions: list[Sampled] = []

        def answer() -> None:
            if is_first:
                completions.extend(self._answer(requests, sampling))

        ranks.on_all(answer)
        ranks.on_main(self._refuse_stale)
        if not self._recipe.rollout.max_staleness:
            return completions
        return [
            replace(completion, versions=[self.version] * len(completion.token_ids))
            for completion in completions
        ]

    def submit(self, prompts_step: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begins to sample completions of `requests` from the weights that the servers have.

        Other ranks than the main one do nothing.
        """
        if self._world.is_main:
            self._submit(prompts_step, requests, sampling)

    def converse(self, prompts_step: int, converse: Converse, sampling: Sampling) -> None:
        """Begins to sample completions of the prompts of `prompts_step` by `converse`, in a thread.

        Other ranks than the main one do nothing.
        """
        if not self._world.is_main:
            return

        def sample(requests: Sequence[Request]) -> list[Sampled]:
            """Samples one turn for each request."""
            answers = self._submit(prompts_step, requests, sampling)
            return [wait_for(each, self._require_servers) for each in answers]

        self._in_flight.converse(prompts_step, partial(converse, sample))

    def _submit(
        self, prompts_step: int, requests: Sequence[Request], sampling: Sampling
    ) -> list[Future[Sampled]]:
        """Submits the requests whose answers are not known; returns the futures of all, in order.

        The main rank calls it, also from threads.
        """
        by_name = {_name_request(request, sampling): request for request in requests}
        known = self._recalled | self._read_answers(self._name)
        if prompts_step in self._recalled_steps:
            # The end of the last run interrupted the requests without an answer.
            known = dict.fromkeys(by_name, LOST) | known
        note = partial(self._note, self._folder / self._name)
        return self._in_flight.submit(prompts_step, self._name, by_name, sampling, known, note)

    def is_in_flight(self, prompts_step: int) -> bool:
        """Returns whether completions of the prompts of `prompts_step` have been begun.

        All ranks call it, and get the main rank's answer.
        """
        return bool(RankGroup(self._world).on_main(lambda: prompts_step in self._in_flight.flights))

    def take(self, prompts_step: int) -> list[Sampled]:
        """Waits for the completions of the prompts of `prompts_step`; returns them on every rank.

        All ranks call it.
        """

        def take() -> list[dict[str, Any]]:
            completions = self._in_flight.take(prompts_step, self._require_servers)
            self._refuse_stale()
            return [completion.as_json() for completion in completions]

        return [Sampled.of_json(values) for values in RankGroup(self._world).on_main(take)]

    def describe_lines(self) -> Iterator[dict[str, Any]]:
        """Yields a line of a checkpoint for each request that was begun, on the main rank."""
        return self._in_flight.describe_lines()

    def recall(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Reads completions from the lines of a checkpoint, so that they are not sampled again.

        A request that had no answer then gets the one that was kept on disk after the checkpoint,
        if there is one.
        """
        kept_answers: dict[str, Sampled] = {}
        for weights in sorted({line["weights"] for line in lines}):
            kept_answers |= self._read_answers(weights)
        self._recalled = read_lines(lines)
        self._recalled_steps = {line["prompts_step"] for line in lines}
        for name, sampled in self._recalled.items():
            if not sampled.token_ids and name in kept_answers:
                self._recalled[name] = kept_answers[name]

    def forget(self) -> None:
        """Removes kept answers that neither the latest checkpoint nor the next one needs.

        It is called when the next checkpoint is made. Folders that only the latest one may need are
        removed at the call after that.
        """
        for folder in self._older:
            shutil.rmtree(folder, ignore_errors=True)
        needed = {self._name, *(line["weights"] for line in self.describe_lines())}
        self._older = {folder for folder in self._folder.glob("*") if folder.name not in needed}

    def _require_servers(self) -> None:
        """Raises `UserError` if a server is gone."""
        for server in self._servers:
            server.require()

    def hand_over(self) -> None:
        """Gives the servers the model's current weights, unless they already have them.

        All ranks call it, because each writes its shards.
        """
        if self._recipe.rollout.max_staleness and self._handed_over == self.version:
            return
        started = time.perf_counter()
        world = self._world
        ranks = RankGroup(world)
        all_shards = list_shards(get_model_state(self._model), MODEL, world.stages)
        shards = [shard for shard in all_shards if shard.is_first_copy]
        name = self._name_weights(shards)
        if ranks.on_main(lambda: self._find_stale(name) is not None):
            folder = self._folder / name
            ranks.on_main(lambda: empty_folder(folder / MODEL))
            ranks.on_all(lambda: write_shards(folder, shards, world))
            ranks.on_main(lambda: self._load(folder))
        self._name = name
        self._handed_over = self.version
        self._in_flight.open(self.version)
        self.hand_over_seconds = time.perf_counter() - started

    def _name_weights(self, shards: Sequence[TensorShard]) -> str:
        """Returns the name of the weights: the run's name, and a hash of the shards of all ranks.

        All ranks call it.
        """

        def sum_shards() -> dict[str, int]:
            sums = {}
            for shard in shards:
                sums[f"{shard.name} {shard.offsets}"] = int(weighted_sum(shard.tensor))
            return sums

        sums_by_rank = RankGroup(self._world).on_all(sum_shards)
        # LoRA's settings are a part of what servers load, but of no shard.
        content = json.dumps(
            [sums_by_rank, asdict(self._recipe.lora)], sort_keys=True, default=str
        ).encode()
        return f"{self._folder.parent.name}-{xxhash.xxh3_64_hexdigest(content)}"

    def _find_stale(self, name: str) -> VllmServer | None:
        """Returns the first server that does not have the weights of this name; None: all do."""
        of_adapter = self._recipe.lora.use_peft
        for server in self._servers:
            if not server.has_weights(name, of_adapter=of_adapter):
                return server
        return None

    def _load(self, folder: Path) -> None:
        """Exports the shards that all ranks wrote to `folder`, and has all servers load them.

        Weights of earlier names are then removed. The main rank calls it.
        """
        weights = self._export(folder)
        is_paused = self._in_flight.close(self._pause, CLOSED_SECONDS)

        def load(server: VllmServer) -> None:
            """Has a server load the weights, and resumes it if it was paused."""
            if self._recipe.lora.use_peft:
                server.replace_adapter(folder.name, weights, self._folder)
            else:
                server.load_model(folder.name, str(weights))
            if is_paused:
                server.resume()

        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(load, self._servers))
        for old_weights in self._folder.glob(f"*/{WEIGHTS}"):
            if old_weights.parent != folder:
                shutil.rmtree(old_weights, ignore_errors=True)

    def _export(self, folder: Path) -> Path:
        """Exports the shards in `folder` in the compute dtype of training, and removes the shards.

        Returns:
            The folder of the export: an adapter under LoRA, else a model.
        """
        model_keys = self._recipe.model
        is_adapter = self._recipe.lora.use_peft
        for name, content in self._descriptions.items():
            write_file(folder / name, [content])
        base = model_keys.model_name_or_path if is_adapter else None
        source = open_source(folder / MODEL, base_model=base, log=_log_nothing)
        options = ExportOptions(
            dtype=find_compute_dtype(self._world.sharding, model_keys, self._recipe.lora),
            verify=False,
            overwrite=True,
            model=not is_adapter,
            adapter_names="vllm" if is_adapter else "peft",
            trust_remote_code=model_keys.trust_remote_code,
        )
        weights = export_source(source, folder / WEIGHTS, options, _log_nothing)
        shutil.rmtree(folder / MODEL)
        return weights

    def _pause(self) -> None:
        """Pauses all servers: they interrupt requests, and answer none until they are resumed."""
        for server in self._servers:
            server.send("/pause?mode=abort", {})

    def _refuse_stale(self) -> None:
        """Raises `UserError` if a server no longer has the weights that it was given."""
        stale = self._find_stale(self._name)
        if stale is not None:
            raise UserError(
                f"{stale.url}: has other weights than {self._name}, which it was given for this "
                "step; was it started again, or does another run use it?"
            )

    def _answer(self, requests: Sequence[Request], sampling: Sampling) -> list[Sampled]:
        """Returns a completion of each request: one kept under these weights, or a new one."""
        names = [_name_request(request, sampling) for request in requests]
        known = self._read_answers(self._name)
        answers = {
            name: self._pool.submit(partial(self._complete, request, sampling))
            for name, request in zip(names, requests, strict=True)
            if name not in known
        }
        for name, answer in answers.items():
            known[name] = wait_for(answer, self._require_servers)
            self._note(self._folder / self._name, name, known[name])
        return [known[name] for name in names]

    def _read_answers(self, weights: str) -> dict[str, Sampled]:
        """Returns the answers kept under the weights named `weights`: request's name -> answer.

        They are read from disk once, with those of other ranks, because each turn asks for them.
        Any thread may call it.
        """
        with self._noting:
            if weights not in self._answers:
                self._answers = {weights: self._load_answers(weights)}
            return dict(self._answers[weights])

    def _load_answers(self, weights: str) -> dict[str, Sampled]:
        """Reads the answers on disk; returns what `_read_answers` does."""
        answers: dict[str, Sampled] = {}
        for path in sorted((self._folder / weights).glob("*.jsonl")):
            for line in read_json_lines(path):
                # A damaged line is skipped, so that its request is sent again.
                with suppress(KeyError, TypeError, ValueError):
                    name = line["request"]  # type: ignore[index]
                    answers[name] = Sampled.of_json(line["sampled"])  # type: ignore[index]
        return answers

    def _note(self, folder: Path, name: str, sampled: Sampled) -> None:
        """Keeps an answer in the folder of its weights, under the request's name.

        Any thread may call it.
        """
        line = {"request": name, "sampled": sampled.as_json()}
        with self._noting:
            if folder.name in self._answers:
                self._answers[folder.name][name] = sampled
            make_folder(folder)
            append_json_lines(folder / f"answers-{self._world.rank:05d}.jsonl", [line])

    def _complete(self, request: Request, sampling: Sampling) -> Sampled:
        """Samples a completion from one of the servers.

        All completions of a prompt come from the same server, so that it reads the prompt once.
        """
        _, _, prompt_number, *_ = request.seed
        index = prompt_number % len(self._servers)
        model = self._name if self._recipe.lora.use_peft else self._served[index]
        return self._servers[index].complete(
            model,
            request,
            sampling,
            self._stop_ids,
            self._vocabulary,
            may_be_aborted=bool(self._recipe.rollout.max_staleness),
        )


def _log_nothing(_: str) -> None:
    pass


def _name_request(request: Request, sampling: Sampling) -> str:
    """Returns a hash of all on which a completion depends besides the weights."""
    return xxhash.xxh3_128_hexdigest(json.dumps([request, asdict(sampling)]).encode())
