"""A client of any OpenAI-compatible server, on the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from gapless.cli.errors import ServerError, UsageError
from gapless.cli.talk import Messages, Piece, Pieces

HOME = "http://localhost:8000"
"""Where `gapless serve` is without flags."""
READ_SECONDS = 600.0
"""A long prompt on a slow machine may take minutes to its first token."""
MAX_BODY = 1 << 20
"""Bytes read of an answer that is not a stream."""
MAX_FILE = 512 << 20


class RemoteTalker:
    """Talks to the server at `url`; `model` defaults to the first that it lists."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, seconds: float = READ_SECONDS
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        except ValueError:
            known = False
        if not known:
            raise UsageError(f"a server's URL must look like {HOME}, got {url!r}")
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._model = model
        self._seconds = seconds

    def chat(self, messages: Messages, fields: dict[str, Any]) -> Pieces:
        return self._stream("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: str, fields: dict[str, Any]) -> Pieces:
        return self._stream("/v1/completions", {"prompt": prompt, **fields})

    def close(self) -> None:
        """Nothing stays open between answers."""

    def model(self) -> str:
        if self._model is None:
            connection, response = self._request("GET", "/v1/models", None)
            try:
                listed = _json(response.read(MAX_BODY)).get("data") or [{}]
                self._model = str(listed[0].get("id", ""))
            finally:
                connection.close()
        return self._model

    def _stream(self, path: str, body: dict[str, Any]) -> Pieces:
        body = {"model": self.model(), **body, "stream": True, "stream_options": {"include_usage": True}}
        connection, response = self._request("POST", path, body)
        # Closing in mid-stream is how a client says that it wants no more. The response may own the socket.
        with contextlib.closing(connection), contextlib.closing(response):
            for event in _events(self._lines(response)):
                yield _piece(event)

    def get(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer to GET whose body waits to be read; the caller closes both."""
        return self._request("GET", path, None)

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            while line := response.readline():
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the server's answer broke off: {error or type(error).__name__}") from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._seconds)
        where = f"{self._parts.scheme}://{self._parts.netloc}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"no answer from {where}: {error}; is a server running there? (gapless serve)") from error
        if response.status != 200:
            message = _error_text(response.read(MAX_BODY)) or response.reason
            connection.close()
            raise ServerError(f"{where}{path} answered {response.status}: {message}")
        return connection, response


def fetch(url: str, path: str, api_key: str | None = None, seconds: float = READ_SECONDS) -> bytes:
    """The body of one GET, of at most MAX_FILE bytes. Raises ServerError, or UsageError for a URL that is none."""
    connection, response = RemoteTalker(url, api_key, seconds=seconds).get(path)
    with contextlib.closing(connection), contextlib.closing(response):
        try:
            data = response.read(MAX_FILE + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the server's answer broke off: {error or type(error).__name__}") from error
    if len(data) > MAX_FILE:
        raise ServerError(f"the answer is longer than {MAX_FILE >> 20} MiB")
    return data


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]."""
    data: list[bytes] = []
    for line in lines:
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            text, data = b"\n".join(data), []
            if text == b"[DONE]":
                return
            yield _json(text)
    raise ServerError("the server's answer broke off before its end")


def _piece(event: dict[str, Any]) -> Piece:
    if event.get("error"):
        raise ServerError(f"the server stopped answering: {_message(event)}")
    usage = event.get("usage") or {}
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return Piece(text, usage.get("completion_tokens"), choice.get("finish_reason"))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ServerError(f"the server did not answer in JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ServerError(f"the server answered with something unexpected: {data[:80]!r}")
    return value


def _error_text(data: bytes) -> str:
    if data.lstrip()[:5].lower() in (b"<!doc", b"<html"):  # a page for people; the status says as much
        return ""
    try:
        return _message(_json(data))
    except ServerError:
        return data[:200].decode("utf-8", "replace").strip()


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error or body)
