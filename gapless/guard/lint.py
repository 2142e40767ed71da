"""The static half of no_sync: looks for the same shapes in source text, without running or importing anything."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .backends import GENERIC, KINDS_OF_DEVICES
from .lint_facts import gather
from .lint_flow import Flow, known_names
from .lint_kinds import NO_KIND, Kind, keyword, pins, says_false, says_true
from .lint_names import FACTORIES, KIND_WORDS, REDUCTIONS, Names
from .report import Finding, SyncReport, as_text
from .report_files import as_dict, check_files, write_files
from .sites import Frame
from .suppress import apply, comment_at, tell_unused
from .suppress import gather as gather_suppressions
from .sync_rules import COLLECTIVES, RULES

_NOT_OURS = ("build", "node_modules", "site-packages")
"""Folders with what others wrote, or with copies."""
_SIZES = ("max", "min", "amax", "amin", "sum", "argmax")
_DATA_SIZES = ("nonzero", "argwhere", "masked_select")
_SIZED = ("arange", "full", "zeros", "ones", "empty", "linspace", "randint", "randperm")
_READ = ("equal", "allclose", "is_nonzero", "inv", "inverse", "solve", "cholesky", "lu_factor", "ldl_factor")
"""Functions that read an answer or an error code. The ones whose names end with _ex do not."""
_COUNTED = ("bincount", "unique", "unique_consecutive")
_WAITS = (*GENERIC, *(wait for row in KINDS_OF_DEVICES.values() for wait in row.all_waits()), *COLLECTIVES)
# One query is no poll; a context is entered where it is made.
_CALLS = {f"{owner}.{name}".removesuffix(".__enter__"): rule for owner, name, rule in _WAITS if rule != "event-poll"}


class Linter(Flow):
    """Walks one file in the order of its statements, and reports."""

    def __init__(self, path: str, names: Names, report: SyncReport) -> None:
        super().__init__(names)
        self._path = path
        self._report = report
        self._allowed: str | None = None
        """The reason of the innermost `with allow(...)`."""

    def _found(self, rule: str, node: ast.expr | ast.stmt) -> None:
        if self.is_set_up:
            return
        entry = RULES[rule]
        function = ".".join(self.functions) or "<module>"
        line = ast.unparse(node).split("\n")[0]
        site = Frame(self._path, _line_of(node), function)
        finding = Finding(
            "lint", rule, line if len(line) < 80 else line[:77] + "...", entry.why, entry.instead, (site,)
        )  # fmt: skip
        self._report.add(finding, comment_at(site) or self._allowed)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        outer = self._allowed
        for item in node.items:
            self._allowed = _allow_reason(item.context_expr) or self._allowed
        super().visit_With(node)
        self._allowed = outer

    visit_AsyncWith = visit_With

    # Conditions and texts.

    def visit_IfExp(self, node: ast.IfExp | ast.Assert) -> None:
        self.check_condition(node.test)
        self.generic_visit(node)

    visit_Assert = visit_IfExp

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values[:-1]:
            self.check_condition(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.check_condition(node.operand)
        self.generic_visit(node)

    def check_condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp):
            for value in test.values:
                self.check_condition(value)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.check_condition(test.operand)
        # `if self.bias:` over an optional tensor would be wrong, but is far more often a list or a flag of that name.
        elif self.names.of(test).on_device and not isinstance(test, ast.Attribute):
            self._found("host-read", test)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if self.names.of(node.value).on_device:
            self._found("host-read", node.value)
        self.generic_visit(node)

    # Indexing.

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        base = self.names.of(node.value)
        for index in _indices(node.slice) if isinstance(node.ctx, ast.Load) else ():
            if base.on_device:
                self._check_index(node, index)
            if (base.on_device or base.place == "moved") and self._is_device_mask(index):
                self._found("mask-index", node)

    def _is_device_mask(self, index: ast.expr) -> bool:
        kind = self.names.of(index)
        return kind.mask and kind.on_device

    def _check_index(self, node: ast.Subscript, index: ast.expr) -> None:
        kind = self.names.of(index)
        if isinstance(index, ast.Slice):
            if any(self.names.of(bound).on_device for bound in (index.lower, index.upper, index.step)):
                self._found("host-index", node)
        elif isinstance(index, ast.List) or (kind.on_host and not kind.mask):
            self._found("index-by-host", node)

    def check_store(self, target: ast.Subscript, value: ast.expr, node: ast.stmt) -> None:
        self.visit(target.slice)
        if not self.names.of(target.value).on_device:
            return
        indices, number = _indices(target.slice), self.names.of(value).place == "number"
        for index in indices:
            self._check_index(target, index)
        kinds = [self.names.of(index) for index in indices]
        if any(map(self._is_device_mask, indices)):
            if not (number and len(indices) == 1):
                self._found("mask-index", node)
        elif any(kind.on_device for kind in kinds):
            if number:
                self._found("index-put-scalar", node)
        elif number and len(indices) == 1 and kinds[0].place == "number":
            self._found("scalar-assign", node)

    # Calls.

    def visit_Call(self, node: ast.Call) -> None:
        super().visit_Call(node)
        dotted = self.names.dotted(node.func)
        rules: Iterable[str] = ()
        if dotted.startswith("torch."):
            rules = self._torch_rules(node, dotted)
        elif dotted.startswith("math.") and node.args:
            rules = self._builtin_rules("float", node.args[0])
        elif isinstance(node.func, ast.Attribute):
            rules = self._method_rules(node, node.func)
        elif isinstance(node.func, ast.Name):
            shown = node.args if node.func.id == "print" else node.args[:1]
            rules = {rule for argument in shown for rule in self._builtin_rules(node.func.id, argument)}
        for rule in rules:
            self._found(rule, node)

    def _builtin_rules(self, name: str, argument: ast.expr) -> Iterator[str]:
        kind = self.names.of(argument)
        if not (kind.on_device or (kind.place == "moved" and name in ("int", "float", "range"))):
            return
        if name in ("int", "float") and _is_size(argument):
            yield "host-size"
        elif name in ("int", "float", "bool", "print", "str", "repr", "complex"):
            yield "host-read"
        elif name == "range":
            yield "host-index"

    def _torch_rules(self, node: ast.Call, dotted: str) -> Iterator[str]:
        module, _, name = dotted.rpartition(".")
        first = self.names.of(node.args[0]) if node.args else NO_KIND
        placed = keyword(node, "device")
        makes = module == "torch" and (name in FACTORIES or name.endswith("_like"))
        if makes and pins(node) and self.is_hot:
            yield "pinned-alloc"
        if name == "clip_grad_norm_" and says_true(keyword(node, "error_if_nonfinite")):
            yield "host-read"
        if dotted in _CALLS:
            if not self._of_the_host(node):
                yield _CALLS[dotted]
        elif module == "torch" and name in ("tensor", "as_tensor") and placed is not None:
            if self.names.device(placed) == "gpu" and not first.on_device and first.place not in ("moved", "mixed"):
                yield "list-to-device"
        elif makes and name in _SIZED and any(self.names.of(arg).on_device for arg in node.args):
            yield "host-read"
        elif first.on_device and (module in ("torch", "torch.linalg") or name == "one_hot"):
            yield from self._shared_rules(name, node, node.args[1:], one_argument=len(node.args) == 1)

    def _of_the_host(self, node: ast.Call) -> bool:
        """Whether a collective is one of a group of the host, by the group's name."""
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "group")]
        names = (one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in given)
        return any("cpu" in name or "gloo" in name for name in names)

    def _method_rules(self, node: ast.Call, func: ast.Attribute) -> Iterator[str]:
        base, name = self.names.of(func.value), func.attr
        if name == "synchronize" and not node.args and not self.names.target(node):
            yield "event-wait"
        elif name == "capture_begin":
            yield "graph-capture"
        elif name in ("to", *KIND_WORDS) and base.tensor:
            yield from self._placing(node, name, base)
        elif name == "copy_" and base.tensor and node.args:
            yield from _copying(base, self.names.of(node.args[0]), keyword(node, "non_blocking"))
        elif name == "pin_memory" and base.tensor and self.is_hot:
            yield "pinned-alloc"
        elif base.on_device or (base.place == "moved" and name in ("item", "tolist")):
            yield from self._reading_rules(node, func, base)
        elif name == "cpu" and base.place in ("", "moved") and _is_reduced(func.value):
            yield "copy-to-host"

    def _reading_rules(self, node: ast.Call, func: ast.Attribute, base: Kind) -> Iterator[str]:
        name = func.attr
        if name in ("item", "tolist"):
            yield "host-size" if _is_size(func.value) else "host-read"
        elif name == "cpu" or (name == "numpy" and base.place == "device"):
            yield "copy-to-host"
        elif name == "new_tensor":
            yield "list-to-device"
        elif name == "type" and node.args and "Tensor" in ast.unparse(node.args[0]):
            yield "type-hop"
        else:
            yield from self._shared_rules(name, node, node.args, one_argument=False)

    def _placing(self, node: ast.Call, name: str, base: Kind) -> Iterator[str]:
        target = self.names.target_device(node)
        if target is None and name == "to":
            return
        place = "gpu" if target is None or name in KIND_WORDS else self.names.device(target)
        given = keyword(node, "non_blocking")
        asynchronous = says_true(given)
        if place == "cpu":
            if base.on_device and (asynchronous or says_false(given)):
                yield "pinned-alloc" if asynchronous else "copy-to-host"
        elif place == "gpu" and base.on_host:
            if base.place == "host" and asynchronous:
                yield "pageable-async"
            elif says_false(given):
                yield "upload"

    def _shared_rules(self, name: str, node: ast.Call, rest: Sequence[ast.expr], one_argument: bool) -> Iterator[str]:
        """Check what can be called as a function and as a method; `rest` holds the arguments after the tensor."""
        if name in _DATA_SIZES or (name == "where" and one_argument):
            yield "data-size"
        elif name in _COUNTED or (name == "histc" and keyword(node, "max") is None and len(rest) < 3):
            yield "counted-size"
        elif name in _READ:
            yield "host-read"
        elif name == "one_hot" and not rest and keyword(node, "num_classes") is None:
            yield "host-size"
        elif name == "tensor_split" and rest and self.names.of(rest[0]).on_device:
            yield "device-split"
        elif name == "repeat_interleave" and keyword(node, "output_size") is None:
            repeats = rest[0] if rest else keyword(node, "repeats")
            if self.names.of(repeats).tensor or (one_argument and repeats is None):
                yield "repeat-interleave"


def _copying(into: Kind, source: Kind, given: ast.expr | None) -> Iterator[str]:
    """Check `into.copy_(source, non_blocking=given)`."""
    blocking, asynchronous = says_false(given), says_true(given)
    if into.on_host and source.place == "device":
        if blocking:
            yield "copy-to-host"
        elif into.place == "host" and asynchronous:
            yield "unpinned-download"
    elif into.place == "device" and source.on_host:
        if blocking:
            yield "upload"
        elif source.place == "host" and asynchronous:
            yield "pageable-async"


def _is_reduced(node: ast.expr) -> bool:
    """Whether this is a result such as `x.argmax(-1)`: if it has `.cpu()`, it is a tensor."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS


def _indices(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _is_size(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SIZES


def _line_of(node: ast.expr | ast.stmt) -> int:
    """Return the line that Python gives a call: of a method's, the line of its name."""
    called = node.func if isinstance(node, ast.Call) else None
    return (isinstance(called, ast.Attribute) and called.end_lineno) or node.lineno


def _allow_reason(node: ast.expr) -> str | None:
    """The reason of `with allow("...")` or `with guard.allow("...")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    reason = node.args[0]
    return str(reason.value) if name == "allow" and isinstance(reason, ast.Constant) else None


def lint(paths: Sequence[str]) -> SyncReport:
    """Check the given files, and all `.py` files of a project below the given folders.

    Raises:
        ValueError: a path that is not there, or a given file that is not Python.
    """
    trees = dict(_trees(paths))
    known, report = gather(trees.values()), SyncReport()
    linecache.checkcache()
    for file, tree in trees.items():
        Linter(str(file.resolve()), known_names(tree, known), report).visit(tree)
    return report


def _trees(paths: Sequence[str]) -> Iterator[tuple[Path, ast.Module]]:
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"--lint: {path} is not there")
        for file in sorted(_sources(path)) if path.is_dir() else [path]:
            try:
                yield file, ast.parse(file.read_bytes(), str(file))
            except (OSError, ValueError, SyntaxError) as error:
                line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
                message = f"--lint: {file}{line}: not Python: {getattr(error, 'msg', error)}"
                if file is path:
                    raise ValueError(message) from error
                print(f"gapless san: {message}", file=sys.stderr)


def _sources(folder: Path) -> Iterator[Path]:
    """Return a project's own files: none that are hidden, built or installed below it."""
    for place, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if _is_own(Path(place, one))]
        yield from (Path(place, one) for one in files if one.endswith(".py"))


def _is_own(folder: Path) -> bool:
    is_named = folder.name.startswith(".") or folder.name in _NOT_OURS
    return not is_named and not (folder / "pyvenv.cfg").exists()


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
