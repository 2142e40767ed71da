"""`pytest --gapless-san`: the whole session runs under the detectors, and a finding fails the test that made it.

From before the first conftest.py to the end, CUDA is emulated if there is none: tests that skip without it run, and
fixtures of every scope find it. What set-up, call and teardown of a test do counts for that test; what a module does
when it is collected counts for its first test; what threads and children do between two phases, for the next one, and
after the last test, for the session. Memory and orders are forgotten from test to test.

Tests read results, which is their job: a finding whose line is in the tests themselves (their folder if that is not
the project's own, the configured `testpaths`, a test file, a conftest.py, a doctest) does not count. With
`--gapless-san-regions` only what happens inside the program's own regions counts. The fixture `gapless_no_sync` puts
one test into a raising region; under `--gapless-san` regions record, and what that test's own lines do counts too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

_PLACES = ("cuda", "marked")
_SESSION = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gapless")
    try:
        group.addoption(
            "--gapless-san", action="store_const", const=__name__, default="",
            help="run all tests under the detectors of gapless",
        )  # fmt: skip
    except ValueError:
        return  # another copy of this plug-in runs the session
    group.addoption("--gapless-san-json", metavar="FILE", help="write what was found as JSON")
    group.addoption("--gapless-san-sarif", metavar="FILE", help="write it as SARIF 2.1.0, which code hosts show")
    group.addoption("--gapless-san-diff", metavar="BASE", help="fail only for what is new since BASE, an earlier JSON")
    group.addoption("--gapless-san-device", metavar="NAME", help="watch this accelerator (default: what torch finds)")
    group.addoption(
        "--gapless-san-device-tensors", choices=_PLACES,
        help="without a GPU: `cuda` emulates CUDA (default); `marked` watches marked and device='cuda' tensors alone",
    )  # fmt: skip
    group.addoption("--gapless-san-regions", action="store_true", help="check only inside the program's own regions")
    group.addoption("--gapless-san-suppress", action="append", default=[], metavar="'PATH[:LINE] [RULE] -- REASON'")
    group.addoption("--gapless-san-suppressions", metavar="FILE", help="such lines (default: .gapless-san)")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    _begin(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    # A plugin that a conftest.py names comes too late for the hook above.
    _begin(config, config.option)
    if _SESSION in config.stash:
        config.pluginmanager.register(config.stash[_SESSION], "gapless-san-runner")


def _begin(config: pytest.Config, options: Any) -> None:
    if not options.gapless_san:
        given = [name for name, value in vars(options).items() if name.startswith("gapless_san_") and value]
        if given:
            raise pytest.UsageError(f"--{given[0].replace('_', '-')} needs --gapless-san")
    if options.gapless_san != __name__ or _SESSION in config.stash:
        return
    from .pytest_session import TestSession

    try:
        session = config.stash[_SESSION] = TestSession(config, options)
    except ValueError as error:
        raise pytest.UsageError(f"gapless san: {re.sub('^--', '--gapless-san-', str(error))}") from error
    config.add_cleanup(session.leave)


@pytest.fixture
def gapless_no_sync() -> Iterator[Any]:
    """The test runs inside no_sync(); the value is the region."""
    from . import no_sync

    with no_sync() as region:
        yield region
