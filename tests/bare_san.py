"""The wheel of `gapless-san`, and an environment that has it: for tests of the distribution and of its CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "packages" / "gapless-san"
GUARD = ROOT / "gapless" / "guard"


def pip(*words: object, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_made_in(clone: Path) -> Path:
    """Build the wheel of a copy of the files that it is made of: a build leaves files beside them."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for folder in (PROJECT, GUARD):
        shutil.copytree(folder, clone / folder.relative_to(ROOT), symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", clone)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", clone, "./packages/gapless-san", cwd=clone)
    (made,) = clone.glob("gapless_san-*.whl")
    return made


def environment_with(wheel: Path, home: Path) -> Path:
    """Return the bin folder of an environment with the wheel alone; it finds torch and pytest where they are here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=100)
    pip("--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    places = {str(Path(str(module.__file__)).parents[1]) for module in (torch, numpy, pytest)}
    (packages / "others.pth").write_text("\n".join(places))
    starter = home / "bin" / "pytest"
    starter.write_text(f"#!{home / 'bin' / 'python'}\nimport sys, pytest\nsys.exit(pytest.main())\n")
    starter.chmod(0o755)
    return home / "bin"


def run_in(bare: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{bare}:{os.environ['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    first = bare / words[0] if (bare / words[0]).exists() else words[0]
    return subprocess.run(
        [first, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )
