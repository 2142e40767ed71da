"""Counts how the package reads: lines by room, habits of its texts, shared names, private accesses, cycles."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from io import StringIO
from pathlib import Path

PACKAGE = "gapless"
IDIOMS = re.compile(
    r"\b(so many|whoever|somebody|nobody|the one who|told|lies|anew|let be|the like|twins?|worked out|as it were"
    r"|(?:at|bring|brings|results|come|comes|go|goes) home)\b",
    re.IGNORECASE,
)
"""Words that docs/style.md asks to avoid, as far as a search can tell them from their usual sense."""
SLASHED = (".cpp", ".h", ".js", ".css")
"""Files whose comments begin with slashes"""
FRAGMENT = re.compile(
    r"(Of|As|By|Where|The same|Its|Likewise|Also|And|But|Or|So|For|From|To|In|On|At|With|Without|Behind|Beside|Between"
    r"|Until|Unless|While|Who|Whose|That|Not|Those|It|They|Such)\b"
)
"""First words of a docstring that means nothing without the line above it."""
_PREPOSITION = "(?:of|in|to|for|at|on|by|from|with|after|before|through|under|over|into|until)"
HABITS = {
    "what it was": r"^What\b|\bwhat (?:it|was|were|is|are|has|have|had|comes?|they|does|do|did)\b",
    "those": r"\b[Tt]hose\b",
    "says, knows, learns": r"\b(?:says?|said|knows|learns|hears)\b",
    "of which": rf"\b{_PREPOSITION} (?:which|whom)\b",
    "where for if": r"(?:^|(?<=[.!?:;] ))Where\b|, where\b",
    "has come": r"\b(?:has|have|had|is|are|was|were) (?:come|gone|to come|had|been had|to be had|there)\b",
    "goes on": r"\b(?:go|goes|went|going|gone) on\b|\bon (?:its|their|the) way\b",
}
"""Clauses that a noun or a name replaces: how many docstrings and comments may hold each is counted."""
ALIAS = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
CONSTANT = re.compile(r"[A-Z][A-Z0-9_]+")
DOCUMENTED = {
    "_replace", "_asdict", "_fields", "_field_defaults", "_make", "_exit", "_getframe", "_C", "_make_wrapper_subclass",
    "_disabled_torch_function_impl", "_raw_saved_result",
}  # fmt: skip
"""Public names that begin with an underscore: those of named tuples, os, sys and torch."""


PROGRAMS = {"kinds", "real", "sound", "third_party"}
"""Folders of tests/guard with programs that are checked."""


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return _parsed(path.read_text(encoding="utf-8"))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def lines_before(root: Path) -> tuple[str, int] | None:
    """The commit that this tree is compared with, and the package's lines then: the merge base with main, on main
    itself the last commit. None without git, or if neither is known."""
    base, head = _git(root, "merge-base", "HEAD", "main"), _git(root, "rev-parse", "HEAD")
    commit = _git(root, "rev-parse", "--short", "HEAD~1" if base in ("", head) else base)
    counts = _git(root, "grep", "-c", "", commit, "--", f"{PACKAGE}/*.py") if commit else ""
    return (commit, sum(int(line.rpartition(":")[2]) for line in counts.splitlines())) if counts else None


def _git(root: Path, *arguments: str) -> str:
    """Return the output of git, empty if it fails or is missing."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def forget() -> None:
    """Drop what was parsed: millions of objects, which the garbage collector would walk in all later tests."""
    _parsed.cache_clear()
    _walked.cache_clear()
    _comments.cache_clear()


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return _walked(path.read_text(encoding="utf-8"))


@cache
def _walked(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(text)))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_by_room(root: Path) -> Counter[str]:
    """Python lines of each folder of the package; files beside the folders count for the package itself."""
    counts: Counter[str] = Counter()
    for path in python_files(root / PACKAGE):
        room, *rest = path.relative_to(root / PACKAGE).parts
        counts[room if rest else PACKAGE] += count_lines(path)
    return counts


def function_sizes(path: Path) -> list[tuple[str, int]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes(path) if isinstance(n, kinds)]


def function_spread(root: Path) -> tuple[int, int, int]:
    """Lines of the median function, of the 95th of a hundred, and of the longest."""
    sizes = sorted(size for path in python_files(root / PACKAGE) for _, size in function_sizes(path))
    return int(statistics.median(sizes)), sizes[int(len(sizes) * 0.95)], sizes[-1]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string that stands alone as a statement: docstrings, and the texts below fields and constants."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def fragments(root: Path) -> list[str]:
    """`file:line: first line` of each docstring that begins in the middle of a sentence."""
    return [
        f"{path.relative_to(root)}:{line}: {text.splitlines()[0]}"
        for path in python_files(root / PACKAGE)
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]


def idioms(root: Path) -> list[str]:
    """`file:line: word` of each word of IDIOMS in prose: that of the package, messages and flag help among it, of the
    examples, the benchmarks and the manual."""
    return [
        f"{path.relative_to(root)}:{line}: {found}"
        for path in _written(root)
        if path.name != "style.md"  # which lists them
        for line, text in _prose(path, messages=path.is_relative_to(root / PACKAGE))
        for found in IDIOMS.findall(text)
    ]


def _written(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.md"))
    for folder in (PACKAGE, "docs", "examples", "benchmarks"):
        yield from (path for path in sorted((root / folder).rglob("*")) if path.suffix in (".md", ".py", *SLASHED))


def _prose(path: Path, messages: bool) -> Iterator[tuple[int, str]]:
    """Yield docstrings and comments, with `messages` every other string of Python too; all of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _strings(path) if messages else docstrings(path)
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md":
            yield number, line
        elif comment := re.search(r"(?:^|\s)#\s(.*)" if path.suffix == ".py" else r"(?:^\s*\*|//|/\*)(.*)", line):
            yield number, comment[1]


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def habits(root: Path) -> dict[str, list[str]]:
    """`file:line: text` of each docstring and comment of the package with a clause of HABITS, by clause."""
    found: dict[str, list[str]] = {name: [] for name in HABITS}
    for path in python_files(root / PACKAGE):
        for line, text in (*docstrings(path), *_comments(path.read_text(encoding="utf-8"))):
            for name, clause in HABITS.items():
                if re.search(clause, text):
                    found[name].append(f"{path.relative_to(root)}:{line}: {text.splitlines()[0]}")
    return found


@cache
def _comments(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]


def class_names(path: Path) -> set[str]:
    """Classes, and the names in their style that a module assigns: aliases, NewTypes, type variables."""
    classes = {node.name for node in nodes(path) if isinstance(node, ast.ClassDef)}
    return classes | {name for name in _assigned(parsed(path).body) if ALIAS.fullmatch(name)}


def constants(path: Path) -> set[str]:
    return {name for name in _assigned(parsed(path).body) if CONSTANT.fullmatch(name)}


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module assigns, below `if` and `try` too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _assigned(node.body + node.orelse)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name):
                    yield name.id


def shared(root: Path, names: Callable[[Path], set[str]]) -> list[str]:
    """`name: files` of each of the `names` that more than one file of the package defines."""
    found: dict[str, list[str]] = {}
    for path in python_files(root / PACKAGE):
        for name in names(path):
            found.setdefault(name, []).append(path.relative_to(root / PACKAGE).as_posix())
    return [f"{name}: {', '.join(files)}" for name, files in sorted(found.items()) if len(files) > 1]


def private_accesses(root: Path) -> Counter[str]:
    """How often tests use private names of others: as `other._name`, in an import, or as text (`setattr(x, "_name")`).

    Names of `self` and `cls` are a test's own. Programs for the sanitizer are no tests, and use torch as others do.
    """
    names = (name for path in _tests(root) for node in nodes(path) for name in _named(node))
    return Counter(name for name in names if re.match(r"_[A-Za-z]", name) and name not in DOCUMENTED)


def _tests(root: Path) -> list[Path]:
    return [path for path in python_files(root / "tests") if not PROGRAMS.intersection(path.parts)]


def _named(node: ast.AST) -> Iterator[str]:
    """Yield the names that this node itself takes from an object or a module."""
    match node:
        case ast.Attribute(ast.Name("self" | "cls")):
            pass
        case ast.Attribute(attr=name):
            yield name
        case ast.ImportFrom(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.Call(ast.Attribute(attr="replace")):  # of a str or a Path
            pass
        case ast.Call(args=[ast.Constant(str(path)), *_]) if re.fullmatch(r"[\w.]+\._\w+", path):
            yield path.rpartition(".")[2]  # monkeypatch.setattr("module._name", ...)
        case ast.Call(args=[_, ast.Constant(str(name)), *_]):
            yield name


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or through others."""
    reached = {module: _reach(graph, module) for module in graph}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    open_ends = list(graph[start])
    while open_ends:
        if (module := open_ends.pop()) in graph and module not in seen:
            seen.add(module)
            open_ends += graph[module]
    return seen
