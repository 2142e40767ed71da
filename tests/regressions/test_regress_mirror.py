"""Rows of the class mirror: the host's copy of what the device owns is stale where it is used."""

from __future__ import annotations

import numpy as np
import pytest
from harness import VOCAB, checksum_loop, request
from scenes import broken, job, tokens

from gapless.loop import settle as settling
from gapless.loop.spec import Sizes
from gapless.testing.checksum import continue_prompt
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded


def test_row_078_scores_of_many_tokens_a_step_go_to_their_own_requests():
    """Log-probabilities of a step were cut up by a count that was not each request's own, and went to others. Here
    every score names its row, generation and position: uneven chunks of prompts, and decoding rows, get their own."""
    jobs = [job(key, tokens(key, 3 + 5 * key), 4 + key) for key in range(5)]
    requests = [
        request(one.request.key, one.request.tokens.tolist(), 4 + one.request.key, logprobs=logprobs, prompt_logprobs=1)
        for one, logprobs in zip(jobs, (1, None, 5, 1, None), strict=True)
    ]

    def scene():
        for depth in (1, 4, 8):
            loop = checksum_loop(SimDevice(depth), Sizes(4, 48, 49, 4, 11, 16), depth, prefix_caching=False)
            for one in requests:
                loop.submit(one)
            best = {one.key: {} for one in requests}
            while loop.has_work():
                for scored in filter(None, (settled.logprobs for settled in loop.turn().tokens)):
                    columns = (scored.keys.tolist(), scored.positions.tolist(), scored.top_ids.tolist())
                    for key, place, top in zip(*columns, strict=True):
                        assert place not in best[key], f"request {key} has position {place} twice"
                        best[key][place] = top[0]
            for one, plain in zip(requests, jobs, strict=True):
                known = [*plain.request.tokens.tolist(), *plain.expected()]
                last = len(known) if one.params.logprobs is not None else len(one.tokens)
                expected = {place: continue_prompt(known[:place], 1, VOCAB)[0] for place in range(1, last)}
                assert best[one.key] == expected, f"request {one.key}"

    scene()

    def evenly_cut(lines, *rest):
        shares = np.array_split(np.arange(len(lines.rows)), len(set(lines.rows.tolist())))
        owners = [lines.rows[share[0]] for share in shares]
        rows = np.concatenate([np.full(len(share), row) for share, row in zip(shares, owners, strict=True)])
        return settle(lines._replace(rows=rows.astype(np.int32)), *rest)

    settle = settling.settle
    with broken(settling, "settle", evenly_cut):
        scene()
