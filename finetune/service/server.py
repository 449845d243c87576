"""The service over HTTP: Starlette routes requests to `ENDPOINTS`, and uvicorn serves them."""

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from finetune.constants import Fields, Record
from finetune.errors import UserError
from finetune.service.endpoints import ENDPOINTS, Handler
from finetune.service.ledger import Result
from finetune.service.service import Service
from finetune.service.wire import read_forward_backward

API = "/api/v1/"
LONGEST_WAIT_SECONDS = 20.0  # a client that waits longer for a result has to ask again
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


Act = Callable[[Fields], Awaitable[Response]]
Decode = Callable[[bytes], Record]
# The decoders of bodies that are not JSON, by path.
DECODERS: Mapping[str, Decode] = {"forward_backward": read_forward_backward}


class Border:
    """The border between HTTP and the service: checks senders and sizes, decodes, and waits."""

    def __init__(self, service: Service, key: str | None) -> None:
        """Makes the border of a service.

        key: The key that clients must send; None: none, and they must be on this machine.
        """
        self._service = service
        self._key = key
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        service.ledger.on_change = self._wake

    def make_app(self) -> Starlette:
        """Makes the application, with a route for each endpoint."""
        acts: dict[tuple[str, str], Act] = {
            key: partial(self._call, handler) for key, handler in ENDPOINTS.items()
        }
        acts["POST", "retrieve_future"] = self._retrieve
        routes = []
        for (method, path), act in acts.items():
            serve = partial(self._serve, act, DECODERS.get(path, _decode))
            routes.append(Route(API + path, serve, methods=[method]))
        return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})

    async def _serve(self, act: Act, decode: Decode, request: Request) -> Response:
        """Answers a request by `act`, or with the status of its error."""
        try:
            self._check_sender(request)
            body = await self._read_body(request)
            answer = await act({**decode(body), **request.path_params})
        except UserError as error:
            return _refuse(404 if "is not known here" in str(error) else 422, str(error))
        except PermissionError as error:
            return _refuse(401, str(error))
        return answer

    def _check_sender(self, request: Request) -> None:
        if self._key is None:
            # a page in a browser may reach 127.0.0.1 by its own host name (DNS rebinding)
            if request.url.hostname not in LOCAL:
                raise PermissionError(f"host: {request.url.hostname!r} is not this machine")
            return
        given = request.headers.get("X-API-Key", "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise PermissionError("X-API-Key: is not the server's key")

    async def _read_body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._service.most_body_bytes:
                raise UserError(f"the body is larger than {self._service.most_body_bytes} bytes")
        return bytes(body)

    async def _call(self, handler: Handler, sent: Fields) -> Response:
        return JSONResponse(await run_in_threadpool(handler, self._service, sent))

    async def _retrieve(self, sent: Fields) -> Response:
        """Waits for a result; after LONGEST_WAIT_SECONDS asks the client to try again."""
        name = sent.get("request_id")
        clock = asyncio.get_running_loop().time
        deadline = clock() + LONGEST_WAIT_SECONDS
        while True:
            change = self._next_change()
            result: Result | None = await run_in_threadpool(self._service.ledger.result, name)
            if result is not None:
                return Response(result.content, media_type=result.media)
            if clock() >= deadline:
                break
            await asyncio.wait([change], timeout=deadline - clock())
        waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
        return JSONResponse(waiting, 408)

    def _next_change(self) -> "asyncio.Future[None]":
        """Returns a future that is done after the ledger's next result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.append((loop, future))
        return future

    def _wake(self) -> None:
        """Ends the waiting for a result. The thread that made it calls this."""
        with self._lock:
            waiting = self._waiting
            self._waiting = []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, future)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _refuse(status: int, error: str) -> Response:
    return JSONResponse({"error": error, "category": "user", "detail": error}, status)


async def _unknown(request: Request, _: Exception) -> Response:
    return _refuse(404, f"{request.method} {request.url.path}: is not served")


def _decode(body: bytes) -> Record:
    """Decodes the JSON object of a request. Raises `UserError` for any other body."""
    try:
        sent = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON") from None
    if not isinstance(sent, dict):
        raise UserError("the body is no JSON object")
    return sent


def start_server(app: Starlette, host: str, port: int) -> tuple[uvicorn.Server, int]:
    """Serves in a thread; returns (the server, its port).

    Raises `UserError` where the port is taken or the host is not this machine.
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
