"""Every benchmark runs at its smallest size, so that none rots; the manual names those that are there."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAIR = "--kv-tier host:16MiB --kv-tier peer:16MiB"
SMALLEST = {
    "adapted_rows": ["--rows", "4", "--adapters", "2", "--rounds", "1"],
    "format_accuracy": ["--questions", "2", "--only", "weights int8"],
    "front_cost": ["--streams", "2", "--tokens", "8", "--rounds", "1"],
    "gpu_all": ["--cpu"],
    "gpu_ranks": ["--only", "sums", "--device", "cpu", "--rows", "1", "--width", "64"],
    "host_step": ["--chains", "--rows", "1", "--steps", "300"],
    "in_turns": ["--model", "demo", "--arm", "one=device=cpu", "--rows", "2", "--prompt", "16", "--output", "24",
                 "--rounds", "1", "--kv-mib", "64"],
    "kv_tiers_load": ["--part", "begins", "--host", "64MiB"],
    "lanes": ["--rows", "2", "--asks", "top-k", "--output", "32", "--rounds", "1"],
    "load_client": ["--concurrency", "2", "--tokens", "4", "--rounds", "1"],
    "peer_models": ["--only", "tiny", "--out", "models"],
    "peers": ["--out", "read", "--read", str(ROOT / "docs" / "measurements" / "peers-amx.json")],
    "prefill_decode": ["--model", "demo", "--requests", "4", "--rounds", "1", "--rate", "20", "--shortest", "40",
                       "--longest", "90", "--output", "8", "--pair", PAIR],
    "prompts": ["--beside", "0", "--model", str(ROOT / "gapless/demo/weights"), "--prompts", "3", "--longest", "40",
                "--max-model-len", "256"],
    "rank_sums": ["--rounds", "20", "--busy", "0"],
    "rows": ["--model", "demo", "--device", "cpu", "--rows", "2", "--prompt", "16", "--output", "8", "--rounds", "1"],
    "san_cost": ["--rounds", "1", "--layers", "1", "--tokens", "4"],
    "speculation": ["--works", "numbers", "--rows", "1", "--output", "16", "--rounds", "1"],
    "structured": ["--rows", "2", "--prompt", "16", "--output", "8", "--rounds", "1"],
}  # fmt: skip
"""The arguments of each program. Beyond this gpu_all needs a GPU; tests/lab/test_peers.py plays whole runs of peers."""
PRINTED = {
    "gpu_all": "tokens_per_s=", "kv_tiers_load": "begins,", "load_client": "p99", "peer_models": "",
    "prefill_decode": "apart / mixed", "san_cost": "x off",
}  # fmt: skip
"""Part of the output of those that print no table"""


def programs() -> set[str]:
    return {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}


def test_every_benchmark_has_its_smallest_size():
    assert programs() == set(SMALLEST)


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_benchmark_runs_at_its_smallest_size(name, tmp_path):
    if name == "san_cost":
        pytest.importorskip("transformers", reason="san_cost.py measures a program of transformers")
    assert PRINTED.get(name, "|") in printed(name, SMALLEST[name], tmp_path)


def printed(name, arguments, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(BENCHMARKS))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_gpu_ranks_compares_ranks_with_one_on_processors(tmp_path):
    small = ["--device", "cpu", "--model", "demo", "--prompt", "16", "--output", "8", "--rounds", "1"]
    assert "| demo | auto | 2 | 1 |" in printed("gpu_ranks", ["--only", "tp", "--rows", "1", *small], tmp_path)


def test_a_record_of_ranks_has_the_worst_figure_beside_its_aim(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    Table = importlib.import_module("rank_table").Table

    options = Namespace(only="pd", device="cpu", device_ids=None, json=tmp_path / "ranks.json")
    table = Table(options, "prompts", "TTFT p99")
    options.device = "cuda"
    for length, ratio in ((512, 0.8), (2048, 1.2), (8192, 0.9)):
        table.row(length, ratio, found={"TTFT p99": ratio, "no aim": 1.0})
    found = json.loads(options.json.read_text())
    assert found["rows"][1] == ["2048", "1.2", "<= 1 x: missed"]
    assert found["head"] == ["prompts", "TTFT p99", "aim"] and found["found"] == [["pd", 2, "TTFT p99", 1.2]]


def test_manual_names_benchmarks_that_are_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (path.name, script)
        for path in pages
        if path.parent.name != "notes"
        for script in re.findall(r"benchmarks/(\w+)\.py", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not {one for one in named if not (BENCHMARKS / f"{one[1]}.py").is_file()}
