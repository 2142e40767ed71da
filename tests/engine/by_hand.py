"""A request whose tokens come by hand, without an engine."""

import numpy as np
from fronts import TOKENIZER

from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request, StepLogprobs, StepTokens
from gapless.engine.inputs import Resolved
from gapless.engine.stream import OutputStream
from gapless.engine.tracker import Tracker

A = TOKENIZER.token_id("a")


class CountedStream(OutputStream):
    """Counts how often its reader is woken."""

    woken = 0

    def wake(self):
        self.woken += 1
        super().wake()


class ByHand:
    """A prompt of three tokens with `n` completions, whose keys begin with 1; it is its own sink if it `takes` news."""

    def __init__(self, n=1, takes=False, **asked):
        self.aborted, self.seen, self.answer = [], [], True
        self.tracker = Tracker(TOKENIZER, self.aborted.append)
        tokens, params = np.array([3, 4, 5], np.int32), SamplingParams(max_tokens=9, n=n, **asked)
        requests = tuple(Request(key, tokens, params, 0, (), 0, 12) for key in range(1, n + 1))
        resolved = Resolved(None, tokens, params, requests)
        self.stream = CountedStream("r", resolved, self.tracker, 0, self if takes else None)
        self.tracker.open(self.stream)

    def put(self, delta):
        self.seen.append(delta)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def say(self, flag=Flag.LIVE, keys=(1,), scored=()):
        """A step that gives each key a token, and scores these positions of the first one's prompt."""
        lines, column = None, np.full(len(keys), int(flag), np.int32)
        if scored:
            count, zeros = len(scored), np.zeros((len(scored), 1), np.int32)
            lines = StepLogprobs(
                np.full(count, 1), np.array(scored, np.int32), np.full(count, -1.0, np.float32),
                np.ones(count, np.int32), zeros, zeros.astype(np.float32),
            )  # fmt: skip
        self.tracker.on_tokens(StepTokens(1, np.array(keys, np.int64), np.full_like(column, A), column, lines))
