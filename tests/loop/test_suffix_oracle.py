"""Drafts from other answers come from answers of the same tenant alone, and as many are right at every depth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import VOCAB, Job, WaryModel, model_loop, request, run
from oracles import by_suffixes, suffix_lookup
from scripted_drafter import MOST
from torch import Tensor

from gapless.kernels import native, plain
from gapless.kernels.layout import DRAFTED, LENGTH, OWN_TENANT
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.loop.spec import Sizes
from gapless.model.drafting.suffixes import Tenants
from gapless.pace.draft_gate import DraftGate, Verify
from gapless.testing.sim import SimDevice


def no_own_matches(rows: Tensor, tables: Tables, most: int, shortest: int, longest: int) -> Tensor:
    """Stands for `Kernels.look_up`: no row's own history has what it ends with."""
    tables.state[:, DRAFTED].index_copy_(0, rows.long(), tables.state[:, LENGTH].index_select(0, rows.long()))
    return torch.zeros_like(rows)


def ask(key: int, prompt: list[int], salt: str = "", turn: int = 0, length: int = 40) -> Job:
    return Job(request(key, prompt, length - len(prompt), salt=salt), turn)


def always_verify(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftGate, "decide", lambda gate, decode: Verify(MOST + 1 if decode else 1, drafts=True))


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_only_answers_of_the_same_tenant_are_drafted(kind, monkeypatch):
    always_verify(monkeypatch)
    kernels: Kernels | None = native.load() if kind == "native" else plain.KERNELS
    assert kernels is not None
    shape, suffixes = Sizes(1, 48, 60, 4, 24, queue=8, slots=0), suffix_lookup()
    loop = model_loop(
        WaryModel(VOCAB, 48), SimDevice(1), shape, 2, speculation=by_suffixes(suffixes, 1),
        kernels=kernels._replace(look_up=no_own_matches)
    )  # fmt: skip
    assert loop.launcher.gate is not None
    gained, prompt = [], [7, 3, 11, 2, 5, 13, 17, 19]
    for key, salt in enumerate(("planter", "planter", "other", "", "other", "planter")):
        before = loop.launcher.gate.report().right
        job = ask(key, prompt, salt)
        run(loop, [job])
        job.check()
        gained.append(loop.launcher.gate.report().right - before)
    first_times, again = [gained[0], gained[2], gained[3]], [gained[1], gained[4], gained[5]]
    assert max(first_times) == 0 and min(again) > 20
    assert set(suffixes.table[:, :, OWN_TENANT].unique().tolist()) == {0, 1, 2, 3}


def test_requests_without_drafts_leave_nothing_behind():
    shape, suffixes = Sizes(1, 48, 60, 4, 24, queue=8, slots=0), suffix_lookup()
    loop = model_loop(WaryModel(VOCAB, 48), SimDevice(1), shape, 2, speculation=by_suffixes(suffixes, 1))
    quiet = ask(0, [1, 2, 3])
    quiet.request = quiet.request._replace(params=replace(quiet.request.params, speculate=False))
    run(loop, [quiet])
    quiet.check()
    assert not suffixes.table.any()


def test_as_many_drafts_are_right_at_every_depth(monkeypatch, guarded_steps):
    always_verify(monkeypatch)
    found = []
    for depth in (1, 2, 4, 8):
        shape, suffixes = Sizes(1, 48, 60, 4, 24, queue=64, slots=0), suffix_lookup()
        drafts = by_suffixes(suffixes, 1)
        kernels = native.load()
        loop = model_loop(WaryModel(VOCAB, 48), SimDevice(depth), shape, depth, kernels=kernels, speculation=drafts)
        jobs = [ask(key, [key % 3, 5, 8, *range(key % 2)], turn=key) for key in range(12)]
        with guarded_steps.rest():
            run(loop, jobs)
        for job in jobs:
            job.check()
        assert loop.launcher.gate is not None
        counts = loop.launcher.gate.report()
        found.append((counts.draft_tokens, counts.accepted))
    assert found[0][0] > 50 and sum(found[0][1]) > 30 and all(counts == found[0] for counts in found)


def test_a_tenant_keeps_its_number_until_others_come():
    tenants = Tenants()
    assert [tenants.number(salt) for salt in ("a", "", "a", "b", "")] == [1, 2, 1, 3, 2]
    for other in range(4096):
        tenants.number(f"other {other}")
    assert tenants.number("a") == 4100, "a number that was another's would show it that one's answers"
