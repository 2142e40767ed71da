"""Reads comments of the form `# san: ok(reason)`, which mark a line that may wait. The reason is not optional."""

from __future__ import annotations

import linecache
import re

from .sites import Frame

_COMMENT = re.compile(r"#\s*san:\s*ok\((?P<reason>.*)\)")


def comment_at(site: Frame) -> str | None:
    """The reason given in this line, or None."""
    return _reason(linecache.getline(site.file, site.line))


def reasons(source: str) -> dict[int, str]:
    """Return the reasons of a whole file by line number."""
    found = {number: _reason(line) for number, line in enumerate(source.splitlines(), 1) if "san:" in line}
    return {number: reason for number, reason in found.items() if reason}


def _reason(line: str) -> str | None:
    found = _COMMENT.search(line)
    return (found["reason"].strip() or None) if found else None
