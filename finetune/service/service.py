"""A service without HTTP: the facts about its model, and how requests are done on rank 0."""

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from finetune.constants import Fields, Record
from finetune.distributed.model_parts import unwrap
from finetune.errors import UserError
from finetune.files.durable import make_folder, remove_tree
from finetune.models.lora import seed_of
from finetune.rollout.engine import Sampled
from finetune.service.adapters import AdapterForm
from finetune.service.ledger import Ledger, QueuedRequest, Result
from finetune.service.operations import Operations, cut_at
from finetune.service.wire import PROTOBUF, TopTokens, write_forward_backward, write_samples
from finetune.units import disk_size

JSON = "application/json"
SAMPLERS_KEPT = 32  # samplers of a model without a checkpoint's path
MOST_WAITING = 10_000
USES_GRADIENTS = ("forward_backward", "optim_step", "load")
SAMPLE_ARGUMENTS = ("prompt", "samples", "max_tokens", "seed", "scores_prompt", "top_prompt")
Records = dict[tuple[str, str], Fields]
Run = Callable[[str, Fields], Record]


class Service:
    """The state of rank 0: the ledger, and the facts about the model that clients ask for."""

    def __init__(
        self,
        operations: Operations,
        folder: Path,
        run: Run,
        *,
        most_stacked: int = 8,
        most_sessions: int = 64,
        most_body_bytes: int = 64 * 1024**2,
        most_disk_bytes: int = 100 * 1024**3,
    ) -> None:
        """Opens the ledger and the states in `folder`.

        Args:
            operations: The operations of this rank.
            folder: The folder of the ledger and the states.
            run: Does an operation on all ranks, as `Operations.run` does on one.
            most_stacked: The limit of adapters that share a pass of the base.
            most_sessions: The limit of open sessions.
            most_body_bytes: The limit of a request's body.
            most_disk_bytes: The limit of all states together.
        """
        make_folder(folder / "states")
        recipe = operations.session.recipe
        stacked = most_stacked if operations.can_stack else 1
        self.ledger = Ledger(
            folder / "ledger.sqlite",
            MOST_WAITING,
            most_stacked=stacked,
            most_tokens=recipe.data.max_length * recipe.batch.per_device_train_batch_size,
        )
        self.model_name = recipe.model.model_name_or_path or ""
        self.tokenizer_name = _find_name(self.model_name)
        self.architecture = type(unwrap(operations.session.model)).__name__
        self.limits = operations.limits
        self.largest_rank = recipe.lora.lora_r
        self.most_sessions = most_sessions
        self.most_body_bytes = most_body_bytes
        self._seed = recipe.run.seed
        self._states = folder / "states"
        self._tokenizer = operations.session.tokenizer
        self._run = run
        self._most_disk_bytes = most_disk_bytes
        self._in_hand: Sequence[QueuedRequest] = ()
        self.remove_unused()

    def seed_of(self, name: str) -> int:
        """Derives a seed for a request without one.

        name: The request's name without its session: a script that runs again gets the same seeds.
        """
        return seed_of(self._seed, name)

    def describe_model(self, session: str, form: AdapterForm, metadata: Fields | None) -> Record:
        """Returns the record of a model before its first request is done."""
        texts = None if metadata is None else {key: str(value) for key, value in metadata.items()}
        return {
            "session": session,
            "form": asdict(form),
            "user_metadata": texts,
            "state": None,
            "bytes": 0,
            "at": time.time(),
        }

    def work(self, seconds: float) -> bool:
        """Does the next requests; returns False if none came within `seconds`."""
        requests = self.ledger.take(seconds)
        self._in_hand = requests
        if not requests:
            return False
        act = self._sample if requests[0].operation == "sample" else self._do
        self._answer(act, requests)
        return True

    def _answer(
        self, act: Callable[[Sequence[QueuedRequest]], None], requests: Sequence[QueuedRequest]
    ) -> None:
        """Does requests by `act`. An error becomes their answer; a program's fault is printed."""
        try:
            act(requests)
        except UserError as error:
            self._fail(requests, str(error), "user")
        except Exception as error:
            self._fail(requests, f"{type(error).__name__}: {error}", "server")
            traceback.print_exc()

    def give_up(self, error: str) -> None:
        """Answers the requests in hand with an error, from the thread of `watch_for_failure`."""
        self._fail(self._in_hand, error, "server")

    def _fail(self, requests: Sequence[QueuedRequest], error: str, category: str) -> None:
        """Answers requests with an error, in the API's form; their models' gradients are lost."""
        result = _json({"error": error, "category": category})
        for request in requests:
            drops_gradients = request.operation in USES_GRADIENTS
            self.ledger.finish(request, result, {}, drops_gradients=drops_gradients)

    def _do(self, requests: Sequence[QueuedRequest]) -> None:
        """Does one request about a model, or `forward_backward` of several."""
        if len(requests) > 1:
            self._train_together(requests)
            return
        (request,) = requests
        operation = request.operation
        result, records = self._save(request) if operation == "save" else self._train(request)
        makes_gradients = operation == "forward_backward"
        self.ledger.finish(
            request,
            result,
            records,
            keeps_gradients=makes_gradients,
            drops_gradients=operation in USES_GRADIENTS and not makes_gradients,
        )
        if operation in ("optim_step", "load"):
            self.remove_unused()

    def _train(self, request: QueuedRequest) -> tuple[Result, Records]:
        """Does one operation on a model; returns (the result, the model's record if it changed)."""
        if request.operation == "refuse":
            raise UserError(request.arguments["error"])
        name = request.queue
        operation = request.operation
        starts = operation in ("create", "load")
        model = self.ledger.find("model", name) if starts else self._find_made(request)
        given = dict(request.arguments)
        arguments: Record = {"form": model["form"], "state": model["state"]}
        if starts:
            arguments["state"] = given.pop("from")
        path = given.pop("path", None)
        if operation != "forward" and operation != "create":
            arguments["model"] = name
        writes_state = operation in ("create", "load", "optim_step")
        if writes_state:
            self._refuse_full_disk()
            arguments["target"] = f"{name.replace(':', '-')}/{request.seq:08d}"
        answer = self._run(operation, arguments | given)
        if not writes_state:
            return _describe_outputs(answer), {}
        changed = {"state": arguments["target"], "bytes": answer["bytes"], "at": time.time()}
        records: Records = {("model", name): model | changed}
        replies: Record = {
            "create": {"type": "create_model", "model_id": name},
            "load": {"type": "load_weights", "path": path, "model_id": name},
            "optim_step": {"metrics": {"grad_norm:mean": answer.get("grad_norm", 0.0)}},
        }
        return _json(replies[operation]), records

    def _train_together(self, requests: Sequence[QueuedRequest]) -> None:
        """Does `forward_backward` of several models in one pass.

        After an error it does one after another: only the faulty request gets the error.
        """
        try:
            parts = [self._describe_part(request) for request in requests]
            shared = {name: requests[0].arguments[name] for name in ("loss", "options")}
            together = self._run("forward_backward_together", {"parts": parts, **shared})
        except UserError:
            for request in requests:
                self._answer(self._do, [request])
            return
        for request, answer in zip(requests, together["answers"], strict=True):
            self.ledger.finish(request, _describe_outputs(answer), {}, keeps_gradients=True)

    def _describe_part(self, request: QueuedRequest) -> Record:
        """Returns the request's part of `forward_backward_together`."""
        model = self._find_made(request)
        return {
            "model": request.queue,
            "form": model["form"],
            "state": model["state"],
            "data": request.arguments["data"],
        }

    def _find_made(self, request: QueuedRequest) -> Record:
        """Finds the record of a request's model. Raises `UserError` for a model without a state."""
        model = self.ledger.find("model", request.queue)
        if model["state"] is None:
            raise UserError(f"model {request.queue!r}: was not made; its first request has failed")
        return model

    def _save(self, request: QueuedRequest) -> tuple[Result, Records]:
        """Makes a checkpoint, or without a name a sampler: a record with the model's state.

        The state stays on disk as long as a record has it.
        """
        model = self._find_made(request)
        if request.arguments["name"] is None:
            return self._save_for_sampler(request, model)
        return self._save_by_name(request, model)

    def _save_for_sampler(self, request: QueuedRequest, model: Fields) -> tuple[Result, Records]:
        given = request.arguments
        sampler = f"{model['session']}:sample:{given['sampler_seq']}"
        record = {
            "state": model["state"],
            "form": model["form"],
            "session": model["session"],
            "path": None,
            "clones": 0,
            "model": request.queue,
            "at": time.time(),
        }
        answer = {"type": _answer_type(given), "sampling_session_id": sampler}
        return _json(answer), {("sampler", sampler): record}

    def _save_by_name(self, request: QueuedRequest, model: Fields) -> tuple[Result, Records]:
        given = request.arguments
        path = f"tinker://{request.queue}/{given['segment']}/{given['name']}"
        if not given["overwrite"] and path in self.ledger.records("checkpoint"):
            raise UserError(f"{path}: exists; choose another name, or overwrite it")
        ttl = given["ttl_seconds"]
        now = time.time()
        record = {
            "state": model["state"],
            "form": model["form"],
            "model": request.queue,
            "bytes": model["bytes"],
            "at": now,
            "expires": None if ttl is None else now + ttl,
            "segment": given["segment"],
            "name": given["name"],
            "user_metadata": given["user_metadata"],
        }
        answer = {"type": _answer_type(given), "path": path}
        return _json(answer), {("checkpoint", path): record}

    def _sample(self, requests: Sequence[QueuedRequest]) -> None:
        """Samples for several requests of one sampler, which `Ledger.take` returned together."""
        first = requests[0].arguments
        sampler = self.ledger.find("sampler", first["sampler"])
        arguments = {
            "state": sampler["state"],
            "form": sampler["form"],
            "temperature": first["temperature"],
            "stop_ids": first["stop_ids"],
            "requests": [
                {name: request.arguments[name] for name in SAMPLE_ARGUMENTS} for request in requests
            ],
        }
        answer = self._run("sample", arguments)
        sampled = iter(answer["sampled"])
        prompt_scores = iter(answer["prompts"])
        top_tokens = iter(answer["tops"])
        for request in requests:
            given = request.arguments
            whole = [Sampled.of_json(next(sampled)) for _ in range(given["samples"])]
            completions = [
                cut_at(completion, given["stop_texts"], self._tokenizer.decode)
                for completion in whole
            ]
            scores = next(prompt_scores) if given["scores_prompt"] else None
            width = given["top_prompt"]
            top = TopTokens(next(top_tokens), width) if width else None
            content = write_samples(completions, scores, top)
            self.ledger.finish(request, Result(PROTOBUF, content), {})

    def _refuse_full_disk(self) -> None:
        """Raises `UserError` where the states exceed the limit of the disk."""
        files = (path for path in self._states.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > self._most_disk_bytes:
            raise UserError(
                f"the server's states take {disk_size(size)}, more than is allowed; delete "
                "checkpoints, or start it with a higher --max-disk"
            )

    def remove_unused(self) -> None:
        """Removes old records, then the states that no model, sampler or checkpoint has."""
        self._forget_old_samplers()
        self._forget_expired()
        ledger = self.ledger
        living = [*ledger.records("model").values(), *ledger.records("sampler").values()]
        sessions = ledger.records("session")  # read last: other threads add sessions, then models
        used = {each["state"] for each in living if not sessions[each["session"]]["finished"]}
        used |= {each["state"] for each in ledger.records("checkpoint").values()}
        for folder in self._states.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" not in used:
                remove_tree(folder, ignore_errors=True)

    def _forget_old_samplers(self) -> None:
        """Removes each model's samplers without a path, except the latest SAMPLERS_KEPT."""
        by_model: dict[str, list[str]] = {}
        samplers = self.ledger.records("sampler").items()
        for name, each in sorted(samplers, key=lambda one: one[1].get("at", 0)):
            if each.get("model"):
                by_model.setdefault(each["model"], []).append(name)
        for names in by_model.values():
            for name in names[:-SAMPLERS_KEPT]:
                self.ledger.remove("sampler", name)

    def _forget_expired(self) -> None:
        now = time.time()
        for path, each in self.ledger.records("checkpoint").items():
            if each["expires"] is not None and each["expires"] < now:
                self.ledger.remove("checkpoint", path)


def _find_name(model: str) -> str:
    """Returns the name of the tokenizer for clients on this machine: of a folder its full path."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model


def _describe_outputs(answer: Fields) -> Result:
    return Result(PROTOBUF, write_forward_backward(answer["log_probabilities"], answer["loss"]))


def _answer_type(arguments: Fields) -> str:
    """Returns Tinker's name of the answer to a save."""
    if arguments["segment"] == "weights":
        return "save_weights"
    return "save_weights_for_sampler"


def _json(content: Fields) -> Result:
    return Result(JSON, json.dumps(content).encode())
