"""App: the route table and the layers around it."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from gapless.engine.async_llm import AsyncLLM
from gapless.server import debug, ops, pages
from gapless.server.auth import Access, KeyRing
from gapless.server.chat import chat_completions
from gapless.server.completions import completions
from gapless.server.config import ServerConfig
from gapless.server.endpoint import Endpoint, RouteEntry
from gapless.server.errors import ApiError, error_response, in_messages_api
from gapless.server.limits import guarded
from gapless.server.messages import count_tokens, messages
from gapless.server.responses import responses, stored_responses
from gapless.server.state import ServerState
from gapless.server.tracing import Tracing

MAX_LABEL = 128


ROUTES = (
    RouteEntry("/v1/chat/completions", ("POST",), chat_completions, Access.USER, generates=True),
    RouteEntry("/v1/completions", ("POST",), completions, Access.USER, generates=True),
    RouteEntry("/v1/messages", ("POST",), messages, Access.USER, generates=True),
    RouteEntry("/v1/messages/count_tokens", ("POST",), count_tokens, Access.USER),
    RouteEntry("/v1/responses", ("POST",), responses, Access.USER, generates=True),
    RouteEntry("/v1/responses/{id:path}", ("GET", "DELETE", "POST"), stored_responses, Access.USER),
    RouteEntry("/v1/embeddings", ("POST",), ops.embeddings, Access.USER),
    RouteEntry("/v1/rerank", ("POST",), ops.embeddings, Access.USER),
    RouteEntry("/v1/score", ("POST",), ops.embeddings, Access.USER),
    RouteEntry("/v1/models", ("GET",), ops.models, Access.USER),
    RouteEntry("/v1/models/{name:path}", ("GET",), ops.model, Access.USER),
    RouteEntry("/v1/load_lora_adapter", ("POST",), ops.load_adapter, Access.OPERATOR),
    RouteEntry("/v1/unload_lora_adapter", ("POST",), ops.unload_adapter, Access.OPERATOR),
    RouteEntry("/update_weights_from_disk", ("POST",), ops.update_weights, Access.OPERATOR),
    RouteEntry("/pause", ("POST",), ops.pause, Access.OPERATOR),
    RouteEntry("/resume", ("POST",), ops.resume, Access.OPERATOR),
    RouteEntry("/is_paused", ("GET",), ops.is_paused, Access.OPERATOR),
    RouteEntry("/abort_requests", ("POST",), ops.abort_requests, Access.OPERATOR),
    RouteEntry("/reset_prefix_cache", ("POST",), ops.reset_prefix_cache, Access.OPERATOR),
    RouteEntry("/flush_cache", ("POST",), ops.reset_prefix_cache, Access.OPERATOR),
    RouteEntry("/tokenize", ("POST",), ops.tokenize, Access.USER),
    RouteEntry("/detokenize", ("POST",), ops.detokenize, Access.USER),
    RouteEntry("/tokenizer_info", ("GET",), ops.tokenizer_info, Access.OPERATOR),
    RouteEntry("/metrics", ("GET",), ops.metrics_page, Access.USER),
    RouteEntry("/debug/steps", ("GET",), debug.steps, Access.OPERATOR),
    RouteEntry("/debug/trace", ("GET",), debug.trace, Access.OPERATOR),
    RouteEntry("/debug/kv", ("GET",), debug.kv, Access.OPERATOR),
    RouteEntry("/debug/requests", ("GET",), debug.requests, Access.OPERATOR),
    RouteEntry("/server_info", ("GET",), debug.server_info, Access.OPERATOR),
    RouteEntry("/ui", ("GET",), pages.page, Access.PUBLIC),
    RouteEntry("/ui/", ("GET",), pages.page, Access.PUBLIC),
    RouteEntry("/ui/{name:path}", ("GET",), pages.page_file, Access.PUBLIC),
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
        self, llm: AsyncLLM, config: ServerConfig, model_name: str = "model", tracing: Tracing | None = None
    ) -> None:
        """`llm` is started or starting; `model_name` is answered to unless the config has other names."""
        self.state = state = ServerState(llm, config, model_name, tracing)
        keys = KeyRing(config.api_key, config.operator_key)
        self.routes = [Endpoint(entry, state, keys) for entry in ROUTES]
        # Without the layers of a Starlette: an endpoint answers its own errors. Without redirects: they have no error
        # body, and no key was asked for.
        self._app = guarded(Router(self.routes, redirect_slashes=False, default=_no_route), config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is to send no others"
        given = _label(scope)
        label = given or secrets.token_hex(16)
        scope["gapless.label"] = label
        echoed = bool(given) or self.state.config.enable_request_id_headers

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                handler = route.path if isinstance(route, Endpoint) else "none"
                method = scope["method"] if scope["method"] in _METHODS else "OTHER"
                self.state.metrics.http[handler, method, f"{message['status'] // 100}xx"] += 1
                names = [b"x-request-id"] * echoed + [b"request-id"] * in_messages_api(scope)
                message["headers"] = [*message.get("headers", ()), *((name, label.encode()) for name in names)]
            await send(message)

        await self._app(scope, receive, counted)


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))


def _label(scope: Scope) -> str:
    text = Headers(scope=scope).get("x-request-id", "")
    return text if len(text) <= MAX_LABEL and text.isascii() and text.isprintable() else ""


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    routes = ", ".join(f"{' '.join(entry.methods)} {entry.path.replace(':path', '')}" for entry in ROUTES)
    error = ApiError(404, f"there is no such route; there are: {routes}", code="not_found")
    await error_response(error, scope)(scope, receive, send)
