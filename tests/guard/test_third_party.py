"""`gapless san` on released libraries: two races that were shipped, the releases that mend them, and one that is open.

Each library lies in a folder of its own under build/, without what it depends on: the torch is that of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

HERE = Path(__file__).parent / "third_party"
ROOT = HERE.parents[2]
FOLDERS = ROOT / "build" / "third-party"
pytestmark = [
    pytest.mark.process,
    pytest.mark.net,
    pytest.mark.xdist_group("third_party"),  # two workers may not install one package at once
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
]

TIMM = ("torchvision==0.28.0", "pillow==12.0.0")
TITAN = (
    "spmd_types==0.2.3", "torch_checkpointing==0.1.1", "tyro==1.0.17", "einops==0.8.2", "docstring-parser==0.18.0",
    "typeguard==4.6.1",
)  # fmt: skip


class Case(NamedTuple):
    """A program, the packages that it needs, and what is found: `RULE FILE:LINE`, races apart, since all are named."""

    program: str
    args: str = ""
    packages: tuple[str, ...] = ()
    races: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


CASES = {
    "diffusers 0.35.2": Case(
        "offloaded_groups.py", "", ("diffusers==0.35.2", "pillow==12.0.0"), ("group_offloading.py:157",),
        ("stream-wait group_offloading.py:208", "stream-wait group_offloading.py:320"),
    ),
    "diffusers 0.42.1": Case(
        "offloaded_groups.py", "", ("diffusers==0.42.1", "pillow==12.0.0"), (),
        ("stream-wait group_offloading.py:279", "stream-wait group_offloading.py:428"),
    ),
    "diffusers 0.42.1, blocks alone": Case(
        "offloaded_groups.py", "bare", ("diffusers==0.42.1", "pillow==12.0.0"), ("hooks.py:217",),
        ("stream-wait group_offloading.py:279",),
    ),
    "timm 1.0.20": Case("prefetched_batches.py", "", ("timm==1.0.20", *TIMM), ("loader.py:138",)),
    "timm 1.0.20, autocast": Case("prefetched_batches.py", "autocast", ("timm==1.0.20", *TIMM), ("loader.py:138",)),
    "timm 1.0.31, autocast": Case("prefetched_batches.py", "autocast", ("timm==1.0.31", *TIMM)),
    "trl 1.16.0": Case(
        "offloaded_activations.py", "", ("trl==1.16.0",), (),
        ("stream-wait activation_offloading.py:614", "stream-wait activation_offloading.py:615"),
    ),
    "peft 0.21.2": Case("adapters.py", "", ("peft==0.21.2",), (), ("upload adapters.py:10",)),
    "torchtitan 0.3.0": Case(
        "pretraining.py", "", ("torchtitan==0.3.0", *TITAN), (),
        ("upload module.py:209", "host-read pretraining.py:37"),
    ),
    "accelerate": Case(
        "offloaded_layers.py", waits=("upload offloaded_layers.py:11", "empty-cache offloaded_layers.py:11")
    ),
    "transformers, experts": Case("experts.py", "default", waits=("host-read experts.py:19",)),
    "transformers, experts one by one": Case("experts.py", "eager", waits=("host-index experts.py:19",)),
    "transformers, experts in a batch": Case("experts.py", "batched_mm", waits=("host-read experts.py:19",)),
    "FSDP2, bfloat16": Case("fully_sharded.py", "mixed", waits=("upload fully_sharded.py:17",)),
    "FSDP2, offload": Case(
        "fully_sharded.py", "offload", waits=("copy-to-host fully_sharded.py:19", "event-wait fully_sharded.py:24")
    ),
}  # fmt: skip


def installed(package: str) -> Path:
    """Return the folder of a package, installed there now unless it has been; skips the test where that fails."""
    folder = FOLDERS / package
    if not (folder / ".installed").exists():
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder), package]
        done = subprocess.run(install, capture_output=True, text=True, timeout=200, check=False)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
        (folder / ".installed").touch()
    return folder


def found_in(case: Case, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Run the program under san; returns the places of the races, and the waits with theirs."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "gapless.guard.run", "--device-tensors", "cuda", "--json", str(out)]
    folders = [str(installed(package)) for package in case.packages]
    paths = {"PYTHONPATH": os.pathsep.join([*folders, str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(HERE / case.program), *case.args.split()], cwd=tmp_path,
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert "done" in done.stdout, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert not report["incomplete"]
    places = [(entry["rule"], f"{Path(entry['file']).name}:{entry['line']}") for entry in report["findings"]]
    return [place for rule, place in places if rule == "race"], [f"{rule} {place}" for rule, place in places]


@pytest.mark.parametrize("name", CASES)
def test_a_released_library_has_the_races_and_waits_that_are_known_of_it(name, tmp_path):
    races, waits = found_in(CASES[name], tmp_path)
    assert tuple(races) == CASES[name].races
    assert set(CASES[name].waits) <= set(waits), waits
    assert not {wait.split()[0] for wait in waits} & {"host-operand"}, waits
