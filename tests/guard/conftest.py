"""Programs under `gapless san` in the process of the test."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from gapless.guard import run


@pytest.fixture
def san_file(tmp_path, monkeypatch, capsys):
    """Runs a file; gives the exit code, the report, and what was printed."""

    def started(path, *flags: str, args: tuple[str, ...] = ()):
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        out = tmp_path / "report.json"
        code = run.main(["--json", str(out), *flags, str(path), *args])
        return code, json.loads(out.read_text()), capsys.readouterr()

    return started


@pytest.fixture
def san_source(san_file, tmp_path, monkeypatch):
    """Runs a program of this text in a folder of its own."""

    def started(source: str, *flags: str, args: tuple[str, ...] = ()):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(source))
        monkeypatch.chdir(tmp_path)
        return san_file(program, *flags, args=args)

    return started
