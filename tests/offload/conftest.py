"""What the tests of several tiers need."""

from __future__ import annotations

import pytest
from peer_rig import giver_of, taker_of
from tier_rig import setup_of


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


@pytest.fixture
def setup():
    """The slots of an engine, and the names of its pages."""
    return setup_of("")


@pytest.fixture
def giver(opened, path, setup):
    return opened(giver_of(setup, path))


@pytest.fixture
def taker(opened, path, setup):
    return opened(taker_of(setup, path))
