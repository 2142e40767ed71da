"""The router of a prefiller and a decoder: both get a prompt at once, and the decoder's answer is the answer.

The prefiller computes the prompt for one token, and the decoder takes its pages. Without a prefiller the decoder
computes prompts itself. A client sees one server, less the routes of operators: behind it every caller looks local.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gapless.base.errors import RequestError
from gapless.base.http import HttpError
from gapless.server.app import DIALECTS, ROUTES
from gapless.server.config import ServerConfig
from gapless.server.endpoint import ClientGone, while_here
from gapless.server.errors import INVALID_REQUEST, ApiError, error_response, form_of, log, to_api_error, unavailable
from gapless.server.limits import guarded, unrooted
from gapless.server.plugins import plugged
from gapless.server.protocol import check_depth
from gapless.server.state import new_id
from gapless.server.upstream import called, passed_through, target_of

APART = ("/v1/completions", "/v1/chat/completions")
"""Routes whose prompts the prefiller computes"""
PASSED_HEADERS = (
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/metrics", "/version"),
    *("/docs", "/openapi.json"),
)
PASSED_BELOW = ("/v1/responses", "/v1/models/")
LEAST_BYTES = 256
"""A shorter body has too few tokens to be worth a transfer."""
HEALTH_SECONDS = 5.0
_NOT_PREFILLED = {
    *("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "best_of"),
    *("min_tokens", "max_completion_tokens"),
}


class PairRouter:
    """The ASGI app in front of two servers, each on a unix socket."""

    def __init__(self, prefill: str, decode: str, kv_socket: str, config: ServerConfig) -> None:
        """`kv_socket` is where the prefiller gives pages. Raises ConfigError for a dialect that cannot be used."""
        self._prefill, self._decode, self._kv_socket, self._root = prefill, decode, kv_socket, config.root_path
        further = plugged(config.dialects, ROUTES)
        self._forms = [dialect.errors for dialect in (*DIALECTS, *further) if dialect.errors is not None]
        below = [entry.path.partition("{")[0] for dialect in further for entry in dialect.routes]
        self._passed_below = (*PASSED_BELOW, *below)
        self._app = guarded(self._answer, config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is to send no others"
        scope["path"] = unrooted(scope["path"], self._root)
        scope["gapless.errors"] = form_of(scope, self._forms)
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope, receive), scope["path"]
        try:
            if path in ("/health", "/ready"):
                await (await self._health())(scope, receive, send)
            elif path in APART or path in PASSED_HEADERS or path.startswith(self._passed_below):
                await self._serve(request, await request.body(), send)
            else:
                raise ApiError(404, "there is no such route on a pair of servers", INVALID_REQUEST, code="not_found")
        except (ClientDisconnect, ClientGone):
            return
        except (ApiError, RequestError) as error:
            await error_response(to_api_error(error), scope)(scope, receive, send)

    async def _health(self) -> Response:
        """Answer 200 while the decoder works, with the state of both."""
        prefill, decode = await asyncio.gather(healthy(self._prefill), healthy(self._decode))
        sides = {"prefill": "up" if prefill else "down", "decode": "up" if decode else "down"}
        return Response(msgspec.json.encode(sides), 200 if decode else 503, media_type="application/json")

    async def _serve(self, request: Request, body: bytes, send: Send) -> None:
        prefill = None
        if request.method == "POST" and request.url.path in APART and len(body) >= LEAST_BYTES:
            check_depth(body)
            prefill, body = self._apart(request, body)
        try:
            await asyncio.sleep(0)  # the prefiller is asked first: it takes longer
            await while_here(self._pass(request, body, send), request.receive, asyncio.timeout(None))
        finally:
            if prefill is not None:
                prefill.cancel()

    def _apart(self, request: Request, body: bytes) -> tuple[asyncio.Task[None] | None, bytes]:
        """Have the prefiller begin; return that, and what the decoder is asked."""
        try:
            asked = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None, body  # the decoder reports the fault
        if not isinstance(asked, dict):
            return None, body
        asked.pop("kv_transfer_params", None)  # it is between us
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return None, msgspec.json.encode(asked)
        name = new_id("pd")
        first = {field: value for field, value in asked.items() if field not in _NOT_PREFILLED}
        first |= {"max_tokens": 1, "n": 1, "stream": False}
        first["kv_transfer_params"] = {"remote_decoder": {"kv_request_id": name}}
        task = asyncio.create_task(self._prefilled(request, msgspec.json.encode(first)))
        where = {"kv_request_id": name, "remote_host": f"unix:{self._kv_socket}", "remote_port": 0}
        return task, msgspec.json.encode({**asked, "kv_transfer_params": {"remote_prefiller": where}})

    async def _prefilled(self, request: Request, body: bytes) -> None:
        """Compute the prompt of a request. If that fails the decoder does."""
        try:
            async with called(self._prefill, "POST", target_of(request), request.headers.raw, body) as answer:
                async for _ in answer.body():
                    pass
        except HttpError as error:
            log.debug("the prefiller failed: %s", error)

    async def _pass(self, request: Request, body: bytes, send: Send) -> None:
        """Pass the decoder's answer through. Raises ApiError while none has begun."""
        missing = unavailable("the decoder does not answer", "decoder_down")
        await passed_through(self._decode, request, body, send, missing)


async def healthy(path: str) -> bool:
    """Return whether the server at this unix socket takes requests."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS), called(path, "GET", "/health") as answer:
            return answer.status == 200
    except (HttpError, TimeoutError):
        return False
