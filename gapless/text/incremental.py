"""Detokenizer: text as the tokens come, never a character that a later token would change.

Two ways to the same result. A byte-level vocabulary decodes by joining bytes, so an incremental UTF-8 decoder is
exact. Any other decoder may look at neighbours, so it decodes a window: a few tokens already shown, then the new ones.

Tokens of the form <0xAB> are text as soon as they make a character, and each byte that is part of none is one U+FFFD,
as in sentencepiece. The decoder of `tokenizers` agrees for runs of whole characters; of any other run
it makes every byte one U+FFFD, the bytes of whole characters too, which cannot be known before the run ends.
"""

from __future__ import annotations

from codecs import register_error, utf_8_decode
from collections.abc import Callable, Sequence

from gapless.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
EACH = "gapless.each"
"""How bytes of no character are decoded: each one by itself"""
register_error(EACH, lambda error: (REPLACEMENT * (error.end - error.start), error.end))  # type: ignore[attr-defined]
SEED_TOKENS = 8
"""Tokens at the end of the prompt that the first new tokens are decoded after."""


class Detokenizer:
    """Text of one sequence, token by token.

    After every push, the text given out so far is a prefix of the full decode of all ids so far; the rest is
    an incomplete character. `finish` gives that rest as the full decode would. `prompt` are the tokens before the first
    one: only their tail is used, as context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        tail = [int(token) for token in prompt[-SEED_TOKENS:]]
        way = (_Bytes if tokenizer.byte_level else _Window)(tokenizer, skip_special_tokens, tail)
        self.push: Callable[[int], str] = way.push
        self.finish: Callable[[], str] = way.finish


class _Bytes:
    """Byte-level vocabularies: tokens are bytes."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, tail: list[int]) -> None:
        self._bytes = tokenizer.bytes_of[skip]
        self._texts = tokenizer.whole_text_of[skip]
        # The tail's text is the prompt's; what stays is an open character, which a last token that is text closes.
        closed = not tail or self._texts[tail[-1]]
        self._open = b"" if closed else _decode(b"".join([self._bytes[token] for token in tail]))[1]

    def push(self, token: int) -> str:
        """The text that this token settles."""
        if not self._open:
            text = self._texts[token]
            if text is not None:
                return text
        text, self._open = _decode(self._open + self._bytes[token])
        return text

    def finish(self) -> str:
        """The text that was held back; call it once, after the last push."""
        return self._open.decode(errors="replace")


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of whole characters, and the bytes of one that is still open."""
    text, used = utf_8_decode(data, "replace")
    return text, data[used:]


class _Window:
    """Detokenizer for any other vocabulary: decodes new tokens after the earlier ones, and takes the new text."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.bytes_of[skip]
        self._byte_ids = tokenizer.byte_ids
        self._held: list[int] = []
        self._open = b""
        """Bytes of a character that is not whole"""
        self._broken = False
        """The run of byte tokens so far has bytes of no character: the decoder would replace all of it."""
        tail = self._tail([token for token in tail if self._bytes[token]])
        run = len(tail)
        while run and tail[run - 1] in self._byte_ids:
            run -= 1
        self.context: list[int] = tail[:run]
        self._shown = self._text(self.context)
        for token in tail[run:]:  # the prompt may end inside a character
            self.push(token)

    def _tail(self, ids: list[int]) -> list[int]:
        """The last ids, from the beginning of a character on."""
        tail = ids[-SEED_TOKENS:]
        while tail and tail[0] in self._byte_ids and 0x80 <= self._bytes[tail[0]][0] < 0xC0:
            tail = tail[1:]
        return tail

    def _text(self, ids: list[int]) -> str:
        # Skipped and unknown ids never get here, so nothing is left to skip.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def push(self, token: int) -> str:
        """The text that this token settles."""
        if not self._bytes[token]:
            return ""
        if token in self._byte_ids:
            return self._byte(token)
        rest = self._end_run()
        self._held.append(token)
        return rest + self._settle()

    def _byte(self, token: int) -> str:
        self._held.append(token)
        self._open += self._bytes[token]
        try:
            text, used = utf_8_decode(self._open)
        except UnicodeDecodeError:
            text, used = utf_8_decode(self._open, EACH)
            self._broken = True
        self._open = self._open[used:]
        if self._broken:
            del self._held[:-SEED_TOKENS]
            return text
        return self._settle() if text else ""

    def _end_run(self) -> str:
        """The text of bytes that no later one will make a character."""
        if not self._open and not self._broken:
            return ""
        rest = REPLACEMENT * len(self._open)
        self.context = (self.context + self._held)[-SEED_TOKENS:]
        self._shown = self._text(self.context)
        self._held, self._open, self._broken = [], b"", False
        return rest

    def _settle(self) -> str:
        """The text of all held tokens, unless they end inside a character."""
        ids = self.context + self._held
        text = self._text(ids)
        if self._tokenizer.joins_bytes and text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._shown) :]
        self._advance(ids, text)
        return new

    def _advance(self, ids: list[int], text: str) -> None:
        fresh, self._held = self._held, []
        self.context, self._shown = ids, text
        # Tokens without text of their own cannot stand for all before them: a decoder may strip its first space.
        for tail in (fresh, self._tail(ids)):
            shown = self._text(tail)
            if shown:
                self.context, self._shown = tail, shown
                return

    def finish(self) -> str:
        """The text that was held back; call it once, after the last push."""
        rest = self._end_run()
        text = self._text(self.context + self._held)
        new = text[len(self._shown) :]
        self._advance([], "")
        return rest + new


def whole_text(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text that a Detokenizer gives of all ids together."""
    text = tokenizer.decode(ids, skip_special_tokens)
    if not tokenizer.byte_ids or REPLACEMENT not in text:
        return text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])
