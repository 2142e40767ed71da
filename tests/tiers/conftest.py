"""What the tests of several tiers need."""

from __future__ import annotations

import pytest


@pytest.fixture
def opened():
    """Makes tiers and wrong peers, and closes them, the last one first."""
    every = []

    def add(one):
        every.append(one)
        return one

    yield add
    for one in reversed(every):
        one.close()


@pytest.fixture
def path(tmp_path):
    """Return the path of the socket on which a peer listens."""
    return tmp_path / "p.sock"
