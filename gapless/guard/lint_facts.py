"""Holds the lint's findings about a whole file, made before it reports: sources of arguments, results and fields.

A file is walked several times. Each walk reads the findings of the one before it, so that a kind reaches the functions
that a value is passed to, whichever stands first in the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .lint_kinds import NO_KIND, ON_HOST, SOMEWHERE, Kind, joined, says_tensor

Known = set[tuple[str, str]]
"""Names annotated as Tensor in every definition: each with "attribute", "function" or "method"."""


def gather(trees: Iterable[ast.AST]) -> Known:
    """Gather what all files annotate. A name that is a tensor in one place and something else in another is unknown."""
    yes: Known = set()
    no: Known = set()
    for tree in trees:
        for what, name, annotation in _annotated(tree, inside_class=False):
            (yes if says_tensor(annotation) else no).add((what, name))
    return yes - no


def _annotated(node: ast.AST, inside_class: bool) -> Iterator[tuple[str, str, ast.expr | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            what = "attribute" if is_property(child) else "method" if inside_class else "function"
            yield what, child.name, child.returns
        elif isinstance(child, ast.AnnAssign):
            if isinstance(child.target, ast.Attribute):
                yield "attribute", child.target.attr, child.annotation
            elif isinstance(child.target, ast.Name) and inside_class:
                yield "attribute", child.target.id, child.annotation
        yield from _annotated(child, isinstance(child, ast.ClassDef))


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def imported(tree: ast.AST) -> dict[str, str]:
    """Local names of modules and of their members."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


@dataclass
class FileFacts:
    """The kinds of names, fields and results in one file, by the qualified names of its functions and classes."""

    found: dict[tuple[str, str], Kind] = field(default_factory=dict)
    """The last walk's kinds of the names of functions ("=name"), parameters, fields, and results ("return")."""
    finding: dict[tuple[str, str], Kind] = field(default_factory=dict)
    """The kinds that the current walk has found so far."""
    arguments: dict[str, list[str]] = field(default_factory=dict)
    """The parameters of each function in order, and the annotated fields of each class."""
    bases: dict[str, list[str]] = field(default_factory=dict)
    """The bases of each class, as they are written."""
    modules: set[str] = field(default_factory=set)
    """The classes that are modules of torch."""
    used: dict[ast.AST, tuple[set[str], set[str]]] = field(default_factory=dict)
    """The names that each function uses as host tensors, and the names that it uses as tensors."""
    plain: set[str] = field(default_factory=set)
    """The functions that return a plain value of Python, by their annotation."""
    properties: set[str] = field(default_factory=set)
    hot: set[str] = field(default_factory=set)
    """The functions that a loop of this file calls, or a function that is hot itself."""
    plain_memory: Kind = ON_HOST
    """The kind of tensors that factories make if no device is named: the file may set one, or pin memory itself."""

    def add(self, owner: str, name: str, kind: Kind) -> None:
        """Note that a name holds this, in one place among others."""
        key = (owner, name)
        self.finding[key] = joined((self.finding.get(key, NO_KIND), kind))

    def get(self, owner: str, name: str) -> Kind:
        key = (owner, name)
        return self.found.get(key) or self.finding.get(key, NO_KIND)

    def advance(self) -> bool:
        """End a walk; returns whether it found something that the one before it did not."""
        changed = self.found != self.finding
        self.found, self.finding = self.finding, {}
        return changed

    def classes(self, name: str) -> Iterator[str]:
        """The class and the bases of it that are in this file."""
        seen: set[str] = set()
        left = [name]
        while left:
            one = left.pop(0)
            if one in self.bases and one not in seen:
                seen.add(one)
                yield one
                left += self.bases[one]

    def method(self, owner: str, name: str) -> str:
        """The qualified name of a method of a class or of its bases, or nothing."""
        return next((f"{one}.{name}" for one in self.classes(owner) if f"{one}.{name}" in self.arguments), "")

    def attribute(self, owner: str, name: str) -> Kind:
        """The kind of a field or property of a class."""
        for one in self.classes(owner):
            kind = self.get(one, name)
            if kind.place:
                return kind
            if f"{one}.{name}" in self.properties:
                return self.get(f"{one}.{name}", "return")
        return NO_KIND

    def anywhere(self, name: str) -> Kind:
        """The kind of a field of this name that is annotated as a tensor, whichever class has it."""
        kind = joined((SOMEWHERE, *(self.get(owner, name) for owner in self.bases)))
        return kind if kind.place else SOMEWHERE
