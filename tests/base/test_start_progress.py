"""What a start says: how often, in which words, and what a terminal shows of it."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest

from gapless.base import progress
from gapless.base.progress import Phase, TerminalHandler, announce, starting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def shown(monkeypatch):
    phases: list[Phase] = []
    monkeypatch.setattr(progress, "show", phases.append)
    return phases


@pytest.fixture
def screen():
    yield Terminal()
    assert progress.log.level == logging.NOTSET and not progress.log.handlers


@pytest.mark.parametrize(
    "phase, text",
    [
        (Phase("loading torch"), "loading torch"),
        (Phase("capturing graphs", 0, 40), "capturing graphs (40)"),
        (Phase("capturing graphs", 7, 40), "capturing graphs: 7 of 40"),
        (Phase("reading weights", 0, 1_190_000_000, "bytes"), "reading weights (1.19 GB)"),
        (Phase("reading", 6 * 10**8, 1_190_000_000, "bytes", 0.5), "reading: 600 MB of 1.19 GB, 1.20 GB/s"),
        (Phase("compiling", 0, 14, "files", 0.0), "compiling: 0 of 14 files, 0 s"),
        (Phase("compiling", 3, 14, "files", 7.6), "compiling: 3 of 14 files, 8 s"),
        (Phase("reading weights", 9, 9, "bytes", 0.0), "reading weights: 0 kB of 0 kB, 9 kB/s"),
    ],
)  # fmt: skip
def test_a_phase_is_printed_in_words(phase, text):
    assert str(phase) == text


def test_a_count_is_told_ten_times_a_second_and_is_worth_a_line_every_ten(clock, shown):
    count = announce("reading", 25_000, "bytes")
    for _ in range(25_000):
        clock[0] += 0.001
        count(1)
    assert shown[0] == Phase("reading", 0, 25_000, "bytes")
    assert 220 <= len(shown) <= 251
    lines = [phase for phase in shown if phase.line]
    assert [round(phase.seconds) for phase in lines] == [0, 10, 20]
    assert [phase.done for phase in lines] == [pytest.approx(1000 * phase.seconds, abs=2) for phase in lines]


def test_a_program_that_sets_up_no_logging_sees_nothing(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    announce("reading", 10)(1)
    assert capfd.readouterr() == ("", "")


def test_a_program_with_logging_has_lines_and_no_rewrites(caplog, clock):
    caplog.set_level(logging.DEBUG)
    count = announce("reading", 10)
    for seconds in (1.0, 1.0, 9.0):
        clock[0] += seconds
        count(2)
    assert caplog.messages == ["reading (10)", "reading: 6 of 10"]
    assert {(record.name, record.levelname) for record in caplog.records} == {("gapless.start", "INFO")}


def test_a_terminal_has_one_line_that_is_rewritten(screen, clock):
    with redirect_stderr(screen), starting():
        count = announce("reading", 3)
        clock[0] += 1.0
        count(1)
        announce("x" * 200)
        progress.log.info("ready")
    lines = ["gapless: reading (3)", "gapless: reading: 1 of 3", f"gapless: {'x' * 70}"]
    assert screen.getvalue() == "".join(f"\r\x1b[K{line}\r" for line in lines) + "\r\x1b[Kgapless: ready\n"


def test_a_start_that_fails_leaves_an_empty_line(screen):
    with pytest.raises(ValueError), redirect_stderr(screen), starting():
        announce("reading")
        raise ValueError
    assert screen.getvalue() == "\r\x1b[Kgapless: reading\r\r\x1b[K"


def test_a_stream_that_is_no_terminal_has_lines(capsys, clock):
    with starting():
        count = announce("reading", 3)
        clock[0] += 1.0
        count(1)
        progress.log.info("ready")
    assert capsys.readouterr() == ("", "gapless: reading (3)\ngapless: ready\n")


def test_progress_that_is_not_wanted_is_not_printed(capsys):
    with starting(wanted=False):
        announce("reading")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_that_has_gone_stops_nobody():
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    handler = TerminalHandler(Gone())
    record = logging.LogRecord("gapless.start", logging.INFO, "f", 1, "x", (), None)
    record.phase = Phase("x")
    handler.emit(record)
    handler.close()
