"""Requests that an engine runs before it is ready."""

from __future__ import annotations

import numpy as np

from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.records import Request
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes

WARM_UP_KEY = -1 << 62
WARM_UP_TOKENS = 2
"""Tokens of the warm-up prompt, one of them scored: on a slow processor a few more of a large model take a second."""


def warm_up(loop: Loop, sizes: Sizes, largest: bool) -> None:
    """Run requests through the whole loop, to wake thread pools, libraries and kernels before ready.

    First a short one; then, if `largest`, a step of the most tokens: a GPU without the memory for it fails now. A CPU
    would take seconds for such a step.
    """
    longest = sizes.max_len - 1
    whole, rest = divmod(sizes.step_tokens, longest)
    together = ([longest] * whole + [rest] * (rest > 0))[: min(sizes.rows, sizes.queue)] if largest else []
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    key = WARM_UP_KEY
    for lengths in ([min(WARM_UP_TOKENS, longest)], together):
        for length in lengths:
            loop.submit(Request(key, np.zeros(length, np.int32), params, 0, (), 0, length + 1))
            key += 1
        while loop.has_work():
            loop.turn()
    if loop.parts.transfers is not None:
        loop.parts.transfers.warm_up()
    for pool in loop.pools:
        pool.forget()
