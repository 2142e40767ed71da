"""The manual builds without a warning, and its tables and references are what the code and measurements make."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gapless.base.config import EngineConfig
from gapless.base.params import Param
from gapless.cli import bench, kv, trace
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.main import COMMANDS
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import specs
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.server.app import OTHER_KINDS, ROUTES
from gapless.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_WORDS, MOST_EVIDENCE_LINES = 40_000, 400
MADE = re.compile(r"<!-- table: \S+ -->.*?<!-- end -->|^```diff\n.*?^```$", re.DOTALL | re.MULTILINE)
"""Parts of a page that nobody reads as prose: generated tables, and diffs that tests apply"""
FLAG = r"(?<![\w-])--(?:\[no-\])?([a-z][a-z0-9-]*)"


def script(name: str) -> ModuleType:
    """A script of docs/_site, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_site" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("tables")


@pytest.mark.process
def test_manual_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page, words in (("reference/python", "from_engine_args"), ("reference/testing", "LeaseAudit")):
        assert words in (tmp_path / "site" / page / "index.html").read_text(encoding="utf-8"), page


def test_reference_pages_equal_the_generated_ones():
    for path, text in script("reference").written():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} has drifted: run python docs/_site/reference.py"


def words(page: Path) -> int:
    """The words of a page written by hand; signs alone, such as those of tables, are none."""
    return len([word for word in MADE.sub("", page.read_text(encoding="utf-8")).split() if re.search(r"\w", word)])


def test_the_manual_is_short():
    other = {"reference", "measurements", "notes"}
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in other]
    count = sum(map(words, pages))
    print(f"{count:,} words of {MOST_WORDS:,} in {len(pages)} pages")
    assert count <= MOST_WORDS, "shorten a page, or move history to docs/notes"
    lines = sum(page.read_text(encoding="utf-8").count("\n") for page in (DOCS / "evidence").rglob("*.md"))
    assert lines <= MOST_EVIDENCE_LINES


def test_causes_of_late_tokens_have_the_words_of_the_page():
    page = (DOCS / "guides" / "late-token.md").read_text(encoding="utf-8")
    ui = ROOT / "gapless" / "ui"
    fields = r'key: "\w+", name: "([^"]+)", mark: "(.)", help: "([^"]+)", mend: "([^"]+)"'
    causes = re.findall(fields, (ui / "causes.js").read_text(encoding="utf-8"))
    assert len(causes) == 9
    for name, mark, help_, mend in causes:
        assert f"| {mark} | {name} | {help_} | {mend} |" in page
    mends = re.findall(r'mend: "([^"]+)"', (ui / "why.js").read_text(encoding="utf-8"))
    assert len(mends) > 4 and all(f"| {mend} |" in page for mend in mends)


def reference(page: str) -> str:
    return (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")


def test_commands_and_flags_are_in_the_reference():
    page = reference("commands") + reference("flags")
    for name in COMMANDS:
        assert f"\n## {name}\n" in page, f"the reference lacks gapless {name}"
    for name, kinds in (("bench", bench.BENCH_KINDS), ("kv", kv.KV_KINDS), ("trace", trace.TRACE_KINDS)):
        for kind in kinds:
            assert f"\n### {name} {kind}\n" in page, f"the reference lacks gapless {name} {kind}"
    words = set(re.findall(FLAG, page))
    for record in (EngineConfig, ServerConfig, SamplingFlags, AbFlags, BenchFlags, EvalFlags):
        missing = [spec.spellings[0] for spec in specs(record) if spec.spellings[0].removeprefix("--") not in words]
        assert not missing, f"the reference lacks {missing}"


def test_flags_in_the_manual_belong_to_their_commands():
    parts = re.split(r"\n## ([a-z]+)\n", reference("commands"))[1:]
    known = {name: set(re.findall(FLAG, text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    assert known.keys() >= set(COMMANDS)
    shared = set(re.findall(FLAG, reference("flags") + reference("spellings")))
    commands = [
        (path, name, flags.partition("-- python")[0])
        for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
        if path.parent.name != "notes"
        for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for name, flags in re.findall(r"(?:^|[ /])gapless ([a-z]+) (.*)", block.replace("\\\n", " "), re.MULTILINE)
    ]
    assert len(commands) > 50
    for path, name, text in commands:
        wrong = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text)) - known.get(name, set()) - shared
        assert not wrong, f"{path.name}: gapless {name} {text}: {wrong}"


def cells(page: str) -> str:
    """The table rows of a guide."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("| ")).replace("\\|", "|")


def test_lines_of_the_troubleshooting_are_printed_by_the_code():
    source = "".join(path.read_text(encoding="utf-8") for path in code_in(ROOT / "gapless"))
    said = re.sub(r"\{[^{}\n]*\}|%s", "", re.sub(r'"\s*\n\s*f?"', "", source))
    lines = re.findall(r"^\| (?:[345]\d\d )?(`[^|]*?) \|", cells("guides/troubleshooting.md"), re.MULTILINE)
    assert len(lines) > 20
    for line in [part for cell in lines for part in re.findall("`([^`]+)`", cell)]:
        assert line in said, f"no code prints {line!r}"


def test_routes_listed_as_missing_are_missing():
    said = re.findall(r"[^|]* answer 404", cells("guides/not-supported.md"))
    named = re.findall("`(/[^`]*)`", " ".join(said))
    assert named and not set(named) - set(OTHER_KINDS)


def test_routes_listed_as_the_same_are_there():
    routes = {entry.path for entry in ROUTES if entry.listed}
    for page in ("from-vllm", "from-sglang", "from-llama-cpp"):
        rows = re.findall(r"^\| ([^|]*) \| the same", cells(f"start/{page}.md"), re.MULTILINE)
        named = [path for row in rows for path in re.findall("`(/[^`]*)`", row) if not path.endswith("...")]
        assert named and not set(named) - routes, page


def test_environment_variables_are_in_the_manual():
    page = reference("environment")
    for path in sorted((ROOT / "gapless").rglob("*")):
        if path.suffix == ".py":
            named = re.findall(r"[\"'$](GAPLESS_[A-Z_]+)\b", path.read_text(encoding="utf-8"))
        elif path.suffix == ".cpp":
            named = re.findall(r'getenv\("(GAPLESS_[A-Z_]+)', path.read_text(encoding="utf-8"))
        else:
            continue
        assert not [name for name in named if name not in page and name != "GAPLESS_"], path


def test_sampling_table_has_a_row_for_an_added_parameter(tables):
    entry = Param("penalty", float, 0.0, "for this test", -2.0, 2.0)
    assert tables.sampling((entry,))[-1] == "| `penalty` | float | -2.0 to 2.0 | 0.0 | for this test |"


def test_tables_equal_the_generated_ones(tables):
    pages = list(tables.pages())
    marked = [name for page in pages for name in re.findall(r"<!-- table: (\S+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(marked) == sorted(tables.TABLES), "each table is shown once"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert tables.refreshed(text) == text, f"{page.name} has drifted: run python docs/_site/tables.py"


def test_the_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if linter is None:
        pytest.skip("hadolint is not installed: it is in the extra 'dev', on Linux")
    subprocess.run([linter, str(ROOT / "Dockerfile")], check=True)


def test_names_of_the_walks_are_in_the_code():
    text = (DOCS / "concepts" / "walks.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[1]) for row in rows] == [*range(1, 9), *range(1, 9), *range(1, 7)]
    anywhere = names_in(ROOT / "gapless")
    modules = {path.stem for path in (ROOT / "gapless").rglob("*.py")}
    for row in rows:
        files = re.findall(r"`([a-z_]+/[a-z_]*(?:\.py)?)`", row[2])
        there = set().union(*(names_in(ROOT / "gapless" / file) for file in files)) or anywhere
        assert not parts(row[2]) - there, files
        assert not parts(row[3] + row[4]) - anywhere - modules


def parts(cell: str) -> set[str]:
    """The names in `code`, each part of a dotted one."""
    return {part for name in re.findall(r"`([A-Za-z_.]+)`", cell) for part in name.split(".")}


def names_in(place: Path) -> set[str]:
    """The names of functions, classes and fields."""
    source = "".join(path.read_text(encoding="utf-8") for path in code_in(place))
    return {one or other for one, other in re.findall(r"\b(?:def|class) (\w+)|^    (\w+): ", source, re.MULTILINE)}


def code_in(place: Path) -> list[Path]:
    return list(place.rglob("*.py")) if place.is_dir() else [place]
