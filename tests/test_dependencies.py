"""What the code and its tests import is declared in pyproject.toml and held in constraints.txt."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gapless", "tests", "benchmarks")


def imported(source: str) -> Iterator[str]:
    """Top-level names of all modules that `source` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


OTHER_ENVIRONMENTS = {
    ROOT / "tests/clients/scenarios": "played by hand, each in an environment that tests/clients/record.py makes",
    ROOT / "tests/guard/third_party": "run beside libraries that tests/guard/test_third_party.py installs for them",
}
"""Places whose imports need not be declared, each with its reason."""


@functools.cache
def foreign(folder: str) -> dict[str, str]:
    """Third-party modules imported anywhere in a folder, each with one file that does it."""
    files = sorted((ROOT / folder).rglob("*.py"))
    ours = {path.stem for path in files} | {path.name for path in (ROOT / "tests").iterdir()} | {"gapless"}
    found: dict[str, str] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        known = sys.stdlib_module_names | ours | found.keys()
        # Few files bring another module: to parse all of them takes seconds.
        if known.issuperset(re.findall(r"^\s*(?:import|from) +(\w+)", text, re.MULTILINE)):
            continue
        if OTHER_ENVIRONMENTS.keys().isdisjoint((path, *path.parents)):
            found |= {module: str(path.relative_to(ROOT)) for module in imported(text) if module not in known}
    return found


def plain(requirement: str) -> str:
    """`uvloop>=0.21; platform_system != ...` -> `uvloop`"""
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def declared() -> tuple[set[str], set[str]]:
    """Distributions that the whole package needs, and those that its development needs too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: set(map(plain, listed)) for name, listed in project["optional-dependencies"].items()}
    needed = set(map(plain, project["dependencies"])).union(*(v for name, v in extras.items() if name != "dev"))
    return needed, (needed | extras["dev"]) - {"gapless"}


def undeclared(folder: str, known: set[str]) -> list[str]:
    homes = importlib.metadata.packages_distributions()
    return [
        f"{path} imports {module}"
        for module, path in foreign(folder).items()
        if not {name.lower().replace("_", "-") for name in homes.get(module, [module])} & known
    ]


@pytest.mark.process
def test_every_import_is_declared():
    needed, for_development = declared()
    # pytest itself loads its plug-in; nothing else does. Triton comes with torch's CUDA builds, and only those need it.
    plug_in, kernels = undeclared("gapless", needed)
    assert plug_in == "gapless/guard/pytest_plugin.py imports pytest"
    assert re.fullmatch(r"gapless/kernels/\w+_triton\.py imports triton", kernels)
    assert undeclared("tests", for_development) == []
    assert undeclared("benchmarks", needed) == []


def test_every_declared_distribution_is_held():
    held = {plain(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    assert declared()[1] - held == set()


def test_the_check_can_fail():
    _, for_development = declared()
    (offence,) = undeclared("tests", for_development - {"hypothesis"})
    assert offence.endswith("imports hypothesis")
