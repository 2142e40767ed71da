"""Extras of a streamed choice beside its text: log-probabilities and token ids, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gapless.engine.outputs import Delta, TokenLogprobs
from gapless.engine.stream import OutputStream
from gapless.server.logprobs import Writer
from gapless.server.sse import Extra

_json = msgspec.json.encode

NewWriter = Callable[[OutputStream], Writer]
"""Makes the writer of one choice of that request."""


class Extras:
    """Extras of all choices of a job. `stream_of` gives the request of a choice, once it has a first Delta.

    `new_writer` is None when no log-probabilities are wanted. `chat` says where the ids of the prompt belong.
    """

    def __init__(
        self, stream_of: Callable[[int], OutputStream], new_writer: NewWriter | None, *, ids: bool, chat: bool
    ) -> None:
        self._stream_of = stream_of
        self._new_writer = new_writer
        self._ids = ids
        self._chat = chat
        self._writers: dict[int, Writer] = {}
        self._begun: set[int] = set()

    def opening(self, choice: int) -> Extra:
        """Return the extra of a chat's first chunk."""
        return Extra(top=self._prompt_ids(choice) if self._ids and self._chat else b"")

    def echoed(self, choice: int) -> Extra:
        """Return the extra of the chunk that holds the prompt."""
        stream = self._stream_of(choice)
        ids = self._once(choice) if self._ids else b""
        return Extra(self._write(choice, stream.prompt_token_ids, stream.prompt_logprobs), ids)

    def of(self, choice: int, delta: Delta) -> Extra:
        """Return the extra of a chunk with new tokens."""
        ids = self._once(choice) + b',"token_ids":%b' % _json(delta.token_ids) if self._ids else b""
        return Extra(self._write(choice, delta.token_ids, delta.logprobs), ids)

    def _once(self, choice: int) -> bytes:
        """The ids of the prompt, in the first chunk of a completion."""
        if self._chat or choice in self._begun:
            return b""
        self._begun.add(choice)
        return self._prompt_ids(choice)

    def _prompt_ids(self, choice: int) -> bytes:
        return b',"prompt_token_ids":%b' % _json(self._stream_of(choice).prompt_token_ids)

    def _write(self, choice: int, ids: Sequence[int], entries: Sequence[TokenLogprobs | None] | None) -> bytes:
        if self._new_writer is None or not ids or entries is None:
            return b"null"
        if choice not in self._writers:
            self._writers[choice] = self._new_writer(self._stream_of(choice))
        return _json(self._writers[choice].write(ids, entries))
