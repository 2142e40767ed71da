"""ServerConfig: how the HTTP server behaves; one frozen record is the flags and the documentation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gapless.base.config import check_fields, flag
from gapless.base.errors import ConfigError
from gapless.base.json_fields import json_object
from gapless.base.params import MAX_LOGPROBS
from gapless.server.settings import shown

_server, _logs, _api = (partial(flag, group=group) for group in ("Server", "Logs", "API"))


def _origins(given: tuple[str, ...]) -> tuple[str, ...]:
    """Origins one by one, of texts that may be lists: JSON, as vLLM has them, or with commas, as llama.cpp."""
    lists = [text[1:-1].replace('"', "") if text.startswith("[") else text for text in given]
    return tuple(one.strip() for text in lists for one in text.split(","))


@dataclass(frozen=True)
class ServerConfig:
    """Sizes are in bytes, times in seconds."""

    host: str = _server("127.0.0.1", "address to listen on", aliases=("--hostname",))
    port: int = _server(8000, "TCP port to listen on; 0 takes a free one", aliases=("-p",), low=0, high=65535)
    uds: str | None = _server(None, "path of a UNIX socket to listen on instead of host and port")
    api_server_count: int = _server(
        1,
        "processes that speak HTTP, make text of tokens and send it; above about 50,000 tokens/s one is not enough",
        aliases=("-asc",),
        low=1,
        high=64,
    )
    api_key: tuple[str, ...] = _server((), "keys of which each request must bring one; safer in $GAPLESS_API_KEY")
    operator_key: tuple[str, ...] = _server(
        (),
        "keys for the live page's data (/debug), /server_info, /tokenizer_info and changes of adapters and weights; "
        "without one only this machine gets them",
    )
    allowed_origins: tuple[str, ...] = _server((), "origins that browsers may call from (CORS); default: none")
    served_model_name: tuple[str, ...] = _server(
        (), "names the model answers to; default: as given to --model", aliases=("-a", "--alias")
    )
    root_path: str = _server("", "path that a proxy puts before every route, such as /llm; it may take it away or not")
    ssl_keyfile: str | None = _server(None, "private key of --ssl-certfile, without a password; default: in that file")
    ssl_certfile: str | None = _server(None, "certificate, in PEM, with which the server speaks HTTPS")
    ssl_ca_certs: str | None = _server(None, "certificates of those who sign the clients' certificates, in PEM")
    ssl_cert_reqs: int = _server(
        0, "certificate of a client: 0 asks for none, 1 checks one that is sent, 2 needs one", low=0, high=2
    )
    max_body_bytes: int = _server(4 * 2**20, "longest request body", low=1, high=2**40)
    drain_seconds: float = _server(30.0, "time that running requests get after SIGTERM", low=0, high=10**6)
    request_timeout: float | None = _server(
        None, "longest time one request may take; a client asks for less with X-Request-Timeout", low=0.001, high=10**6
    )

    pd: str = _server(
        "none",
        "1p1d starts a prefiller and a decoder on this machine, and a router that answers for both",
        choices=("none", "1p1d"),
    )

    log_level: str = _logs("info", "least severe log lines to write", choices=("debug", "info", "warning", "error"))
    log_format: str = _logs("text", "one line of text or of JSON per event", choices=("text", "json"))
    disable_log_stats: bool = _logs(False, "no line about throughput every 10 s")
    enable_log_requests: bool = _logs(
        False, "one line for each generation request, without its text", aliases=("--log-requests",)
    )
    disable_uvicorn_access_log: bool = _logs(False, "no line for each HTTP request")
    disable_access_log_for_endpoints: tuple[str, ...] = _logs(
        (), "paths, also with commas between, whose requests get no such line; those of probes never do"
    )
    otlp_traces_endpoint: str | None = _logs(
        None,
        "OTLP collector over HTTP that gets a trace of each generation request, like http://localhost:4318/v1/traces",
    )

    kv_events_config: str | None = _server(
        None,
        "publish over ZeroMQ which KV blocks enter and leave the prefix cache, for routers: JSON as vLLM's, with "
        "enable_kv_cache_events, endpoint, replay_endpoint, buffer_steps, topic, hwm and max_queue_size",
    )

    enable_force_include_usage: bool = _api(
        False, "a usage chunk at the end of every stream", aliases=("--stream-response-default-include-usage",)
    )
    enable_prompt_tokens_details: bool = _api(
        False, "say in usage how many prompt tokens came from the cache", aliases=("--enable-cache-report",)
    )
    max_logprobs: int = _api(
        MAX_LOGPROBS, "most likely tokens that a request may ask for at each place", low=0, high=MAX_LOGPROBS
    )
    stream_interval: int | None = _api(
        None,
        "tokens of one event of a stream, at most; a choice's first token does not wait for others; default: as many "
        "as are there when the event is sent",
        low=1,
        high=2**20,
    )
    sse_ping_interval: float = _api(
        30.0,
        "seconds without an event after which a stream gets a comment, which proxies take for life and clients skip; "
        "its status is 200 from then on; -1: none",
        low=-1,
        high=10**6,
    )
    default_chat_template_kwargs: str | None = _api(
        None, "variables of the chat template if a request's chat_template_kwargs say nothing, as a JSON object"
    )
    enable_request_id_headers: bool = _api(
        False, "an X-Request-Id in every answer; one that the client sent is always returned"
    )

    dialects: tuple[str, ...] = _api(
        (), "further APIs to serve, by the names that installed packages give them (entry points of gapless.dialects)"
    )
    tool_call_parser: str = _api(
        "auto", "form of the model's tool calls; auto: by its chat template, none: replies are text"
    )
    reasoning_parser: str = _api("auto", "form of the model's reasoning, likewise")

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_origins", _origins(self.allowed_origins))
        check_fields(self)
        if self.root_path and not (self.root_path.startswith("/") and self.root_path[-1] != "/"):
            raise ConfigError(f"root_path must begin with / and not end with it, such as /llm; got {self.root_path!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ConfigError("ssl_certfile is missing, which the other --ssl flags go with")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_ca_certs is missing, by which the certificates of ssl_cert_reqs are checked")
        self.template_variables()
        if self.kv_events_config is not None:
            from gapless.server.kv_events_config import KvEventsConfig  # brings msgspec, which --help has no need of

            KvEventsConfig.parse(self.kv_events_config)

    def template_variables(self) -> dict[str, Any]:
        """Return default_chat_template_kwargs. Raises ConfigError."""
        given = self.default_chat_template_kwargs or "{}"
        return json_object("default_chat_template_kwargs", given, '{"enable_thinking": false}')

    def __repr__(self) -> str:
        return f"ServerConfig({', '.join(f'{f.name}={shown(f.name, getattr(self, f.name))!r}' for f in fields(self))})"
