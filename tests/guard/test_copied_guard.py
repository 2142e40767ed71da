"""Guard stands alone: a copy of its folder, under another name, finds syncs and races in a program of plain torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gapless import guard

FOLDER = Path(guard.__file__).parent

PROGRAM = '''
import sys, threading

sys.modules["gapless"] = None  # whatever imports it fails, wherever it is installed
import torch
import watchdog_of_others as guard


def waits(x):
    return x.sum().item()  # the sync


def enqueues(x):
    return x * 2


def syncs(work):
    x = torch.ones(3)
    with guard.no_sync(device_tensors=[x]):
        work(x)


def races(joins_first):
    x = torch.zeros(3)
    with guard.no_race() as checker:
        checker.register("x", x)
        writer = threading.Thread(target=x.add_, args=(1,))
        writer.start()
        if joins_first:
            writer.join()
        x.mul_(2)  # the race
        writer.join()


class Stream:
    """A device of this project's own: its programs run at once, and its hook says so."""

    name = "copies"
    observers = []

    def launch(self, program, *args):
        for observer in self.observers:
            program = observer.launched(self, program, args, ())
        program(*args)

    def wait(self):
        for observer in self.observers:
            observer.recorded(self).passed()

    def add(self, observer):
        self.observers.append(observer)

    def remove(self, observer):
        self.observers.remove(observer)


def races_on_a_stream(waits_first):
    x = torch.zeros(3)
    with guard.no_race(track="all"):
        stream = Stream()
        guard.connect(stream)  # also after the checker was switched on
        stream.launch(x.add_, 1)
        if waits_first:
            stream.wait()
        x.mul_(2)  # the race on a stream


def outcome(work, *args):
    try:
        work(*args)
    except (guard.SyncError, guard.RaceError) as error:
        print(repr(str(error)))
    else:
        print("nothing found")


for is_right in (False, True):
    outcome(syncs, enqueues if is_right else waits)
    outcome(races, is_right)
    outcome(races_on_a_stream, is_right)
foreign = {name.partition(".")[0] for name in sys.modules} & {"gapless", "msgspec", "tokenizers", "safetensors"}
assert foreign == {"gapless"} and Stream.observers == [], (foreign, Stream.observers)
'''


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(FOLDER, folder / "watchdog_of_others", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.process
def test_a_copy_under_another_name_finds_syncs_and_races_and_nothing_else(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[3:] == ["nothing found"] * 3
    for mark, rule, line in zip(
        ("the sync", "the race", "the race on a stream"), (": host-size", "", ""), lines, strict=False
    ):
        number = next(n for n, text in enumerate(PROGRAM.split("\n"), 1) if text.endswith(f"# {mark}"))
        assert f"program.py:{number}{rule}" in line


@pytest.mark.process
def test_gapless_san_runs_where_torch_and_numpy_alone_are_installed(tmp_path):
    """Everything else that the engine depends on fails to import, in every Python that is started."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split("[<>=;]", line)[0] for line in project["dependencies"]]
    away = {name.replace("-", "_") for name in names} - {"torch", "numpy", "jinja2"}  # torch brings jinja2
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(away)}))\n")
    (tmp_path / "program.py").write_text("import torch\nx = torch.ones(3, device='cuda')\nx.sum().item()\n")
    command = [sys.executable, "-m", "gapless", "san", "--sarif", "log.sarif", "--", "python", "program.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER.parents[1])])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "program.py:3: host-size" in done.stderr, done.stderr
    assert (tmp_path / "log.sarif").exists() and "msgspec" in away


@pytest.mark.process
def test_the_runner_of_a_copy_reports_a_sync_of_a_whole_program(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\nsys.modules['gapless'] = None\nimport torch\nx = torch.ones(3, device='cuda')\nx.sum().item()\n"
    )
    done = run(tmp_path, "-m", "watchdog_of_others.run", "--device-tensors", "cuda", "program.py")
    assert done.returncode == 1 and "program.py:5: host-size" in done.stderr, done.stderr
