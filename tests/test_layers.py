"""The house's rules that a machine can check: imports go down only, core rooms stay lean, nothing grows too large.

Imports inside functions count like any other; `if TYPE_CHECKING:` is left out of the layers, and counts among the
cycles. `python tests/test_layers.py` prints the numbers of the house beside the most that they may be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import house
import pytest
from house import PACKAGE, count_lines, function_sizes

pytestmark = pytest.mark.house
ROOT = Path(__file__).resolve().parent.parent

CORE = {"base", "guard", "device", "comm", "kernels", "model", "pace", "memory", "offload", "step", "plan", "loop"}
BELOW_ENGINE = (CORE - {"guard"}) | {"text", "grammar", "demo", "hub"}
# room -> rooms it may import. "model.config" means that module alone.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "guard": set(),
    "device": {"base"},
    "comm": {"base", "device"},
    "kernels": {"base", "comm", "device"},
    "model": {"base", "comm", "kernels", "demo", "device.facts", "memory.groups"},
    "pace": {"base"},
    "memory": {"base"},
    "offload": {"base", "device", "kernels", "memory", "model", "pace"},
    "step": {"base", "comm", "device", "kernels", "memory", "model", "pace"},
    "plan": {"base", "memory"},
    "loop": {"base", "comm", "device", "kernels", "model", "memory", "offload", "pace", "plan", "step"},
    "text": {"base"},
    "grammar": {"base", "text"},
    "demo": {"base"},
    "hub": {"base"},
    "engine": BELOW_ENGINE,
    "ui": set(),
    "server": {"base", "engine", "hub", "text", "model.config", "ui"},
    "lab": {"base", "engine", "text", "demo", "ui"},
    "cli": BELOW_ENGINE | {"guard", "engine", "server", "lab", "ui"},
    "testing": BELOW_ENGINE | {"engine"},
}
# file -> rooms that it alone may import. Guard stands alone: one file connects devices with it, and one watches steps.
EXTRA_ROOMS = {"engine/checkers.py": {"guard"}, "testing/guarded.py": {"guard"}}
NO_TORCH = {"base", "pace", "memory", "offload", "plan"}
CORE_LIBRARIES = {"torch", "numpy"}
# file -> libraries that it alone may use
EXTRA_LIBRARIES = {
    "model/weights.py": {"safetensors"},
    "guard/pytest_plugin.py": {"pytest"},
    "guard/pytest_session.py": {"pytest"},
}
EXTRA_LIBRARIES |= {"device/accelerators/gaudi.py": {"habana_frameworks"}}
EXTRA_LIBRARIES |= {"model/gguf_files.py": {"gguf"}, "model/gguf_tensors.py": {"gguf"}}
EXTRA_LIBRARIES |= {"model/transformers_backend.py": {"transformers"}}
EXTRA_LIBRARIES |= {"model/transformers_load.py": {"transformers"}, "model/transformers_config.py": {"transformers"}}
EXTRA_LIBRARIES |= {"offload/tiers/lmcache_wire.py": {"msgspec", "zmq"}, "offload/tiers/mooncake.py": {"mooncake"}}
EXTRA_LIBRARIES |= {
    "offload/transfers.py": {"torch"},
    "offload/tiers/nixl.py": {"nixl"},
    "offload/tiers/redis_links.py": {"redis"},
}

KINDS = {
    *("cpu", "cuda", "hip", "rocm", "xpu", "npu", "ascend", "hpu", "gaudi", "mps", "xla", "accelerator", "privateuse1"),
    *("sim", "fake"),
}
OF_KINDS = re.compile(rf"({'|'.join(KINDS)})(:.*)?|.*(CUDA|HIP|ROCM|ASCEND|HABANA)_[A-Z_]+", re.IGNORECASE)
"""Texts that name a kind of device, one device of it, or a variable of its environment"""
CLASSES_OF_KINDS = {"CpuDevice", "CudaDevice", "SimDevice", "FakeDevice"}
ASKS_FOR_KINDS = {"device", "guard"}
"""device/ is the room of the kinds; guard/ checks any PyTorch program, and has torch's device types as data."""
NAMES_KINDS = {
    "base/config.py": "the values that --device takes",
    "base/spellings.py": "llama.cpp's -ngl 0 is written --device cpu",
    "base/variables.py": "the variables of others that the manual lists",
    "comm/cuda.py": "the group of CUDA's devices, which only capability sums leads to",
    "lab/environment.py": "the processor's name in a report",
    "lab/report_pages.py": "the processor's name in a report",
    "server/samples.py": "the processors' share of time in the live page",
    "testing/": "the kit's own devices, and scenarios on them",
}
"""Files and folders that name kinds, and why"""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
LINES = 85_500
"""Lines of Python in the package, at most. A change that raises this number needs a sentence: what for, what went."""
AT_MOST = {
    "fragment docstrings": 0,
    "words to avoid": 0,
    'texts with "what it was"': 20,
    'texts with "those"': 17,
    'texts with "says, knows, learns"': 13,
    'texts with "of which"': 16,
    'texts with "where for if"': 8,
    'texts with "has come"': 8,
    'texts with "goes on"': 1,
    "shared class names and aliases": 0,
    "shared constants": 4,
    "private accesses from tests": 21,
    "upward arrows": 0,
    "import cycles": 0,
    "import cycles with TYPE_CHECKING": 0,
}
"""What the house wants to be 0, and what it is today: these numbers only fall."""


class Import(NamedTuple):
    """`line` of `path` imports `module`; `names` are what `from module import ...` takes."""

    path: Path
    line: int
    module: str
    names: tuple[str, ...]


def source_files(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`gapless.plan.queue` -> `plan`; the package's own __init__ -> ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node but those in the bodies of `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        unread = isinstance(node, ast.If) and _is_type_checking(node.test)
        waiting += node.orelse if unread else ast.iter_child_nodes(node)  # type: ignore[attr-defined]


def _base_of(root: Path, path: Path, node: ast.ImportFrom) -> str:
    """The absolute module that `from ...x import y` names."""
    if not node.level:
        return node.module or ""
    package = module_name(root, path).split(".")
    up = node.level - (1 if path.name == "__init__.py" else 0)
    kept = package[: len(package) - up]
    return ".".join([*kept, node.module] if node.module else kept)


def _dynamic(node: ast.AST) -> str | None:
    """The module of `import_module("x")` or `__import__("x")`, the folder of `f"x.{name}"`; '?' for any other value."""
    if not isinstance(node, ast.Call):
        return None
    name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
    if name not in ("import_module", "__import__"):
        return None
    first = node.args[0] if node.args else None
    if isinstance(first, ast.JoinedStr) and isinstance(head := first.values[0], ast.Constant):
        return str(head.value).rpartition(".")[0] or "?"
    return str(first.value) if isinstance(first, ast.Constant) else "?"


def imports(root: Path, path: Path, typing: bool = False) -> tuple[Import, ...]:
    """Return the imports of a file, those of `if TYPE_CHECKING:` with `typing` only."""
    return _imports(root, path, path.read_text(encoding="utf-8"), typing)


@cache
def _imports(root: Path, path: Path, text: str, typing: bool) -> tuple[Import, ...]:
    """`text` is what the file holds now."""
    found = []
    for node in house.nodes(path) if typing else _running(house.parsed(path)):
        if isinstance(node, ast.Import):
            found += [Import(path, node.lineno, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(Import(path, node.lineno, _base_of(root, path, node), tuple(a.name for a in node.names)))
        elif (module := _dynamic(node)) is not None:
            found.append(Import(path, getattr(node, "lineno", 0), module, ()))
    return tuple(found)


def facade(root: Path) -> dict[str, str]:
    """Names that `from gapless import X` loads lazily -> their module, read from the table in __init__.py."""
    path = root / PACKAGE / "__init__.py"
    for node in house.parsed(path).body if path.exists() else ():
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME":
            return dict(ast.literal_eval(node.value))
    return {}


def all_targets(root: Path, typing: bool = False) -> Iterator[tuple[Import, list[str]]]:
    """Every import of every file, with the modules of ours that it reaches, as finely as can be told."""
    known = {module_name(root, path) for path in source_files(root)}
    homes = facade(root)
    for path in source_files(root):
        for item in imports(root, path, typing):
            yield item, _targets(item, known, homes if item.module == PACKAGE else {})


def _targets(item: Import, known: set[str], homes: dict[str, str]) -> list[str]:
    if item.module.split(".")[0] != PACKAGE:
        return []
    full = {name: f"{item.module}.{name}" for name in item.names}
    return [f if f in known else homes.get(name, item.module) for name, f in full.items()] or [item.module]


def _where(root: Path, item: Import) -> str:
    return f"{item.path.relative_to(root)}:{item.line}"


def _may(room: str, target: str, extra: set[str]) -> bool:
    allowed = ALLOWED[room] | extra
    within = target.removeprefix(f"{PACKAGE}.")
    return target == PACKAGE or room_of(target) in allowed | {room} or within in allowed


def layer_violations(root: Path) -> list[str]:
    rooms = {path: room_of(module_name(root, path)) for path in source_files(root) if path.parent != root / PACKAGE}
    found = [
        f"{path.relative_to(root)}: room {room!r} is not in the table of {Path(__file__).name}"
        for path, room in rooms.items()
        if room not in ALLOWED
    ]
    for item, reached in all_targets(root):
        room = rooms.get(item.path, "")
        if room not in ALLOWED:
            continue  # told above; or the package's front door, which looks up its names by a table
        extra = EXTRA_ROOMS.get(item.path.relative_to(root / PACKAGE).as_posix(), set())
        if item.module == "?":
            found.append(f"{_where(root, item)}: imports a module whose name only shows at run time")
        found += [
            f"{_where(root, item)}: {room} may not import {target}; allowed: {sorted(ALLOWED[room])}"
            for target in reached
            if not _may(room, target, extra)
        ]
    return found


def library_violations(root: Path) -> list[str]:
    found = []
    for path in source_files(root):
        room = room_of(module_name(root, path))
        if room not in CORE:
            continue
        extra = EXTRA_LIBRARIES.get(path.relative_to(root / PACKAGE).as_posix(), set())
        if room == "kernels" and path.stem.endswith("_triton"):
            extra = extra | {"triton"}
        allowed = (CORE_LIBRARIES - ({"torch"} if room in NO_TORCH else set())) | extra
        for item in imports(root, path):
            top = item.module.split(".")[0]
            if top not in allowed | {PACKAGE, "?"} and top not in sys.stdlib_module_names:
                found.append(
                    f"{_where(root, item)}: {room} may use {sorted(allowed)} and the standard library, not {top}"
                )
    return found


def kind_violations(root: Path) -> list[str]:
    """Return the places that name a kind of device: other rooms ask its `caps`, and functions of `device/facts.py`."""
    found = []
    for path in source_files(root):
        within = path.relative_to(root / PACKAGE)
        if within.parts[0] in ASKS_FOR_KINDS or within.as_posix().startswith(tuple(NAMES_KINDS)):
            continue
        named = [node for node in house.nodes(path) if _names_kind(node)]
        found += [f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}: {ast.unparse(node)}" for node in named]
    return found


def _names_kind(node: ast.AST) -> bool:
    """Whether a kind is written down, a part of torch for one is used, or a device's own kind is compared."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and OF_KINDS.fullmatch(node.value) is not None
    if isinstance(node, ast.Attribute):
        part = node.attr in KINDS and ast.unparse(node.value).split(".")[0] == "torch"
        return part or (node.attr.startswith("is_") and node.attr.removeprefix("is_") in KINDS)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names]
        full = [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names
        return bool(CLASSES_OF_KINDS & {*names}) or any(
            name.startswith("torch.") and {*name.split(".")} & KINDS for name in full
        )
    if isinstance(node, ast.Compare):
        sides = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
        asked = [part for part in sides if isinstance(part, ast.Attribute) and part.attr in ("kind", "type")]
        return any(ast.unparse(part.value).endswith("device") for part in asked)
    return False


def import_graph(root: Path, typing: bool = False) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {module_name(root, path): set() for path in source_files(root)}
    for item, reached in all_targets(root, typing):
        name = module_name(root, item.path)
        graph[name] |= set(reached) - {name, PACKAGE}
    return graph


def upward_arrows(root: Path) -> list[str]:
    """Breaches of the layer table, and imports of the package's front door by rooms that stand below the engine."""
    doors = [
        _where(root, item)
        for item, reached in all_targets(root)
        if PACKAGE in reached and "engine" not in ALLOWED.get(room_of(module_name(root, item.path)), {"engine"})
    ]
    return layer_violations(root) + doors


def size_violations(root: Path) -> list[str]:
    found = []
    for path in source_files(root):
        shown, lines = path.relative_to(root), count_lines(path)
        if lines > MAX_FILE_LINES:
            found.append(f"{shown}: {lines} lines, at most {MAX_FILE_LINES}: give a second subject a file of its own")
        found += [
            f"{shown}: {name}() has {size} lines, at most {MAX_FUNCTION_LINES}"
            for name, size in function_sizes(path)
            if size > MAX_FUNCTION_LINES
        ]
    return found


def numbers(root: Path) -> dict[str, list[str]]:
    """What is behind each number of AT_MOST, one line for each thing counted."""
    private = house.private_accesses(root)
    return {
        "fragment docstrings": house.fragments(root),
        "words to avoid": house.idioms(root),
        **{f'texts with "{habit}"': found for habit, found in house.habits(root).items()},
        "shared class names and aliases": house.shared(root, house.class_names),
        "shared constants": house.shared(root, house.constants),
        "private accesses from tests": list(private.elements()),
        "upward arrows": upward_arrows(root),
        "import cycles": [" ".join(group) for group in house.cycles(import_graph(root))],
        "import cycles with TYPE_CHECKING": [
            " ".join(group) for group in house.cycles(import_graph(root, typing=True))
        ],
    }


def report(root: Path) -> str:
    rooms = house.lines_by_room(root)
    files = max(count_lines(path) for path in source_files(root))
    median, p95, longest = house.function_spread(root)
    lines = [f"{lines:>7,} lines in {room}" for room, lines in rooms.most_common()]
    lines += [
        f"{rooms.total():>7,} lines in all, at most {LINES:,}{_difference(root, rooms.total())}",
        f"{files:>7,} lines in the longest file, at most {MAX_FILE_LINES}",
        f"{longest:>7,} lines in the longest function, at most {MAX_FUNCTION_LINES} (median {median}, p95 {p95})",
    ]
    found = numbers(root)
    return "\n".join(lines + [f"{len(found[what]):>7,} {what}, at most {most}" for what, most in AT_MOST.items()])


def _difference(root: Path, lines: int) -> str:
    before = house.lines_before(root)
    return f" ({lines - before[1]:+,} since {before[0]})" if before else ""


@pytest.fixture(scope="module", autouse=True)
def parsed_code_is_forgotten() -> Iterator[None]:
    yield
    house.forget()


def test_imports_go_down_only() -> None:
    assert layer_violations(ROOT) == []


def test_core_rooms_use_torch_and_numpy_alone() -> None:
    assert library_violations(ROOT) == []


def test_no_room_but_the_devices_own_names_a_kind_of_device() -> None:
    assert kind_violations(ROOT) == []


def test_every_place_that_may_name_a_kind_does() -> None:
    for name in NAMES_KINDS:
        files = [path for path in source_files(ROOT) if path.relative_to(ROOT / PACKAGE).as_posix().startswith(name)]
        assert any(_names_kind(node) for path in files for node in house.nodes(path)), name


def test_files_and_functions_keep_their_size_budget() -> None:
    print(report(ROOT))
    assert size_violations(ROOT) == []
    assert house.lines_by_room(ROOT).total() <= LINES


def test_the_numbers_of_the_house_only_fall() -> None:
    found = numbers(ROOT)
    risen = {what: found[what] for what, most in AT_MOST.items() if len(found[what]) > most}
    assert not risen, "\n".join(f"{what} ({len(lines)}): {line}" for what, lines in risen.items() for line in lines)


def test_table_has_no_cycle_and_only_known_rooms() -> None:
    rooms = {name: {target.split(".")[0] for target in below} for name, below in ALLOWED.items()}
    assert set().union(*rooms.values()) <= set(rooms)
    assert house.cycles(rooms) == []


def _plant(root: Path, name: str, text: str) -> None:
    path = root / PACKAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, root / PACKAGE):
        (folder / "__init__.py").touch()
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "room, line, text",
    [
        ("base", 2, "import os\nfrom gapless.loop import engine\n"),
        ("plan", 3, "def late():\n    # hidden\n    from gapless.kernels.tables import Tables\n"),
        ("memory", 1, "from ..step import tables\n"),
        ("device", 1, "from gapless import server\n"),
        ("loop", 2, "from importlib import import_module\nx = import_module('gapless.engine.llm')\n"),
        ("step", 2, "def f(name):\n    return __import__(name)\n"),
        ("loop", 2, "def f(name):\n    return __import__(f'gapless.engine.{name}')\n"),
        ("loop", 2, "def f(name):\n    return __import__(f'gapless{name}')\n"),
        ("server", 1, "from gapless.model import weights\n"),
        ("guard", 1, "from gapless.base import errors\n"),
        ("device", 2, "def late():\n    from gapless.guard import no_sync\n"),
        ("engine", 1, "from gapless.guard import no_sync\n"),
        ("attic", None, "x = 1\n"),
    ],
)
def test_a_planted_upward_import_is_caught(tmp_path: Path, room: str, line: int | None, text: str) -> None:
    for name in ("loop/engine.py", "step/tables.py", "server/app.py", "model/weights.py"):
        _plant(tmp_path, name, "")
    assert layer_violations(tmp_path) == []
    _plant(tmp_path, f"{room}/planted.py", text)
    (found, *_) = [v for v in layer_violations(tmp_path) if "planted" in v]
    where = f"gapless/{room}/planted.py" + (f":{line}:" if line else ":")
    assert found.startswith(where), found


def test_the_front_door_is_seen_through(tmp_path: Path) -> None:
    _plant(tmp_path, "engine/llm.py", "")
    _plant(tmp_path, "text/user.py", "from gapless import LLM, __version__\n")
    (tmp_path / PACKAGE / "__init__.py").write_text("_HOME = {'LLM': 'gapless.engine.llm'}\n", encoding="utf-8")
    assert [re.sub(r";.*", "", v) for v in layer_violations(tmp_path)] == [
        "gapless/text/user.py:1: text may not import gapless.engine.llm"
    ]


def test_type_checking_imports_do_not_count(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gapless.loop import x\nelse:\n    import {}\n"
    _plant(tmp_path, "base/a.py", text.format("json"))
    assert layer_violations(tmp_path) == []
    _plant(tmp_path, "base/a.py", text.format("gapless.loop"))
    assert len(layer_violations(tmp_path)) == 1


def test_planted_libraries_cycles_and_sizes_are_caught(tmp_path: Path) -> None:
    _plant(tmp_path, "model/weights.py", "import safetensors\n")
    _plant(tmp_path, "plan/a.py", "import torch.nn\n")
    _plant(tmp_path, "loop/a.py", "import torch\nimport msgspec\nfrom gapless.loop import b\n")
    _plant(tmp_path, "loop/b.py", "def f():\n    import gapless.loop.a\n" + "    pass\n" * 600)
    assert [v.split(": ")[0] for v in library_violations(tmp_path)] == ["gapless/loop/a.py:2", "gapless/plan/a.py:1"]
    assert house.cycles(import_graph(tmp_path)) == [["gapless.loop.a", "gapless.loop.b"]]
    assert len(size_violations(tmp_path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "rows = 4 if device.kind != 'x' else 2",
        "if name in (names, 'npu'): pass",
        "x = y.device.type == other",
        "x = torch.zeros(1, device='cuda:1')",
        "_LIBRARY.impl('draw', draw, 'CUDA')",
        "x = ROWS['xpu']",
        "x = torch.cuda.current_stream()",
        "x = torch.version.hip",
        "x = y.is_cuda",
        "x = os.environ['CUDA_VISIBLE_DEVICES']",
        "from torch import xpu",
        "import torch.mps.profiler",
        "from gapless.device import Caps, CudaDevice",
    ],
)
def test_a_planted_question_for_a_kind_is_caught(tmp_path: Path, line: str) -> None:
    _plant(tmp_path, "device/a.py", line)
    fine = ("info = device.kind", "good = form.kind == 'json'", "HELP = 'a CPU, or CUDA'", "x = y.to(device=device)")
    _plant(tmp_path, "engine/a.py", "\n".join(fine))
    assert kind_violations(tmp_path) == []
    _plant(tmp_path, "engine/a.py", line)
    assert len(kind_violations(tmp_path)) == 1


def test_planted_faults_are_counted(tmp_path: Path) -> None:
    later = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gapless.base.{}\n"
    _plant(
        tmp_path, "base/a.py", later.format("b") + 'class Twin:\n    """Of a pair."""\n    x = 1\n    """The same."""\n'
    )
    _plant(
        tmp_path,
        "base/b.py",
        later.format("a") + 'class Twin:\n    """One that somebody told."""\n    x = 1  # twins\n',
    )
    _plant(tmp_path, "memory/c.py", "import gapless\nclass _Row:\n    pass\nHELP = 'the first so many'\n")
    clauses = "What it was. Those are. It says. The page of which. Where it ran. It has come. It goes on."
    _plant(tmp_path, "memory/e.py", f'"""{clauses}"""\nTwin = dict[str, int]\nSIZE, _SIZE = 1, 2\n')
    comments = "".join(f"# {clause}.\n" for clause in clauses.split(". "))
    _plant(tmp_path, "memory/f.py", f"{comments}try:\n    SIZE: int = 1\nexcept OSError:\n    _SIZE = 2\n")
    (tmp_path / PACKAGE / "memory/d.h").write_text("int told;  // nobody\n")
    (tmp_path / "README.md").write_text("Whoever reads\n")
    (tmp_path / "tests").mkdir()
    as_text = 'patch.object(x, "_row", 1)\npatch("gapless.a._row", 1)\nx.replace("_a", "_b")\nf("a", "_")\n'
    (tmp_path / "tests/test_c.py").write_text(
        "from x import _row, Row\nx._row\nself._own\nx.y._row = x.__dict__\nx._replace(a=1)\n" + as_text
    )
    counts = {what: len(found) for what, found in numbers(tmp_path).items()}
    assert list(counts.values()) == [2, 6, *[2] * 7, 1, 1, 5, 1, 0, 1], counts
    assert "Twin: base/a.py, base/b.py, memory/e.py" in numbers(tmp_path)["shared class names and aliases"]
    assert list(counts) == list(AT_MOST)


if __name__ == "__main__":
    print(report(ROOT))
    if "--all" in sys.argv:
        print("\n".join(f"{what}: {line}" for what, found in numbers(ROOT).items() for line in found))
