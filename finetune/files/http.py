"""Requests to a server over HTTP: a body of JSON in, bytes out, every failure one sentence. Imports no torch."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from finetune.errors import UserError


def send(url: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
    """What `url` answers: to a POST of `body` as JSON, or to a GET where it is None.

    Raises:
        UserError: No answer within `seconds`, or one that is an error, with what the server says of it.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: answered {error.code}: {_message(error.read(1 << 16))}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{url}: no answer: {getattr(error, 'reason', error)}") from None


def _message(content: bytes) -> str:
    """What an error of the OpenAI protocol says, in a line; else how the content begins.

    >>> _message(b'{"error": {"message": "no such model"}}'), _message(b"not found")
    ('no such model', 'not found')
    """
    text = content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:300]
