"""The reasons of skips, as a run of the tests prints them."""

from __future__ import annotations

from types import SimpleNamespace

from skip_reasons import reasons_of


def test_each_reason_is_printed_once_with_its_count():
    reports = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {why}")) for why in ("no GPU", "no\n  server", "no GPU")]
    assert reasons_of(reports) == ["    2 no GPU", "    1 no server"]


def test_a_run_prints_the_reasons(request):
    plugin = request.config.pluginmanager.getplugin(str(request.config.rootpath / "tests" / "conftest.py"))
    lines: list[str] = []
    reporter = SimpleNamespace(section=lines.append, line=lines.append, stats={})
    plugin.pytest_terminal_summary(reporter)
    assert not lines
    reporter.stats["skipped"] = [SimpleNamespace(longrepr=("a.py", 1, "Skipped: no GPU"))]
    plugin.pytest_terminal_summary(reporter)
    assert lines == ["why tests were skipped", "    1 no GPU"]
