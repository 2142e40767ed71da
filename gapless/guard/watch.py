"""The state of a checked thread: its regions, its allowances and its current call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _EnableTorchFunction
from torch._C import _is_torch_function_all_disabled as _are_functions_off
from torch.nn import Parameter
from torch.overrides import resolve_name
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import marks
from .backends import DeviceKind
from .mends import mend
from .patches import holding
from .report import Finding, SyncReport
from .sites import Frame, caller, user_stack
from .suppress import comment_at
from .sync_rules import RULES, WAITING

Predicate = Callable[[Tensor], bool]
Mode = Literal["raise", "record"]


class SyncError(RuntimeError):
    """A checked region would have made the host wait. `finding` has the place, the reason and the mend."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text())
        self.finding = finding


@dataclass(eq=False)
class Scope:
    """A region, as a ThreadState uses it."""

    predicate: Predicate | None
    mode: Mode
    slow_ns: int
    reports: bool = True
    """Whether findings count."""
    may_grow: bool = False
    """Whether the allocators may take memory inside, as a whole program has to."""
    report: SyncReport = field(default_factory=SyncReport)
    """The findings of all of its uses."""


_function_modes: Any = torch.overrides._get_current_function_mode_stack


class TorchCall(NamedTuple):
    """The torch function that the user's code is in."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Allowance:
    """A section that excuses the waits of a thread."""

    reason: str
    watch: ThreadState | None
    """The thread's state, until the section ends."""
    by: object = None
    """The program's context manager that began it, if one did."""


ALLOWANCES: ContextVar[tuple[Allowance, ...]] = ContextVar("ALLOWANCES", default=())
"""The sections around this point of the program, the outermost first; ended ones may be among them.

A task has its own and takes over its maker's, which end there as well.
"""


class ThreadState:
    """One thread's state while it is inside regions."""

    def __init__(self) -> None:
        self.modes = ExitStack()
        """Modes and hooks that are in place while the thread is inside regions."""
        self.scopes: list[Scope] = []
        self.slow_ns = 0
        """The time limit of the innermost region."""
        self.call: TorchCall | None = None
        self.calls: Any = None
        """The function mode of this thread's regions."""
        self.ops: Any = None
        """Their dispatch mode."""
        self.within: TorchCall | None = None
        """The call from inside which torch calls the user's code back, while it does so."""
        self.quiet = 0
        """Nothing is reported while this is above 0: what happens is part of something reported already."""
        self.to_host = False
        """The call that runs copies to the host: its results are host tensors."""
        self.to_device = False
        """The call that runs makes a tensor on an emulated device."""
        self.reported = False
        """The call that runs has been reported."""
        self.reduced: Callable[[], Any] = lambda: None
        """Returns the storage that the last max or sum made, while it lives; it only decides between two texts."""
        self.late: list[Finding] = []
        """Findings to be reported when the region ends."""
        self.grown: list[tuple[int, int]] = []
        """The allocators' counters at the beginning of each region."""
        self.by_marks = False
        """Whether device tensors are the marked ones and no call is timed: then a call may go the short way."""
        self.kinds: list[DeviceKind] = []
        """The accelerators that are here."""
        self._polls: Counter[Frame] = Counter()
        self._predicate: Predicate | None = None
        self.real = marks.has_accelerator()

    def settle(self) -> None:
        """Take the settings of the regions in `scopes`."""
        # A region that names no devices sees the devices of the region around it.
        named = (scope.predicate for scope in reversed(self.scopes))
        self._predicate = next((predicate for predicate in named if predicate is not None), None)
        self.slow_ns = self.scopes[-1].slow_ns if self.scopes else 0
        self.by_marks = not (self.real or self.slow_ns or self._predicate)
        self._polls.clear()

    def is_device(self, tensor: Tensor) -> bool:
        if tensor in marks.DEVICE_TENSORS or (self.real and marks.on_accelerator(tensor)):
            return True
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            if is_traceable_wrapper_subclass(tensor):
                return any(self.is_device(inner) for inner in marks.inside(tensor))
            if marks.on_accelerator(tensor):
                return True  # without a GPU: it has no memory of its own
        return self._predicate is not None and tensor not in marks.HOST_COPIES and self._predicate(tensor)

    @property
    def allowed(self) -> str | None:
        """The reason of the innermost `allow`."""
        return next((one.reason for one in reversed(ALLOWANCES.get()) if one.watch is self), None)

    def flag(self, rule: str, what: str = "", detail: str = "") -> None:
        """Report a finding at the user's line; raises SyncError if the region is set to raise."""
        if self.quiet:
            return
        self.reported = True
        called = function_name(self.call.func) if self.call else RULES[rule].what
        self.deliver(make_finding(rule, what or called, detail))
        if rule in WAITING:
            for follow in ON_WAIT:
                follow()

    def deliver(self, finding: Finding, quietly: bool = False) -> None:
        """Add to the reports; raise unless it is excused, the region records, or `quietly`."""
        scope = self.scopes[-1]
        if not scope.reports:
            return
        excuse = self.allowed or comment_at(finding.site) or comment_at(finding.user)
        for report in (scope.report, *REPORT_SINKS):
            report.add(finding, excuse)
        if excuse is None and scope.mode == "raise" and not (quietly or REPORT_SINKS):
            raise SyncError(finding)

    def polled(self, most: int) -> bool:
        """Count a query at the user's line; returns whether there is now one more than `most`."""
        site = user_stack()[:1]
        self._polls.update(site)
        return bool(site) and self._polls[site[0]] == most + 1

    @contextmanager
    def silence(self, to_host: bool = False) -> Iterator[None]:
        """Report nothing inside; with `to_host` new tensors are host tensors."""
        # Written out, since most checked calls come here.
        quiet, host = self.quiet, self.to_host
        self.quiet, self.to_host = quiet + 1, to_host or host
        try:
            yield
        finally:
            self.quiet, self.to_host = quiet, host

    def called_back(self) -> AbstractContextManager[None]:
        """Watch code that torch calls from inside a call as if the program itself had called it.

        A function mode is off while its own handler runs, and so it is in all that the handler calls.
        """
        return _CalledBack(self)

    def placing(self) -> AbstractContextManager[None]:
        """Place new tensors that are made from no other tensor on the emulated device."""
        return holding(self, to_device=True)


class _CalledBack:
    """The context of `called_back`; written out, since each call of an overriding class comes here."""

    def __init__(self, watch: ThreadState) -> None:
        self._watch = watch
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        watch = self._watch
        self._before = watch.call, watch.within, watch.to_host, watch.to_device
        watch.call, watch.within, watch.to_host, watch.to_device = None, watch.call or watch.within, False, False
        if _are_functions_off():
            self._enter(_EnableTorchFunction())
        # On already in what torch calls back from inside the backward of another call.
        if watch.calls not in _function_modes():
            self._enter(watch.calls)

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: object) -> None:
        while self._entered:
            self._entered.pop().__exit__(*error)
        watch = self._watch
        watch.call, watch.within, watch.to_host, watch.to_device = self._before


REPORT_SINKS: list[SyncReport] = []
"""The runners' reports, which get every finding of every region. While there is one, no region raises."""


ON_WAIT: list[Callable[[], None]] = []
"""Called at each wait that is flagged, by what follows the order of streams: some waits show no operator."""


class _Local(threading.local):
    watch: ThreadState | None = None


local = _Local()


def current() -> ThreadState | None:
    """This thread's state while it is inside a region."""
    return local.watch


def begin_allowance(reason: str, by: object = None) -> Allowance:
    """Begin a section that excuses this thread's waits; it lasts until its `watch` is None."""
    begun = Allowance(reason, current(), by)
    ALLOWANCES.set((*[one for one in ALLOWANCES.get() if one.watch is not None], begun))
    return begun


def make_finding(rule: str, what: str, detail: str = "") -> Finding:
    entry = RULES[rule]
    instead = mend(rule, what, caller()) or entry.instead
    return Finding("sync", rule, what, entry.why, instead, user_stack(), (detail,) if detail else ())


def function_name(func: Any) -> str:
    """Return the name of what a torch function mode receives, such as `torch.Tensor.item`."""
    name: str | None = resolve_name(func)
    # A method that is wrapped now has no name in torch's table.
    name = name or str(getattr(func, "__qualname__", func)).replace("TensorBase.", "torch.Tensor.")
    return name.replace("_VariableFunctionsClass.", "torch.")
