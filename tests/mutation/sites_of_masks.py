"""The protections of masks: who may write a row's mail and when, and what the device believes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from automaton import Automaton
from mutation.tools import Site, both, replaced
from simulation import world
from simulation.scenario import VOCAB, Scenario

from gapless.kernels.layout import DRAFTED, GENERATION, LATE, LENGTH, MAIL_ALONG, MAIL_TAG
from gapless.loop import attendant
from gapless.loop.attendant import NO_TAG, MaskAttendant
from gapless.loop.loop import Loop
from gapless.loop.masks import Masks
from gapless.step.lanes.mask import MaskKey, ReplyKey
from gapless.step.mail import Mail, tag_of


def stale_mail(loop: Loop) -> None:
    """A request finds the mail of the row's last one, which had as many tokens. Lengths meet by chance alone."""
    masks, mail = loop.parts.masks, loop.launcher.executor.buffers.mail
    if masks is None:
        return  # as in engines on several devices, which take no matchers
    give_row = masks.give_row

    def with_a_ghost(key: int, row: int, generation: int, tokens: Any) -> None:
        mail.post(row, tag_of(generation - 1, len(tokens)), ~mail.new_mask())
        give_row(key, row, generation, tokens)

    masks.give_row = with_a_ghost  # type: ignore[method-assign]


def believed(known: int) -> Callable[[], AbstractContextManager[None]]:
    """The device looks at these bits of a tag alone."""

    def fetch(original: Callable[..., None], key: MaskKey, state: Any, at: Any, index: Any) -> None:
        lines, (_, places) = state.tables.state.long(), key.drafted
        expected = (lines[:, GENERATION] << 32 | lines[:, LENGTH])[:, None] + torch.arange(places)
        tags = at.mail.words.view(torch.int64)[:, MAIL_TAG // 2 :][:, :places]
        tags.copy_(torch.where((tags & known) == (expected & known), expected, tags))
        original(key, state, at, index)

    return lambda: replaced(MaskKey, "run", fetch)


def never_held() -> AbstractContextManager[None]:
    """A row whose mask is late is sampled without it."""

    def fetch(original: Callable[..., None], key: MaskKey, state: Any, at: Any, index: Any) -> None:
        original(key, state, at, index)
        state.tables.state[:, LATE].zero_()

    return replaced(MaskKey, "run", fetch)


def never_cut() -> AbstractContextManager[None]:
    """Drafts are verified where no mask has come for them."""

    def fetch(original: Callable[..., None], key: MaskKey, state: Any, at: Any, index: Any) -> None:
        drafted = state.tables.state[:, DRAFTED].clone()
        original(key, state, at, index)
        state.tables.state[:, DRAFTED].copy_(drafted)

    return replaced(MaskKey, "run", fetch)


def of_any_drafts() -> AbstractContextManager[None]:
    """A mask after drafts is believed to be of those that the row has."""

    def fetch(original: Callable[..., None], key: MaskKey, state: Any, at: Any, index: Any) -> None:
        _, places = key.drafted
        place = torch.arange(places - 1) + state.tables.state[:, LENGTH, None]
        drafts = state.tables.history.gather(1, place.clamp(max=state.tables.history.shape[1] - 1).long())
        at.mail.words[:, MAIL_ALONG : MAIL_ALONG + places - 1].copy_(drafts)
        original(key, state, at, index)

    return replaced(MaskKey, "run", fetch)


def other_drafts(loop: Loop) -> None:
    """The host is given another first draft of each row than the one that the row then has."""
    program = loop.launcher.program
    of, tables = program.of, program.tables

    def misleading(reply: Callable[..., None], key: Any, at: Any) -> None:
        place = tables.state[:, LENGTH, None].clamp(max=tables.history.shape[1] - 1).long()
        drafts = tables.history.gather(1, place)
        tables.history.scatter_(1, place, (drafts + 1) % VOCAB)
        reply(key, at)
        tables.history.scatter_(1, place, drafts)

    program.of = lambda key: partial(misleading, of(key)) if isinstance(key, ReplyKey) else of(key)  # type: ignore


def goes_on() -> AbstractContextManager[None]:
    """A matcher that has followed drafts for their masks does not go back."""
    return replaced(Automaton, "rollback", lambda original, self, count: None)


def tag_first() -> AbstractContextManager[None]:
    """A mask is written when its tag has been there for a while."""
    waiting: dict[int, tuple[int, Any]] = {}

    def post(original: Callable[..., None], self: Mail, row: int, tag: int, words: Any, *after: int) -> None:
        if any(after):
            original(self, row, tag, words, *after)
            return
        waiting[row] = tag, words.copy()
        self.tags[row, 0] = tag

    def replies(original: Callable[..., Any], self: Mail, followed: Any) -> Any:
        for row in [*waiting]:
            plain_post(self, row, *waiting.pop(row))
        return original(self, followed)

    plain_post = Mail.post
    return both(replaced(Mail, "post", post), replaced(Mail, "replies", replies))


def any_reply() -> AbstractContextManager[None]:
    """The host takes what it finds for the token that it waits for."""

    def replies(original: Callable[..., Any], self: Mail, followed: Any) -> Any:
        return original(self, np.where((followed != NO_TAG) & (self.told != 0), self.told - 1, followed))

    return replaced(Mail, "replies", replies)


def stays_behind() -> AbstractContextManager[None]:
    """A matcher whose row comes back goes on where it was, though tokens were settled that it has not followed."""

    def admitted(
        original: Callable[..., None], self: MaskAttendant, row: Any, slot: int, generation: int, tokens: Any
    ) -> None:
        row.length = max(row.length, len(tokens))
        original(self, row, slot, generation, tokens)

    return replaced(MaskAttendant, "admitted", admitted)


def late_attendant(loop: Loop) -> None:
    """The attendant looks at one step of eight, so that rows are often given up before it has read their tokens."""
    masks, looks = loop.parts.masks, itertools.count()
    if masks is None:
        return
    answer = masks.attendant.answer

    def seldom() -> None:
        if next(looks) % 8 == 0:
            answer()

    masks.attendant.answer = seldom  # type: ignore[method-assign]


def any_mask() -> AbstractContextManager[None]:
    """A mask that allows no token is posted like any other."""
    return replaced(attendant, "allows_some", lambda original, words: True)


def guesses_end_requests() -> AbstractContextManager[None]:
    """A matcher that breaks along a guess is not replaced."""

    def restore(original: Callable[..., None], self: MaskAttendant, row: Any) -> None:
        row.spare = None
        original(self, row)

    return replaced(MaskAttendant, "restore", restore)


def copies_stay_behind() -> AbstractContextManager[None]:
    """The copy of a matcher does not follow what is settled."""
    return replaced(MaskAttendant, "let_copy_follow", lambda original, self, row, tokens: None)


@contextmanager
def failures_unread() -> Iterator[None]:
    """A row whose matcher has failed is held for ever. Sound runs with such matchers take less than 150 turns."""
    with replaced(Masks, "failed", lambda original, self: []), patch.object(world, "MOST_TURNS", 250):
        yield


def fails(scenario: Scenario) -> bool:
    return any(job.fails_at is not None for job in scenario.jobs)


def masks(scenario: Scenario) -> bool:
    return any(job.automaton is not None for job in scenario.jobs)


def masked_drafts(scenario: Scenario) -> bool:
    return masks(scenario) and scenario.drafts not in (None, 1.0)


LOW = 2**32 - 1
SITES = (
    Site("a mask of the row's last request is none", 25, believed(LOW), stale_mail, stale_mail, masks),
    Site("a mask of another position is none", 1, believed(-1 - LOW), where=masks),
    Site("a row whose mask is late is held", 1, never_held, where=masks),
    Site("a draft without a mask is not verified", 1, never_cut, where=masked_drafts),
    Site("a mask after drafts is of these drafts", 1, of_any_drafts, other_drafts, other_drafts, masked_drafts),
    Site("a matcher goes back after drafts", 1, goes_on, where=masked_drafts),
    Site("a matcher that breaks along a guess ends no request", 1, guesses_end_requests, where=masked_drafts),
    Site("a matcher's copy follows what is settled", 1, copies_stay_behind, where=masked_drafts),
    Site("a mask is written before its tag", 1, tag_first, where=masks),
    Site("a reply has the tag of its token", 1, any_reply, where=masks),
    Site(
        "a matcher follows what was settled meanwhile",
        1,
        stays_behind,
        late_attendant,
        late_attendant,
        masks,
    ),
    Site("a mask that allows no token ends its request, and not as bad KV does", 16, any_mask, where=fails),
    Site("a request whose matcher fails is ended", 1, failures_unread, where=fails),
)
