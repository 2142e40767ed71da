"""The detectors that the runners (`gapless san`, the pytest plugin) put around a whole program."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from . import pinned_allocs, race, threads, watch
from .allowed import allowing
from .children import Children
from .emulate import emulated_cuda
from .patches import Patches
from .present import CHOSEN, accelerator, choose
from .race import RACE_SINKS, no_race
from .refusals import refuse
from .report import CountedFinding, Finding, SyncReport
from .sites import Frame
from .sync import Region, emulating, no_sync
from .watched import Watched, Watching

Detector = Callable[[SyncReport, bool], AbstractContextManager[None]]
"""Checks the program inside and all threads that it starts, and adds findings to the report.

With True, only the program's own regions are checked; they record into the report and do not raise.
"""


@contextmanager
def _collecting(
    sinks: list[SyncReport], whole: Callable[[], AbstractContextManager[Any]], report: SyncReport, regions: bool
) -> Iterator[None]:
    """Have all regions inside report here; `whole` makes one of the whole program."""
    sinks.append(report)
    try:
        with nullcontext() if regions else whole():
            yield
    finally:
        sinks.remove(report)


@contextmanager
def _everywhere(region: Callable[[], Region]) -> Iterator[None]:
    """Enter such a region on this thread, and on each thread that is started meanwhile."""
    with region(), threads.starting_inside(lambda thread: region()):
        yield


def _whole() -> Region:
    region = no_sync(mode="record")
    region.may_grow = True
    return region


DETECTORS: dict[str, Detector] = {
    "sync": partial(_collecting, watch.REPORT_SINKS, lambda: _everywhere(_whole)),
    # It watches all tensors; registered ones have names.
    "race": partial(_collecting, RACE_SINKS, lambda: no_race("record", track="all")),
}
"""The detectors by their names, as `--detect` takes them."""


class Detectors:
    """Several detectors at once, entered in order and left in reverse."""

    def __init__(
        self, names: list[str], *, regions: bool = False, emulate_cuda: bool = False,
        folder: str | None = None, serves: bool = False, seed: int = 0, allows: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Choose the named detectors. Raises ValueError for an unknown name.

        `regions`: only the program's own regions are checked. `emulate_cuda`: on a machine without CUDA it is emulated
        on the CPU, so that torch.cuda.is_available() is true. `folder`: this process is a child, and its report goes
        there; with `serves` it only forks children. `seed`: which answers an emulated event gives before it has passed.
        `allows`: functions inside which waits are allowed, with reasons.
        """
        for name in names:
            if name not in DETECTORS:
                raise ValueError(f"unknown detector {name!r}; there are {', '.join(DETECTORS)}")
        self._reports = {name: SyncReport() for name in names}
        self._regions = regions
        self._emulates, self._seed = emulate_cuda, seed
        self._allows = dict(allows or {})
        self._options = {
            "names": names, "regions": regions, "emulate_cuda": emulate_cuda, "folder": folder, "serves": serves,
            "seed": seed, "allows": self._allows, "devices": CHOSEN,
        }  # fmt: skip
        self._stack = ExitStack()
        self._watched: Watched | None = None
        self._ended: list[dict[str, int]] = []
        """The counts of the children whose reports were taken."""
        self.report: Callable[[int, str], int] = lambda code, wrong: code
        """Gives the report of a process that ends at once: takes and returns its exit code; see `Children`."""

    def __enter__(self) -> Detectors:
        # Children that begin while others are waited for are watched too.
        watching = self._stack.enter_context(Patches())
        self._stack.callback(self._gather)
        self._watching = Watching(watching)
        self._children = Children(watching, self._options, self._renew, self._state, self._end)
        self._stack.enter_context(allowing(self._allows))
        patches = self._stack.enter_context(Patches())
        none_there = not torch.cuda.is_available()
        emulated = self._emulates and none_there
        patches.wrap(torch, "_register_device_module", _registered_beside_cuda if emulated else _registered)
        patches.wrap(torch, "compile", _compile_emulated if emulated else _compile)
        patches.callback(_compile_again)
        if self._emulates:
            self._stack.enter_context(emulated_cuda(self._seed))
        # CUDA tensors are emulated in the whole program, whichever part is checked.
        if none_there and (self._regions or (self._emulates and "sync" not in self._reports)):
            self._stack.enter_context(_everywhere(emulating))
        for name, report in self._reports.items():
            self._stack.enter_context(DETECTORS[name](report, self._regions))
        return self

    def __exit__(self, *error: Any) -> None:
        self._children.leave()
        self._stack.close()

    def _gather(self) -> None:
        """End the watch over child processes; their findings are this process's too."""
        self._sum(*self._children.close())

    def _end(self, code: int, wrong: str) -> int:
        """Give the report while the detectors are on; returns the exit code."""
        self._add_races()
        self._sum(self._children.ended(), self._children.without_report())
        return self.report(code, wrong)

    def _sum(self, reports: list[Any], lost: int) -> None:
        self._add(reports)
        self._watched = self._watching.so_far().with_children(self._ended, lost)

    def _add_races(self) -> None:
        """Add the races so far to the report, while the detector is on."""
        if "race" in self._reports:
            for one in race.found():
                self._reports["race"].add(one.finding())
            race.found().clear()

    def _add(self, reports: list[Any]) -> None:
        """Add the reports of children to this process's own."""
        self._ended += [report["watched"] for report in reports]
        for entry in (entry for report in reports for entry in report["entries"]):
            finding = entry["finding"]
            stack, details = tuple(Frame(*frame) for frame in finding["stack"]), tuple(finding["details"])
            made = Finding(**{**finding, "stack": stack, "details": details})
            self._reports[made.detector].add(made, entry["excuse"], entry["count"])

    def _renew(self) -> None:
        """Begin again, in a child process that was forked just now."""
        for report in self._reports.values():
            report.clear()
        race.forked()
        self._watching.renew()

    def _state(self) -> dict[str, Any]:
        """This process's findings so far and its counts of watched things, for JSON."""
        self._add_races()
        return {"watched": asdict(self._watching.so_far()), "entries": [asdict(entry) for entry in self.findings()]}

    def take(self) -> list[CountedFinding]:
        """Return the findings since the last call, while these are on; also by children that ended."""
        self._add(self._children.ended())
        self._add_races()
        found = self.findings()
        for report in self._reports.values():
            report.clear()
        return found

    def begin_again(self) -> None:
        """Forget all accesses and orders before another test. The findings so far stay, to be taken later."""
        race.begin_again()
        pinned_allocs.forget()
        state = watch.current()
        if state is not None:
            state.settle()

    @property
    def is_child(self) -> bool:
        """Whether this process is a child, whose report its parent gives."""
        return self._children.is_child

    @property
    def watched(self) -> Watched:
        """Counts of watched things; complete once these have been left."""
        assert self._watched is not None, "the detectors are still on"
        return self._watched

    @property
    def saw_nothing(self) -> bool:
        """Whether these detectors can have found nothing, for want of anything to watch."""
        return self.watched.says_nothing(self._reports)

    def findings(self) -> list[CountedFinding]:
        """Findings by detector; equal ones are counted."""
        return [entry for report in self._reports.values() for entry in report.entries()]


def _registered(original: Any, kind: str, module: Any) -> None:
    """Replace torch's registration of a backend: while the program runs it is too late to wrap the backend's parts."""
    original(kind, module)
    if accelerator() not in ("", kind):
        return
    print(f"gapless san: torch.{kind} was registered by the program, and is not watched: give --device {kind}",
          file=sys.stderr)  # fmt: skip


def _registered_beside_cuda(original: Any, kind: str, module: Any) -> None:
    """Refuse a backend that the program registers while CUDA is emulated: its tensors would be CUDA's."""
    raise refuse(
        f"torch.{kind} beside an emulated CUDA: give --device {kind}, or --gapless-san-device {kind} to pytest"
    )


def _compile(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.compile`: its functions run uncompiled, so that every operator is seen."""
    torch.compiler.set_stance("force_eager")
    return original(*args, **kwargs)


def _compile_emulated(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Do the same without a GPU: the gradient of flex attention compiles itself, and would end the process there."""
    compiled = _compile(original, *args, **kwargs)
    if not args or getattr(args[0], "__module__", "") != "torch.nn.attention.flex_attention":
        return compiled

    def without_gradient(*given: Any, **more: Any) -> Any:
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
            raise refuse("the gradient of torch.nn.attention.flex_attention")
        return compiled(*given, **more)

    return without_gradient


def _compile_again() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


def choose_all(given: dict[str, Any]) -> None:
    """Watch the kinds of accelerators that a parent's options name, and take them out of the options."""
    for kind in given.pop("devices"):
        choose(kind)


def arrive(options: str) -> None:
    """Check this process, a child that multiprocessing has spawned, with the `options` of its parent."""
    given = json.loads(options)
    choose_all(given)
    detectors = Detectors(given.pop("names"), **given)
    detectors.__enter__()
    atexit.register(detectors.__exit__)
