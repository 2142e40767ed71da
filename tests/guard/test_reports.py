"""What a report shows first, how it names lines of libraries, and what it writes for code hosts and for comparisons."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from gapless.guard import run
from gapless.guard.mends import mend
from gapless.guard.report import CountedFinding, Finding, SyncReport, as_text
from gapless.guard.sites import Frame
from gapless.guard.sync_rules import RULES

SCHEMA = json.loads((Path(__file__).parent / "sarif-2.1.0-subset.json").read_text())
"""The public schema of SARIF 2.1.0, without the properties that no log of ours has."""


@pytest.fixture
def san(san_source, tmp_path, monkeypatch):
    """Runs a program of this text beside an installed library; gives exit code, report and stderr."""

    def started(source: str, *flags: str):
        library = tmp_path / "site-packages" / "decoders.py"
        library.parent.mkdir(exist_ok=True)
        library.write_text(LIBRARY)
        monkeypatch.setattr(sys, "path", [*sys.path, str(library.parent)])
        monkeypatch.delitem(sys.modules, "decoders", raising=False)
        code, report, out = san_source(source, "--device-tensors", "marked", *flags)
        return code, report, out.err

    return started


LIBRARY = """
def generate(x, steps):
    first = x.sum().item()
    while steps:
        steps -= 1
        x = x + first
        if stops(x):
            break
    return x

def stops(x):
    return x.max() > 1000
"""
PROGRAM = """
    import torch, decoders

    class Model:
        def __init__(self):
            self.parts = [torch.tensor([1.0], device="cuda") for _ in range(3)]

    def show(x):
        for row in x:
            print(row.item())

    model = Model()
    x = torch.ones(4, device="cuda")
    y = decoders.generate(x, 5)
    show(y)
"""


def test_a_report_lists_findings_of_loops_first_and_of_set_up_last(san):
    code, report, err = san(PROGRAM)
    assert code == 1
    loops, once = err.split("--- Once, or at set-up: ")
    assert loops.startswith("--- Repeated in a loop, most often first: 9 reports at 2 sites\n")
    assert once.startswith("4 reports at 2 sites\n")
    found = {entry["line"]: (entry["rule"], entry["count"], entry["in_loop"]) for entry in report["findings"]}
    assert found[6] == ("list-to-device", 3, False), "the loop of a constructor is set-up"
    assert found[10] == ("host-read", 4, True)
    first = loops.splitlines()[1]
    assert first == "program.py:14: host-read: torch.Tensor.__bool__", "five times come before four"


def test_the_programs_own_line_is_shown_above_the_librarys(san):
    _, _, err = san(PROGRAM)
    lines = err.splitlines()
    at = lines.index("program.py:14: host-read: torch.Tensor.__bool__")
    assert lines[at + 1] == "  in       decoders.py:7 in generate"
    assert "  5 times, in the loop at decoders.py:5" in lines[at:]
    at = lines.index("program.py:10: host-read: torch.Tensor.item")
    assert "  called from program.py:15 in <module>" in lines[at:]


def test_a_line_of_a_library_is_suppressed_by_either_name(san):
    for flag in ("decoders.py -- known", "program.py:14 -- known"):
        _, report, _ = san(PROGRAM, "--suppress", flag)
        assert sorted(entry["line"] for entry in report["findings"]) == [6, 10], flag
        assert len(report["allowed"]) == 2


def test_the_test_of_a_while_loop_is_one_finding_of_the_loop(san):
    source = """
        import torch
        x = torch.ones(4, device="cuda")
        while x.sum() > -10:
            x = x - 1
    """
    _, report, _ = san(source)
    assert [(entry["line"], entry["count"], entry["in_loop"]) for entry in report["findings"]] == [(4, 5, True)]


def race(instead: str, line: int, function: str = "f") -> Finding:
    return Finding("race", "race", f"b{line}", "no fence", instead, (Frame("x.py", line, function),))


def test_races_that_one_missing_fence_leaves_are_one_finding():
    report = SyncReport()
    first, other, second, elsewhere = race("a", 1), race("b", 2), race("a", 3), race("a", 4, "g")
    for finding in (first, other, second, second, elsewhere):
        report.add(finding)
    assert [(entry.finding.site.line, entry.count) for entry in report.entries()] == [(1, 3), (2, 1), (4, 1)]
    assert "also at x.py:3: b3" in report.text() and report.text().endswith("5 reports at 3 sites, 0 sites allowed")


def test_advice_fits_the_call():
    assert "end a step late" in mend("host-read", "torch.Tensor.__bool__", "/x/user.py")
    assert "(t == value).any()" in mend("host-read", "torch.Tensor.__contains__", "")
    assert "GradScaler" in mend("host-read", "torch.Tensor.item", "/lib/torch/amp/grad_scaler.py")
    assert mend("host-size", "torch.Tensor.item", "/x/user.py") == ""


def test_every_advice_is_of_a_known_rule():
    from gapless.guard import mends

    assert {rule for rule, _ in (*mends.BY_CALL, *mends.BY_TORCH)} <= set(RULES)


def test_only_what_is_new_since_a_base_counts(san, tmp_path):
    base = tmp_path / "base.json"
    _, report, _ = san(PROGRAM)
    base.write_text(json.dumps(report))
    moved = "\n\n" + PROGRAM  # two lines are added above: what is known stays known
    code, report, err = san(moved, "--diff", str(base))
    assert (code, report["findings"], len(report["known"])) == (0, [], 4)
    assert err.endswith(f"0 sites allowed; 4 sites known from {base}, 0 of its sites gone\n")

    code, report, err = san(moved.replace("show(y)", "y.cpu()"), "--diff", str(base))
    assert code == 1 and [entry["rule"] for entry in report["findings"]] == ["copy-to-host"]
    assert err.endswith(f"1 reports at 1 sites, 0 sites allowed; 3 sites known from {base}, 1 of its sites gone\n")
    base.write_text(json.dumps(report))
    assert san(moved.replace("show(y)", "y.cpu()"), "--diff", str(base))[0] == 0, "a report of --diff is a base too"


def test_the_same_line_twice_is_new_when_the_base_has_it_once(san, tmp_path):
    source = "import torch\nx = torch.ones(2, device='cuda')\nx.tolist()\n"
    base = tmp_path / "base.json"
    base.write_text(json.dumps(san(source)[1]))
    code, report, _ = san(source + "x.tolist()\n", "--diff", str(base))
    assert code == 1 and [entry["line"] for entry in report["findings"]] == [4]


@pytest.mark.parametrize("text", [None, "no json", "{}", '{"findings": [{}]}', "[1]"])
def test_a_base_that_is_no_report_stops_before_the_program(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("print('ran')\n")
    if text is not None:
        Path("base.json").write_text(text)
    assert run.main(["--diff", "base.json", "program.py"]) == 2
    out = capsys.readouterr()
    assert "--diff base.json: expected a report that --json wrote" in out.err and "ran" not in out.out


def test_sarif_fits_the_schema_and_names_files_from_the_root(san, tmp_path):
    base, log_file = tmp_path / "base.json", tmp_path / "log.sarif"
    base.write_text(json.dumps(san(PROGRAM.replace("show(y)", ""))[1]))
    san(PROGRAM, "--sarif", str(log_file), "--diff", str(base), "--suppress", "program.py:6 -- at the start")
    log = json.loads(log_file.read_text())
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    results = log["runs"][0]["results"]
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert {place["artifactLocation"]["uri"] for place in places} == {"program.py"}
    assert [(result["baselineState"], "suppressions" in result) for result in results] == [
        ("new", False), ("new", True), ("unchanged", False), ("unchanged", False),
    ]  # fmt: skip
    assert log["runs"][0]["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def test_the_schema_refuses_what_is_no_sarif():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate({"version": "2.1.0", "runs": [{"results": []}]})


def test_the_lint_writes_sarif_too(tmp_path, monkeypatch):
    from gapless.cli import san as command

    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text("import torch\nx = torch.zeros(2, device='cuda')\nx.tolist()\n")
    assert command.main(["--lint", "step.py", "--sarif", "log.sarif", "--json", "base.json"]) == 1
    jsonschema.Draft4Validator(SCHEMA).validate(json.loads(Path("log.sarif").read_text()))
    assert command.main(["--lint", "step.py", "--diff", "base.json"]) == 0


def test_findings_without_a_stack_have_a_text():
    finding = Finding("sync", "host-read", "a", "b", "c")
    assert as_text([CountedFinding(finding, 2, None)]).startswith("<unknown>:0: host-read: a\n")
