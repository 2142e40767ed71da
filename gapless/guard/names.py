"""Finds out whether a program names CUDA in its source, before anything of it is run or imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from .sites import is_library

_FILES_READ = 500
"""Files of one program that are read at most; a program that names CUDA does so near its start."""


def names_cuda(program: str, args: Sequence[str], module: bool) -> str | None:
    """Return the place that names CUDA in the program's arguments or its own files, or None.

    Its own files are the program's and those it imports, libraries left out. Comments and docstrings do not count.
    """
    for word in args:
        if "cuda" in word:
            return f"its argument {word}"
    folder = str(Path.cwd() if module else Path(program).resolve().parent)
    search = [folder, *sys.path[1:]]
    first = _module_files(f"{program}.__main__", search) or _module_files(program, search) if module else [program]
    if all(is_library(file) or not file.endswith(".py") for file in first):  # a launcher, such as torchrun
        first = [*first, *(word for word in args if word.endswith(".py"))]
    waiting, seen = [Path(file) for file in first], set[Path]()
    while waiting and len(seen) < _FILES_READ:
        path = waiting.pop(0)
        if path in seen or not path.is_file() or path.suffix != ".py":
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # running it will raise its error
        # Strings that stand alone are docstrings.
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        if any(_is_cuda(node) for node in ast.walk(tree) if id(node) not in alone):
            return path.name
        for name, places in _imports(tree, path, search):
            waiting += [Path(file) for file in _module_files(name, places) if not is_library(file)]
    return None


def _is_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and "cuda" in node.value
    return "cuda" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def _imports(tree: ast.Module, path: Path, search: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that a file imports, each with the folders to search."""
    above = path.resolve().parents
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, search) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            places = [str(above[min(node.level, len(above)) - 1])] if node.level else search
            base = [node.module] if node.module else []
            yield ".".join(base or ["__init__"]), places
            yield from ((".".join([*base, alias.name]), places) for alias in node.names)


def _module_files(name: str, search: Sequence[str]) -> list[str]:
    """Return the file of a module; [] where there is none. Nothing is imported, not even the packages around it."""
    places: Sequence[str] = search
    file = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, list(places)) if part else None
        if spec is None:
            return []
        file, places = spec.origin, list(spec.submodule_search_locations or ())
    return [file] if file else []
