"""The two sides of a comparison: servers that run already, or servers of ours started from flags."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError, GaplessError
from gapless.lab.http import Client, with_client
from gapless.lab.probe import ask
from gapless.lab.target import Target

LETTERS = ("A", "B")
ADDRESS = ("host", "port", "uds")
"""Settings of a server's place, which do not change its work."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0
_READY = "ready after"
_SECRET = ("--api-key", "--header")


class ArmError(GaplessError):
    """A server of an arm did not start, or went away."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison. Either `url` names a running server, or `flags` are flags of `gapless serve`."""

    letter: str
    name: str
    url: str = ""
    flags: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """The flags that only this arm has; the others it shares with the other arm."""
    api_key: str = field(default="", repr=False)
    insecure: bool = False
    """Whether the certificate at `url` goes unchecked"""


class Live(NamedTuple):
    """An arm's server while it runs."""

    url: str
    facts: Mapping[str, Any]
    """The server's own description: version, model, max_model_len, and the line it started with."""
    api_key: str = ""
    pid: int | None = None


def arms_from_flags(both: Sequence[str], a: Sequence[str], b: Sequence[str]) -> tuple[Arm, Arm]:
    """Two servers of ours that share `both`. Flags of an arm come last, so they win."""
    for word in (*both, *a, *b):
        if word.split("=")[0] in ("--port", "-p", "--host", "--uds"):
            raise ConfigError(f"{word.split('=')[0]} is chosen by ab itself, which starts both servers on free ports")
    names = [shlex.join(own) or "(defaults)" for own in (a, b)]
    if names[0] == names[1]:
        names = [f"{names[0]} ({letter})" for letter in LETTERS]
    return (Arm("A", names[0], flags=(*both, *a), own=tuple(a)), Arm("B", names[1], flags=(*both, *b), own=tuple(b)))


def arms_from_urls(a: str, b: str, api_key: str = "", insecure: bool = False) -> tuple[Arm, Arm]:
    """Two servers that run already; they may be one and the same, which is an A/A test."""
    arm_a = Arm("A", a, url=a, api_key=api_key, insecure=insecure)
    return arm_a, replace(arm_a, letter="B", name=b, url=b)


def split_arms(words: Sequence[str]) -> list[list[str]]:
    """`-- A -- B` -> [A, B]; of three groups the first is for both arms. Raises ConfigError for one, or for more."""
    groups: list[list[str]] = []
    for word in words:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    if len(groups) not in (0, 2, 3):
        raise ConfigError(
            f"{len(groups)} group(s) of flags after --: write `-- FLAGS OF A -- FLAGS OF B`, "
            "or `-- FLAGS OF BOTH -- FLAGS OF A -- FLAGS OF B`"
        )
    return groups


def shown_flags(flags: Sequence[str]) -> list[str]:
    """Flags for a report: the values of keys are left out."""
    shown: list[str] = []
    hide = False
    for word in flags:
        if " " in word and any(secret in word for secret in _SECRET):  # --a "--api-key K --depth 1"
            word = shlex.join(shown_flags(shlex.split(word)))
        name, equals, _ = word.partition("=")
        if name.startswith("-"):
            hide = name in _SECRET and not equals
            shown.append(f"{name}=***" if name in _SECRET and equals else word)
        else:
            shown.append("***" if hide else word)
    return shown


@contextmanager
def live(arm: Arm, start_seconds: float = 600.0) -> Iterator[Live]:
    """The arm's server, started when it has no URL and stopped at the end. Raises ArmError with its last words."""
    if arm.url:
        yield Live(arm.url, server_facts(arm.url, arm.api_key, arm.insecure), arm.api_key)
        return
    with tempfile.TemporaryDirectory(prefix="gapless-ab-") as folder:
        log = Path(folder) / f"{arm.letter}.log"
        # Both arms draw equal seeds for requests that bring none.
        own = ["--seed", "0", *arm.flags, "--host", "127.0.0.1", "--port", "0"]
        command = [sys.executable, "-m", "gapless", "serve", *own]
        with log.open("wb") as out:
            # A session of its own: Ctrl-C at the terminal reaches this process alone, which then stops the server.
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            url, said = _wait_ready(arm, process, log, start_seconds)
            key = _key(arm.flags)
            yield Live(url, {**server_facts(url, key), "started": said}, key, process.pid)
            if process.poll() is not None:
                raise ArmError(f"the server of arm {arm.letter} ended during the runs: {last_words(log)}")
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the engine process is in the session too
        process.wait()


def _wait_ready(arm: Arm, process: subprocess.Popen[bytes], log: Path, seconds: float) -> tuple[str, str]:
    """(URL, the line it announced itself with)."""
    end = time.monotonic() + seconds
    while True:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("gapless ") and _READY in line:
                return "http://" + line.partition(" at http://")[2].partition(",")[0], line
        if process.poll() is not None:
            raise ArmError(f"the server of arm {arm.letter} ({arm.name}) did not start: {last_words(log)}")
        if time.monotonic() > end:
            raise ArmError(f"the server of arm {arm.letter} ({arm.name}) was not ready after {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def last_words(log: Path) -> str:
    """Return the line with the reason, or the last one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("gapless: error: ")


def server_facts(url: str, api_key: str = "", insecure: bool = False) -> dict[str, Any]:
    """Version, model and settings, as far as the server reports them. Raises ServerError if nothing answers."""
    target = Target(base_url=url, api_key=api_key, insecure=insecure, timeout=10.0)
    return asyncio.run(with_client(target, _facts))


async def _facts(client: Client) -> dict[str, Any]:
    version = await ask(client, "GET", "/version")
    models = await ask(client, "GET", "/v1/models")
    info = await ask(client, "GET", "/server_info")
    facts = {"version": str(version["version"])} if "version" in version else {}
    cards = models.get("data")
    if isinstance(cards, list) and cards and isinstance(cards[0], dict):
        facts |= {name: cards[0][name] for name in ("id", "owned_by", "max_model_len") if name in cards[0]}
    return facts | engine_settings(info)


def engine_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """A gapless server's settings that differ from the defaults, device, dtype. Nothing of other engines."""
    changed, about = info.get("changed"), info.get("info")
    if not isinstance(changed, dict):
        return {}
    settings = {name: value for name, value in changed.items() if name not in ADDRESS}
    found = about if isinstance(about, dict) else {}
    return {"settings": settings, **{name: str(found[name]) for name in ("device", "dtype") if name in found}}


def _key(flags: Sequence[str]) -> str:
    """The API key that the servers were given by a flag."""
    for k, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name == "--api-key":
            return value if equals else (flags[k + 1] if k + 1 < len(flags) else "")
    return ""
