"""The dispatch mode that sees torch's operators on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch._C import _len_torch_function_stack as _functions_watched
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from . import marks
from .patches import holding, leave_uncompiled
from .race_checker import RaceChecker
from .race_ops import OperatorPlan
from .sync_ops import RunOp, SyncOps


class RaceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operator to the checker before it runs. Each thread has its own, since a mode keeps state."""

    supports_higher_order_operators = True

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.checker = checker


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs) if kwargs else func(*args)


def _dispatch(
    self: RaceMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    if types and any(map(is_traceable_wrapper_subclass_type, types)):
        return NotImplemented  # as in SyncOps
    if types and any(map(marks.is_fake_type, types)):
        return func(*args, **kwargs or {})
    return _watched(self.checker, _whole, _run, func, args, kwargs or {})


def _whole(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    return False


Opens = Callable[[Any, Sequence[Any], Any], bool]
"""Returns whether a call of an operator that is not torch's own is seen from the inside."""


def _watched(
    checker: RaceChecker, opens: Opens, run: RunOp, func: Any, args: Sequence[Any], kwargs: Any
) -> Any:  # fmt: skip
    """Run an operator, reported to the checker before and after it."""
    plan = checker.plans.get(id(func)) or checker.plan(func)
    if not checker.active or plan.is_idle or (plan.custom and opens(func, args, kwargs)):
        return run(func, args, kwargs) if plan.around is None else plan.around(run, func, args, kwargs)
    if _functions_watched():
        return _quietly(checker, plan, run, args, kwargs)
    site, actor = checker.saw(plan, args, kwargs)
    result = run(func, args, kwargs)
    if checker.follows_results:
        checker.ran(plan, args, kwargs, result, site, actor)
    return result


def _quietly(checker: RaceChecker, plan: OperatorPlan, run: RunOp, args: Sequence[Any], kwargs: Any) -> Any:
    """Report with function modes off: asking a tensor for its address must not pass through one."""
    with marks.FunctionsOff():
        site, actor = checker.saw(plan, args, kwargs)
    result = run(plan.op, args, kwargs)
    if checker.follows_results:
        with marks.FunctionsOff():
            checker.ran(plan, args, kwargs, result, site, actor)
    return result


# Not in the class body: there torch wraps it against its compiler, which costs 2 us an operator and imports that.
RaceMode.__torch_dispatch__ = _dispatch  # type: ignore[assignment, method-assign]
leave_uncompiled(_dispatch)


def mode(checker: RaceChecker) -> AbstractContextManager[Any]:
    """Let the checker see the calling thread's operators: by the mode of syncs where that is the innermost one."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(one, (RaceMode, SyncOps)) and one.checker is checker for one in modes):
        return nullcontext()
    if modes and isinstance(modes[-1], SyncOps) and modes[-1].around is None:
        return holding(modes[-1], around=partial(_watched, checker, modes[-1].opens), checker=checker)
    return RaceMode(checker)
