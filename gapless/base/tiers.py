"""Reads what `--kv-tier` says: where copies of KV pages are kept beyond the device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NamedTuple
from urllib.parse import urlsplit

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.base.sizes import read_size

FORMS = {
    "host": "host:SIZE",
    "disk": "disk:PATH:SIZE",
    "redis": "redis://HOST:PORT/DB",
    "lmcache": "lmcache://HOST:PORT",
    "mooncake": "mooncake://HOST:PORT",
    "nixl": "nixl://BUCKET/PREFIX",
    "peer": "peer:SIZE",
}
EXAMPLES = {
    "redis": "redis://127.0.0.1:6379/0",
    "lmcache": "lmcache://127.0.0.1:5555",
    "mooncake": "mooncake://127.0.0.1:50051",
    "nixl": "nixl://my-bucket/kv?region=eu-central-1",
}
"""Tiers with an address"""
PLUG_INS = "gapless.kv_tiers"
"""Entry points of this group are further tiers: their names, and `tiers.seam.TierFactory`."""


class TierConfig(NamedTuple):
    """One tier."""

    kind: str
    nbytes: int = 0
    """0: that is not ours to say"""
    target: str = ""
    """A path, an address, or what else follows the kind"""


def parse_tiers(texts: Sequence[str]) -> dict[str, TierConfig]:
    """Return the tiers by kind, in their order. Raises ConfigError for one that is unknown, named twice, or without
    a size, and for tiers below a host tier that is not there."""
    found: dict[str, TierConfig] = {}
    for text in texts:
        tier = _parse(text)
        if tier.kind in found:
            raise ConfigError(f"kv_tiers names {tier.kind} twice: give it once")
        found[tier.kind] = tier
    if found and "host" not in found:
        raise ConfigError(f"kv_tiers: {next(iter(found))} works below a host tier: add host:SIZE, such as host:8GiB")
    return found


def _parse(text: str) -> TierConfig:
    kind, _, rest = text.partition(":")
    if kind in ("host", "peer"):
        return TierConfig(kind, parse_bytes(rest, text))
    if kind == "disk":
        path, _, size = rest.rpartition(":")
        if not path or "://" in rest:
            got = hide_password(text)
            raise ConfigError(f"kv_tiers: a disk tier is {FORMS['disk']}, such as disk:/var/kv:100GiB, got {got!r}")
        return TierConfig(kind, parse_bytes(size, text), path)
    if kind in EXAMPLES:
        if fault := _fault(kind, text):  # what was given is not shown: it may be a password that was not escaped
            name = kind.capitalize() if kind == "redis" else kind
            raise ConfigError(
                f"kv_tiers: a {name} tier is {FORMS[kind]}, such as {EXAMPLES[kind]}. In what was given {fault}: "
                "special characters of a password must be escaped, such as / as %2F"
            )
        return TierConfig(kind, 0, text)
    plug_ins = sorted({point.name for point in entry_points(group=PLUG_INS)})
    if kind not in plug_ins:
        forms = [*FORMS.values(), *(f"{name}:..." for name in plug_ins)]
        raise ConfigError(f"kv_tiers must be {', '.join(forms[:-1])} or {forms[-1]}, got {hide_password(text)!r}")
    return TierConfig(kind, 0, rest)


def _fault(kind: str, text: str) -> str:
    """Return what is wrong with an address without showing it, "" for nothing."""
    host = f"the {'bucket' if kind == 'nixl' else 'host'} is missing or wrong"
    port = "the port is missing or wrong"
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket that does not close
        return host
    try:
        number, path = parts.port, parts.path.strip("/")
    except ValueError:
        return port
    faults = {
        host: not parts.hostname,
        port: number == 0 or (kind == "lmcache" and number is None),
        "the database is no number": kind == "redis" and not (path or "0").isdecimal(),
        "there is a path": kind == "lmcache" and path,
        "there is a query": kind in ("redis", "lmcache") and parts.query,
        "there is a fragment": parts.fragment,
    }
    return next((fault for fault, is_there in faults.items() if is_there), "")


def parse_bytes(size: str, text: str) -> int:
    """Return a size such as 8GiB, 8G (the same), 8GB (8 * 10**9) or 8589934592 in bytes. Raises ConfigError."""
    nbytes = read_size(size) or 0
    if not 0 < nbytes < 2**63:
        raise ConfigError(
            f"kv_tiers: the size must be like 8GiB, got {hide_password(size)!r} in {hide_password(text)!r}"
        )
    return nbytes
