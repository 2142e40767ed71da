"""The distribution `gapless-san`: built from a clone and from its sdist, installed in a bare environment, and run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from bare_san import GUARD, PROJECT, ROOT, environment_with, pip, run_in, wheel_made_in

import gapless

BAD = "import torch\n\nx = torch.ones(3, device='cuda')\nfor _ in range(2):\n    x.tolist()\n"
TEST = "import bad\nimport torch\n\n\ndef test_it():\n    assert torch.cuda.is_available()\n    bad.main()\n"


def toml(path: Path) -> dict[str, object]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_the_distribution_is_the_guard_with_the_version_and_needs_of_gapless():
    own, whole = toml(PROJECT / "pyproject.toml")["project"], toml(ROOT / "pyproject.toml")["project"]
    assert own["version"] == gapless.__version__ and own["requires-python"] == whole["requires-python"]
    assert set(own["dependencies"]) == {need for need in whole["dependencies"] if need.startswith(("torch>", "numpy>"))}
    # pytest skips a plug-in whose name it has.
    assert list(own["entry-points"]["pytest11"]) == list(whole["entry-points"]["pytest11"])
    assert (PROJECT / "gapless_san").resolve() == GUARD


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheel_made_in(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    return environment_with(wheel, tmp_path_factory.mktemp("bare"))


@pytest.mark.process
def test_the_wheel_and_the_sdist_hold_the_guard_and_nothing_else(wheel, tmp_path):
    modules = {file.name for file in GUARD.glob("*.py")} | {"py.typed"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[2] for name in names if name.startswith("gapless_san/")} == modules
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gapless_san"}
    build = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    clone = wheel.parent / "packages" / "gapless-san"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=100)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member for member in archive if member.issym()]
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, sdist, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == names


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")
def test_the_command_runs_lints_and_tests_in_a_bare_environment(bare, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    done = run_in(bare, tmp_path, "gapless-san", "--sarif", "san.sarif", "--", "python", "bad.py")
    assert done.returncode == 1 and "bad.py:5: host-read: torch.Tensor.tolist" in done.stderr, done.stderr
    assert (tmp_path / "san.sarif").exists()
    done = run_in(bare, tmp_path, "gapless-san", "--lint", "--sarif", "lint.sarif", "bad.py")
    assert done.returncode == 1 and "bad.py:5: host-read" in done.stdout, done.stderr
    done = run_in(bare, tmp_path, "gapless-san", "--help")
    assert done.returncode == 0 and all(flag in done.stdout for flag in ("--lint", "--diff", "--device-tensors"))
    done = run_in(bare, tmp_path, "gapless-san", "--", "pytest", "--version")
    assert "gapless san: watched" in done.stderr, done.stderr
    done = run_in(bare, tmp_path, "gapless-san", "--", "ls")
    assert done.returncode == 2 and "gapless-san: error: san runs Python programs" in done.stderr
    (tmp_path / "bad.py").write_text(
        BAD.replace("x =", "def main():\n  x =").replace("for", "  for").replace("    x.", "      x.")
    )
    (tmp_path / "test_it.py").write_text(TEST)
    # Here gapless may be installed beside it: its plug-in has the same name, and one of the two is loaded.
    done = run_in(bare, tmp_path, "python", "-m", "pytest", "-p", "no:cacheprovider", "--gapless-san", "-rA")
    assert done.returncode == 1 and "FAILED test_it.py::test_it" in done.stdout, done.stdout + done.stderr
    assert "2 x bad.py:6: host-read" in done.stdout
    script = "import sys, gapless_san as g, torch\nwith g.no_sync(): torch.ones(1) + 1\nprint('gapless' in sys.modules)"
    assert run_in(bare, tmp_path, "python", "-c", script).stdout == "False\n"


@pytest.mark.process
def test_regions_of_both_names_nest_in_one_process(bare, tmp_path):
    (tmp_path / "both.py").write_text(
        "import gapless_san, torch\nfrom gapless import guard\n"
        "x = torch.ones(3)\nfor one in (guard, gapless_san): one.device_tensor(x)\n"
        "with gapless_san.no_sync(mode='record') as outer, guard.no_sync(mode='record') as inner:\n    x.tolist()\n"
        "print(len(outer.report.findings), len(inner.report.findings))\n"
        "with gapless_san.no_race('record'), guard.no_race('record'):\n    x + 1\nprint('done')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [bare / "python", "both.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
