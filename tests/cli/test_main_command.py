"""The `gapless` command itself: finding a subcommand, errors, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gapless
from gapless.base.errors import ConfigError, EngineDeadError, RequestError
from gapless.cli import bench, kv, serve, trace
from gapless.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def test_version_and_help_are_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gapless {gapless.__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize(
    "typed, message",
    [("srve", "unknown command 'srve'; did you mean serve?"), ("qqq", "unknown command 'qqq'; see gapless --help")],
)
def test_an_unknown_command_is_refused_with_the_nearest_one(capsys, typed, message):
    assert main([typed]) == 2
    assert capsys.readouterr().err == f"gapless: error: {message}\n"


@pytest.mark.parametrize(
    "error, code, told",
    [
        (ConfigError("x"), 2, "gapless: error: x\n"),
        (RequestError("m/config.json:\n no such file"), 1, "gapless: error: m/config.json: no such file\n"),
        (EngineDeadError("x"), 1, "gapless: error: x\n"),
        (ModuleNotFoundError("No module named 'zmq'", name="zmq"), 1, "this command needs zmq, which is not installed"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_a_command_gives_its_exit_code_in_a_line(monkeypatch, capsys, error, code, told):
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(serve, "main", fail)
    assert main(["serve"]) == code
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == bool(told)


TABLES = {"gapless": COMMANDS, "bench": bench.BENCH_KINDS, "kv": kv.KV_KINDS, "trace": trace.TRACE_KINDS}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_place_in_a_table_of_commands_is_there(table):
    for _, place in table.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(f"gapless.cli.{module}"), function or "main")), place


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), ModuleNotFoundError("No module named 'gapless.x'", name="gapless.x")]
)
def test_a_bug_of_our_own_is_not_hidden(monkeypatch, error):
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(serve, "main", fail)
    with pytest.raises(type(error)):
        main(["serve"])


def test_a_reader_that_goes_away_is_no_traceback():
    code = "import sys\nfrom gapless.cli.main import main\nsys.exit(main(['--help']))"
    # The reader has gone before anything is written.
    command = [sys.executable, "-c", f"import os; os.close(0)\nimport time\n{code}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1
