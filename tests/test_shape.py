"""How large the pieces of the house are: fields of a class, parameters of a function, lines of the loop.

`python tests/test_shape.py` prints each number beside the most that it may be; with `--all`, what is behind it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
from house import PACKAGE

pytestmark = pytest.mark.house
ROOT = Path(__file__).resolve().parent.parent

CORE = ("plan", "loop", "memory", "offload", "step", "pace")
MOST_FIELDS, MOST_PARAMETERS, MOST_LOOP_LINES = 14, 7, 300
AT_MOST = {"classes with too many fields": 9, "functions with too many parameters": 8, "lines of the loop": 300}
"""What the house wants to be 0, or at most 300 lines, and what it is today: these numbers only fall."""


def fields(node: ast.ClassDef) -> set[str]:
    """The attributes that a mutable class gives its objects; none for tuples, frozen records, and protocols."""
    bases = {ast.unparse(base).split("[")[0] for base in node.bases}
    frozen = any("frozen=True" in ast.unparse(one) for one in node.decorator_list)
    if frozen or bases & {"NamedTuple", "Protocol", "Enum", "IntEnum", "StrEnum", "TypedDict"}:
        return set()
    record = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    own = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    begins = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    stores = [
        inner.attr
        for begin in begins for inner in ast.walk(begin)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    ]  # fmt: skip
    return set(stores) | (own if record else set())


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller may give."""
    asked = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in asked if one.arg not in ("self", "cls")])


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for path in house.python_files(root / PACKAGE):
        yield path.relative_to(root / PACKAGE).as_posix(), path


def large_classes(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno}: {node.name} has {len(found)}"
        for name, path in _files(root) if name.split("/")[0] in CORE
        for node in house.nodes(path)
        if isinstance(node, ast.ClassDef) and len(found := fields(node)) > MOST_FIELDS
    ]  # fmt: skip


def long_signatures(root: Path) -> list[str]:
    """Functions with more than MOST_PARAMETERS, but those that run on a GPU, whose arguments are words."""
    return [
        f"{name}:{node.lineno}: {node.name}() has {parameters(node)}"
        for name, path in _files(root)
        if not name.endswith("_triton.py") and name != "__init__.py"
        for node in house.nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MOST_PARAMETERS
    ]


def numbers(root: Path) -> dict[str, list[str]]:
    loop = root / PACKAGE / "loop" / "loop.py"
    return {
        "classes with too many fields": large_classes(root),
        "functions with too many parameters": long_signatures(root),
        "lines of the loop": loop.read_text(encoding="utf-8").splitlines(),
    }


def report(root: Path) -> str:
    return "\n".join([f"{len(found):>5} {what}, at most {AT_MOST[what]}" for what, found in numbers(root).items()])


def test_the_pieces_of_the_house_only_shrink() -> None:
    found = numbers(ROOT)
    assert not {what: lines for what, lines in found.items() if len(lines) > AT_MOST[what]}


def test_large_pieces_are_found_when_planted(tmp_path) -> None:
    plan, loop = tmp_path / PACKAGE / "plan", tmp_path / PACKAGE / "loop"
    plan.mkdir(parents=True)
    loop.mkdir()
    (loop / "loop.py").write_text("x = 1\n")
    stores = "".join(f"        self.a{n} = 0\n" for n in range(MOST_FIELDS + 1))
    given = ", ".join(f"b{n}" for n in range(MOST_PARAMETERS + 1))
    record = "@dataclass\nclass Record:\n" + "".join(f"    a{n}: int\n" for n in range(MOST_FIELDS + 1))
    frozen = record.replace("@dataclass", "@dataclass(frozen=True)")
    (plan / "a.py").write_text(
        f"class Large:\n    def __init__(self):\n{stores}\n{record}\n{frozen}\ndef f({given}): ...\n"
    )
    assert [len(lines) for lines in numbers(tmp_path).values()] == [2, 1, 1]


if __name__ == "__main__":
    print(report(ROOT))
    if "--all" in sys.argv:
        print(
            "\n".join(
                f"{what}: {line}" for what, found in numbers(ROOT).items() for line in found if "loop" not in what
            )
        )
