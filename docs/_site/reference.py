"""Reference pages of the manual that follow from the code: `python docs/_site/reference.py` writes them again.

A test fails when one of them differs from what this script writes. MkDocs runs the file as a hook.
"""

from __future__ import annotations

import inspect
import io
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
sys.path.insert(0, str(REFERENCE.parents[1]))

import gapless  # noqa: E402
from gapless.base.config import EngineConfig  # noqa: E402
from gapless.base.spellings import METHODS, SAMPLING, TABLE, Fate, Foreign  # noqa: E402
from gapless.cli import bench, kv, trace  # noqa: E402
from gapless.cli.main import COMMANDS, main  # noqa: E402
from gapless.cli.spec import Spec, specs  # noqa: E402
from gapless.engine.stats import Stats  # noqa: E402
from gapless.server.app import ROUTES  # noqa: E402
from gapless.server.auth import Access  # noqa: E402
from gapless.server.config import ServerConfig  # noqa: E402
from gapless.server.metrics import Metrics  # noqa: E402

_RECORDS = (("Engine", EngineConfig), ("Server", ServerConfig))
_KINDS = {"bench": bench.BENCH_KINDS, "kv": kv.KV_KINDS, "trace": trace.TRACE_KINDS}
_ACCESS = {Access.PUBLIC: "everyone", Access.USER: "holders of a key", Access.OPERATOR: "operators"}


def on_config(config: Any) -> Any:
    """Put the version into the foot of each page."""
    config.copyright = f"gapless {gapless.__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the icon of the live page, which is the site's logo."""
    from mkdocs.structure.files import File

    icon = REFERENCE.parents[1] / "gapless" / "ui" / "icon.svg"
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with links that leave docs/ as plain text: the site has no copy of what they name.

    The search does not find notes.
    """
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "notes":
        page.meta["search"] = {"exclude": True}

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
            lines += ["", f"### {group}", "", "| flag | value | default | what it does |", "|---|---|---|---|"]
            lines += [_flag_row(spec) for spec in members]
    return "\n".join(lines) + "\n"


def _flag_row(spec: Spec) -> str:
    names = ", ".join(f"`{name}`" for name in spec.spellings)
    return f"| {names} | {_value(spec)} | {_default(spec)} | {_cell(spec.help)} |"


def _value(spec: Spec) -> str:
    """Return what may follow the flag; nothing for a switch."""
    if spec.kind is bool:
        return ""
    kind = {int: "whole number", float: "number", str: "text"}[spec.kind]
    return (", ".join(f"`{choice}`" for choice in spec.choices) or kind) + ", several" * spec.many


def _default(spec: Spec) -> str:
    empty = spec.default is None or spec.default == ()
    return "" if empty else f"`{str(spec.default).lower() if spec.kind is bool else spec.default}`"


def commands_page() -> str:
    """Return Markdown with what `--help` of every command prints."""
    lines = [
        "# Commands",
        "",
        "What `gapless COMMAND --help` prints, without the flags of models and the server: [Flags](flags.md).",
    ]
    for name, (about, _) in COMMANDS.items():
        lines += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}."]
        kinds = _KINDS.get(name)
        for words in [(name, kind) for kind in kinds] if kinds else [(name,)]:
            lines += [*(["", f"### {' '.join(words)}"] if kinds else []), "", "```text", _help_of(*words), "```"]
    return "\n".join(lines) + "\n"


def _help_of(*words: str) -> str:
    """Return what the command prints for --help, at a fixed width, without the groups of flags.md."""
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}), redirect_stdout(printed):
        try:
            code: Any = main([*words, "--help"])
        except SystemExit as ended:  # argparse ends the process once it has printed the help
            code = ended.code
    assert code in (0, None), f"gapless {' '.join(words)} --help ended with {code}"
    parts = printed.getvalue().strip().split("\n\n")
    left_out = [part for part in parts if re.match(r"[A-Z][\w ]*:\n", part) and _is_shared(part)]
    more = [f"{', '.join(part.partition(':')[0] for part in left_out)}: see Flags"] if left_out else []
    return "\n\n".join([part for part in parts if part not in left_out] + more)


def _is_shared(group: str) -> bool:
    """Return whether flags.md already has the flags of this group of a help text."""
    shared = {name for _, record in _RECORDS for spec in specs(record) for name in spec.spellings}
    first = group.split("\n")[1].split()[0].strip(",").replace("[no-]", "")
    return group.startswith("Other spellings") or first in shared


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


_FATES = (
    (Fate.SET, "Translated", "the same as"),
    (Fate.NOTHING, "Change nothing", "why"),
    (Fate.NEEDS, "Change nothing beside another flag", "flag that is needed"),
    (Fate.INSTEAD, "Written otherwise, or not at all", "what to write, or why not"),
    (Fate.NOT_YET, "Not available yet", "remark"),
)


def spellings_page() -> str:
    """Return Markdown with the flags, arguments and methods of other engines, by what they do here."""
    lines = [
        "# Flags of other engines",
        "",
        "How `gapless` answers flags of vLLM, SGLang, llama.cpp and transformers. Flags that mean the same here are in",
        "[Flags](flags.md), under their names. The first row that has a flag and its value applies.",
    ]
    for fate, title, what in _FATES:
        lines += ["", f"## {title}", "", f"| flag | at the value | {what} |", "|---|---|---|"]
        lines += [_foreign_row(row) for row in TABLE if row.fate is fate]
    lines += ["", "## Sampling parameters", "", "| name | changes nothing at | otherwise |", "|---|---|---|"]
    for name, (values, why) in SAMPLING.items():
        lines.append(f"| `{name}` | {', '.join(f'`{value!r}`' for value in values)} | {_cell(why)} |")
    lines += ["", "## Methods of `LLM`", "", "| name | here |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(why)} |" for name, why in METHODS.items()]
    return "\n".join(lines) + "\n"


def _foreign_row(row: Foreign) -> str:
    names = ", ".join(f"`{name}`" for name in row.names)
    at = {"": "", "*": "any", "+": "any, several"}.get(row.at) or ", ".join(f"`{value}`" for value in row.at.split())
    at = _cell(f"with `{row.at[1:]}`") if row.at.startswith("~") else at
    here = (
        f"`--{row.field.replace('_', '-')}` `{row.text.replace('{}', 'VALUE')}`" if row.fate is Fate.SET else row.text
    )
    return f"| {names} | {at if row.at else ''} | {_cell(here)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_NOTE = "\n<!-- Written by docs/_site/reference.py. -->\n"
PAGES: dict[str, Callable[[], str]] = {
    "flags": flags_page, "commands": commands_page, "http": http_page, "metrics": metrics_page,
    "spellings": spellings_page,
}  # fmt: skip


def written() -> Iterator[tuple[Path, str]]:
    """Yield each page's file and text."""
    for name, page in PAGES.items():
        yield REFERENCE / f"{name}.md", page() + _NOTE


if __name__ == "__main__":
    for path, text in written():
        path.write_text(text, encoding="utf-8")
