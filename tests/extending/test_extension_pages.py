"""The pages "Add a ..." show the toys that run here, letter by letter."""

from __future__ import annotations

from pathlib import Path

import pytest
from extending.installed import TOYS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "extend"
BY_DIFF = {"sampling-parameter"}
"""Pages with a diff of the package, which test_extending applies"""
OTHER_NAMES = {"model": "family"}


@pytest.mark.parametrize("page", sorted({path.stem for path in PAGES.glob("*.md")} - BY_DIFF))
def test_a_page_shows_its_toy_as_it_is_run(page):
    toy = (TOYS / f"{OTHER_NAMES.get(page, page)}.py").read_text(encoding="utf-8")
    assert f"```python\n{toy}```\n" in (PAGES / f"{page}.md").read_text(encoding="utf-8")
