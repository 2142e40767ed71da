"""A server that requests go to: its address, its model, and the form that requests must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gapless.base.config import check_fields, flag
from gapless.base.errors import ConfigError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
BACKENDS = {**{name: name for name in ENDPOINTS}, "vllm": "openai", "sglang-oai": "openai"}
BACKENDS |= {"vllm-chat": "openai-chat", "sglang-oai-chat": "openai-chat"}
SIX_HOURS = 6 * 3600.0
DEFAULT_URL = "http://localhost:8000"
"""Default address of `gapless serve`."""

server_flag, request_flag, result_flag = (partial(flag, group=group) for group in ("Server", "Requests", "Results"))

PromptContent = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""A prompt: text, token ids, or chat messages."""


class Address(NamedTuple):
    """The parts of a URL; `prefix` is its path without a trailing /v1."""

    host: str
    port: int
    tls: bool
    prefix: str


@dataclass(frozen=True)
class Target:
    """A server and how to ask it.

    `backend` is openai (completions) or openai-chat. `omit` names optional fields that this server refuses.
    """

    base_url: str = "http://127.0.0.1:8000"
    model: str = ""
    api_key: str = field(default="", repr=False)
    backend: str = "openai"
    endpoint: str = ""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ignore_eos: bool = True
    insecure: bool = False
    timeout: float = SIX_HOURS
    omit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"backend must be one of {', '.join(ENDPOINTS)}, got {self.backend!r}")
        self.address()
        for name, value in self.headers:
            if any(c in name + value for c in "\r\n") or not name or ":" in name:
                raise ConfigError(f"header {name!r} cannot be sent: no line breaks, and no colon in its name")

    @property
    def chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def full_answers(self) -> bool:
        """Whether every answer should have its full length."""
        return self.ignore_eos and "ignore_eos" not in self.omit

    def address(self) -> Address:
        """Split the URL. Raises ConfigError when it is no http or https URL."""
        parts = urlsplit(self.base_url if "://" in self.base_url else f"http://{self.base_url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"a server's URL must look like {DEFAULT_URL}, got {self.base_url!r}")
        tls = parts.scheme == "https"
        return Address(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    def body(self, content: PromptContent, output_len: int) -> bytes:
        """Return the JSON of one streaming request for `output_len` tokens."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": _as_messages(content) if self.chat else _as_prompt(content),
            "max_tokens": output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }
        return json.dumps({k: v for k, v in fields.items() if k not in self.omit}).encode()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a whole HTTP/1.1 request."""
        at = self.address()
        name = f"[{at.host}]" if ":" in at.host else at.host
        lines = [
            f"{method} {at.prefix}{path} HTTP/1.1",
            f"Host: {name}:{at.port}",
            "Accept: text/event-stream, application/json",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
            *(f"{key}: {value}" for key, value in self.headers),
            *(["Content-Type: application/json", f"Content-Length: {len(body)}"] if method != "GET" else []),
        ]
        return "\r\n".join((*lines, "", "")).encode() + body

    def generation(self, content: PromptContent, output_len: int) -> bytes:
        """Return the whole HTTP request for one generation."""
        return self.request("POST", self.endpoint or ENDPOINTS[self.backend], self.body(content, output_len))


def _as_messages(content: PromptContent) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _as_prompt(content: PromptContent) -> Any:
    """Join messages to one text: an answer continues its question's line, each question begins a new one."""
    if isinstance(content, str) or not content or not isinstance(content[0], Mapping):
        return content
    texts = [("" if m["role"] == "assistant" else "\n") + str(m["content"]) for m in content if isinstance(m, Mapping)]
    return "".join(texts).removeprefix("\n")


@dataclass(frozen=True)
class RequestFlags:
    """Options of every command that asks a server."""

    base_url: str | None = server_flag(None, "the server, such as http://localhost:8000", aliases=("--url",))
    backend: str = server_flag("openai", "openai is /v1/completions", choices=tuple(BACKENDS))
    header: tuple[str, ...] = server_flag((), "KEY=VALUE, sent with each request")
    insecure: bool = server_flag(False, "do not check the server's certificate")
    temperature: float = request_flag(0.0, "0 is greedy", aliases=("--temp",), low=0, high=2**31)
    extra_body: str | None = request_flag(None, "JSON object merged into each request, such as top_p")
    out: str | None = result_flag(
        None,
        "write the result there as JSON; bench serve: a name in .jsonl gets one more line, a folder a new file; "
        "ab: OUT.md, OUT.json and OUT.html",
        aliases=("-o", "--output", "--result-filename"),
    )
    disable_tqdm: bool = result_flag(False, "no progress")

    def __post_init__(self) -> None:
        check_fields(self)

    def target(self, url: str, model: str, api_key: str, body: Mapping[str, Any], **more: Any) -> Target:
        """The server at `url`; --extra-body adds to `body`. Raises ConfigError for flags that cannot be sent."""
        return Target(
            base_url=url,
            model=model,
            api_key=api_key,
            backend=BACKENDS[self.backend],
            extra_body={**body, **_extra_body(self.extra_body)},
            headers=tuple(key_values(self.header, "--header")),
            insecure=self.insecure,
            **more,
        )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text}")
    return value


def key_values(items: Sequence[str], flag: str) -> list[tuple[str, str]]:
    for item in items:
        if not item.partition("=")[1]:
            raise ConfigError(f"{flag} takes KEY=VALUE, got {item!r}")
    return [(key.strip(), value.strip()) for key, _, value in (item.partition("=") for item in items)]
