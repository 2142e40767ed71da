"""Turns a handler into a route of an ASGI app: access, errors as bodies, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from time import monotonic_ns
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server.auth import Access, KeyRing
from gapless.server.errors import ApiError, ErrorForm, draining, error_response, log, timed_out, to_api_error
from gapless.server.protocol import R, parse
from gapless.server.state import ServerState, expire
from gapless.server.tracing import RequestSpan, trace_id_of

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class HttpCall:
    """An HTTP request inside a handler."""

    def __init__(self, state: ServerState, request: Request) -> None:
        self.state = state
        self.request = request
        self.tenant = ""
        """A name made from the caller's key; empty where none is needed"""
        self.began = self.arrived = monotonic_ns()
        """When its head was there, and when its body was there too. Time limits count from the one, latencies from the
        other: how fast a client sends is not the server's."""
        self.label: str = request.scope.get("gapless.label", "")
        """The client's name for this request, or the one that the answer's headers give it; '' for none."""
        self.identity = self.model = ""
        """The id of the answer, and the model's name in it."""
        self.span: RequestSpan | None = None
        self.failure = ("", 200)
        """Code and status of the error that the client got instead of an answer, or within it."""

    def failed(self, code: str | None, status: int = 200) -> None:
        self.failure = (code or str(status), status)

    @property
    def trace_id(self) -> str:
        """The trace that this request belongs to; '' for none."""
        return self.span.trace_id if self.span is not None else trace_id_of(self.request.headers)

    async def json(self) -> bytes:
        """The body of a JSON request. Raises ApiError 415 for another content type, or ClientGone."""
        kind = self.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            # Also keeps web pages from posting here as a "simple" request, without asking first.
            raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
        try:
            body = await self.request.body()
        except ClientDisconnect:
            raise ClientGone from None
        self.arrived = monotonic_ns()
        return body

    async def parsed(self, kind: type[R]) -> R:
        """The request in the body, once it is its turn. Raises what `json` and `parse` raise."""
        body = await self.json()
        await self.state.turnstile.enter()
        return parse(body, kind)

    @cached_property
    def deadline(self) -> float | None:
        """Event-loop time of this request's deadline: the smaller of server's and client's limit after it
        began. Raises ApiError for a limit that is none.
        """
        limits = [self.state.config.request_timeout, _client_timeout(self.request.headers.get("x-request-timeout"))]
        given = [limit for limit in limits if limit is not None]
        if not given:
            return None
        return asyncio.get_running_loop().time() + min(given) - (monotonic_ns() - self.began) / 1e9

    async def while_wanted(self, work: Awaitable[T], deadline: float | None) -> T:
        """Await `work` while the client is connected, time is left and the server does not close; else cancel it.

        Raises ClientGone, ApiError 408, or ApiError 503.
        """
        with self.state.open_limit(deadline) as limit:
            try:
                return await while_here(work, self.request.receive, limit)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise (draining() if self.state.closed else timed_out()) from None


Handler = Callable[[HttpCall], Awaitable[ASGIApp]]


class RouteEntry(NamedTuple):
    """A row of the route table. `access` has no default, so that each route decides."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    access: Access
    body: type[msgspec.Struct] | None = None
    """The shape of the request, if it has a body, perhaps with an EXAMPLE; MODEL stands for a served name"""
    generates: bool = False
    listed: bool = True
    """Whether lists of routes name it: some only answer with a refusal."""


class Dialect(NamedTuple):
    """An API: its routes, and its form of errors if that is not OpenAI's."""

    routes: tuple[RouteEntry, ...]
    errors: ErrorForm | None = None


class Endpoint(Route):
    """A route of the server, with the handler of its entry."""

    def __init__(self, entry: RouteEntry, state: ServerState, keys: KeyRing) -> None:
        super().__init__(entry.path, entry.handler, methods=entry.methods)
        self.entry = entry
        self._state = state
        self._keys = keys

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.methods is not None
        if scope["method"] not in self.methods:
            await error_response(_wrong_method(scope["method"], self.methods), scope)(scope, receive, send)
            return
        call = HttpCall(self._state, Request(scope, receive))
        try:
            call.tenant = self._keys.admit(call.request, self.entry.access)
        except ApiError as error:
            await self._refuse(error, call, send)
            return
        with self._state.counted() if self.entry.generates else nullcontext(), self._traced(call):
            await self._answer(call, send)

    async def _answer(self, call: HttpCall, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = True
            if call.span is not None:
                call.span.sending()
            await send(message)

        try:
            response = await self._response(call)
            await response(call.request.scope, call.request.receive, tracked)
        except ClientGone:
            call.failed("client_gone")
        except asyncio.CancelledError:
            call.failed("cancelled")
            raise
        except Exception as error:
            if started:  # too late for a status: the connection ends, which the client can see
                call.failed("broke_off", 500)
                log.exception("an answer broke off")
                raise
            # No name for it here: it would hold the traceback, and that this frame.
            await self._refuse(to_api_error(error), call, send)

    async def _response(self, call: HttpCall) -> ASGIApp:
        """Return what the handler makes; a generation request has a time limit, which includes all its waits."""
        timer = asyncio.timeout_at(call.deadline if self.entry.generates else None)
        try:
            async with timer:
                return await self.entry.handler(call)
        except TimeoutError:
            if timer.expired():
                raise timed_out() from None
            raise

    @contextmanager
    def _traced(self, call: HttpCall) -> Iterator[None]:
        """The span of a generation request, from its arrival until its answer is out or refused."""
        if self._state.tracing is not None and self.entry.generates:
            with _harmless():
                call.span = self._state.tracing.begin(call.request.url.path, call.request.headers, call.began)
        try:
            yield
        finally:
            if call.span is not None:
                with _harmless():
                    call.span.end(*call.failure)

    async def _refuse(self, answer: ApiError, call: HttpCall, send: Send) -> None:
        call.failed(answer.code, answer.status)
        if self.entry.generates and answer.code is not None:
            self._state.metrics.rejected[answer.code] += 1
        with suppress(ConnectionError):
            scope = call.request.scope
            await error_response(answer, scope)(scope, call.request.receive, send)


@contextmanager
def _harmless() -> Iterator[None]:
    """Log a fault of tracing: it must not fail a request."""
    try:
        yield
    except Exception:
        log.exception("a span could not be made")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _wrong_method(method: str, allowed: Iterable[str]) -> ApiError:
    listed = ", ".join(allowed)
    text = f"this route does not take {method[:10]}; it takes {listed}"
    return ApiError(405, text, code="method_not_allowed", headers={"allow": listed})


def _client_timeout(header: str | None) -> float | None:
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ApiError(400, "X-Request-Timeout must be a number of seconds above 0", param="X-Request-Timeout")
    return seconds


async def while_here(work: Awaitable[T], receive: Receive, limit: asyncio.Timeout) -> T:
    """Await `work` while its client is connected and the limit has not passed; else cancel it.

    Raises ClientGone, or TimeoutError.
    """
    gone = asyncio.get_running_loop().create_task(_disconnected(receive, limit))
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired() and gone.done():
            raise ClientGone from None
        raise
    finally:
        gone.cancel()


async def _disconnected(receive: Receive, limit: asyncio.Timeout) -> None:
    """Let the limit pass when the client goes away, or sends an unread body that is too long or late."""
    with suppress(Exception):  # whatever it is, there is no client to answer any more
        while (await receive())["type"] != "http.disconnect":
            pass
    expire(limit)
