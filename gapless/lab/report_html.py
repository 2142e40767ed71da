"""One self-contained HTML file of an A/B report: the data, the renderer and the style sheet of `gapless/ui`, inline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

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
