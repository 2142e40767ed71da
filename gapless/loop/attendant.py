"""The attendant's side of masks: it runs the matchers that need the interpreter, one after another.

Masks after drafts are made last, and a row without them runs without these drafts. Matchers follow drafts for their
masks alone, and roll back. If the form leaves only one text, they continue along its tokens, which become the drafts of
a later step. They look ahead only while no token waits for its own mask, and a matcher that fails there is replaced by
a copy that has not: a guess ends no request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.records import Int32s, Matcher, NativeMatcher, Request, TokenTexts
from gapless.loop.records import MaskCounts
from gapless.step.mail import Mail, tag_of

log = logging.getLogger("gapless.loop")

NO_TAG = -(2**62)
"""Tag of a row without a Python matcher"""
NARROW = 16
"""Most tokens of a mask that are compared for a common text"""


class MaskedRow:
    """A request with a matcher. After `begin`, only the attendant uses it."""

    def __init__(self, request: Request, drafts: int) -> None:
        """`drafts` is the most drafts of a step."""
        assert request.matcher is not None
        self.drafts = drafts
        self.key = request.key
        self.matcher: Matcher = request.matcher
        self.name = request.params.masked_by
        """Request field named in errors"""
        self.length = len(request.tokens)
        """Tokens the matcher has followed, the prompt included."""
        self.slot = self.generation = 0
        """Row of the tables and of the mail, and the row's generation"""
        self.spare: Matcher | None = None
        """Copy of the matcher that has never looked ahead, made at the first look"""


class MaskAttendant:
    """Answers new tokens with masks. The loop's thread appends to `news`; everything else runs on the attendant."""

    def __init__(self, mail: Mail, threads: Any = None) -> None:
        """`threads` are MaskThreads for native matchers, which post its masks too."""
        self.mail, self.threads = mail, threads
        self.news: deque[Callable[[], None]] = deque()
        self.failed: deque[tuple[int, RequestError]] = deque()
        self.counts = MaskCounts()
        self.began = 0
        """Start of the running matcher; 0: none"""
        self._serving: dict[int, MaskedRow] = {}
        """Requests by row of the tables. A failed one stays until it ends, or its row is reused."""
        self._followed = np.full(len(mail.told), NO_TAG, np.int64)
        """Tag of the last token that the matcher of each row of the tables followed"""
        self._words = mail.new_mask()
        """The mask being made"""
        self._ahead: dict[int, list[int]] = {}
        """Drafts of rows that are to look ahead, by row"""
        self._settled: deque[tuple[MaskedRow, list[int]]] = deque()
        """Tokens for the copies of these rows' matchers"""

    def ring(self) -> None:
        """Have threads that do not poll look for tokens."""
        if self.threads and not self.threads.polls:
            self.threads.ring()

    def answer(self) -> None:
        """Take in the news and answer every new token; then look ahead until another arrives."""
        self._reply()
        while self._ahead:
            slot, drafts = next(iter(self._ahead.items()))
            if self._look_ahead(self._serving[slot], drafts):
                self._ahead.pop(slot, None)
            else:
                self._reply()

    def _reply(self) -> None:
        now = time.monotonic_ns()
        self.ring()
        while self.news:
            self.news.popleft()()
        for slot, tokens, drafts in self.mail.replies(self._followed):
            self._go_on(self._serving[slot], now, tokens, drafts)
        while self._settled:
            self.let_copy_follow(*self._settled.popleft())

    def admitted(self, row: MaskedRow, slot: int, generation: int, tokens: Int32s) -> None:
        self.forget(row)  # in its former slot
        row.slot, row.generation = slot, generation
        self._serving[slot] = row
        self._ahead.pop(slot, None)  # of the slot's former row
        self._go_on(row, time.monotonic_ns(), tokens[row.length :].tolist(), [])

    def _go_on(self, row: MaskedRow, since: int, tokens: list[int], drafts: list[int]) -> None:
        """Advance the matcher by these tokens, and post the mask of the next one."""
        self.ring()  # native matchers do not wait for this one
        self.began = time.monotonic_ns()
        try:
            if tokens:
                row.matcher.advance(tokens)
            row.length += len(tokens)
            self._post(row)
            self.counts.written += 1
            self.counts.ns += time.monotonic_ns() - since
        except BaseException as error:
            self._fail(row, error)
            return
        finally:
            self.began = 0
        self._followed[row.slot] = tag_of(row.generation, row.length)
        self._settled.append((row, tokens))
        if row.drafts:
            self._ahead[row.slot] = drafts

    def let_copy_follow(self, row: MaskedRow, tokens: list[int]) -> None:
        """Advance the copy by these tokens: after the masks of all rows, and before a row looks ahead."""
        self.began = time.monotonic_ns()
        try:
            if row.spare is not None and tokens:
                row.spare.advance(tokens)
        except BaseException as error:
            self._look_no_more(row, error)
        finally:
            self.began = 0

    def _look_no_more(self, row: MaskedRow, error: BaseException) -> None:
        """Drop guess and copy after a failure; the row continues without."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        log.warning("a matcher failed along a guess, its row runs without: %s", error)
        row.spare, row.drafts = None, 0
        if self._serving.get(row.slot) is row:
            self._ahead.pop(row.slot, None)

    def _fail(self, row: MaskedRow, error: BaseException) -> None:
        """End the row's request; a library's panic is no Exception."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error  # the device is closed
        # Without a mask the device holds the row until the loop removes it.
        self.forget(row)
        if not isinstance(error, RequestError):
            error = failure_of(row, f"the matcher failed: {type(error).__name__}: {error}")
        self.failed.append((row.key, error))

    def _post(self, row: MaskedRow) -> None:
        row.matcher.write_mask(self._words)
        if not allows_some(self._words):
            raise failure_of(row, "the grammar allows no token")
        self._send(row, tag_of(row.generation, row.length))

    def _send(self, row: MaskedRow, tag: int, place: int = 0, draft: int = 0) -> None:
        """Post the mask after `place` drafts, the last of them `draft`."""
        if self.threads:
            self.threads.post(row.key, row.slot, tag, self._words, place, draft)
        else:
            self.mail.post(row.slot, tag, self._words, place, draft)

    def _look_ahead(self, row: MaskedRow, drafts: list[int]) -> bool:
        """Post the masks that this row may need next. Returns False if a token waits for its own mask."""
        self.began = time.monotonic_ns()
        try:
            if row.spare is None:
                row.spare = row.matcher.copy()
            return self._go_ahead(row, drafts)
        except BaseException as error:
            self.restore(row)
            self._look_no_more(row, error)
            return True
        finally:
            self.began = 0

    def restore(self, row: MaskedRow) -> None:
        """Use the copy of a matcher that failed along a guess, if there is one."""
        row.matcher = row.matcher if row.spare is None else row.spare

    def _go_ahead(self, row: MaskedRow, drafts: list[int]) -> bool:
        """Post the masks after each draft, up to the first that is not allowed or ends the text. Then post the expected
        tokens: these drafts, and the tokens after them as long as the form leaves one text."""
        tag, run = tag_of(row.generation, row.length), list[int]()
        self._words[:] = self.mail.mask_of(row.slot)
        quiet = self._post_along(row, tag, drafts, run)
        known = len(run)
        while quiet and len(run) <= known + row.drafts:
            if (token := expected_next(self._words, row.matcher.texts)) is None:
                break
            self._follow(row, token, run)
            quiet = not self._called
        if quiet and len(run) > known:
            if self.threads:
                self.threads.post_ahead(row.key, row.slot, tag, run)
            else:
                self.mail.post_ahead(row.slot, tag, run)
        if run:
            row.matcher.rollback(len(run))
        return quiet

    def _post_along(self, row: MaskedRow, tag: int, drafts: list[int], run: list[int]) -> bool:
        """Post the masks after drafts, and append the followed ones to `run`. Returns False if a token waits."""
        for draft in drafts:
            if not self._words[draft // 32] >> draft % 32 & 1:
                break
            self._follow(row, draft, run)
            if self._called:
                return False
            if not allows_some(self._words):
                break
            self._send(row, tag, len(run), draft)
        return True

    def _follow(self, row: MaskedRow, token: int, run: list[int]) -> None:
        row.matcher.advance([token])
        run.append(token)
        row.matcher.write_mask(self._words)

    @property
    def _called(self) -> bool:
        """Whether news or tokens wait."""
        return bool(self.news) or self.mail.replied(self._followed)

    def forget(self, row: MaskedRow) -> None:
        if self._serving.get(row.slot) is row:
            del self._serving[row.slot]
            self._ahead.pop(row.slot, None)
            self._followed[row.slot] = NO_TAG


def allows_some(words: Int32s) -> bool:
    """Return whether a mask allows any token: without, the row would fail as if its KV were bad."""
    return bool(words.any())


def expected_next(words: Int32s, texts: TokenTexts | None) -> int | None:
    """Return the only token that a mask allows, or the longest if all others begin it: the text is certain.

    None if the text is open, or the mask allows more than NARROW tokens.
    """
    where = words.nonzero()[0][: NARROW + 1]
    if not 0 < len(where) <= NARROW:
        return None
    bits = np.unpackbits(words[where].view(np.uint8), bitorder="little").nonzero()[0]
    tokens = (where[bits // 32] * 32 + bits % 32).tolist()
    if len(tokens) == 1:
        return int(tokens[0])
    return texts.longest(tokens) if texts is not None and len(tokens) <= NARROW else None


def as_native(matcher: Matcher | None) -> NativeMatcher | None:
    """Return the matcher if it is native. A runtime check of the protocol would take as long as the rest of a form."""
    return cast(NativeMatcher, matcher) if hasattr(matcher, "give_away") else None


def failure_of(row: MaskedRow, reason: str) -> RequestError:
    native = as_native(row.matcher)
    return RequestError(f"{row.name}: {reason}", row.name) if native is None else native.failure(reason)
