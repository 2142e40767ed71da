"""Walks the statements of a file and gives names their kinds, across lines, branches, functions and fields."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .lint_facts import FileFacts, Known, imported, is_property
from .lint_kinds import (
    ARRAY,
    IS_PINNED,
    MIXED,
    MOVED,
    NO_KIND,
    ON_DEVICE,
    SOMEWHERE,
    Kind,
    combined,
    joined,
    named_for_the_host,
    says_plain,
)
from .lint_names import Names, branched

_WALKS = 4
"""Walks before the one that reports: values that pass through more functions than this are not followed."""
_FILLERS = ("append", "appendleft", "put", "put_nowait", "add", "insert", "extend")
_HOT_WORDS = {"step", "forward", "decode", "iteration", "tick"}
_SET_UP_WORDS = {"init", "initialize", "initialise", "setup", "warmup", "prewarm", "shutdown", "teardown", "destroy",
                 "profile", "capture", "close"}  # fmt: skip
_SET_UP = """
    __init__ __new__ __post_init__ __del__ __exit__ from_pretrained from_config load_model load_state_dict
    load_checkpoint restore_checkpoint prepare_model set_up warm_up
""".split()  # noqa: SIM905

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_set_up(function: str) -> bool:
    """Whether a function runs before the loop or after it, by its name."""
    words = function.strip("_").split("_")
    return function in _SET_UP or words[0] == "load" or bool(_SET_UP_WORDS.intersection(words))


class Flow(ast.NodeVisitor):
    """Walks one file in the order of its statements, and binds names."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.facts = names.facts
        self.functions: list[str] = []
        """The functions and classes around the current statement."""
        self.loops = 0
        """The number of loops around it, in the innermost function."""
        self._class = ""

    @property
    def is_hot(self) -> bool:
        """Whether the current statement runs over and over, as far as the file shows."""
        function = ".".join(self.functions)
        name = self.functions[-1] if self.functions else ""
        words = name.split("_")
        return bool(self.loops or function in self.facts.hot or {words[0], words[-1]} & _HOT_WORDS)

    @property
    def is_set_up(self) -> bool:
        """Whether the current statement belongs to the program's set-up."""
        return any(is_set_up(name) for name in self.functions)

    # Functions and classes.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults):
            self.visit(part)
        qualified = ".".join((*self.functions, node.name))
        if not self._class:
            self.names.bind(ast.Name(node.name), Kind("function", of=qualified))
        elif is_property(node):
            self.facts.properties.add(qualified)
        if says_plain(node.returns):
            self.facts.plain.add(qualified)
        self.facts.add(qualified, "return", self.names.annotated(node.returns))
        self._enter(node, node.name, qualified)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node, "<lambda>", ".".join((*self.functions, f"<lambda:{node.lineno}>")))

    def _enter(self, node: AnyFunction, name: str, qualified: str) -> None:
        outer = self.loops, self._class
        scope = self._parameters(node, qualified)
        self.names.scopes.append((qualified, scope))
        self.functions.append(name)
        self.loops, self._class = 0, ""
        for part in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(part)
        self.loops, self._class = outer
        self.functions.pop()
        self.names.scopes.pop()

    def _parameters(self, node: AnyFunction, qualified: str) -> dict[str, Kind]:
        """Give each parameter the kind of what this file passes for it, else that of its annotation."""
        arguments = [*node.args.posonlyargs, *node.args.args]
        own = arguments.pop(0).arg if self._class and arguments and arguments[0].arg in ("self", "cls") else ""
        self.facts.arguments[qualified] = [one.arg for one in arguments]
        defaults = dict(zip([one.arg for one in arguments[::-1]], node.args.defaults[::-1], strict=False))
        on_host, tensors = self._used(node)
        by_name = not isinstance(node, ast.Lambda) and named_for_the_host(node.name)
        scope = {}
        for argument in (*arguments, *node.args.kwonlyargs):
            kind = self.facts.get(qualified, argument.arg)
            if kind.place in ("", "none") or says_plain(argument.annotation):
                kind = self.names.annotated(argument.annotation)
            if not kind.place and argument.arg in defaults:
                said = self.names.of(defaults[argument.arg])
                kind = MIXED if said.place == "cpu" else said if said.place == "gpu" else NO_KIND
            if not kind.place and argument.arg in tensors:
                kind = SOMEWHERE
            if (kind.place == "somewhere" and by_name) or (kind.place in ("", "somewhere") and argument.arg in on_host):
                kind = IS_PINNED
            scope[argument.arg] = kind
        if own:
            place = "class" if own == "cls" else "module" if self._class in self.facts.modules else "instance"
            scope[own] = Kind(place, of=self._class)
        return scope

    def _used(self, node: AnyFunction) -> tuple[set[str], set[str]]:
        """Return the names that the body uses as host tensors, and the names that it uses as tensors."""
        if node not in self.facts.used:
            body = [*ast.walk(node)]
            self.facts.used[node] = _read_as_arrays(body), self.names.used_as_tensors(body)
        return self.facts.used[node]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        qualified = ".".join((*self.functions, node.name))
        bases = [ast.unparse(base) for base in node.bases]
        self.facts.bases[qualified] = bases
        if any(base.endswith(("Module", "LightningModule")) or base in self.facts.modules for base in bases):
            self.facts.modules.add(qualified)
        self.names.bind(ast.Name(node.name), Kind("class", of=qualified))
        fields = [
            part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        ]  # fmt: skip
        self.facts.arguments[qualified] = [part.target.id for part in fields if isinstance(part.target, ast.Name)]
        for part in fields:
            if isinstance(part.target, ast.Name):
                self.facts.add(qualified, part.target.id, self.names.annotated(part.annotation))
        self.functions.append(node.name)
        outer, self._class = self._class, qualified
        for statement in node.body:
            self._class = qualified
            self.visit(statement)
        self._class = outer
        self.functions.pop()

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        owner = self.names.scopes[-1][0]
        if node.value is not None and owner and owner not in self.facts.plain:
            self.facts.add(owner, "return", self.names.of(node.value))

    # Names.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        kind = self.names.of(node.value)
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.check_store(target, node.value, node)
                self._fill(target.value, kind)
            else:
                self.names.bind(target, kind)

    def check_store(self, target: ast.Subscript, value: ast.expr, node: ast.stmt) -> None:
        """Look at `target = value`."""
        self.visit(target.slice)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Subscript):
            self.visit(node.target.slice)
        else:
            self.names.bind(node.target, _grown(self.names.of(node.target), self.names.of(node.value)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            kind = self.names.of(node.value)
            self.names.bind(node.target, kind if kind.place else self.names.annotated(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.names.bind(node.target, self.names.of(node.value))

    # Blocks.

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.names.bind(node.target, self.names.of(node.iter).item)
        self._loop(node.body)
        for statement in node.orelse:
            self.visit(statement)

    visit_AsyncFor = visit_For

    def _loop(self, body: list[ast.stmt]) -> None:
        self.loops += 1
        for statement in body:
            self.visit(statement)
        self.loops -= 1

    def visit_While(self, node: ast.While) -> None:
        self.loops += 1
        self.check_condition(node.test)
        self.visit(node.test)
        self.loops -= 1
        self._loop(node.body)
        for statement in node.orelse:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        self.check_condition(node.test)
        self.visit(node.test)
        owner, scope = self.names.scopes[-1]
        before, after = dict(scope), []
        for block in (node.body, node.orelse):
            self.names.scopes[-1] = owner, dict(before)
            for statement in block:
                self.visit(statement)
            if not (block and isinstance(block[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))):
                after.append(self.names.scopes[-1][1])
        merged = after[0] if len(after) == 1 else _merged(after[0], after[1], node.test) if after else before
        scope.clear()
        scope.update(merged)
        self.names.scopes[-1] = owner, scope

    def check_condition(self, test: ast.expr) -> None:
        """Look at an expression whose truth decides something."""

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.names.bind(item.optional_vars, NO_KIND)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.names.scopes.append((self.names.scopes[-1][0], {}))
        for generator in node.generators:
            self.visit(generator.iter)
            self.names.bind(generator.target, self.names.of(generator.iter).item)
            for test in generator.ifs:
                self.check_condition(test)
                self.visit(test)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.names.scopes.pop()

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    # Calls.

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        target = self.names.target(node)
        if target:
            self._note_call(target, node)
        if isinstance(node.func, ast.Attribute):
            self._note_method(node.func, node)

    def _note_call(self, target: str, node: ast.Call) -> None:
        if self.is_hot and not self.is_set_up:
            self.facts.hot.add(target)
        for name, value in zip(self.facts.arguments.get(target, ()), node.args, strict=False):
            self.facts.add(target, name, self.names.of(value))
        for word in node.keywords:
            if word.arg:
                self.facts.add(target, word.arg, self.names.of(word.value))

    def _note_method(self, func: ast.Attribute, node: ast.Call) -> None:
        dotted = self.names.dotted(func)
        if dotted == "torch.set_default_device":
            placed = self.names.device(node.args[0] if node.args else None)
            self.facts.plain_memory = ON_DEVICE if placed == "gpu" else MIXED
        elif func.attr == "cudaHostRegister":
            self.facts.plain_memory = IS_PINNED
        elif func.attr in _FILLERS and node.args:
            given = self.names.of(node.args[-1])
            self._fill(func.value, given.item if func.attr == "extend" else given)
        elif func.attr == "register_buffer" and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
            owner = self.names.of(func.value).of
            if owner:
                self.facts.add(owner, str(node.args[0].value), Kind("somewhere"))

    def _fill(self, holder: ast.expr, kind: Kind) -> None:
        """Note what a list, queue or dict is given."""
        base = self.names.of(holder)
        if base.place == "items" and isinstance(holder, (ast.Name, ast.Attribute)):
            self.names.bind(holder, Kind("items", parts=(joined((*base.parts, kind)),)))


def _read_as_arrays(body: Iterable[ast.AST]) -> set[str]:
    """The names whose `.numpy()` is taken: they are on the host, or the program would not run."""
    return {
        node.value.id
        for node in body
        if isinstance(node, ast.Attribute) and node.attr == "numpy" and isinstance(node.value, ast.Name)
    }


def _merged(one: dict[str, Kind], other: dict[str, Kind], test: ast.expr) -> dict[str, Kind]:
    return {name: branched(one.get(name, NO_KIND), other.get(name, NO_KIND), test) for name in {**one, **other}}


def _grown(before: Kind, added: Kind) -> Kind:
    if before.place in ("items", "tuple"):
        return joined((before, added)) if added.place in ("items", "tuple") else before
    kind = combined((before, added))
    return MOVED if before.place == "moved" else ARRAY if before.place == "array" else kind


def known_names(tree: ast.Module, known: Known) -> Names:
    """Walk a file until all walks agree on what its names hold."""
    names = Names(known, imported(tree), FileFacts())
    for _ in range(_WALKS if any(name.startswith("torch") for name in names.imports.values()) else 1):
        Flow(names).visit(tree)
        names.scopes = [("", {})]
        if not names.facts.advance():
            break
    return names
