"""`gapless top`: shows live in the terminal what a server does, from its /metrics."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gapless.base.errors import ServerError
from gapless.cli.flags import Command, number
from gapless.lab.probe import fetch
from gapless.lab.target import Target
from gapless.lab.top import LABEL, Page, TopRow, TopView, block, fitted, known, line, rows

if TYPE_CHECKING:
    from rich.table import Table

METRICS_SECONDS = 5.0
"""How long a server may take to send its page."""
COLOURS = {
    "good": "green",
    "bad": "red",
    "host_late": "red",
    "depth": "yellow",
    "copy_wait": "magenta",
    "launch": "cyan",
    "grammar": "blue",
    "graph_miss": "bright_red",
    "capture": "bright_magenta",
    "ranks": "bright_yellow",
}


def main(argv: Sequence[str]) -> int:
    command = Command(
        "top",
        "What a running server does: gapless, vLLM, or whatever else has vLLM's /metrics. Ctrl-C ends it.",
        words="[URL]",
        epilog="Where the output is no terminal, one line is written per interval.",
    )
    command.add_server()
    seconds, help = number(0.1, 3600, float), "between two looks (default: 2)"
    command.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help=help)
    command.add_argument("--once", action="store_true", help="look at one interval, write it as text, and end")
    command.add_api_key()
    command.add_insecure()
    settings = command.read(argv)
    options = settings.options
    server = Server(options.URL, settings.api_key, options.insecure)
    server.look()  # a wrong address is an error; later, a server that is down is waited for
    with suppress(KeyboardInterrupt):
        if options.once:
            time.sleep(options.interval)
            print(block(server.look(), server.heading(options.interval), shutil.get_terminal_size().columns))
        elif sys.stdout.isatty():
            _live(server, options.interval)
        else:
            print_lines(server, options.interval)
    return 0


class Server:
    """Polls the /metrics of one server."""

    def __init__(self, url: str, api_key: str, insecure: bool = False) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics")
        self._target = Target(self.url, api_key=api_key, insecure=insecure, timeout=METRICS_SECONDS)
        self._page: Page | None = None
        self._at = 0.0
        self.models: tuple[str, ...] = ()

    def look(self) -> TopView:
        """Return what happened since the last look. Raises ServerError."""
        try:
            page = Page(fetch(self._target, "/metrics").decode("utf-8", "replace"))
        except ValueError as error:
            raise ServerError(f"{self.url}/metrics is not in Prometheus' text format: {error}") from error
        if not known(page):
            raise ServerError(f"{self.url}/metrics has none of vLLM's series")
        now = time.monotonic()
        seen = TopView(self._page or page, page, max(now - self._at, 1e-3))
        self._page, self._at, self.models = page, now, seen.models
        return seen

    def heading(self, interval: float) -> list[str]:
        return [self.url, ", ".join(self.models), f"the last {interval:g} s", time.strftime("%H:%M:%S")]


def print_lines(server: Server, interval: float) -> None:
    trouble = ""
    for seen in looks(server, interval):
        clock, before = time.strftime("%H:%M:%S"), trouble
        trouble = str(seen) if isinstance(seen, ServerError) else ""
        if isinstance(seen, TopView):
            print(line(seen, clock), flush=True)
        elif trouble != before:  # the same error is written once
            print(f"{clock} | {trouble}", flush=True)


def looks(server: Server, interval: float) -> Iterator[TopView | ServerError]:
    """Look once per interval; a server that does not answer gives an error and is asked again."""
    while True:
        time.sleep(interval)
        try:
            yield server.look()
        except ServerError as error:
            yield error


def _live(server: Server, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(screen(["looking ..."], [], ""), console=console, screen=True, auto_refresh=False) as live:
        shown: list[TopRow] = []
        for seen in looks(server, interval):
            if isinstance(seen, TopView):
                shown = rows(seen, console.width)
            heading = fitted(server.heading(interval), console.width)
            trouble = str(seen) if isinstance(seen, ServerError) else ""
            live.update(screen(heading, visible(shown, console.height - len(heading) - 1), trouble), refresh=True)


def visible(shown: Sequence[TopRow], lines: int) -> Sequence[TopRow]:
    """Return the rows that there is room for, and how many there are below."""
    if len(shown) <= lines:
        return shown
    return [*shown[: lines - 1], TopRow("", "", f"{len(shown) - lines + 1} more lines: make the window higher")]


def screen(heading: Sequence[str], shown: Sequence[TopRow], trouble: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid()
    table.add_column(style="bold", no_wrap=True, width=LABEL)
    table.add_column(no_wrap=True)
    for row in shown:
        colour = COLOURS.get(row.kind, "")
        text = Text.assemble((row.bar, colour or "blue"), "  ", row.text) if row.bar else Text(row.text, colour)
        table.add_row(row.label, text)
    whole = Table.grid()
    for part in heading:
        whole.add_row(Text(part, style="reverse"))
    whole.add_row(Text(trouble, style="red"))
    whole.add_row(table)
    return whole
