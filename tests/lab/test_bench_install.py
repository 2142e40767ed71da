"""`pip install --no-deps .`, prometheus-client and rich: no torch comes, and `gapless bench serve` measures."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.scripted import Model, serving

from gapless.base.install import INSTALL

pytestmark = pytest.mark.net
ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = (
    "No matching distribution",
    "Could not find a version",
    "ConnectionError",
    "NewConnectionError",
    "timed out",
)


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment with gapless and what measuring servers needs."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not in this environment")
    home = tmp_path_factory.mktemp("bench")
    source = home / "source"
    source.mkdir()
    shutil.copytree(ROOT / "gapless", source / "gapless", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True, timeout=60)
    python = home / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--retries", "1"]
    install = [*pip, "install", "--quiet", "--timeout", "10", "-c", str(ROOT / "constraints.txt")]
    for asked in (["--no-deps", str(source)], ["prometheus-client", "rich"]):
        done = subprocess.run([*install, *asked], capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            break
    if done.returncode and any(sign in done.stderr for sign in NO_INDEX):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    yield python.parent
    shutil.rmtree(home)


def run(bin_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [bin_dir / "gapless", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=bin_dir)


def test_the_bench_extra_brings_no_torch_and_measures(bin_dir):
    listed = "import importlib.metadata as m, json; print(json.dumps([d.name.lower() for d in m.distributions()]))"
    listing = subprocess.run([bin_dir / "python", "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    names = set(json.loads(listing.stdout))
    assert {"gapless", "prometheus-client", "rich"} <= {name.replace("_", "-") for name in names} and not names & {
        "torch",
        "numpy",
        "transformers",
        "tokenizers",
    }
    assert "--request-rate" in run(bin_dir, "bench", "serve", "--help").stdout
    with serving(Model(ttft=0.005, itl=0.001)) as url:
        done = run(bin_dir, "bench", "serve", "--base-url", url, "--num-prompts", "4", "--random-output-len", "3")
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     4" in done.stdout


def test_the_bench_extra_asks_questions_without_torch(bin_dir):
    with serving(Model(ttft=0.005, itl=0.001)) as url:
        done = run(bin_dir, "eval", "--base-url", url, "--num-questions", "4", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "\nall " in done.stdout and "4 answers ended at 2 tokens" in done.stdout


@pytest.mark.parametrize("words", [["serve"], ["run", "hello"], ["bench", "latency"]], ids=" ".join)
def test_a_command_that_needs_the_engine_says_what_to_install(bin_dir, words):
    done = run(bin_dir, *words)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert INSTALL in done.stderr


def test_doctor_says_in_a_line_that_the_engine_is_not_there(bin_dir):
    (line,) = (line for line in run(bin_dir, "doctor").stdout.splitlines() if line.startswith("fail  engine"))
    assert "without torch, numpy, " in line and line.endswith(INSTALL)


def test_a_name_of_the_engine_says_what_to_install(bin_dir):
    asked = [bin_dir / "python", "-c", "from gapless import LLM"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False, cwd=bin_dir)
    assert f"gapless.LLM needs numpy, which is not installed: {INSTALL}" in done.stderr
