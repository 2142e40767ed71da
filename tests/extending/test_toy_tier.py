"""A tier from outside the package: the page's program loads what an earlier start has stored."""

from __future__ import annotations

import re

from extending.installed import TOYS, install
from extending.test_extension_pages import PAGES


def test_a_tier_from_outside_loads_the_pages_that_an_earlier_start_stored(tmp_path, monkeypatch, capsys):
    install(tmp_path, "gapless.kv_tiers", sqlite="tier:SqliteTier")
    for path in (TOYS, tmp_path):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**11)  # the machine may be busy
    page = (PAGES / "tier.md").read_text(encoding="utf-8")
    *_, program = re.findall(r"```python\n(.*?)```\n", page, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```\n", page, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == printed
