"""One core a test: several run side by side, and small tensors gain nothing from more. Engines run under no_sync."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loops_under_guard import PLANTED, loops_under_no_race
from steps_under_guard import steps_under_no_sync

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--guard-steps", choices=("every", "kinds", "off"), default="every",
        help="which steps of the tests' engines run under no_sync; kinds: the first of each kind, and one in 16",
    )  # fmt: skip
    parser.addoption("--guard-races", action="store_true", help="the tests' engines run under no_race (slower)")


@pytest.fixture(autouse=True, scope="session")
def guarded_steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """No step of any engine of any test waits for the device."""
    which = request.config.getoption("--guard-steps")
    if which == "off":
        yield
        return
    with steps_under_no_sync(which, tests_look=True):
        yield


@pytest.fixture(autouse=True)
def guarded_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --guard-races: no buffer of any engine of this process is touched by two without an order."""
    planted = any(part in request.node.nodeid for part in PLANTED)
    if planted or not request.config.getoption("--guard-races"):
        yield
        return
    with loops_under_no_race():
        yield
