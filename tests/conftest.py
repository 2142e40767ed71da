"""One core a test: several run side by side, and small tensors gain nothing from more. Engines run under no_sync."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from loops_under_guard import (
    PLANTED,
    covering,
    is_raced_again,
    is_raced_once,
    is_raced_too,
    loops_under_no_race,
    shares_engines,
)
from skip_reasons import reasons_of
from steps_under_guard import StepGuard, filed, steps_under_no_sync

from gapless.engine import checkers

SINGLE = ("loop", "mutation", "regressions", "simulation")
"""Folders whose tests share nothing: workers take them one by one, and none is left with a long file at the end."""
BROKEN = ("mutation", "regressions", "test_oracle_bites.py", "test_race_engine.py")
"""Folders and files that run engines over and over, most with a part taken away. What engines ask of a device is looked
at elsewhere, and in the regressions' own file about that."""
TOGETHER = {
    "transformers": (
        "test_lm_eval.py", "test_draft_models.py", "test_engine_logprobs.py", "test_mtp_layers.py", "test_adapters.py",
        "test_dense.py", "test_rope.py", "test_weights.py",
    ),
    "amx": ("test_native_amx.py", "test_native_amx_attention.py", "test_native_amx_trial.py"),
}  # fmt: skip
"""Files that one worker runs: those that ask transformers for models, which it imports then, in seconds; and those that
build the same C++, which takes longer than all their tests."""
GROUP_OF = {name: group for group, names in TOGETHER.items() for name in names}
CHILDREN = str(Path(__file__).parent / "children")

torch.set_num_threads(1)
# Tests make many objects that live long, and few cycles.
gc.set_threshold(20_000)
# Tests use devices without an engine.
checkers.connect()
# A shell without job control starts what it puts in the background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guard-steps", choices=("every", "off"), default="every", help="steps run under no_sync")
    parser.addoption(
        "--guard-races",
        choices=("off", "every", "chosen"),
        default="chosen",
        help="engines run under no_race (slower): of every test, or of those that tests/loops_under_guard.py chooses",
    )


@pytest.hookimpl(trylast=True)  # so that the test's own parameters come first in its name
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --guard-races chosen: the loop's oracles twice, so that one run of pytest does both; see `covering`."""
    if metafunc.config.getoption("--guard-races") == "chosen" and is_raced_too(metafunc.definition.nodeid):
        again = pytest.param(True, marks=pytest.mark.raced)
        metafunc.parametrize("raced", (False, again), ids=("plain", "raced"), indirect=True)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup: a file stays on one worker, so that a server started for it is started once.

    The workers take files by their number of tests, and then, one by one, what shares nothing: the simulator's first,
    which take longest.
    """
    items[:] = sorted(covering(items), key=lambda item: item.path.parent.name != "simulation")
    for item in items:
        if item.path.parent.name not in SINGLE:
            name = item.path.name
            item.add_marker(pytest.mark.xdist_group(GROUP_OF.get(name, name)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Garbage is looked for among what tests make: walks over all that they import take a fifth of the time."""
    gc.disable()
    result = yield
    # Looked at when all is over: to find what imports have left takes a second in every worker.
    gc.freeze()
    gc.enable()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped: each reason once, and how many have it."""
    lines = reasons_of(terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("why tests were skipped")
    for line in lines:
        terminalreporter.line(line)


def freeze_all() -> None:
    """Have later collections look at later objects alone."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries say what is left at exit."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_past() -> None:
    """What earlier files have imported and left is not walked again: some tests collect after each of many engines."""
    freeze_all()


@pytest.fixture(scope="session")
def findings_of_children(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the guards in processes that tests start have found; see tests/children."""
    folder = tmp_path_factory.mktemp("findings")
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--guard-steps") != "off":
            patch.setenv("STEPS_UNDER_GUARD", str(folder))
            patch.setenv("PYTHONPATH", CHILDREN, prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="session")
def guarded_steps(request: pytest.FixtureRequest) -> Iterator[StepGuard]:
    """No launch path of any engine of any test waits for the device."""
    if request.config.getoption("--guard-steps") == "off":
        yield StepGuard()
        return
    with steps_under_no_sync() as checked:
        yield checked


@pytest.fixture(autouse=True)
def nothing_found(guarded_steps: StepGuard, findings_of_children: Path) -> Iterator[None]:
    """A finding fails the test, also where the test expects its engine to fail."""
    yield
    trouble = [*guarded_steps.trouble(), *filed(findings_of_children)]
    assert not trouble, "\n\n".join(trouble)


@pytest.fixture(scope="session")
def tier_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The real software of KV tiers, where it is there: a server of each kind for all tests of a session."""
    from tier_kinds import TierServers

    servers = TierServers(tmp_path_factory.mktemp)
    yield servers
    servers.close()


@pytest.fixture
def raced(request: pytest.FixtureRequest) -> bool:
    """Whether the test's engines run under no_race: fewer seeds do then."""
    way, name = request.config.getoption("--guard-races"), request.node.nodeid
    planted = any(part in name for part in PLANTED)
    return not planted and getattr(request, "param", way == "every" or (way == "chosen" and is_raced_once(name)))


@pytest.fixture(autouse=True)
def resting_steps(request: pytest.FixtureRequest, guarded_steps: StepGuard, raced: bool) -> Iterator[None]:
    """no_sync looks away from broken engines, and from what runs again: a step takes twice as long under it."""
    path = request.path
    broken = {path.parent.name, path.name} & {*BROKEN} and path.name != "test_regress_syncs.py"
    again = raced and is_raced_again(request.node)
    with guarded_steps.rest() if broken or again else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def guarded_engines(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With --guard-races: what `guarded_loops` does, of a file whose tests share engines."""
    raced = request.config.getoption("--guard-races") != "off" and shares_engines(request.node.nodeid)
    with loops_under_no_race() if raced else nullcontext():
        yield raced


@pytest.fixture(autouse=True)
def guarded_loops(raced: bool, guarded_engines: bool, resting_steps: None) -> Iterator[None]:
    """With --guard-races: no buffer of any engine of this process is touched by two without an order."""
    with loops_under_no_race() if raced and not guarded_engines else nullcontext():
        yield
