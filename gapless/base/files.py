"""Reads the JSON and text files of a model directory; every fault is a CheckpointError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""File names of the weights in a model directory: one file, or the index of several."""
GGUF_NAME, GGUF_TABLE = "model.gguf", "model.gguf.json"
"""File names in a folder made of a GGUF file: a link to it, and a table of its tensors by the names of Hugging Face"""


def read_text(path: Path) -> str | None:
    """The file as text; None when it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error}); fetch the file again") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's one JSON object; None when the file is not there."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold one JSON object, got {type(value).__name__}")
    return value
