"""The schemas of the answers of a vLLM server. An answer of another kind is a `UserError`."""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.errors import UserError, on_one_line, printable
from finetune.files.json_files import parse_json

SHOWN = 200  # characters of an answer in an error
LogProbability = Annotated[float, Field(le=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class ServerAnswer(BaseModel):
    """An answer, or a part of one. Fields that are not listed are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Served(ServerAnswer):
    """A model or an adapter that the server has loaded."""

    id: str  # its name in requests
    root: str = ""  # its folder, or its name on the hub
    max_model_len: int | None = None  # tokens of prompt and completion; None: an adapter


class ServedModels(ServerAnswer):
    """The answer of /v1/models: the model, then its adapters."""

    data: Annotated[tuple[Served, ...], Field(min_length=1, strict=False)]


class ModelSettings(ServerAnswer):
    """How the server computes log-probabilities."""

    logprobs_mode: str


class ServerSettings(ServerAnswer):
    """The server's settings."""

    model: ModelSettings = Field(alias="model_config")


class ServerInfo(ServerAnswer):
    """The answer of /server_info."""

    vllm_config: ServerSettings


class WeightInfo(ServerAnswer):
    """The answer of /weight_info."""

    weight_version: str


class CacheReset(ServerAnswer):
    """The answer of /reset_prefix_cache."""

    success: bool


class LogProbabilities(ServerAnswer):
    """The log-probabilities of a completion's tokens."""

    token_logprobs: list[LogProbability]


class Choice(ServerAnswer):
    """One completion."""

    token_ids: list[TokenId]  # none where it was aborted before the first
    logprobs: LogProbabilities
    finish_reason: Literal["stop", "length", "abort"]


class ServedCompletion(ServerAnswer):
    """A completion in the answer of /v1/completions."""

    choices: Annotated[list[Choice], Field(min_length=1)]


AnswerKind = TypeVar("AnswerKind", bound=ServerAnswer)


def read_answer(kind: type[AnswerKind], content: bytes, url: str) -> AnswerKind:
    """Parses the answer of the server at `url`.

    Raises:
        UserError: It does not match the schema; with the first difference, and its beginning.
    """
    try:
        return kind.model_validate(parse_json(content))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if place:
            reason = f"{place}: {first['msg']}"
        else:
            reason = str(first["msg"])
    except ValueError as error:
        reason = on_one_line(error)
    said = printable(" ".join(content[: 4 * SHOWN].decode(errors="replace").split()))[:SHOWN]
    raise UserError(
        f"{url}: does not answer as vLLM 0.32 does ({printable(reason)[:SHOWN]}): {said}"
    )
