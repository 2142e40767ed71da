"""`gapless trace`: record a running server's steps, convert recordings, summarise them in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gapless.cli.errors import USAGE, UsageError
from gapless.cli.flags import Command

MAX_SECONDS = 60


def _record(argv: Sequence[str]) -> int:
    command = Command("trace record", "Record the steps of a running server.", words="URL [flags]")
    command.add_argument("URL", help="the server, like http://localhost:8000")
    command.add_argument("--seconds", type=int, default=5, help=f"how long, 1 to {MAX_SECONDS} (default: 5)")
    command.add_argument(
        "-o", "--output", default="trace.json.gz", metavar="FILE",
        help="Chrome trace JSON, or raw records when it ends in .jsonl; .gz packs it (default: trace.json.gz)",
    )  # fmt: skip
    command.add_argument("--api-key", help="key of the server; default: $GAPLESS_API_KEY")
    options = command.read(argv, os.environ).options
    if not 1 <= options.seconds <= MAX_SECONDS:
        raise UsageError(f"--seconds must be from 1 to {MAX_SECONDS}, got {options.seconds}")
    path = Path(options.output)
    from gapless.cli.remote import fetch
    from gapless.lab import trace, trace_summary

    trace.write_bytes(path, b"")  # a wrong path must not cost the time
    print(f"gapless: recording for {options.seconds} s", file=sys.stderr)
    key = options.api_key or os.environ.get("GAPLESS_API_KEY")
    data = fetch(options.URL, f"/debug/trace?seconds={options.seconds}&ahead=1", key)
    recording = trace.read_chrome(data, options.URL)
    if trace.is_raw(path):
        trace.write(path, recording)
    else:
        trace.write_bytes(path, data)
    print(trace_summary.text_of(trace_summary.summarise(recording)))
    print(f"gapless: wrote {path}; open it in a trace viewer, or: gapless trace summary {path}", file=sys.stderr)
    return 0


def _convert(argv: Sequence[str]) -> int:
    command = Command(
        "trace convert",
        "Convert a recording: raw records (.jsonl) to Chrome trace JSON (any other name) or back; .gz packs either.",
        words="FROM TO",
    )
    command.add_argument("FROM", type=Path)
    command.add_argument("TO", type=Path)
    options = command.read(argv, {}).options
    from gapless.lab import trace

    trace.write(options.TO, trace.read(options.FROM))
    return 0


def _summary(argv: Sequence[str]) -> int:
    command = Command("trace summary", "Where the time of a recording went.", words="FILE [flags]")
    command.add_argument("FILE", type=Path)
    command.add_argument("--worst", type=int, default=5, help="how many of the longest bubbles to list (default: 5)")
    options = command.read(argv, {}).options
    if not 0 <= options.worst <= 1000:
        raise UsageError(f"--worst must be from 0 to 1000, got {options.worst}")
    from gapless.lab import trace, trace_summary

    print(trace_summary.text_of(trace_summary.summarise(trace.read(options.FILE), options.worst)))
    return 0


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "record": (_record, "record the steps of a running server"),
    "convert": (_convert, "raw records to Chrome trace JSON, or back"),
    "summary": (_summary, "where the time of a recording went"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:<10}{text}" for name, (_, text) in KINDS.items())
    return (
        f"usage: gapless trace KIND [...]\n\nSteps of an engine, as a timeline.\n\n{rows}\n\n"
        "  gapless trace KIND --help    the flags of a kind\n\n"
        "gapless run --trace FILE records in this process."
    )


def main(argv: Sequence[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if not name:
        print(usage(), file=sys.stderr)
        return USAGE
    if name not in KINDS:
        raise UsageError(f"gapless trace knows {', '.join(KINDS)}; got {name!r}")
    return KINDS[name][0](argv[1:])
