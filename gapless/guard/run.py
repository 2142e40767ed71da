"""Runs a Python program under the detectors: `python -m gapless.guard.run [options] program.py args`.

`gapless san -- python program.py args` starts this. The report goes to stderr after the program has ended. The exit
code is the program's own where that is not 0, else 1 when something was found and 0 when nothing was.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .report import as_dict, as_text, check_json, write_json
from .suppress import apply, gather, tell_unused

EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_RUNNING = (__file__, runpy.__file__, "<frozen runpy>")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run. `gapless san` has the same; torch is not imported for its help."""
    parser.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--detect", default="", metavar="NAMES", help="detectors, with commas between (default: all)")
    parser.add_argument(
        "--device-tensors", choices=("marked", "cuda"), default="marked",
        help="without an accelerator: marked and device='cuda' tensors are device tensors; `cuda` also makes "
        "torch.cuda.is_available() say yes (default: marked)",
    )  # fmt: skip
    parser.add_argument("--regions", action="store_true", help="check only inside the program's own guard regions")
    form = "'PATH[:LINE] [RULE] -- REASON'"
    parser.add_argument("--suppress", action="append", default=[], metavar=form, help="excuse a site")
    parser.add_argument("--suppressions", metavar="FILE", help="a file of such lines (default: .gapless-san)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gapless.guard.run", allow_abbrev=False)
    add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module's name")
    parser.add_argument("program")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    from .detectors import DETECTORS, Detectors

    try:
        suppressions = gather(options.suppress, options.suppressions)
        names = options.detect.split(",") if options.detect else list(DETECTORS)
        detectors = Detectors(names, regions=options.regions, emulate_cuda=options.device_tensors == "cuda")
        check_json(options.json)
        _check_program(options.program, options.module)
    except ValueError as error:
        print(f"gapless san: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    before = set(threading.enumerate())
    try:
        with detectors:
            code = run_program(options.program, options.args, options.module)
            code = _join_threads(before) or code
    except NotThereError as error:
        print(f"gapless san: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    entries = apply(detectors.findings(), suppressions)
    sys.stdout.flush()
    tell_unused(suppressions)
    body, _, summary = as_text(entries).rpartition("\n")
    print(f"{body}\n" * bool(body) + f"gapless san: {summary}", file=sys.stderr)
    if options.json:
        write_json(options.json, {"program": [options.program, *options.args], "exit_code": code, **as_dict(entries)})
    return code or (EXIT_FOUND if any(entry.excuse is None for entry in entries) else 0)


class NotThereError(ValueError):
    """There is no such module, or nothing in it that can be run."""


def _check_program(program: str, module: bool) -> None:
    """Raise ValueError for a file that does not exist; a module is looked for when it is run."""
    if not module and not Path(program).exists():
        raise ValueError(f"{program} is not there")


def run_program(program: str, args: Sequence[str], module: bool) -> int:
    """Run it as `python program args` or `python -m program args` would; returns its exit code.

    Raises NotThereError where Python did not come to run any of it.
    """
    sys.argv = [program, *args]
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        return _code(stop)
    except BaseException as error:
        own = _programs_own(error.__traceback__)
        if own is None and isinstance(error, ImportError):
            raise NotThereError(error) from error
        # A run that fails still has its report.
        traceback.print_exception(error.with_traceback(own or error.__traceback__))
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


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


def _join_threads(before: set[threading.Thread]) -> int:
    """Wait for the threads that the program started: those of `before` are not its own.

    Returns its exit code if that is interrupted: then the report comes at once, and Python itself waits on.
    """
    try:
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
