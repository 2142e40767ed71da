"""The kind of any expression, over the names that are in scope."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from .backends import HOST_TYPES, KINDS_OF_DEVICES
from .lint_facts import FileFacts, Known
from .lint_kinds import (
    ARRAY,
    EMPTY,
    IS_PINNED,
    MIXED,
    MOVED,
    NO_KIND,
    NO_VALUE,
    NUMBER,
    ON_DEVICE,
    ON_HOST,
    SOMEWHERE,
    Kind,
    combined,
    joined,
    keyword,
    kind_by_name,
    says_false,
    says_plain,
    says_tensor,
    with_name,
)

_NOT_TENSORS = """
    item tolist size dim ndim numel shape dtype device layout stride data_ptr element_size nelement itemsize names
    requires_grad untyped_storage storage_offset get_device nbytes grad_fn backward size_bytes equal allclose type_
""".split()  # noqa: SIM905
_MASKS = """
    bool isfinite isnan isinf isin eq ne lt le gt ge logical_and logical_or logical_not logical_xor any all isclose
""".split()  # noqa: SIM905
_TORCH_NOT_TENSORS = """
    device dtype Size finfo iinfo Generator manual_seed set_num_threads get_num_threads no_grad inference_mode save load
    is_tensor is_grad_enabled set_grad_enabled enable_grad compile equal allclose is_nonzero is_floating_point numel
    get_default_dtype set_default_dtype promote_types can_cast result_type Stream Event Tensor is_inference
    typename get_rng_state seed initial_seed set_default_device autocast jit get_device_module cond while_loop vmap
""".split()  # noqa: SIM905
FACTORIES = """
    zeros ones empty full arange rand randn randint randperm linspace logspace eye tensor as_tensor asarray
    scalar_tensor empty_strided normal
""".split()  # noqa: SIM905
_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like randint_like".split()  # noqa: SIM905
_ARRAYS = """
    array asarray zeros ones empty full arange concatenate stack frombuffer ascontiguousarray fromiter where unique
    nonzero cumsum sum repeat
""".split()  # noqa: SIM905
_TENSOR_MODULES = (
    "torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft", "torch.nn.utils.rnn",
)  # fmt: skip
_PARTS = "T mT H mH data grad real imag values indices".split()  # noqa: SIM905
_TENSORS_ALONE = """
    softmax log_softmax index_select masked_fill masked_fill_ unsqueeze gather scatter scatter_add scatter_
    scatter_add_ index_copy_ index_add_ index_fill_ detach bfloat16 half requires_grad_ topk new_zeros new_ones
    new_empty new_tensor new_full clamp_min clamp_max logsumexp sigmoid repeat_interleave add_ mul_ sub_ div_
    norm isfinite isnan isinf exp log sqrt rsqrt tanh relu clamp amax amin long
""".split()  # noqa: SIM905
"""Methods that tensors have, and neither arrays nor modules nor containers do."""
REDUCTIONS = "argmax argmin max min sum mean any all cumsum sort nonzero".split()  # noqa: SIM905
MODEL_WORDS = {"model", "net", "network", "module", "encoder", "decoder", "actor", "critic", "policy", "criterion",
               "backbone", "forward", "student", "teacher", "loss"}  # fmt: skip
_OF_OTHERS = """
    stack cat concat hstack vstack dstack column_stack row_stack meshgrid cartesian_prod block_diag from_numpy
    is_storage set_printoptions use_deterministic_algorithms set_float32_matmul_precision einsum pad_sequence
    frombuffer
""".split()  # noqa: SIM905
_NOT_OF_ONE_TENSOR = {*_TORCH_NOT_TENSORS, *FACTORIES, *_OF_OTHERS} - {"equal", "allclose", "is_nonzero"}
KIND_WORDS = KINDS_OF_DEVICES.keys() - {"fake"}
"""Kinds whose names are words of nothing else in a program"""
_DEVICES = (*HOST_TYPES, *KIND_WORDS, "hip")
_PACKAGED = {f"{row.package}.{kind}": f"torch.{kind}" for kind, row in KINDS_OF_DEVICES.items() if row.package}
"""Modules of backends by their names in their own packages."""
_HOLDERS = (
    "list",
    "deque",
    "dict",
    "Queue",
    "SimpleQueue",
    "Sequence",
    "Iterable",
    "Iterator",
    "List",
    "Dict",
    "Deque",
)
_TAKERS = ("pop", "popleft", "get", "get_nowait", "values", "copy", "items")
_SAME_ITEMS = ("list", "tuple", "iter", "reversed", "sorted", "set")


class Names:
    """Kinds of local names, and the kind of any expression over them."""

    def __init__(self, known: Known, imports: dict[str, str], facts: FileFacts) -> None:
        self.known = known
        self.imports = imports
        self.facts = facts
        self.scopes: list[tuple[str, dict[str, Kind]]] = [("", {})]
        """The qualified name of each function that is being walked, with what its names hold so far."""

    def dotted(self, node: ast.expr) -> str:
        """`torch.nn.functional.pad` for a chain that starts at an import, else ''."""
        if isinstance(node, ast.Name):
            name = self.imports.get(node.id, "")
            return _PACKAGED.get(name, name)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            name = f"{base}.{node.attr}" if base else ""
            return _PACKAGED.get(name, name)
        return ""

    def bind(self, target: ast.expr, kind: Kind) -> None:
        if isinstance(target, ast.Name):
            owner, scope = self.scopes[-1]
            scope[target.id] = kind
            self.facts.add(owner, f"={target.id}", kind)
        elif isinstance(target, ast.Attribute):
            owner = self.of(target.value).of
            if owner:
                self.facts.add(owner, target.attr, kind)
        elif isinstance(target, (ast.Tuple, ast.List)):
            plain = len(target.elts) == len(kind.parts) and kind.place == "tuple"
            for at, item in enumerate(target.elts):
                self.bind(item, kind.parts[at] if plain else kind.item)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Kind("items", parts=(kind,)) if kind.place else NO_KIND)

    def used_as_tensors(self, body: Iterable[ast.AST]) -> set[str]:
        """The names that only tensors fit: arguments of torch's functions, and owners of methods that others lack."""
        found = set()
        for node in body:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name, holder = node.func.attr, node.func.value
            module = self.dotted(holder)
            if module in _TENSOR_MODULES and node.args and name[:1].islower() and name not in _NOT_OF_ONE_TENSOR:
                holder = node.args[0]
            elif module or name not in _TENSORS_ALONE:
                continue
            if isinstance(holder, ast.Name):
                found.add(holder.id)
        return found

    def annotated(self, annotation: ast.expr | None) -> Kind:
        if says_tensor(annotation):
            return SOMEWHERE
        if says_plain(annotation):
            return NUMBER
        text = ast.unparse(annotation).strip("'\"").removesuffix(" | None") if annotation is not None else ""
        if text in self.facts.bases:
            return Kind("module" if text in self.facts.modules else "instance", of=text)
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] in _HOLDERS:
            inner = annotation.slice.elts[-1] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            return _items([self.annotated(inner)])
        return NO_KIND

    def of(self, node: ast.expr | None) -> Kind:
        """The kind of an expression."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BinOp):
            kinds = (self.of(node.left), self.of(node.right))
            if kinds[0].place in ("items", "tuple"):
                return joined(kinds) if kinds[1].place in ("items", "tuple") else kinds[0]
            return combined(kinds, isinstance(node.op, (ast.BitAnd, ast.BitOr)))
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            kind = self.of(node.operand)
            return kind._replace(mask=kind.mask or (kind.tensor and isinstance(node.op, ast.Invert)))
        if isinstance(node, ast.IfExp):
            return branched(self.of(node.body), self.of(node.orelse), node.test)
        return self._display(node)

    def _display(self, node: ast.expr | None) -> Kind:
        if isinstance(node, ast.Constant):
            return _constant(node.value)
        if isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(one, ast.Starred) for one in node.elts):
            parts = tuple(self.of(one) for one in node.elts)
            return Kind("tuple", parts=parts) if isinstance(node, ast.Tuple) else _items(parts)
        if isinstance(node, ast.Dict):
            return _items([self.of(one) for one in node.values])
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self.scopes.append((self.scopes[-1][0], {}))
            for generator in node.generators:
                self.bind(generator.target, self.of(generator.iter).item)
            kind = self.of(node.value if isinstance(node, ast.DictComp) else node.elt)
            self.scopes.pop()
            return _items([kind])
        return NO_KIND

    def _name(self, name: str) -> Kind:
        for owner, scope in reversed(self.scopes):
            kind = scope.get(name, NO_KIND)
            if name in scope and kind.place != "none":
                break
            # A loop brings back the bindings below it, and a closure sees the ones after it.
            kind = self.facts.found.get((owner, f"={name}"), kind)
            if kind.place:
                break
        return with_name(kind, name)

    def _attribute(self, node: ast.Attribute) -> Kind:
        base = self.of(node.value)
        if node.attr == "device" and (base.tensor or base.place == "moved"):
            return Kind("cpu" if base.on_host else "gpu")
        if base.tensor:
            return base if node.attr in _PARTS else NO_KIND
        if base.of:
            kind = self.facts.attribute(base.of, node.attr)
            if kind.place:
                return with_name(kind, node.attr)
        if base.place in ("moved", "mixed") and not base.of:
            return base
        known = ("attribute", node.attr) in self.known and not self.dotted(node)
        return with_name(self.facts.anywhere(node.attr) if known else NO_KIND, node.attr)

    def _subscript(self, node: ast.Subscript) -> Kind:
        base = self.of(node.value)
        if base.place in ("tuple", "items"):
            at = node.slice
            if base.place == "tuple" and isinstance(at, ast.Constant) and isinstance(at.value, int):
                return base.parts[at.value] if -len(base.parts) <= at.value < len(base.parts) else NO_KIND
            return base if isinstance(at, ast.Slice) else base.item
        return base

    def _compare(self, node: ast.Compare) -> Kind:
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return NO_KIND
        kind = combined([self.of(side) for side in (node.left, *node.comparators)])
        return kind._replace(mask=kind.tensor)

    # Calls.

    def _call(self, node: ast.Call) -> Kind:
        dotted = self.dotted(node.func)
        if dotted.startswith("torch."):
            return self._torch_call(dotted.split(".")[-1], node, module=dotted.rpartition(".")[0])
        if dotted.startswith("numpy."):
            return ARRAY if dotted.split(".")[-1] in _ARRAYS else NO_KIND
        if dotted.rpartition(".")[2] in ("deque", "Queue", "SimpleQueue", "defaultdict"):
            return EMPTY
        kind = self._called(node)
        if kind.place:
            return kind
        if isinstance(node.func, ast.Attribute):
            return self._method_call(node.func, node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if ("function", name) in self.known:
            return SOMEWHERE
        return self._builtin(name, node.args)

    def target(self, node: ast.Call) -> str:
        """The qualified name of the function of this file that a call runs, or nothing."""
        kind = self.of(node.func)
        if kind.place == "function":
            return kind.of
        if kind.place == "class":
            return self.facts.method(kind.of, "__init__") or kind.of
        if kind.of and kind.place in ("module", "moved", "instance"):
            return self.facts.method(kind.of, "__call__" if kind.place == "instance" else "forward")
        if isinstance(node.func, ast.Attribute):
            owner = self.of(node.func.value)
            return self.facts.method(owner.of, node.func.attr) if owner.of else ""
        return ""

    def _called(self, node: ast.Call) -> Kind:
        """Return the kind of a call of a function, class or module of this file, or of a name such as `model`."""
        func = self.of(node.func)
        if func.place == "class":
            return Kind("module" if func.of in self.facts.modules else "instance", of=func.of)
        target = self.target(node)
        kind = self.facts.get(target, "return") if target else NO_KIND
        if kind.place and kind.place != "none":
            return kind
        sounds = isinstance(node.func, ast.Name) and set(node.func.id.split("_")) & MODEL_WORDS
        sounds = sounds or (isinstance(node.func, ast.Attribute) and set(node.func.attr.split("_")) & MODEL_WORDS)
        if func.place in ("module", "moved", "device") or (not target and sounds):
            given = combined([self.of(one) for one in (*node.args, *(word.value for word in node.keywords))])
            if func.place in ("moved", "device"):
                return MOVED
            return MOVED if given.on_device and func.place != "module" else given
        return NO_KIND

    def _builtin(self, name: str, args: Sequence[ast.expr]) -> Kind:
        kinds = [self.of(one) for one in args]
        if name in ("list", "dict", "set") and not args:
            return EMPTY
        if not kinds:
            return NO_KIND
        if name in _SAME_ITEMS:
            return _items([kinds[0].item]) if kinds[0].place == "tuple" else kinds[0]
        if name in ("len", "int", "float", "round", "ord"):
            return NUMBER
        if name == "range":
            return _items([NUMBER])
        if name == "next":
            return kinds[0].item
        if name == "enumerate":
            return _items([Kind("tuple", parts=(NUMBER, kinds[0].item))])
        if name == "zip":
            return _items([Kind("tuple", parts=tuple(kind.item for kind in kinds))])
        return kinds[0].item if name in ("sum", "max", "min") and len(kinds) == 1 else NO_KIND

    def _torch_call(self, name: str, node: ast.Call, module: str) -> Kind:
        if name in ("from_numpy", "frombuffer"):
            return self.facts.plain_memory if self.facts.plain_memory.on_host else ON_HOST
        if name == "device" and module == "torch":
            return Kind(self.device(node.args[0] if node.args else None))
        if name == "DataLoader":
            return _items([self._loaded(node)])
        if name in ("Parameter", "clip_grad_norm_"):
            return SOMEWHERE
        if name == "TensorDataset" or (module.startswith("torch.nn.utils") and name.startswith("pa")):
            return combined([self.of(arg) for arg in node.args])
        if module == "torch.nn" and name[:1].isupper():
            placed = keyword(node, "device")
            return MOVED if placed is not None and self.device(placed) == "gpu" else Kind("module")
        if module not in _TENSOR_MODULES or name in _TORCH_NOT_TENSORS:
            return NO_KIND
        if name in FACTORIES or name in _LIKE:
            return self._made(name, node)
        kind = combined([self.of(arg) for arg in node.args])
        return Kind(kind.place or SOMEWHERE.place, name in _MASKS)

    def _made(self, name: str, node: ast.Call) -> Kind:
        placed = keyword(node, "device")
        first = self.of(node.args[0]) if node.args else NO_KIND
        if not says_false(placed):
            place = self.device(placed)
            on_host = ON_HOST if says_false(_pinned(node)) else IS_PINNED
            return ON_DEVICE if place == "gpu" else MIXED if place == "mixed" else on_host
        if not says_false(_pinned(node)):
            return IS_PINNED
        if (name in _LIKE or name in ("as_tensor", "asarray")) and (first.tensor or name in _LIKE):
            return Kind(first.place or SOMEWHERE.place) if first.tensor or not first.place else MIXED
        return self.facts.plain_memory

    def _loaded(self, node: ast.Call) -> Kind:
        """Return the kind of a loader's batches: host tensors, pinned by its argument."""
        if not says_false(_pinned(node)):
            return IS_PINNED
        source = self.of(node.args[0]) if node.args else NO_KIND
        return source if source.tensor else NO_KIND

    def device(self, node: ast.expr | None) -> str:
        """Return "cpu", "gpu" or "mixed" for an argument that names a device; one of an unknown value is a gpu."""
        kind = self.of(node)
        if kind.tensor:
            return "cpu" if kind.on_host else "gpu"
        if kind.place in ("cpu", "gpu", "mixed"):
            return kind.place
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return "cpu" if kind_by_name(name, is_tensor=True) == IS_PINNED else "gpu"

    def target_device(self, node: ast.Call) -> ast.expr | None:
        """The argument of `.to(...)` or `.cuda(...)` that names a device, as far as the source shows."""
        found = keyword(node, "device")
        if found is not None:
            return found
        return next((arg for arg in node.args[:1] if self._sounds_like_device(arg)), None)

    def _sounds_like_device(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            return isinstance(node, ast.JoinedStr) or isinstance(node.value, str)
        kind = self.of(node)
        if kind.tensor or kind.place in ("cpu", "gpu"):
            return True
        text = ast.unparse(node).lower()
        named = "device" in text or "cuda" in text or not KIND_WORDS.isdisjoint(re.split(r"[\W_]+", text))
        return "dtype" not in text and named

    def _method_call(self, func: ast.Attribute, node: ast.Call) -> Kind:
        base, name = self.of(func.value), func.attr
        if name == "numpy":
            return ARRAY
        if name in ("to", "cpu", "pin_memory", *KIND_WORDS) and base.place != "mixed":
            return self._placed(base, name, node)
        if base.place in ("items", "tuple"):
            return self._taken(base, name)
        if base.place in ("moved", "module", "mixed") or base.of:
            same = name in ("eval", "train", "requires_grad_", "half", "bfloat16", "float", "compile", "items", "get")
            return base if same or base.place == "mixed" else NO_KIND if base.of or base.place == "module" else MOVED
        if base.tensor:
            plain = NUMBER if name in ("item", "numel", "dim") else NO_KIND
            return plain if name in _NOT_TENSORS or name.startswith("is_") else Kind(base.place, name in _MASKS)
        if base.place == "array":
            return NO_KIND if name in _NOT_TENSORS else ARRAY
        annotated = ("method", name) in self.known and name not in _TAKERS
        if annotated or (name in _TENSORS_ALONE and not self.dotted(func)):
            return SOMEWHERE
        words = {word.arg for word in node.keywords}
        return SOMEWHERE if name in REDUCTIONS and words & {"dim", "keepdim"} else NO_KIND

    def _placed(self, base: Kind, name: str, node: ast.Call) -> Kind:
        """The result of `.to()`, `.cuda()`, `.cpu()` and `.pin_memory()`."""
        target = self.target_device(node)
        if name == "pin_memory":
            return IS_PINNED
        if name == "to" and target is None:
            return base
        place = self.device(target)
        if name == "to" and place == "mixed":
            return MIXED
        if name == "cpu" or (name == "to" and place == "cpu"):
            asynchronous = not says_false(keyword(node, "non_blocking"))
            return base if base.place in ("module", "moved") else IS_PINNED if asynchronous else ON_HOST
        if name == "to" and target is not None and self.of(target).place == "somewhere":
            return SOMEWHERE
        return ON_DEVICE if base.tensor else Kind("moved", of=base.of)

    def _taken(self, base: Kind, name: str) -> Kind:
        if name == "items":
            return _items([Kind("tuple", parts=(NO_KIND, base.item))])
        if name in ("values", "copy"):
            return base
        return base.item if name in _TAKERS else NO_KIND


def branched(one: Kind, other: Kind, test: ast.expr) -> Kind:
    """Return the kind of a name after two branches. What is picked by is_available() is the accelerator."""
    picked = {one.place, other.place} == {"cpu", "gpu"} and "is_available" in ast.unparse(test)
    return Kind("gpu") if picked else joined((one, other))


def _constant(value: object) -> Kind:
    if isinstance(value, str):
        name = value.split(":")[0]
        return Kind("cpu" if name in HOST_TYPES else "gpu") if name in _DEVICES else NO_KIND
    return NO_VALUE if value is None else NUMBER if isinstance(value, (int, float)) else NO_KIND


def _items(kinds: Sequence[Kind]) -> Kind:
    return Kind("items", parts=(joined(kinds),)) if kinds else EMPTY


def _pinned(node: ast.Call) -> ast.expr | None:
    return keyword(node, "pin_memory")
