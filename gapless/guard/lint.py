"""The static half of no_sync: looks for the same shapes in source text, without running or importing anything."""

from __future__ import annotations

import ast
import linecache
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .lint_kinds import (
    Kind,
    Names,
    gather,
    imported,
    is_cpu,
    keyword,
    pins,
    says_true,
    target_device,
)
from .report import Finding, SyncReport, as_text
from .report_files import as_dict, check_files, write_files
from .sites import Frame
from .suppress import apply, comment_at, tell_unused
from .suppress import gather as gather_suppressions
from .sync_rules import COLLECTIVES, CUDA_WAITS, RULES

_SIZES = ("max", "min", "amax", "amin", "sum", "argmax")
_DATA_SIZES = ("nonzero", "argwhere", "masked_select")
_COUNTED = ("bincount", "unique", "unique_consecutive")
# One query is no poll.
_CALLS = {f"{owner}.{name}": rule for owner, name, rule in (*CUDA_WAITS, *COLLECTIVES) if rule != "event-poll"}
_CALLS["torch.cuda.graph"] = "graph-capture"


class Linter(ast.NodeVisitor):
    """Walks one file in the order of its statements."""

    def __init__(self, path: str, names: Names, report: SyncReport) -> None:
        self._path = path
        self._names = names
        self._report = report
        self._functions: list[str] = []
        self._allowed: str | None = None
        """The reason of the innermost `with allow(...)`."""

    def _found(self, rule: str, node: ast.expr | ast.stmt) -> None:
        entry = RULES[rule]
        function = ".".join(self._functions) or "<module>"
        line = ast.unparse(node).split("\n")[0]
        finding = Finding(
            "lint", rule, line if len(line) < 80 else line[:77] + "...", entry.why, entry.instead,
            (Frame(self._path, node.lineno, function),),
        )  # fmt: skip
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        comments = (comment_at(Frame(self._path, number, function)) for number in lines)
        self._report.add(finding, next(filter(None, comments), self._allowed))

    # Names.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults):
            self.visit(part)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._names.scopes.append({arg.arg: self._names.annotated(arg.annotation) for arg in arguments})
        self._functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._names.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        kind = self._names.of(node.value)
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self._check_store(target, node.value, node)
            else:
                self._names.bind(target, kind)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            kind = self._names.of(node.value)
            self._names.bind(node.target, kind if kind.place else self._names.annotated(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._names.bind(node.target, self._names.of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._bind_items(node)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _bind_items(self, node: ast.For | ast.comprehension) -> None:
        """Give the target the kind of an item of the iterable."""
        self.visit(node.iter)
        kind = self._names.of(node.iter)
        self._names.bind(node.target, Kind(kind.place) if kind.tensor else Kind())

    def visit_With(self, node: ast.With) -> None:
        outer = self._allowed
        for item in node.items:
            self.visit(item.context_expr)
            self._allowed = _allow_reason(item.context_expr) or self._allowed
        for statement in node.body:
            self.visit(statement)
        self._allowed = outer

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_items(node)
        for test in node.ifs:
            self.visit(test)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self._names.scopes.append({})
        for generator in node.generators:
            self.visit(generator)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self._names.scopes.pop()

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    # Conditions and texts.

    def visit_If(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self._check_condition(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_Assert = visit_If

    def _check_condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp):
            for value in test.values:
                self._check_condition(value)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._check_condition(test.operand)
        # `if self.bias:` over an optional tensor would be wrong, but is far more often a list or a flag of that name.
        elif self._names.of(test).on_device and not isinstance(test, ast.Attribute):
            self._found("host-read", test)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if self._names.of(node.value).on_device:
            self._found("host-read", node.value)
        self.generic_visit(node)

    # Indexing.

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and self._names.of(node.value).on_device:
            for index in _indices(node.slice):
                self._check_index(node, index)
                if self._names.of(index).mask and self._names.of(index).on_device:
                    self._found("mask-index", node)

    def _check_index(self, node: ast.Subscript, index: ast.expr) -> None:
        if isinstance(index, ast.Slice):
            if any(self._names.of(bound).on_device for bound in (index.lower, index.upper, index.step)):
                self._found("host-index", node)
        elif isinstance(index, ast.List) or (self._names.of(index).on_host and not self._names.of(index).mask):
            self._found("index-by-host", node)

    def _check_store(self, target: ast.Subscript, value: ast.expr, node: ast.stmt) -> None:
        self.visit(target.slice)
        if not self._names.of(target.value).on_device:
            return
        indices, number = _indices(target.slice), _is_number(value)
        for index in indices:
            self._check_index(target, index)
        kinds = [self._names.of(index) for index in indices]
        if any(kind.mask and kind.on_device for kind in kinds):
            if not (number and len(indices) == 1):
                self._found("mask-index", node)
        elif any(kind.on_device for kind in kinds):
            if number:
                self._found("index-put-scalar", node)
        elif number and len(indices) == 1 and _is_number(indices[0]):
            self._found("scalar-assign", node)

    # Calls.

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        dotted = self._names.dotted(node.func)
        rules: Iterable[str] = ()
        if dotted.startswith("torch."):
            rules = self._torch_rules(node, dotted)
        elif isinstance(node.func, ast.Attribute):
            rules = self._method_rules(node, node.func)
        elif isinstance(node.func, ast.Name) and node.args:
            rules = self._builtin_rules(node.func.id, node.args[0])
        for rule in rules:
            self._found(rule, node)

    def _builtin_rules(self, name: str, argument: ast.expr) -> Iterator[str]:
        if not self._names.of(argument).on_device:
            return
        if name in ("int", "float") and _is_size(argument):
            yield "host-size"
        elif name in ("int", "float", "bool", "print", "str", "repr", "complex"):
            yield "host-read"
        elif name == "range":
            yield "host-index"

    def _torch_rules(self, node: ast.Call, dotted: str) -> Iterator[str]:
        module, _, name = dotted.rpartition(".")
        first = self._names.of(node.args[0]) if node.args else Kind()
        placed = keyword(node, "device")
        if pins(node):
            yield "pinned-alloc"
        if dotted in _CALLS:
            yield _CALLS[dotted]
        elif module == "torch" and name in ("tensor", "as_tensor") and placed is not None:
            if not is_cpu(placed) and not first.on_device:
                yield "list-to-device"
        elif module == "torch" and first.on_device:
            yield from self._shared_rules(name, node, node.args[1:], one_argument=len(node.args) == 1)

    def _method_rules(self, node: ast.Call, func: ast.Attribute) -> Iterator[str]:
        base, name = self._names.of(func.value), func.attr
        if name == "synchronize" and not node.args:
            yield "event-wait"
        elif name == "capture_begin":
            yield "graph-capture"
        elif name in ("to", "cuda") and base.tensor:
            yield from _placing(node, name, base)
        elif name == "pin_memory" and base.tensor:
            yield "pinned-alloc"
        elif base.on_device:
            if name in ("item", "tolist"):
                yield "host-size" if _is_size(func.value) else "host-read"
            elif name in ("cpu", "numpy"):
                yield "copy-to-host"
            elif name == "new_tensor":
                yield "list-to-device"
            elif name == "type" and node.args and "Tensor" in ast.unparse(node.args[0]):
                yield "type-hop"
            else:
                yield from self._shared_rules(name, node, node.args, one_argument=False)

    def _shared_rules(self, name: str, node: ast.Call, rest: Sequence[ast.expr], one_argument: bool) -> Iterator[str]:
        """Check what can be called as a function and as a method; `rest` holds the arguments after the tensor."""
        if name in _DATA_SIZES or (name == "where" and one_argument):
            yield "data-size"
        elif name in _COUNTED or (name == "histc" and keyword(node, "max") is None and len(rest) < 3):
            yield "counted-size"
        elif name in ("equal", "allclose", "is_nonzero"):
            yield "host-read"
        elif name == "tensor_split" and rest and self._names.of(rest[0]).on_device:
            yield "device-split"
        elif name == "repeat_interleave" and keyword(node, "output_size") is None:
            repeats = rest[0] if rest else keyword(node, "repeats")
            if self._names.of(repeats).tensor or (one_argument and repeats is None):
                yield "repeat-interleave"


def _placing(node: ast.Call, name: str, base: Kind) -> Iterator[str]:
    target = target_device(node)
    if target is None and name == "to":
        return
    asynchronous = says_true(keyword(node, "non_blocking"))
    if target is not None and is_cpu(target):
        if base.on_device:
            yield "pinned-alloc" if asynchronous else "copy-to-host"
    elif base.place == "host" and asynchronous:
        yield "pageable-async"
    elif base.on_host and not asynchronous:
        yield "upload"


def _indices(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _is_size(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SIZES


def _allow_reason(node: ast.expr) -> str | None:
    """The reason of `with allow("...")` or `with guard.allow("...")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    reason = node.args[0]
    return str(reason.value) if name == "allow" and isinstance(reason, ast.Constant) else None


def lint(paths: Sequence[str]) -> SyncReport:
    """Check the given files, and all `.py` files below the given folders.

    Raises:
        ValueError: a path that is not there, or a file that is not Python.
    """
    trees = dict(_trees(paths))
    known, report = gather(trees.values()), SyncReport()
    linecache.checkcache()
    for file, tree in trees.items():
        Linter(str(file.resolve()), Names(known, imported(tree)), report).visit(tree)
    return report


def _trees(paths: Sequence[str]) -> Iterator[tuple[Path, ast.Module]]:
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"--lint: {path} is not there")
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            try:
                yield file, ast.parse(file.read_text(encoding="utf-8"), str(file))
            except UnicodeDecodeError as error:
                raise ValueError(f"--lint: {file} is not text: {error}") from error
            except SyntaxError as error:
                raise ValueError(f"--lint: {file}:{error.lineno}: not Python: {error.msg}") from error


def main(options: Namespace) -> int:
    """Lint, print, and return the exit code: 1 when something was found. Raises ValueError as `lint`.

    `options` has the paths as `lint`, and the options of `run.add_options`.
    """
    suppressions = gather_suppressions(options.suppress, options.suppressions)
    base = check_files(options)
    entries = apply(lint(options.lint).entries(), suppressions)
    entries, known = base.split(entries) if base else (entries, None)
    tell_unused(suppressions)
    if "-" not in (options.json, options.sarif):
        print(as_text(entries))
    write_files(as_dict(entries, known), options)
    return 1 if any(entry.excuse is None for entry in entries) else 0
