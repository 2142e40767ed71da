"""Errors in the form of Anthropic's Messages API."""

from __future__ import annotations

import re

import msgspec
from starlette.types import Scope

from gapless.server.errors import ApiError, ErrorForm

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


def error_body(error: ApiError, label: str) -> bytes:
    """Return an error as JSON; `label` is the request's name."""
    body = {"type": _kind(error)[1], "message": _text(error)}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": label})


def _kind(error: ApiError) -> tuple[int, str]:
    """Return the status and type of an error."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    return _BY_CODE.get(error.code or "", (error.status, _TYPES.get(error.status, other)))


def _text(error: ApiError) -> str:
    """Return the message. It names the field, since this form has no other place for it."""
    text, param = error.message, error.param
    if error.code == "context_length_exceeded":
        return f"prompt is too long: {text}"  # agents find these words, and shorten the conversation
    if param is None:
        return text
    field = _field(param)
    return field + text.removeprefix(param) if text.startswith(param) else f"{field}: {text}"


def _field(param: str) -> str:
    """Return the field of the Messages API that became this one of a chat request."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", param)
    if dotted.startswith("tools."):
        return dotted.replace(".function.parameters", ".input_schema").replace(".function", "")
    return _FIELDS.get(dotted, dotted)


ERRORS = ErrorForm(
    in_messages_api, lambda error, label: (_kind(error)[0], error_body(error, label)), label_header=b"request-id"
)
