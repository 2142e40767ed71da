"""`gapless san -- python program.py` and `pytest --gapless-san`, from outside and from within."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gapless.guard import run, watch
from gapless.guard.detectors import DETECTORS, Detectors
from gapless.guard.emulate import emulated_cuda
from gapless.guard.lint import lint
from gapless.guard.report import CountedFinding, Finding
from gapless.guard.sites import Frame
from gapless.guard.suppress import apply, parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def san(san_source):
    """Runs a program of this text; gives the exit code, the rules and lines found, and what was printed."""

    def started(source: str, *flags: str, args: tuple[str, ...] = ()):
        code, report, out = san_source(source, *flags, args=args)
        return code, [(f["rule"], f["line"]) for f in report["findings"]], out

    return started


def test_the_whole_program_is_checked_in_all_its_threads(san):
    source = """
        import threading, torch
        from gapless import guard
        t = guard.device_tensor(torch.zeros(2))
        t.tolist()
        class Mine(threading.Thread):
            def run(self):
                t.cpu()
        for thread in (threading.Thread(target=lambda: t.numpy()), Mine()):
            thread.start()
            thread.join()
    """
    code, found, out = san(source)
    assert code == 1
    assert sorted(found) == [("copy-to-host", 8), ("copy-to-host", 9), ("host-read", 5)]
    assert "program.py:5: host-read: torch.Tensor.tolist" in out.err
    assert out.err.endswith("gapless san: 3 reports at 3 sites, 0 sites allowed\n")


def test_regions_alone_are_checked_and_record_instead_of_raising(san):
    source = """
        import torch
        from gapless import guard
        t = guard.device_tensor(torch.zeros(2))
        t.tolist()
        with guard.no_sync():
            t.cpu()
            t.numpy()
    """
    assert san(source, "--regions")[:2] == (1, [("copy-to-host", 7), ("copy-to-host", 8)])
    assert san(source)[:2] == (1, [("host-read", 5), ("copy-to-host", 7), ("copy-to-host", 8)])


@pytest.mark.parametrize(
    "flags", [("--regions",), ("--regions", "--device-tensors", "cuda"), ("--regions", "--detect", "sync")]
)
def test_with_regions_alone_the_device_is_played_outside_of_them_too(san, flags):
    source = """
        import threading
        import torch
        from gapless import guard
        model = torch.nn.Linear(4, 4).to("cuda")
        x = torch.zeros(2, 4, device="cuda")
        x.tolist()
        def work():
            assert model(x).to("cuda").cpu().shape == (2, 4)
            with guard.no_sync():
                x.cpu()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with guard.no_sync():
            model(x).sum().item()
    """
    code, found, _ = san(source, *flags)
    assert (code, found) == (1, [("copy-to-host", 11), ("host-size", 16)])


def test_the_programs_own_exit_code_comes_first(san):
    head = "import sys, torch\ntorch.zeros(2, device='cuda')\n"
    for end, code in (("sys.exit(5)", 5), ("sys.exit()", 0), ("sys.exit('no')", 1), ("1 / 0", 1), ("", 0)):
        assert san(f"{head}{end}\n")[0] == code
    code, found, out = san("import torch\nx = torch.zeros(2, device='cuda')\nx.tolist()\nraise ValueError('mine')\n")
    assert (code, found) == (1, [("host-read", 3)])
    assert "ValueError: mine" in out.err


def test_arguments_name_and_imports_are_those_of_a_plain_run(san, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    source = """
        import sys, neighbour, torch
        print(sys.argv[1:], __name__, neighbour.VALUE, len(torch.zeros(1, device="cuda")))
    """
    code, _, out = san(source, args=("a", "--json", "b", "-m"))
    assert (code, out.out) == (0, "['a', '--json', 'b', '-m'] __main__ 7 1\n")


def test_findings_are_suppressed_by_flag_file_and_comment(san, tmp_path):
    source = """
        import torch
        t = torch.zeros(2, device="cuda")
        t.tolist()
        t.cpu()
        t.numpy()  # san: ok(shown)
    """
    (tmp_path / ".gapless-san").write_text("program.py:5 copy-to-host -- the end\n*.py nothing-like-it -- unused\n")
    code, found, out = san(source, "--suppress", "program.py host-read -- fine", "--suppress", "other.py -- unused")
    assert (code, found) == (0, [])
    assert "0 reports at 0 sites, 3 sites allowed" in out.err
    assert "--suppress: this suppression matched nothing: other.py" in out.err and ".gapless-san:2" not in out.err
    assert "matched nothing: program.py" not in out.err


def test_a_run_and_the_lint_excuse_the_same_statements(san_source, tmp_path):
    source = """
        import torch
        x = torch.ones(8, device="cuda")
        a = float(
            x.sum()
        )  # san: ok(the last line of a statement)
        b = (
            x.sum()
            .item()  # san: ok(the line of the call)
        )
        c = (
            x.sum()  # san: ok(the line of another call)
            .item()
        )
        if x.any() and (
            True
        ):  # san: ok(the last line of a head)
            x.tolist()
        text = (x.tolist(), '''
        ''')  # san: ok(after a text of several lines)
        x.tolist(); d = [
            "# san: ok(a text)"
        ]
    """
    _, run_report, _ = san_source(source)
    linted = [(one.finding.site.line, one.excuse) for one in lint([str(tmp_path / "program.py")]).entries()]
    run_excuses = [(one["line"], one.get("reason")) for name in ("findings", "allowed") for one in run_report[name]]
    assert sorted(linted, key=str) == sorted(run_excuses, key=str)
    assert [line for line, excuse in sorted(linted, key=str) if excuse is None] == [13, 18, 21]
    assert len(linted) == 7


@pytest.mark.parametrize(
    "flags",
    [
        ("--detect", "nothing"), ("--suppress", "x"), ("--suppressions", "not-there"), ("--json", "nowhere/out.json"),
        ("--json", "."),
    ],
)  # fmt: skip
def test_wrong_flags_stop_before_the_program(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("print('ran')\n")
    assert run.main([*flags, "program.py"]) == 2
    out = capsys.readouterr()
    assert "gapless san: error:" in out.err and "ran" not in out.out


MOVING = """
    import os, torch
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    torch.zeros(2, device="cuda").tolist()
"""


@pytest.fixture
def moving(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "program.py").write_text(textwrap.dedent(MOVING))


def test_files_are_named_from_the_folder_where_the_run_began(moving, tmp_path, capsys):
    assert run.main(["--json", "out.json", "--sarif", "out.sarif", "program.py"]) == 1
    assert "\nprogram.py:5: host-read" in "\n" + capsys.readouterr().err
    assert len(json.loads((tmp_path / "out.json").read_text())["findings"]) == 1
    (log,) = json.loads((tmp_path / "out.sarif").read_text())["runs"]
    assert log["originalUriBaseIds"]["SRCROOT"]["uri"] == tmp_path.as_uri() + "/"
    assert log["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "program.py"


def test_a_report_that_cannot_be_written_is_one_sentence(moving, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    with (tmp_path / "program.py").open("a") as program:
        program.write("os.rmdir('../there')\n")
    assert run.main(["--json", "there/out.json", "program.py"]) == 2
    file = tmp_path / "there" / "out.json"
    end = f"gapless san: error: the report cannot be written to {file}: No such file or directory\n"
    assert capsys.readouterr().err.endswith(end)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing.py",), "nothing.py is not there"),
        (("-m", "no_such_module"), "No module named no_such_module"),
        (("-m", "package.no_such_module"), "No module named package.no_such_module"),
        (("-m", "package"), "No module named package.__main__; 'package' is a package and cannot be directly executed"),
        (("package",), "can't find '__main__' module in 'package'"),
    ],
)
def test_a_program_or_module_that_is_not_there(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    assert run.main(list(words)) == 2
    assert capsys.readouterr().err == f"gapless san: error: {message}\n"


def test_a_module_that_fails_to_import_another_is_the_programs_own_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "importing.py").write_text("import no_such_module\n")
    assert run.main(["-m", "importing"]) == 1
    err = capsys.readouterr().err
    assert "importing.py" in err and "incomplete: the program raised ModuleNotFoundError" in err.splitlines()[-1]


def test_an_interrupt_while_threads_are_waited_for_still_gives_the_report(san, monkeypatch):
    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    source = """
        import threading, torch
        torch.zeros(2, device="cuda").tolist()
        done = threading.Event()
        threading.Timer(0.2, done.set).start()
        threading.Thread(target=done.wait).start()
    """
    assert san(source, "--device-tensors", "marked")[:2] == (130, [("host-read", 3)])


def test_a_traceback_is_the_programs_alone(san):
    code, _, out = san("def f():\n    raise ValueError('mine')\nf()\n")
    assert code == 1 and "guard/run.py" not in out.err and "runpy" not in out.err
    assert [line.strip() for line in out.err.splitlines() if "program.py" in line][1].endswith("line 2, in f")


def test_programs_that_choose_cuda_where_there_is_one(san):
    source = """
        import torch
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = torch.nn.Linear(3, 2).to(device)
        x = torch.zeros(1, 3, device=device)
        y = model(x)
        print(y.device, y.is_cuda, torch.cuda.device_count())
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); end.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            y = y + 1
        torch.cuda.synchronize()
        end.synchronize()
        torch.cuda.current_stream().synchronize()
        assert start.elapsed_time(end) >= 0
        y.argmax(-1).item()
    """
    if torch.cuda.is_available():
        pytest.skip("CUDA is here, so nothing is emulated")
    code, found, out = san(source, "--device-tensors", "cuda")
    assert out.out == "cuda:0 True 1\n", out.err
    waits = [("stream-wait", 12), ("event-wait", 13), ("stream-wait", 14)]
    # Line 11 adds to y on a stream of its own, and nothing says that y is there.
    assert (code, found) == (1, [("upload", 4), *waits, ("host-read", 16), ("race", 11)])
    assert "program.py:13: event-wait: torch.cuda.Event.synchronize" in out.err
    source = "import torch\nprint(torch.cuda.is_available(), torch.zeros(1).device)\n"
    code, found, out = san(source, "--device-tensors", "marked")
    assert (code, found, out.out) == (3, [], "False cpu\n")


def test_emulation_leaves_nothing_behind():
    before = [dict(vars(owner)) for owner in (torch.cuda, torch, torch.Tensor)]
    with emulated_cuda():
        assert torch.cuda.is_available()
    assert [dict(vars(owner)) for owner in (torch.cuda, torch, torch.Tensor)] == before


def test_a_detector_plugs_in(monkeypatch, san):
    calls = []

    @contextmanager
    def other(report, regions):
        calls.append(regions)
        yield
        for _ in range(2):
            report.add(Finding("other", "odd", "a", "b", "c", (Frame("x.py", 3, "f"),), ("detail",)))
        calls.append("left")

    monkeypatch.setitem(DETECTORS, "other", other)
    code, found, out = san("print('runs')\n", "--detect", "other")
    assert (code, found, calls) == (1, [("odd", 3)], [False, "left"])
    assert "detail" in out.err and "2 times" in out.err


def test_detectors_are_left_when_the_program_fails():
    with pytest.raises(ZeroDivisionError), Detectors(["sync"]):
        assert watch.current() is not None and watch.REPORT_SINKS
        _ = 1 / 0
    assert watch.current() is None and not watch.REPORT_SINKS


def test_suppressions_match_from_the_end_of_a_path():
    site = Frame("/home/me/engine/worker.py", 12, "f")
    finding = Finding("sync", "host-read", "", "", "", (site,))
    matching = ["worker.py", "engine/worker.py:12", "*/worker.py host-read", "engine/*.py:12 host-read"]
    others = ["orker.py", "worker.py:13", "worker.py upload", "other/worker.py"]
    for text, excused in [*((m, True) for m in matching), *((o, False) for o in others)]:
        rule = parse(f"{text} -- because", "here")
        (entry,) = apply([CountedFinding(finding, 3, None)], [rule])
        assert (entry.excuse == "because") == excused, text
        assert rule.used == (3 if excused else 0)


@pytest.mark.process
def test_the_command_runs_a_program_and_writes_a_report(tmp_path):
    (tmp_path / "program.py").write_text("import sys, torch\ntorch.zeros(2, device='cuda').tolist()\nprint(sys.argv)\n")
    command = [sys.executable, "-m", "gapless", "san", "--json", str(tmp_path / "out.json"), "--", "python", "-u"]
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), "--depth", "2"], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "--depth" in done.stdout, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["program"][1:] == ["--depth", "2"] and report["findings"][0]["line"] == 2


@pytest.mark.process
def test_ctrl_c_ends_the_program_and_gives_the_report(tmp_path):
    (tmp_path / "program.py").write_text(
        "import time, torch\ntorch.zeros(2, device='cuda').tolist()\nprint('on', flush=True)\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-m", "gapless", "san", "--", "python", str(tmp_path / "program.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "KeyboardInterrupt" in err
    end = "gapless san: incomplete: the program was interrupted; 1 reports at 1 sites, 0 sites allowed\n"
    assert "program.py:2: host-read" in err and err.endswith(end)


# The plugin of pytest.

LIBRARY = """
import torch
from gapless import guard

table = guard.device_tensor(torch.arange(4.0))

def waits():
    return table.sum().item()

def runs():
    return table + 1

def launch():
    with guard.no_sync():
        return table.tolist()
"""

TESTS = """
import library
import pytest
from gapless import guard

def test_bad():
    assert library.waits() == 6

def test_good():
    assert library.runs().tolist() == [1, 2, 3, 4]

def test_fails_by_itself():
    library.waits()
    assert 0

def test_region():
    library.launch()

def test_fixture(gapless_no_sync):
    library.runs()
    assert gapless_no_sync.report.counts == {}
"""


def pytest_run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """pytest over a small project, in a process of its own."""
    files = {
        "src/library.py": LIBRARY,
        "checks/test_it.py": TESTS,
        "pytest.ini": f"[pytest]\npythonpath = src {ROOT}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gapless.guard.pytest_plugin", *args]
    paths = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **paths}
    )


@pytest.mark.process
def test_pytest_fails_tests_whose_program_waits(tmp_path):
    done = pytest_run(tmp_path, "--gapless-san", "--gapless-san-json", "out.json", "-rA")
    assert "3 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "PASSED checks/test_it.py::test_good" in done.stdout
    assert "src/library.py:8: host-size: torch.Tensor.item" in done.stdout
    assert "gapless san: 3 reports at 2 sites, 0 sites allowed" in done.stdout
    tests = json.loads((tmp_path / "out.json").read_text())["tests"]
    assert [entry["test"].split("::")[1] for entry in tests] == ["test_bad", "test_fails_by_itself", "test_region"]
    assert tests[0]["findings"][0]["line"] == 8


FLAT_TESTS = """
import library

def test_library():
    assert library.waits() == 6

def test_strict(gapless_no_sync):
    library.table.tolist()

def test_reads():
    assert library.runs().tolist() == [1, 2, 3, 4]
"""


@pytest.mark.process
def test_pytest_where_tests_and_program_share_the_projects_folder(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "test_flat.py").write_text(FLAT_TESTS)
    done = pytest_run(tmp_path, "--gapless-san", "test_flat.py", "-rA")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "library.py:8: host-size" in done.stdout and "test_flat.py:8: host-read" in done.stdout
    assert "PASSED test_flat.py::test_reads" in done.stdout


@pytest.mark.process
def test_findings_that_are_suppressed_fail_no_test(tmp_path):
    (tmp_path / ".gapless-san").write_text("src/library.py host-size -- known\nsrc/library.py:15 -- known\n")
    done = pytest_run(tmp_path, "--gapless-san")
    assert "1 failed, 4 passed" in done.stdout and "0 reports at 0 sites, 2 sites allowed" in done.stdout, done.stdout


@pytest.mark.process
def test_pytest_without_the_flag_is_pytest(tmp_path):
    done = pytest_run(tmp_path, "-k", "test_region or test_bad")
    assert "1 failed, 1 passed" in done.stdout and "gapless san" not in done.stdout, done.stdout
    assert "SyncError" in done.stdout, "a region raises by itself"


def test_an_installed_package_brings_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert name == "gapless.guard.pytest_plugin" in project["entry-points"]["pytest11"], (
        "-p by its name must be the same"
    )
