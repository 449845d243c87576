"""The service over HTTP: Starlette routes requests to `ENDPOINTS`. uvicorn runs it."""

import asyncio
import hmac
import json
import socket
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from finetune.errors import UserError
from finetune.service.endpoints import ENDPOINTS, Handler
from finetune.service.ledger import REFUSED, Result
from finetune.service.service import Service
from finetune.service.wire import read_forward_backward

API = "/api/v1/"
LONGEST_WAIT_SECONDS = 20.0  # a client that waits longer for a result has to ask again
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")  # hosts in URLs that mean this machine

Act = Callable[[Mapping[str, Any]], Awaitable[Response]]  # decoded request -> response
Decode = Callable[[bytes], dict[str, Any]]  # a request's body -> its fields


class Border:
    """The border between HTTP and the service: checks senders and sizes, decodes, and waits.

    It runs in the thread of the HTTP server. The endpoints run in a pool of threads, and the
    requests that they accept in the main thread.
    """

    def __init__(self, service: Service, key: str | None) -> None:
        """Makes the border of a service.

        key: The key that clients must send; None: they need none, but must be on this machine.
        """
        self._service = service
        self._key = key
        self._loop: asyncio.AbstractEventLoop | None = None  # in which requests are answered
        self._change = asyncio.Event()  # the next new result of the ledger, of any request
        service.ledger.on_change = self._wake

    def make_app(self) -> Starlette:
        """Makes the application, with a route for each endpoint."""
        acts: dict[tuple[str, str], Act] = {
            endpoint: partial(self._call_handler, handler)
            for endpoint, handler in ENDPOINTS.items()
        }
        acts["POST", "retrieve_future"] = self._retrieve
        routes = []
        for (method, path), act in acts.items():
            decode = read_forward_backward if path == "forward_backward" else _decode_json
            serve = partial(self._serve, act, decode)
            routes.append(Route(API + path, serve, methods=[method]))
        return Starlette(
            routes=routes, exception_handlers={404: _answer_unknown, 405: _answer_unknown}
        )

    async def _serve(self, act: Act, decode: Decode, request: Request) -> Response:
        """Checks and decodes a request, and answers it by `act`, or with an error."""
        try:
            self._check_sender(request)
            body = await self._read_body(request)
            answer = await act({**decode(body), **request.path_params})
        except UserError as error:
            is_unknown = "is not known here" in str(error)  # the words of `Ledger`
            return _make_error(404 if is_unknown else 422, str(error))
        except PermissionError as error:
            return _make_error(401, str(error))
        except REFUSED as error:
            sentence = f"the server's ledger cannot be written ({error}); try again later"
            return _make_error(503, sentence, "server")
        except sqlite3.ProgrammingError:  # the ledger is closed
            sentence = "the server is stopping; start it and send the request again"
            return _make_error(503, sentence, "server")
        return answer

    def _check_sender(self, request: Request) -> None:
        """Raises `PermissionError` for a request without the server's key.

        If the server has no key, raises it for a request whose URL names another machine.
        """
        if self._key is None:
            # a page in a browser may reach 127.0.0.1 by its own host name (DNS rebinding)
            if request.url.hostname not in LOCAL:
                raise PermissionError(f"host: {request.url.hostname!r} is not this machine")
            return
        sent_key = request.headers.get("X-API-Key", "")
        if not hmac.compare_digest(sent_key.encode(), self._key.encode()):
            raise PermissionError("X-API-Key: is not the server's key")

    async def _read_body(self, request: Request) -> bytes:
        """Reads the body of a request. Raises `UserError` once it is too large."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._service.most_body_bytes:
                raise UserError(f"the body is larger than {self._service.most_body_bytes} bytes")
        return bytes(body)

    async def _call_handler(self, handler: Handler, sent: Mapping[str, Any]) -> Response:
        """Calls an endpoint's handler, in a thread because it may wait for the disk or a lock."""
        return JSONResponse(await run_in_threadpool(handler, self._service, sent))

    async def _retrieve(self, sent: Mapping[str, Any]) -> Response:
        """Answers with a request's result once there is one.

        After LONGEST_WAIT_SECONDS it asks the client to try again.
        """
        name = sent.get("request_id")
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        deadline = clock() + LONGEST_WAIT_SECONDS
        while True:
            change = self._change  # first, so that a result after the next line ends the wait
            result: Result | None = await run_in_threadpool(self._service.ledger.result, name)
            if result is not None:
                return Response(result.content, media_type=result.media)
            if clock() >= deadline:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), deadline - clock())
        waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
        return JSONResponse(waiting, 408)

    def _wake(self) -> None:
        """Ends the waits of `_retrieve`. The thread that wrote a result calls this."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._replace_change)

    def _replace_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _make_error(status: int, error: str, category: str = "user") -> Response:
    """Makes the API's answer to a request that is refused. `category`: as in `Service._fail`."""
    return JSONResponse({"error": error, "category": category, "detail": error}, status)


async def _answer_unknown(request: Request, _: Exception) -> Response:
    """Answers a request whose path or method no route has."""
    return _make_error(404, f"{request.method} {request.url.path}: is not served")


def _decode_json(body: bytes) -> dict[str, Any]:
    """Decodes a body that is a JSON object, or empty. Raises `UserError` for any other."""
    try:
        sent = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON") from None
    if not isinstance(sent, dict):
        raise UserError("the body is no JSON object")
    return sent


def start_server(app: Starlette, host: str, port: int) -> tuple[uvicorn.Server, int]:
    """Serves an application in a thread of its own.

    Returns:
        The server, and its port, which is chosen here if `port` is 0.

    Raises:
        UserError: The port is taken, or the host is not this machine.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"{host}:{port}: cannot be listened at: {error.strerror}; choose another --port"
        ) from None
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    threading.Thread(target=server.run, args=([listener],), daemon=True, name="http").start()
    return server, listener.getsockname()[1]
