"""One core a test: several run side by side, and small tensors gain nothing from more. Engines run under no_sync."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import skip_without_compiler
from gpu_share import take_share
from guarded_children import filed
from loops_under_guard import loops_under_no_race
from skip_reasons import reasons_of

from gapless.engine import checkers
from gapless.testing.guarded import StepGuard, guarded

SINGLE = ("loop", "mutation", "regressions", "simulation")
"""Folders whose tests share nothing: workers take them one by one, and none is left with a long file at the end."""
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
        help="engines run under no_race (slower): of every test, or of those that are marked and of whole engines",
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup: a file stays on one worker, so that a server started for it is started once; interpreted
    cases stay on one together.

    The workers take files by their number of tests, and then, one by one, what shares nothing: the simulator's first,
    which take longest.
    """
    items.sort(key=lambda item: (bool(item.get_closest_marker("fake")), item.path.parent.name != "simulation"))
    for item in items:
        if item.path.parent.name not in SINGLE:
            name = "interpreter" if "[interpreter" in item.name else item.path.name
            item.add_marker(pytest.mark.xdist_group(GROUP_OF.get(name, name)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers of xdist take files in an order of their own, and a process that has the fake accelerator keeps it."""
    marked = [item for item in session.items if item.get_closest_marker("fake")]
    if marked and len(marked) < len(session.items) and hasattr(session.config, "workerinput"):
        for item in marked:
            item.add_marker(pytest.mark.skip("the fake accelerator needs processes of its own: pytest -m fake"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Only a test that is marked may give the process the fake accelerator."""
    module = sys.modules.get("gapless.testing.fake")
    if module is not None and module.is_initialized() and not item.get_closest_marker("fake"):
        pytest.exit(f"{item.nodeid} runs on the fake accelerator: mark it fake", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Garbage is looked for among what tests make: walks over all that they import take a fifth of the time."""
    gc.disable()
    result = yield
    # Looked at when all is over: to find what imports have left takes a second in every worker.
    gc.freeze()
    gc.enable()
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A worker takes its share of the GPU before its first test there; the fake accelerator needs a compiler."""
    if item.get_closest_marker("fake"):
        skip_without_compiler()
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        take_share()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped, each reason once, and how many of the protections taken away were noticed."""
    lines = reasons_of(terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("why tests were skipped")
    for line in lines:
        terminalreporter.line(line)
    tried = {
        outcome: {name for report in terminalreporter.stats.get(outcome, ()) for name in mutations_of(report)}
        for outcome in ("passed", "failed")
    }
    if count := len(set().union(*tried.values())):
        terminalreporter.line(f"mutations noticed: {len(tried['passed'])} of {count}")


def mutations_of(report: pytest.TestReport) -> list[object]:
    """The protection that a test has taken away."""
    return [value for name, value in report.user_properties if name == "mutation"] if report.when == "call" else []


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
    with guarded() as checked:
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


@pytest.fixture(autouse=True)
def resting_steps(request: pytest.FixtureRequest, guarded_steps: StepGuard) -> Iterator[None]:
    """no_sync looks away from the engines of a test with the mark `unguarded`."""
    with guarded_steps.rest() if request.node.get_closest_marker("unguarded") else nullcontext():
        yield


@pytest.fixture(scope="module")
def engines_under_no_race(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `guarded_loops` does, for a file whose tests share engines."""
    with nullcontext() if request.config.getoption("--guard-races") == "off" else loops_under_no_race():
        yield


@pytest.fixture(autouse=True)
def guarded_loops(request: pytest.FixtureRequest, resting_steps: None) -> Iterator[None]:
    """With the mark `no_race`: no buffer of any engine of this process is touched by two without an order."""
    way, marked = request.config.getoption("--guard-races"), request.node.get_closest_marker
    asked = way == "every" or (way == "chosen" and marked("no_race"))
    shared = "engines_under_no_race" in request.fixturenames
    with loops_under_no_race() if asked and not (shared or marked("unguarded")) else nullcontext():
        yield
