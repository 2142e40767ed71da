"""Only gapless/device touches streams, events, pinned memory and synchronisation; the rest sees its seam."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gapless"

MODULES = ("accelerator", "cpu", "cuda", "mps", "mtia", "xpu", "Event", "Stream")
"""Parts of torch that are device control: no attribute of them is used outside the room."""

METHODS = (
    "current_stream",
    "is_pinned",
    "pin_memory",
    "record_event",
    "record_stream",
    "set_stream",
    "synchronize",
    "wait_event",
    "wait_stream",
)
"""Methods that wait, order streams or pin, whatever object they are called on."""

KEYWORDS = ("pin_memory",)


def exempt(path: Path) -> bool:
    """The room itself, and the guard."""
    parts = path.relative_to(PACKAGE).parts
    # guard controls nothing: it looks at what others do with these parts of torch.
    return parts[0] in ("device", "guard")


def offences(source: str, name: str) -> list[str]:
    """`name:line: what` for every use of device control in `source`."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    every = {use for node in ast.walk(tree) for use in _of_node(node, aliases)}
    # `torch.cuda` inside `torch.cuda.Event` is one offence.
    found = [(line, text) for line, text in every if not any(line == n and t.startswith(f"{text}.") for n, t in every)]
    advice = "belongs in gapless/device: use its Stream, Fence, Ring, upload and download"
    return [f"{name}:{line}: {text} {advice}" for line, text in sorted(found)]


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local names that stand for torch or a part of it."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _of_node(node: ast.AST, aliases: dict[str, str]) -> list[tuple[int, str]]:
    if isinstance(node, ast.Import):
        return [(node.lineno, f"import {alias.name}") for alias in node.names if _control(alias.name)]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return [(node.lineno, f"import of {name}") for name in full if _control(name)]
    if isinstance(node, ast.Attribute):
        dotted = _dotted(node, aliases)
        if dotted and _control(dotted):
            return [(node.lineno, ".".join(dotted.split(".")[:3]))]
        if node.attr in METHODS:
            return [(node.lineno, f".{node.attr}")]
    if isinstance(node, ast.Call):
        if _is_getattr(node, aliases):
            return [(node.lineno, "getattr on torch")]
        return [(node.lineno, f"{word.arg}=") for word in node.keywords if word.arg in KEYWORDS]
    return []


def _control(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "torch" and len(parts) > 1 and parts[1] in MODULES


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """`torch.cuda.Event` for an attribute chain that starts at an imported name, else None."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else None
    return None


def _is_getattr(node: ast.Call, aliases: dict[str, str]) -> bool:
    if not (isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2):
        return False
    target, attribute = _dotted(node.args[0], aliases), node.args[1]
    if target is None or not isinstance(attribute, ast.Constant):
        return False
    return _control(f"{target}.{attribute.value}")


def test_only_one_room_waits() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not exempt(path)]
    assert files, "nothing was scanned"
    found = [line for path in files for line in offences(path.read_text(), str(path.relative_to(PACKAGE.parent)))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda.synchronize"),
        ("import torch\nif torch.cuda.is_available(): pass", "torch.cuda.is_available"),
        ("import torch as t\nt.cuda.Event()", "torch.cuda.Event"),
        ("import torch\ns = torch.Stream('cuda')", "torch.Stream"),
        ("import torch\ne = torch.Event()", "torch.Event"),
        ("import torch\ntorch.accelerator.current_stream()", "torch.accelerator.current_stream"),
        ("import torch.cuda", "import torch.cuda"),
        ("import torch.cuda as c\nc.Stream()", "torch.cuda.Stream"),
        ("from torch import cuda", "import of torch.cuda"),
        ("from torch.cuda import Event as E\nE()", "import of torch.cuda.Event"),
        ("def f():\n    from torch import Stream", "import of torch.Stream"),
        ("import torch\ngetattr(torch, 'cuda').synchronize()", "getattr on torch"),
        ("x.synchronize()", ".synchronize"),
        ("x.pin_memory()", ".pin_memory"),
        ("x.record_stream(s)", ".record_stream"),
        ("s.wait_event(e)", ".wait_event"),
        ("s.wait_stream(e)", ".wait_stream"),
        ("s.record_event()", ".record_event"),
        ("import torch\ntorch.empty(3, pin_memory=True)", "pin_memory="),
    ],
)
def test_planted_offences_are_caught(source: str, what: str) -> None:
    found = offences(source, "planted.py")
    assert any(f": {what} belongs in gapless/device" in line for line in found), found
    assert found[0].startswith("planted.py:") and len(found) == len(set(found))


def test_one_use_is_one_offence() -> None:
    assert len(offences("import torch\ntorch.cuda.synchronize()", "planted.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.zeros(3).copy_(x); torch.device('cuda')",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False",
        "fence.wait(); stream.record(); stream.after(fence)",
        "import threading\nthreading.Event().wait()",
        "from gapless.device import Stream, Fence",
        "# torch.cuda.synchronize()\ntext = 'torch.cuda.synchronize()'",
        "x.is_cuda; x.cuda_like",
    ],
)
def test_innocent_code_is_not(source: str) -> None:
    assert offences(source, "innocent.py") == []
