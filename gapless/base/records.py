"""The frozen records that pass between rooms: a request going in, a step's plan, a step's tokens coming out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gapless.base.errors import GaplessError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.speculative import MAX_DRAFTS

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
Float32s = npt.NDArray[np.float32]

NO_TOKEN, REJECTED, RIGHT = -1, -2, -3
"""Marks in place of a token: none, a wrong draft, and a right draft after the token of a row's single place"""


class Flag(IntEnum):
    """State of a row after a step, as the device reports it."""

    LIVE = 0
    """A token was sampled and the row continues."""
    STOP = 1
    """A token was sampled and it is an end-of-sequence or stop id."""
    LENGTH = 2
    """A token was sampled and it is the last that max_tokens or the context allows."""
    ERROR = 3
    """The row's logits were not finite; no token."""
    INERT = 4
    """The row had finished before this step; no token."""
    HELD = 5
    """The row got no token in this step and continues in the next."""


class Cause(StrEnum):
    """Causes of an idle device, by the rules in loop/timeline.py; metrics, dashboards and page use the names."""

    HOST_LATE = "host_late"
    NO_WORK = "no_work"
    """Nothing to do: idle, but not a bubble."""
    GRAMMAR = "grammar"
    """A step gave no row a token, since the masks of all were late."""
    COPY_WAIT = "copy_wait"
    GRAPH_MISS = "graph_miss"
    CAPTURE = "capture"
    DEPTH = "depth"
    LAUNCH = "launch"
    RANKS = "ranks"
    """A step waited for the other ranks' part of it."""


CAUSES = tuple(Cause)


class TokenTexts(NamedTuple):
    """The bytes of the tokens of a vocabulary."""

    joined: bytes
    ends: UInt32s
    """uint32 [vocab], the end of each token's bytes in `joined`"""

    def longest(self, tokens: Sequence[int]) -> int | None:
        """Return the token whose bytes begin with the bytes of all these ascending tokens; None if there is none."""
        if tokens[-1] >= len(self.ends):
            return None
        texts = [self.joined[self.ends[token - 1] if token else 0 : self.ends[token]] for token in tokens]
        longest = max(texts, key=len)
        return tokens[texts.index(longest)] if all(map(longest.startswith, texts)) else None


class Matcher(Protocol):
    """A matcher of one request's output against its form: it allows the next tokens. One thread at a time calls it."""

    texts: TokenTexts | None
    """Texts of the tokens of its vocabulary; None where an output has no text"""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take over tokens that were sampled, each allowed by the mask of its place."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""

    def copy(self) -> Matcher:
        """Return another that has followed the same tokens."""
        ...

    def write_mask(self, words: Int32s) -> None:
        """Write the tokens that may come next, int32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 is token i.

        Once the output is complete, only tokens that end the request are left. Some token always is.
        """


class MatcherFunctions(NamedTuple):
    """Addresses of the C functions of a matcher; the first argument of each is the matcher, as a void*."""

    consume: int
    """int32 (matcher, uint32 token): 0 when the token was allowed"""
    write_mask: int
    """int32 (matcher, uint32* words, size_t bytes): 0 when some token is allowed"""
    rollback: int
    """int32 (matcher, size_t count): 0 when the last tokens are forgotten"""
    accepts: int
    """bool (matcher): whether the output may end here"""
    error: int
    """const char* (matcher): null without an error"""
    copy: int
    """void* (matcher): another that has followed the same tokens"""
    free: int
    """void (matcher)"""


class NativeMatcher(Protocol):
    """A Matcher that needs no interpreter; if it accepts, the request's `stop_ids` are allowed too."""

    texts: TokenTexts | None
    lexer: tuple[int, int]
    """Shared with other matchers and used by one thread at a time: number of the form, and number within the form"""

    def give_away(self) -> tuple[MatcherFunctions, int]:
        """Return the functions, and the address of the matcher, which the caller now owns."""
        ...

    def failure(self, reason: str) -> RequestError:
        """Return the error of an output that no token can continue, for this reason of a function."""
        ...


class KVTransfer(NamedTuple):
    """A request's settings for KV pages shared with other engines."""

    offer: str = ""
    """Name that peers ask for to get the pages of its prompt; empty: none."""
    claim: str = ""
    """Name that a peer gives to pages of its prompt"""
    peer: str = ""
    """Which peer does, as base.peers.PeerAddress writes it; empty for whichever"""


NO_TRANSFER = KVTransfer()


class Request(NamedTuple):
    """A sequence to generate, as the loop sees it: resolved and range-checked.

    `key` is ours, 64 bits, never reused. `stop_ids` holds the end-of-sequence ids too, unless ignored.
    `min_len` and `max_len` count prompt and output together.
    """

    key: int
    tokens: Int32s
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    min_len: int
    max_len: int
    priority: int = 0
    salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The tokens of params.bad_words."""
    adapter: str = ""
    """The name of its adapter, and in the loop its digest; empty for none"""
    processors: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The numbers of params.logits_processors among the engine's, and what each is given."""
    transfer: KVTransfer = NO_TRANSFER
    output: Int32s | None = None
    """Tokens from an engine that died: a later engine continues them; None for a new request"""
    matcher: Matcher | None = None
    """Matcher of the allowed tokens, if params.masked_by names a parameter that asks for it."""

    @property
    def known(self) -> Int32s:
        """Return the tokens of its prompt and its output."""
        return self.tokens if self.output is None else np.concatenate((self.tokens, self.output))

    @property
    def most_drafts(self) -> int:
        """Most drafts in a step: none if a user's function sees each token."""
        sees = self.processors or self.params.prefix_allowed_tokens_fn is not None
        return MAX_DRAFTS if self.params.speculate and not sees else 0


class Admission(NamedTuple):
    """A row begins to serve a request. The first `start` of `length` known tokens have their KV already, the last
    `loaded` of these from a tier."""

    row: int
    generation: int
    key: int
    start: int
    length: int
    loaded: int = 0


class Chunk(NamedTuple):
    """`size` known tokens of a row, from position `start`, run in this step. `last` samples a token."""

    row: int
    start: int
    size: int
    last: bool


NO_TOKENS: Int32s = np.zeros(0, np.int32)


class PageChange(IntEnum):
    """Kinds of PageEvent."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2
    """Everything that was stored before, in every group, counts as removed."""


class MoveOrder(NamedTuple):
    """A transfer of pages between a device and the host, for every rank of an engine: each moves its parts."""

    stores: bool
    """Whether it goes from the device to the host"""
    number: int
    """Number of the transfer in its direction"""
    after: int
    """Number of the engine's first steps that have ended on a rank before it begins"""
    counts: tuple[tuple[int, int], ...]
    """Page groups and their numbers of pages"""
    places: bytes
    """int32: sources, then destinations, of each group's pages"""


class PageEvent(NamedTuple):
    """One change of the prefix index; changes of consecutive pages are one event."""

    change: PageChange
    group: int = 0
    digests: tuple[bytes, ...] = ()
    parent: bytes | None = None
    """Digest of the page in front of the first stored one; None where that begins a sequence"""
    tokens: Int32s = NO_TOKENS
    """Tokens of the stored pages"""
    salt: str = ""
    adapter: str = ""
    window: int = 0
    """Tokens that a layer of the group reads; 0 for all"""


class PageWrite(NamedTuple):
    """The row's page table holds `page` at `entry` of the group's part from this step on."""

    row: int
    entry: int
    page: int
    group: int = 0


class StepPlan(NamedTuple):
    """Everything the host decides about one step; integers only.

    The batch order is: decode rows, then chunks that sample, then the other chunks.
    `decode` is the same tuple object as in the last step while its rows are the same.
    `bound` is an upper bound of the KV length of any decode row after this step.
    """

    step: int
    decode: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    admissions: tuple[Admission, ...]
    pages: tuple[PageWrite, ...]
    bound: int

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that run in this step."""
        return sum([chunk.size for chunk in self.chunks]) if self.chunks else 0


class StepLogprobs(NamedTuple):
    """Log-probabilities that one observed step settled: M scored tokens, in ascending order within a request.

    They are of the raw logits, natural, and may be -inf; never NaN.
    """

    keys: Int64s
    """[M]"""
    positions: Int32s
    """[M] place of the scored token in prompt and output together, 1 and up"""
    logprobs: Float32s
    """[M] of the scored token"""
    ranks: Int32s
    """[M] of the scored token in the whole vocabulary, 1 is the most likely"""
    top_ids: Int32s
    """[M, K] the most likely tokens, best first; -1 past the end of a small vocabulary"""
    top_logprobs: Float32s
    """[M, K]"""


class StepTokens(NamedTuple):
    """Tokens that an observed step settled, a line for each live row. A request that ended has its flag."""

    step: int
    keys: Int64s
    tokens: Int32s
    """[N], or [N, W] if rows may get several: negative after a row's last token"""
    flags: Int32s
    logprobs: StepLogprobs | None = None
    """Log-probabilities of the sampled tokens, and of prompt tokens that ran in the step; None if no row asked."""

    def entries(self) -> Iterable[tuple[int, int, int]]:
        """(key, token, flag) of each token: all but a row's last are live. One that failed has a negative token."""
        lines = zip(self.keys.tolist(), self.tokens.tolist(), self.flags.tolist(), strict=True)
        return lines if self.tokens.ndim == 1 else _one_by_one(lines)


class Turn(NamedTuple):
    """The result of one turn of the loop."""

    started: list[tuple[int, int]]
    """(key, prompt tokens that came from the prefix index) of requests that left the queue, for the first time or
    again."""
    tokens: list[StepTokens]
    failed: list[tuple[int, GaplessError]]
    """Requests that the back ended by itself, by key, and why"""


def _one_by_one(lines: Iterable[tuple[int, list[int], int]]) -> Iterator[tuple[int, int, int]]:
    for key, tokens, flag in lines:
        *before, last = [token for token in tokens if token >= 0] or tokens[:1]
        for token in before:
            yield key, token, int(Flag.LIVE)
        yield key, last, flag
