"""Code of the user that torch calls from inside its own calls: hooks, functions of autograd, overriding classes, modes.

A function mode is off while its own handler runs, so it does not see what torch calls from there. Here such code runs
inside the thread's mode again, so it is watched and emulated as the program's other code is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .marks import FunctionsOff
from .patches import Patches, SharedPatches, holding
from .watch import ThreadState, TorchCall, current

_autograd: Any = torch._C._autograd
_are_classes_on: Callable[[], bool] = torch._C._is_torch_function_enabled
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_ClassesOff: Any = torch._C.DisableTorchFunctionSubclass
_OFF: Any = torch._C._disabled_torch_function_impl


class _Engine:
    """Replaces autograd's engine: the backward, and all Python code in it, runs inside the thread's modes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        run, watch = self._engine.run_backward, current()
        if watch is None:
            return run(*args, **kwargs)
        # Autograd's threads, one a device, take the modes over from the thread that calls this.
        with watch.called_back(), holding(watch, within=TorchCall(run, args, kwargs)):
            return run(*args, **kwargs)


def _called_back(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch = current()
    if watch is None:
        return function(*args, **kwargs)
    with watch.called_back():
        return function(*args, **kwargs)


def watched_function(function: Any) -> Any:
    """Return a function that torch may call back; other values are left alone."""
    return partial(_called_back, function) if callable(function) else function


def _push_hooks(original: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Replace what sets the hooks of saved tensors; `unpack` is called in the backward or by the program itself."""
    original(watched_function(pack), unpack)


def has_own(types: Sequence[Any]) -> bool:
    """Return whether one of the classes overrides torch's functions, and is not off."""
    return _are_classes_on() and any(kind.__torch_function__ is not _OFF for kind in types)


def branching(watch: ThreadState, call: TorchCall) -> Any:
    """Run torch.cond or while_loop, which decide on the host and call their branches past all modes."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in _tensors(call.args)):
        return call.func(*call.args, **call.kwargs)  # torch traces the branches

    def branch(function: Callable[..., Any], decides: bool, *args: Any) -> Any:
        with watch.ops, watch.called_back():
            result = function(*args)
            return bool(result) if decides else result

    decides, *others = call.args
    if callable(decides):
        decides = partial(branch, decides, True)
    else:
        with watch.called_back():
            decides = bool(decides)
    branches = [partial(branch, one, False) if callable(one) else one for one in others]
    return call.func(decides, *branches, **call.kwargs)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def of_classes(watch: ThreadState, func: Any, types: Sequence[Any], args: Any, kwargs: Any) -> Any:
    """Call the arguments' own `__torch_function__`, in torch's order, inside the thread's mode."""
    given = () if kwargs is None else (kwargs,)
    with watch.called_back():
        for kind in types:
            answer = _owner(kind, args, kwargs).__torch_function__(func, types, args, *given)
            if answer is not NotImplemented:
                return answer
    return NotImplemented


def _owner(kind: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument of this type: its `__torch_function__` may be a method of an instance."""
    for one in (*args, *(kwargs or {}).values()):
        for value in one if isinstance(one, (list, tuple)) else (one,):
            if type(value) is kind:
                return value
    return kind


def takes_apart(types: Sequence[Any]) -> bool:
    """Return whether a class of the user's, and not of torch's, runs the operators of its tensors."""
    return any(_is_users(kind) for kind in types)


def of_dispatch_classes(mode: TorchDispatchMode, watch: ThreadState, call: TorchCall, types: Sequence[Any]) -> Any:
    """Call the arguments' own `__torch_dispatch__`, in torch's order, inside the thread's modes."""
    with mode, watch.called_back(), holding(watch, within=call):
        for kind in types:
            answer = kind.__torch_dispatch__(call.func, types, call.args, call.kwargs)
            if answer is not NotImplemented:
                return answer
    return NotImplemented


def _is_users(kind: type) -> bool:
    return _are_users(kind.__module__)


def _are_users(module: str) -> bool:
    """Return whether a module is neither torch's nor the guard's own."""
    return not f"{module}.".startswith(("torch.", f"{__package__}."))


class _AnyDisabling(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (FunctionsOff, _ClassesOff))


class _Disabling(metaclass=_AnyDisabling):
    """Stands for `DisableTorchFunction`: a program switches overriding classes off, and not the guard's mode."""

    def __new__(cls) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _ClassesOff() if _are_users(caller) else FunctionsOff()


class _Moved(torch.autograd.Function):
    """A copy between host and an emulated device, whose gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, copy: Callable[[Tensor], Tensor], back: Any) -> Tensor:
        ctx.back = back
        return copy(source)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # A thread outside of all regions emulates nothing.
        return grads[0] if current() is None else grads[0].to(ctx.back), None, None


def moved(source: Tensor, copy: Callable[[Tensor], Tensor], back: Any) -> Tensor:
    """Copy a tensor by `copy`; in the backward its gradient is copied to the device `back`."""
    if not (source.requires_grad and torch.is_grad_enabled()) or _transforms() or forward_ad._current_level >= 0:
        return copy(source)
    result: Tensor = _Moved.apply(source, copy, back)  # type: ignore[no-untyped-call]
    return result


class _Modes:
    """Dispatch modes of the user's classes: each class is wrapped when one of its modes is entered first."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._wrapped: set[Any] = set()

    def enter(self, original: Any, mode: TorchDispatchMode) -> Any:
        owner = next(kind for kind in type(mode).__mro__ if "__torch_dispatch__" in vars(kind))
        if _is_users(owner) and owner not in self._wrapped and current() is not None:
            self._wrapped.add(owner)
            self._patches.wrap(owner, "__torch_dispatch__", _called_back)
        return original(mode)


def _install(patches: Patches) -> None:
    variable: Any = torch.autograd.Variable
    patches.put(variable, "_execution_engine", _Engine(variable._execution_engine))
    patches.put(torch._C, "DisableTorchFunction", _Disabling)
    patches.wrap(TorchDispatchMode, "__enter__", _Modes(patches).enter)
    patches.wrap(_autograd, "_push_saved_tensors_default_hooks", _push_hooks)


_shared = SharedPatches(_install)


def watched() -> AbstractContextManager[None]:
    """Watch what torch calls back on the threads that are inside regions."""
    return _shared.held()
