"""ServerConfig: how the HTTP server behaves; one frozen record is the flags and the documentation."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gapless.base.config import check_fields, flag
from gapless.server.settings import shown


@dataclass(frozen=True)
class ServerConfig:
    """Sizes are in bytes, times in seconds."""

    host: str = flag("127.0.0.1", "address to listen on", group="Server", aliases=("--hostname",))
    port: int = flag(
        8000, "TCP port to listen on; 0 takes a free one", group="Server", aliases=("-p",), low=0, high=65535
    )
    uds: str | None = flag(None, "path of a UNIX socket to listen on instead of host and port", group="Server")
    api_key: tuple[str, ...] = flag(
        (), "keys of which each request must bring one; safer in $GAPLESS_API_KEY", group="Server"
    )
    allowed_origins: tuple[str, ...] = flag((), "origins that browsers may call from (CORS); none", group="Server")
    served_model_name: tuple[str, ...] = flag(
        (), "names the model answers to; default: as given to --model", group="Server", aliases=("-a", "--alias")
    )
    max_body_bytes: int = flag(4 * 2**20, "longest request body", group="Server", low=1, high=2**40)
    drain_seconds: float = flag(30.0, "time that running requests get after SIGTERM", group="Server", low=0, high=10**6)
    request_timeout: float | None = flag(
        None,
        "longest time one request may take; a client asks for less with X-Request-Timeout",
        group="Server",
        low=0.001,
        high=10**6,
    )

    log_level: str = flag(
        "info", "least severe log lines to write", group="Logs", choices=("debug", "info", "warning", "error")
    )
    log_format: str = flag("text", "one line of text or of JSON per event", group="Logs", choices=("text", "json"))
    disable_log_stats: bool = flag(False, "no line about throughput every 10 s", group="Logs")
    enable_log_requests: bool = flag(
        False, "one line for each generation request, without its text", group="Logs", aliases=("--log-requests",)
    )
    disable_uvicorn_access_log: bool = flag(False, "no line for each HTTP request", group="Logs")
    otlp_traces_endpoint: str | None = flag(
        None,
        "OTLP collector over HTTP that gets a trace of each generation request, like http://localhost:4318/v1/traces",
        group="Logs",
    )

    enable_force_include_usage: bool = flag(
        False,
        "a usage chunk at the end of every stream",
        group="API",
        aliases=("--stream-response-default-include-usage",),
    )
    enable_prompt_tokens_details: bool = flag(
        False,
        "say in usage how many prompt tokens came from the cache",
        group="API",
        aliases=("--enable-cache-report",),
    )
    enable_request_id_headers: bool = flag(
        False, "an X-Request-Id in every answer; one that the client sent is always returned", group="API"
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return f"ServerConfig({', '.join(f'{f.name}={shown(f.name, getattr(self, f.name))!r}' for f in fields(self))})"
