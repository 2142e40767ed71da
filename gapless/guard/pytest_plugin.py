"""`pytest --gapless-san`: every test's call runs under the detectors, and a finding fails the test.

Tests read results, which is their job: a finding whose line lies in the tests themselves (their folder, the configured
`testpaths`, a conftest.py) does not count. With `--gapless-san-regions` only what happens inside the program's own
regions counts. The fixture `gapless_no_sync` puts one test into a raising region.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "gapless_san"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gapless")
    group.addoption("--gapless-san", action="store_true", help="run every test under the detectors of gapless")
    group.addoption("--gapless-san-json", metavar="FILE", help="write what was found as JSON")
    group.addoption("--gapless-san-regions", action="store_true", help="check only inside the program's own regions")
    group.addoption("--gapless-san-suppress", action="append", default=[], metavar="'PATH[:LINE] [RULE] -- REASON'")
    group.addoption("--gapless-san-suppressions", metavar="FILE", help="such lines (default: .gapless-san)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gapless-san"):
        config.pluginmanager.register(_San(config), "gapless-san-runner")


@pytest.fixture
def gapless_no_sync() -> Iterator[Any]:
    """The test runs inside no_sync(); the value is the region."""
    from gapless.guard import no_sync

    with no_sync() as region:
        yield region


class _San:
    def __init__(self, config: pytest.Config) -> None:
        from gapless.guard.suppress import SuppressionError, gather

        self._config = config
        self._found: list[dict[str, Any]] = []
        file = config.getoption("--gapless-san-suppressions")
        default = config.rootpath / ".gapless-san"
        try:
            self._suppressions = gather(
                config.getoption("--gapless-san-suppress"), file or (str(default) if default.exists() else None)
            )
        except SuppressionError as error:
            raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        from gapless.guard.detectors import DETECTORS, Detectors, Options
        from gapless.guard.report import as_dict, as_text
        from gapless.guard.suppress import apply

        detectors = Detectors(list(DETECTORS), Options(regions=self._config.getoption("--gapless-san-regions")))
        try:
            with detectors:
                result = yield
        finally:
            entries = [e for e in detectors.findings() if not self._is_test_code(e.finding.site.file, item)]
            entries = apply(entries, self._suppressions)
            if entries:
                item.user_properties.append((PROPERTY, as_dict(entries)))
                item.add_report_section("call", "gapless san", as_text(entries))
        if any(entry.excuse is None for entry in entries):
            pytest.fail(as_text(entries), pytrace=False)
        return result

    def _is_test_code(self, file: str, item: pytest.Item) -> bool:
        path = Path(file)
        folders = [item.path.parent, *(self._config.rootpath / name for name in self._config.getini("testpaths"))]
        return path.name == "conftest.py" or any(folder in path.parents for folder in folders)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            found = [value for name, value in report.user_properties if name == PROPERTY]
            self._found += [{"test": report.nodeid, **value} for value in found if isinstance(value, dict)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = sum(entry["reports"] for entry in self._found)
        allowed = sum(len(entry["allowed"]) for entry in self._found)
        terminalreporter.write_line(f"gapless san: {count} reports, {allowed} sites allowed")

    def pytest_sessionfinish(self) -> None:
        path = self._config.getoption("--gapless-san-json")
        # Under xdist only the controller has seen all reports.
        if path and not hasattr(self._config, "workerinput"):
            Path(path).write_text(json.dumps({"tests": self._found}, indent=2) + "\n", encoding="utf-8")
