"""Kinds of values, as the lint sees them without running any: a tensor or not, on the host or on the device.

A value that is not known to be a tensor is never reported, nor one that is on the host by one line and on the device by
another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Kind(NamedTuple):
    """The lint's knowledge of one value.

    `place` is one of device, somewhere (a tensor, and that is all that is known), host, pinned (on the host, and may be
    pinned), array; moved (something on the device that need not be a tensor); module, instance, class, function (with
    their qualified name in `of`); items (a list, queue or dict with the kind of its items), tuple (with the kinds of
    its parts); cpu, gpu (names of devices); number; none (None); mixed (different in different places); or nothing.
    """

    place: str = ""
    mask: bool = False
    of: str = ""
    parts: tuple[Kind, ...] = ()

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

    @property
    def item(self) -> Kind:
        """The kind of what iteration gives."""
        if self.tensor or self.place in ("moved", "mixed"):
            return Kind(self.place)
        return joined(self.parts) if self.place in ("items", "tuple") else NO_KIND


NO_KIND, ON_DEVICE, SOMEWHERE = Kind(), Kind("device"), Kind("somewhere")
ON_HOST, IS_PINNED, ARRAY = Kind("host"), Kind("pinned"), Kind("array")
MOVED, MIXED, NO_VALUE, EMPTY, NUMBER = Kind("moved"), Kind("mixed"), Kind("none"), Kind("items"), Kind("number")
VAGUE = ("", "none", "number")
"""Places that give way to any other: values of a name before the loop, or of an argument that is left out."""
_COMBINED = ("mixed", "device", "host", "pinned", "somewhere", "moved")
"""Places of operands, the one that decides the result's first. Tensors of two sides do not combine."""


def joined(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of a name that holds one of these."""
    found = NO_KIND
    for kind in kinds:
        found = _either(found, kind)
    return found


def _either(one: Kind, other: Kind) -> Kind:
    if one == other or other.place in VAGUE:
        return one if one.place else other
    if one.place in VAGUE:
        return other
    places = {one.place, other.place}
    if places <= {"device", "somewhere"}:
        return Kind("device" if "device" in places else "somewhere", one.mask and other.mask)
    if places <= {"host", "pinned"}:
        return Kind("pinned" if "pinned" in places else "host", one.mask and other.mask)
    if places <= {"module", "moved", "device"} and "moved" in places:
        return one if one.place == "moved" else other
    if places == {"items"}:
        return Kind("items", parts=(joined((*one.parts, *other.parts)),))
    if places == {"tuple"} and len(one.parts) == len(other.parts):
        return Kind("tuple", parts=tuple(map(_either, one.parts, other.parts)))
    return MIXED


def combined(kinds: Iterable[Kind], of_masks: bool = False) -> Kind:
    """Return the kind of an operation's result; `of_masks`: it is a mask if one of the operands is."""
    known = [kind.item if kind.place in ("items", "tuple") else kind for kind in kinds]
    places = {kind.place for kind in known}
    for place in _COMBINED:
        if place in places:
            mask = of_masks and any(kind.mask for kind in known)
            return Kind("device" if place == "moved" else place, mask)
    return NUMBER if places == {"number"} else NO_KIND


_MASK_WORDS = {"mask", "masks", "done", "keep", "kept", "finished", "valid", "active"}
_HOST_WORDS, _ARRAY_WORDS, _LIST_WORDS = {"cpu", "host", "pinned"}, {"np", "numpy"}, {"list", "lists"}


@lru_cache(1 << 14)
def _words(name: str) -> tuple[str, ...]:
    return tuple(name.lower().strip("_").split("_"))


def kind_by_name(name: str, is_tensor: bool) -> Kind:
    """Return the kind of a value by its name alone: `_cpu`, `_np` and `_host` are on the host."""
    words = _words(name)
    if _HOST_WORDS.intersection(words):
        return (
            IS_PINNED
            if is_tensor and _HOST_WORDS & {words[0], words[-1], *(words if "cpu" in words else ())}
            else MIXED
        )
    if _ARRAY_WORDS.intersection(words):
        return ARRAY
    return MIXED if _LIST_WORDS.intersection(words) else NO_KIND


def with_name(kind: Kind, name: str) -> Kind:
    """Return a kind, with its side by the name if that is not known otherwise; names of masks make masks."""
    if kind.place in ("", "none", "somewhere"):
        said = kind_by_name(name, is_tensor=kind.tensor)
        if said.place and not (said == MIXED and kind.mask):
            return said
    return kind._replace(mask=True) if kind.tensor and _words(name)[-1] in _MASK_WORDS else kind


def named_for_the_host(function: str) -> bool:
    """Whether a function works on the host, by its name: `mask_cpu`, but not `copy_to_cpu`."""
    words = _words(function)
    return words[-1] in _HOST_WORDS | _ARRAY_WORDS and not {"to", "into", "2"}.intersection(words)


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((word.value for word in node.keywords if word.arg == name), None)


def says_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def says_false(node: ast.expr | None) -> bool:
    """Whether an argument is left out, or False, or None."""
    return node is None or (isinstance(node, ast.Constant) and not node.value)


def pins(node: ast.Call) -> bool:
    return says_true(keyword(node, "pin_memory"))


_PLAIN = ("int", "float", "bool", "str", "bytes")


def says_plain(annotation: ast.expr | None) -> bool:
    """Whether an annotation names a plain value of Python."""
    return annotation is not None and ast.unparse(annotation).strip("'\"").removesuffix(" | None") in _PLAIN


def says_tensor(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("'\"").removesuffix(" | None")
    return text in ("Tensor", "torch.Tensor", "nn.Parameter", "torch.nn.Parameter")
