"""The one place where an exception becomes an error body, in OpenAI's form or in that of Anthropic's Messages API.

No traceback, path or input ever gets into one.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from gapless.base.errors import EngineDeadError, EngineError, QueueFullError, RequestError, StalledError

log = logging.getLogger("gapless.server")

MAX_MESSAGE = 1_000
RETRY_SECONDS = 2

INVALID_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """An answer other than success: HTTP status and the four fields of an OpenAI error."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message, self.type, self.param, self.code = message[:MAX_MESSAGE], type, param, code
        self.headers = dict(headers or {})

    def encode(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})


def unavailable(message: str, code: str) -> ApiError:
    """503 with Retry-After."""
    return ApiError(503, message, "service_unavailable", code=code, headers={"retry-after": str(RETRY_SECONDS)})


def draining() -> ApiError:
    return unavailable("the server is shutting down", "server_shutting_down")


def engine_down() -> ApiError:
    return unavailable("the engine stopped and is being restarted", "engine_dead")


def model_not_found(served: Sequence[str]) -> ApiError:
    text = f"the model is not served here; served as model: {', '.join(served)}"
    return ApiError(404, text, param="model", code="model_not_found")


def timed_out() -> ApiError:
    return ApiError(408, "the request did not finish within its time limit", "timeout_error", code="timeout")


def unsupported(name: str, detail: str = "") -> RequestError:
    """Make the error for a field of the API that this engine does not support."""
    return RequestError(f"{name} is not supported by this server{detail}", name, "unsupported_parameter")


def to_api_error(error: BaseException) -> ApiError:
    """Return what the client sees of an exception; the rest goes to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return ApiError(status, str(error), INVALID_REQUEST, error.param, error.code)
    if isinstance(error, msgspec.ValidationError):
        return _wrong_shape(str(error))
    if isinstance(error, (msgspec.DecodeError, RecursionError, UnicodeDecodeError)):
        return ApiError(400, "the body is not valid JSON", INVALID_REQUEST, code="invalid_json")
    if isinstance(error, QueueFullError):
        return unavailable("the queue of waiting requests is full; try again later", "queue_full")
    if isinstance(error, (EngineDeadError, StalledError)):
        return engine_down()
    return _incident(error)


def _incident(error: BaseException) -> ApiError:
    """A fault of ours: the client gets a number to quote, the log gets everything."""
    number = secrets.token_hex(6)
    log.error("incident %s: %s: %s", number, type(error).__name__, error, exc_info=error)
    what = "the engine could not complete this request" if isinstance(error, EngineError) else "internal error"
    return ApiError(500, f"{what} (incident {number})", "server_error", code="internal_error")


def _wrong_shape(message: str) -> ApiError:
    """msgspec names the field at the end of its message: '... - at `$.messages[0].role`'. Here it comes first."""
    what, found, path = message.replace("`key` in `$", "`$").rpartition(" - at `$")
    param = path.rstrip("`").lstrip(".") if found else _missing(message)
    return ApiError(400, f"{param}: {what[0].lower()}{what[1:]}" if found and param else message, param=param or None)


def _missing(message: str) -> str | None:
    _, found, rest = message.partition("missing required field `")
    return rest.partition("`")[0] if found else None


# The form of Anthropic's Messages API

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_BY_CODE = {"queue_full": (529, "overloaded_error"), "timeout": (504, "timeout_error")}
"""Errors that have another status in this API"""
_FIELDS = {"stop": "stop_sequences", "continue_final_message": "messages"}
"""Fields of a chat request that have another name in this API"""


def in_messages_api(scope: Scope) -> bool:
    """Return whether a request is one of the Messages API, served or not; the models' routes are of both APIs."""
    path = f"{scope['path']}/"
    asked = path.startswith("/v1/models/") and any(name == b"anthropic-version" for name, _ in scope["headers"])
    return asked or path.startswith("/v1/messages/")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Make the response of an error, in the form of the API that the request's path is in."""
    if in_messages_api(scope):
        status, body = _messages_kind(error)[0], error_body(error, scope.get("gapless.label", ""))
    else:
        status, body = error.status, error.encode()
    return Response(body, status, error.headers, media_type="application/json")


def error_body(error: ApiError, label: str) -> bytes:
    """Return an error as JSON; `label` is the request's name."""
    body = {"type": _messages_kind(error)[1], "message": _messages_text(error)}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": label})


def _messages_kind(error: ApiError) -> tuple[int, str]:
    """Return the status and type of an error."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    return _BY_CODE.get(error.code or "", (error.status, _TYPES.get(error.status, other)))


def _messages_text(error: ApiError) -> str:
    """Return the message. It names the field, since this form has no other place for it."""
    text, param = error.message, error.param
    if error.code == "context_length_exceeded":
        return f"prompt is too long: {text}"  # agents find these words, and shorten the conversation
    if param is None:
        return text
    field = _messages_field(param)
    return field + text.removeprefix(param) if text.startswith(param) else f"{field}: {text}"


def _messages_field(param: str) -> str:
    """Return the field of the Messages API that became this one of a chat request."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", param)
    if dotted.startswith("tools."):
        return dotted.replace(".function.parameters", ".input_schema").replace(".function", "")
    return _FIELDS.get(dotted, dotted)
