"""Takers in processes of their own, stopped and killed while they read: nothing of the giver's stays theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import peer_process
import pytest
from peer_process import PAGES
from peer_rig import giver_of
from tier_rig import SLOT, content, key, setup_of
from waiting import until

from gapless.offload.tiers.peer import PeerTier

pytestmark = pytest.mark.process


class Taker:
    """The process, and the lines that it has printed."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, peer_process.__file__, str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def put(giver: PeerTier, numbers: range) -> None:
    for number in numbers:
        assert all(giver.shelf.put([giver.slots.page(key(number), content(number), number)]))


@pytest.fixture
def giver(tmp_path, monkeypatch):
    """A giver on whose shelf there is room for the pages that takers ask for, and no more."""
    monkeypatch.setattr("gapless.offload.tiers.giving.LEASE_SECONDS", 0.4)
    one = giver_of(setup_of("", pages=PAGES), tmp_path / "p.sock")
    put(one, range(PAGES))
    yield one
    one.close()
    one.shelf.check()


@pytest.fixture
def begin(tmp_path):
    """Starts a taker, which ends with the test."""
    every = []

    def start() -> Taker:
        every.append(Taker(tmp_path / "p.sock"))
        return every[-1]

    yield start
    for one in every:
        one.kill()


def test_a_reader_that_is_stopped_keeps_no_place_and_counts_no_page_that_has_changed(giver, begin):
    taker, shelf, stopped = begin(), giver.shelf, 0
    for turn in range(100, 140):
        loads = len(taker.lines)
        until(lambda loads=loads: any(line.startswith("right 4") for line in taker.lines[loads:]) and shelf.lent)
        taker.process.send_signal(signal.SIGSTOP)
        until(lambda: taker.state == "T")
        until(lambda: not shelf.lent)
        time.sleep(0.02)  # a connection that ends is forgotten by then; if not, another turn is taken
        ran_out = not giver.server.connections  # otherwise it had said that it was done
        put(giver, range(turn * PAGES, turn * PAGES + PAGES))  # they take all places
        assert shelf.used == PAGES * SLOT
        loads = len(taker.lines)
        taker.process.send_signal(signal.SIGCONT)
        if ran_out:
            until(lambda loads=loads: taker.lines[loads:])
            assert taker.lines[loads] == "right 0 failed\n"
        shelf.drop([key(number) for number in range(turn * PAGES, turn * PAGES + PAGES)])
        put(giver, range(PAGES))
        stopped += ran_out
        if stopped == 2:
            break
    taker.kill()
    assert stopped == 2, "it was meant to be stopped while it reads"
    assert not any("wrong" in line for line in taker.lines)


def test_readers_that_are_killed_again_and_again_leave_places_connections_and_memory_as_they_were(giver, begin):
    shelf, sizes = giver.shelf, []
    for _ in range(3):
        taker = begin()
        until(lambda taker=taker: len(taker.lines) > 3 and shelf.lent)
        taker.kill()
        until(lambda: not (shelf.lent or giver.server.connections))
        shelf.check()
        assert not any("wrong" in line for line in taker.lines)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert sizes[-1] - sizes[0] < 1 << 20, f"memory grows: {sizes}"
