"""Masks on a device that cannot use the host's memory: the tokens are those of a direct computation."""

from __future__ import annotations

import pytest
from oracles import MASKED, masked_drafts, play

from gapless.device import CpuDevice
from gapless.loop.masks import Masks
from gapless.step.mail import CopiedMail
from gapless.testing.sim import SimDevice


@pytest.fixture(autouse=True)
def copied(monkeypatch):
    """Have devices own memory; afterwards, each engine's mail was copied."""
    made = []
    begin = Masks.__init__

    def noted(masks, device, mail, *rest):
        made.append(mail)
        begin(masks, device, mail, *rest)

    monkeypatch.setattr(Masks, "__init__", noted)
    for kind in (CpuDevice, SimDevice):
        monkeypatch.setattr(kind, "caps", kind.caps._replace(own_memory=True))
    yield
    assert made and all(isinstance(mail, CopiedMail) for mail in made)


@pytest.mark.parametrize("oracle", [MASKED, masked_drafts(0.3)], ids=["plain", "drafts"])
def test_copied_masks_give_the_direct_tokens(oracle, guarded_steps):
    with guarded_steps.rest():
        counts = play(oracle, range(400, 402), 4, mood="lazy")
    assert counts["written"] and counts["held"], counts


@pytest.mark.parametrize("oracle", [MASKED, masked_drafts(None, natives=True)], ids=["plain", "expected tokens"])
def test_copied_masks_give_the_direct_tokens_on_threads(oracle, guarded_steps):
    with guarded_steps.rest():
        counts = play(oracle, range(300, 303), 4, threads=True, chain=8)
    assert counts["written"] > 5, counts
