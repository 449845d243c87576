"""Downloads from the hub, uploads to it, and requests to a server. Each failure is one sentence."""

import json
import os
import shlex
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune.constants import ADAPTER_CONFIG, EXPORT
from finetune.errors import UserError, first_line, printable
from finetune.files.json_files import read_json_object

# the files of a hub repository that describe a model, beside its weights
DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "README.md"]


def find_cache(name: str) -> Path:
    """Returns the path of the folder `name` in our part of the Hugging Face cache.

    Only what can be made again is kept there. The folder may not exist yet.
    """
    return (
        Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "finetune" / name
    )


@cache
def go_offline_without_network() -> None:
    """Puts the hub's client offline in this process if the hub does not answer one request.

    Otherwise the client asks six times for each file, for half a minute, before it looks into the
    cache.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:
        # The network, a proxy or a certificate failed. The wanted file may still be in the cache.
        constants.HF_HUB_OFFLINE = True


def download_file(repository: str, name: str, revision: str | None = None) -> Path:
    """Downloads one file of a hub repository, unless it is in the cache; returns its local path.

    Raises `UserError` if the file can be neither found in the cache nor downloaded.
    """
    from huggingface_hub import hf_hub_download

    go_offline_without_network()
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # the hub, the network and the disk raise unrelated classes
        raise hub_error(repository, error, what=name, revision=revision) from None


def download_folder(
    repository: str, patterns: list[str], what: str, revision: str | None = None
) -> Path:
    """Downloads the files of a hub repository that match `patterns`, unless they are in the cache;
    returns the local folder that holds them.

    `what` names the files in messages. Raises `UserError` if they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    go_offline_without_network()
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # as above
        raise hub_error(repository, error, what, revision) from None


def find_local_folder(name: str, revision: str | None = None) -> Path | None:
    """Finds a model's folder without the network: `name` as a local folder, or as a hub repository
    with a config.json in the cache.

    Returns None if there is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config_file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    if isinstance(config_file, str):
        return Path(config_file).parent
    return None


def hub_error(repository: str, error: Exception, what: str, revision: str | None) -> UserError:
    """Makes the `UserError` for a failed download of `what` from `repository`.

    `error` is the exception of the hub's client, the network or the disk. The message gives the
    reason and what to do about it.
    """
    from huggingface_hub import errors as hub

    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "off", "no")
    if offline:
        unreachable = "HF_HUB_OFFLINE is set"
    else:
        unreachable = "the hub is unreachable"
    status = getattr(getattr(error, "response", None), "status_code", "an error")
    reason = first_line(error)
    # the first class that matches is used, so subclasses come first
    sentences: dict[type[Exception] | tuple[type[Exception], ...], str] = {
        hub.HFValidationError: _explain_missing_folder(Path(repository)),
        hub.GatedRepoError: (
            f"gated; accept its license at huggingface.co/{repository} and log in with `hf auth "
            "login`"
        ),
        hub.RepositoryNotFoundError: (
            "no such repository on the hub, or it is private; correct the name, or log in with "
            "`hf auth login`"
        ),
        hub.RevisionNotFoundError: f"no revision {revision}; correct model_revision or remove it",
        (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError): (
            f"{what} is not on this machine and {unreachable}; download it while online with `hf "
            f"download {repository}`, or name a local folder"
        ),
        hub.EntryNotFoundError: f"has no {what}; name the repository of a transformers model",
        hub.HfHubHTTPError: f"the hub answered {status} for {what}; "
        + (
            "log in again with `hf auth login`"
            if status == 401
            else "try again later, or name a local folder"
        ),
        Exception: (
            f"{what} cannot be downloaded ({reason}); check the name and the network, or name a "
            "local folder"
        ),
    }
    return UserError(
        f"{repository}: {next(text for kind, text in sentences.items() if isinstance(error, kind))}"
    )


def _explain_missing_folder(path: Path) -> str:
    """Says what to do about a path that does not exist and cannot be a hub's name."""
    if path.name == EXPORT:
        run = path.parent
        return (
            f"no such folder: {run} has not been trained here, or not to its end; do that first "
            f"(finetune launch --recipe {run.name})"
        )
    return "neither a local folder nor a hub name (owner/name); correct model_name_or_path"


def check_push(repository: str) -> None:
    """Raises `UserError` if `repository` is no valid hub name, or this machine has no hub token."""
    from huggingface_hub import get_token  # takes most of a second
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UserError(
            f"--push-to-hub: {repository}: a name of the hub is expected, such as me/my-model"
        ) from None
    if get_token() is None:
        raise UserError(
            "--push-to-hub: there is no token of the hub here; log in with hf auth login, or set "
            "HF_TOKEN"
        )


def push_folder(folder: Path, repository: str, log: Callable[[str], object] = print) -> bool:
    """Uploads the exported `folder` to the hub's model repository `repository` in one commit.

    A new repository is private. Files that the hub already has from an earlier attempt are not sent
    again.

    Returns True if the upload succeeded. A failure is logged with the command that tries again, and
    not raised: the export on disk is complete.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # takes most of a second

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {str(path.relative_to(folder)): _without_local_base(path, log) for path in files}
    try:
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        api = HfApi()
        api.create_repo(repository, repo_type="model", private=True, exist_ok=True)
        api.create_commit(repository, added, commit_message="Upload model", repo_type="model")
    except Exception as error:  # the hub, the network or the token failed; the export is complete
        reason = first_line(error)
        is_unchanged = all(isinstance(content, Path) for content in contents.values())
        if is_unchanged:
            command = f"hf upload {repository} {shlex.quote(str(folder))} --private"
        else:
            command = "the same command with --overwrite"
        log(f"{repository}: not pushed ({reason}); the export is in {folder}; try again: {command}")
        return False
    log(f"pushed to {api.endpoint}/{repository}")
    return True


def _without_local_base(path: Path, log: Callable[[str], object]) -> Path | bytes:
    """Returns what to upload for the file `path`: `path`, or the changed content of a config.

    An adapter's config that names its base by a folder on this machine is uploaded with that
    folder's name alone, and `log` gets a line about it.
    """
    if path.name != ADAPTER_CONFIG:
        return path
    config = read_json_object(path)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_absolute():
        return path
    base_name = Path(base).name
    log(
        f"{ADAPTER_CONFIG}: the base is uploaded as {base_name}, without its folder here; name one "
        "of the hub there"
    )
    return f"{json.dumps(config | {'base_model_name_or_path': base_name}, indent=2)}\n".encode()


# 64 MiB; the answer with a completion of 100,000 tokens takes a tenth of it
MAX_ANSWER_BYTES = 64 << 20
UNAVAILABLE = 503  # HTTP status
FIRST_ERROR = 400  # HTTP statuses from here on are errors
WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds between requests to a server that is unavailable


def send(
    url: str,
    body: Mapping[str, Any] | None,
    seconds: float,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Sends an HTTP request to `url` and returns the body of the server's answer.

    The request is a POST of `body` as JSON, or a GET if `body` is None. A server that answers
    503 (unavailable) is asked again after each of the WAITS, as long as `seconds` allows.

    Raises:
        UserError: There is no complete answer within `seconds`, the answer has more than
            MAX_ANSWER_BYTES, or it has an error status.
    """
    deadline = time.monotonic() + seconds
    data = None if body is None else json.dumps(body).encode()
    for wait in (*WAITS, None):  # None: the last request
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        try:
            status, content = _fetch(request, deadline)
        except (OSError, ValueError, HTTPException) as error:
            # HTTPException: the server breaks off, or speaks another protocol
            reason = printable(str(getattr(error, "reason", error) or type(error).__name__))[:300]
            if time.monotonic() >= deadline:
                reason = f"timed out after {seconds:g} s"
            raise UserError(f"{url}: no answer: {reason}") from None
        if status == UNAVAILABLE and wait is not None and time.monotonic() + wait < deadline:
            time.sleep(wait)
            continue
        if status >= FIRST_ERROR:
            raise UserError(f"{url}: answered {status}: {_read_message(content)}")
        if len(content) > MAX_ANSWER_BYTES:
            raise UserError(
                f"{url}: its answer has more than {MAX_ANSWER_BYTES:,} bytes; is this the right "
                "server?"
            )
        return content
    raise AssertionError("the last try ends above")


def _fetch(request: urllib.request.Request, deadline: float) -> tuple[int, bytes]:
    """Sends `request`; returns (status of the answer, first MAX_ANSWER_BYTES + 1 bytes of it).

    `deadline` is a time of `time.monotonic`. Timers shut the connection down then, because a
    socket's own timeout applies to each read alone: a server that sends a byte now and then would
    never exceed it. Raises `TimeoutError` after the deadline, else what urllib raises.
    """
    timers: list[threading.Timer] = []

    def start_timer(connection: HTTPConnection) -> None:
        seconds_left = max(0.0, deadline - time.monotonic())
        timer = threading.Timer(seconds_left, _shut_down, [connection.sock])
        timer.daemon = True
        timer.start()
        timers.append(timer)

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            start_timer(self)

    class Encrypted(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            start_timer(self)

    class OpenPlain(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(Plain, request)

    class OpenEncrypted(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(Encrypted, request)

    opener = urllib.request.build_opener(OpenPlain, OpenEncrypted)
    try:
        try:
            answer = opener.open(request, timeout=max(1e-3, deadline - time.monotonic()))
        except urllib.error.HTTPError as error:  # an error status; it also is the answer
            answer = error
        with answer:
            content = bytes(answer.read(MAX_ANSWER_BYTES + 1))
        # after a shutdown by the timer, an incomplete body may look like a complete one
        if time.monotonic() >= deadline:
            raise TimeoutError
        return int(answer.status or 0), content
    finally:
        for timer in timers:
            timer.cancel()


def _shut_down(connection: socket.socket) -> None:
    """Ends the connection, so that a thread that reads from it returns."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read_message(content: bytes) -> str:
    """Returns the message of an OpenAI error answer, else the content; one line of 300 characters
    at most.

    >>> _read_message(b'{"error": {"message": "no such model"}}'), _read_message(b"not found")
    ('no such model', 'not found')
    """
    text = content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return printable(" ".join(text.split()))[:300]
