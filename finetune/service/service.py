"""A service without its HTTP: what it knows of its model, and how a request is done."""

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.distributed.model_parts import unwrap
from finetune.errors import UserError
from finetune.files.durable import make_folder, remove_tree
from finetune.models.lora import seed_of
from finetune.rollout.engine import Sampled
from finetune.service.adapters import AdapterForm
from finetune.service.ledger import Asked, Ledger, Result
from finetune.service.operations import Operations, cut_at
from finetune.service.wire import PROTOBUF, TopTokens, write_forward_backward, write_samples
from finetune.units import disk_size

JSON = "application/json"
SAMPLERS_KEPT = 32  # of a model, those that have no name
MOST_WAITING = 10_000
USES_GRADIENTS = ("forward_backward", "optim_step", "load")
SAMPLE_ARGUMENTS = ("prompt", "samples", "max_tokens", "seed", "scores_prompt", "top_prompt")
Records = dict[tuple[str, str], Mapping[str, Any]]
Run = Callable[[str, Mapping[str, Any]], dict[str, Any]]


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
        """Opens what an earlier process has left in `folder`.

        Args:
            operations: Of this rank.
            folder: Of the ledger, and of the states.
            run: Does an operation on all ranks, as `Operations.run`.
            most_stacked: Adapters that may share a pass of the base.
            most_sessions, most_body_bytes, most_disk_bytes: What is refused above them.
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
        self._in_hand: Sequence[Asked] = ()
        self.remove_unused()

    def seed_of(self, name: str) -> int:
        """The seed of what a client gives none for; `name` is the same in every session, so that a
        script that is run again finds the same numbers.
        """
        return seed_of(self._seed, name)

    def describe_model(
        self, session: str, form: AdapterForm, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The record of a model that is not made yet."""
        named = None if metadata is None else {key: str(value) for key, value in metadata.items()}
        own = {"session": session, "form": asdict(form), "user_metadata": named}
        return own | {"state": None, "bytes": 0, "at": time.time()}

    def work(self, seconds: float) -> bool:
        """Does what is to be done next; returns whether there was something, within so long.

        What goes wrong with it is its answer. A fault of the program is printed, too.
        """
        asked = self.ledger.take(seconds)
        self._in_hand = asked
        if not asked:
            return False
        self._answer(self._sample if asked[0].operation == "sample" else self._do, asked)
        return True

    def _answer(self, act: Callable[[Sequence[Asked]], None], asked: Sequence[Asked]) -> None:
        try:
            act(asked)
        except UserError as error:
            self._fail(asked, str(error), "user")
        except Exception as error:
            self._fail(asked, f"{type(error).__name__}: {error}", "server")
            traceback.print_exc()

    def give_up(self, error: str) -> None:
        """Answers an error to what is being done. For another thread than that of `work`."""
        self._fail(self._in_hand, error, "server")

    def _fail(self, asked: Sequence[Asked], error: str, category: str) -> None:
        """Answers an error, in the API's form. Gradients are lost with it."""
        result = _json({"error": error, "category": category})
        for each in asked:
            self.ledger.finish(each, result, {}, drops_gradients=each.operation in USES_GRADIENTS)

    def _do(self, asked: Sequence[Asked]) -> None:
        if len(asked) > 1:
            self._train_together(asked)
            return
        (each,) = asked
        operation = each.operation
        result, records = self._save(each) if operation == "save" else self._train(each)
        makes_gradients = operation == "forward_backward"
        self.ledger.finish(
            each,
            result,
            records,
            keeps_gradients=makes_gradients,
            drops_gradients=operation in USES_GRADIENTS and not makes_gradients,
        )
        if operation in ("optim_step", "load"):
            self.remove_unused()

    def _train(self, asked: Asked) -> tuple[Result, Records]:
        if asked.operation == "refuse":
            raise UserError(asked.arguments["error"])
        name = asked.queue
        operation = asked.operation
        starts = operation in ("create", "load")
        model = self.ledger.find("model", name) if starts else self._find_made(asked)
        given = dict(asked.arguments)
        own: dict[str, Any] = {"form": model["form"], "state": model["state"]}
        if starts:
            own["state"] = given.pop("from")
        path = given.pop("path", None)
        if operation != "forward" and operation != "create":
            own["model"] = name
        writes = operation in ("create", "load", "optim_step")
        if writes:
            self._refuse_full_disk()
            own["target"] = f"{name.replace(':', '-')}/{asked.seq:08d}"
        answer = self._run(operation, own | given)
        if not writes:
            return _describe_outputs(answer), {}
        changed = {"state": own["target"], "bytes": answer["bytes"], "at": time.time()}
        records: Records = {("model", name): model | changed}
        replies: dict[str, Any] = {
            "create": {"type": "create_model", "model_id": name},
            "load": {"type": "load_weights", "path": path, "model_id": name},
            "optim_step": {"metrics": {"grad_norm:mean": answer.get("grad_norm", 0.0)}},
        }
        return _json(replies[operation]), records

    def _train_together(self, asked: Sequence[Asked]) -> None:
        """Does `forward_backward` of several models in one pass; one after the other where one of
        them has an error, which is its own.
        """
        try:
            parts = [self._describe_part(each) for each in asked]
            same = {name: asked[0].arguments[name] for name in ("loss", "options")}
            answer = self._run("forward_backward_together", {"parts": parts, **same})
        except UserError:
            for each in asked:
                self._answer(self._do, [each])
            return
        for each, own in zip(asked, answer["answers"], strict=True):
            self.ledger.finish(each, _describe_outputs(own), {}, keeps_gradients=True)

    def _describe_part(self, asked: Asked) -> dict[str, Any]:
        model = self._find_made(asked)
        own = {"model": asked.queue, "form": model["form"], "state": model["state"]}
        return own | {"data": asked.arguments["data"]}

    def _find_made(self, asked: Asked) -> dict[str, Any]:
        """The record of the model that is asked for. Raises `UserError` where it was not made."""
        model = self.ledger.find("model", asked.queue)
        if model["state"] is None:
            raise UserError(f"model {asked.queue!r}: was not made; its first request has failed")
        return model

    def _save(self, asked: Asked) -> tuple[Result, Records]:
        """A checkpoint is a name for a state, which stays on disk for it."""
        model = self.ledger.find("model", asked.queue)
        given = asked.arguments
        kept = {"state": model["state"], "form": model["form"]}
        kind = "save_weights" if given["segment"] == "weights" else "save_weights_for_sampler"
        if given["name"] is None:
            sampler = f"{model['session']}:sample:{given['sampler_seq']}"
            own = {"session": model["session"], "path": None, "clones": 0, "model": asked.queue}
            record = kept | own | {"at": time.time()}
            answer = {"type": kind, "sampling_session_id": sampler}
            return _json(answer), {("sampler", sampler): record}
        path = f"tinker://{asked.queue}/{given['segment']}/{given['name']}"
        if not given["overwrite"] and path in self.ledger.records("checkpoint"):
            raise UserError(f"{path}: exists; choose another name, or overwrite it")
        ttl = given["ttl_seconds"]
        now = time.time()
        named = {name: given[name] for name in ("segment", "name", "user_metadata")}
        expires = None if ttl is None else now + ttl
        own = {"model": asked.queue, "bytes": model["bytes"], "at": now, "expires": expires}
        return _json({"type": kind, "path": path}), {("checkpoint", path): kept | own | named}

    def _sample(self, asked: Sequence[Asked]) -> None:
        """Draws for several requests at once, which the ledger has put together."""
        first = asked[0].arguments
        sampler = self.ledger.find("sampler", first["sampler"])
        own = {name: first[name] for name in ("temperature", "stop_ids")}
        own |= {"state": sampler["state"], "form": sampler["form"]}
        own["requests"] = [
            {name: each.arguments[name] for name in SAMPLE_ARGUMENTS} for each in asked
        ]
        answer = self._run("sample", own)
        sampled = iter(answer["sampled"])
        prompts = iter(answer["prompts"])
        tops = iter(answer["tops"])
        for each in asked:
            texts = each.arguments["stop_texts"]
            every = [Sampled.of_json(next(sampled)) for _ in range(each.arguments["samples"])]
            cut = [cut_at(one, texts, self._tokenizer.decode) for one in every]
            prompt = next(prompts) if each.arguments["scores_prompt"] else None
            width = each.arguments["top_prompt"]
            top = TopTokens(next(tops), width) if width else None
            self.ledger.finish(each, Result(PROTOBUF, write_samples(cut, prompt, top)), {})

    def _refuse_full_disk(self) -> None:
        """Raises `UserError` where the states are as large as is allowed."""
        files = (path for path in self._states.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > self._most_disk_bytes:
            raise UserError(
                f"the server's states take {disk_size(size)}, more than is allowed; delete "
                "checkpoints, or start it with a higher --max-disk"
            )

    def remove_unused(self) -> None:
        """Removes the states that no model, sampler or checkpoint names, and records that are
        over.
        """
        self._forget_old_samplers()
        self._forget_expired()
        ledger = self.ledger
        living = [*ledger.records("model").values(), *ledger.records("sampler").values()]
        sessions = ledger.records("session")  # read last, as HTTP's threads add to all of them
        used = {each["state"] for each in living if not sessions[each["session"]]["finished"]}
        used |= {each["state"] for each in ledger.records("checkpoint").values()}
        for folder in self._states.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" not in used:
                remove_tree(folder, ignore_errors=True)

    def _forget_old_samplers(self) -> None:
        """Forgets each model's samplers without a name that are not the latest."""
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
    """The name by which a client on this machine finds the tokenizer: a folder's whole path."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model


def _describe_outputs(answer: Mapping[str, Any]) -> Result:
    return Result(PROTOBUF, write_forward_backward(answer["log_probabilities"], answer["loss"]))


def _json(content: Mapping[str, Any]) -> Result:
    return Result(JSON, json.dumps(content).encode())
