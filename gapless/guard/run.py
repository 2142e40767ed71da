"""Runs a Python program under the detectors: `python -m gapless.guard.run [options] program.py args`.

`gapless san -- python program.py args` starts this. The report goes to stderr after the program has ended. The exit
code is the program's own where that is not 0, else 1 when something was found, 3 when there was nothing to watch or
child processes ended without a report, and 0 when what was watched is clean.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from .names import names_cuda
from .report import CountedFinding, as_text
from .report_files import Base, as_dict, check_files, write_files
from .suppress import allowances, apply, gather, tell_unused

if TYPE_CHECKING:
    from .detectors import Detectors

EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_UNWATCHED = 3
EXIT_INTERRUPTED = 130

_RUNNING = (__file__, runpy.__file__, "<frozen runpy>")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run; the lint shares some. `gapless san` has the same; its help does not import torch."""
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--sarif", metavar="FILE", help="also write the report as SARIF 2.1.0, which code hosts show")
    parser.add_argument("--diff", metavar="BASE", help="report only what is new since BASE, an earlier report as JSON")
    parser.add_argument(
        "--device", default="", metavar="NAME",
        help="watch this kind of accelerator: cuda, xpu, npu, hpu, mps, or one that a package offers (default: the one "
        "that torch finds)",
    )  # fmt: skip
    parser.add_argument("--detect", default="", metavar="NAMES", help="detectors, with commas between (default: all)")
    parser.add_argument(
        "--device-tensors", choices=("auto", "marked", "cuda"), default="auto",
        help="without an accelerator: `marked` takes marked and device='cuda' tensors as device tensors; `cuda` also "
        "emulates CUDA, so that torch.cuda.is_available() is true (default: cuda if the program names it)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="how often an emulated event.query() is false before it is true, at each line (default: 0)",
    )  # fmt: skip
    parser.add_argument("--regions", action="store_true", help="check only inside the program's own guard regions")
    form = "'PATH[:LINE] [RULE] -- REASON'"
    parser.add_argument("--suppress", action="append", default=[], metavar=form, help="excuse a site")
    parser.add_argument("--suppressions", metavar="FILE", help="a file of such lines (default: .gapless-san)")


UNWATCHED = (
    "nothing was watched: no tensor was on a device, so this says nothing about the program. Run it where there is a "
    f"GPU, give --device-tensors cuda if it runs on CUDA, or mark tensors by {__package__}.device_tensor"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gapless.guard.run", allow_abbrev=False)
    add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module's name")
    parser.add_argument("program")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    from .detectors import DETECTORS, Detectors
    from .present import choose

    try:
        suppressions = gather(options.suppress, options.suppressions)
        names = options.detect.split(",") if options.detect else list(DETECTORS)
        base = check_files(options)
        if not (options.module or Path(options.program).exists()):
            raise ValueError(f"{options.program} is not there")
        emulates = _emulates_cuda(options)
        if options.device:
            choose(options.device)
        detectors = Detectors(
            names, regions=options.regions, emulate_cuda=emulates, seed=options.seed,
            allows=allowances(options.suppress, options.suppressions),
        )  # fmt: skip
    except ValueError as error:
        print(f"gapless san: error: {error}", file=sys.stderr)
        return EXIT_USAGE

    def report(end: End) -> int:
        entries = apply(detectors.findings(), suppressions)
        tell_unused(suppressions)
        return _report(options, detectors, entries, base, end)

    detectors.report = lambda code, wrong: report(End(code, wrong))
    before = set(threading.enumerate())
    try:
        with detectors:
            end = run_program(options.program, options.args, options.module)
            end = _join_threads(before) or end
    except NotThereError as error:
        print(f"gapless san: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if detectors.is_child:
        return end.code  # the program forked, and this is not the process that reports
    sys.stdout.flush()
    return report(end)


def _report(
    options: argparse.Namespace, detectors: Detectors, entries: list[CountedFinding], base: Base | None, end: End
) -> int:
    """Show and write the findings; returns the exit code."""
    entries, known = base.split(entries) if base else (entries, None)
    found = any(entry.excuse is None for entry in entries)
    lost = detectors.watched.lost
    unwatched = detectors.saw_nothing and not found and not lost
    body, _, summary = as_text(entries).rpartition("\n")
    without = f"{lost} child process{'es' * (lost > 1)} ended without a report" if lost else ""
    incomplete = "; ".join(filter(None, (end.raised, without)))
    parts = [f"incomplete: {incomplete}"] if incomplete else []
    parts.append(UNWATCHED if unwatched else summary)
    if base and known is not None:
        parts.append(f"{len(known)} sites known from {options.diff}, {base.gone(known)} of its sites gone")
    print(f"{body}\n" * bool(body) + f"gapless san: {detectors.watched.text()}", file=sys.stderr)
    print(f"gapless san: {'; '.join(parts)}", file=sys.stderr)
    about = {"program": [options.program, *options.args], "exit_code": end.code, "incomplete": incomplete}
    report = {**about, "watched": asdict(detectors.watched), **as_dict(entries, known)}
    try:
        write_files(report, options)
    except ValueError as error:
        print(f"gapless san: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return end.code or (EXIT_FOUND if found else EXIT_UNWATCHED if unwatched or lost else 0)


def follow(options: str) -> int:
    """Run the program of sys.argv, a child that `subprocess` has started, with its parent's `options`, for the parent.

    Returns the exit code.
    """
    from .detectors import Detectors, choose_all

    given = json.loads(options)
    choose_all(given)
    is_module = sys.argv[1] == "-m"
    program, *args = sys.argv[2 if is_module else 1 :]
    before = set(threading.enumerate())
    if sys.flags.safe_path:
        sys.path.insert(0, "")  # the place of the program's folder
    try:
        with Detectors(given.pop("names"), **given):
            end = run_program(program, args, is_module)
            end = _join_threads(before) or end
    except NotThereError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return end.code


class NotThereError(ValueError):
    """There is no such module, or nothing in it that can be run."""


class End(NamedTuple):
    """How a program ended: its exit code, and the reason why it did not come to its end, or nothing."""

    code: int
    raised: str = ""


INTERRUPTED = End(EXIT_INTERRUPTED, "the program was interrupted")


def _emulates_cuda(options: argparse.Namespace) -> bool:
    """Return whether CUDA is to be emulated; prints it on stderr if it was not asked for."""
    if options.device and options.device_tensors != "auto":
        raise ValueError("--device-tensors is for a machine without an accelerator, and --device names one: give one")
    if options.device:
        return False
    if options.device_tensors != "auto":
        return bool(options.device_tensors == "cuda")
    place = names_cuda(options.program, options.args, options.module)
    if place is None:
        return False
    import torch

    if torch.accelerator.is_available():
        return False
    print(f"gapless san: no GPU here, and {place} names cuda: it is emulated on the CPU", file=sys.stderr)
    return True


def run_program(program: str, args: Sequence[str], module: bool) -> End:
    """Run it as `python program args` or `python -m program args` would; returns how it ended.

    Raises NotThereError where Python did not come to run any of it.
    """
    sys.argv = [program, *args]
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            # Python itself makes a script's path absolute, and a spawned child's lines are named so.
            runpy.run_path(os.path.abspath(program) if Path(program).is_file() else program, run_name="__main__")
    except SystemExit as stop:
        return End(_code(stop))
    except BaseException as error:
        own = _programs_own(error.__traceback__)
        if own is None and isinstance(error, ImportError):
            raise NotThereError(error) from error
        # A run that fails still has its report.
        traceback.print_exception(error.with_traceback(own or error.__traceback__))
        if refusal := _refusal(error):
            print(f"gapless san: {refusal}", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        return End(1, f"the program raised {type(error).__name__}, and the rest of it was not seen")
    return End(0)


def _refusal(error: BaseException) -> BaseException | None:
    """Return the missing part of the emulation if it ended the program and the error does not name it."""
    import torch

    from .refusals import refusal_of

    return None if torch.accelerator.is_available() else refusal_of(error, "what this line asks of CUDA")


def _programs_own(trace: TracebackType | None) -> TracebackType | None:
    """The trace from the program's first frame on; None where the program was never reached."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNING:
        trace = trace.tb_next
    return trace


def _code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _join_threads(before: set[threading.Thread]) -> End | None:
    """Wait for the threads that the program started: threads of `before` are not its own.

    Returns the program's end if that is interrupted: then the report comes at once, and Python itself waits on.
    """
    threads = set(threading.enumerate()) - before
    try:
        _end_executors(threads)
        for thread in threads:
            if not thread.daemon:
                thread.join()
    except KeyboardInterrupt:
        return INTERRUPTED
    return None


def _end_executors(threads: set[threading.Thread]) -> None:
    """Have executors that run on these threads finish their work and end, as they do at Python's end."""
    for name, table in (("process", "_threads_wakeups"), ("thread", "_threads_queues")):
        module = sys.modules.get(f"concurrent.futures.{name}")
        if module is not None and any(thread in getattr(module, table) for thread in threads):
            module._python_exit()


if __name__ == "__main__":
    sys.exit(main())
