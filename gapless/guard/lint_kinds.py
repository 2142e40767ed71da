"""Kinds of expressions, as the lint sees them without running any: a tensor or not, and on which side.

Names get a kind from what is assigned to them, from annotations, and from the annotations of attributes and functions
in all files that are looked at. What is not known to be a tensor is never reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Kind(NamedTuple):
    """`place` is device, somewhere (a tensor, and that is all that is known), host, pinned, array, or nothing."""

    place: str = ""
    mask: bool = False

    @property
    def tensor(self) -> bool:
        return self.place in ("device", "somewhere", "host", "pinned")

    @property
    def on_device(self) -> bool:
        """A device tensor, as far as can be known."""
        return self.place in ("device", "somewhere")

    @property
    def on_host(self) -> bool:
        return self.place in ("host", "pinned", "array")


NO_KIND, ON_DEVICE, SOMEWHERE = Kind(), Kind("device"), Kind("somewhere")
ON_HOST, IS_PINNED, ARRAY = Kind("host"), Kind("pinned"), Kind("array")

_NOT_TENSORS = """
    item tolist size dim ndim numel shape dtype device layout stride data_ptr element_size nelement itemsize names
    is_contiguous is_pinned is_floating_point is_complex is_inference requires_grad untyped_storage storage_offset
    get_device nbytes is_cuda is_cpu is_meta grad_fn backward size_bytes equal allclose type_
""".split()  # noqa: SIM905
_MASKS = """
    bool isfinite isnan isinf isin eq ne lt le gt ge logical_and logical_or logical_not logical_xor any all isclose
""".split()  # noqa: SIM905
_TORCH_NOT_TENSORS = """
    device dtype Size finfo iinfo Generator manual_seed set_num_threads get_num_threads no_grad inference_mode save load
    is_tensor is_grad_enabled set_grad_enabled enable_grad compile equal allclose is_nonzero is_floating_point numel
    get_default_dtype set_default_dtype promote_types can_cast result_type Stream Event Tensor is_inference
    typename get_rng_state seed initial_seed
""".split()  # noqa: SIM905
_FACTORIES = """
    zeros ones empty full arange rand randn randint randperm linspace logspace eye tensor as_tensor asarray
    scalar_tensor empty_strided normal
""".split()  # noqa: SIM905
_ARRAYS = "array asarray zeros ones empty full arange concatenate stack frombuffer ascontiguousarray".split()  # noqa: SIM905


_PARTS = "T mT H mH data grad real imag values indices".split()  # noqa: SIM905


Known = set[tuple[str, str]]
"""Names annotated as Tensor in every definition: each with "attribute", "function" or "method"."""


def gather(trees: Iterable[ast.AST]) -> Known:
    """Gather what all files annotate. A name that is a tensor in one place and something else in another is unknown."""
    yes: Known = set()
    no: Known = set()
    for tree in trees:
        for what, name, annotation in _annotated(tree, inside_class=False):
            (yes if _says_tensor(annotation) else no).add((what, name))
    return yes - no


def _annotated(node: ast.AST, inside_class: bool) -> Iterator[tuple[str, str, ast.expr | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in child.decorator_list)
            yield "attribute" if is_property else "method" if inside_class else "function", child.name, child.returns
        elif isinstance(child, ast.AnnAssign):
            if isinstance(child.target, ast.Attribute):
                yield "attribute", child.target.attr, child.annotation
            elif isinstance(child.target, ast.Name) and inside_class:
                yield "attribute", child.target.id, child.annotation
        yield from _annotated(child, isinstance(child, ast.ClassDef))


def _says_tensor(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("'\"").removesuffix(" | None")
    return text in ("Tensor", "torch.Tensor", "nn.Parameter", "torch.nn.Parameter")


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


class Names:
    """Kinds of local names, and the kind of any expression over them."""

    def __init__(self, known: Known, imports: dict[str, str]) -> None:
        self.known = known
        self.imports = imports
        self.scopes: list[dict[str, Kind]] = [{}]
        self.attributes: dict[str, Kind] = {}
        """The kinds of attributes such as `self.x`, from what this file assigns to them."""

    def dotted(self, node: ast.expr) -> str:
        """`torch.nn.functional.pad` for a chain that starts at an import, else ''."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def bind(self, target: ast.expr, kind: Kind) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = kind
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            self.attributes[target.attr] = kind
        elif isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                # Parts of a tensor are tensors; parts of anything else are not known.
                self.bind(item, SOMEWHERE if kind.tensor else NO_KIND)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, NO_KIND)

    def annotated(self, annotation: ast.expr | None) -> Kind:
        return SOMEWHERE if _says_tensor(annotation) else NO_KIND

    def of(self, node: ast.expr | None) -> Kind:
        """The kind of an expression."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), NO_KIND)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.Subscript, ast.NamedExpr)):
            return self.of(node.value)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BinOp):
            return _joined([self.of(node.left), self.of(node.right)], isinstance(node.op, (ast.BitAnd, ast.BitOr)))
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return self.of(node.operand)
        if isinstance(node, ast.IfExp):
            return _joined([self.of(node.body), self.of(node.orelse)], True)
        return NO_KIND

    def _attribute(self, node: ast.Attribute) -> Kind:
        base = self.of(node.value)
        if base.tensor:
            return base if node.attr in _PARTS else NO_KIND
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.attributes:
            return self.attributes[node.attr]
        return SOMEWHERE if ("attribute", node.attr) in self.known and not self.dotted(node) else NO_KIND

    def _compare(self, node: ast.Compare) -> Kind:
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return NO_KIND
        joined = _joined([self.of(side) for side in (node.left, *node.comparators)])
        return joined._replace(mask=joined.tensor)

    def _call(self, node: ast.Call) -> Kind:
        dotted = self.dotted(node.func)
        if dotted.startswith("torch."):
            return self._torch_call(dotted.split(".")[-1], node, module=dotted.rpartition(".")[0])
        if dotted.startswith("numpy."):
            return ARRAY if dotted.split(".")[-1] in _ARRAYS else NO_KIND
        if isinstance(node.func, ast.Attribute):
            return self._method_call(node.func, node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return SOMEWHERE if ("function", name) in self.known else NO_KIND

    def _torch_call(self, name: str, node: ast.Call, module: str) -> Kind:
        if name in ("from_numpy", "frombuffer"):
            return ON_HOST
        if module not in ("torch", "torch.nn.functional") or name in _TORCH_NOT_TENSORS:
            return NO_KIND
        if name in _FACTORIES:
            device = keyword(node, "device")
            return ON_DEVICE if device is not None and not is_cpu(device) else IS_PINNED if pins(node) else ON_HOST
        place = _joined([self.of(arg) for arg in node.args]).place
        return Kind(place or SOMEWHERE.place, name in _MASKS)

    def _method_call(self, func: ast.Attribute, node: ast.Call) -> Kind:
        base = self.of(func.value)
        if not base.tensor:
            return SOMEWHERE if ("method", func.attr) in self.known and not base.on_host else NO_KIND
        if func.attr in _NOT_TENSORS:
            return NO_KIND
        if func.attr in ("cpu", "pin_memory"):
            return ON_HOST if func.attr == "cpu" else IS_PINNED
        if func.attr == "numpy":
            return ARRAY
        if func.attr in ("to", "cuda"):
            target = target_device(node)
            if target is None and func.attr == "to":
                return base
            return ON_HOST if target is not None and is_cpu(target) else ON_DEVICE
        return Kind(base.place, func.attr in _MASKS)


def _joined(kinds: list[Kind], of_masks: bool = False) -> Kind:
    """Return the kind of a combination; `of_masks`: it is a mask if one of the parts is."""
    places = {kind.place for kind in kinds}
    for place in ("device", "somewhere", "host", "pinned"):
        if place in places:
            return Kind(place, of_masks and any(kind.mask for kind in kinds))
    return NO_KIND


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((word.value for word in node.keywords if word.arg == name), None)


def says_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def pins(node: ast.Call) -> bool:
    return says_true(keyword(node, "pin_memory"))


def is_cpu(node: ast.expr) -> bool:
    """`"cpu"` or `torch.device("cpu")`, written out."""
    if isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    value = getattr(node, "value", None)
    return isinstance(value, str) and value.split(":")[0] in ("cpu", "meta")


def target_device(node: ast.Call) -> ast.expr | None:
    """The argument of `.to(...)` or `.cuda(...)` that names a device, as far as the source shows."""
    found = keyword(node, "device")
    if found is not None:
        return found
    return next((arg for arg in node.args[:1] if _sounds_like_device(arg)), None)


def _sounds_like_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    text = ast.unparse(node).lower()
    return "dtype" not in text and ("device" in text or "cuda" in text)
