"""The pages "Add a ..." show the toys that run here, letter by letter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from extending.installed import TOYS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "extend"
BY_DIFF = {"sampling-parameter"}
"""Pages with a diff of the package, which test_extending applies"""
OF_THE_PACKAGE = {"device": ("gapless/testing/fake.py", "FakeDevice")}
"""Pages that show a class of the package instead of a toy"""
OTHER_NAMES = {"model": "family"}


@pytest.mark.parametrize("page", sorted({path.stem for path in PAGES.glob("*.md")} - {*BY_DIFF, *OF_THE_PACKAGE}))
def test_a_page_shows_its_toy_as_it_is_run(page):
    toy = (TOYS / f"{OTHER_NAMES.get(page, page)}.py").read_text(encoding="utf-8")
    assert f"```python\n{toy}```\n" in (PAGES / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", OF_THE_PACKAGE)
def test_a_page_shows_its_class_as_the_package_has_it(page):
    file, name = OF_THE_PACKAGE[page]
    source = (PAGES.parents[1] / file).read_text(encoding="utf-8")
    shown = next(part for part in ast.parse(source).body if isinstance(part, ast.ClassDef) and part.name == name)
    assert f"```python\n{ast.get_source_segment(source, shown)}\n```\n" in (PAGES / f"{page}.md").read_text("utf-8")
