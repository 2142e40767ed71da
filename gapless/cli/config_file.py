"""--config FILE: JSON or TOML, one flat table of flags."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from gapless.cli.errors import UsageError


def read_config_file(path: str) -> dict[str, Any]:
    """The table in `path`. Raises UsageError, naming the file and the line where there is one."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".toml"):
        more = " YAML is not read: write the same keys as JSON or TOML." if suffix in (".yaml", ".yml") else ""
        raise UsageError(f"{path}: a config file must end in .json or .toml.{more}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the config file: {error}") from error
    try:
        table = json.loads(text) if suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # both libraries' own errors derive from it, and carry the line
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected one table of flags, got {type(table).__name__}")
    return table
