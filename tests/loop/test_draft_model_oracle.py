"""A draft model sees exactly what its model sees: one that is its model is always right, at any depth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from harness import VOCAB, Job, WaryModel, captures_at_once, check_at_rest, kernels_for, model_loop, run, script, sizes
from oracle_drafter import ErringDraft, SharingModel, drafted_by_model, drafts_beside_chunks

from gapless.base.params import SamplingParams
from gapless.base.records import Int32s, Request
from gapless.device import Device
from gapless.kernels.layout import REJECTED
from gapless.kernels.tables import Tables
from gapless.loop.build import Sizes
from gapless.loop.loop import Loop
from gapless.model.draft_model import DraftModel
from gapless.model.seam import KVCache, StepInputs
from gapless.step.speculation import Gate, Verify
from gapless.testing.sim import SimDevice

DRAFTS = 4


class WarySharing(SharingModel, WaryModel):
    """Shares its memory, and looks at its inputs."""


@contextmanager
def wrong_drafts() -> Iterator[list[int]]:
    """Collects the number of rows whose drafts were not all right, of each step that had any."""
    found, observe = list[int](), Gate.observe

    def look(gate: Gate, rows: Int32s, tokens: Int32s, verify: Verify) -> None:
        if verify.places > 1:
            found.append(int((tokens[:, 1:] == REJECTED).any(1).sum()))
        observe(gate, rows, tokens, verify)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "observe", look)
        yield found


def play(shape: Sizes, jobs: list[Job], device: Device, depth: int, errs: float = 0.0, **options: Any) -> Loop:
    model = WarySharing(VOCAB, shape.max_len)
    drafted = drafted_by_model(model, DRAFTS, errs, shape.rows)
    loop = model_loop(model, device, shape, depth, speculation=drafted, **options)
    run(loop, jobs)
    for job in jobs:
        job.check(f"depth {depth}, request {job.request.key}")
    check_at_rest(loop)
    device.close()
    return loop


def play_seed(seed: int, depth: int, errs: float) -> Loop:
    shape, device = sizes(seed), SimDevice(seed * 8 + depth, maps_host=seed % 4 == 0)
    graphs = captures_at_once(shape) if seed % 2 else {}
    kernels = kernels_for(seed)
    jobs = script(seed, shape.max_len)
    return play(shape, jobs, device, depth, errs, kernels=kernels, prefix_caching=seed % 5 != 0, **graphs)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
def test_a_draft_model_changes_no_token_and_its_own_tokens_are_always_right(depth, errs, guarded_steps):
    accepted = drafted = preempted = captured = hits = 0
    with guarded_steps.rest(), wrong_drafts() as wrong, drafts_beside_chunks() as beside:
        for seed in (*range(8), 11):
            loop = play_seed(seed, depth, errs)
            accepted += int(loop.launcher.gate.counts.accepted.sum())
            drafted += loop.launcher.gate.counts.draft_tokens
            preempted += loop.planner.preemptions
            captured += loop.counters.graph_steps
            hits += loop.counters.admitted_cached
    assert drafted > 50 and preempted and captured and hits and beside
    assert any(wrong) == (errs > 0)
    assert errs or accepted > 50


def job(key: int, prompt: list[int], length: int, turn: int = 0, aborts: int | None = None) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return Job(Request(key, np.array(prompt, np.int32), params, 0, (), 0, length), turn, aborts)


@pytest.mark.parametrize("page_size", [2, 4, 8])
def test_drafts_stay_right_over_page_edges_chunks_and_cached_prefixes(page_size, guarded_steps):
    for length in range(1, 12, 2):
        shape = Sizes(2, 40, 60, page_size, 7, queue=8, slots=0)
        prompt = [(7 * index) % VOCAB for index in range(length)]
        jobs = [job(0, prompt, 40), job(1, [*prompt, 5], 40, turn=30), job(2, [9], 30, turn=2, aborts=length)]
        with guarded_steps.rest(), wrong_drafts() as wrong:
            loop = play(shape, jobs, SimDevice(length), 4, kernels=kernels_for(length))
        assert loop.launcher.gate.counts.accepted.sum() > 5 and not any(wrong)


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
    with wrong_drafts() as wrong:
        play(Sizes(2, 40, 60, 4, 7, queue=8, slots=0), [job(0, [3, 1, 4], 40)], SimDevice(1), 2)
    assert any(wrong)
