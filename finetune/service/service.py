"""A service without HTTP: the facts about the model, and how rank 0 does the requests."""

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.distributed.model_parts import unwrap
from finetune.errors import UserError
from finetune.files.durable import make_folder, remove_tree
from finetune.models.lora import seed_of
from finetune.service.ledger import REFUSED, USES_GRADIENTS, Ledger, QueuedRequest, Result
from finetune.service.operations import Operations, cut_at
from finetune.service.wire import PROTOBUF, TopTokens, write_forward_backward, write_samples
from finetune.units import disk_size

JSON = "application/json"
SAMPLERS_KEPT = 32  # of each model, the samplers that were saved without a checkpoint
MOST_WAITING = 10_000  # requests
SILENT_SECONDS = 3600.0  # a session is finished after so long without a word of its client
TIDY_SECONDS = 3600.0  # old results and expired checkpoints are removed this often
# The arguments of a request "sample" that differ between requests of one pass.
SAMPLE_ARGUMENTS = ("prompt", "samples", "max_tokens", "seed", "scores_prompt", "top_prompt")
Records = dict[tuple[str, str], Mapping[str, Any]]  # (kind, id) -> body, as in the ledger
Run = Callable[[str, Mapping[str, Any]], dict[str, Any]]  # (operation, arguments) -> answer


class Service:
    """The server's state on rank 0: the ledger, and the facts about the model for clients."""

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
            most_stacked: The most adapters that share a forward and backward of the base.
            most_sessions: The most sessions that may be open.
            most_body_bytes: The largest body of a request.
            most_disk_bytes: The largest size of all states together.
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
        self.tokenizer_name = _name_tokenizer(self.model_name)
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
        # Session -> when its client was last heard, by time.monotonic(). The time in which the
        # server did not run does not count.
        self.heard = dict.fromkeys(self.ledger.records("session"), time.monotonic())
        # Whether a session may be finished or a checkpoint gone since the last `_drop_unused`.
        # Other threads only set it: the main thread may be writing a state.
        self.has_unused = False
        self._next_tidying = time.monotonic() + TIDY_SECONDS
        self._remove_unused()

    def seed_of(self, name: str) -> int:
        """Derives a seed from the run's seed, for a request without a seed.

        name: The request's name without the session's, so that a script that runs again gets the
            same seeds.
        """
        return seed_of(self._seed, name)

    def work(self, seconds: float) -> bool:
        """Does the next request, or several together; returns False if none came in `seconds`.

        While the disk takes no results, none is done: clients have not got the last ones.
        """
        if not self.ledger.write_results():
            time.sleep(seconds)
            return False
        requests = self.ledger.take(seconds)
        self._in_hand = requests
        if time.monotonic() >= self._next_tidying:
            self._tidy()
        if self.has_unused:
            self._drop_unused()
        if not requests:
            return False
        act = self._sample if requests[0].operation == "sample" else self._do
        self._answer(act, requests)
        return True

    def _tidy(self) -> None:
        """Removes old results, and finishes the sessions of clients that are gone.

        Checkpoints that have expired are removed by `_remove_unused`.
        """
        self._next_tidying = time.monotonic() + TIDY_SECONDS
        with suppress(REFUSED):  # the next call does it
            self.finish_silent_sessions()
            self.ledger.forget_old()
        self.has_unused = True

    def finish_silent_sessions(self) -> None:
        """Finishes the sessions whose clients were not heard for SILENT_SECONDS."""
        silent_since = time.monotonic() - SILENT_SECONDS
        with self.ledger.lock:
            for name, session in self.ledger.records("session").items():
                if not session["finished"] and self.heard[name] < silent_since:
                    self.ledger.put("session", name, session | {"finished": True})
                    self.has_unused = True

    def _answer(
        self, act: Callable[[Sequence[QueuedRequest]], None], requests: Sequence[QueuedRequest]
    ) -> None:
        """Does requests by `act`, which answers them. An error of it becomes their answer.

        An error that is not the user's is printed, too.
        """
        try:
            act(requests)
        except UserError as error:
            self._drop_and_fail(requests, str(error), "user")
        except Exception as error:
            self._drop_and_fail(requests, f"{type(error).__name__}: {error}", "server")
            traceback.print_exc()

    def give_up(self, error: str) -> None:
        """Answers the requests that are being done with an error.

        The thread of `watch_for_failure` calls it, while the main thread waits in a collective.
        """
        self._fail(self._in_hand, error, "server")

    def _drop_and_fail(self, requests: Sequence[QueuedRequest], error: str, category: str) -> None:
        """Drops the gradients that requests use, then does as `_fail`.

        An error before an operation has left them in memory, where the ledger knows of none.
        """
        models = [request.queue for request in requests if request.operation in USES_GRADIENTS]
        if models:
            self._run("drop_gradients", {"models": models})
        self._fail(requests, error, category)

    def _fail(self, requests: Sequence[QueuedRequest], error: str, category: str) -> None:
        """Answers requests with an error. Their models lose the gradients if the requests use them.

        category: By the API, "user" or "server": whose mistake it is.
        """
        result = _make_json_result({"error": error, "category": category})
        for request in requests:
            self.ledger.finish(request, result, {})

    def _do(self, requests: Sequence[QueuedRequest]) -> None:
        """Does one request about a model, or `forward_backward` of several."""
        if len(requests) > 1:
            self._train_together(requests)
            return
        (request,) = requests
        operation = request.operation
        if operation == "save":
            result, records = self._save(request)
        else:
            result, records = self._train(request)
        is_written = self.ledger.finish(
            request, result, records, adds_gradients=operation == "forward_backward"
        )
        if operation in ("optim_step", "load") and is_written:  # else no record has the new state
            self._remove_unused()

    def _train(self, request: QueuedRequest) -> tuple[Result, Records]:
        """Does any operation but "save" on a model.

        Returns:
            The result, and the model's record if the operation changes it.

        Raises:
            UserError: The operation fails, or is "refuse".
        """
        if request.operation == "refuse":
            raise UserError(request.arguments["error"])
        name = request.queue
        operation = request.operation
        can_be_first = operation in ("create", "load")
        if can_be_first:  # the model may have no state yet
            model = self.ledger.find("model", name)
        else:
            model = self._find_started(request)
        more_arguments = dict(request.arguments)
        arguments: dict[str, Any] = {"form": model["form"], "state": model["state"]}
        if can_be_first:
            arguments["state"] = more_arguments.pop("from")
        path = more_arguments.pop("path", None)  # only for the reply
        if operation != "forward":
            arguments["model"] = name
        writes_state = operation in ("create", "load", "optim_step")
        if writes_state:
            self._refuse_full_disk()
            arguments["target"] = f"{name.replace(':', '-')}/{request.seq:08d}"
        answer = self._run(operation, arguments | more_arguments)
        if not writes_state:
            return _make_output_result(answer), {}
        changes = {"state": arguments["target"], "bytes": answer["bytes"], "at": time.time()}
        records: Records = {("model", name): model | changes}
        replies: dict[str, Any] = {
            "create": {"type": "create_model", "model_id": name},
            "load": {"type": "load_weights", "path": path, "model_id": name},
            "optim_step": {"metrics": {"grad_norm:mean": answer.get("grad_norm", 0.0)}},
        }
        return _make_json_result(replies[operation]), records

    def _train_together(self, requests: Sequence[QueuedRequest]) -> None:
        """Does `forward_backward` of several models in one pass of the base.

        After an error it does one request after another, so that only the faulty one fails.
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
            self.ledger.finish(request, _make_output_result(answer), {}, adds_gradients=True)

    def _describe_part(self, request: QueuedRequest) -> dict[str, Any]:
        """Returns a request as one of the `parts` of `Operations.forward_backward_together`."""
        model = self._find_started(request)
        return {
            "model": request.queue,
            "form": model["form"],
            "state": model["state"],
            "data": request.arguments["data"],
        }

    def _find_started(self, request: QueuedRequest) -> dict[str, Any]:
        """Returns the record of a request's model.

        Raises `UserError` for a model without a state, whose first request has failed.
        """
        model = self.ledger.find("model", request.queue)
        if model["state"] is None:
            raise UserError(f"model {request.queue!r}: was not made; its first request has failed")
        return model

    def _save(self, request: QueuedRequest) -> tuple[Result, Records]:
        """Makes a checkpoint with the model's state, or a sampler if the request has no name.

        Both are only a record: no file is written. The state stays on disk as long as a record has
        it.

        Returns:
            The result, and the new record.
        """
        model = self._find_started(request)
        arguments = request.arguments
        name = arguments["name"]
        segment = arguments["segment"]
        now = time.time()
        record = {"state": model["state"], "form": model["form"], "model": request.queue, "at": now}
        answer = {"type": "save_weights" if segment == "weights" else "save_weights_for_sampler"}
        if name is None:
            sampler = f"{model['session']}:sample:{arguments['sampler_seq']}"
            record |= {"session": model["session"], "path": None, "clones": 0}
            answer["sampling_session_id"] = sampler
            return _make_json_result(answer), {("sampler", sampler): record}
        path = f"tinker://{request.queue}/{segment}/{name}"
        existing = self.ledger.records("checkpoint").get(path)
        if not arguments["overwrite"] and existing is not None and not has_expired(existing):
            raise UserError(f"{path}: exists; choose another name, or overwrite it")
        ttl = arguments["ttl_seconds"]  # None: the checkpoint does not expire
        record |= {
            "bytes": model["bytes"],
            "expires": None if ttl is None else now + ttl,
            "segment": segment,
            "name": name,
            "user_metadata": arguments["user_metadata"],
        }
        answer["path"] = path
        return _make_json_result(answer), {("checkpoint", path): record}

    def _sample(self, requests: Sequence[QueuedRequest]) -> None:
        """Samples for requests of one sampler, with equal temperatures and stop tokens.

        Completions are cut at the stop texts afterwards, and each request is answered.
        """
        shared = requests[0].arguments
        sampler = self.ledger.find("sampler", shared["sampler"])
        arguments = {
            "state": sampler["state"],
            "form": sampler["form"],
            "temperature": shared["temperature"],
            "stop_ids": shared["stop_ids"],
            "requests": [
                {name: request.arguments[name] for name in SAMPLE_ARGUMENTS} for request in requests
            ],
        }
        answer = self._run("sample", arguments)
        sampled = iter(answer["sampled"])
        prompt_scores = iter(answer["prompts"])
        top_tokens = iter(answer["tops"])
        for request in requests:
            wanted = request.arguments
            completions = [
                cut_at(completion, wanted["stop_texts"], self._tokenizer.decode)
                for completion in islice(sampled, wanted["samples"])
            ]
            scores = next(prompt_scores) if wanted["scores_prompt"] else None
            width = wanted["top_prompt"]
            top = TopTokens(next(top_tokens), width) if width else None
            content = write_samples(completions, scores, top)
            self.ledger.finish(request, Result(PROTOBUF, content), {})

    def _refuse_full_disk(self) -> None:
        """Raises `UserError` if the states on disk exceed their limit."""
        files = (path for path in self._states.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > self._most_disk_bytes:
            raise UserError(
                f"the server's states take {disk_size(size)}, more than is allowed; delete "
                "checkpoints, or start it with a higher --max-disk"
            )

    def _drop_unused(self) -> None:
        """Drops what finished sessions and removed checkpoints have left in memory and on disk."""
        self.has_unused = False  # before it reads: another thread may set it meanwhile
        finished = self.ledger.records("model").keys() - self._read_users("model").keys()
        self._run("drop_gradients", {"models": [*finished]})
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Removes old records, then the states on disk that are not used.

        A state is used by a checkpoint, by a waiting request to load it, or by what `_read_users`
        returns. Only the main thread may call this: it also removes a state that is not complete,
        or has no record yet.
        """
        with suppress(REFUSED):  # a later call removes them
            self._forget_old_samplers()
            self._forget_expired()
        ledger = self.ledger
        with ledger.lock:
            users = [*self._read_users("model").values(), *self._read_users("sampler").values()]
            checkpoints = ledger.records("checkpoint").values()
            loaded = ledger.find_waiting_arguments("load", "from")
        used = {each["state"] for each in [*users, *checkpoints]} | loaded
        for folder in self._states.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" not in used:
                remove_tree(folder, ignore_errors=True)

    def _read_users(self, kind: str) -> dict[str, dict[str, Any]]:
        """Reads the records of the models or samplers that may still be used: id -> body.

        Their session is open, or the client has left before a request was done.

        kind: "model" or "sampler".
        """
        with self.ledger.lock:
            records = self.ledger.records(kind)
            sessions = self.ledger.records("session")
            ready = self.ledger.find_ready_queues()
            asked = self.ledger.find_waiting_arguments("sample", "sampler")
        return {
            name: body
            for name, body in records.items()
            if name in ready | asked or not sessions[body["session"]]["finished"]
        }

    def _forget_old_samplers(self) -> None:
        """Removes old samplers with a model's weights; the latest SAMPLERS_KEPT of each model stay.

        Samplers of a checkpoint or of the base have no `model`, and all stay. So do those that a
        waiting request asks.
        """
        by_model: dict[str, list[str]] = {}  # model -> samplers, the oldest first
        samplers = self.ledger.records("sampler").items()
        for name, sampler in sorted(samplers, key=lambda item: item[1].get("at", 0)):
            if sampler.get("model"):
                by_model.setdefault(sampler["model"], []).append(name)
        old = {name for names in by_model.values() for name in names[:-SAMPLERS_KEPT]}
        for name in old - self.ledger.find_waiting_arguments("sample", "sampler"):
            self.ledger.remove("sampler", name)

    def _forget_expired(self) -> None:
        """Removes the records of checkpoints that have expired."""
        for path, each in self.ledger.records("checkpoint").items():
            if has_expired(each):
                self.ledger.remove("checkpoint", path)


def has_expired(checkpoint: Mapping[str, Any]) -> bool:
    """Returns whether the time is over for which the `checkpoint` of this record was to be kept."""
    expires: float | None = checkpoint["expires"]
    return expires is not None and expires < time.time()


def _name_tokenizer(model: str) -> str:
    """Returns the name by which clients load the tokenizer.

    It is the full path of a folder, for clients on this machine, or else the hub name.
    """
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model


def _make_output_result(answer: Mapping[str, Any]) -> Result:
    """Makes the result of a `forward` or `forward_backward`: a protocol buffer."""
    return Result(PROTOBUF, write_forward_backward(answer["log_probabilities"], answer["loss"]))


def _make_json_result(content: Mapping[str, Any]) -> Result:
    return Result(JSON, json.dumps(content).encode())
