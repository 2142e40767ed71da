"""Lines `allow NAME -- REASON`: waits inside a program's own context managers and decorators are allowed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from gapless.guard.suppress import allowances, gather

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")

HELPERS = """
import contextlib, functools, io

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


ASYNC = """
import contextlib, functools, io

class Waiting:
    shared = None
    def __init__(self):
        self.entered = 0
    def __enter__(self):
        self.entered += ITEM
        return self
    def __exit__(self, *error):
        pass
    async def __aenter__(self):
        return self.__enter__()
    async def __aexit__(self, *error):
        pass

ITEM = 1
shared = Waiting()

class Lenient(Waiting):
    def __exit__(self, *error):
        pass

class Tools:
    @staticmethod
    def static(x):
        return x.tolist()
    @classmethod
    def made(cls, x):
        return cls, x.tolist()

@contextlib.contextmanager
def ok():
    yield

@contextlib.asynccontextmanager
async def aok():
    yield

async def fetch(x):
    return x.tolist()

@functools.lru_cache
def cached():
    return 1

def opens(name):
    return io.StringIO(name * 12)
"""

ASYNC_PROGRAM = """
import asyncio, inspect, threading, torch
from tools import sync
from tools.sync import Lenient, Tools, Waiting, aok, fetch, ok, opens, shared

x = torch.ones(3, device="cuda")

class Own(Waiting):
    pass

@ok()
async def one():
    return x.tolist()

@aok()
async def other():
    return x.tolist()

async def overlapping(first, then):
    with shared:
        first.set()
        await then.wait()
        x.tolist()

async def main():
    async with aok(), Waiting() as entered:
        x.tolist()
    assert isinstance(entered, Waiting) and isinstance(shared, Waiting) and inspect.iscoroutinefunction(fetch)
    assert await one() == await other() == await fetch(x) == [1, 1, 1]
    begun, ended = asyncio.Event(), asyncio.Event()
    ended.set()
    await asyncio.gather(overlapping(begun, begun), overlapping(begun, ended))

asyncio.run(main())
with Own() as own:
    x.tolist()
assert type(own) is Own
sync.ITEM = x
with Waiting():
    pass
sync.ITEM = 1
assert Tools().static(x) == Tools.static(x) == [1, 1, 1] and Tools().made(x)[0] is Tools
assert opens("line\\n").readline() == "line\\n" and len(list(opens("line\\n"))) == 12
with Lenient():
    pass
x.tolist()
"""

ASYNC_LINES = [
    f"allow tools.sync.{name} -- meant"
    for name in ("Waiting", "shared", "ok", "aok", "fetch", "opens", "Tools.static", "Tools.made")
]


def test_classes_and_coroutines_are_allowed_and_stay_themselves(san_source, folder):
    (folder / "tools" / "sync.py").write_text(ASYNC)
    (folder / ".gapless-san").write_text("\n".join(ASYNC_LINES))
    code, report, out = san_source(ASYNC_PROGRAM)
    line = len(ASYNC_PROGRAM.splitlines())
    assert [(found["line"], found["rule"]) for found in report["findings"]] == [(line, "host-read")], out.err
    assert code == 1 and len(report["allowed"]) >= 8
    waiting = sys.modules["tools.sync"].Waiting
    assert "__call__" not in vars(waiting) and waiting.__enter__.__code__.co_filename.endswith("sync.py")
    assert waiting.__enter__.__qualname__ == "Waiting.__enter__"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cached", "a _lru_cache_wrapper"), ("ITEM", "a int"), ("C", "the class RLock"), ("gen", "a function")],
)
def test_a_form_that_cannot_be_allowed_is_refused_by_name(san_source, folder, name, kind):
    more = "\nfrom _thread import RLock as C\ndef gen():\n    yield\n"
    (folder / "tools" / "sync.py").write_text(ASYNC + more)
    code, _, out = san_source("import tools.sync\n", "--suppress", f"allow tools.sync.{name} -- meant")
    assert code == 1 and f"ValueError: allow tools.sync.{name}: {kind} cannot be allowed: " in out.err, out.err


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
