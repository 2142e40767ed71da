"""The one place where an exception becomes an error body, in OpenAI's form or in that of a dialect.

No traceback, path or input ever gets into one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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


def engine_down(cause: Exception | None = None) -> ApiError:
    why = f": {cause}" if cause else ""
    return unavailable(f"the engine stopped and is being restarted{why}", "engine_dead")


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


class ErrorForm(NamedTuple):
    """An API's own form of errors, instead of OpenAI's."""

    owns: Callable[[Scope], bool]
    """Whether a request, to a route of the API or to none, gets its errors in this form"""
    write: Callable[[ApiError, str], tuple[int, bytes]]
    """Returns the status and the body of an error; the text is the request's name."""
    label_header: bytes = b""
    """The header of every answer that bears the request's name, if there is one"""


def form_of(scope: Scope, forms: Iterable[ErrorForm]) -> ErrorForm | None:
    """Return the form of a request's errors; None for OpenAI's."""
    return next((form for form in forms if form.owns(scope)), None)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Make the response of an error, in the form that `scope` names."""
    form: ErrorForm | None = scope.get("gapless.errors")
    label = scope.get("gapless.label", "")
    status, body = (error.status, error.encode()) if form is None else form.write(error, label)
    return Response(body, status, error.headers, media_type="application/json")
