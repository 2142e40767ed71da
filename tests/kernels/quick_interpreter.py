"""A pytest plugin: Triton's interpreter does once what it otherwise does at every operation, in a quarter of the time.
Kernels compute the same, but for the order of a product's sums: like a GPU's, it is that of any place in a tile."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

_PLAIN = {int, bool, float, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
_patched: set[int] = set()
"""The modules that the launch which runs now has patched, by id."""
# By the names of types, which tell them apart; a type does not change.
_np_dtypes: dict[str, np.dtype[Any]] = {}
_blocks: dict[tuple[str, str], Any] = {}
_shapes: dict[str, tuple[Any, Any]] = {}
_builders: dict[str, Any] = {}
_fields: dict[tuple[Any, ...], dict[str, Any]] = {}


@functools.cache
def _languages(function: Any) -> frozenset[int]:
    """Those of Triton's modules that the function's file imports."""
    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


def _patch(function: Any) -> Any:
    if _languages(function) <= _patched:
        return _Scope()
    _patched.update(_languages(function))
    return _plain_patch(function)


def _restore(scope: Any) -> None:
    """Launches do it at their end; a helper's patches, which nothing restores, go with those of its launch."""
    _patched.clear()
    _plain_restore(scope)


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    if (found := _np_dtypes.get(dtype.name)) is None:
        found = _np_dtypes[dtype.name] = _plain_np_dtype(dtype)
    return found


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _plain_unwrap(value)


def _with_element(block: Any, element: Any) -> Any:
    key = block.name, element.name
    if (found := _blocks.get(key)) is None:
        found = _blocks[key] = _plain_with_element(block, element)
    return found


def _init_block(block: Any, element: Any, shape: Any) -> None:
    sizes = shape.values if type(shape) is tl.tuple else shape
    key = element.name, *sizes
    if key not in _fields:
        _plain_init_block(block, element, shape)
        _fields[key] = {name: value for name, value in vars(block).items() if name != "element_ty"}
    vars(block).update(_fields[key], element_ty=element)


def _to_ir(block: Any, builder: Any) -> Any:
    if (found := _builders.get(block.name)) is None:
        found = _builders[block.name] = _plain_to_ir(block, builder)
    return found


def _equal(shape: Any, other: Any) -> Any:
    values = other.values if type(other) is tl.tuple else other
    if type(values) is list and all(type(value) is int for value in values):
        return tl.constexpr(shape.values == values)
    return _plain_equal(shape, other)


def _set_attr(scope: Any, owner: Any, name: str, value: Any) -> None:
    """What Triton's `builtin` has wrapped only checks that it is given what it is given here."""
    if member := (getattr(value, "__kwdefaults__", None) or {}).get("member"):
        value = _of_interpreter(getattr(member, "__wrapped__", member))
    _plain_set_attr(scope, owner, name, value)


def _of_interpreter(function: Any) -> Any:
    semantics = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantics
        return function(*args, **kwargs)

    return call


def _init(tensor: Any, handle: Any, type: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    name = type.name if type.is_block() else ""
    if name not in _shapes:
        _plain_init(tensor, handle, type)
        _shapes[name] = tensor.shape, tensor.numel
    tensor.shape, tensor.numel = _shapes[name]


def _check_overflow(self: Any, *operation: Any) -> None:
    """Check for overflow where the option `debug` is set: elsewhere nothing asserts the result."""
    if self.builder.options.debug:
        _plain_check(self, *operation)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    one, other = (x.data.astype(d.data.dtype, copy=False) for x in (a, b))
    sums = np.einsum("...ik,...kj->...ij", one, other) + d.data
    return interpreter.TensorHandle(sums, d.dtype.scalar)


def _replace(owner: Any, name: str, function: Any) -> Any:
    """Return what `owner` had under this name."""
    plain = getattr(owner, name)
    setattr(owner, name, function)
    return plain


# Triton's own private names: it has no public ones for this.
_Scope = interpreter._LangPatchScope
_plain_patch = _replace(interpreter, "_patch_lang", _patch)
_plain_np_dtype = _replace(interpreter, "_get_np_dtype", _np_dtype)
_plain_unwrap = _replace(core, "_unwrap_if_constexpr", _unwrap)
_plain_restore = _replace(_Scope, "restore", _restore)
_plain_with_element = _replace(tl.block_type, "with_element_ty", _with_element)
_plain_init_block = _replace(tl.block_type, "__init__", _init_block)
_plain_to_ir = _replace(tl.block_type, "to_ir", _to_ir)
_plain_equal = _replace(tl.tuple, "__eq__", _equal)
_plain_set_attr = _replace(_Scope, "set_attr", _set_attr)
_replace(interpreter.InterpreterBuilder, "create_dot", _dot)
_plain_init = _replace(tl.tensor, "__init__", _init)
_plain_check = _replace(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow)
