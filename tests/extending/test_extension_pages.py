"""The pages "Add a ..." show the toys that these tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from extending.installed import TOYS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "extend"


@pytest.mark.parametrize("page, toy", [("controller", "controller"), ("device", "device"), ("lane", "lane"), ("model", "family")])
def test_a_page_shows_its_toy_as_it_is_run(page, toy):
    shown = (TOYS / f"{toy}.py").read_text(encoding="utf-8")
    assert f"```python\n{shown}```\n" in (PAGES / f"{page}.md").read_text(encoding="utf-8")
