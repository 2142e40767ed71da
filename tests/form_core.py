"""A core without a model that honours forms of output: it draws each token at random from the matcher's mask."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import numpy as np

from gapless.base.records import Request, Turn
from gapless.grammar.compiler import Compiler
from gapless.grammar.vocabulary import make_vocabulary
from gapless.testing.core import FakeCore
from gapless.text.tokenizer import Tokenizer

QUEUE = 300
"""Requests that may wait for a matcher, and as many for a place"""

CLOSING = '"}]:,.0'
"""Characters that bring JSON to its end, the best first."""


class FormCore(FakeCore):
    """`plain` is the script of requests without a form; each form is spoken freely for `freely` tokens, then ended."""

    def __init__(self, tokenizer: Tokenizer, plain=lambda request, count: 0, freely: int = 12, seconds: float = 10.0):
        super().__init__(tokenizer.vocab_size, script=self._next_token, max_queue=QUEUE)
        self.vocabularies = 0
        self._matched = deque()
        self._tokenizer = tokenizer
        self._plain, self._freely = plain, freely
        self._compiler = Compiler(self.vocabulary, self.bell.ring, QUEUE, seconds)

    def vocabulary(self):
        self.vocabularies += 1
        return make_vocabulary(self._tokenizer, self.info.vocab_size, (self._tokenizer.eos_token_id,))

    def submit(self, request: Request) -> None:
        if request.params.structured_outputs is None:
            super().submit(request)
        else:
            self._compiler.submit(request)

    def abort(self, key: int) -> None:
        self._compiler.abort(key)
        self._matched = deque(request for request in self._matched if request.key != key)
        super().abort(key)

    def has_work(self) -> bool:
        return super().has_work() or bool(self._matched) or self._compiler.waiting > 0

    def step(self):
        ready, refused = self._compiler.take()
        self._matched += ready
        while self._matched and len(self._waiting) < QUEUE:
            super().submit(self._matched.popleft())
        if super().has_work():
            return super().step()._replace(failed=refused)
        if not refused and self.bell.wait(0.05):
            self.bell.clear()
        return Turn([], [], refused)

    def stats(self):
        return replace(super().stats(), grammars=self._compiler.report())

    def close(self) -> None:
        self._compiler.close()
        super().close()

    def _next_token(self, request: Request, count: int) -> int:
        if request.matcher is None:
            return self._plain(request, count)
        words = np.zeros(-(-self.info.vocab_size // 32), np.int32)
        request.matcher.write_mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        rng = random.Random(request.seed + count)
        token = int(rng.choice(allowed))
        if count >= self._freely and rng.random() < 0.8:
            closing = [self._tokenizer.eos_token_id, *map(self._tokenizer.token_id, CLOSING)]
            token = next((one for one in closing if one in allowed), token)
        request.matcher.advance([token])
        return token
