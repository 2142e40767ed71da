"""`pytest --gapless-san` over whole projects: CUDA everywhere, findings where they were made, honest ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
]

LIBRARY = '''
"""Doctests run under the detectors.

>>> runs(2).tolist()
[2.0, 2.0]
"""
import torch

side = torch.cuda.Stream()
at_import = torch.ones(3, device="cuda").max().item()

def waits(n):
    """
    >>> waits(3)
    3.0
    """
    return torch.ones(n, device="cuda").sum().item()

def runs(n):
    return torch.ones(n, device="cuda") + 1

def races(x):
    with torch.cuda.stream(side):
        return x * 2

def ordered(x):
    side.wait_stream(torch.cuda.current_stream())
    y = races(x)
    torch.cuda.current_stream().wait_stream(side)
    return y
'''

CONFTEST = """
import pytest, torch

@pytest.fixture
def x():
    return torch.ones(3, device="cuda")

@pytest.fixture(scope="session")
def weights():
    import library
    yield torch.ones(4, device="cuda")
    library.waits(1)

@pytest.fixture(scope="module")
def loaded():
    import library
    library.waits(3)
    return torch.ones(3, device="cuda")
"""

TESTS = """
import asyncio, unittest
import numpy as np
import pytest, torch
import library

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

def setup_module():
    torch.zeros(2, device="cuda").add_(1)

def test_first_of_all(x):
    assert library.ordered(x).tolist() == [2, 2, 2]

def test_reads(x, weights):
    assert library.ordered(x).tolist() == [2, 2, 2]
    np.testing.assert_allclose(library.runs(2), [2, 2])

def test_first_of_loaded(loaded):
    pass

def test_second_of_loaded(loaded):
    assert loaded.is_cuda

@pytest.mark.parametrize("n", [1, 2])
def test_races(n, x):
    library.races(x) + 1

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_known():
    library.waits(2)

@pytest.mark.asyncio
async def test_coroutine(x):
    await asyncio.sleep(0)
    library.runs(2)

@pytest.mark.asyncio
async def test_coroutine_waits(x):
    await asyncio.sleep(0)
    library.waits(2)

left = []

def test_leaves_work_on_a_side_stream(x):
    library.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(library.side):
        left.append(x.mul_(2))

def test_uses_what_is_left():
    [x + 1 for x in left]

class TestMethods:
    def setup_class(self):
        self.w = torch.ones(2, device="cuda")

    def setup_method(self):
        self.s = torch.cuda.Stream()

    def teardown_method(self):
        library.waits(1)

    def test_one(self):
        assert self.w.is_cuda

class TestUnit(unittest.TestCase):
    def setUp(self):
        self.z = torch.ones(2, device="cuda")

    def test_good(self):
        self.assertTrue(self.z.is_cuda)

    def test_waits(self):
        library.waits(1)
"""

FAILED = {
    "library.py::library.waits", "test_all.py::test_first_of_loaded", "test_all.py::test_races[1]",
    "test_all.py::test_races[2]", "test_all.py::test_coroutine_waits", "test_all.py::TestUnit::test_waits",
    "library.py::library",
}  # fmt: skip
"""The first test of library.py fails for the module's import."""
ERRORS = {"test_all.py::TestMethods::test_one", "test_all.py::TestUnit::test_waits"}
"""Tests whose teardown waits; the last one's is that of the whole session."""


def run(folder: Path, *args: str, plugins: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest over the files of a folder; `plugins` names those that are on besides ours."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gapless.guard.pytest_plugin"]
    named = [word for name in plugins.split() for word in ("-p", name)]
    paths = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *named, "--gapless-san", *args],
        cwd=folder, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **paths},
    )  # fmt: skip


def outcomes(done: subprocess.CompletedProcess[str], kind: str) -> set[str]:
    return set(re.findall(rf"^{kind} (\S+)", done.stdout, re.MULTILINE))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    texts = {"library.py": LIBRARY, "conftest.py": CONFTEST, "test_all.py": TESTS, "pytest.ini": "[pytest]\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text.lstrip())
    return tmp_path


def test_findings_fail_the_tests_that_made_them_in_every_phase(project):
    flags = ("--doctest-modules", "-rA", "--gapless-san-json", "base.json", "--gapless-san-sarif", "san.sarif")
    done = run(project, *flags, plugins="pytest_asyncio.plugin")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (outcomes(done, "FAILED"), outcomes(done, "ERROR")) == (FAILED, ERRORS), done.stdout
    assert "; 1 of 17 tests skipped, and not watched" in done.stdout and " 2 x library.py:23: race" in done.stdout
    report = json.loads((project / "base.json").read_text())
    assert {test["when"] for test in report["tests"]} == {"call", "teardown"} and report["watched"]["streams"] == 2
    (sarif,) = json.loads((project / "san.sarif").read_text())["runs"]
    assert len(sarif["results"]) == len({one["partialFingerprints"]["gaplessSan/v1"] for one in sarif["results"]}) == 3
    # What is known fails nothing; a new line does.
    with (project / "library.py").open("a") as file:
        file.write("\n\ndef new(x):\n    return x.sum().item()\n")
    (project / "test_new.py").write_text("import library\n\n\ndef test_new(x):\n    library.new(x)\n")
    done = run(project, *flags, "--gapless-san-diff", "base.json", plugins="pytest_asyncio.plugin")
    assert (done.returncode, outcomes(done, "FAILED")) == (1, {"test_new.py::test_new"}), done.stdout
    assert "gapless san: 1 reports at 1 sites, 0 sites allowed; " in done.stdout
    assert "3 sites known from base.json" in done.stdout


def test_workers_of_xdist_report_to_the_controller(project):
    done = run(project, "-rA", "-n2", "--dist=loadfile", "--gapless-san-json", "x.json", plugins="xdist.plugin")
    failed = {name for name in FAILED if name.startswith("test_all") and "coroutine" not in name}
    # Each worker imports the library, and its first test in the tests' file answers for that.
    first = "test_all.py::test_first_of_all"
    assert outcomes(done, "FAILED") - {"test_all.py::test_coroutine", "test_all.py::test_coroutine_waits"} == {
        *failed, first,
    }, done.stdout  # fmt: skip
    assert json.loads((project / "x.json").read_text())["watched"]["device_tensors"] > 20


@pytest.mark.parametrize("plugins", ["", "xdist.plugin"])
def test_a_session_that_watches_nothing_ends_with_3(tmp_path, plugins):
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n\n\n@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')\n"
        "def test_gpu():\n    torch.ones(2, device='cuda')\n\n\ndef test_cpu():\n    torch.ones(2).tolist()\n"
    )
    flags = ("-n2", "--gapless-san-device-tensors", "marked") if plugins else ("--gapless-san-device-tensors=marked",)
    done = run(tmp_path, *flags, plugins=plugins)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "gapless san: nothing was watched" in done.stdout and "0 reports" not in done.stdout
    assert "give --gapless-san-device-tensors cuda" in done.stdout and "1 of 2 tests skipped" in done.stdout
    assert run(tmp_path, plugins=plugins).returncode == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [("assert 0", 1), ("pytest.skip()", 3), ("library.waits(1); pytest.skip()", 1), ("library.waits(1)", 1)],
)
def test_the_exit_code_is_that_of_what_went_wrong(project, body, code):
    (project / "library.py").write_text(LIBRARY.replace("at_import =", "no =").replace(".max().item()", ""))
    if code == 3:
        (project / "library.py").write_text("")
    (project / "test_all.py").write_text(f"import library, pytest\n\n\ndef test_it():\n    {body}\n")
    done = run(project)
    assert done.returncode == code, done.stdout + done.stderr


def test_wrong_options_stop_before_the_tests(project):
    for flag, name in (("--gapless-san-sarif", "no/where"), ("--gapless-san-diff", "none.json")):
        done = run(project, flag, name)
        assert done.returncode == 4 and f"gapless san: {flag} {name}" in done.stderr, done.stderr


def test_a_process_that_a_test_starts_counts_for_that_test(tmp_path):
    (tmp_path / "work.py").write_text(
        "import torch\n\n\ndef waits(n):\n    return torch.ones(n, device='cuda').tolist()\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import multiprocessing, work\n\n\ndef test_before():\n    pass\n\n\n"
        "def test_pool():\n    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        assert pool.map(work.waits, [1]) == [[1.0]]\n        pool.close()\n        pool.join()\n\n\n"
        "def test_after():\n    pass\n"
    )
    done = run(tmp_path, "-rA")
    assert outcomes(done, "FAILED") == {"test_it.py::test_pool"}, done.stdout + done.stderr
    assert "work.py:5: host-read" in done.stdout and "1 watched" in done.stdout


BETWEEN = {
    "late.py": """
import subprocess, sys, threading, torch

go, done = threading.Event(), threading.Event()
threads, processes = [], []

def waits():
    go.wait()
    torch.ones(2, device="cuda").tolist()
    done.set()

def starts():
    threads.append(threading.Thread(target=waits))
    threads[0].start()

def child():
    processes.append(subprocess.Popen([sys.executable, "child.py"]))
""",
    "child.py": "import torch\n\ntorch.ones(2, device='cuda').sum().item()\n",
    "conftest.py": """
import late

def pytest_runtest_logfinish(nodeid):
    if nodeid.endswith("test_starts") and late.threads:  # the controller of xdist has none
        late.go.set()
        late.done.wait()

def pytest_sessionfinish():
    for process in late.processes:
        process.wait()
""",
    "test_it.py": """
import late

def test_starts():
    late.starts()

def test_next():
    late.child()
""",
    "pytest.ini": "[pytest]\n",
}


@pytest.mark.parametrize("plugins", ["", "xdist.plugin"])
def test_findings_between_tests_and_after_the_last_one_count(tmp_path, plugins):
    for name, text in BETWEEN.items():
        (tmp_path / name).write_text(text.lstrip())
    files = ("--gapless-san-json", "x.json", "--gapless-san-sarif", "x.sarif")
    done = run(tmp_path, "-rA", *files, *(("-n1",) if plugins else ()), plugins=plugins)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gapless san: 2 reports at 2 sites" in done.stdout and "gapless san: after the last test" in done.stdout
    report = json.loads((tmp_path / "x.json").read_text())
    found = {(test["test"], Path(entry["file"]).name) for test in report["tests"] for entry in test["findings"]}
    assert found == {("test_it.py::test_next", "late.py"), ("after the last test", "child.py")}
    assert len(json.loads((tmp_path / "x.sarif").read_text())["runs"][0]["results"]) == 2
    assert "of 1 process started by it 1 watched" in done.stdout
    if plugins:
        return
    # What is found after the last test alone fails the session as well.
    (tmp_path / "test_it.py").write_text("import late\n\n\ndef test_last():\n    late.child()\n")
    done = run(tmp_path)
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout + done.stderr
    done = run(tmp_path, "--gapless-san-diff", "x.json")
    assert done.returncode == 0 and "1 sites known from x.json" in done.stdout, done.stdout + done.stderr


def test_values_that_pytest_shows_of_a_failed_test_do_not_count(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import torch\n\n\ndef test_bad():\n    x = torch.ones(2, device='cuda')\n    assert x is None\n\n\n"
        "def test_good():\n    pass\n"
    )
    done = run(tmp_path, "-l")
    assert "1 failed, 1 passed" in done.stdout and "0 reports" in done.stdout, done.stdout


def test_processes_of_xdist_itself_are_not_counted(tmp_path):
    (tmp_path / "test_it.py").write_text("import torch\n\n\ndef test_it():\n    torch.ones(2, device='cuda')\n")
    done = run(tmp_path, "-n2", plugins="xdist.plugin")
    assert done.returncode == 0 and not re.search(r"watched.*process", done.stdout), done.stdout


def test_options_without_the_first_one_are_wrong(tmp_path):
    for flag in ("--gapless-san-diff=x", "--gapless-san-regions", "--gapless-san-device-tensors=cuda"):
        command = [sys.executable, "-m", "pytest", "-p", "gapless.guard.pytest_plugin", flag]
        paths = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, **paths},
        )  # fmt: skip
        assert done.returncode == 4 and f"{flag.partition('=')[0]} needs --gapless-san" in done.stderr, done.stderr


def test_two_copies_of_the_plug_in_make_one_session(tmp_path):
    (tmp_path / "gapless_copy").symlink_to(ROOT / "gapless" / "guard")
    (tmp_path / "work.py").write_text("def waits(x):\n    return x.tolist()\n")
    (tmp_path / "test_it.py").write_text(
        "import torch, work\n\n\ndef test_it():\n    work.waits(torch.ones(2, device='cuda'))\n"
    )
    for plugin in ("gapless_copy.pytest_plugin", "gapless.guard.pytest_plugin"):
        done = run(tmp_path, plugins=plugin)
        assert done.returncode == 1 and done.stdout.count("gapless san: 1 reports at 1 sites") == 1, (
            done.stdout + done.stderr
        )


def test_the_advice_to_emulate_is_not_given_to_a_run_that_does(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    done = run(tmp_path, "--gapless-san-device-tensors=cuda")
    assert done.returncode == 3 and "Run it where there is a GPU, or mark tensors" in done.stdout, done.stdout
