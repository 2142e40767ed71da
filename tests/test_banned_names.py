"""Names that the package may not use: device control and fetching outside their rooms; unpickling, evaluation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.house
PACKAGE = Path(__file__).resolve().parents[1] / "gapless"


class Ban(NamedTuple):
    names: str
    """Of what `uses` yields: a regular expression."""
    rooms: tuple[str, ...]
    """Rooms that may; guard controls no device, it looks at what others do with these parts of torch."""
    instead: str


DEVICE = Ban(
    r"torch\.(accelerator|cpu|cuda|mps|mtia|xpu|Event|Stream)\b.*"
    r"|\.(current_stream|is_pinned|pin_memory|record_event|record_stream|set_stream|synchronize|wait_event|wait_stream)"
    r"|pin_memory=",
    ("device", "guard"),
    "belongs in gapless/device: use its Stream, Fence, Ring, upload and download",
)
BANS = (
    DEVICE,
    Ban(
        r"(_?pickle|cPickle|cloudpickle|marshal|shelve|dill|joblib)\b.*"
        r"|(eval|exec|__import__)\(\)|\.(recv|send)_pyobj|(torch|numpy)\.(load|save)",
        (),
        "runs or may run what it is given",
    ),
    # guard starts no process: it waits for those of others.
    Ban(r"(multiprocessing|torch\.multiprocessing)\b.*", ("guard",), "runs or may run what it is given"),
    Ban(r"(requests|httpx2?|aiohttp|urllib3|urllib\.request|hf_xet)\b.*", (), "fetches, which hub alone does"),
    Ban(r"huggingface_hub\b.*", ("hub",), "fetches, which hub alone does"),
)


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each import, attribute, called name and keyword: `torch.cuda.Event`, `.wait`, `f()`, `k=`."""
    tree = ast.parse(source)
    imports = [(node, *imported) for node in ast.walk(tree) for imported in _imports(node)]
    aliases = {local: full for _, local, full in imports}
    aliases |= {local.split(".")[0]: local.split(".")[0] for local in aliases if "." in local}
    yield from ((node.lineno, full) for node, _, full in imports)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, f".{node.attr}"
            yield node.lineno, _dotted(node, aliases)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, f"{word.arg}=") for word in node.keywords)
            if isinstance(node.func, ast.Name):
                yield node.lineno, f"{node.func.id}()"
                if node.func.id == "getattr" and isinstance(node.args[1], ast.Constant):
                    yield node.lineno, f"{_dotted(node.args[0], aliases)}.{node.args[1].value}"


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The local and the full name of each that is imported."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name, alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`torch.cuda.Event` for an attribute of what is imported, else a text that is no name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "?")
    return f"{_dotted(node.value, aliases)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def offences(source: str, room: str = "") -> list[str]:
    bans = [ban for ban in BANS if room not in ban.rooms]
    found = {(line, name, ban.instead) for line, name in uses(source) for ban in bans if re.fullmatch(ban.names, name)}
    return [f"{line}: {name} {instead}" for line, name, instead in sorted(found)]


def test_the_package_uses_no_banned_name() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    found = [
        f"{path}:{line}"
        for path in files
        for line in offences(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[0])
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda.synchronize"),
        ("import torch\nif torch.cuda.is_available(): pass", "torch.cuda.is_available"),
        ("import torch as t\nt.cuda.Event()", "torch.cuda.Event"),
        ("import torch\ns = torch.Stream('cuda')", "torch.Stream"),
        ("import torch\ntorch.accelerator.current_stream()", "torch.accelerator.current_stream"),
        ("import torch.cuda", "torch.cuda"),
        ("import torch.nn\ntorch.Event()", "torch.Event"),
        ("import torch.cuda as c\nc.Stream()", "torch.cuda.Stream"),
        ("from torch import cuda", "torch.cuda"),
        ("from torch.cuda import Event as E\nE()", "torch.cuda.Event"),
        ("def f():\n    from torch import Stream", "torch.Stream"),
        ("import torch\ngetattr(torch, 'cuda').synchronize()", "torch.cuda"),
        *((f"x.{name}()", f".{name}") for name in ("synchronize", "pin_memory", "record_stream", "wait_event")),
        ("import torch\ntorch.empty(3, pin_memory=True)", "pin_memory="),
        ("def f():\n    import pickle as p", "pickle"),
        ("from pickle import loads", "pickle.loads"),
        ("import multiprocessing.shared_memory", "multiprocessing.shared_memory"),
        ("from urllib import request", "urllib.request"),
        ("import urllib.request", "urllib.request"),
        ("import httpx", "httpx"),
        ("from huggingface_hub import HfApi", "huggingface_hub.HfApi"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("from torch import load", "torch.load"),
        ("socket.recv_pyobj()", ".recv_pyobj"),
        *((f"{name}('1')", f"{name}()") for name in ("eval", "exec", "__import__")),
    ],
)
def test_a_planted_name_is_found(source: str, name: str) -> None:
    assert any(f": {name} " in line for line in offences(source)), offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.zeros(3).copy_(x); torch.device('cuda')",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False",
        "fence.wait(); stream.record(); stream.after(fence)",
        "import threading\nthreading.Event().wait()",
        "from gapless.device import Stream, Fence",
        "# torch.cuda.synchronize()\ntext = 'torch.cuda.synchronize()'",
        "x.is_cuda; x.cuda_like; model.eval(); weights.load(); pickled = 1",
        "from urllib.parse import quote\nimport http.client",
    ],
)
def test_innocent_code_is_not_reported(source: str) -> None:
    assert offences(source) == []


@pytest.mark.parametrize(("room", "source"), [("device", "x.synchronize()"), ("hub", "import huggingface_hub")])
def test_a_room_may_use_its_own_names_alone(room: str, source: str) -> None:
    assert offences(source, room) == [] != offences(source, "engine")
    assert offences("import httpx", room)
