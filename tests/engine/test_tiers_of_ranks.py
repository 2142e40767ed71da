"""Copies of pages of engines of several ranks: in the host's memory, on a disk, and from a prefiller."""

from __future__ import annotations

import re
import subprocess
import threading
import time

import numpy as np
import pytest
from test_kv_tiers import OPTIONS, PROMPTS, answers, expected, no_hurry, token_ids, wait_for_stores  # noqa: F401
from waiting import until

from gapless import LLM, EngineDeadError
from gapless.engine import rank_process
from gapless.offload.tiers.frames import PeerRefused, check_same
from gapless.offload.tiers.seam import Namespace
from gapless.offload.transfers import Transfers

pytestmark = pytest.mark.process
RANKS = OPTIONS | {"tensor_parallel_size": 2}


@pytest.mark.parametrize(("depth", "size"), [("auto", "64MiB"), ("1", "64MiB"), ("4", "3MiB")])
def test_two_ranks_load_what_their_devices_gave_up(expected, depth, size):  # noqa: F811
    with LLM("demo", **RANKS, depth=depth, kv_tiers=[f"host:{size}"]) as llm:
        orders = [PROMPTS, PROMPTS[::-1], PROMPTS]  # the last ones are still there when the first ones are not
        found = [token_ids(answers(llm, order)) for order in orders]
        tier, steps = llm.stats().tier, llm.stats().steps
    assert found == [expected, expected[::-1], expected]
    assert tier.loaded > 15 and not tier.refused and steps.admitted_loaded > 240
    assert bool(tier.evicted) == (size == "3MiB"), "64 MiB hold all"


def test_pages_of_two_ranks_are_loaded_from_disk_after_a_restart_and_one_rank_has_others(tmp_path, expected):  # noqa: F811
    options = {"kv_tiers": ["host:64MiB", f"disk:{tmp_path}:64MiB"]}
    with LLM("demo", **RANKS, **options) as llm:
        assert token_ids(answers(llm, PROMPTS)) == expected
        wait_for_stores(llm)
    with LLM("demo", **RANKS, **options) as llm:
        assert token_ids(answers(llm, PROMPTS)) == expected
        lower = llm.stats().lower[0]
        assert lower.loaded > 16 and not lower.refused
    with LLM("demo", **OPTIONS, **options) as llm:
        assert not any(output.num_cached_tokens for output in answers(llm, PROMPTS)), "pages of two ranks"


def test_a_decoder_of_two_ranks_takes_pages_of_a_prefiller_of_two(tmp_path, expected):  # noqa: F811
    address = f"unix:{tmp_path}/kv.sock"
    with LLM("demo", role="prefill", kv_peer_listen=address, **RANKS) as prefiller:
        assert token_ids(answers(prefiller, PROMPTS)) == expected
        wait_for_stores(prefiller)
        with LLM("demo", role="decode", kv_peers=[address], **RANKS) as decoder:
            outputs = answers(decoder, PROMPTS)
            stats = decoder.stats()
    assert token_ids(outputs) == expected
    assert stats.lower[0].loaded > 16 and stats.steps.admitted_loaded > 256


def test_peers_of_other_numbers_of_ranks_are_refused_with_both():
    ours, theirs = (Namespace.of({"model": "demo", "ranks": ranks}) for ranks in (1, 2))
    with pytest.raises(PeerRefused, match=r"^the peer's pages are of something else: ranks 2, ours 1$"):
        check_same(ours, theirs.digest, theirs.text.encode())


@pytest.fixture
def transfers(monkeypatch):
    """The transfers of the engines that a test starts."""
    made = []

    class NotedTransfers(Transfers):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("gapless.loop.build.Transfers", NotedTransfers)
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_of_one_ranks_part_is_refused_and_the_page_computed(transfers, expected, rank):  # noqa: F811
    with LLM("demo", **RANKS, kv_tiers=["host:64MiB"]) as llm:
        assert token_ids(answers(llm, PROMPTS)) == expected
        (one,) = transfers
        parts = np.frombuffer(one.memory[0], np.uint8).reshape(-1, one.stride(0))
        parts[:, rank * one.slots[0][0].nbytes + 5] ^= 1
        assert token_ids(answers(llm, PROMPTS)) == expected
        tier = llm.stats().tier
    assert tier.refused > 16


def test_a_rank_killed_amid_transfers_ends_the_engine_by_name(monkeypatch):
    started, popen = [], subprocess.Popen

    def noted(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(rank_process.subprocess, "Popen", noted)
    with LLM("demo", **RANKS, kv_tiers=["host:64MiB"]) as llm:
        failures = []
        thread = threading.Thread(target=lambda: failures.append(failure_of(llm)))
        thread.start()
        until(lambda: llm.stats().tier.loaded > 60)
        began = time.monotonic()
        started[0].kill()
        thread.join(60)
        assert time.monotonic() - began < 10
    assert re.match("rank 1 was killed by SIGKILL", str(failures[0]))


def failure_of(llm):
    try:
        while True:
            answers(llm, PROMPTS)
    except EngineDeadError as error:
        return error
