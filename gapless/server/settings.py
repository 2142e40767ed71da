"""Settings as they may be shown, in logs and over HTTP: secrets and directories left out."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from gapless.base.addresses import hide_password
from gapless.base.config import read_adapter
from gapless.hub.names import is_hub_name

SECRETS = frozenset(("api_key", "operator_key"))
ADDRESSES = frozenset(("otlp_traces_endpoint",))
PLACES = frozenset(("kv_tiers", "kv_peers"))
"""Lists of addresses and paths, some after a kind"""
PATHS = frozenset(
    ("model", "tokenizer", "chat_template", "uds", "download_dir", "lora_dir", "weights_dir", "kv_peer_key_file")
) | {f"{of}ssl_{name}" for of in ("", "kv_peer_") for name in ("certfile", "keyfile", "ca_certs")}
PATHS |= {"generation_config"}
MAX_TEXT = 80
"""A chat template may be given as text."""


def settings(config: Any) -> dict[str, Any]:
    """Every field of a config record."""
    return {f.name: shown(f.name, getattr(config, f.name)) for f in fields(config)}


def changed(config: Any) -> dict[str, Any]:
    """The fields that differ from their default."""
    pairs = ((f, getattr(config, f.name)) for f in fields(config))
    return {f.name: shown(f.name, value) for f, value in pairs if value != f.default}


def shown(name: str, value: Any) -> Any:
    if name in SECRETS:
        return "<secret>" if value else None
    if name in ADDRESSES and isinstance(value, str):
        return hide_password(value)
    if name in PLACES:
        return [place(text) for text in value]
    if name == "kv_peer_listen":
        return value and place(value)
    if name == "lora_modules":
        return [read_adapter(text)[0] for text in value]
    if name in PATHS and isinstance(value, str) and not is_hub_name(value):
        text = value.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return value


def place(text: str) -> str:
    """An address without a user and a password, or `kind:path` without its directories."""
    return hide_password(text) if "://" in text else re.sub(":.*[/@]", ":", text)
