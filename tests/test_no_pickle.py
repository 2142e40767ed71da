"""Nothing in the package unpickles or evaluates, and the hub room alone fetches: what else could is banned by name."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gapless"
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "multiprocessing"),
    *("requests", "httpx", "httpx2", "aiohttp", "urllib3", "urllib.request", "torch.multiprocessing"),
    *("huggingface_hub", "hf_xet"),
}
FETCHES = {"hub": {"huggingface_hub"}}
"""Room -> what of the list it is there for."""
NAMES = {"eval", "exec"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "torch.load", "torch.save", "numpy.load", "np.load"}


def banned(source: str) -> list[str]:
    """What `source` uses of the list, as 'line: name'."""
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        found += [f"{line}: {name}" for name in _names(node)]
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if _module_banned(alias.name)]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        full = [f"{module}.{alias.name}" for alias in node.names]
        if _module_banned(module):
            return [module]
        return [name for name in full if _module_banned(name) or name in ATTRIBUTES]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return [node.func.id] if node.func.id in NAMES | {"__import__"} else []
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return [name for name in (node.attr, f"{owner}.{node.attr}") if name in ATTRIBUTES]
    return []


def _module_banned(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in MODULES for end in range(1, len(parts) + 1))


def test_the_package_uses_no_banned_name():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    found = [(path, line, line.split()[1].partition(".")[0]) for path in files for line in banned(path.read_text())]
    assert [f"{path}:{line}" for path, line, name in found if name not in FETCHES.get(path.parent.name, ())] == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    import pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import multiprocessing.shared_memory", "multiprocessing.shared_memory"),
        ("from multiprocessing import Process", "multiprocessing"),
        ("from urllib import request", "urllib.request"),
        ("import urllib.request", "urllib.request"),
        ("import httpx", "httpx"),
        ("from huggingface_hub import HfApi", "huggingface_hub"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("__import__('pickle')", "__import__"),
    ],
)
def test_planted_code_is_found(source, name):
    assert [item.partition(": ")[2] for item in banned(source)] == [name]


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "from urllib.parse import quote", "import http.client", "weights.load()", "pickled = 1"],
)
def test_innocent_code_is_left_alone(source):
    assert banned(source) == []
