"""The pages "Add a ..." show the toys that these tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from extending.installed import TOYS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "extend"


@pytest.mark.parametrize("name", ["controller", "device", "part"])
def test_a_page_shows_its_toy_as_it_is_run(name):
    toy = (TOYS / f"{name}.py").read_text(encoding="utf-8")
    assert f"```python\n{toy}```\n" in (PAGES / f"{name}.md").read_text(encoding="utf-8")
