"""Log-probabilities beside the text that they belong to, since only some of a reply is text of a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gapless.base.params import SamplingParams
from gapless.engine.outputs import Delta
from gapless.engine.stream import OutputStream
from gapless.server.logprobs import ChatTokenLogprob, ChatWriter
from gapless.text.incremental import Detokenizer
from gapless.text.tokenizer import Tokenizer


class ScoredText(NamedTuple):
    """Tokens, their text, and their log-probabilities if those are wanted."""

    tokens: Sequence[int]
    text: str
    scores: Sequence[ChatTokenLogprob] = ()


class TokenSplitter:
    """Splits deltas into single tokens. The text of a token may come in a later delta, as before a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stream: OutputStream) -> None:
        self._writer = ChatWriter(tokenizer, params.logprobs or 0)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, stream.prompt_token_ids)
        self._due: deque[tuple[int, int, ChatTokenLogprob]] = deque()
        """Tokens whose text has not come, and its length"""
        self._text = ""

    def split(self, delta: Delta) -> Iterator[ScoredText]:
        scores = self._writer.write(delta.token_ids, delta.logprobs or ()).content
        for token, score in zip(delta.token_ids, scores, strict=True):
            self._due.append((token, len(self._detokenizer.push(token)), score))
        self._text += delta.text
        while self._due and self._due[0][1] <= len(self._text):
            token, size, score = self._due.popleft()
            yield ScoredText([token], self._text[:size], [score])
            self._text = self._text[size:]
        if delta.finish_reason is not None:  # a stop string has cut off the text of the last tokens
            yield ScoredText([token for token, _, _ in self._due], self._text)
