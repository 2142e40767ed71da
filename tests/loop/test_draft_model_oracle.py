"""A draft model sees exactly what its model sees: drafts stay right over all edges, and an unwritten entry shows."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from direct import run_directly
from harness import VOCAB, Job, request
from oracle_drafter import ErringDraft
from oracles import direct_plain, draft_model_loop
from sharpest import sharpest

from gapless.kernels.tables import Tables
from gapless.loop.spec import Sizes
from gapless.model.drafting.draft_model import DraftModel
from gapless.model.seam import KVCache, StepInputs
from gapless.testing.sim import SimDevice


def drafts_of(shape: Sizes, jobs: list[Job], seed: int, depth: int) -> Counter[str]:
    counts = Counter[str]()
    loop = draft_model_loop(seed, jobs, SimDevice(seed), shape, depth, counts)
    run_directly(loop, jobs, direct_plain)
    return counts + Counter(accepted=loop.launcher.gate.report().right)


def job(key: int, prompt: list[int], length: int, turn: int = 0, aborts: int | None = None) -> Job:
    return Job(request(key, prompt, length - len(prompt)), turn, aborts)


@pytest.mark.parametrize("page_size", sharpest([4, 2, 8]))
def test_drafts_stay_right_over_page_edges_chunks_and_cached_prefixes(page_size, guarded_steps):
    for length in range(1, 12, 2):
        shape = Sizes(2, 40, 60, page_size, 7, queue=8, slots=0)
        prompt = [(7 * index) % VOCAB for index in range(length)]
        jobs = [job(0, prompt, 40), job(1, [*prompt, 5], 40, turn=30), job(2, [9], 30, turn=2, aborts=length)]
        with guarded_steps.rest():
            counts = drafts_of(shape, jobs, length, 4)
        assert counts["accepted"] > 5 and not counts["wrong"]


def unwritten(inputs: StepInputs) -> StepInputs:
    """The same inputs, whose KV goes to the null page."""
    return inputs._replace(slots=torch.zeros_like(inputs.slots))


def forget_last_draft(patch: pytest.MonkeyPatch) -> None:
    """The KV of a step's last draft is not written."""
    forward = DraftModel.forward

    def forgetful(head: Any, inputs: StepInputs, *rest: Any) -> torch.Tensor:
        passes, draft = itertools.count(1), head.draft.forward

        def run(step: StepInputs, *more: Any) -> torch.Tensor:
            return draft(unwritten(step) if next(passes) == inputs.places > 1 else step, *more)

        with patch.context() as inner:
            inner.setattr(head.draft, "forward", run)
            return forward(head, inputs, *rest)

    patch.setattr(DraftModel, "forward", forgetful)


def forget_chunks(patch: pytest.MonkeyPatch) -> None:
    """The KV of prompts is not written."""
    forward = ErringDraft.forward

    def forgetful(draft: Any, inputs: StepInputs, *rest: Any) -> torch.Tensor:
        return forward(draft, inputs if inputs.starts is None else unwritten(inputs), *rest)

    patch.setattr(ErringDraft, "forward", forgetful)


def forget_plain_steps(patch: pytest.MonkeyPatch) -> None:
    """Steps without drafts run the model alone."""
    forward = DraftModel.forward

    def forgetful(head: Any, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> torch.Tensor:
        if inputs.places == 1 and inputs.starts is None:
            return head.model.forward(inputs, plan, cache)
        return forward(head, inputs, plan, tables, cache)

    patch.setattr(DraftModel, "forward", forgetful)


@pytest.mark.parametrize("mutate", [forget_last_draft, forget_chunks, forget_plain_steps])
def test_an_entry_that_a_draft_model_did_not_write_shows_in_its_drafts(monkeypatch, mutate):
    mutate(monkeypatch)
    assert drafts_of(Sizes(2, 40, 60, 4, 7, queue=8, slots=0), [job(0, [3, 1, 4], 40)], 4, 2)["wrong"]
