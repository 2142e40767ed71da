"""The sanitizer's command: run any Python program under the detectors, or look for the same shapes in source files.

`gapless-san` is this command in the distribution of that name; `gapless san` has the same options and does the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from . import lint
from .child_commands import with_python
from .run import EXIT_USAGE, add_options

ABOUT = "Find hidden host-device syncs and races in any PyTorch program."
USAGE_WORDS = "[flags] -- python PROGRAM [args] | --lint PATH..."


def epilog(name: str) -> str:
    """Return the end of the help text of the command `name`."""
    return f"""examples:
  {name} -- python program.py args     run it, report at the end
  {name} -- python -m package.module
  {name} --lint src tests/harness.py   read source files, run nothing

The exit code is the program's own if that is not 0, else 1 when something was found, 3 when there was nothing to
watch or a child's report was lost, and 0 when what was watched is clean; 2 when there is no such program, or a report
cannot be written; 143 when it was terminated.
A finding is excused by a comment in its line, `# san: ok(reason)`, by --suppress, or by a line of .gapless-san."""


def add_all(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--lint", nargs="+", metavar="PATH", help="look at source files instead of running a program")
    add_options(parser)


def in_order(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words with `--lint` and its paths last: the paths may be anywhere among the other flags."""
    flags: list[str] = []
    paths: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--lint":
            continue
        if word.startswith("-"):
            flags.append(word)
            action = parser._option_string_actions.get(word)
            if action is not None and action.nargs != 0:
                flags.extend([value for value in [next(left, None)] if value is not None])
        else:
            paths.append(word)
    return [*flags, "--lint", *paths] if "--lint" in words else list(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gapless-san`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="gapless-san", usage=f"gapless-san {USAGE_WORDS}", description=ABOUT, epilog=epilog("gapless-san"),
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_all(parser)
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(in_order(parser, words[:at]))
    try:
        return lint_or_run(options, words, f"{__package__}.run")
    except ValueError as error:
        print(f"gapless-san: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def lint_or_run(options: argparse.Namespace, words: Sequence[str], runner: str) -> int:
    """Do what the words ask for. Does not return from a run, which is the module `runner` in this process's place.

    `words` are the flags, which gave `options`, and after `--` a program. Raises ValueError.
    """
    at = words.index("--") if "--" in words else len(words)
    flags, program = words[:at], words[at + 1 :]
    if options.lint:
        if program:
            raise ValueError("--lint reads files and a program is run: do one of them at a time")
        return lint.main(options)
    python, program = _split(program)
    sys.stdout.flush()
    try:
        # In this one's place: signals reach the program alone, and its end is this command's end.
        os.execv(python[0], [*python, "-m", runner, *flags, *program])
    except OSError as error:
        raise ValueError(f"{python[0]} cannot be started: {error.strerror}") from error


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its own flags, and the program with its arguments."""
    if not command:
        raise ValueError("say what to run, after two dashes: -- python program.py")
    words = with_python(list(command))  # a console script, such as torchrun
    if words[0].endswith(".py"):
        return [sys.executable], words
    if not os.path.basename(words[0]).startswith("python"):
        if shutil.which(words[0]) is None and not os.path.exists(words[0]):
            raise ValueError(f"{words[0]} is not found: give a program's path, or a command that is on PATH")
        raise ValueError(f"san runs Python programs, got {words[0]!r}: -- python program.py")
    # A bare name means the interpreter that this is installed for.
    first = words.pop(0)
    python = [first if os.sep in first else sys.executable]
    while words and words[0].startswith("-") and words[0] != "-m":
        python.append(words.pop(0))
        if python[-1] in ("-X", "-W") and words:
            python.append(words.pop(0))
    if not words or words == ["-m"] or "-c" in python:
        raise ValueError("san needs a program or -m MODULE after python; -c and standard input are not run")
    return python, words


if __name__ == "__main__":
    sys.exit(main())
