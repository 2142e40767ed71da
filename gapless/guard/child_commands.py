"""Commands that start a Python for a child process, rewritten so that the child is watched."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .sites import is_library

_STARTS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
"""First arguments of multiprocessing's commands that start a Python for children."""

_PLAIN_FLAG = re.compile(r"-[bBdEiOqRsSuvx]+|-[WX].+")
"""Flags of the interpreter that need no argument and leave the search path alone."""


def spawned(words: Sequence[str], options: dict[str, Any]) -> list[str]:
    """Return a command of multiprocessing for a watched child; one that starts something else as it is."""
    found = list(words)
    at = found.index("-c") + 1 if "-c" in found else len(found)
    if at < len(found) and found[at].startswith(_STARTS):
        serves = {**options, "serves": "forkserver" in found[at]}
        found[at] = f"{_call('detectors', 'arrive', serves)}; {found[at]}"
    return found


def started(command: Any, options: dict[str, Any]) -> Any:
    """Return a command of `subprocess` for a watched child: this Python with a script or `-m`, or a script of its own.

    Anything else is returned as it is, as are modules of Python itself and scripts inside of libraries.
    """
    if not isinstance(command, (list, tuple)) or not all(isinstance(word, (str, os.PathLike)) for word in command):
        return command
    words = with_python([os.fspath(word) for word in command])
    at = 1
    while at < len(words) and (words[at] in ("-W", "-X") or _PLAIN_FLAG.fullmatch(words[at])):
        at += 2 if words[at] in ("-W", "-X") else 1
    if not _is_this_python(words[0] if words else "") or not _is_programs(words[at : at + 2]):
        return command
    return [*words[:at], "-c", _call("run", "follow", options, "sys.exit"), *words[at:]]


def _call(module: str, function: str, options: dict[str, Any], around: str = "") -> str:
    package = __package__ or ""
    root = str(Path(__file__).resolve().parents[len(package.split("."))])
    call = f"{around}({function}({json.dumps(options)!r}))"
    return f"import sys; sys.path.append({root!r}); from {package}.{module} import {function}; {call}"


def with_python(words: list[str]) -> list[str]:
    """Return a command with this Python before a script that names it in its first line, such as `torchrun`.

    Before a script that leaves it to `env`, the name that is looked for on PATH is put.
    """
    script = shutil.which(words[0]) if words else None
    if script is None or _is_this_python(script):
        return words
    try:
        with open(script, "rb") as file:
            first = file.readline(200)
    except OSError:
        return words
    line = first.decode(errors="replace").strip()
    named = line[2:].strip() if line[:2] == "#!" else ""
    if re.fullmatch(r"\S*/env python[\d.]*", named):
        return [named.split()[1], script, *words[1:]]
    return [sys.executable, script, *words[1:]] if named and _is_this_python(named) else words


def _is_this_python(word: str) -> bool:
    path = shutil.which(word) or word
    # Links are not followed: an environment's Python is a link to one that has other packages.
    here, name = os.path.split(os.path.abspath(path))
    return here == os.path.dirname(os.path.abspath(sys.executable)) and name.startswith("python")


def _is_programs(words: Sequence[str]) -> bool:
    """Return whether a Python's arguments begin with a script or a module that may be a part of the program."""
    if words[:1] == ["-m"]:
        return len(words) == 2 and words[1].split(".")[0] not in {*sys.stdlib_module_names, "pip"}
    return bool(words) and os.path.splitext(words[0])[1] in ("", ".py") and not (
        words[0].startswith("-") or is_library(os.path.abspath(words[0]))
    )  # fmt: skip
