"""Reference pages of the manual that follow from the code: commands, flags, HTTP routes and metrics.

MkDocs runs this file as a hook. The pages exist only in the site, so they cannot drift from the records.
"""

from __future__ import annotations

import inspect
import io
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from gapless.base.config import EngineConfig
from gapless.cli import bench, kv, trace
from gapless.cli.main import COMMANDS, main
from gapless.cli.spec import Spec, specs
from gapless.engine.seam import Stats
from gapless.server.app import ROUTES
from gapless.server.auth import Access
from gapless.server.config import ServerConfig
from gapless.server.metrics import Metrics

_RECORDS = (("Engine", EngineConfig), ("Server", ServerConfig))
_KINDS = {"bench": bench.KINDS, "kv": kv.KINDS, "trace": trace.KINDS}
_ACCESS = {Access.PUBLIC: "everyone", Access.USER: "holders of a key", Access.OPERATOR: "operators"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    pages = {"flags": flags_page, "commands": commands_page, "http": http_page, "metrics": metrics_page}
    for name, page in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return the page with links that leave docs/ as plain text: the site has no copy of what they name."""
    folder = posixpath.dirname(page.file.src_uri)

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("../") else link[0]

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)]*)\)", kept, markdown)


def flags_page() -> str:
    """Return Markdown with one table for each group of flags of `gapless serve`."""
    lines = [
        "# Flags",
        "",
        "`gapless serve` takes all of these; `run` and `LLM(...)` take those of the engine. `LLM` spells them as",
        "keyword arguments (`--max-model-len 4096` is `max_model_len=4096`). The environment variable of a flag is",
        "`GAPLESS_` and its name in capitals, with `_` for `-`. [Commands](commands.md) has the flags of all",
        "commands as they print them.",
    ]
    for title, record in _RECORDS:
        lines += ["", f"## {title}"]
        groups: dict[str, list[Spec]] = {}
        for spec in specs(record):
            groups.setdefault(spec.group, []).append(spec)
        for group, members in groups.items():
            lines += ["", f"### {group}", "", "| flag | default | what it does |", "|---|---|---|"]
            lines += [_flag_row(spec) for spec in members]
    return "\n".join(lines) + "\n"


def _flag_row(spec: Spec) -> str:
    names = ", ".join(f"`{name}`" for name in spec.spellings)
    words = spec.help + (f" ({', '.join(spec.choices)})" if spec.choices else "")
    return f"| {names} | {_default(spec)} | {_cell(words)} |"


def _default(spec: Spec) -> str:
    empty = spec.default is None or spec.default == ()
    return "" if empty else f"`{str(spec.default).lower() if spec.kind is bool else spec.default}`"


def commands_page() -> str:
    """Return Markdown with what `--help` of every command prints."""
    lines = [
        "# Commands",
        "",
        "What `gapless COMMAND --help` prints. The flags of models and of sampling, which several commands share, are",
        "explained under [Flags](flags.md) and [Sampling parameters](../sampling.md).",
    ]
    for name, (about, _) in COMMANDS.items():
        lines += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}."]
        kinds = _KINDS.get(name)
        for words in [(name, kind) for kind in kinds] if kinds else [(name,)]:
            lines += [*(["", f"### {' '.join(words)}"] if kinds else []), "", "```text", _help_of(*words), "```"]
    return "\n".join(lines) + "\n"


def _help_of(*words: str) -> str:
    """Return what the command prints for --help, at a fixed width."""
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}), redirect_stdout(printed):
        try:
            code: Any = main([*words, "--help"])
        except SystemExit as ended:  # argparse ends the process once it has printed the help
            code = ended.code
    assert code in (0, None), f"gapless {' '.join(words)} --help ended with {code}"
    return printed.getvalue().strip()


def http_page() -> str:
    """Return Markdown with one row for each HTTP route."""
    lines = [
        "# HTTP",
        "",
        "Bodies and errors are OpenAI's, and Anthropic's under `/v1/messages`. With `--api-key`, a route that is not",
        "open to everybody needs `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        "",
        "| route | methods | open to | what it answers |",
        "|---|---|---|---|",
    ]
    for entry in (each for each in ROUTES if each.listed):
        words = inspect.getdoc(entry.handler) or ""
        first = " ".join(words.split("\n\n")[0].split())
        lines.append(f"| `{entry.path}` | {', '.join(entry.methods)} | {_ACCESS[entry.access]} | {_cell(first)} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return Markdown with one row for each series of `/metrics`."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` answers in Prometheus' text format. Names that begin with `vllm:` are those of vLLM, so that",
        "its dashboards work; the rest are ours. [Observe](../guides/observe.md#metrics) explains how they are meant.",
        "",
        "| series | type | what it is |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {kind} | {_cell(text)} |" for name, kind, text in _series()]
    return "\n".join(lines) + "\n"


def _series() -> Iterator[tuple[str, str, str]]:
    """Yield (name, type, help) of every series of an idle server."""
    helps: dict[str, str] = {}
    for line in Metrics("model").render(Stats(), None, up=True).decode().splitlines():
        if line.startswith("# HELP "):
            _, _, name, text = line.split(" ", 3)
            helps[name] = text
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            yield name, kind, helps[name]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
