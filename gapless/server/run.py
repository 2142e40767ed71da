"""serve(): bind the port, start the engine, answer until a signal, drain, exit."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

import gapless
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, GaplessError, exit_code
from gapless.base.progress import CLEAR_LINE
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.child import WORKER
from gapless.engine.fleet import Fleet, fleet_of
from gapless.engine.frontdoor import Located, locate, open_assets
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.seam import EngineInfo
from gapless.server.app import App
from gapless.server.config import ServerConfig
from gapless.server.errors import log
from gapless.server.folders import own_folder
from gapless.server.fronts import Fronts, FrontSettings, SharedBackend
from gapless.server.kv_events import KvEventPublisher, counts_of, kv_events
from gapless.server.logs import log_settings, log_start, log_stats, logging_to_stderr, say, wants
from gapless.server.samples import sample
from gapless.server.state import ServerState
from gapless.server.tracing import Tracing, open_tracing

BACKLOG = 2048
ACCEPTS = 16
"""Connections that a turn of the event loop accepts. libuv accepts one for each descriptor of the listening socket, so
that of hundreds that come together the last would wait for hundreds of turns."""
YOUNG_OBJECTS = 50_000
"""New objects before the garbage collector looks at them. A request holds about a hundred and leaves no cycle, so with
Python's 700 it would look in vain, again and again, at requests that run."""
KEEP_ALIVE_SECONDS = 30
BALANCED = sys.platform == "linux"
"""Whether the system spreads connections evenly over the sockets of one address"""
FLUSH_SECONDS = 2
ENDS_WITH_STDIN = "GAPLESS_ENDS_WITH_STDIN"
"""The variable that makes the end of standard input end the server as SIGTERM does"""


def serve(engine: EngineConfig, server: ServerConfig, *, worker: Sequence[str] = WORKER) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; what goes wrong at start-up is one line on stderr.

    `worker` is ProcessBackend's.
    """
    try:
        check_tls(server)
        refuse_beside_engines(engine, server)
        tracing = open_tracing(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None
        with logging_to_stderr(server), listen(server) as listener:
            located = locate(engine)
            with (
                kv_events(server.kv_events_config, engine) as events,
                asyncio.Runner(loop_factory=loop_factory()) as runner,
            ):
                return runner.run(Serving(engine, located, server, listener, worker, tracing, events).run())
    except GaplessError as error:
        say(server, logging.ERROR, f"error: {' '.join(str(error).split())}")
        return exit_code(error)


def refuse_beside_engines(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError for a setting that does not go with several engines."""
    if engine.data_parallel_size == 1:
        return
    for name, has, why in (
        ("pd", server.pd != "none", "a prefiller and a decoder are two servers"),
        ("role", engine.role is not None, "engines of one server have no peers"),
        ("kv_peers", engine.peer_plan or engine.file_without_peers, "engines of one server have no peers"),
        ("kv_tiers", "disk" in engine.tiers, "a folder of pages is one engine's"),
        ("api_server_count", server.api_server_count > 1, "one process knows where each request is"),
    ):
        if has:
            raise ConfigError(f"{name} does not go with data_parallel_size above 1: {why}; leave out one of them")


@dataclass(eq=False)
class Serving:
    """A run of the server, from binding the port to the exit code."""

    engine: EngineConfig
    located: Located
    config: ServerConfig
    listener: socket.socket
    worker: Sequence[str]
    tracing: Tracing | None = None
    events: Sequence[KvEventPublisher] = ()
    failure: GaplessError | None = field(default=None, init=False)
    asked_to_end: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _fronts: Fronts = field(init=False)

    async def run(self) -> int:
        self._catch_signals()
        self._fronts = fronts = Fronts(self._give_up)
        backend = self._backend()
        # Two servers are not to give the same answers one by one. The settings that are logged and shown name the seed.
        seed = secrets.randbits(32) if self.engine.seed is None else self.engine.seed
        self.engine = replace(self.engine, seed=seed)
        llm = AsyncLLM(backend, open_assets(*self.located), seed=seed, config=self.engine)
        app = App(llm, self.config, self.engine.model, self.tracing)
        fronts.join(app.state)
        if self.events:
            for publisher, one in zip(self.events, backend.engines, strict=True):
                publisher.lost = one.send_page_events
            llm.send_page_events(*[publisher.publish for publisher in self.events])
            app.state.metrics.kv_events = partial(counts_of, self.events)
        async with self._further(app):
            await self._serve(llm, app)
        if self.failure is not None:
            raise self.failure
        log.info("ended after %.0f s", time.monotonic() - self._began)
        return 0

    async def _serve(self, llm: AsyncLLM, app: App) -> None:
        front = UvicornServer(uvicorn_config(app, self.config))
        serving = asyncio.create_task(front.serve(descriptors(self.listener)))
        starting = asyncio.create_task(self.start(llm, app))
        samples = asyncio.create_task(sample(app.state.samples, llm.stats))
        stats = asyncio.create_task(log_stats(app.state)) if not self.config.disable_log_stats else None
        try:
            await self.asked_to_end.wait()
            await self._drain(app)
        finally:
            for task in filter(None, (starting, samples, stats)):
                task.cancel()
            await asyncio.gather(*filter(None, (starting, samples, stats)), return_exceptions=True)
            front.should_exit = True
            await serving
            await llm.close()
            if self.tracing is not None:
                await self.tracing.close()

    def _backend(self) -> ProcessBackend | Fleet:
        config, worker, give_up = self.located.config, self.worker, self._give_up
        if config.data_parallel_size > 1:
            return fleet_of(config, worker, give_up)
        if self.config.api_server_count == 1:
            return ProcessBackend(config, worker=worker, on_give_up=give_up)
        return SharedBackend(config, worker=worker, on_give_up=give_up, fronts=self._fronts)

    @asynccontextmanager
    async def _further(self, app: App) -> AsyncIterator[None]:
        """The further fronts, if any, and the unix socket where this one answers them."""
        if self.config.api_server_count == 1:
            yield
            return
        with own_folder() as folder:
            config = replace(self.config, uds=str(folder / "first.sock"), disable_uvicorn_access_log=True)
            with listen(config) as listener:
                asked = UvicornServer(uvicorn_config(app.for_further, config))
                asked.config.date_header = False  # a further front adds it
                answering = asyncio.create_task(asked.serve([listener]))
                watching = asyncio.create_task(self._fronts.watch())
                try:
                    for number in range(1, self.config.api_server_count):
                        settings = FrontSettings(number, self.engine, self.located, self.config, str(config.uds))
                        with another(self.listener) as beside:
                            await self._fronts.start(settings, beside)
                    yield
                finally:
                    watching.cancel()
                    await self._fronts.close()
                    asked.should_exit = True
                    await answering

    async def start(self, llm: AsyncLLM, app: App) -> None:
        """Start the engine; a failure becomes `failure` and ends the server."""
        try:
            await llm.start()
        except GaplessError as error:
            self._give_up(error)
            return
        except Exception as error:
            # This task is awaited only at the end: unless it is logged, the server would report "loading" forever.
            log.critical("the engine could not be started", exc_info=error)
            self._give_up(EngineDeadError(f"the engine could not be started: {type(error).__name__}: {error}"))
            return
        settle_memory()
        await self._fronts.listening()
        seconds = time.monotonic() - self._began
        log_settings(self.engine, self.config)
        log_start(llm.info, seconds)
        self._announce(llm.info, app.state.model_names[0], seconds)

    def _announce(self, info: EngineInfo, name: str, seconds: float) -> None:
        where, curl = address_of(self.config, self.listener)
        key = ' -H "Authorization: Bearer $GAPLESS_API_KEY"' if self.config.api_key else ""
        engines, ranks = self.engine.data_parallel_size, f", {info.ranks} ranks" if info.ranks > 1 else ""
        ranks = f", {engines} engines{ranks}{' each' * bool(ranks)}" if engines > 1 else ranks
        kv = "" if info.kv_cache_dtype == "auto" else f", KV in {info.kv_cache_dtype}"
        line = (
            f"gapless {gapless.__version__} serves {name} ({info.parameters / 1e6:.1f} M parameters, {info.device}, "
            f"{info.dtype}{kv}{ranks}) at {where}, ready after {seconds:.1f} s"
        )
        if self.config.log_format == "json":
            log.info(line)
        elif wants(self.config, logging.INFO):
            page = "" if self.config.uds else f"  live page {where}/ui\n"
            example = f"-H 'Content-Type: application/json' -d {_example(name)}"
            begin = CLEAR_LINE if sys.stdout.isatty() else ""  # standard error's line of the start may still be there
            text = f"{begin}{line}\n{page}  curl {curl}/v1/chat/completions{key} {example}\n"
            print(text, end="", flush=True)  # one write

    def _give_up(self, error: GaplessError) -> None:
        self.failure = error
        self.asked_to_end.set()
        self._hurry.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if os.environ.get(ENDS_WITH_STDIN):
            loop.add_reader(sys.stdin.fileno(), self._on_end_of_stdin)

    def _on_signal(self, number: int) -> None:
        again = self.asked_to_end.is_set()
        log.warning("%s: %s", signal.Signals(number).name, "stopping now" if again else "draining")
        (self._hurry if again else self.asked_to_end).set()

    def _on_end_of_stdin(self) -> None:
        """The process that started this server has ended."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._on_signal(signal.SIGTERM)

    async def _drain(self, app: App) -> None:
        """Take no new work, let the running finish, and end the rest with an error."""
        fronts, seconds = self._fronts, self.config.drain_seconds
        fronts.drain()
        others = _first_of(seconds + FLUSH_SECONDS, fronts.all_ended, self._hurry)
        await asyncio.gather(drained(app.state, seconds, self._hurry), others)
        if not fronts.all_ended.is_set():
            fronts.drain()
            await _first_of(2 * FLUSH_SECONDS, fronts.all_ended)


def settle_memory() -> None:
    """Set the garbage collector for serving, at the end of a start."""
    gc.collect()
    gc.freeze()  # what the start made stays; a collection that walks it holds up all tokens
    gc.set_threshold(YOUNG_OBJECTS)


async def drained(state: ServerState, seconds: float, hurry: asyncio.Event) -> None:
    """Let the running requests of this process finish, and end the rest with an error."""
    state.stopping = True
    await _first_of(seconds, state.idle, hurry)
    state.close()
    await _first_of(FLUSH_SECONDS, state.idle)


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, so long at most."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _example(model: str) -> str:
    """A request body, quoted for a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    return shlex.quote(json.dumps(body, ensure_ascii=False))


def descriptors(listener: socket.socket) -> list[socket.socket]:
    """The listening socket, and with uvloop as many more descriptors of it as let a turn accept ACCEPTS."""
    more = 0 if loop_factory() is None else ACCEPTS - 1  # asyncio's own loop accepts all that wait
    return [listener, *[listener.dup() for _ in range(more)]]


class UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling: ours drains first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        """Set when connections are accepted"""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=_http_protocol(config),
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        **_tls(config),
    )


def _tls(config: ServerConfig) -> dict[str, Any]:
    """Return uvicorn's settings of TLS, which a unix socket does without."""
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
    return {} if config.uds or not config.ssl_certfile else {name: getattr(config, name) for name in names}


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError for files of TLS that cannot be used, before anything is loaded."""
    if not (files := _tls(config)):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile or config.ssl_certfile}"
    try:
        context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"], password="")  # not asked for at a terminal
        where = f"--ssl-ca-certs {config.ssl_ca_certs}"
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"{where} cannot be used: {error.strerror or error}") from error


def _http_protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    base: type[asyncio.Protocol]
    try:
        from gapless.server.protocols import BoundedProtocol as base
    except ModuleNotFoundError:  # httptools is not there on every platform
        from uvicorn.protocols.http.h11_impl import H11Protocol as base
    fields: dict[str, Any] = {"allowed_origins": config.allowed_origins}
    if config.disable_uvicorn_access_log:  # uvicorn's own setting would silence every server of this process
        fields["access_log"] = property(lambda _: False, lambda *_: None)
    return type("ServedProtocol", (base,), fields)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory of event loops, or None where it is not installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextmanager
def listen(config: ServerConfig) -> Iterator[socket.socket]:
    """The listening socket. Raises ConfigError when the address cannot be had."""
    where, other = (config.uds, "--uds") if config.uds else (f"{config.host} port {config.port}", "--host and --port")
    try:
        listener = _unix_socket(config.uds) if config.uds else _tcp_socket(config)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; change {other}") from error
    with listener:
        yield listener
    if config.uds:
        os.unlink(config.uds)


def _tcp_socket(config: ServerConfig) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = _unbound(family)
    if config.api_server_count > 1 and BALANCED:
        with _unbound(family) as probe:  # a port that others share is in use all the same
            probe.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return _listening(listener, address)


def _unbound(family: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only for sockets declared as TCP; with it, an answer takes 40 ms more.
    unbound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return unbound


def another(listener: socket.socket) -> socket.socket:
    """Return a socket for a further front at the same address: its own, with a share of the connections by the
    system, or the same one for the front that accepts first."""
    if listener.family == socket.AF_UNIX or not BALANCED:
        return listener.dup()
    beside = _unbound(listener.family)
    beside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    beside.bind(listener.getsockname())  # it listens, and gets connections, once its front is up
    return beside


def _unix_socket(path: str) -> socket.socket:
    """A socket file left by a server that has ended is replaced; one in use is not."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path):
                os.unlink(path)
    return _listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)


def _listening(listener: socket.socket, address: Any) -> socket.socket:
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(config: ServerConfig, listener: socket.socket) -> tuple[str, str]:
    """Return the address for people, and for curl."""
    if config.uds:
        return f"unix socket {config.uds}", f"--unix-socket {config.uds} http://localhost"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return (f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}",) * 2
