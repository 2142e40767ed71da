"""Reads `--kv-tier`: the places of KV page copies beyond the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.base.plug_ins import plug_ins
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
REDIS = ("redis", "rediss", "redis+unix", *(f"redis{s}+{many}" for s in ("", "s") for many in ("cluster", "sentinel")))
"""Schemes of Redis: one server, with TLS, on a socket of this host, a cluster, the master that sentinels name"""
_TLS_OPTION = re.compile("ssl_(ca_certs|ca_path|certfile|keyfile|password|cert_reqs|check_hostname)")
PLUG_INS = "gapless.kv_tiers"
"""Entry points of this group are further tiers: their names, and `tiers.seam.TierFactory`."""


class TierConfig(NamedTuple):
    """One tier."""

    kind: str
    nbytes: int = 0
    """0 if the tier decides for itself"""
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
    scheme, _, rest = text.partition(":")
    kind = "redis" if scheme in REDIS else scheme
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
    if kind not in (others := plug_ins(PLUG_INS)):
        forms = [*FORMS.values(), *(f"{name}:..." for name in others)]
        mend = "; S3 is nixl://BUCKET/PREFIX" if kind == "s3" else ""
        raise ConfigError(f"kv_tiers must be {', '.join(forms[:-1])} or {forms[-1]}, got {hide_password(text)!r}{mend}")
    return TierConfig(kind, 0, rest)


def _fault(kind: str, text: str) -> str:
    """Return the fault of an address without showing the address, "" for none."""
    host = f"the {'bucket' if kind == 'nixl' else 'host'} is missing or wrong"
    port = "the port is missing or wrong"
    scheme, _, form = text.partition(":")[0].partition("+")
    sentinels = form == "sentinel"
    try:
        parts = urlsplit(text)
        hosts = [urlsplit(f"//{one}") for one in parts.netloc.rpartition("@")[2].split(",")] if sentinels else [parts]
    except ValueError:  # a bracket that does not close
        return host
    try:
        numbers, path = [one.port for one in hosts], parts.path.strip("/")
    except ValueError:
        return port
    service, _, path = path.partition("/") if sentinels else ("", "", path)
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    faults = {
        host: form != "unix" and not all(one.hostname for one in hosts),
        port: 0 in numbers or (kind == "lmcache" and None in numbers),
        "the service is missing": sentinels and not service,
        "the path of the socket is missing": form == "unix" and not path,
        "the database is no number": kind == "redis" and form != "unix" and not (path or "0").isdecimal(),
        "there is a database, which clusters do not have": form == "cluster" and path not in ("", "0"),
        "there is a path": kind == "lmcache" and path,
        "there is a query": kind == "lmcache" and names,
        "there is a query with another name than ssl_ca_certs and its like": kind == "redis"
        and not all(_is_option(name, scheme, form) for name in names),
        "there is a fragment": parts.fragment,
    }
    return next((fault for fault, is_there in faults.items() if is_there), "")


def _is_option(name: str, scheme: str, form: str) -> bool:
    """Return whether an address of Redis may have this option after its `?`: TLS, or the login at sentinels."""
    if form == "sentinel" and name in ("sentinel_username", "sentinel_password"):
        return True
    return name == "db" if form == "unix" else scheme == "rediss" and _TLS_OPTION.fullmatch(name) is not None


def parse_bytes(size: str, text: str) -> int:
    """Return a size such as 8GiB, 8G (the same), 8GB (8 * 10**9) or 8589934592 in bytes. Raises ConfigError."""
    nbytes = read_size(size) or 0
    if not 0 < nbytes < 2**63:
        raise ConfigError(
            f"kv_tiers: the size must be like 8GiB, got {hide_password(size)!r} in {hide_password(text)!r}"
        )
    return nbytes
