"""Log-probabilities beside the text that they belong to, since only some of a reply is text of a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gapless.base.params import SamplingParams
from gapless.engine.outputs import Delta
from gapless.engine.stream import OutputStream
from gapless.server.logprobs import ChatTokenLogprob, ChatWriter
from gapless.text.call_values import WHITE
from gapless.text.incremental import Detokenizer
from gapless.text.replies import ReplyReader
from gapless.text.reply_parser import Content, Reasoning, ReplyEvent
from gapless.text.tokenizer import Tokenizer


class _Due(NamedTuple):
    """A token whose text has not come: the length of that text, and the log-probabilities that go with it."""

    token: int
    size: int
    scores: Sequence[ChatTokenLogprob]


class ReplyScores:
    """Finds the log-probabilities of what a `reader` makes of a reply. `stream` is the engine's request."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, stream: OutputStream, reader: ReplyReader | None
    ) -> None:
        self._writer = ChatWriter(tokenizer, params.logprobs or 0)
        self._bytes_of = tokenizer.bytes_of[params.skip_special_tokens]
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, stream.prompt_token_ids)
        self._reader = reader
        self._open: list[ChatTokenLogprob] = []
        """Entries of the latest tokens, which begin a character and have no text before the one that ends it"""
        self._due: deque[_Due] = deque()
        self._text = ""
        """Received text whose token is not yet complete"""
        self._pieces: list[tuple[str, Sequence[ChatTokenLogprob]]] = []
        """Texts that the reader has not given out, or not whole"""

    def split(self, delta: Delta) -> Iterator[tuple[list[int], str]]:
        """Yield single tokens with their texts, for the reader: a text may come in a later delta than its token."""
        scores = self._writer.write(delta.token_ids, delta.logprobs or ())["content"]
        for token, score in zip(delta.token_ids, scores, strict=True):
            self._await(token, score)
        self._text += delta.text
        # At the end a stop string may have cut off the text of the last tokens.
        while self._due and (self._due[0].size <= len(self._text) or delta.finish_reason is not None):
            due = self._due.popleft()
            yield [due.token], self._taken(due.size, due.scores)
        if delta.finish_reason is not None:
            yield [], self._taken(len(self._text), self._open)

    def of(self, events: Sequence[ReplyEvent], ended: bool = False) -> list[list[ChatTokenLogprob]]:
        """Return the log-probabilities of each event's text, if that is content. `ended` when no text follows.

        The reader's output comes before its held text, which stays for later events; all else was dropped.
        """
        if not events:
            return []
        raw = "".join(text for text, _ in self._pieces)
        held = 0 if ended or self._reader is None else self._reader.held
        places = _places(raw, events, len(raw) - held)
        found: list[list[ChatTokenLogprob]] = [[] for _ in events]
        kept, at = [], 0
        for text, scores in self._pieces:
            end = at + len(text)
            while places and places[-1].end <= at:
                places.pop()
            if places and places[-1].begin < end:
                found[places[-1].event] += scores
                scores = ()
            if end > len(raw) - held:
                kept.append((text[max(0, len(raw) - held - at) :], scores))
            at = end
        self._pieces = kept
        return found

    def _await(self, token: int, score: ChatTokenLogprob) -> None:
        text = self._detokenizer.push(token)
        if text:
            self._due.append(_Due(token, len(text), [*self._open, score]))
            self._open = []
            return
        self._due.append(_Due(token, 0, ()))
        if self._bytes_of[token]:
            self._open.append(score)

    def _taken(self, size: int, scores: Sequence[ChatTokenLogprob]) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if text:
            self._pieces.append((text, scores))
        return text


class _Place(NamedTuple):
    """The place in a text that the content of the `event`-th event takes."""

    begin: int
    end: int
    event: int


def _places(raw: str, events: Sequence[ReplyEvent], end: int) -> list[_Place]:
    """Return where content is in the text before `end`, the last first."""
    places = []
    for i, event in reversed(list(enumerate(events))):
        if isinstance(event, Content | Reasoning):
            begin, stop = _place(raw, event.text, end)
            places += [_Place(begin, stop, i)] * (isinstance(event, Content) and begin < stop)
            end = begin
    return places


def _place(raw: str, text: str, end: int) -> tuple[int, int]:
    """Return a text's place: at the end, or before dropped text after it; an empty place if it is missing."""
    texts = [said for said in (text, text.lstrip(WHITE)) if said]  # a parser may have put a line break before it
    for said in texts:
        if raw.endswith(said, 0, end):
            return end - len(said), end
    for said in texts:
        at = 0 if raw.startswith(said, 0, end) else raw.rfind(said, 0, end)
        if at >= 0:
            return at, at + len(said)
    return end, end
