"""An A/B report as GitHub-flavoured Markdown, to paste into a pull request, and as one self-contained HTML file.

The file holds the data, the renderer and the style sheet of `gapless/ui`, inline.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

SIGNS = {"better": "✓", "worse": "✗", "same": "≈", "unknown": "?"}
TEST_NAMES = {
    "crossover": "Cross-over t test over pairs of runs",
    "permutation": "Sign-flip permutation test over pairs of runs",
    "welch": "Welch's t test over runs",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="report"><noscript>The figures are in this file as JSON; showing them needs JavaScript.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""
_GROUND = "body { margin: 0; background: Canvas; }\n"
_START = """
renderReport(document.getElementById("report"), JSON.parse(document.getElementById("data").textContent));
"""


def render_markdown(report: Mapping[str, Any]) -> str:
    """Results, the sides, and caveats."""
    a, b = report["arms"]
    parts = [
        f"### A/B: A = `{a['name']}`, B = `{b['name']}`",
        tokens_line(report["tokens"]),
        _results(report),
        _notes(report),
        _sides(report),
        _facts(report),
        _bullets("To keep in mind", report["warnings"]),
        _bullets("Rules", [rule_line(rule) for rule in report["rules"]]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tokens_line(tokens: Mapping[str, Any]) -> str:
    if not tokens["compared"]:
        return "**Same tokens?** No answers could be compared."
    if not tokens["differ"]:
        return f"**Same tokens: yes**, all {tokens['compared']} answers (compared by {tokens['by']})."
    first = tokens["first"]
    return (
        f"**Same tokens: NO**, {tokens['differ']} of {tokens['compared']} answers differ (compared by {tokens['by']}). "
        f"First: seed {first['seed']}, prompt {first['place']}, position {first['at']}: "
        f"A has {first['a'] or 'ended'}, B has {first['b'] or 'ended'}."
    )


def rule_line(rule: Mapping[str, Any]) -> str:
    return f"{'✗' if rule['failed'] else '✓'} `--fail-if {rule['rule']}`" + (f": {rule['why']}" if rule["why"] else "")


def _results(report: Mapping[str, Any]) -> str:
    n, level = report["design"]["pairs"], f"{100 * (1 - report['design']['alpha']):g} % interval"
    head = ["metric", f"A ({n})", f"B ({n})", "Δ", level, "p (Holm)", "", "detectable", "behind the tail"]
    rows = [[_label(row), *_row(row)] for row in report["metrics"]]
    return _table(head, ["---", *["---:"] * 5, ":-:", "---:", "---:"], rows)


def _label(row: Mapping[str, Any]) -> str:
    unit = " [ms]" if row["unit"] == "ms" else ""
    return f"{row['label']}{unit} {'↑' if row['higher_is_better'] else '↓'}"


def _row(row: Mapping[str, Any]) -> list[str]:
    tail = row["a_tail"]
    return [
        with_spread(row["a_mean"], row["a_std"]),
        with_spread(row["b_mean"], row["b_std"]),
        percent(row["delta"]),
        "n/a" if row["low"] is None else f"{percent(row['low'])} … {percent(row['high'])}",
        p_value(row["p_holm"]),
        SIGNS[row["verdict"]],
        "n/a" if row["detectable"] is None else percent(row["detectable"]).lstrip("+"),
        f"{tail['behind']} of {tail['samples']}; {tail['behind_a_run']} a run" if tail else "",
    ]


def _notes(report: Mapping[str, Any]) -> str:
    design = report["design"]
    return (
        f"Mean ± sample standard deviation over runs ({design['order']}). {TEST_NAMES[design['test']]}; p is raised "
        f"for the {len(report['metrics'])} metrics (Holm). ✓ better, ✗ worse (p < {design['alpha']:g}), ≈ within "
        f"noise. Detectable: what this many runs call in {design['power']:.0%} of experiments."
    )


def _sides(report: Mapping[str, Any]) -> str:
    arms = report["arms"]
    lines = {
        "own flags": [f"`{' '.join(arm['own_flags'])}`" if arm["own_flags"] else arm["url"] or "none" for arm in arms],
        "all flags": [_all_flags(arm) for arm in arms],
        "model": [_model(arm) for arm in arms],
        "version": [_version(arm) for arm in arms],
        "runs": [str(arm["runs"]) for arm in arms],
        "completed / failed": [
            f"{arm['completed']} / {arm['failed']} ({with_spread(*arm['completed_a_run'])} a run)" for arm in arms
        ],
        "prompt / output tokens": [f"{arm['prompt_tokens']} / {arm['output_tokens']}" for arm in arms],
        "duration of a run": [_range(arm["duration_s"], " s") for arm in arms],
        "others' load before a run": [_range(arm["busy_before"]) for arm in arms],
        "load average": [_range(arm["load_average"]) for arm in arms],
    }
    return _table(["", "A", "B"], ["---"] * 3, [[name, *cells] for name, cells in lines.items()])


def _all_flags(arm: Mapping[str, Any]) -> str:
    """Return the flags that it was started with, or the settings that a running gapless reports."""
    settings = arm["server"].get("settings")
    if not arm["flags"] and settings is None:
        return "n/a"
    listed = [f"{name}={value}" for name, value in (settings or {}).items()]
    words = " ".join(arm["flags"] or listed)
    return f"`{words}`" if words else "defaults"


def _model(arm: Mapping[str, Any]) -> str:
    server = arm["server"]
    return ", ".join(str(server[key]) for key in ("id", "device", "dtype") if key in server) or "n/a"


def _version(arm: Mapping[str, Any]) -> str:
    return " ".join(str(arm["server"][key]) for key in ("owned_by", "version") if key in arm["server"]) or "n/a"


def _facts(report: Mapping[str, Any]) -> str:
    host, work = report["host"], report["workload"]
    gpus = f", {', '.join(host['gpus'])}" if host.get("gpus") else ""
    machine = (
        f"{host['cpu']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB{gpus}, {host['system']}, "
        f"Python {host['python']}"
    )
    played = ", ".join(
        f"{key.replace('_', ' ')} {json.dumps(value) if isinstance(value, (dict, list)) else value}"
        for key, value in {**work, **report["metadata"]}.items()
        if value not in (None, "", [], {})
    )
    return f"Work of a run: {played}.\nMachine: {machine}. gapless {report['version']}, {report['created']}."


def _bullets(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"**{title}**", "", *(f"- {line}" for line in lines)]) if lines else ""


def _table(head: Sequence[str], align: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, align, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _range(values: Sequence[float] | None, unit: str = "") -> str:
    return f"{values[0]:.4g} … {values[1]:.4g}{unit}" if values else "n/a"


def percent(share: float) -> str:
    """`0.0123` -> `+1.23 %`, with a minus sign that is not a hyphen."""
    digits = 2 if abs(share) < 0.1 else 1 if abs(share) < 1 else 0
    text = f"{100 * share:+.{digits}f}".replace("-", "−")
    return f"{'0.00' if text[1:] == '0.00' else text} %"


def p_value(p: float | None) -> str:
    if p is None:
        return "n/a"
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def with_spread(mean: float, std: float) -> str:
    """`12.34 ± 0.56`: as many decimals as the deviation has two digits of."""
    if not std > 0:
        return f"{mean:.5g}"
    digits = min(6, max(0, 1 - math.floor(math.log10(std))))
    return f"{mean:.{digits}f} ± {std:.{digits}f}"


def render_html(report: Mapping[str, Any]) -> str:
    """The page. It loads nothing, and its content policy allows nothing but its own script and style, by hash."""
    ui = resources.files("gapless.ui")
    script = ui.joinpath("report.js").read_text(encoding="utf-8") + _START
    style = _GROUND + ui.joinpath("report.css").read_text(encoding="utf-8")
    a, b = report["arms"]
    return _PAGE.format(
        title=html.escape(f"A/B: {a['name']} against {b['name']}"),
        script=script,
        style=style,
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        data=_as_data(report),
    )


def _as_data(report: Mapping[str, Any]) -> str:
    """JSON that no name in it can end early: within a script element only `<` matters."""
    return json.dumps(report, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
