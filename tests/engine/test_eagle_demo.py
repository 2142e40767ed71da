"""The demo model with its EAGLE-3 head: drafts are those of the training code, and tokens those of a run without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_spy import spy_on_drafts
from oracle_drafter import drafts_beside_chunks
from safetensors.torch import load_file
from sharpest import sharpest

from examples.demo_model.head import Chains, Head, hidden_of, restore_head
from examples.demo_model.train_head import demo_network
from gapless import LLM, SamplingParams
from gapless.demo import head_dir, weights_dir
from gapless.engine import share
from gapless.kernels import native, plain
from gapless.kernels.layout import TEMPERATURE

pytestmark = pytest.mark.usefixtures("fixed_costs")
DRAFTS = 4
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 160}
QUESTIONS = [
    "Mia has 14 pens and buys 7 more. How many pens does Mia have?",
    "Repeat: ribbons Prague flowers buttons",
    "What is 48 + 37?",
    "Hello",
    "Tom has 32 apples and gives away 8. How many apples does Tom have?",
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True, "max_tokens": None},  # up to max_model_len
    {"temperature": 0.8, "seed": 2, "top_k": 20},
    {"temperature": 0, "frequency_penalty": 0.3},
    {"temperature": 0},
]
PARAMS = [SamplingParams(**{"max_tokens": 40 + place, **asked}) for place, asked in enumerate(ASKED)]


def config(drafts: int = DRAFTS) -> dict[str, Any]:
    return {"method": "eagle3", "num_speculative_tokens": drafts}


def answers(llm: LLM) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0].token_ids for output in llm.chat(chats, PARAMS, use_tqdm=False)]


def trained_head() -> tuple[Any, Head]:
    """The demo model and its head in the training code, with the packaged weights."""
    network, _ = demo_network(weights_dir())
    tensors = load_file(str(head_dir() / "model.safetensors"))
    head = restore_head(network, tensors)
    return network, head


@pytest.mark.seeds
@pytest.mark.parametrize(("exact", "off", "alike"), [(True, 1e-2, 1.0), (False, 0.5, 0.95)])
def test_drafts_are_those_of_the_training_code(monkeypatch, exact, off, alike):
    if exact:  # layers of bytes round
        monkeypatch.setattr(native, "draft_linear", lambda matrix: native.NativeLinear(matrix.tensors[0], matrix.bias))
    spies = spy_on_drafts(monkeypatch)
    options = {"enforce_eager": True, "enable_prefix_caching": False, "speculative_config": config()}
    with LLM("demo", **SMALL, **options) as llm, drafts_beside_chunks() as beside:
        answers(llm)
    assert len(beside) > 1
    network, head = trained_head()
    seen = [drafted for drafted in spies[0].seen() if drafted.drafts]
    assert len(seen) > 15
    assert {bool(one.params[TEMPERATURE]) for one in seen} == {True, False}
    same = []
    for one in seen:
        known, drafts = one.known, one.drafts
        ids = torch.tensor([known + drafts])
        place = Chains(torch.tensor([[len(known) - 1]]), torch.ones(1, 1, dtype=torch.bool))
        with torch.no_grad():
            logits = head.unrolled(ids, hidden_of(network, ids).states, place, len(drafts))
        for index, (draft, line) in enumerate(zip(drafts, (some[0, 0] for some in logits), strict=True)):
            scores = one.scores(line, index, head.tokens)
            assert scores[head.tokens == draft] >= scores.max() - off
            same.append(bool(scores[head.tokens == draft] >= scores.max() - 1e-2))
    assert sum(same) >= alike * len(same)


@pytest.fixture(scope="module")
def reference():
    """The answers without drafts."""
    with LLM("demo", **SMALL, depth="1", enforce_eager=True) as llm:
        return answers(llm)


@pytest.mark.parametrize(("drafts", "depth"), sharpest([(4, "4"), (1, "2"), (4, "1"), (4, "8"), (8, "2")]))
def test_tokens_are_those_without_drafts_at_every_depth(drafts, depth, reference):
    with LLM("demo", **SMALL, depth=depth, num_gpu_blocks_override=11, speculative_config=config(drafts)) as llm:
        assert [answers(llm) for _ in range(2)] == [reference] * 2
        stats = llm.stats()
    assert stats.drafts.accepted[0] > 0.25 * stats.drafts.drafts > 2
    assert stats.queue.preemptions or drafts != DRAFTS


@pytest.mark.seeds
def test_tokens_of_plain_kernels_are_those_without_drafts(monkeypatch):
    monkeypatch.setattr(share, "choose", lambda *asked: plain.KERNELS)
    found = []
    for speculative in (None, config()):
        with LLM("demo", **SMALL, speculative_config=speculative) as llm:
            found.append(answers(llm))
            drafts = llm.stats().drafts.drafts
    assert found[0] == found[1] and drafts > 10
