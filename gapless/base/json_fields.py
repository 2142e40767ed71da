"""Reads settings that are JSON objects, such as --speculative-config."""

from __future__ import annotations

import json
from typing import Any

from gapless.base.errors import ConfigError


def json_object(name: str, text: str, example: str) -> dict[str, Any]:
    """Return the object in the text of a field. Raises ConfigError naming the field, with an example."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be JSON such as {example}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object such as {example}, got {text!r}")
    return value
