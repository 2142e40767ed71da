"""`pytest --gapless-san`: every test's call runs under the detectors, and a finding fails the test.

Tests read results, which is their job: a finding whose line is in the tests themselves (their folder, where that is
not the project's own, the configured `testpaths`, a test file, a conftest.py) does not count. With
`--gapless-san-regions` only what happens inside the program's own regions counts. The fixture `gapless_no_sync` puts
one test into a raising region; under `--gapless-san`, where regions record, what that test's own lines do counts too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .report import Finding

FINDINGS_PROPERTY = "gapless_san"
_SITES_SHOWN = 10
"""Number of sites in the summary, by most reports."""


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
    from . import no_sync

    with no_sync() as region:
        yield region


class _San:
    def __init__(self, config: pytest.Config) -> None:
        from .suppress import gather

        self._config = config
        self._found: list[dict[str, Any]] = []
        file = config.getoption("--gapless-san-suppressions")
        default = config.rootpath / ".gapless-san"
        try:
            self._suppressions = gather(
                config.getoption("--gapless-san-suppress"), file or (str(default) if default.exists() else None)
            )
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        from .detectors import DETECTORS, Detectors
        from .report import as_text
        from .report_files import as_dict
        from .suppress import apply

        detectors = Detectors(list(DETECTORS), regions=self._config.getoption("--gapless-san-regions"))
        try:
            with detectors:
                result = yield
        finally:
            entries = apply([e for e in detectors.findings() if self._counts(e.finding, item)], self._suppressions)
            if entries:
                item.user_properties.append((FINDINGS_PROPERTY, as_dict(entries)))
                item.add_report_section("call", "gapless san", as_text(entries))
        if any(entry.excuse is None for entry in entries):
            pytest.fail(as_text(entries), pytrace=False)
        return result

    def _counts(self, finding: Finding, item: pytest.Item) -> bool:
        strict = finding.detector == "sync" and "gapless_no_sync" in getattr(item, "fixturenames", ())
        return strict or not self._is_test_code(Path(finding.site.file), item)

    def _is_test_code(self, path: Path, item: pytest.Item) -> bool:
        if path.name == "conftest.py" or path == item.path:
            return True
        if any(path.match(pattern) for pattern in self._config.getini("python_files")):
            return True
        root = self._config.rootpath
        folders = {item.path.parent, *(root / name for name in self._config.getini("testpaths"))} - {root}
        return any(folder in path.parents for folder in folders)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            found = [value for name, value in report.user_properties if name == FINDINGS_PROPERTY]
            self._found += [{"test": report.nodeid, **value} for value in found if isinstance(value, dict)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from .sites import shown

        count = sum(entry["reports"] for entry in self._found)
        allowed = sum(len(entry["allowed"]) for entry in self._found)
        terminalreporter.write_line(f"gapless san: {count} reports, {allowed} sites allowed")
        sites: Counter[str] = Counter()
        for report in self._found:
            for entry in report["findings"]:
                sites[f"{shown(entry['file'])}:{entry['line']}: {entry['rule']}"] += entry["count"]
        for site, times in sites.most_common(_SITES_SHOWN):
            terminalreporter.write_line(f"  {times} x {site}")

    def pytest_sessionfinish(self) -> None:
        path = self._config.getoption("--gapless-san-json")
        # Under xdist only the controller has seen all reports.
        if path and not hasattr(self._config, "workerinput"):
            Path(path).write_text(json.dumps({"tests": self._found}, indent=2) + "\n", encoding="utf-8")
