"""Debian's Chromium, driven by Playwright. Nothing is downloaded; without a browser the tests are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEY = "sk-of-the-page-tests"
PATIENCE_MS = 40_000
"""Of every wait: only a failure or a very busy machine takes so long."""


@contextmanager
def browser() -> Iterator[Browser]:
    """One headless browser. Skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH (on Debian: apt-get install chromium)")
    # Chromium's sandbox refuses to run as root; the only pages seen are our own.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield running
        finally:
            running.close()


class Watch:
    """Everything about a page that must not happen: errors, broken content policy, requests to other hosts."""

    def __init__(self, page: Page, base: str) -> None:
        self.problems: list[str] = []
        self._base = base
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda line: self._console(line.type, line.text))
        page.on("request", lambda request: self._request(request.url))

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def _request(self, url: str) -> None:
        if not url.startswith((self._base, f"blob:{self._base}")):
            self.problems.append(f"request to {url}")

    def none(self) -> None:
        """Fails when something happened since the last call."""
        found, self.problems = self.problems, []
        assert found == []
