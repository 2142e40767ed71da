"""`gapless san`: run any Python program under the detectors, or look for the same shapes in source files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gapless.cli.errors import UsageError
from gapless.cli.flags import Command
from gapless.guard import lint
from gapless.guard.run import add_options

EPILOG = """examples:
  gapless san -- python program.py args     run it, report at the end
  gapless san -- python -m package.module
  gapless san --lint src tests/harness.py   read source files, run nothing

The exit code is the program's own if that is not 0, else 1 when something was found, 3 when there was nothing to
watch, and 0 when what was watched is clean; 2 when there is no such program.
A finding is excused by a comment in its line, `# san: ok(reason)`, by --suppress, or by a line of .gapless-san."""


def main(argv: Sequence[str]) -> int:
    command = Command(
        "san",
        "Find hidden host-device syncs and races in any PyTorch program.",
        words="[flags] -- python PROGRAM [args] | --lint PATH...",
        epilog=EPILOG,
    )
    command.add_argument("--lint", nargs="+", metavar="PATH", help="look at source files instead of running a program")
    add_options(command)
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = command.read(words[:at]).options
    if options.lint:
        if words[at + 1 :]:
            raise UsageError("--lint reads files and a program is run: do one of them at a time")
        try:
            return lint.main(options)
        except ValueError as error:
            raise UsageError(str(error)) from error
    return _run([command.dashed(word) for word in words[:at]], words[at + 1 :])


def _run(flags: Sequence[str], command: Sequence[str]) -> int:
    python, program = _split(command)
    sys.stdout.flush()
    try:
        # In this one's place: signals reach the program alone, and its end is this command's end.
        os.execv(python[0], [*python, "-m", "gapless.cli.san_run", *flags, *program])
    except OSError as error:
        raise UsageError(f"{python[0]} cannot be started: {error.strerror}") from error


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its own flags, and the program with its arguments."""
    if not command:
        raise UsageError("say what to run, after two dashes: gapless san -- python program.py")
    words = list(command)
    if words[0].endswith(".py"):
        return [sys.executable], words
    if not os.path.basename(words[0]).startswith("python"):
        raise UsageError(f"san runs Python programs, got {words[0]!r}: gapless san -- python program.py")
    # A bare name means the interpreter that gapless is installed for.
    first = words.pop(0)
    python = [first if os.sep in first else sys.executable]
    while words and words[0].startswith("-") and words[0] != "-m":
        python.append(words.pop(0))
        if python[-1] in ("-X", "-W") and words:
            python.append(words.pop(0))
    if not words or words == ["-m"] or "-c" in python:
        raise UsageError("san needs a program or -m MODULE after python; -c and standard input are not run")
    return python, words
