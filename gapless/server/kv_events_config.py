"""The flag `--kv-events-config`, as vLLM spells it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from gapless.base.errors import ConfigError

EVENTS_FIELD = "kv_events_config"
EVENTS_EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
_HERE = r"\*|0\.0\.0\.0|\[::\]|localhost|127(?:\.\d+){3}|\[::1\]"
_ENDPOINT = re.compile(rf"ipc://.+|tcp://(?:{_HERE}|\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{{1,5}})")
_LISTENS = re.compile(rf"ipc://.+|tcp://(?:{_HERE}):\d+")

PositiveCount = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the publisher of KV events; defaults are vLLM's, but that `endpoint` is on this machine alone."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """Kind of publisher: zmq (also where it is left out), or null for none"""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address to listen on, or that of a subscriber on another machine, to connect to"""
    replay_endpoint: str | None = None
    """Address to listen on for receivers that have missed batches; none by default"""
    buffer_steps: PositiveCount = 10_000
    """Batches kept for them"""
    hwm: PositiveCount = 100_000
    """Batches kept for a subscriber that does not read"""
    max_queue_size: PositiveCount = 100_000
    """Batches that wait for the publisher's thread"""
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Read the JSON of the flag. Raises ConfigError naming the fault."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            fields = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                f"{EVENTS_FIELD} must be JSON such as {EVENTS_EXAMPLE}, with the fields {fields}: {error}"
            ) from error
        for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
            match = _ENDPOINT.fullmatch(endpoint or config.endpoint)
            if endpoint == "" or match is None or not 0 < int(match[1] or 1) < 2**16:
                good = "tcp://127.0.0.1:5557 or ipc:///run/kv-events"
                raise ConfigError(f"{EVENTS_FIELD}.{name} must be like {good}, got {endpoint!r}")
        if config.replay_endpoint == config.endpoint:
            raise ConfigError(
                f"{EVENTS_FIELD}.replay_endpoint must be another one than endpoint, got {config.endpoint!r}"
            )
        return config

    def of_engine(self, number: int) -> KvEventsConfig:
        """Return the settings for one of several engines: its ports are higher by its number, as in vLLM. Raises
        ConfigError."""
        moved = {}
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                address, _, port = endpoint.rpartition(":")
                if not endpoint.startswith("tcp:") or int(port) + number >= 2**16:
                    raise ConfigError(
                        f"{EVENTS_FIELD}.{name} of several engines must be tcp://ADDRESS:PORT, since each has the port "
                        f"after the one before; got {endpoint!r}"
                    )
                moved[name] = f"{address}:{int(port) + number}"
        return msgspec.structs.replace(self, **moved)


def listens(endpoint: str) -> bool:
    """Return whether an endpoint is of this machine, or else of a subscriber's."""
    return _LISTENS.fullmatch(endpoint) is not None
