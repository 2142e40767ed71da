"""--config FILE: JSON or TOML, one flat table of flags."""

from __future__ import annotations

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
    table = _parse(path, suffix, text)
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected one table of flags, got {type(table).__name__}")
    return table


def _parse(path: str, suffix: str, text: str) -> Any:
    # Both errors derive from ValueError and carry the line.
    try:
        if suffix == ".json":
            import json

            return json.loads(text)
        import tomllib

        return tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
