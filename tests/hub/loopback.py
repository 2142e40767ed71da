"""A hub of our own on loopback: what huggingface_hub asks of the real one, and the ways in which it can go wrong."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

CODE = (".py", ".so", ".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Endings of files that hold code, or can"""
LARGE = (".safetensors", ".bin", "tokenizer.json")
"""Endings of the files that are stored by their SHA-256."""


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    range: str
    token: str


@dataclass
class Model:
    """One repository: the files of each commit, and which commit a branch is."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    refusal: tuple[int, str, str] | None = None
    """Status, X-Error-Code and X-Error-Message of every answer about its files."""
    hidden: bool = False
    """Without a token it does not exist."""


@dataclass
class Hub:
    """`trouble` is what happens to the next answers that carry a large file, one after the other.

    `cut:N` closes the connection after N bytes, `reset:N` aborts it, `stall:N` falls silent, `short:N` ends without
    having announced a length; `other` sends other bytes, `whole` ignores the range, `endless` sends too much, `503` is
    busy.
    """

    url: str = ""
    models: dict[str, Model] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    delay: float = 0.0
    """Seconds before each answer."""
    status: int | None = None
    """Of every answer, where the hub is out of order."""
    page: bytes = b""
    """What answers everything, as in a hotel before one has paid."""
    xet: bool = False
    """Whether it says that large files are to be had by Xet."""
    cdn: str = ""
    """Another host, to which large files are redirected."""
    sent: int = 0
    """Bytes of answers without a length."""
    code: list[str] = field(default_factory=list)
    """Files of code that were asked for, which a test never forgives."""
    closing: threading.Event = field(default_factory=threading.Event)
    token: str = "hf_right"
    """The one that opens what is hidden."""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A new commit of a model; returns its hash."""
        digest = hashlib.sha1(repr(sorted((n, hashlib.sha1(d).hexdigest()) for n, d in files.items())).encode())
        commit = digest.hexdigest()
        model = self.models.setdefault(name, Model({}, {}))
        model.commits[commit] = files
        model.refs[revision] = model.refs[commit] = commit
        return commit

    def fetched(self) -> list[str]:
        """Names of the files that were asked for with GET, in order."""
        return [a.path.rpartition("/")[2] for a in self.asked if a.method == "GET" and "/resolve/" in a.path]


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        at = hub

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    at: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.at, unquote(self.path.partition("?")[0])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.asked.append(Asked(self.command, path, self.headers.get("Range", ""), token))
        if path.endswith(CODE):
            hub.code.append(path)
        time.sleep(hub.delay)
        if hub.status is not None:
            return self._refuse(hub.status, "")
        if hub.page:
            return self._page(hub.page)
        if path.startswith("/cdn/"):
            data = next(
                d for m in hub.models.values() for c in m.commits.values() for d in c.values() if digest_of(d) in path
            )
            return self._large(data, {}, body)
        api = path.startswith("/api/models/")
        name, _, rest = path.removeprefix("/api/models/").strip("/").partition("/revision/" if api else "/resolve/")
        model = hub.models.get(name)
        if model is None or (model.hidden and token != hub.token):
            return self._refuse(401, "RepoNotFound")
        if api:
            commit = model.refs.get(rest)
            return self._refuse(404, "RevisionNotFound") if commit is None else self._about(name, model, commit)
        revision, _, file = rest.partition("/")
        if model.refusal is not None:
            return self._refuse(*model.refusal)
        commit = model.refs.get(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if file not in model.commits[commit]:
            return self._refuse(404, "EntryNotFound")
        return self._file(commit, file, model.commits[commit][file], body)

    def _about(self, name: str, model: Model, commit: str) -> None:
        siblings = []
        for file, data in model.commits[commit].items():
            lfs = {"sha256": digest_of(data), "size": len(data), "pointerSize": 130}
            siblings.append({"rfilename": file, "size": len(data), "blobId": _git(data)})
            if file.endswith(LARGE):
                siblings[-1]["lfs"] = lfs
        answer = {"_id": "1", "id": name, "sha": commit, "siblings": siblings, "tags": [], "private": model.hidden}
        self._page(json.dumps(answer).encode())

    def _page(self, data: bytes) -> None:
        self._head(200, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def _file(self, commit: str, file: str, data: bytes, body: bool) -> None:
        large = file.endswith(LARGE)
        etag = digest_of(data) if large else _git(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if large:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            if self.at.xet:
                headers |= {"X-Xet-Hash": etag, "X-Xet-Refresh-Route": f"{self.at.url}/xet"}
            if self.at.cdn:
                headers |= {"Location": f"{self.at.cdn}/cdn/{etag}", "Content-Length": "0"}
                return self._head(302, headers)
            return self._large(data, headers, body)
        self._head(200, {**headers, "Content-Length": str(len(data))})
        if body:
            self.wfile.write(data)
        return None

    def _large(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        trouble = self.at.trouble.pop(0) if body and self.at.trouble else ""
        kind, _, number = trouble.partition(":")
        if kind == "503":
            return self._refuse(503, "")
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if kind == "whole" or not body:
            begin = 0
        part = data[begin:]
        if kind == "other":
            part = bytes(len(part))
        status = 206 if begin else 200
        if begin:
            headers = {**headers, "Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        if kind in ("short", "endless"):
            self.close_connection = True
            self._head(status, {**headers, "Connection": "close"})
            for piece in [part[: int(number)]] if kind == "short" else [part] * 64:
                self.wfile.write(piece)
                self.at.sent += len(piece)
            return None
        self._head(status, {**headers, "Content-Length": str(len(part))})
        if body:
            self.wfile.write(part[: int(number)] if number else part)
        if number:
            if kind == "stall":
                self.at.closing.wait(60)
            if kind == "reset":
                time.sleep(0.05)  # what was sent has to arrive first
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        return None

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        said = {"X-Error-Code": code, "X-Error-Message": message}
        self._head(status, {"Content-Length": "0", **{name: text for name, text in said.items() if text}})


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
