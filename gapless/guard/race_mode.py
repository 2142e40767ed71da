"""The dispatch mode that sees torch's operators on one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_function_stack as _functions_watched
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .patches import leave_uncompiled
from .race_checker import RaceChecker
from .race_ops import OperatorPlan


class RaceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operator to the checker before it runs. Each thread has its own, since a mode keeps state."""

    supports_higher_order_operators = True

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.checker = checker


def _dispatch(
    self: RaceMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    checker = self.checker
    plan = checker.plans.get(id(func)) or checker.plan(func)
    if not checker.active or plan.is_idle:
        return func(*args, **kwargs) if kwargs else func(*args)
    kwargs = kwargs or {}
    if _functions_watched():
        return _quietly(checker, plan, args, kwargs)
    site, actor = checker.saw(plan, args, kwargs)
    result = func(*args, **kwargs)
    if checker.follows_results:
        checker.ran(plan, args, kwargs, result, site, actor)
    return result


def _quietly(checker: RaceChecker, plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Report with function modes off: asking a tensor for its address must not pass through one."""
    with torch._C.DisableTorchFunction():
        site, actor = checker.saw(plan, args, kwargs)
    result = plan.op(*args, **kwargs)
    if checker.follows_results:
        with torch._C.DisableTorchFunction():
            checker.ran(plan, args, kwargs, result, site, actor)
    return result


# Not in the class body: there torch wraps it against its compiler, which costs 2 us an operator and imports that.
RaceMode.__torch_dispatch__ = _dispatch  # type: ignore[assignment, method-assign]
leave_uncompiled(_dispatch)


def mode(checker: RaceChecker) -> RaceMode:
    """A mode for the calling thread."""
    return RaceMode(checker)


def is_on(checker: RaceChecker) -> bool:
    """Return whether the calling thread's operators are seen now."""
    return any(isinstance(m, RaceMode) and m.checker is checker for m in _get_current_dispatch_mode_stack())
