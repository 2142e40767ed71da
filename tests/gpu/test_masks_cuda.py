"""Masks on a GPU, whose kernels read and write pinned memory of the host: checks of tests/kernels, and an engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from automaton import ASKED, Automaton
from mask_cases import check_expected, check_mask, check_reply

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore, build_core
from gapless.kernels.all_triton import TRITON_KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]


@pytest.mark.parametrize("vocab", [5, 32, 131, 2500, 151_936])
@pytest.mark.parametrize("places", [1, 5, 9])
def test_a_row_loses_what_its_mask_leaves_out_and_is_late_without_one(vocab: int, places: int) -> None:
    for seed in range(6):
        check_mask(TRITON_KERNELS, vocab, "cuda", seed, places)


@pytest.mark.parametrize("width", [1, 3, 9])
def test_a_live_row_that_got_a_token_has_it_in_its_mail(width: int) -> None:
    for seed in range(6):
        check_reply(TRITON_KERNELS, 131, "cuda", seed, width)


@pytest.mark.parametrize("width", [2, 5, 9])
def test_a_row_that_got_what_was_expected_drafts_what_is_expected_next(width: int) -> None:
    for seed in range(6):
        check_expected(TRITON_KERNELS, 131, "cuda", seed, width)


class Slow(Automaton):
    """Needs longer than a step of a small model."""

    def write_mask(self, words):
        time.sleep(0.005)
        super().write_mask(words)


def run(core: EngineCore, kind: type[Automaton] | None) -> list[list[int]]:
    """The tokens of eight rows, of which every other one has a matcher of this kind."""
    tokens: dict[int, list[int]] = {key: [] for key in range(8)}
    for key in tokens:
        matcher = kind(key, core.info.vocab_size) if kind and key % 2 else None
        asks = {"structured_outputs": ASKED} if matcher else {}
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=key, max_tokens=None, ignore_eos=True, **asks)
        core.submit(Request(key, np.arange(1, 9, dtype=np.int32), params, key, (), 0, 56, matcher=matcher))
    while core.has_work():
        for settled in core.step()[1]:
            for key, token, _ in settled.entries():
                tokens[key].append(token)
    return list(tokens.values())


def test_masked_rows_get_the_same_tokens_at_every_depth_and_however_late_their_masks_are() -> None:
    found, held = [], 0
    for depth in ("1", "8", "auto"):
        config = EngineConfig("demo", device="cuda", dtype="float32", depth=depth, max_num_seqs=8, batch_invariant=True)
        core = build_core(config)
        plain = run(core, None)
        found += [run(core, Automaton), run(core, Slow)]
        held += core.loop.counters.held_rows
        core.close()
        assert found[-1][::2] == plain[::2], "the neighbours' tokens"
    assert all(tokens == found[0] for tokens in found) and held > 0
