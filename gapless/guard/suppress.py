"""Findings that do not count, each with a reason: from a file, from flags, or from a comment in the line itself.

A file holds one per line, `PATH[:LINE] [RULE] -- reason`; `#` starts a comment. PATH may have wildcards and matches
from the end, so `engine/worker.py` is any file of that name in any folder `engine`. A comment is `# san: ok(reason)`.
A line `allow package.module.function -- reason` allows waits inside a context manager or decorator of the program.
"""

from __future__ import annotations

import linecache
import re
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .report import CountedFinding
from .sites import Frame

DEFAULT_FILE = ".gapless-san"
FLAG = "--suppress"

_COMMENT = re.compile(r"#\s*san:\s*ok\((?P<reason>.*)\)")
_ALLOW = re.compile(r"allow\s+(?P<name>[\w.]+)\s+--\s+(?P<reason>\S.*)")
_LINE = re.compile(r"(?P<path>\S+?)(?::(?P<line>\d+))?(?:\s+(?P<rule>[\w-]+))?\s+--\s+(?P<reason>\S.*)")


@dataclass(slots=True)
class Suppression:
    """One suppression. `used` counts its excused findings."""

    path: str
    line: int | None
    rule: str | None
    reason: str
    where: str
    """The place where it was written, for messages."""
    used: int = 0

    def matches(self, site: Frame, rule: str) -> bool:
        name = Path(site.file).as_posix()
        here = fnmatchcase(name, self.path) or fnmatchcase(name, f"*/{self.path}")
        return here and self.line in (None, site.line) and self.rule in (None, rule)


def parse(text: str, where: str) -> Suppression:
    """Parse one suppression. Raises ValueError: the text names its place and the form that is expected."""
    found = _LINE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{where}: expected `PATH[:LINE] [RULE] -- reason`, got {text.strip()!r}")
    line = int(found["line"]) if found["line"] else None
    return Suppression(found["path"], line, found["rule"], found["reason"].strip(), where)


def _lines(flags: Iterable[str], file: str | None) -> list[tuple[str, str]]:
    """Return the lines of flags and of `file`, each with its place. Raises ValueError when the file cannot be read."""
    path = Path(file or DEFAULT_FILE)
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if file or path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    numbered = [(line.split("#", 1)[0].strip(), f"{path}:{number}") for number, line in enumerate(lines, 1)]
    return [*((text.strip(), FLAG) for text in flags), *((line, where) for line, where in numbered if line)]


def gather(flags: Iterable[str], file: str | None) -> list[Suppression]:
    """Read the suppressions of flags and of `file`, by default DEFAULT_FILE if that exists. Raises ValueError."""
    return [parse(text, where) for text, where in _lines(flags, file) if not _ALLOW.fullmatch(text)]


def allowances(flags: Iterable[str], file: str | None) -> dict[str, str]:
    """Read the functions of the program inside which it may wait, each with its reason, from the same places."""
    found = [_ALLOW.fullmatch(text) for text, _ in _lines(flags, file)]
    return {one["name"]: one["reason"] for one in found if one is not None}


def apply(entries: Iterable[CountedFinding], suppressions: list[Suppression]) -> list[CountedFinding]:
    """Return the entries; entries that a suppression matches are excused."""
    return [_excused(entry, suppressions) for entry in entries]


def _excused(entry: CountedFinding, suppressions: list[Suppression]) -> CountedFinding:
    if entry.excuse is not None:
        return entry
    for suppression in suppressions:
        if any(suppression.matches(place, entry.finding.rule) for place in (entry.finding.site, entry.finding.user)):
            suppression.used += entry.count
            return CountedFinding(entry.finding, entry.count, suppression.reason)
    return entry


def tell_unused(suppressions: Iterable[Suppression]) -> None:
    """Warn of flags that excused nothing. A project's file is left out: one run seldom reaches every site in it."""
    for one in suppressions:
        if one.where == FLAG and not one.used:
            print(f"gapless san: {FLAG}: this suppression matched nothing: {one.path}", file=sys.stderr)


def comment_at(site: Frame) -> str | None:
    """The reason given in this line, or in the last one of its statement, or None."""
    lines = linecache.getlines(site.file)
    known = _LAST_LINES.get(site.file)
    if known is None or known[0] is not lines:
        known = _LAST_LINES[site.file] = lines, _last_lines(lines)
    return _reason(site.file, site.line) or _reason(site.file, known[1].get(site.line, site.line))


def _reason(file: str, line: int) -> str | None:
    found = _COMMENT.search(linecache.getline(file, line))
    return (found["reason"].strip() or None) if found else None


def _last_lines(lines: list[str]) -> dict[int, int]:
    """Return the last line of a statement for each of its lines, if there are several; heads are statements too."""
    last: dict[int, int] = {}
    first = 0
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if token.type == tokenize.NEWLINE:
                last.update(dict.fromkeys(range(first, token.start[0]), token.start[0]))
                first = 0
            elif token.type not in _BETWEEN_STATEMENTS:
                first = first or token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass  # other files have no statements
    return last


_LAST_LINES: dict[str, tuple[list[str], dict[int, int]]] = {}
"""Last lines of statements by file, each with the text that they were found in."""
_BETWEEN_STATEMENTS = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
