"""The schemas of a vLLM server's answers. An answer that does not match raises `UserError`."""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.errors import UserError, on_one_line, printable
from finetune.files.json_files import parse_json

SHOWN = 200  # the most characters of an answer that an error quotes
LogProbability = Annotated[float, Field(le=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class ServerAnswer(BaseModel):
    """An answer or a part of one. Fields of the server that a schema does not list are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Served(ServerAnswer):
    """A model or an adapter that the server has loaded."""

    id: str  # the name that requests give to it
    root: str = ""  # the folder or the hub's name from which it was loaded
    max_model_len: int | None = None  # the most tokens with the prompt; None: it is an adapter


class ServedModels(ServerAnswer):
    """The answer of /v1/models: the model, then its adapters."""

    data: Annotated[tuple[Served, ...], Field(min_length=1, strict=False)]


class ModelSettings(ServerAnswer):
    """The server's settings for its model."""

    logprobs_mode: str  # how log-probabilities are computed, such as "processed_logprobs"


class ServerSettings(ServerAnswer):
    """The server's settings."""

    model: ModelSettings = Field(alias="model_config")


class ServerInfo(ServerAnswer):
    """The answer of /server_info."""

    vllm_config: ServerSettings


class WeightInfo(ServerAnswer):
    """The answer of /weight_info."""

    weight_version: str  # the name of the weights; "default" until they are replaced


class CacheReset(ServerAnswer):
    """The answer of /reset_prefix_cache."""

    success: bool  # whether the cached keys and values were dropped


class LogProbabilities(ServerAnswer):
    """The log-probabilities of a completion's tokens."""

    token_logprobs: list[LogProbability]


class Choice(ServerAnswer):
    """One completion."""

    token_ids: list[TokenId]  # may be empty if it was aborted
    logprobs: LogProbabilities
    finish_reason: Literal["stop", "length", "abort"]


class ServedCompletion(ServerAnswer):
    """The answer of /v1/completions: the completions of a prompt."""

    choices: Annotated[list[Choice], Field(min_length=1)]


AnswerKind = TypeVar("AnswerKind", bound=ServerAnswer)


def read_answer(kind: type[AnswerKind], content: bytes, url: str) -> AnswerKind:
    """Parses `content`, the answer from `url`, by the schema `kind`.

    Raises:
        UserError: The answer does not match the schema. The message has the first difference and
            the answer's beginning.
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
    # The bytes of more characters than are shown, because a character may have up to 4 bytes.
    one_line = " ".join(content[: 4 * SHOWN].decode(errors="replace").split())
    excerpt = printable(one_line)[:SHOWN]
    raise UserError(
        f"{url}: does not answer as vLLM 0.32 does ({printable(reason)[:SHOWN]}): {excerpt}"
    )
