"""Progress: a bar on a terminal, lines elsewhere, nothing when it is off."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from gapless.engine import progress as module
from gapless.engine.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_progress_without_a_terminal_prints_lines_now_and_then(clock):
    out = io.StringIO()
    with progress("requests", 100, stream=out) as advance:
        for done in range(1, 101):
            clock[0] += 1.0
            advance(done)
    lines = out.getvalue().splitlines()
    assert lines[0] == "requests: 11 of 100" and 8 <= len(lines) <= 10


def test_a_bar_is_shown_on_a_terminal(clock):
    out = Terminal()
    with progress("requests", 4, stream=out) as advance:
        for done in range(1, 5):
            clock[0] += 1.0
            advance(done)
    assert "requests" in out.getvalue() and "4/4" in out.getvalue()


@pytest.mark.parametrize("total, wanted", [(5, False), (0, True)])
def test_progress_that_is_not_wanted_prints_nothing(total, wanted):
    out = io.StringIO()
    with progress("x", total, wanted, out) as advance:
        advance(1)
    assert out.getvalue() == ""


def test_progress_without_rich_is_lines(clock, monkeypatch):
    monkeypatch.setitem(module.sys.modules, "rich", None)
    out = Terminal()
    with progress("x", 50, stream=out) as advance:
        clock[0] += 11.0
        advance(7)
    assert out.getvalue() == "x: 7 of 50\n"
