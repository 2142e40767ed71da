"""Processor time of the browser while it shows the live page: `python tests/ui/page_cost.py` (Linux)."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.sync_api import Page
from served import Server
from ui_browser import browser
from ui_load import Load

KEY = "sk-cost"
SECONDS = 5
TICKS = os.sysconf("SC_CLK_TCK")
HIDE = """() => {
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def browser_seconds() -> float:
    """Processor time so far of every Chromium process: have no other one open."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if b"playwright_chromiumdev_profile" in command or b"--type=" in command:
                numbers = (path / "stat").read_text().rpartition(")")[2].split()
                total += (int(numbers[11]) + int(numbers[12])) / TICKS
        except OSError:  # it has ended
            continue
    return total


def report(page: Page, name: str) -> None:
    before, frames, began = browser_seconds(), page.evaluate("gapless.counters.frames"), time.monotonic()
    page.wait_for_timeout(SECONDS * 1000)
    seconds = time.monotonic() - began
    share = (browser_seconds() - before) / seconds
    pictures = (page.evaluate("gapless.counters.frames") - frames) / seconds
    print(f"{name:8} {share:6.1%} of a core, {pictures:.1f} pictures/s", flush=True)


def main() -> None:
    server = Server("--api-key", KEY)
    try:
        with Load(server.base, KEY), browser() as running:
            page = running.new_page(viewport={"width": 1240, "height": 980})
            page.add_init_script(f"sessionStorage.setItem('gapless-api-key', '{KEY}')")
            page.goto(f"{server.base}/ui")
            page.wait_for_timeout(3000)
            report(page, "live")
            page.get_by_role("button", name="Pause").click()
            report(page, "paused")
            page.evaluate(HIDE)
            report(page, "hidden")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
