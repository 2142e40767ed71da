"""The routes' requests: /openapi.json, made of the route table and the shapes of requests, and /docs, to read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

import gapless
from gapless.base.params import PARAMS
from gapless.server.auth import Access
from gapless.server.endpoint import RouteEntry

_CALLERS = {Access.PUBLIC: "everyone", Access.USER: "holders of a key", Access.OPERATOR: "operators"}
_MEDIA = {"/metrics": "text/plain", "/ui": "text/html", "/docs": "text/html", "/debug/steps": "text/event-stream"}
"""Content types of answers that are not JSON; None for answers without a body"""
_MEDIA |= dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "text/plain")
_BARE = ("/", "/health", "/ready", "/ping")
"""Routes whose answer has no body"""
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
:root{color-scheme:light dark}
h2{font-size:1.05rem;margin:2.2rem 0 .2rem;font-family:ui-monospace,monospace}small{font-weight:400;opacity:.7}
pre{overflow:auto;padding:.6rem;border:1px solid #8884;border-radius:6px}table{border-collapse:collapse}
td{padding:.1rem .8rem .1rem 0;vertical-align:top;border-top:1px solid #8883}td:first-child{font-family:ui-monospace}"""
PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def document(routes: Sequence[RouteEntry], root: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of the routes that are listed; `root` is the path before them."""
    listed = [entry for entry in routes if entry.listed]
    shapes = [entry.body for entry in listed if entry.body is not None]
    found, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(shapes, found, strict=True))
    paths: dict[str, Any] = {}
    for entry in listed:
        operation = _operation(entry, None if entry.body is None else bodies[entry.body])
        paths[_plain(entry.path)] = {method.lower(): operation for method in entry.methods}
    about = {"title": "gapless", "version": gapless.__version__, "description": "LLM inference and serving."}
    bearer = {"type": "http", "scheme": "bearer", "description": "one of the server's keys, where it has any"}
    return {
        "openapi": "3.1.0",
        "info": about,
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": _described(components), "securitySchemes": {"key": bearer}},
    }


def _plain(path: str) -> str:
    return path.replace(":path", "")


def _described(schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the registry's description of each sampling parameter."""
    docs = {entry.name: entry.doc for entry in PARAMS}
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if name in docs and "temperature" in schema["properties"]:
                field["description"] = docs[name]
    return schemas


def _operation(entry: RouteEntry, body: Any) -> dict[str, Any]:
    media = ["application/json"] * entry.generates + [_MEDIA.get(entry.path, "application/json")]
    media += ["text/event-stream"] * entry.generates
    content: dict[str, Any] = {} if entry.path in _BARE else {"content": {kind: {} for kind in media}}
    made: dict[str, Any] = {
        "summary": (entry.handler.__doc__ or "").split(". ")[0].strip().rstrip("."),
        "description": f"For {_CALLERS[entry.access]}.",
        "security": [] if entry.access is Access.PUBLIC else [{"key": []}],
        "responses": {
            "307" if entry.path == "/" else "200": {"description": "the answer", **content},
            "default": {"description": "an error, whose body says what is wrong and where"},
        },
    }
    if names := re.findall(r"{(\w+)", entry.path):
        place = {"in": "path", "required": True, "schema": {"type": "string"}}
        made["parameters"] = [{"name": name, **place} for name in names]
    if entry.body is not None:
        json_body = {"schema": body, "example": getattr(entry.body, "EXAMPLE", {})}
        made["requestBody"] = {"required": True, "content": {"application/json": json_body}}
    return made


def page(described: Mapping[str, Any]) -> str:
    """Return a document as a page of HTML that fetches nothing."""
    parts = "".join(
        part
        for path, methods in described["paths"].items()
        for part in _route(path, methods, described["components"]["schemas"])
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>gapless: routes</title><style>{_STYLE}</style><h1>gapless {escape(described['info']['version'])}</h1>"
        f"<p>The routes of this server. <a href=openapi.json>openapi.json</a> says the same to programs.{parts}</html>"
    )


def _route(path: str, methods: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    operation = next(iter(methods.values()))
    callers = escape(operation["description"])
    yield f"<h2>{escape(' '.join(methods).upper())} {escape(path)} <small>{callers}</small></h2>"
    yield f"<p>{escape(operation['summary'])}."
    if "requestBody" not in operation:
        return
    body = operation["requestBody"]["content"]["application/json"]
    yield f"<pre>{escape(json.dumps(body['example']))}</pre>"
    shape = schemas[body["schema"]["$ref"].rpartition("/")[2]]
    needed = shape.get("required", ())
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{escape(_kind(field))}{', needed' if name in needed else ''}"
        f"<td>{escape(field.get('description', ''))}"
        for name, field in shape["properties"].items()
    )
    yield f"<details><summary>{len(shape['properties'])} fields</summary><table>{rows}</table></details>"


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(kind for one in field["anyOf"] if (kind := _kind(one)) != "null"))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
