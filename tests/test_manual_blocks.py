"""Every code block of the manual: run, its output compared with what stands below it, or marked with why it is not.

Blocks of Python run in this process; what they ask of a server at port 8000, one server for all answers. Of blocks of
shell the commands of `gapless` are read by their own parsers, and run where their output stands below; `curl` runs.
JSON and TOML are parsed. `<!-- not run: REASON -->` in the line above a block keeps it from all this, and below
the title of a page, by itself, all its blocks.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet
from served import Server

from gapless.cli import flags
from gapless.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "notes")
FENCE = re.compile(
    r"^(?P<mark><!-- not run: (?P<why>[^\n]+) -->\n+)?```(?P<kind>[^`\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PRINTED = re.compile(r"\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORT = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
PARSERS = {"json": json.loads, "toml": tomllib.loads}
KINDS = {"python", "sh", "text", "diff", "ini", "nginx", "yaml", *PARSERS}


class Block(NamedTuple):
    """A fenced block of a page: `printed` is the `text` block right below it, which is its output."""

    line: int
    kind: str
    text: str
    printed: str | None


class Read(Exception):
    """A command line was read to its end."""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks that are not marked; a `text` block right below another one is that one's output."""
    text = page.read_text(encoding="utf-8")
    if re.match(r"# [^\n]*\n\n<!-- not run: [^\n]* -->\n\n", text):
        return
    for found in FENCE.finditer(text):
        after = PRINTED.match(text, found.end())
        line = text.count("\n", 0, found.start("kind")) + 1
        if found["why"] is None:
            yield Block(line, found["kind"], found["text"], after[1] if after else None)


STARTS = re.compile(r"\bLLM\(|\bAsyncLLM\b|:8000|localhost")
"""Blocks with these start an engine, or ask a server"""
SHARP = ("README.md", "docs/start/server.md", "docs/start/script.md")
"""Pages that start something and stay in `make test`"""


def pages_with(kind: str) -> list[ParameterSet]:
    found = {str(page.relative_to(ROOT)): [one for one in blocks(page) if one.kind == kind] for page in PAGES}
    return [page_param(page, some) for page, some in found.items() if some]


def page_param(page: str, some: list[Block]) -> ParameterSet:
    """A page as a parameter: marked if its blocks start something."""
    starts = page not in SHARP and any(STARTS.search(block.text) for block in some)
    return pytest.param(page, marks=[pytest.mark.process] if starts else [])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--device", "cpu")
    yield running
    running.stop()


@pytest.fixture
def address(request: pytest.FixtureRequest):
    """The address of the server, which is started for the first block that asks one."""
    return lambda text: PORT.sub(lambda _: request.getfixturevalue("server").base, text)


def test_blocks_have_a_known_kind():
    for page in PAGES:
        unknown = [(block.line, block.kind) for block in blocks(page) if block.kind not in KINDS]
        assert not unknown, f"{page.name}: a block is one of {sorted(KINDS)}, or marked: {unknown}"


def test_blocks_of_data_can_be_parsed():
    for page in PAGES:
        for block in blocks(page):
            PARSERS.get(block.kind, str)(block.text)


def missing(code: str) -> str | None:
    """The first module that the code imports and that is not installed."""
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


@pytest.mark.parametrize("page", ["README.md", *pages_with("python")])
def test_python_of_a_page_prints_the_text_below_it(page, address, capsys, monkeypatch):
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**11)  # a busy machine would be late, and compute a page
    skipped = set()
    for block in blocks(ROOT / page):
        if block.kind != "python":
            continue
        if lacking := missing(block.text):
            skipped.add(lacking)
            continue
        names: dict[str, Any] = {"__name__": page}
        raised = run(address(block.text), names, expects=bool(block.printed))
        compare(f"{page}:{block.line}", block.printed, capsys.readouterr().out + raised)
        if page != "README.md":
            assert block.printed or "print(" not in block.text, f"{page}:{block.line} prints: show its output below"
    if skipped:
        pytest.skip(f"not installed: {', '.join(sorted(skipped))}")


def run(code: str, names: dict[str, Any], *, expects: bool) -> str:
    """Run the code; returns the first line of what it raised, where the page says that something comes of it."""
    try:
        exec(compile(code, "program.py", "exec"), names)
    except Exception as error:
        if not expects:
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        if hasattr(client := names.get("client"), "close") and not inspect.iscoroutinefunction(client.close):
            client.close()
    return ""


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_of_a_page_are_read_or_run(page, address, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write files
    for block in blocks(ROOT / page):
        if block.kind != "sh":
            continue
        for words in commands(block.text):
            where = f"{page}:{block.line}: {shlex.join(words)}"
            if words[0] == "gapless-san":  # the same command, of a distribution of its own
                words = ["gapless", "san", *words[1:]]
            if words[0] == "curl":
                done = subprocess.run([*map(address, words), "-sS", "--fail-with-body"], timeout=60, check=False)
                assert done.returncode == 0, f"{where}: {capfd.readouterr().out}"
            elif words[0] == "gapless" and block.printed:
                assert main([*map(address, words[1:])]) == 0, where
            elif words[0] == "gapless":
                read(words[1:], where, monkeypatch)
            else:
                pytest.fail(f"{where}: only gapless and curl are run; mark the block: <!-- not run: REASON -->")
        compare(f"{page}:{block.line}", block.printed, capfd.readouterr().out)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, which may take several lines, without variables set in front of it."""
    lines, command = iter(text.splitlines()), ""
    for line in lines:
        command += line
        if command.endswith("\\"):
            command = command[:-1]
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on in the next line
            command += "\n"
            continue
        command = ""
        while words and (words[0] == "export" or re.match(r"[A-Z_]+=", words[0])):
            words = words[1:]
        if words:
            yield words


def read(words: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a command read its flags, build its records, and do nothing more."""
    real = flags.Command.read

    def stop(command, argv, *env):
        settings = real(command, argv, *env)
        for config in command.configs:
            settings.build(config)
        raise Read

    with monkeypatch.context() as patch:
        patch.setattr(flags.Command, "read", stop)
        try:
            code = main(words)
        except Read:
            return
    assert code == 0, f"{where} is not read"


def compare(where: str, expected: str | None, printed: str) -> None:
    if expected is not None:
        assert tidy(printed) == tidy(expected), f"{where} prints something else"


def tidy(text: str) -> list[str]:
    """Lines without spaces at their ends."""
    return [line.rstrip() for line in text.strip().splitlines()]
