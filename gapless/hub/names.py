"""Tells names on the hub from directories."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Return whether `text` is written org/name and nothing on this machine is called so. A directory always wins."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()
