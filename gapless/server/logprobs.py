"""Log-probabilities and token ids in the shapes of the API, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from gapless.engine.outputs import Logprob, TokenLogprobs
from gapless.text.incremental import Detokenizer
from gapless.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatLogprob, frozen=True):
    top_logprobs: list[ChatLogprob]


class CompletionWriter:
    """Log-probabilities as in /v1/completions. `prompt` are the tokens before the completion; with an `echo`, the
    prompt's text, they are written too, before all others.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt: Sequence[int], echo: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
        self._offset = 0
        self._echoed = iter(() if echo is None else echo_offsets(tokenizer, prompt, echo))
        self._echo_size = len(echo or "")

    def write(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return lists with an entry per token; the first of a prompt has neither probability nor alternatives.

        `text_offset` counts characters of the choice's text in front of the token; for a part of a character, in
        front of that one.
        """
        offsets = [self._place(token) for token in ids]
        chosen = [_floored(entry[token]) if entry else None for token, entry in zip(ids, entries, strict=True)]
        return {
            "text_offset": offsets,
            "token_logprobs": chosen,
            "tokens": [token_text(self._tokenizer, token) for token in ids],
            "top_logprobs": [self._named(entry) if entry else None for entry in entries],
        }

    def _place(self, token: int) -> int:
        """The offset of the next token."""
        at = next(self._echoed, None)
        if at is not None:
            return at
        at = self._offset
        self._offset += len(self._detokenizer.push(token))
        return self._echo_size + at

    def _named(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return alternatives by text. Several tokens may have the same text: all but the first go by their id."""
        named: dict[str, float] = {}
        for token, logprob in entry.items():
            text = token_text(self._tokenizer, token)
            named[f"token_id:{token}" if text in named else text] = _floored(logprob)
        return named


def echo_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> Iterator[int]:
    """Yield where in the text of a prompt each token is. A special token has a place of its own if it was sent."""
    detokenizer, at = Detokenizer(tokenizer), 0
    for token in prompt:
        yield at
        at += len(detokenizer.push(token))
        if token in tokenizer.special_ids and text.startswith(tokenizer.token_str(token), at):
            at += len(tokenizer.token_str(token))


class ChatWriter:
    """Log-probabilities as in /v1/chat/completions, with the `top` most likely tokens."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def write(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list[ChatTokenLogprob]]:
        return {"content": [self._token(token, entry) for token, entry in zip(ids, entries, strict=True) if entry]}

    def _token(self, token: int, entry: TokenLogprobs) -> ChatTokenLogprob:
        likely = sorted(entry, key=lambda other: entry[other].rank)[: self._top]
        top = [ChatLogprob(*self._parts(other, entry[other])) for other in likely]
        return ChatTokenLogprob(*self._parts(token, entry[token]), top)

    def _parts(self, token: int, logprob: Logprob) -> tuple[str, float, list[int]]:
        data = self._tokenizer.bytes_of[False][token]
        return token_text(self._tokenizer, token), _floored(logprob), list(data)


Writer = CompletionWriter | ChatWriter
"""Writes one choice's log-probabilities, in the order of its tokens."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token's own text, or its bytes as `bytes:\\xe2\\x82` where they are not whole characters."""
    data = tokenizer.bytes_of[False][token]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_entries(entries: Iterable[TokenLogprobs | None]) -> list[dict[int, Any] | None]:
    """The extension prompt_logprobs: by token id."""
    return [entry and {token: _spelt(logprob) for token, logprob in entry.items()} for entry in entries]


def _spelt(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _floored(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _floored(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
