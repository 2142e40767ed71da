"""Finds the Python functions behind operators of `torch.library`, so that their bodies are watched as user's code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import marks
from .patches import Patches, SharedPatches
from .refusals import refuse

_has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
_computed: Any = torch._C._dispatch_has_computed_kernel_for_dispatch_key
_KEYSETS: Any = {name: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("CPU", "CUDA")}
_COMPILED = re.compile(r"\.(c|cc|cpp|cxx|cu|cuh|h|hpp|mm)(:\d+)?'|/dev/null")
"""The place of a kernel in C++, as torch writes it."""


class Body(NamedTuple):
    """A kernel that is a Python function."""

    kernel: Any
    keyset: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel.call_boxed(self.keyset, *args, **kwargs)


class Bodies(NamedTuple):
    """The kernels of an operator for tensors of a device and for host tensors alone; None for a compiled one."""

    device: Body | None
    host: Body | None
    is_lost: bool
    """Whether there is a compiled kernel for CUDA and none for the CPU."""

    def choose(self, name: str, on_device: bool) -> Body | None:
        """Return the body that runs. Raises NotEmulatedError where that is compiled for CUDA."""
        if on_device and self.is_lost:
            raise refuse(f"the operator {name}, which has a CUDA kernel alone")
        return self.device if on_device else self.host


_known: dict[int, tuple[Any, Bodies]] = {}
"""The bodies of called operators, by the operator's id; the operator is held, so that its id stays its own."""


def _forget() -> None:
    _known.clear()
    _composites.clear()


def _registered(original: Any, *args: Any, **kwargs: Any) -> Any:
    _forget()
    return original(*args, **kwargs)


def _follow(patches: Patches) -> None:
    _forget()
    patches.wrap(torch.library.Library, "impl", _registered)


registrations = SharedPatches(_follow)
"""Held while operators are watched: a kernel that is registered later counts from then on."""


def bodies(func: Any) -> Bodies:
    """Return the bodies of an operator overload that is not torch's own."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = func, _find(func.name())
    return known[1]


def _find(name: str) -> Bodies:
    cuda, cpu, real = _has(name, "CUDA"), _has(name, "CPU"), marks.has_accelerator()
    if cpu and not (cuda and (real or marks.emulated.type == "cuda")):
        # The kernel of the CPU stands for the device's as a whole: a GPU does other things inside.
        return Bodies(None, None, False)
    device = _body(name, "CUDA")
    return Bodies(device, _body(name, "CPU"), cuda and not (device or real or _computed(name, "CPU")))


def _body(name: str, key: str) -> Body | None:
    """Return the kernel for a key if it is a function of Python."""
    if not _computed(name, key):
        return None
    kernel = torch.library.get_kernel(name, key)
    return None if _COMPILED.search(repr(kernel)) else Body(kernel, _KEYSETS[key])


OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The types of what `torch.ops` holds, as a function mode is given it."""
TORCHS = ("aten::", "prim::", "prims::")
_COMPOSITE = "CompositeImplicitAutograd"
NONE_GIVEN: Mapping[str, Any] = {}


def composite(func: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NONE_GIVEN) -> Body | None:
    """Return the body of an operator that is made of others and not torch's own; a dispatch mode does not see it.

    `func` is an overload, or a packet, of whose overloads the arguments choose one.
    """
    found = _composites.get(id(func))
    if found is None:
        found = _composites[id(func)] = func, {name: _find_composite(name) for name in _names(func)}
    bodies = found[1]
    if len(bodies) < 2 or not any(bodies.values()):
        return next(iter(bodies.values()), None)
    overload = torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)
    return bodies[f"{func._qualified_op_name}.{overload}".removesuffix(".default").removesuffix(".")]


_composites: dict[int, tuple[Any, dict[str, Body | None]]] = {}
"""Bodies by the full names of overloads, by the id of the overload or packet."""


def _names(func: Any) -> list[str]:
    """Return the full names of the overloads that this may be, as the dispatcher has them."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        return [getattr(func, one).name() for one in func.overloads()]  # type: ignore[no-untyped-call]
    return [func.name()]


def _find_composite(name: str) -> Body | None:
    return _body(name, "CPU") if not name.startswith(TORCHS) and _has(name, _COMPOSITE) else None
