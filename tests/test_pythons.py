"""On other versions of Python that are here, without their torch: every module compiles, and is imported as far as the
packages there go; `make pythons` says for which the index has a torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = """
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
whole, lacking = [], {}
for path in sorted(pathlib.Path(sys.argv[1], "gapless").rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    name = ".".join(path.relative_to(sys.argv[1]).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
        whole.append(name)
    except ModuleNotFoundError as error:
        if error.name.startswith("gapless"):
            raise
        lacking[error.name] = name
print(*whole)
assert lacking.keys().isdisjoint(sys.stdlib_module_names), lacking
"""


def interpreter(version: str) -> str:
    """Return one that is on PATH, else among pyenv's."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for folder in (*os.environ["PATH"].split(os.pathsep), *map(str, homes)):
        path = shutil.which(f"python{version}", path=folder)
        if path and subprocess.run([path, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return path
    pytest.skip(f"no python{version} here")


@pytest.mark.process
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_every_module_compiles_and_is_imported_if_its_packages_are_there(version: str) -> None:
    if version == ".".join(map(str, sys.version_info[:2])):
        pytest.skip("the suite runs on it")
    done = subprocess.run(
        [interpreter(version), "-I", "-B", "-W", "error", "-c", IMPORTS, str(ROOT)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"gapless", "gapless.cli.main", "gapless.base.config", "gapless.server.config", "gapless.lab.http"} <= set(
        done.stdout.split()
    )
