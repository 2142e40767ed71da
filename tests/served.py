"""`gapless serve` as a user starts it, for the tests of several rooms."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import deque

START_SECONDS = 120


class Server:
    """`gapless serve` in a process of its own, on a free port."""

    program: tuple[str, ...] = ("-m", "gapless")
    """What Python runs"""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, *self.program, "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: deque[str] = deque(maxlen=200)
        self.greeting: list[str] = []
        """What it prints until it is ready; `lines` are the last ones."""
        self.base = ""
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._found.wait(START_SECONDS) and self.base, "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if not self._found.is_set():
                self.greeting.append(line)
            match = re.search(r" at (http://\S+?),", line)
            self.base = self.base or (match[1] if match else "")
            if line.strip().startswith("curl "):  # the last line of the greeting
                self._found.set()
        self._found.set()
        self.process.stdout.close()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.base + path, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """Sum over the labels of one series."""
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"no series {name}"
        return sum(map(float, found))

    def pages(self, state: str) -> float:
        found = re.search(rf'^gapless:kv_pages{{.*state="{state}".*}} (\S+)$', self.get("/metrics"), re.MULTILINE)
        assert found
        return float(found[1])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._reader.join(60)
        return self.process.wait(60)
