"""The table of tuning constants: module-level values whose docstring begins with a unit in brackets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
_DOCUMENTED = re.compile(r"\[(.+?)\] (.+)", re.DOTALL)
"""A unit and a reason"""


class Constant(NamedTuple):
    module: str
    """Path in the package"""
    name: str
    """Several names that share a reason are joined by commas."""
    value: str
    """The expression in the module"""
    unit: str
    reason: str


def constants(package: Path = PACKAGE) -> Iterator[Constant]:
    """Yield every tuning constant: first the controllers', then the others, by module."""
    modules = {path: path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    for path, module in sorted(modules.items(), key=lambda item: (not item[1].startswith("pace/"), item[1])):
        text = path.read_text(encoding="utf-8")
        if '\n"""[' in text:
            yield from _of_module(module, text)


def _of_module(module: str, text: str) -> Iterator[Constant]:
    for node, after in pairwise(ast.parse(text).body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name, found = ast.unparse(node.targets[0]).strip("()"), _DOCUMENTED.match(str(after.value.value))
            if name.isupper() and found:
                value = ast.get_source_segment(text, node.value) or ""
                yield Constant(module, name, value, found[1], " ".join(found[2].split()))
