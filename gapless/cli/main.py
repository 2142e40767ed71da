"""The `gapless` command: finds the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import gapless
from gapless.base.errors import GaplessError, exit_code
from gapless.base.install import INSTALL
from gapless.cli.errors import FAILED, INTERRUPTED_CODE
from gapless.cli.kinds import Table, dispatch, rows

COMMANDS: Table = {
    "serve": ("an OpenAI-compatible server", "serve"),
    "run": ("answer one prompt, or a file of prompts", "run"),
    "chat": ("talk to a model, here or on a server", "chat:main_chat"),
    "complete": ("continue a text, here or on a server", "chat:main_complete"),
    "bench": ("measure a server, an engine, a start", "bench"),
    "ab": ("compare two servers, or two flag sets of one, with statistics", "ab"),
    "eval": ("how many questions a model answers right", "eval"),
    "quantize": ("round a checkpoint's weights to 8 or 4 bits", "quantize"),
    "top": ("what a running server does, live", "top"),
    "trace": ("record and read the timeline of an engine", "trace"),
    "kv": ("what a disk tier of KV pages holds", "kv"),
    "san": ("find hidden syncs and races in any PyTorch program", "san"),
    "doctor": ("look at this machine and say what is missing", "doctor"),
}


def usage() -> str:
    return f"""usage: gapless COMMAND [...]

LLM inference and serving in which the host never makes the device wait, nor the device the host.

{rows(COMMANDS)}

  gapless COMMAND --help    the flags of a command
  gapless --version

Without a model, commands use the small one that comes with gapless."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 a wrong command line, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in ("--version", "-V", "version"):
            code = 0
            print(f"gapless {gapless.__version__}")
        else:
            code = dispatch(words, "", usage(), COMMANDS)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except BrokenPipeError:
        # The reader went away (`gapless run ... | head`). Python must not complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except GaplessError as error:
        return _fail(str(error), exit_code(error))
    except ModuleNotFoundError as error:
        if (error.name or "gapless").split(".")[0] == "gapless":
            raise
        return _fail(f"this command needs {error.name}, which is not installed; {INSTALL}", FAILED)


def _fail(message: str, code: int) -> int:
    print(f"gapless: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
