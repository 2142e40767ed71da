"""The `gapless` command: finds the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import gapless
from gapless.base.errors import GaplessError
from gapless.cli.errors import FAILED, INTERRUPTED, USAGE, UsageError, exit_code

INSTALL = "in a checkout of gapless: pip install '.[engine]', or make setup"
Main = Callable[[Sequence[str]], int]


def _serve(argv: Sequence[str]) -> int:
    from gapless.cli import serve

    return serve.main(argv)


def _run(argv: Sequence[str]) -> int:
    from gapless.cli import run

    return run.main(argv)


def _chat(argv: Sequence[str]) -> int:
    from gapless.cli import chat

    return chat.main_chat(argv)


def _complete(argv: Sequence[str]) -> int:
    from gapless.cli import chat

    return chat.main_complete(argv)


def _ab(argv: Sequence[str]) -> int:
    from gapless.cli import ab

    return ab.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from gapless.cli import doctor

    return doctor.main(argv)


def _top(argv: Sequence[str]) -> int:
    from gapless.cli import top

    return top.main(argv)


def _trace(argv: Sequence[str]) -> int:
    from gapless.cli import trace

    return trace.main(argv)


def _san(argv: Sequence[str]) -> int:
    from gapless.cli import san

    return san.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from gapless.cli import bench

    return bench.main(argv)


def _eval(argv: Sequence[str]) -> int:
    from gapless.cli import eval as evaluation

    return evaluation.main(argv)


COMMANDS: dict[str, tuple[Main, str]] = {
    "serve": (_serve, "an OpenAI-compatible server"),
    "run": (_run, "answer one prompt, or a file of prompts"),
    "chat": (_chat, "talk to a model, here or on a server"),
    "complete": (_complete, "continue a text, here or on a server"),
    "bench": (_bench, "measure a server, an engine, a start"),
    "ab": (_ab, "compare two servers, or two flag sets of one, with statistics"),
    "eval": (_eval, "how many questions a model answers right"),
    "top": (_top, "what a running server does, live"),
    "trace": (_trace, "record and read the timeline of an engine"),
    "san": (_san, "find hidden syncs and races in any PyTorch program"),
    "doctor": (_doctor, "look at this machine and say what is missing"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: gapless COMMAND [...]

LLM inference and serving in which the host never makes the device wait, nor the device the host.

{rows}

  gapless COMMAND --help    the flags of a command
  gapless --version

Without a model, commands use the small one that comes with gapless."""


def _dispatch(argv: Sequence[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("--version", "-V", "version"):
        print(f"gapless {gapless.__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if not name:
        print(usage(), file=sys.stderr)
        return USAGE
    if name not in COMMANDS:
        raise UsageError(_unknown_command(name))
    return COMMANDS[name][0](argv[1:])


def _unknown_command(name: str) -> str:
    from gapless.cli.flags import nearest

    near = nearest(name, COMMANDS)
    return f"unknown command {name!r}" + (f"; did you mean {near}?" if near else "; see gapless --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 a wrong command line, 130 interrupted."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
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
