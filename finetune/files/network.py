"""What goes over the network: files of the hub, up and down, and answers of a server, each failure
a sentence.
"""

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


def find_cache(name: str) -> Path:
    """The folder of this `name` for what can be made again, in the Hugging Face cache."""
    return (
        Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "finetune" / name
    )


@cache
def go_offline_without_network() -> None:
    """Takes this process offline if the hub does not answer one request.

    Otherwise the hub's client asks six times for each file, for half a minute, before it looks into
    the cache.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except (
        Exception
    ):  # of the network, a proxy or a certificate: the file that is asked for may be in the cache
        constants.HF_HUB_OFFLINE = True


def download_file(repository: str, name: str, revision: str | None = None) -> Path:
    """The local path of one file of a hub repository, downloaded unless it is in the cache.

    Raises `UserError` where it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    go_offline_without_network()
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # the hub, the network and the disk each raise their own
        raise hub_error(repository, error, what=name, revision=revision) from None


def download_folder(
    repository: str, patterns: list[str], what: str, revision: str | None = None
) -> Path:
    """The local folder with a hub repository's files that match `patterns`, downloaded unless
    cached.

    Raises `UserError`, which calls them `what`, where they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    go_offline_without_network()
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # as above
        raise hub_error(repository, error, what, revision) from None


def find_local_folder(name: str, revision: str | None = None) -> Path | None:
    """A model's folder without using the network: local, or in the hub's cache; None if there is
    neither.
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
    """The error to raise where the hub did not deliver `what` of `repository`: the reason, and what
    to do about it.
    """
    from huggingface_hub import errors as hub

    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "off", "no")
    if offline:
        unreachable = "HF_HUB_OFFLINE is set"
    else:
        unreachable = "the hub is unreachable"
    status = getattr(getattr(error, "response", None), "status_code", "an error")
    reason = first_line(error)
    # The first class that matches is used, so subclasses come first.
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
    """Raises `UserError` where the hub would refuse an upload to `repository`: by its name, or
    without a token.
    """
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
    """Uploads `folder` to the model repository `repository`, which is private if new, in one
    commit.

    Returns whether that succeeded.

    What the hub has already of an earlier attempt is not sent again. A failure is logged with the
    command that tries again, not raised: the export is complete.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # takes most of a second

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {str(path.relative_to(folder)): _without_local_base(path, log) for path in files}
    try:
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        api = HfApi()
        api.create_repo(repository, repo_type="model", private=True, exist_ok=True)
        api.create_commit(repository, added, commit_message="Upload model", repo_type="model")
    except Exception as error:  # the hub, the network, a token: none of it is the export's fault
        reason = first_line(error)
        is_as_here = all(isinstance(content, Path) for content in contents.values())
        if is_as_here:
            command = f"hf upload {repository} {shlex.quote(str(folder))} --private"
        else:
            command = "the same command with --overwrite"
        log(f"{repository}: not pushed ({reason}); the export is in {folder}; try again: {command}")
        return False
    log(f"pushed to {api.endpoint}/{repository}")
    return True


def _without_local_base(path: Path, log: Callable[[str], object]) -> Path | bytes:
    """Returns the file as it is uploaded: an adapter's config names a base on this machine by the
    folder's name alone.
    """
    if path.name != ADAPTER_CONFIG:
        return path
    config = read_json_object(path)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_absolute():
        return path
    name = Path(base).name
    log(
        f"{ADAPTER_CONFIG}: the base is uploaded as {name}, without its folder here; name one of "
        "the hub there"
    )
    return f"{json.dumps(config | {'base_model_name_or_path': name}, indent=2)}\n".encode()


# of a server's answer; a completion of 100,000 tokens takes a tenth of it
MAX_ANSWER_BYTES = 64 << 20
UNAVAILABLE = 503
FIRST_ERROR = 400
WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before a server that is not available is asked again


def send(
    url: str,
    body: Mapping[str, Any] | None,
    seconds: float,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Sends a POST of `body` as JSON to `url`, or a GET where it is None; returns the server's
    answer.

    One that says that it is not available (503) is asked again, four times at most.

    Raises:
        UserError: No whole answer within `seconds`, one of more than MAX_ANSWER_BYTES, or one that
            is an error, with what the server says of it.
    """
    deadline = time.monotonic() + seconds
    data = None if body is None else json.dumps(body).encode()
    for wait in (*WAITS, None):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        try:
            status, content = _fetch(request, deadline)
        except (
            OSError,
            ValueError,
            HTTPException,
        ) as error:  # the last: it breaks off, or speaks another protocol
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
    """Returns (the status of a server's answer, its first MAX_ANSWER_BYTES + 1 bytes), cut at
    `deadline`.

    The timeout of a socket is that of each piece: a server that sends a byte now and then would
    never meet it.
    """
    timers: list[threading.Timer] = []

    def start_timer(connection: HTTPConnection) -> None:
        left = max(0.0, deadline - time.monotonic())
        timer = threading.Timer(left, _cut, [connection.sock])
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
        def http_open(self, asked: urllib.request.Request) -> Any:
            return self.do_open(Plain, asked)

    class OpenEncrypted(urllib.request.HTTPSHandler):
        def https_open(self, asked: urllib.request.Request) -> Any:
            return self.do_open(Encrypted, asked)

    opener = urllib.request.build_opener(OpenPlain, OpenEncrypted)
    try:
        try:
            answer = opener.open(request, timeout=max(1e-3, deadline - time.monotonic()))
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            content = bytes(answer.read(MAX_ANSWER_BYTES + 1))
        if time.monotonic() >= deadline:  # what was cut may look like an end
            raise TimeoutError
        return int(answer.status or 0), content
    finally:
        for timer in timers:
            timer.cancel()


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read_message(content: bytes) -> str:
    """Reads an error of the OpenAI protocol as a line; else returns how the content begins.

    >>> _read_message(b'{"error": {"message": "no such model"}}'), _read_message(b"not found")
    ('no such model', 'not found')
    """
    text = content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return printable(" ".join(text.split()))[:300]
