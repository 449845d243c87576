"""The Tinker API as a table: method and path -> a function of the service and the request's body.

Nothing here depends on HTTP. The body and the parameters in the path are one mapping, `sent`, which
pydantic types check. It names no code or file.

A session is a client's. A model is an adapter on the base, and belongs to a session. A sampler
samples with a state of a model, or with the base. A checkpoint is a named state that outlives the
session.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from finetune.errors import UserError
from finetune.service.adapters import AdapterForm
from finetune.service.datums import Limits, check_datums, check_tokens
from finetune.service.service import Service, has_expired

Sent = Mapping[str, Any]
Body = dict[str, Any]
Handler = Callable[[Service, Sent], Body]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a checkpoint
MOST_TOP_TOKENS = 1024  # the limit of `topk_prompt_logprobs`
# The part of a checkpoint's path that says what it is for -> the API's type of the checkpoint.
SEGMENTS = {"weights": "training", "sampler_weights": "sampler"}


class LoraConfig(BaseModel):
    """The adapter in the body of create_model."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    """The kind of a model's optimizer."""

    type: Literal["adamw"] = "adamw"


class CreateModel(BaseModel):
    """Body of create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: LoraConfig
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer = Optimizer()


class AdamParams(BaseModel):
    """The optimizer in the body of optim_step."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0, allow_inf_nan=False)  # 0 would make a gradient of 0 a 0 / 0
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)  # 0: no clipping


class OfModel(BaseModel):
    """Body of a request about a model. The requests of a model are done in order of `seq_id`."""

    model_id: str
    seq_id: int = Field(ge=1)


class ForwardBackward(OfModel):
    """Body of forward_backward, which `wire.read_forward_backward` has decoded."""

    forward_only: bool
    loss_fn: str
    options: dict[str, Any]
    data: list[dict[str, Any]]
    problem: str | None  # why the datums could not be read; None: they could


class OptimStep(OfModel):
    """Body of optim_step."""

    adam_params: AdamParams


class SaveWeights(OfModel):
    """Body of save_weights and save_weights_for_sampler."""

    path: Annotated[str, Field(pattern=f"^{NAME.pattern}$")] | None = None
    ttl_seconds: int | None = Field(None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)


class LoadWeights(BaseModel):
    """Body of load_weights.

    Loads into a new model if there is a `session_id`, else into the model `model_id`.
    """

    path: str
    optimizer: bool  # whether the optimizer's state is loaded, too
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None


class CreateSampler(BaseModel):
    """Body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Chunk(BaseModel):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class PromptBody(BaseModel):
    """The prompt in the body of asample."""

    chunks: list[Chunk]


class SamplingParams(BaseModel):
    """The sampling in the body of asample. Tokens are drawn from the whole vocabulary."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: Literal[-1] = -1
    top_p: float = Field(1.0, ge=1, le=1)


class SampleBody(BaseModel):
    """Body of asample."""

    sampling_session_id: str
    seq_id: int = Field(ge=0)
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: PromptBody
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MOST_TOP_TOKENS)
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: None = None
    record_stability_info: Literal[False] | None = None


BodyType = TypeVar("BodyType", bound=BaseModel)


def read_body(kind: type[BodyType], sent: Sent) -> BodyType:
    """Reads a body as `kind`. Raises a `UserError` that lists every mistake."""
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        raise UserError("; ".join(problems)) from None


def get_capabilities(service: Service, sent: Sent) -> Body:
    """Describes the only model that is served."""
    model = {
        "model_name": service.model_name,
        "max_context_length": service.limits.tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


def get_client_config(service: Service, sent: Sent) -> Body:
    """Answers which features clients use: none that this server lacks.

    It lacks signed keys, compressed bodies, and losses that clients send as code.
    """
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "custom_loss_server_side": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "fwdbwd_max_chunk_bytes_count": min(5_000_000, service.most_body_bytes // 2),
    }


def create_session(service: Service, sent: Sent) -> Body:
    """Begins a session."""
    ledger = service.ledger
    name = secrets.token_hex(8)
    body = {
        "user_metadata": _make_texts(sent.get("user_metadata")),
        "display_name": sent.get("display_name"),
        "finished": False,
        "at": time.time(),
    }
    service.finish_silent_sessions()
    with ledger.lock:  # so that no other thread opens a session between count and write
        sessions = ledger.records("session").values()
        count = sum(not session["finished"] for session in sessions)
        if count >= service.most_sessions:
            raise UserError(
                f"{count} sessions are open, as many as are allowed; finish one (close() of its "
                "ServiceClient), wait an hour for those whose scripts have ended, or start the "
                "server with a higher --max-sessions"
            )
        service.heard[name] = time.monotonic()
        ledger.put("session", name, body)
    warning = "adapters are on the linear layers but the output head: train_unembed is not read"
    return {"type": "create_session", "session_id": name, "info_message": warning}


def _make_texts(values: object) -> dict[str, str] | None:
    """Makes the keys and values of a mapping texts; returns None for anything else."""
    if not isinstance(values, Mapping):
        return None
    return {str(name): str(value) for name, value in values.items()}


def answer_heartbeat(service: Service, sent: Sent) -> Body:
    """Answers that a client's session is open. Raises `UserError` if it is not."""
    find_session(service, sent.get("session_id"))
    return {"type": "session_heartbeat"}


def find_session(service: Service, name: object) -> Body:
    """Returns the record of an open session, whose client is heard by this.

    Raises `UserError` if there is none of this name.
    """
    session = service.ledger.find("session", name)
    if session["finished"]:
        raise UserError(
            f"session {name!r}: is finished, by its client or after an hour without a word of it; "
            "open another ServiceClient"
        )
    service.heard[str(name)] = time.monotonic()
    return session


def get_session(service: Service, sent: Sent) -> Body:
    """Describes a session: the names of its models and samplers, and the client's metadata."""
    name = sent["id"]
    session = service.ledger.find("session", name)

    def list_names(kind: str) -> list[str]:
        records = service.ledger.records(kind).items()
        return [record for record, body in records if body["session"] == name]

    return {
        "training_run_ids": list_names("model"),
        "sampler_ids": list_names("sampler"),
        "user_metadata": session["user_metadata"],
        "display_name": session["display_name"],
    }


def finish_session(service: Service, sent: Sent) -> Body:
    """Ends a session. Its models and samplers lose their states; its checkpoints stay.

    What a model was asked before is done first.
    """
    with service.ledger.change("session", sent["id"]) as session:
        session["finished"] = True
    service.has_unused = True
    return {}


def create_model(service: Service, sent: Sent) -> Body:
    """Makes a record of a new model, and accepts the request that writes the first state."""
    request = read_body(CreateModel, sent)
    find_session(service, request.session_id)
    if request.base_model != service.model_name:
        raise UserError(
            f"base_model: {request.base_model!r} is not served here; {service.model_name!r} is"
        )
    config = request.lora_config
    if config.rank > service.largest_rank:
        raise UserError(
            f"lora_config.rank: {config.rank} is above {service.largest_rank}, the lora_r of the "
            "server's recipe; ask for less, or start it with a higher lora_r"
        )
    model = f"{request.session_id}:train:{request.model_seq_id}"
    seed = service.seed_of(f"train:{request.model_seq_id}") if config.seed is None else config.seed
    form = AdapterForm(config.rank, seed, config.train_mlp, config.train_attn)
    body = _describe_model(request.session_id, form, request.user_metadata)
    service.ledger.accept(
        f"{model}:0", model, 0, "create", {"from": None}, {("model", model): body}
    )
    return {"request_id": f"{model}:0", "model_id": model}


def _describe_model(session: str, form: AdapterForm, metadata: Mapping[str, Any] | None) -> Body:
    """Returns the record of a new model, which has no state yet."""
    return {
        "session": session,
        "form": asdict(form),
        "user_metadata": _make_texts(metadata),
        "state": None,
        "bytes": 0,
        "at": time.time(),
    }


def find_model(service: Service, name: object) -> Body:
    """Returns the record of a model of an open session. Raises `UserError` if there is none."""
    model = service.ledger.find("model", name)
    find_session(service, model["session"])
    return model


def get_info(service: Service, sent: Sent) -> Body:
    """Describes a model."""
    name = sent.get("model_id")
    model = service.ledger.find("model", name)
    return {
        "type": "get_info",
        "model_data": {
            "arch": service.architecture,
            "model_name": service.model_name,
            "tokenizer_id": service.tokenizer_name,
        },
        "model_id": name,
        "is_lora": True,
        "lora_rank": model["form"]["rank"],
        "model_name": service.model_name,
    }


def _promise(
    service: Service, request: OfModel, operation: str, arguments: Mapping[str, Any]
) -> Body:
    """Accepts a request about a model. The client retrieves the result by its `request_id`.

    Args:
        service: The service.
        request: Has the model's name, and the place in the model's order.
        operation: The operation, as in `QueuedRequest`.
        arguments: The operation's arguments.
    """
    find_model(service, request.model_id)
    name = f"{request.model_id}:{request.seq_id}"
    service.ledger.accept(name, request.model_id, request.seq_id, operation, arguments)
    return {"request_id": name, "model_id": request.model_id}


def queue_refused(handler: Handler) -> Handler:
    """Makes a handler that queues a request which `handler` refuses.

    The request is answered with the error in its turn. Without it the model's next request would
    wait forever. A request that names no model is refused at once.
    """

    def answer(service: Service, sent: Sent) -> Body:
        try:
            return handler(service, sent)
        except UserError as error:
            if sent.get("model_id") is None:
                raise
            request = read_body(OfModel, sent)
            return _promise(service, request, "refuse", {"error": str(error)})

    return answer


@queue_refused
def forward_backward(service: Service, sent: Sent) -> Body:
    """Accepts a request to compute a loss, with or without gradients."""
    request = read_body(ForwardBackward, sent)
    if request.problem is not None:
        raise UserError(request.problem)
    check_datums(request.data, request.loss_fn, request.options, service.limits)
    operation = "forward" if request.forward_only else "forward_backward"
    arguments = {"data": request.data, "loss": request.loss_fn, "options": request.options}
    return _promise(service, request, operation, arguments)


@queue_refused
def optim_step(service: Service, sent: Sent) -> Body:
    """Accepts a request to update a model by its gradients."""
    if "adam_params" not in sent:
        raise UserError("optim_step: AdamParams are expected; no other optimizer is served")
    request = read_body(OptimStep, sent)
    return _promise(service, request, "optim_step", {"params": request.adam_params.model_dump()})


@queue_refused
def save_weights(service: Service, sent: Sent) -> Body:
    """Accepts a request to make a checkpoint of a model and of the optimizer's state."""
    request = read_body(SaveWeights, sent)
    if request.path is None:
        raise UserError("path: a name for the checkpoint is expected")
    return _promise(service, request, "save", _describe_save(request, "weights"))


@queue_refused
def save_weights_for_sampler(service: Service, sent: Sent) -> Body:
    """Accepts a request to make a sampler with a model's weights, or a checkpoint for samplers.

    Without a `path` it is a sampler.
    """
    request = read_body(SaveWeights, sent)
    if request.path is None and request.sampling_session_seq_id is None:
        raise UserError("path: a name is expected, or a sampling_session_seq_id")
    return _promise(service, request, "save", _describe_save(request, "sampler_weights"))


def _describe_save(request: SaveWeights, segment: str) -> Body:
    """Returns the arguments of the operation "save". `segment`: a key of SEGMENTS."""
    return {
        "segment": segment,
        "name": request.path,
        "sampler_seq": request.sampling_session_seq_id,
        "ttl_seconds": request.ttl_seconds,
        "user_metadata": request.user_metadata,
        "overwrite": request.overwrite or segment == "sampler_weights",
    }


def find_checkpoint(service: Service, path: object) -> Body:
    """Returns the record of a checkpoint by its tinker:// path.

    Raises `UserError` if there is none, or if it has expired.
    """
    saved = service.ledger.find("checkpoint", str(path))
    if has_expired(saved):
        raise UserError(f"{path}: has expired")
    return saved


def load_weights(service: Service, sent: Sent) -> Body:
    """Accepts a request to load a checkpoint into a new model, or into one that exists."""
    request = read_body(LoadWeights, sent)
    saved = find_checkpoint(service, request.path)
    if request.optimizer and saved["segment"] != "weights":
        raise UserError(f"{request.path}: holds no optimizer state; load it without, or save_state")
    arguments = {"from": saved["state"], "optimizer": request.optimizer, "path": request.path}
    if request.session_id is not None:
        find_session(service, request.session_id)
        model = f"{request.session_id}:train:{request.model_seq_id}"
        form = AdapterForm(**saved["form"])
        body = _describe_model(request.session_id, form, request.user_metadata)
        records = {("model", model): body}
        service.ledger.accept(f"{model}:0", model, 0, "load", arguments, records)
        return {"request_id": f"{model}:0", "model_id": model}
    model_request = read_body(OfModel, {"model_id": request.model_id, "seq_id": request.seq_id})
    model_form = find_model(service, request.model_id)["form"]
    if saved["form"] != model_form | {"seed": saved["form"]["seed"]}:  # they may differ in the seed
        raise UserError(f"{request.path}: is an adapter of another rank or of other layers")
    return _promise(service, model_request, "load", arguments)


def create_sampler(service: Service, sent: Sent) -> Body:
    """Makes a sampler from a checkpoint, if there is a `model_path`, or from the base model."""
    request = read_body(CreateSampler, sent)
    find_session(service, request.session_id)
    if request.model_path is not None:
        checkpoint = find_checkpoint(service, request.model_path)
    elif request.base_model == service.model_name:
        checkpoint = {"state": None, "form": {"rank": 0, "seed": 0}}  # an adapter without effect
    else:
        raise UserError(
            f"base_model: {request.base_model!r} is not served; {service.model_name!r} is"
        )
    name = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = {
        "session": request.session_id,
        "path": request.model_path,
        "clones": 0,  # how often clients have joined by `join_sampler`
        "state": checkpoint["state"],
        "form": checkpoint["form"],
    }
    service.ledger.put("sampler", name, sampler)
    return {"type": "create_sampling_session", "sampling_session_id": name}


def join_sampler(service: Service, sent: Sent) -> Body:
    """Gives another client of a sampler a number, with which it makes its request names unique."""
    with service.ledger.change("sampler", str(sent.get("sampling_session_id"))) as sampler:
        sampler["clones"] += 1
    return {"type": "join_sampling_session", "client_counter": sampler["clones"]}


def get_sampler(service: Service, sent: Sent) -> Body:
    """Describes a sampler."""
    sampler = service.ledger.find("sampler", sent["id"])
    return {
        "sampler_id": sent["id"],
        "base_model": service.model_name,
        "model_path": sampler["path"],
    }


def sample(service: Service, sent: Sent) -> Body:
    """Accepts a request to sample completions of a prompt, and to score the prompt if asked for."""
    request = read_body(SampleBody, sent)
    sampler = service.ledger.find("sampler", request.sampling_session_id)
    find_session(service, sampler["session"])
    prompt: list[int] = []
    for chunk in request.prompt.chunks:
        prompt += chunk.tokens
    # a completion has at least one token
    prompt_limits = Limits(service.limits.vocabulary, service.limits.tokens - 1)
    check_tokens(prompt, "prompt", prompt_limits)
    params = request.sampling_params
    name = f"{request.sampling_session_id}:{request.seq_id}"
    stop_ids, stop_texts = _read_stop(params.stop)
    if params.seed is None:
        _, _, name_in_session = name.partition(":")
        seed = service.seed_of(name_in_session)
    else:
        seed = params.seed & 2**63 - 1  # a seed must not be negative
    room = service.limits.tokens - len(prompt)
    arguments = {
        "sampler": request.sampling_session_id,
        "prompt": prompt,
        "samples": request.num_samples,
        "max_tokens": min(params.max_tokens or room, room),
        "temperature": params.temperature,
        "stop_ids": stop_ids,
        "stop_texts": stop_texts,
        "seed": seed,
        "scores_prompt": bool(request.prompt_logprobs),
        "top_prompt": min(request.topk_prompt_logprobs, service.limits.vocabulary),
    }
    service.ledger.accept(name, name, 0, "sample", arguments)
    sample_ids = [f"{name}:{number}" for number in range(request.num_samples)]
    return {"request_id": name, "sample_sequence_ids": sample_ids}


def _read_stop(stop: str | list[str] | list[int] | None) -> tuple[list[int] | None, list[str]]:
    """Returns (the ids, the texts) that end a completion. If ids is None, those that end a turn do.

    stop: A text, several texts, several ids, or None.
    """
    if stop is None:
        return None, []
    listed = [stop] if isinstance(stop, str) else stop
    texts = [each for each in listed if isinstance(each, str)]
    if texts:
        return None, texts
    return [each for each in listed if isinstance(each, int)], []


def weights_info(service: Service, sent: Sent) -> Body:
    """Describes a checkpoint."""
    form = find_checkpoint(service, sent.get("tinker_path"))["form"]
    return {
        "base_model": service.model_name,
        "is_lora": True,
        "lora_rank": form["rank"],
        "train_unembed": False,
        "train_mlp": form["train_mlp"],
        "train_attn": form["train_attn"],
    }


def list_runs(service: Service, sent: Sent) -> Body:
    """Lists all models, as training runs."""
    runs = [_describe_run(service, name) for name in service.ledger.records("model")]
    cursor = {"offset": 0, "limit": len(runs), "total_count": len(runs)}
    return {"training_runs": runs, "cursor": cursor}


def get_run(service: Service, sent: Sent) -> Body:
    """Describes one model, as a training run."""
    return _describe_run(service, sent["id"])


def _describe_run(service: Service, name: str) -> Body:
    """Describes the model `name` as the API's training run."""
    model = service.ledger.find("model", name)
    return {
        "training_run_id": name,
        "base_model": service.model_name,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": model["form"]["rank"],
        "last_request_time": _format_time(model["at"]),
        "user_metadata": model["user_metadata"],
    }


def _format_time(seconds: float) -> str:
    """Formats seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def list_checkpoints(service: Service, sent: Sent) -> Body:
    """Lists the checkpoints of a model that have not expired."""
    listed = []
    for path, each in service.ledger.records("checkpoint").items():
        if each["model"] != sent["id"] or has_expired(each):
            continue
        checkpoint = {
            "checkpoint_id": f"{each['segment']}/{each['name']}",
            "checkpoint_type": SEGMENTS[each["segment"]],
            "time": _format_time(each["at"]),
            "tinker_path": path,
            "size_bytes": each["bytes"],
            "user_metadata": each["user_metadata"],
            "expires_at": None if each["expires"] is None else _format_time(each["expires"]),
        }
        listed.append(checkpoint)
    return {"checkpoints": listed}


def delete_checkpoint(service: Service, sent: Sent) -> Body:
    """Removes a checkpoint, and the state on disk if nothing else has it."""
    path = f"tinker://{sent['id']}/{sent['segment']}/{sent['name']}"
    service.ledger.find("checkpoint", path)
    service.ledger.remove("checkpoint", path)
    service.has_unused = True
    return {}


# All endpoints but retrieve_future, which waits for a result: server.py adds it.
ENDPOINTS: Mapping[tuple[str, str], Handler] = {
    ("GET", "healthz"): lambda service, sent: {"status": "ok"},
    ("GET", "get_server_capabilities"): get_capabilities,
    ("POST", "client/config"): get_client_config,
    ("POST", "client/dynamic_config"): lambda service, sent: {},
    ("POST", "telemetry"): lambda service, sent: {"status": "accepted"},
    ("POST", "create_session"): create_session,
    ("POST", "session_heartbeat"): answer_heartbeat,
    ("GET", "sessions/{id}"): get_session,
    ("POST", "sessions/{id}/finish"): finish_session,
    ("POST", "create_model"): create_model,
    ("POST", "get_info"): get_info,
    ("POST", "forward_backward"): forward_backward,
    ("POST", "optim_step"): optim_step,
    ("POST", "save_weights"): save_weights,
    ("POST", "load_weights"): queue_refused(load_weights),
    ("POST", "save_weights_for_sampler"): save_weights_for_sampler,
    ("POST", "weights_info"): weights_info,
    ("POST", "create_sampling_session"): create_sampler,
    ("POST", "join_sampling_session"): join_sampler,
    ("GET", "samplers/{id}"): get_sampler,
    ("POST", "asample"): sample,
    ("GET", "training_runs"): list_runs,
    ("GET", "training_runs/{id}"): get_run,
    ("GET", "training_runs/{id}/checkpoints"): list_checkpoints,
    ("DELETE", "training_runs/{id}/checkpoints/{segment}/{name}"): delete_checkpoint,
}
