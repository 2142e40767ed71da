"""The manual builds without a warning, its tables are those of the measurements, and its Python runs."""

from __future__ import annotations

import html
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import Server

from gapless import guard
from gapless.base.config import EngineConfig
from gapless.base.params import Param
from gapless.cli import bench, kv, trace
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.main import COMMANDS
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import specs
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUNNABLE = (
    "README.md",
    "docs/start/script.md",
    "docs/guides/offline.md",
    "docs/guides/sampling.md",
    "docs/guides/speculation.md",
    "docs/guides/lora.md",
    "docs/guides/tiers.md",
    "docs/guides/testing.md",
)
ASKING = (
    "docs/start/server.md",
    "docs/guides/tools.md",
    "docs/guides/structured.md",
    "docs/guides/responses.md",
    "docs/guides/messages.md",
)
"""Pages whose Python asks a server at port 8000"""


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the manual, built strictly."""
    site = tmp_path_factory.mktemp("manual") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_the_manual_builds_without_a_warning(built):
    for page, words in (
        ("reference/flags", "--max-model-len"),
        ("reference/http", "/v1/chat/completions"),
        ("reference/metrics", "vllm:num_requests_running"),
        ("reference/python", "AsyncLLM"),
        ("reference/testing", "LeaseAudit"),
    ):
        assert words in (built / page / "index.html").read_text(encoding="utf-8"), page


def test_every_command_and_every_flag_is_in_the_reference(built):
    page = html.unescape((built / "reference" / "commands" / "index.html").read_text(encoding="utf-8"))
    for name in COMMANDS:
        assert f'<h2 id="{name}">' in page, f"the reference lacks gapless {name}"
    for name, kinds in (("bench", bench.KINDS), ("kv", kv.KINDS), ("trace", trace.KINDS)):
        for kind in kinds:
            assert f'<h3 id="{name}-{kind}">' in page, f"the reference lacks gapless {name} {kind}"
    words = set(re.findall(r"(?<![\w-])--(?:\[no-\])?([a-z][a-z0-9-]*)", page))
    for record in (EngineConfig, ServerConfig, SamplingFlags, AbFlags, BenchFlags, EvalFlags):
        missing = [spec.spellings[0] for spec in specs(record) if spec.spellings[0].removeprefix("--") not in words]
        assert not missing, f"the reference lacks {missing}"


def flags_by_command(page: str) -> dict[str, set[str]]:
    """Return the flags that the reference lists for each command, those of its kinds among them."""
    parts = re.split(r'<h2 id="([a-z]+)">', page)[1:]
    flag = r"(?<![\w-])--(?:\[no-\])?([a-z][a-z0-9-]*)"
    return {name: set(re.findall(flag, text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_every_flag_of_a_command_in_the_manual_is_one_of_that_command(built):
    page = html.unescape((built / "reference" / "commands" / "index.html").read_text(encoding="utf-8"))
    known = flags_by_command(page)
    assert known.keys() >= set(COMMANDS)
    commands = [
        (path, name, flags.partition("-- python")[0])
        for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
        for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for name, flags in re.findall(r"(?:^|[ /])gapless ([a-z]+) (.*)", block.replace("\\\n", " "), re.MULTILINE)
    ]
    assert len(commands) > 50
    for path, name, text in commands:
        wrong = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text)) - known.get(name, set())
        assert not wrong, f"{path.name}: gapless {name} {text}: {wrong}"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "_site" / "tables.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_sampling_parameter_that_is_added_is_in_the_table(tables):
    entry = Param("penalty", float, 0.0, "for this test", -2.0, 2.0)
    assert tables.sampling((entry,))[-1] == "| `penalty` | float | -2.0 to 2.0 | 0.0 | for this test |"


def test_every_table_is_what_the_measurements_and_registries_make(tables):
    pages = list(tables.pages())
    assert {page.name for page in pages} >= {"README.md", "peers.md", "gpu.md"}
    marked = [name for page in pages for name in re.findall(r"<!-- table: (\S+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(marked) == sorted(tables.TABLES), "each table is shown once"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert tables.refreshed(text) == text, f"{page.name} has drifted: run python docs/_site/tables.py"


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_of_a_page_runs(page, capsys):
    blocks = python_blocks(page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})
    if "print(" in "".join(blocks):
        assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def server():
    running = Server("--device", "cpu")
    yield running
    running.stop()


@pytest.mark.parametrize("page", ASKING)
def test_the_python_of_a_page_is_answered_by_a_server(page, server, capsys):
    if "import anthropic" in "".join(python_blocks(page)):
        pytest.importorskip("anthropic")
    for block in python_blocks(page):
        assert "http://127.0.0.1:8000" in block or "LLM(" in block
        names = {"__name__": page}
        exec(compile(block.replace("http://127.0.0.1:8000", server.base), page, "exec"), names)
        if "client" in names:
            names["client"].close()
        assert capsys.readouterr().out.strip()


def test_the_first_example_of_the_sanitizer_finds_its_sync():
    example = python_blocks("docs/guides/sanitize.md")[0]
    with pytest.raises(guard.SyncError, match="bool"):
        exec(compile(example, "sanitize.md", "exec"), {})


def test_the_second_example_of_the_sanitizer_runs(capsys):
    example = python_blocks("docs/guides/sanitize.md")[1]
    exec(compile(example, "sanitize.md", "exec"), {"run_my_pipeline": lambda: torch.ones(8).sum()})
    assert capsys.readouterr().out.strip() == "[]"


def test_the_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if linter is None:
        pytest.skip("hadolint is not installed: it is in the extra 'dev', on Linux")
    subprocess.run([linter, str(ROOT / "Dockerfile")], check=True)


def test_every_name_of_the_walks_is_in_the_code():
    text = (DOCS / "concepts" / "walks.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [len(walk) for walk in split_at_one(rows)] == [8, 8, 6]
    for row in rows:
        named = re.findall(r"`([a-z_]+/[a-z_]*(?:\.py)?)`", row[2])
        found = [path for name in named for path in code_in(ROOT / "gapless" / name)] or code_in(ROOT / "gapless")
        source = "".join(path.read_text(encoding="utf-8") for path in found)
        for name in re.findall(r"`([A-Za-z_.]+)`", row[2]):
            assert all(defines(source, part) for part in name.split(".")), f"{name} is not in {named}"


def test_what_carries_a_thing_through_the_walks_is_in_the_code():
    text = (DOCS / "concepts" / "walks.md").read_text(encoding="utf-8")
    files = code_in(ROOT / "gapless")
    source, modules = "".join(path.read_text(encoding="utf-8") for path in files), {path.stem for path in files}
    for row in (line.split("|") for line in text.splitlines() if re.match(r"\| \d", line)):
        for name in re.findall(r"`([A-Za-z_.]+)`", row[3] + row[4]):
            assert all(part in modules or defines(source, part) for part in name.split(".")), f"{name} is nowhere"


def defines(source: str, name: str) -> bool:
    """Whether a function, a class or a field has this name."""
    return re.search(rf"\b(def|class) {name}\b|^    {name}: ", source, re.M) is not None


def code_in(place: Path) -> list[Path]:
    return list(place.rglob("*.py")) if place.is_dir() else [place]


def split_at_one(rows: list[list[str]]) -> list[list[list[str]]]:
    """Return the rows of each table: a table's first row has the number 1."""
    starts = [place for place, row in enumerate(rows) if row[1].strip() == "1"] + [len(rows)]
    return [rows[start:end] for start, end in itertools.pairwise(starts)]
