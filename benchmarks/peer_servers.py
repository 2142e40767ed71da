"""Servers of a side-by-side measurement: started by their command lines, with what they take of the machine."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from gapless.lab.top import Page

POLL_SECONDS = 0.02
STOP_SECONDS = 30.0
TICKS = os.sysconf("SC_CLK_TCK")


class Memory(NamedTuple):
    """Bytes of all processes of a server: `pss` counts a shared page once, `rss` once for each process."""

    pss: int
    rss: int
    processes: int


@dataclass(frozen=True)
class Spec:
    """One side. `where` is a URL, or a command line with {model}, {port} and other words in braces.

    `family` names the engine: of `vllm-uni1` it is `vllm`, so that the best of its modes can be named. With `only` it
    takes part in the cases of that model.
    """

    name: str
    where: str
    only: str = ""

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    @property
    def runs_already(self) -> bool:
        return self.where.startswith(("http://", "https://"))


def parse_spec(text: str) -> Spec:
    """`NAME=COMMAND` or `NAME@MODEL=COMMAND`; a URL in place of the command. Raises ValueError."""
    name, equals, where = text.partition("=")
    name, _, only = name.strip().partition("@")
    if not (equals and name and where.strip()):
        raise ValueError(f"write NAME=COMMAND or NAME=URL, not {text!r}")
    return Spec(name, where.strip(), only)


def filled(command: str, words: Mapping[str, str]) -> list[str]:
    """The command line with {model}, {port}, ... put in. Other braces stay: they may be JSON."""
    for name, value in words.items():
        command = command.replace("{" + name + "}", value)
    return shlex.split(command)


class Server:
    """A server while it runs. `url` stays empty until `start`."""

    def __init__(self, spec: Spec, words: Mapping[str, str], log: Path) -> None:
        self.spec, self.log = spec, log
        self.url = spec.where if spec.runs_already else ""
        self.ready_seconds: float | None = None
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None

    def start(self, limit: float = 600.0) -> None:
        """Start it and wait until it says that it is healthy. Raises RuntimeError with its last words."""
        if self.spec.runs_already:
            return
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = filled(self.spec.where, {**self._words, "port": str(port)})
        self._out = self.log.open("ab")
        begun = time.monotonic()
        # A session of its own: all processes of the server are found, and stopped, by it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True
        )
        while not healthy(port):
            if self._process.poll() is not None or time.monotonic() - begun > limit:
                self.stop()
                raise RuntimeError(f"{self.spec.name} did not start: {last_line(self.log)}")
            time.sleep(POLL_SECONDS)
        self.ready_seconds = time.monotonic() - begun

    def stop(self) -> None:
        if self._process is None:
            return
        processes = {pid: begun_at(pid) for pid in self.pids()}
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        for pid, begun in processes.items():  # those that outlive their parent
            if begun and begun_at(pid) == begun:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._out is not None:
            self._out.close()

    def pids(self) -> list[int]:
        """Return all processes of the server; none if it was not started here."""
        return [] if self._process is None else family_of(self._process.pid)

    def memory(self) -> Memory | None:
        pids = self.pids()
        return memory_of(pids) if pids else None

    def metrics(self) -> Page:
        """Fetch the server's counters; a server without any gives an empty page."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as answer:
                return Page(answer.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError:
            return Page("")

    def cpu_seconds(self) -> float:
        """Return the processor time of the server's present processes."""
        return sum(map(cpu_of, self.pids()))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()]
    return (told or lines or ["it said nothing"])[-1]


def family_of(leader: int) -> list[int]:
    """Return a process, its descendants and its session, without zombies."""
    parents, sessions = {}, {}
    for entry in Path("/proc").iterdir():
        fields = stat_fields(int(entry.name)) if entry.name.isdecimal() else []
        if fields and fields[0] != "Z":
            parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, session in sessions.items() if session == leader}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def begun_at(pid: int) -> int:
    """Return the start of a process in clock ticks since boot, which with its number identifies it; 0 if it has
    ended."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on (a name may hold spaces); empty when the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_of(pid: int) -> float:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def memory_of(pids: list[int]) -> Memory:
    pss = rss = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has just ended
        pss += kilobytes(text, "Pss")
        rss += kilobytes(text, "Rss")
    return Memory(pss * 1024, rss * 1024, len(pids))


def kilobytes(text: str, name: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:")), 0)
