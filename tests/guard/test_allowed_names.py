"""Lines `allow NAME -- REASON`: waits inside a program's own context managers and decorators are allowed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from gapless.guard.suppress import allowances, gather

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")

HELPERS = """
import contextlib, functools

@contextlib.contextmanager
def _noop():
    yield "entered"

def may_wait(first_only=False):
    return _noop()

class Waiting:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return False

class Holder:
    at_end = contextlib.nullcontext()

def marked(function):
    @functools.wraps(function)
    def run(x):
        return function(x)
    return run

def fetch(x):
    return x.tolist()
"""

PROGRAM = """
import torch
from tools.sync import Holder, Waiting, fetch, marked, may_wait

x = torch.ones(3, device="cuda")
with may_wait(first_only=True) as value:
    assert value == "entered"
    x.tolist()
with Waiting():
    x.tolist()
with Holder.at_end:
    x.tolist()

@may_wait()
def one(x):
    return x.tolist()

@marked
def other(x):
    return x.tolist()

assert one(x) == other(x) == fetch(x) == [1, 1, 1]
try:
    with may_wait():
        raise KeyError
except KeyError:
    pass
x.tolist()
"""

LINES = """
allow tools.sync.may_wait -- vLLM's way
allow tools.sync.Waiting -- a class
allow tools.sync.Holder.at_end -- an object
allow tools.sync.marked -- a decorator
allow tools.sync.fetch -- a function
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "sync.py").write_text(HELPERS)
    yield tmp_path
    for name in ("tools.sync", "tools"):
        sys.modules.pop(name, None)


def test_waits_inside_the_named_functions_are_allowed_with_their_reasons(san_source, folder):
    finders = list(sys.meta_path)
    code, report, out = san_source(PROGRAM)
    assert code == 1 and report["reports"] == 7, out.err
    sys.modules.pop("tools.sync")
    (folder / ".gapless-san").write_text(LINES)
    code, report, out = san_source(PROGRAM)
    line = len(PROGRAM.splitlines())
    assert [(found["line"], found["rule"]) for found in report["findings"]] == [(line, "host-read")], out.err
    assert {entry["reason"] for entry in report["allowed"]} == {
        "vLLM's way", "a class", "an object", "a decorator", "a function",
    }  # fmt: skip
    module: ModuleType = sys.modules["tools.sync"]
    assert "_noop" in module.may_wait.__code__.co_names and isinstance(module.Waiting, type)
    assert sys.meta_path == finders


def test_a_flag_is_read_as_a_line_of_the_file_is(san_source, folder):
    source = 'import torch\nfrom tools.sync import fetch\nfetch(torch.ones(2, device="cuda"))\n'
    code, report, _ = san_source(source, "--suppress", "allow tools.sync.fetch -- the end")
    assert (code, [entry["reason"] for entry in report["allowed"]]) == (0, ["the end"])


def test_lines_of_both_kinds_are_told_apart(tmp_path):
    file = tmp_path / "lines"
    file.write_text("allow a.b.c -- because  # all of it\nengine/allow.py host-read -- known\n")
    assert allowances(["allow d.e -- too"], str(file)) == {"d.e": "too", "a.b.c": "because"}
    assert [one.path for one in gather(["allow d.e -- too"], str(file))] == ["engine/allow.py"]
    with pytest.raises(ValueError, match=r"expected `PATH\[:LINE\] \[RULE\] -- reason`"):
        gather(["allow d.e"], str(file))
