"""`gapless trace`: record a running server's steps, convert recordings, summarise them in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gapless.cli.flags import Command, number
from gapless.cli.kinds import Table, dispatch, usage
from gapless.cli.output import check_writable, say
from gapless.lab.target import Target

MAX_SECONDS = 60
TRACE_TIMEOUT = 600.0


def record(argv: Sequence[str]) -> int:
    command = Command("trace record", "Record the steps of a running gapless server.", words="[URL]")
    command.add_server()
    command.add_argument(
        "--seconds", type=number(1, MAX_SECONDS, int), default=5, metavar="N",
        help=f"how long, 1 to {MAX_SECONDS} (default: 5)",
    )  # fmt: skip
    command.add_argument(
        "-o", "--output", default="trace.json.gz", metavar="FILE",
        help="Chrome trace JSON, or raw records when it ends in .jsonl; .gz packs it (default: trace.json.gz)",
    )  # fmt: skip
    command.add_api_key()
    command.add_insecure()
    settings = command.read(argv)
    options = settings.options
    path = Path(options.output)
    check_writable(path, "--output")
    from gapless.lab import probe, trace

    say(f"gapless: recording for {options.seconds} s")
    target = Target(options.URL, api_key=settings.api_key, insecure=options.insecure, timeout=TRACE_TIMEOUT)
    data = probe.fetch(target, f"/debug/trace?seconds={options.seconds}&ahead=1")
    recording = trace.read_chrome(data, options.URL)
    trace.write(path, recording)
    print(trace.TraceSummary(recording))
    say(f"gapless: wrote {path}; open it in a trace viewer, or: gapless trace summary {path}")
    return 0


def convert(argv: Sequence[str]) -> int:
    command = Command(
        "trace convert",
        "Convert a recording: raw records (.jsonl) to Chrome trace JSON (any other name) or back; .gz packs either.",
        words="FROM TO",
    )
    command.add_argument("FROM", type=Path)
    command.add_argument("TO", type=Path)
    options = command.read(argv).options
    from gapless.lab import trace

    trace.write(options.TO, trace.read(options.FROM))
    return 0


def summary(argv: Sequence[str]) -> int:
    command = Command("trace summary", "Where the time of a recording went.", words="FILE")
    command.add_argument("FILE", type=Path)
    command.add_argument(
        "--worst", type=number(0, 1000, int), default=5, metavar="N",
        help="how many of the longest bubbles to list (default: 5)",
    )  # fmt: skip
    options = command.read(argv).options
    from gapless.lab import trace

    print(trace.TraceSummary(trace.read(options.FILE), options.worst))
    return 0


TRACE_KINDS: Table = {
    "record": ("record the steps of a running server", "trace:record"),
    "convert": ("raw records to Chrome trace JSON, or back", "trace:convert"),
    "summary": ("where the time of a recording went", "trace:summary"),
}


def main(argv: Sequence[str]) -> int:
    more = "gapless run --trace FILE records in this process."
    return dispatch(argv, "trace", usage("trace", "Steps of an engine, as a timeline.", TRACE_KINDS, more), TRACE_KINDS)
