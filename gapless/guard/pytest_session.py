"""One session of `pytest --gapless-san`: which finding is whose, what counts, and the reports."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from .detectors import DETECTORS, Detectors
from .present import choose
from .report import CountedFinding, Finding, as_text
from .report_files import as_dict, check_files, merged, write_files
from .run import EXIT_FOUND, EXIT_UNWATCHED, EXIT_USAGE, UNWATCHED
from .sites import shown
from .suppress import DEFAULT_FILE, allowances, apply, gather
from .watched import Watched

FINDINGS_PROPERTY = "gapless_san"
AFTER_ALL = "after the last test"
"""Stands for the name of a test, for what threads and child processes did after it."""
_SITES_SHOWN = 10
"""Number of sites in the summary, by most reports."""
_READERS = f"{os.sep}numpy{os.sep}"
"""A folder of a library that reads for its caller."""
_waiting = pytest.StashKey[list[CountedFinding]]()
"""The findings of a node's import or of a test's set-up, until they fail a test."""


class TestSession:
    """The plugin that runs when `--gapless-san` is given. Under xdist each worker has one, and the controller too."""

    __test__ = False

    def __init__(self, config: pytest.Config, options: Namespace) -> None:
        """Enter the detectors. Raises ValueError for options that cannot be met."""
        self._config = config
        self._files = Namespace(
            json=options.gapless_san_json, sarif=options.gapless_san_sarif, diff=options.gapless_san_diff
        )
        self._base = check_files(self._files)
        device, tensors = options.gapless_san_device, options.gapless_san_device_tensors
        if device and tensors:
            raise ValueError("--device-tensors is for a machine without an accelerator, and --device names one")
        if device:
            choose(device)
        self._emulates = not device and tensors != "marked"
        if "PYTEST_XDIST_WORKER" in os.environ:
            platform.platform()  # starts a process once: a worker of xdist asks for it
        default = config.rootpath / DEFAULT_FILE
        file = options.gapless_san_suppressions or (str(default) if default.exists() else None)
        self._suppressions = gather(options.gapless_san_suppress, file)
        self._detectors = Detectors(
            list(DETECTORS), regions=options.gapless_san_regions,
            emulate_cuda=self._emulates and (bool(tensors) or not torch.accelerator.is_available()),
            allows=allowances(options.gapless_san_suppress, file),
        ).__enter__()  # fmt: skip
        self._is_on = True
        self._found: list[dict[str, Any]] = []
        """The findings in the tests' reports, from this process and from workers."""
        self._watched: list[Watched] = []
        self._last: list[str] = []
        """The texts of the findings after the last test, of each process."""
        self._ran = self._skipped = 0
        self._fails = False

    def leave(self) -> None:
        """Leave the detectors, if they are on."""
        if self._is_on:
            self._is_on = False
            self._detectors.__exit__()
            self._watched.append(self._detectors.watched)

    # Hooks around tests.

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if config.getoption("numprocesses", None) or config.getoption("dist", "no") != "no":
            self.leave()  # the workers run the tests
            self._watched.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        result = yield
        collector.stash.setdefault(_waiting, []).extend(self._take())
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.user_properties[:] = [entry for entry in item.user_properties if entry[0] != FINDINGS_PROPERTY]
        found = self._between()
        found += [entry for node in item.listchain() for entry in node.stash.get(_waiting, [])]
        for node in item.listchain():
            node.stash[_waiting] = []
        try:
            result = yield
        except BaseException:
            self._show(item, "setup", self._note(item, "setup", found + self._take()))
            raise
        item.stash[_waiting] = found + self._take()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self._judged(item, "call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self._judged(item, "teardown"):
            try:
                return (yield)
            finally:
                if self._is_on:
                    self._detectors.begin_again()

    @contextmanager
    def _judged(self, item: pytest.Item, when: str) -> Iterator[None]:
        """Fail this phase of a test for its findings, and for the ones that wait for a test."""
        found = item.stash.get(_waiting, []) + self._between()
        item.stash[_waiting] = []
        try:
            yield
        except BaseException:
            self._show(item, when, self._note(item, when, found + self._take()))
            raise
        entries = self._note(item, when, found + self._take())
        if any(entry.excuse is None for entry in entries):
            pytest.fail(as_text(entries), pytrace=False)
        self._show(item, when, entries)

    def _show(self, item: pytest.Item, when: str, entries: list[CountedFinding]) -> None:
        """Show them in a section of the test's report, which does not fail for them."""
        if entries:
            item.add_report_section(when, "gapless san", as_text(entries))

    def _take(self) -> list[CountedFinding]:
        return self._detectors.take() if self._is_on else []

    def _between(self) -> list[CountedFinding]:
        """Take the findings since the last phase: by threads and children, and in hooks of the program's."""
        # Reads by pytest and its plugins, for their reports, have no line of the program.
        return [entry for entry in self._take() if any(frame.is_users for frame in entry.finding.stack)]

    def _note(self, item: pytest.Item, when: str, found: list[CountedFinding]) -> list[CountedFinding]:
        """Add what counts to the test's report, and return it."""
        entries, known = self._judge([entry for entry in found if self._counts(entry.finding, item, when)])
        if entries or known:
            item.user_properties.append((FINDINGS_PROPERTY, {"when": when, **as_dict(entries, known)}))
        return entries

    def _judge(self, found: list[CountedFinding]) -> tuple[list[CountedFinding], list[CountedFinding] | None]:
        """Return the new or excused findings, and the ones that the base has."""
        entries = apply(found, self._suppressions)
        return self._base.split(entries) if self._base else (entries, None)

    def _after_all(self, session: pytest.Session) -> dict[str, Any]:
        """Leave the detectors, and return the findings since the last test."""
        found = self._between()
        self.leave()
        found += self._detectors.findings()
        places = {item.path: item for item in getattr(session, "items", ())}.values()
        entries, known = self._judge(
            [entry for entry in found if all(self._counts(entry.finding, item, "") for item in places)]
        )
        return {"text": as_text(entries) if entries else "", "found": {"when": "", **as_dict(entries, known)}}

    def _add_last(self, text: str, found: dict[str, Any]) -> None:
        if text or found.get("known"):
            self._found.append({"test": AFTER_ALL, **found})
            self._last += [text] if text else []
            self._fails |= bool(found["findings"])

    def _counts(self, finding: Finding, item: pytest.Item, when: str) -> bool:
        strict = when == "call" and "gapless_no_sync" in getattr(item, "fixturenames", ())
        if strict and finding.detector == "sync":
            return True
        # numpy's own lines read for the line that calls them.
        files = [frame.file for frame in finding.stack if _READERS not in frame.file]
        return not files or not self._is_test_code(files[0], item)

    def _is_test_code(self, file: str, item: pytest.Item) -> bool:
        path = Path(file)
        is_doctest = isinstance(item, pytest.DoctestItem)
        if file.startswith("<doctest ") or path.name == "conftest.py" or (path == item.path and not is_doctest):
            return True
        if any(path.match(pattern) for pattern in self._config.getini("python_files")):
            return True
        root = self._config.rootpath
        beside = set() if is_doctest else {item.path.parent}
        folders = {*beside, *(root / name for name in self._config.getini("testpaths"))} - {root}
        return any(folder in path.parents for folder in folders)

    # Reports, in the process that has them all.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ran += report.when == "setup"
        self._skipped += report.skipped and not hasattr(report, "wasxfail")
        for name, value in report.user_properties:
            if name == FINDINGS_PROPERTY and isinstance(value, dict) and value["when"] == report.when:
                self._found.append({"test": report.nodeid, **value})
                self._fails |= bool(value["findings"]) and not hasattr(report, "wasxfail")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the counts of an xdist worker that ended, and what it found after its last test."""
        output = getattr(node, "workeroutput", {}).get(FINDINGS_PROPERTY)
        if output:
            self._watched.append(Watched(**output["watched"]))
            self._add_last(**output["last"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        last = self._after_all(session) if self._is_on else None
        watched = self._sum()
        if hasattr(self._config, "workerinput"):
            output = {"watched": asdict(watched), "last": last}
            self._config.workeroutput[FINDINGS_PROPERTY] = output  # type: ignore[attr-defined]
            return
        if last:
            self._add_last(**last)
        if self._ran and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = EXIT_FOUND if self._fails else EXIT_UNWATCHED if self._unwatched(watched) else 0
        report = {"tests": self._found, "watched": asdict(watched)}
        try:
            write_files(report, Namespace(json=self._files.json, sarif=None))
            write_files(merged(self._found), Namespace(json=None, sarif=self._files.sarif))
        except ValueError as error:
            pytest.exit(f"gapless san: {error}", returncode=EXIT_USAGE)

    def _sum(self) -> Watched:
        names = asdict(Watched(0, 0, 0, 0, 0))
        return Watched(**{name: sum(getattr(one, name) for one in self._watched) for name in names})

    def _unwatched(self, watched: Watched) -> bool:
        return watched.says_nothing(DETECTORS) and not self._found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        report, watched = merged(self._found), self._sum()
        if not self._ran:
            return
        tell = terminalreporter.write_line
        if self._last:
            terminalreporter.section(f"gapless san: {AFTER_ALL}")
            tell("\n".join(self._last))
        tell(f"gapless san: {watched.text()}")
        parts = [
            f"{report['reports']} reports at {len(report['findings'])} sites, {len(report['allowed'])} sites allowed"
        ]
        if self._unwatched(watched):
            advice = "" if self._emulates else " give --gapless-san-device-tensors cuda if it runs on CUDA,"
            parts = [UNWATCHED.replace(" give --device-tensors cuda if it runs on CUDA,", advice)]
        if self._skipped:
            parts.append(f"{self._skipped} of {self._ran} tests skipped, and not watched")
        if self._base:
            parts.append(f"{len(report.get('known', ()))} sites known from {self._files.diff}")
        tell(f"gapless san: {'; '.join(parts)}")
        most = sorted(report["findings"], key=lambda entry: -entry["count"])[:_SITES_SHOWN]
        for entry in most:
            tell(f"  {entry['count']} x {shown(entry['file'])}:{entry['line']}: {entry['rule']}")
