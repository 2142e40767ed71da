"""Drafts on a GPU: the checks of tests/kernels, and the checksum model's tokens at any depth with an oracle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "loop"))

from draft_cases import check_accept, check_begin, check_begin_beside, check_look_up, check_sample
from oracle_drafter import cost
from score_cases import check_score
from suffix_cases import check_recall, check_remember
from test_draft_oracle import play

from gapless import LLM, SamplingParams
from gapless.device import CudaDevice
from gapless.kernels.all_triton import KERNELS
from gapless.kernels.views import Recall
from gapless.step.speculation import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]


EAGLE = {"method": "eagle3", "num_speculative_tokens": 4}
ITSELF = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 4}


@pytest.mark.parametrize("places", [1, 2, 5])
def test_places_begin_end_and_draw_as_their_rows_would(places: int) -> None:
    for seed in range(8):
        check_begin(KERNELS, "cuda", seed, places)
        check_begin_beside(KERNELS, "cuda", seed, places, [3, 1, 7, 9, 2, 0])
        check_accept(KERNELS, "cuda", seed, places, 5)
        if places > 1:
            check_sample(KERNELS, "cuda", seed, places, 4000)


def test_what_followed_before_is_drafted() -> None:
    assert sum(check_look_up(KERNELS, "cuda", seed, 4, (2, 4)) for seed in range(12)) > 10


def test_every_token_that_a_row_with_drafts_got_is_scored() -> None:
    listed = [place * 7 + row for row in (0, 2, 3, 4, 6) for place in range(3)]
    check_score(KERNELS.score, "ties", torch.bfloat16, "cuda", 7, 4999, listed, 5, places=3)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
@pytest.mark.usefixtures("reserved_memory")
def test_drafts_change_no_token(depth: int, errs: float) -> None:
    loops = [play(seed, CudaDevice(), depth, errs) for seed in (0, 9, 12)]
    assert all(loop.launcher.gate is not None and loop.launcher.gate.counts.draft_tokens for loop in loops)


@pytest.mark.parametrize("speculative", [EAGLE, ITSELF], ids=("head", "draft model"))
def test_a_head_drafts_inside_captured_steps_and_changes_no_token(
    speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = Gate.learn  # steps with drafts take twice as long as others, whatever else the machine does
    monkeypatch.setattr(Gate, "learn", lambda gate, kind, batch, *_: learn(gate, kind, batch, cost(batch)))
    chats = [[{"role": "user", "content": f"{name} has {n} pens and buys 7 more. How many pens does {name} have?"}]
             for n in (14, 25, 38) for name in ("Mia", "Tom")]  # fmt: skip
    asked = [SamplingParams(temperature=0.7 * (i % 3 == 2), seed=i, max_tokens=60) for i in range(len(chats))]
    options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "batch_invariant": True}
    found = []
    for depth, config in (("1", None), ("1", speculative), ("4", speculative), ("auto", speculative)):
        with LLM("demo", **options, depth=depth, speculative_config=config) as llm:
            found.append([output.outputs[0].token_ids for output in llm.chat(chats, asked, use_tqdm=False)])
            stats = llm.stats()
        assert stats.captures_refused == 0
        if config:
            assert sum(stats.accepted) > 0.5 * stats.draft_tokens > 20
    assert all(tokens == found[0] for tokens in found[1:])


@pytest.mark.parametrize(("width", "lengths"), [(1, 3), (5, 2)])
def test_what_followed_in_other_answers_is_noted_and_drafted(width: int, lengths: int) -> None:
    assert sum(check_remember(KERNELS, "cuda", seed, width, lengths, steps=40) for seed in range(6)) > 30
    assert sum(check_recall(KERNELS, "cuda", seed, Recall(4, 1000, 100), lengths) for seed in range(6)) > 0
