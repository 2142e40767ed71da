"""The wheel in GAPLESS_WHEEL in a bare environment without a compiler: installed, served from and asked, with times."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

WHEEL = os.environ.get("GAPLESS_WHEEL", "")
INSTALL_SECONDS, START_SECONDS = 900, 120
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
pytestmark = pytest.mark.skipif(not WHEEL, reason="installs torch into an environment of its own: make wheel-serves")


def processor_seconds() -> float:
    """What children that have ended took, which other programs here do not lengthen much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.timeout(INSTALL_SECONDS + START_SECONDS)
def test_a_bare_environment_installs_the_wheel_and_serves_without_compiling(tmp_path):
    """The packages of constraints.txt are fetched before: their download is not timed."""
    bin_dir, cache = tmp_path / "bare" / "bin", tmp_path / "cache"
    constraints = Path(__file__).resolve().parents[2] / "constraints.txt"
    bare = {"PATH": str(bin_dir), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache)}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "bare"], check=True, timeout=120)
    pip = [bin_dir / "python", "-m", "pip"]
    fetch = [*pip, "download", "-q", "-c", constraints, "-d", tmp_path / "packages", WHEEL]
    subprocess.run(fetch, check=True, timeout=INSTALL_SECONDS)
    begun, before = time.monotonic(), processor_seconds()
    install = [*pip, "install", "-q", "--no-index", "--find-links", tmp_path / "packages", WHEEL]
    subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
    installed, of_pip = time.monotonic(), processor_seconds() - before
    serve = [bin_dir / "gapless", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(serve, env=bare, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            said = ""
            while not (at := re.search(r"http://127\.0\.0\.1:\d+", said)):
                line = server.stdout.readline()
                assert line, said
                said += line
            ready = time.monotonic()
            request = urllib.request.Request(
                f"{at[0]}/v1/chat/completions", json.dumps(ASKED).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=START_SECONDS) as reply:
                answer = json.load(reply)["choices"][0]["message"]["content"]
            answered = time.monotonic()
        finally:
            server.terminate()
            server.wait(60)
            of_server = processor_seconds() - before - of_pip
    doctor = subprocess.run(
        [bin_dir / "gapless", "doctor"], env=bare, capture_output=True, text=True, timeout=120, check=False
    )
    print(f"\n{said}{answer}\n{doctor.stdout}")
    times = installed - begun, ready - installed, answered - ready
    print("installed in {:.1f} s, ready {:.1f} s later, answered {:.2f} s after that".format(*times))
    print(f"processor time: {of_pip:.1f} s of pip, {of_server:.1f} s of the server")
    assert "42" in answer and "compiling" not in said
    assert not list(cache.rglob("*.so")), "nothing was compiled"
    assert re.search(r"cpu kernels +native: prebuilt for ", doctor.stdout)
