"""The files of the live page, from a list made once: no path of a request ever reaches the file system."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response
from starlette.types import ASGIApp

from gapless.server.endpoint import HttpCall
from gapless.server.errors import ApiError

INDEX_PAGE = "index.html"
PAGES = {"chat": "chat.html"}
"""Pages by their names below /ui/"""
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
    "txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
FILES = {file.name: file for file in files("gapless.ui").iterdir() if file.name.rpartition(".")[2] in MEDIA_TYPES}
"""Served files: name below /ui/ to file."""


async def root(call: HttpCall) -> ASGIApp:
    """Lead to the live page, also behind a proxy that takes an unknown path away."""
    root_path = call.state.config.root_path
    return Response(status_code=307, headers={**HEADERS, "location": f"{root_path}/ui" if root_path else "ui"})


async def page(call: HttpCall) -> ASGIApp:
    """Answer with the live page. Its links are relative to /ui."""
    if call.request.url.path.endswith("/"):
        return Response(status_code=307, headers={**HEADERS, "location": "../ui"})
    return _answer(INDEX_PAGE)


async def page_file(call: HttpCall) -> ASGIApp:
    """Answer with a file of the live page, or another page."""
    name = call.request.path_params["name"]
    return _answer(PAGES.get(name, name))


def _answer(name: str) -> Response:
    file = FILES.get(name)
    if file is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    return Response(file.read_bytes(), headers={**HEADERS, "content-type": MEDIA_TYPES[name.rpartition(".")[2]]})
