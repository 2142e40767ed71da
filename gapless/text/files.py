"""Reads the JSON and text files of a model directory; every fault is a CheckpointError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError


def read_text(path: Path) -> str | None:
    """The file as text; None when it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty when it is not there."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
