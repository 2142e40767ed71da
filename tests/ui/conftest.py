"""A browser and a server for the pages of one file: Playwright holds an event loop, of which other tests want none."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from served import Server
from ui_browser import KEY, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(chromium: Browser) -> Iterator[Server]:
    server = Server("--max-num-seqs", "8", "--api-key", KEY, "--kv-tier", "host:64MiB")
    yield server
    assert server.stop() == 0, "".join(server.lines)
