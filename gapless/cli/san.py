"""`gapless san`: the sanitizer's command, with the devices of this package connected to it."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.cli.errors import UsageError
from gapless.cli.flags import Command
from gapless.guard import command as sanitizer


def main(argv: Sequence[str]) -> int:
    command = Command("san", sanitizer.ABOUT, words=sanitizer.USAGE_WORDS, epilog=sanitizer.epilog("gapless san"))
    sanitizer.add_all(command)
    at = argv.index("--") if "--" in argv else len(argv)
    flags = sanitizer.in_order(command, [command.dashed(word) for word in argv[:at]])
    options = command.read(flags).options
    try:
        return sanitizer.lint_or_run(options, [*flags, *argv[at:]], "gapless.cli.san_run")
    except ValueError as error:
        raise UsageError(str(error)) from error
