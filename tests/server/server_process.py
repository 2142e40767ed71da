"""`serve` in a process of its own, on a core without a model unless a worker is named."""

import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
from server_harness import VOCAB, write_model
from waiting import until

FAKE = ("gapless.testing.worker", str(VOCAB))
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from gapless.base.config import EngineConfig
from gapless.server.config import ServerConfig
from gapless.server.run import serve
engine, server, worker = json.loads(sys.argv[1])
server = {name: tuple(v) if isinstance(v, list) else v for name, v in server.items()}
sys.exit(serve(EngineConfig(**engine), ServerConfig(**server), worker=worker))
"""


def write_tiny(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


def command(model, engine, worker, pace, server):
    settings = json.dumps([{"model": model, **(engine or {})}, {"port": 0, **server}, worker or [*FAKE, str(pace)]])
    return [sys.executable, "-c", PROGRAM, settings]


class Process:
    def __init__(self, words):
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        self.banner = ""

    def wait_ready(self):
        for line in self.popen.stdout:
            self.banner += line
            if line.startswith("  curl "):  # its last line
                break
        assert self.banner.strip(), self.popen.stderr.read()
        found = re.search(r"http://[^ ,]+:\d+", self.banner)
        self.url = found[0] if found else ""

    def client(self):
        return httpx.Client(base_url=self.url, timeout=60)

    def child(self):
        """Process id of the engine."""
        pids = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(pids[0]) if pids else None

    def end(self, number=signal.SIGTERM):
        self.popen.send_signal(number)
        return self.popen.wait(60)


@contextmanager
def process(model, pace=0.0, engine=None, worker=None, **server):
    started = Process(command(model, engine, worker, pace, server))
    try:
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.kill()
        started.popen.wait()
        started.popen.stdout.close()
        started.popen.stderr.close()


def failing(model, engine=None, worker=None, **server):
    """(exit code, stderr) of a serve that must not come up."""
    words = command(model, engine, worker, 0, server)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def gone(pid):
    """Whether a process ends, which it is meant to do soon."""

    def ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    until(ended)
    return True
