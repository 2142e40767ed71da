"""Runs operators whose kernel for the CPU lacks a type that CUDA's has: in a wider type, with the results cast back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .refusals import refuse

_LACKS = re.compile(r"not implemented for '(\w+)'|could not create a primitive")
_NO_KERNEL = re.compile(r"Could not run '([\w:.]+)' with arguments from the 'CPU' backend")
_F32, _F64, _C64 = torch.float32, torch.float64, torch.complex64
_INTEGERS = {"Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64}
_SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

_Casts = dict[torch.dtype, torch.dtype]
_WIDER: dict[str, list[_Casts]] = {
    "bool": [{torch.bool: torch.uint8}, {torch.bool: _F32}],
    **{name.lower(): [{kind: _F64}] for name, kind in _INTEGERS.items()},
    "half": [{torch.float16: _F32, torch.complex32: _C64}],
    "complexhalf": [{torch.float16: _F32, torch.complex32: _C64}],
    "bfloat16": [{torch.bfloat16: _F32}],
    **{name: [{getattr(torch, name): _F32}] for name in _SMALL},
}
"""Casts to try, in order, by the name of a type in errors."""


def lacking(func: Any, args: Sequence[Any], kwargs: dict[str, Any], error: RuntimeError) -> Any:
    """Return what an operator would, whose kernel for the CPU raised this.

    Raises NotEmulatedError if a type or the whole kernel is missing and no wider type will do, else the error.
    """
    found = _NO_KERNEL.search(str(error))
    if found and found[1].endswith("mm.dtype"):  # a product with results of a wider type
        wide = [one.to(args[-1]) if isinstance(one, Tensor) else one for one in args[:-1]]
        return func.overloadpacket.default(*wide, **kwargs)
    if found:
        raise refuse(f"the operator {found[1]}, which has a CUDA kernel alone") from error
    found = _LACKS.search(str(error))
    if not found:
        raise error
    kind = found[1] or "half"  # oneDNN does not name it
    for casts in _WIDER.get(kind.lower(), ()):
        try:
            return _in_wider(func, args, kwargs, casts)
        except RuntimeError as again:
            if not _LACKS.search(str(again)):
                raise
    raise refuse(f"{func} of {kind}, for which the CPU has no kernel") from error


def _in_wider(func: Any, args: Sequence[Any], kwargs: dict[str, Any], casts: _Casts) -> Any:
    back = {wide: narrow for narrow, wide in casts.items()}
    given: dict[int, Tensor] = {}
    """Arguments, by the ids of the tensors in their place."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return casts.get(value, value)
        if not isinstance(value, Tensor) or value.dtype not in casts:
            return value
        wide = value.to(casts[value.dtype])
        given[id(wide)] = value
        held.append(wide)
        return wide

    def narrow(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else value.to(back.get(value.dtype, value.dtype))

    held: list[Tensor] = []
    out = func(*tree_map(widen, list(args)), **tree_map(widen, kwargs))
    if func._schema.is_mutable:
        for wide in held:
            given[id(wide)].copy_(wide)
    return tree_map(narrow, out)
