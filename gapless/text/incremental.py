"""Detokenizer: text as the tokens come, never a character that a later token would change.

Two ways to the same result. A byte-level vocabulary decodes by joining bytes, so an incremental UTF-8 decoder is
exact. Any other decoder may look at neighbours, so it decodes a window: a few tokens already shown, then the new ones.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence

from gapless.text.tokenizer import Tokenizer
from gapless.text.tokens import byte_token

REPLACEMENT = "\ufffd"
SEED_TOKENS = 8
"""Tokens at the end of the prompt that the first new tokens are decoded after."""


class Detokenizer:
    """Text of one sequence, token by token.

    After every push, the text given out so far is a prefix of the full decode of all ids so far; what is missing is
    an incomplete character, or a run of byte tokens that is still open. `finish` gives that rest as the full decode
    would. `prompt` are the tokens before the first one: only their tail is used, as context.
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
    """Detokenizer for any other vocabulary: decodes new tokens after those before them, and takes what is new."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.bytes_of[skip]
        tail = [token for token in tail if self._bytes[token]]
        while tail and self._is_byte(tail[-1]):
            tail.pop()  # a run of bytes cut here would decode differently with and without what follows
        self.context: list[int] = tail
        self._shown = self._text(tail)
        self._held: list[int] = []

    def _is_byte(self, token: int) -> bool:
        return byte_token(self._tokenizer.token_str(token)) is not None

    def _text(self, ids: list[int]) -> str:
        # Skipped and unknown ids never get here, so nothing is left to skip.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def push(self, token: int) -> str:
        """The text that this token settles."""
        if not self._bytes[token]:
            return ""
        self._held.append(token)
        return "" if self._is_byte(token) else self._settle()

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
        for tail in (fresh, ids[-SEED_TOKENS:]):
            shown = self._text(tail)
            if shown:
                self.context, self._shown = tail, shown
                return

    def finish(self) -> str:
        """The text that was held back; call it once, after the last push."""
        text = self._text(self.context + self._held)
        new = text[len(self._shown) :]
        self._advance([], "")
        return new
