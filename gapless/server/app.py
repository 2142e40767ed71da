"""App: the route table and the layers around it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, partial

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.engine.async_llm import AsyncLLM
from gapless.server import debug, openapi, ops, pages
from gapless.server.auth import Access, KeyRing
from gapless.server.config import ServerConfig
from gapless.server.dialects import chat, completions, messages, responses
from gapless.server.endpoint import Endpoint, HttpCall, RouteEntry
from gapless.server.errors import ApiError, error_response, form_of
from gapless.server.limits import guarded, label_of, unrooted
from gapless.server.plugins import plugged
from gapless.server.protocol import (
    AbortRequests,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from gapless.server.state import ServerState
from gapless.server.tracing import Tracing
from gapless.server.upstream import asked_of

MAX_NAMED = 8
"""Routes that a 404 names"""
OTHER_KINDS = (
    *("/v1/embeddings", "/embeddings", "/embed", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/moderations", "/v1/images/generations"),
    *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
)
"""Routes of models that do not generate text"""


DIALECTS = (chat.CHAT, completions.COMPLETIONS, messages.MESSAGES, responses.RESPONSES)


async def openapi_json(call: HttpCall) -> ASGIApp:
    """Describe all routes, as an OpenAPI document."""
    return Response((await _description(call))[1], media_type="application/json")


async def docs(call: HttpCall) -> ASGIApp:
    """Describe all routes, as a page."""
    return Response((await _description(call))[0], headers=openapi.PAGE_HEADERS)


async def _description(call: HttpCall) -> tuple[str, bytes]:
    entries = tuple(route.entry for route in call.request.scope["router"].routes)
    return await call.state.llm.in_pool(partial(_described, entries, call.state.config.root_path))


@cache
def _described(entries: tuple[RouteEntry, ...], root: str) -> tuple[str, bytes]:
    """The description of the routes as a page and as JSON, made once: it takes longer than a token."""
    described = openapi.document(entries, root)
    return openapi.page(described), msgspec.json.encode(described)


ROUTES = (
    *(entry for dialect in DIALECTS for entry in dialect.routes),
    *(RouteEntry(path, ("POST",), ops.other_kinds, Access.USER, listed=False) for path in OTHER_KINDS),
    RouteEntry("/v1/models", ("GET",), ops.models, Access.USER),
    RouteEntry("/v1/models/{name:path}", ("GET",), ops.model, Access.USER),
    RouteEntry("/v1/load_lora_adapter", ("POST",), ops.load_adapter, Access.OPERATOR, LoadAdapterRequest),
    RouteEntry("/v1/unload_lora_adapter", ("POST",), ops.unload_adapter, Access.OPERATOR, UnloadAdapterRequest),
    RouteEntry("/update_weights_from_disk", ("POST",), ops.update_weights, Access.OPERATOR, UpdateWeightsRequest),
    RouteEntry("/pause", ("POST",), ops.pause, Access.OPERATOR),
    RouteEntry("/resume", ("POST",), ops.resume, Access.OPERATOR),
    RouteEntry("/is_paused", ("GET",), ops.is_paused, Access.OPERATOR),
    RouteEntry("/abort_requests", ("POST",), ops.abort_requests, Access.OPERATOR, AbortRequests),
    RouteEntry("/reset_prefix_cache", ("POST",), ops.reset_prefix_cache, Access.OPERATOR),
    RouteEntry("/flush_cache", ("POST",), ops.reset_prefix_cache, Access.OPERATOR),
    RouteEntry("/tokenize", ("POST",), ops.tokenize, Access.USER, TokenizeRequest),
    RouteEntry("/detokenize", ("POST",), ops.detokenize, Access.USER, DetokenizeRequest),
    RouteEntry("/tokenizer_info", ("GET",), ops.tokenizer_info, Access.OPERATOR),
    RouteEntry("/metrics", ("GET",), ops.metrics_page, Access.USER),
    RouteEntry("/debug/steps", ("GET",), debug.steps, Access.OPERATOR),
    RouteEntry("/debug/trace", ("GET",), debug.trace, Access.OPERATOR),
    RouteEntry("/debug/kv", ("GET",), debug.kv, Access.OPERATOR),
    RouteEntry("/debug/history", ("GET",), debug.history, Access.OPERATOR),
    RouteEntry("/debug/requests", ("GET",), debug.requests, Access.OPERATOR),
    RouteEntry("/server_info", ("GET",), debug.server_info, Access.OPERATOR),
    RouteEntry("/", ("GET",), pages.root, Access.PUBLIC),
    RouteEntry("/ui", ("GET",), pages.page, Access.PUBLIC),
    RouteEntry("/ui/", ("GET",), pages.page, Access.PUBLIC, listed=False),
    RouteEntry("/ui/{name:path}", ("GET",), pages.page_file, Access.PUBLIC, listed=False),
    RouteEntry("/docs", ("GET",), docs, Access.PUBLIC),
    RouteEntry("/openapi.json", ("GET",), openapi_json, Access.PUBLIC),
    RouteEntry("/version", ("GET",), ops.version, Access.USER),
    RouteEntry("/load", ("GET",), ops.load, Access.USER),
    RouteEntry("/health", ("GET",), ops.health, Access.PUBLIC),
    RouteEntry("/ping", ("GET", "POST"), ops.health, Access.PUBLIC),
    RouteEntry("/ready", ("GET",), ops.ready, Access.PUBLIC),
)


class App:
    """The ASGI app of one server, which names each request and counts the answers.

    `state` is for the code that starts and stops it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        model_name: str = "model",
        tracing: Tracing | None = None,
        first: str = "",
    ) -> None:
        """`llm` is started or starting; `model_name` is answered to unless the config has other names. A further front
        passes on, to the unix socket `first` of the first front, all requests that do not generate.

        Raises ConfigError for a dialect that cannot be used.
        """
        self.state = state = ServerState(llm, config, model_name, tracing)
        keys = KeyRing(config.api_key, config.operator_key)
        further = plugged(config.dialects, ROUTES)
        entries = (*ROUTES, *(entry for dialect in further for entry in dialect.routes))
        self._forms = [dialect.errors for dialect in (*DIALECTS, *further) if dialect.errors is not None]
        if first:
            ask = asked_of(first)
            entries = tuple([entry if entry.generates else entry._replace(handler=ask) for entry in entries])
        self.routes = [Endpoint(entry, state, keys) for entry in entries]
        # Without the layers of a Starlette: an endpoint answers its own errors. Without redirects: they have no error
        # body, and no key was asked for.
        self._router = Router(self.routes, redirect_slashes=False, default=partial(_no_route, entries))
        self._app = guarded(self._router, config)

    async def for_further(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a further front, which has checked the caller's key and limits, counts the answer and adds headers."""
        scope["gapless.errors"], scope["gapless.label"] = form_of(scope, self._forms), ""
        await self._router(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is to send no others"
        scope["path"] = unrooted(scope["path"], self.state.config.root_path)
        form = scope["gapless.errors"] = form_of(scope, self._forms)
        label = label_of(Headers(scope=scope).get("x-request-id", ""))
        echoed = bool(label) or self.state.config.enable_request_id_headers
        names = [b"x-request-id"] * echoed + ([form.label_header] if form and form.label_header else [])
        if names and not label:
            label = secrets.token_hex(16)
        scope["gapless.label"] = label

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                handler = route.path if isinstance(route, Endpoint) else "none"
                method = scope["method"] if scope["method"] in _METHODS else "OTHER"
                self.state.metrics.http[handler, method, f"{message['status'] // 100}xx"] += 1
                message["headers"] = [*message.get("headers", ()), *((name, label.encode()) for name in names)]
            await send(message)

        await self._app(scope, receive, counted)


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))


async def _no_route(entries: Sequence[RouteEntry], scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(404, _instead_of(scope["path"], entries), code="not_found")
    await error_response(error, scope)(scope, receive, send)


def _instead_of(path: str, entries: Sequence[RouteEntry]) -> str:
    """Return a 404's hint: the nearest route, else routes of the same family, else the most wanted ones."""
    listed = {entry.path.replace(":path", ""): entry for entry in entries if entry.listed}
    shown = [f"{' '.join(entry.methods)} {name}" for name, entry in listed.items()]
    near = get_close_matches(path.rstrip("/"), listed, n=1, cutoff=0.75)
    if near:
        return f"there is no such route; the nearest is {shown[list(listed).index(near[0])]} (all: GET /openapi.json)"
    family = "/".join(path.split("/")[:2]) + "/"
    kin = [line for line, name in zip(shown, listed, strict=True) if name.startswith(family)] if family != "//" else []
    return f"there is no such route; there are: {', '.join((kin or shown)[:MAX_NAMED])} (all: GET /openapi.json)"
