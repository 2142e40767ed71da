"""Guard stands alone: a copy of its folder, under another name, finds syncs and races in a program of plain torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
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
        print(error)
    else:
        print("nothing found")


{call}
foreign = {name.partition(".")[0] for name in sys.modules} & {"gapless", "msgspec", "tokenizers", "safetensors"}
assert foreign == {"gapless"} and Stream.observers == [], (foreign, Stream.observers)
'''

CASES = {
    "a sync": ("outcome(syncs, waits)", "program.py:{the sync}: host-size"),
    "no sync": ("outcome(syncs, enqueues)", "nothing found"),
    "a race": ("outcome(races, False)", "program.py:{the race}"),
    "no race": ("outcome(races, True)", "nothing found"),
    "a race on a stream": ("outcome(races_on_a_stream, False)", "program.py:{the race on a stream}"),
    "no race on a stream": ("outcome(races_on_a_stream, True)", "nothing found"),
}


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.split("\n"), 1) if line.endswith(f"# {mark}"))


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(FOLDER, folder / "watchdog_of_others", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the program prints in each case. One process runs them all: it takes seconds to import torch."""
    folder, end = tmp_path_factory.mktemp("copied"), "--- end of a case\n"
    calls = "".join(f"{call}\nprint({end!r}, end='')\n" for call, _ in CASES.values())
    (folder / "program.py").write_text(PROGRAM.replace("{call}", calls))
    done = run(folder, "program.py")
    assert done.returncode == 0, done.stderr
    *outputs, rest = done.stdout.split(end)
    assert rest == ""
    return dict(zip(CASES, outputs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_copy_under_another_name_finds_what_is_there_and_nothing_else(case, said):
    expected = CASES[case][1]
    mark = expected.partition("{")[2].partition("}")[0]
    assert (expected.replace(f"{{{mark}}}", str(line_of(mark))) if mark else expected) in said[case], said[case]
    assert mark or said[case] == "nothing found\n"


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


def test_gapless_san_imports_what_torch_imports_and_itself_alone(tmp_path):
    """A module of any installed package that the program's own imports do not bring would be one more dependency."""
    source = """
        import sys, torch
        x = torch.ones(3, device=sys.argv[1])
        found = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
        print("modules", *sorted(name for name in found if not name.startswith("_")))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    said = []
    for words in (["program.py", "cpu"], ["-m", "gapless", "san", "--json", "a", "--", "python", "program.py", "cuda"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and done.stdout.startswith("modules "), done.stderr
        said.append(set(done.stdout.split()[1:]))
    assert "torch" in said[0] and said[1] - said[0] == {"gapless"}


def test_the_runner_of_a_copy_reports_a_sync_of_a_whole_program(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\nsys.modules['gapless'] = None\nimport torch\nx = torch.ones(3, device='cuda')\nx.sum().item()\n"
    )
    done = run(tmp_path, "-m", "watchdog_of_others.run", "--device-tensors", "cuda", "program.py")
    assert done.returncode == 1 and "program.py:5: host-size" in done.stderr, done.stderr
